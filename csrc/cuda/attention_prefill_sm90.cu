// attention forward of prefill on Hopper: persistent blocks, groups of four warps with 64 rows each, four warps that
// fetch. Bits: those of kernels/triton/attention.py (docs/ops/attention.md); what waits for what is this file's own.
//
// Compiled by NVRTC or nvcc for sm_90a with -fmad=false. Rows are (position, head of the group) pairs. A group's softmax
// of a block of 64 keys runs beside the other group's products: the two take turns to queue theirs, the scores of the
// next block and the product of this one with its values. A tile's queries stay in registers: with both operands of the
// scores in shared memory, its bandwidth would be the limit.

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef HALF
#define HALF 0  // operands are fp16, else bf16
#endif
#ifndef ROOM
#define ROOM 0  // lens are the keys of each sequence, which has `room` of them in k and v; else borders
#endif
#ifndef SKIP
#define SKIP 0  // sums are not multiplied where all factors of a warp are 1, which changes no bit
#endif

#include "sm90.cuh"

struct Arguments {
  const u16* q;     // [T, H, D]
  const int* cu_q;  // [B + 1]
  const int* lens;  // cumulative keys [B + 1], or keys [B] with ROOM
  u16* out;         // [T, H, D]
  float* lse;       // [T, H] natural log
  int* next;        // [1] zero: the tile that the next free block takes, behind the first ones
  i64 q_stride;
  int tiles;        // of the longest sequence
  int hk, group, batch, room, split;
  int across;       // heads whose tiles of a kind follow one another: hk or 1
  int tokens, keys;  // rows of q, and of k without ROOM: borders beyond them end there
  float scale_log2e;
};

namespace {

constexpr int kGroups = 2, kStages = 4;
constexpr int kKeys = 64, kRows = 64, kSteps = HEAD_DIM / 16, kBoxes = HEAD_DIM / 64;
constexpr int kBox = kKeys * 128, kTile = kBoxes * kBox;  // bytes; a box has 64 rows of 64 elements
constexpr int kBlockRows = kGroups * kRows;
constexpr int kFetchers = 96;  // threads that fetch queries
constexpr int kRegisters = 232, kFetchRegisters = 40;  // a thread: 64,512 of an SM's 65,536
constexpr int kSums = kGroups * kRows * HEAD_DIM * 4;  // bytes of the merged splits
#if HALF
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

// ---- instructions --------------------------------------------------------------------------------

// 16 bytes of the queries, or zeros.
__device__ __forceinline__ void fetch16(u32 to, const u16* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void fetch16_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void store16(u32 to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ void load16(float (&d)[4], u32 from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void load_matrix(u32 (&to)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void sync(int which, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive(int which, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(which), "r"(threads) : "memory");
}
// threadIdx.x, and what follows from it, where it is asked for: ahead of a loop it would be kept, in registers that the
// loop has not.
__device__ __forceinline__ int thread_now() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 r;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

#define F4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define F16(x, i) F4(x, i), F4(x, i + 4), F4(x, i + 8), F4(x, i + 12)
#define F32(x) F16(x, 0), F16(x, 16)
#define F64(x) F16(x, 0), F16(x, 16), F16(x, 32), F16(x, 48)
#define D32                                                                                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31}"
#define D64                                                                                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "  \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// d [64, 64] = a [64, 16] b [64, 16]^T (+ d)
template <bool ADD>
__device__ __forceinline__ void scores(float (&d)[32], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " D32
               ", {%32, %33, %34, %35}, %36, %37, 1, 1, 0;\n"
               : F32(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ADD)));
}
// d [64, HEAD_DIM] += piece j of x [64, 64] times b [16, HEAD_DIM]
__device__ __forceinline__ void sums(float (&d)[32], const u32 (&x)[16], int j, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " D32
               ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
               : F32(d)
               : "r"(x[4 * j]), "r"(x[4 * j + 1]), "r"(x[4 * j + 2]), "r"(x[4 * j + 3]), "l"(b));
}
__device__ __forceinline__ void sums(float (&d)[64], const u32 (&x)[16], int j, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " D64
               ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
               : F64(d)
               : "r"(x[4 * j]), "r"(x[4 * j + 1]), "r"(x[4 * j + 2]), "r"(x[4 * j + 3]), "l"(b));
}
// Waits until at most N groups are under way; the registers named are theirs.
template <int N>
__device__ __forceinline__ void products_wait(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : F32(d) : "n"(N) : "memory");
}
template <int N>
__device__ __forceinline__ void products_wait(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : F64(d) : "n"(N) : "memory");
}

