// GEMMs through cuBLASLt, without its split-K algorithms. The others add in one chain; certification checks that it is the
// contract's. Plain C interface. cuBLASLt is opened at run time (the copy that torch loaded), so nothing links against CUDA.
#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#define RLK_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

#define RLK_FUNCTIONS(F)                                                                                             \
  F(cublasLtCreate)                                                                                                  \
  F(cublasLtGetVersion)                                                                                              \
  F(cublasLtGetStatusString)                                                                                         \
  F(cublasLtMatmul)                                                                                                  \
  F(cublasLtMatmulAlgoCheck)                                                                                         \
  F(cublasLtMatmulAlgoConfigGetAttribute)                                                                            \
  F(cublasLtMatmulAlgoConfigSetAttribute)                                                                            \
  F(cublasLtMatmulAlgoGetHeuristic)                                                                                  \
  F(cublasLtMatmulAlgoInit)                                                                                          \
  F(cublasLtMatmulDescCreate)                                                                                        \
  F(cublasLtMatmulDescDestroy)                                                                                       \
  F(cublasLtMatmulDescSetAttribute)                                                                                  \
  F(cublasLtMatrixLayoutCreate)                                                                                      \
  F(cublasLtMatrixLayoutDestroy)                                                                                     \
  F(cublasLtMatrixLayoutSetAttribute)                                                                                \
  F(cublasLtMatmulPreferenceCreate)                                                                                  \
  F(cublasLtMatmulPreferenceDestroy)                                                                                 \
  F(cublasLtMatmulPreferenceSetAttribute)

struct Library {
#define RLK_MEMBER(name) decltype(&::name) name = nullptr;
  RLK_FUNCTIONS(RLK_MEMBER)
#undef RLK_MEMBER
  bool loaded = false;
};

Library lt;
std::mutex mutex;
thread_local char message[512] = "";
thread_local int32_t last_status = 0;

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  last_status = 0;
}

bool succeeded(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return true;
  const char* text = lt.cublasLtGetStatusString ? lt.cublasLtGetStatusString(status) : nullptr;
  fail("%s: %s (status %d)", call, text ? text : "unknown status", static_cast<int>(status));
  last_status = static_cast<int32_t>(status);
  return false;
}

#define RLK_CALL(name, ...) succeeded(lt.name(__VA_ARGS__), #name)

// dtype codes of the CPU library: 0 float32, 1 bfloat16, 2 float16.
cudaDataType_t data_type(int32_t code) { return code == 0 ? CUDA_R_32F : code == 1 ? CUDA_R_16BF : CUDA_R_16F; }

// An explicit algorithm: its id, then its configuration, as cuBLASLt numbers them.
enum { kId, kTile, kStages, kCluster, kCustom, kSwizzle, kInner, kSettings };
using Settings = std::array<int32_t, kSettings>;

// A GEMM without its pointers, and how its algorithm is selected. A plan may later run with other m and k.
struct Shape {
  int32_t device;
  int64_t m, n, k;
  int64_t batch;         // strided batch: each GEMM contracts the next k elements of the K dimension
  int64_t a_row, b_row;  // elements from one stored row to the next
  int32_t a_by_k;        // a is stored [K, M]; else [M, K]
  int32_t b_by_n;        // b is stored [N, K]; else [K, N]
  int32_t dtype, out_dtype, bias;
  int32_t rank;  // index among the heuristic's results; negative: `settings` name the algorithm
  Settings settings;
  auto key() const {
    return std::tie(device, m, n, k, batch, a_row, b_row, a_by_k, b_by_n, dtype, out_dtype, bias, rank, settings);
  }
  bool operator<(const Shape& other) const { return key() < other.key(); }
};

struct Plan {
  Shape shape;
  cublasLtHandle_t handle;
  cublasLtMatmulAlgo_t algorithm;
  int64_t workspace;
  char text[160];
};

// Descriptors of one call. Row-major out [M, N] is column-major [N, M], so b comes first.
struct Call {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t b = nullptr, a = nullptr, out = nullptr;

  ~Call() {
    if (product) lt.cublasLtMatmulDescDestroy(product);
    for (cublasLtMatrixLayout_t layout : {b, a, out})
      if (layout) lt.cublasLtMatrixLayoutDestroy(layout);
  }

