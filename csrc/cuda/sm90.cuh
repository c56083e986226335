// Shared by the Hopper kernels: types, mbarriers, TMA, clusters, register reallocation and
// arithmetic. Compiled by NVRTC or nvcc for sm_90a without other headers. `barrier` and `to` are shared-memory addresses.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// CUtensorMap: the driver's TMA descriptor of a matrix.
struct alignas(64) TensorMap {
  char opaque[128];
};

namespace {

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// ---- mbarriers -----------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
// Makes initialised barriers visible to TMA and to the cluster.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive_expect_tx(u32 barrier, u32 bytes) {
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

// ---- TMA -----------------------------------------------------------------------------------------

// Loads one box of a matrix into this CTA's shared memory.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
// Loads one box into the shared memory of both CTAs of a cluster of two.
__device__ __forceinline__ void tma_load_multicast(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  const unsigned short mask = 3;
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(mask)
      : "memory");
}
// Stores one box and commits it as its own bulk group.
__device__ __forceinline__ void tma_store(const TensorMap* map, int column, int row, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n" ::"l"(map), "r"(column),
               "r"(row), "r"(from)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Orders this thread's shared-memory stores before later reads by TMA and wgmma (the async proxy).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- clusters ------------------------------------------------------------------------------------

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Arrives at the same barrier in CTA `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_in_cluster(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// ---- register reallocation -----------------------------------------------------------------------

template <int N>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- numbers -------------------------------------------------------------------------------------

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Both rounded to bf16 in one register, `low` in the lower half.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Maximum; NaN if either is NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// log2 of positive normal numbers, the polynomial of kernels/triton/common.py `log2`.
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