// Keeps what was computed before from being computed behind: products under way own their registers.
__device__ __forceinline__ void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ __forceinline__ void pin(float (&d)[32]) { asm volatile("" : F32(d)::"memory"); }
__device__ __forceinline__ void pin(float (&d)[64]) { asm volatile("" : F64(d)::"memory"); }
__device__ __forceinline__ void pin(u32 (&x)[16]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) asm volatile("" : "+r"(x[j])::"memory");
}

// ---- arithmetic ----------------------------------------------------------------------------------

__device__ __forceinline__ float lanes(float x, int apart) { return __shfl_xor_sync(0xffffffffu, x, apart); }

// x / y by r = 1 / y: `attention_splits.divided`
__device__ __forceinline__ float divided(float x, float y, float r) {
  const float about = x * r;
  float near = __fmaf_rn(__fmaf_rn(-about, y, x), r, about);
  near = __fmaf_rn(__fmaf_rn(-near, y, x), r, near);
  return near == near ? near : about;
}

// Largest of a thread's 16 scores of row i.
__device__ __forceinline__ float largest(const float (&s)[32], int i) {
  float t[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) t[j] = fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]);
#pragma unroll
  for (int n = 4; n > 0; n >>= 1)
#pragma unroll
    for (int j = 0; j < n; ++j) t[j] = fmaxf(t[j], t[j + n]);
  return t[0];
}

__device__ __forceinline__ int clamped(int border, int most) { return max(0, min(border, most)); }

// A tile as the fetching warps tell it; `blocks` below 0: there is none left.
struct Told {
  int blocks, q_first, queries, keys, first, head;
};

struct Row {  // of the two that a thread shares with three others
  float m, l, factor, part;
};

// p in place of the scores, m and the factor; the sum stays a thread's part.
__device__ __forceinline__ void softmax(float (&s)[32], Row (&rows)[2], float scale) {
  float best[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) best[i] = largest(s, i);
#pragma unroll
  for (int apart = 2; apart > 0; apart >>= 1)
#pragma unroll
    for (int i = 0; i < 2; ++i) best[i] = fmaxf(best[i], lanes(best[i], apart));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float top = fmaxf(rows[i].m, best[i] * scale);
    const float now = top == minus_infinity() ? 0.0f : top;
    rows[i].factor = exp2_of(rows[i].m - now);
    rows[i].m = top;
    float part = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float p = exp2_of(__fmaf_rn(s[4 * j + 2 * i + e], scale, -now));
        s[4 * j + 2 * i + e] = p;
        part = j + e == 0 ? p : part + p;
      }
    rows[i].part = part;
  }
}

__device__ __forceinline__ void add_sum(Row (&rows)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = rows[i].part + lanes(rows[i].part, 2);
    sum = sum + lanes(sum, 1);
    rows[i].l = __fmaf_rn(rows[i].l, rows[i].factor, sum);
  }
}

__device__ __forceinline__ void pack_all(u32 (&x)[16], const float (&s)[32]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) x[j] = pack(s[2 * j], s[2 * j + 1]);
}

// The first of a thread's two rows in the tile; the other one lies 8 further.
__device__ __forceinline__ int row_of(int thread) { return thread / 32 * 16 + (thread & 31) / 4; }

// -inf for keys that a row does not see.
__device__ __forceinline__ void hide(float (&s)[32], int first_key, const volatile Told& tile, int members) {
  const int thread = thread_now();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int position = tile.keys - tile.queries + (tile.first + row_of(thread) + 8 * i) / members;
    const int last = position - first_key - 2 * (thread & 3);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        s[4 * j + 2 * i + e] = 8 * j + e <= last ? s[4 * j + 2 * i + e] : minus_infinity();
  }
}

// ---- what a group does ---------------------------------------------------------------------------