  bool layout(cublasLtMatrixLayout_t* to, const Shape& s, int32_t dtype, int64_t rows, int64_t columns, int64_t lead,
              int64_t step) {
    if (!RLK_CALL(cublasLtMatrixLayoutCreate, to, data_type(dtype), static_cast<uint64_t>(rows),
                  static_cast<uint64_t>(columns), lead))
      return false;
    if (s.batch == 1) return true;
    const int32_t count = static_cast<int32_t>(s.batch);
    return RLK_CALL(cublasLtMatrixLayoutSetAttribute, *to, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count) &&
           RLK_CALL(cublasLtMatrixLayoutSetAttribute, *to, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step,
                    sizeof step);
  }

  bool make(const Shape& s, int64_t m, int64_t k, const void* bias) {
    const cublasOperation_t transpose = CUBLAS_OP_T, plain = CUBLAS_OP_N;
    if (!RLK_CALL(cublasLtMatmulDescCreate, &product, CUBLAS_COMPUTE_32F, CUDA_R_32F)) return false;
    const cublasOperation_t op_b = s.b_by_n ? transpose : plain, op_a = s.a_by_k ? transpose : plain;
    if (!RLK_CALL(cublasLtMatmulDescSetAttribute, product, CUBLASLT_MATMUL_DESC_TRANSA, &op_b, sizeof op_b) ||
        !RLK_CALL(cublasLtMatmulDescSetAttribute, product, CUBLASLT_MATMUL_DESC_TRANSB, &op_a, sizeof op_a))
      return false;
    if (s.bias) {  // same dtype as out; certification checks that it is added in fp32 before rounding
      const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
      const int32_t type = data_type(s.out_dtype);
      if (!RLK_CALL(cublasLtMatmulDescSetAttribute, product, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                    sizeof epilogue) ||
          !RLK_CALL(cublasLtMatmulDescSetAttribute, product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type) ||
          !RLK_CALL(cublasLtMatmulDescSetAttribute, product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias))
        return false;
    }
    const bool b_made = s.b_by_n ? layout(&b, s, s.dtype, k, s.n, s.b_row, k)
                                 : layout(&b, s, s.dtype, s.n, k, s.b_row, k * s.b_row);
    const bool a_made = s.a_by_k ? layout(&a, s, s.dtype, m, k, s.a_row, k * s.a_row)
                                 : layout(&a, s, s.dtype, k, m, s.a_row, k);
    return b_made && a_made && layout(&out, s, s.out_dtype, s.n, m, s.n, m * s.n);
  }
};

// One handle per device: a handle belongs to the device that is current when it is created.
cublasLtHandle_t handle_of(int32_t device) {
  static std::map<int32_t, cublasLtHandle_t> handles;
  auto found = handles.find(device);
  if (found != handles.end()) return found->second;
  cublasLtHandle_t handle = nullptr;
  if (!RLK_CALL(cublasLtCreate, &handle)) return nullptr;
  return handles[device] = handle;
}

template <class T>
T setting(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t name) {
  T value = 0;
  size_t written = 0;
  if (lt.cublasLtMatmulAlgoConfigGetAttribute(&algorithm, name, &value, sizeof value, &written) !=
      CUBLAS_STATUS_SUCCESS)
    return 0;
  return value;
}

bool is_unsplit(const cublasLtMatmulAlgo_t& algorithm) {
  return setting<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1 &&
         setting<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) == CUBLASLT_REDUCTION_SCHEME_NONE;
}

// Does not set 0, the default of every setting, because the algorithm may not support the setting.
template <class T>
bool set(cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t name, T value) {
  return value == 0 || RLK_CALL(cublasLtMatmulAlgoConfigSetAttribute, &algorithm, name, &value, sizeof value);
}

