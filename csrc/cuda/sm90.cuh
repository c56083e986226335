// What the kernels for Hopper share: types, barriers in shared memory, the copy engine, and instructions that C++ has no
// words for. Compiled by NVRTC or nvcc for sm_90a and without further headers. `barrier` and `to` are shared addresses.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// The shared memory that a launch asks for.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) char name[]

// The driver's descriptor of a matrix.
struct alignas(64) TensorMap {
  char opaque[128];
};

namespace {

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// ---- barriers ------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
// The copy engine sees the barriers made so far.
__device__ __forceinline__ void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- copy engine ---------------------------------------------------------------------------------

// A box of a matrix, to this block's shared memory.
__device__ __forceinline__ void fetch(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
// Contiguous bytes, a multiple of 16 at a multiple of 16. Without a hint for the L2 cache: that these lines may leave it
// first made the reading slower.
__device__ __forceinline__ void fetch(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// Stores by threads come before what tensor cores and the copy engine read.
__device__ __forceinline__ void stores_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- launches ------------------------------------------------------------------------------------

// A kernel that was launched to wait for this one may take its place on the GPU.
__device__ __forceinline__ void next_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// What the kernels in front have written is there.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- clusters ------------------------------------------------------------------------------------

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Into the shared memory of the cluster's first block, where the same variable lies.
__device__ __forceinline__ void store_in_first(void* to, u32 x) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, 0;\n"
      "st.shared::cluster.u32 [there], %1;\n}\n" ::"r"(shared_address(to)),
      "r"(x)
      : "memory");
}

// ---- tensor cores --------------------------------------------------------------------------------

// Descriptor of an operand in lines of 128 swizzled bytes, eight of them a unit of 1024. A line holds 64 elements of k,
// or, TRANSPOSED, 64 of the result's columns; then the next 64 lie a box of 64 lines further.
template <bool TRANSPOSED>
__device__ __forceinline__ u64 descriptor(u32 address) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | (TRANSPOSED ? 512ull : 1ull) << 16 | 64ull << 32 | 1ull << 62;
}
template <int N>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_queued() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last N groups are done.
template <int N>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// ---- numbers -------------------------------------------------------------------------------------

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Both rounded to bf16, `low` in the lower half.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// NaN where one of them is.
__device__ __forceinline__ float larger(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// log2 of positive normal numbers: `common.log2` of the Triton kernels
__device__ __forceinline__ float log2_of(float x) {
  const int bits = __float_as_int(x), exponent = (bits - 0x3F3504F3) >> 23;
  const float r = __int_as_float(bits - (exponent << 23)) - 1.0f;
  float p = __fmaf_rn(-0.11020159721374512f, r, 0.18631209433078766f);
  p = __fmaf_rn(p, r, -0.19102497398853302f);
  p = __fmaf_rn(p, r, 0.2045752853155136f);
  p = __fmaf_rn(p, r, -0.23961904644966125f);
  p = __fmaf_rn(p, r, 0.2885688841342926f);
  p = __fmaf_rn(p, r, -0.3606966435909271f);
  p = __fmaf_rn(p, r, 0.4808982014656067f);
  p = __fmaf_rn(p, r, -0.7213473320007324f);
  p = __fmaf_rn(p, r, 1.4426950216293335f);
  float y = __fmaf_rn(r, p, static_cast<float>(exponent));
  y = x == 0.0f ? minus_infinity() : y;
  return x == infinity() || x != x ? x : y;
}

}  // namespace