struct Group {
  u32 k_tiles, v_tiles, q_tile, k_full, v_full, k_free, v_free;
  int lane;
  int before;  // blocks of keys of earlier tiles

  __device__ __forceinline__ u32 slot(int b) const { return static_cast<u32>(before + b) % kStages; }
  __device__ __forceinline__ u32 parity(int b) const { return static_cast<u32>(before + b) / kStages & 1; }

  __device__ __forceinline__ void queue_scores(float (&s)[32], const u32 (&q)[kSteps][4], int b) const {
    const u32 tile = k_tiles + slot(b) * kTile;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const u64 right = descriptor<false>(tile + (j >> 2) * kBox) + 2 * (j & 3);
      j == 0 ? scores<false>(s, q[j], right) : scores<true>(s, q[j], right);
    }
  }
  __device__ __forceinline__ void queue_sums(float (&acc)[HEAD_DIM / 2], const u32 (&x)[16], int b) const {
    const u64 right = descriptor<true>(v_tiles + slot(b) * kTile);
#pragma unroll
    for (int j = 0; j < 4; ++j) sums(acc, x, j, right + 128 * j);
  }
  __device__ __forceinline__ void release(u32 barriers, int b) const {
    if (lane == 0) barrier_arrive(barriers + 8 * slot(b));
  }
  // Group 0; known to be one for a warp.
  __device__ __forceinline__ bool is_first() const { return __shfl_sync(0xffffffffu, thread_now(), 0) < 128; }
  // Values past the sequence's end become 0: 0 times what follows in memory may be NaN. Group 0 does it for both: it has
  // rows in every tile, and group 1 queues its product with these values behind group 0's turn.
  __device__ __forceinline__ void clear(int b, int keys) const {
    const int from = keys - b * kKeys;
    const u32 tile = v_tiles + slot(b) * kTile;
    for (int unit = thread_now() & 127; unit < kTile / 16; unit += 128) {
      const int row = (unit & (kBox / 16 - 1)) >> 3;
      if (row >= from) store16(tile + 16 * unit, 0.0f, 0.0f, 0.0f, 0.0f);
    }
    stores_fence();
    sync(3, 128);
  }
  // Between these two a group alone queues products. The turn of group i is barrier 1 + i.
  __device__ __forceinline__ void turn_begin() const { sync(1 + thread_now() / 128, 256); }
  __device__ __forceinline__ void turn_end() const { arrive(2 - thread_now() / 128, 256); }

  // Softmax of block b, of which s are the scores, and the product with its values; under way is that of b - 1, unless b
  // is the first of a split. MORE: queues the scores of b + 1 into s.
  template <bool MORE>
  __device__ __forceinline__ void step(float (&s)[32], float (&acc)[HEAD_DIM / 2], u32 (&x)[16], Row (&rows)[2],
                                       const u32 (&q)[kSteps][4], int b, bool first, const volatile Told& tile,
                                       int whole, int members, float scale) const {
    release(k_free, b);
    if (b >= whole) hide(s, b * kKeys, tile, members);
    softmax(s, rows, scale);
    pin(s);
    pin(rows[0].part);
    pin(rows[1].part);
    barrier_wait(v_full + 8 * slot(b), parity(b));  // its loop keeps the wait for the sums behind the softmax
    if (b >= whole && (b + 1) * kKeys > tile.keys && is_first()) clear(b, tile.keys);
    products_wait<0>(acc);
    if (!first) release(v_free, b - 1);
    pack_all(x, s);
    pin(x);
    if (!SKIP || !__all_sync(0xffffffffu, rows[0].factor == 1.0f && rows[1].factor == 1.0f)) {
#pragma unroll
      for (int j = 0; j < HEAD_DIM / 2; ++j) acc[j] = acc[j] * rows[j >> 1 & 1].factor;
    }
    if (MORE) barrier_wait(k_full + 8 * slot(b + 1), parity(b + 1));
    pin(acc);
    turn_begin();
    products_begin();
    if (MORE) {
      queue_scores(s, q, b + 1);
      products_queued();
    }
    queue_sums(acc, x, b);
    products_queued();
    turn_end();
    add_sum(rows);
  }
};