// Configures the algorithm named by the settings, if cuBLASLt supports it for this product.
bool configure(Plan& plan, const Call& call, int64_t most_workspace) {
  const Settings& to = plan.shape.settings;
  const cudaDataType_t type = data_type(plan.shape.dtype), out = data_type(plan.shape.out_dtype);
  cublasLtMatmulAlgo_t& algorithm = plan.algorithm;
  if (!RLK_CALL(cublasLtMatmulAlgoInit, plan.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, type, type, out, out, to[kId],
                &algorithm) ||
      !set<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, to[kTile]) ||
      !set<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID, to[kStages]) ||
      !set<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, to[kSwizzle]) ||
      !set<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, to[kCustom]) ||
      !set<uint16_t>(algorithm, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, to[kInner]) ||
      !set<uint16_t>(algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, to[kCluster]))
    return false;
  if (!is_unsplit(algorithm)) {
    fail("algorithm %d splits K", to[kId]);
    return false;
  }
  cublasLtMatmulHeuristicResult_t found{};
  if (!RLK_CALL(cublasLtMatmulAlgoCheck, plan.handle, call.product, call.b, call.a, call.out, call.out, &algorithm,
                &found))
    return false;
  plan.workspace = static_cast<int64_t>(found.workspaceSize);
  if (plan.workspace <= most_workspace) return true;
  fail("the algorithm needs a workspace of %lld bytes", static_cast<long long>(plan.workspace));
  return false;
}