// Sums of two closed splits into one; an empty side leaves the other as it is.
template <bool EMPTY>
__device__ __forceinline__ void merge(float (&acc)[HEAD_DIM / 2], const float (&w)[2], const float (&w_split)[2],
                                      const float (&y)[2], const float (&r)[2], const bool (&empty)[2],
                                      const bool (&fresh)[2], u32 kept_at) {
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 2; j += 4) {
    float o[4];
    load16(o, kept_at + 512 * j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = e >> 1;
      const float both = divided(__fmaf_rn(o[e], w[i], acc[j + e] * w_split[i]), y[i], r[i]);
      acc[j + e] = EMPTY && empty[i] ? o[e] : EMPTY && fresh[i] ? acc[j + e] : both;
    }
  }
}

// Closes a split and merges it with those before it, whose sums each thread keeps for itself in shared memory.
__device__ __forceinline__ void close(float (&acc)[HEAD_DIM / 2], const Row (&rows)[2], float (&top)[2], u32 kept_at,
                                      bool only) {
  float y[2], r[2], top_split[2];
  bool none[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    none[i] = rows[i].l == 0.0f;
    y[i] = none[i] ? 1.0f : rows[i].l;
    r[i] = __fdiv_rn(1.0f, y[i]);
    top_split[i] = none[i] ? minus_infinity() : rows[i].m + log2_of(rows[i].l);
  }
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 2; ++j) {
    const int i = j >> 1 & 1;
    acc[j] = divided(acc[j], y[i], r[i]);
  }
  if (__any_sync(0xffffffffu, none[0] || none[1])) {
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 2; ++j) acc[j] = none[j >> 1 & 1] ? 0.0f : acc[j];
  }
  if (only) {
    top[0] = top_split[0];
    top[1] = top_split[1];
    return;
  }
  float w[2], w_split[2];
  bool empty[2], fresh[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float high = fmaxf(top[i], top_split[i]);
    w[i] = exp2_of(top[i] - high);
    w_split[i] = exp2_of(top_split[i] - high);
    y[i] = w[i] + w_split[i];
    r[i] = __fdiv_rn(1.0f, y[i]);
    fresh[i] = top[i] == minus_infinity();
    empty[i] = top_split[i] == minus_infinity();
    const float both = high + log2_of(y[i]);
    top[i] = empty[i] ? top[i] : fresh[i] ? top_split[i] : both;
  }
  if (__any_sync(0xffffffffu, empty[0] || empty[1] || fresh[0] || fresh[1])) {
    merge<true>(acc, w, w_split, y, r, empty, fresh, kept_at);
  } else {  // nearly always
    merge<false>(acc, w, w_split, y, r, empty, fresh, kept_at);
  }
}

__device__ __forceinline__ void keep(const float (&acc)[HEAD_DIM / 2], u32 kept_at) {
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 2; j += 4)
    store16(kept_at + 512 * j, acc[j], acc[j + 1], acc[j + 2], acc[j + 3]);
}

__device__ __forceinline__ void start(float (&acc)[HEAD_DIM / 2], Row (&rows)[2]) {
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 2; ++j) acc[j] = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) rows[i] = {minus_infinity(), 0.0f, 0.0f, 0.0f};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    rlk_attention_prefill(const __grid_constant__ TensorMap k,  // k and v as [S, HK * D]
                          const __grid_constant__ TensorMap v, const __grid_constant__ Arguments args) {
  extern __shared__ char raw[];
  const u32 memory = (shared_address(raw) + 1023) & ~1023u;
  const u32 k_tiles = memory, v_tiles = k_tiles + kStages * kTile, q_tiles = v_tiles + kStages * kTile;
  const u32 kept = q_tiles + kGroups * kTile;
  const u32 k_full = kept + kSums, v_full = k_full + 8 * kStages;
  const u32 k_free = v_full + 8 * kStages, v_free = k_free + 8 * kStages;
  const u32 q_full = v_free + 8 * kStages, q_free = q_full + 8, told = q_free + 8, heard = told + 16;
  volatile Told* const info = reinterpret_cast<volatile Told*>(raw + (heard + 16 - shared_address(raw)));
  const int group_of = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);  // known to be one for a warp
  const int lane = threadIdx.x & 31;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(k_full + 8 * i, 1);
      barrier_init(v_full + 8 * i, 1);
      barrier_init(k_free + 8 * i, 4 * kGroups);
      barrier_init(v_free + 8 * i, 4 * kGroups);
    }
    barrier_init(q_full, kFetchers);
    barrier_init(q_free, 4 * kGroups);
    for (int i = 0; i < 2; ++i) {
      barrier_init(told + 8 * i, 1);
      barrier_init(heard + 8 * i, 4 * kGroups + 3);
    }
    barriers_made();
  }
  __syncthreads();

  const int total = args.tiles * args.hk * args.batch;
  if (group_of == kGroups) {
    fewer_registers<kFetchRegisters>();
    const int thread = threadIdx.x - 128 * kGroups;
    if (thread == 0) {  // chooses tiles, fetches keys and values
      u32 n = 0;
      int index = blockIdx.x;
      for (int turn = 0;; ++turn) {
        int q_first = 0, queries = 0, keys = 0, k_first = 0, first = 0, head = 0, blocks = -1;
        while (index < total) {
          // The longest rows first, of `across` heads side by side.
          const int run = index / (args.tiles * args.across), place = index - run * args.tiles * args.across;
          const int tile = args.tiles - 1 - place / args.across, pair = run * args.across + place % args.across;
          const int sequence = pair / args.hk;
          head = pair - sequence * args.hk;
          q_first = clamped(args.cu_q[sequence], args.tokens);
          queries = clamped(args.cu_q[sequence + 1], args.tokens) - q_first;
          first = tile * kBlockRows;
          const int rows = max(0, queries) * args.group;
          if (first >= rows)  // a shorter sequence: past all tiles that it lacks at once
            atomicMax(args.next, (run + 1) * args.tiles * args.across -
                                     (rows + kBlockRows - 1) / kBlockRows * args.across - static_cast<int>(gridDim.x));
          index = gridDim.x + atomicAdd(args.next, 1);
          if (first >= rows) continue;
          k_first = ROOM ? sequence * args.room : clamped(args.lens[sequence], args.keys);
          keys = ROOM ? min(args.lens[sequence], args.room) : clamped(args.lens[sequence + 1], args.keys) - k_first;
          const int stop = min(keys, keys - queries + (first + kBlockRows - 1) / args.group + 1);
          blocks = max(0, (stop + kKeys - 1) / kKeys);
          break;
        }
        barrier_wait(heard + 8 * (turn & 1), (turn >> 1 & 1) ^ 1);
        volatile Told& tell = info[turn & 1];
        tell.blocks = blocks;
        tell.q_first = q_first;
        tell.queries = queries;
        tell.keys = keys;
        tell.first = first;
        tell.head = head;
        barrier_arrive(told + 8 * (turn & 1));
        if (blocks < 0) break;
        const int column = head * HEAD_DIM;
#pragma unroll 1
        for (int b = 0; b < blocks; ++b, ++n) {
          const u32 slot = n % kStages, parity = n / kStages & 1;
          barrier_wait(k_free + 8 * slot, parity ^ 1);
          barrier_expect(k_full + 8 * slot, kTile);
#pragma unroll
          for (int i = 0; i < kBoxes; ++i)
            fetch(k_tiles + slot * kTile + i * kBox, &k, column + 64 * i, k_first + b * kKeys, k_full + 8 * slot);
          barrier_wait(v_free + 8 * slot, parity ^ 1);
          barrier_expect(v_full + 8 * slot, kTile);
#pragma unroll
          for (int i = 0; i < kBoxes; ++i)
            fetch(v_tiles + slot * kTile + i * kBox, &v, column + 64 * i, k_first + b * kKeys, v_full + 8 * slot);
        }
      }
    } else if (thread >= 32) {  // three warps fetch the queries of the next tile
      for (int turn = 0;; ++turn) {
        barrier_wait(told + 8 * (turn & 1), turn >> 1 & 1);
        const volatile Told& said = info[turn & 1];
        const int blocks = said.blocks, q_first = said.q_first, queries = said.queries;
        const int first = said.first, head = said.head;
        __syncwarp();
        if (lane == 0) barrier_arrive(heard + 8 * (turn & 1));
        if (blocks < 0) break;
        barrier_wait(q_free, (turn & 1) ^ 1);
        const u16* const base = args.q + q_first * args.q_stride + head * args.group * HEAD_DIM;
        for (int unit = thread - 32; unit < kBlockRows * (HEAD_DIM / 8); unit += kFetchers) {
          const int row = unit / (HEAD_DIM / 8), c = unit % (HEAD_DIM / 8);
          const int token = (first + row) / args.group, member = (first + row) - token * args.group;
          const bool inside = token < queries;
          const u16* const at = base + (inside ? token : 0) * args.q_stride + member * HEAD_DIM + 8 * c;
          const u32 line = q_tiles + (row >> 6) * kTile + (c >> 3) * kBox + (row & 63) * 128;
          const u32 to = line + (((c & 7) ^ (row & 7)) << 4);
          fetch16(to, at, inside);
        }
        fetch16_wait();
        stores_fence();
        barrier_arrive(q_full);
      }
    }
  } else {
    more_registers<kRegisters>();
    Group group{k_tiles, v_tiles, q_tiles + group_of * kTile, k_full, v_full, k_free, v_free, lane, 0};
    const u32 kept_at = kept + group_of * (kSums / kGroups) + 16 * (threadIdx.x & 127);
    const float scale = args.scale_log2e;
    float s[32], acc[HEAD_DIM / 2];
    u32 x[16], q[kSteps][4];
    if (group_of == 1) group.turn_end();  // the first turn is group 0's
    for (int turn = 0;; ++turn) {
      barrier_wait(told + 8 * (turn & 1), turn >> 1 & 1);
      const volatile Told& tile = info[turn & 1];
      const int blocks = tile.blocks;
      if (blocks < 0) break;
      const int past = tile.keys - tile.queries;
      const int whole = (past + (tile.first + group_of * kRows) / args.group + 1) / kKeys;  // all rows see what is below
      barrier_wait(q_full, turn & 1);
      const int thread = thread_now(), line = (thread & 127) / 32 * 16 + (thread & 15);
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const int c = 2 * (j & 3) + (thread >> 4 & 1);
        load_matrix(q[j], group.q_tile + (j >> 2) * kBox + line * 128 + ((c ^ (line & 7)) << 4));
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(q_free);
      float top[2] = {minus_infinity(), minus_infinity()};
      Row rows[2];
      start(acc, rows);
      pin(acc);
      int b = 0, first = 0;  // block, and the first of its split
      if (blocks > 0) {
        barrier_wait(k_full + 8 * group.slot(0), group.parity(0));
        products_begin();
        group.queue_scores(s, q, 0);
        products_queued();
        products_wait<0>(s);
        while (b + 1 < blocks) {
          group.step<true>(s, acc, x, rows, q, b, b == first, tile, whole, args.group, scale);
          products_wait<1>(s);
          ++b;
          if ((b - first) * kKeys == args.split) {
            products_wait<0>(acc);
            group.release(v_free, b - 1);
            close(acc, rows, top, kept_at, first == 0);
            keep(acc, kept_at);
            first = b;
            start(acc, rows);
          }
        }
        group.step<false>(s, acc, x, rows, q, b, b == first, tile, whole, args.group, scale);
        ++b;
        products_wait<0>(acc);
        group.release(v_free, b - 1);
        close(acc, rows, top, kept_at, first == 0);
      }
      group.before += blocks;
      const int first_row = tile.first + row_of(thread_now()), queries = tile.queries, head = tile.head;
      const i64 q_first = tile.q_first;
      __syncwarp();
      if (lane == 0) barrier_arrive(heard + 8 * (turn & 1));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first_row + 8 * i, token = row / args.group;
        if (token >= queries) continue;
        const i64 to = ((q_first + token) * args.hk + head) * args.group + (row - token * args.group);
        if ((lane & 3) == 0) args.lse[to] = top[i] * 0.6931471805599453f;
        u32* const line = reinterpret_cast<u32*>(args.out + to * HEAD_DIM) + (lane & 3);
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; ++j) line[4 * j] = pack(acc[4 * j + 2 * i], acc[4 * j + 2 * i + 1]);
      }
    }
  }
}