// Takes result number `rank` of the heuristic among those without split-K.
bool query_heuristic(Plan& plan, const Call& call, int64_t most_workspace) {
  cublasLtMatmulPreference_t preference = nullptr;
  if (!RLK_CALL(cublasLtMatmulPreferenceCreate, &preference)) return false;
  std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, cublasStatus_t (*)(cublasLtMatmulPreference_t)> guard(
      preference, lt.cublasLtMatmulPreferenceDestroy);
  const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE, alignment = 16;
  const uint64_t bytes = static_cast<uint64_t>(most_workspace);
#define RLK_PREFER(name, value) \
  RLK_CALL(cublasLtMatmulPreferenceSetAttribute, preference, CUBLASLT_MATMUL_PREF_##name, &value, sizeof value)
  if (!RLK_PREFER(REDUCTION_SCHEME_MASK, schemes) || !RLK_PREFER(MAX_WORKSPACE_BYTES, bytes) ||
      !RLK_PREFER(MIN_ALIGNMENT_A_BYTES, alignment) || !RLK_PREFER(MIN_ALIGNMENT_B_BYTES, alignment) ||
      !RLK_PREFER(MIN_ALIGNMENT_C_BYTES, alignment) || !RLK_PREFER(MIN_ALIGNMENT_D_BYTES, alignment))
    return false;
#undef RLK_PREFER
  std::vector<cublasLtMatmulHeuristicResult_t> found(16);
  int count = 0;
  if (!RLK_CALL(cublasLtMatmulAlgoGetHeuristic, plan.handle, call.product, call.b, call.a, call.out, call.out,
                preference, static_cast<int>(found.size()), found.data(), &count))
    return false;
  int32_t rank = 0;
  for (int i = 0; i < count; ++i) {
    if (found[i].state != CUBLAS_STATUS_SUCCESS || !is_unsplit(found[i].algo) || rank++ < plan.shape.rank) continue;
    plan.algorithm = found[i].algo;
    plan.workspace = static_cast<int64_t>(found[i].workspaceSize);
    return true;
  }
  fail("cuBLASLt offers %d algorithms without split-K here, number %d was requested", rank, plan.shape.rank);
  return false;
}

bool select_algorithm(Plan& plan, int64_t most_workspace) {
  const Shape& s = plan.shape;
  Call call;
  alignas(16) static const char placeholder[16] = {};  // for the bias, which is read only when the GEMM runs
  if (!call.make(s, s.m, s.k, placeholder)) return false;
  if (!(s.rank < 0 ? configure : query_heuristic)(plan, call, most_workspace)) return false;
  std::snprintf(plan.text, sizeof plan.text, "algorithm %d, tile %u, stages %u, swizzle %u, custom %u, inner %u, cluster %u",
                setting<int32_t>(plan.algorithm, CUBLASLT_ALGO_CONFIG_ID),
                setting<uint32_t>(plan.algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID),
                setting<uint32_t>(plan.algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID),
                setting<uint32_t>(plan.algorithm, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),
                setting<uint32_t>(plan.algorithm, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
                setting<uint16_t>(plan.algorithm, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID),
                setting<uint16_t>(plan.algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID));
  return true;
}

}  // namespace

// Message of this thread's last failed call.
RLK_EXPORT const char* rlk_lt_error() { return message; }

// cuBLASLt's status in that call; 0 if another part failed.
RLK_EXPORT int32_t rlk_lt_status() { return last_status; }

// Opens cuBLASLt at `path`. 0: success, 1: see rlk_lt_error.
RLK_EXPORT int32_t rlk_lt_open(const char* path) {
  std::lock_guard<std::mutex> lock(mutex);
  if (lt.loaded) return 0;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    fail("%s", dlerror());
    return 1;
  }
#define RLK_FIND(name)                                                        \
  lt.name = reinterpret_cast<decltype(lt.name)>(dlsym(library, #name));       \
  if (!lt.name) {                                                             \
    fail("%s has no function " #name, path);                                  \
    return 1;                                                                 \
  }
  RLK_FUNCTIONS(RLK_FIND)
#undef RLK_FIND
  lt.loaded = true;
  return 0;
}

RLK_EXPORT int64_t rlk_lt_version() { return lt.loaded ? static_cast<int64_t>(lt.cublasLtGetVersion()) : -1; }

// The plan of a shape on the current device, which must be `device`; cached. `settings` (as `Settings`) names the algorithm;
// null takes the heuristic's result number `rank`. Returns null on failure, see rlk_lt_error. Launches nothing, so it may
// run under graph capture.
RLK_EXPORT const void* rlk_lt_plan(int32_t device, int64_t m, int64_t n, int64_t k, int64_t batch, int64_t a_row,
                                   int64_t b_row, int32_t a_by_k, int32_t b_by_n, int32_t dtype, int32_t out_dtype,
                                   int32_t bias, int32_t rank, const int32_t* settings,
                                   int64_t most_workspace) {
  static std::map<Shape, std::unique_ptr<Plan>> plans;
  std::lock_guard<std::mutex> lock(mutex);
  if (!lt.loaded) {
    fail("cuBLASLt is not open");
    return nullptr;
  }
  Shape shape{device, m, n, k, batch, a_row, b_row, a_by_k, b_by_n, dtype, out_dtype, bias, settings ? -1 : rank, {}};
  if (settings) std::copy_n(settings, kSettings, shape.settings.begin());
  auto found = plans.find(shape);
  if (found != plans.end()) return found->second.get();
  auto plan = std::make_unique<Plan>();
  plan->shape = shape;
  plan->handle = handle_of(device);
  if (!plan->handle || !select_algorithm(*plan, most_workspace)) return nullptr;
  return (plans[shape] = std::move(plan)).get();
}

RLK_EXPORT int64_t rlk_lt_workspace(const void* plan) { return static_cast<const Plan*>(plan)->workspace; }
RLK_EXPORT const char* rlk_lt_describe(const void* plan) { return static_cast<const Plan*>(plan)->text; }

// out [batch, m, N] = a b (+ bias [N]) (+ out if `add`) on `stream`; m and k may differ from the plan's.
// 0: launched, 1: see rlk_lt_error.
RLK_EXPORT int32_t rlk_lt_run(const void* plan_, int64_t m, int64_t k, const void* a, const void* b, const void* bias,
                              int32_t add, void* out, void* workspace, int64_t workspace_bytes, void* stream) {
  const Plan& plan = *static_cast<const Plan*>(plan_);
  if (workspace_bytes < plan.workspace) {
    fail("the workspace has %lld bytes, the algorithm needs %lld", static_cast<long long>(workspace_bytes),
         static_cast<long long>(plan.workspace));
    return 1;
  }
  Call call;
  if (!call.make(plan.shape, m, k, bias)) return 1;
  const float one = 1.0f, beta = add ? 1.0f : 0.0f;
  return RLK_CALL(cublasLtMatmul, plan.handle, call.product, &one, b, call.b, a, call.a, &beta, out, call.out, out,
                  call.out, &plan.algorithm, workspace, static_cast<size_t>(workspace_bytes),
                  static_cast<cudaStream_t>(stream))
             ? 0
             : 1;
}
