// linear's input gradient of at most 16 rows on Hopper: dx [M, N] = dy [M, K] w [K, N], one fp32 chain over K per element,
// with the bits of kernels/triton/linear.py. The contract fixes the length of the chain, so the design minimises latency.
//
// Compiled by NVRTC or nvcc for sm_90a with -fmad=false. Both operands of wgmma come from shared memory, and the few
// accumulators of a block pass from one wgmma to the next without a wait. One TMA producer warp keeps as many pieces of
// 256 k in flight as shared memory holds.

#ifndef HALF
#define HALF 0  // operands are fp16, else bf16
#endif
#ifndef FP32_OUT
#define FP32_OUT 0  // the result is fp32, else has the operands' type
#endif
#ifndef ROWS
#define ROWS 8  // most rows: 8 or 16
#endif
#ifndef COLUMNS
#define COLUMNS 16  // columns per block: 16 or 32
#endif
#ifndef STAGES
#define STAGES 16  // pieces in shared memory
#endif

#include "wgmma.cuh"

namespace {

constexpr int kPiece = 256, kSteps = kPiece / 16;  // k of a piece; wgmma instructions per piece
constexpr int kMultiplying = 128, kThreads = kMultiplying + 32;
constexpr int kWeightBytes = kPiece * COLUMNS * 2, kRowBytes = kPiece * ROWS * 2;

__device__ __forceinline__ void prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Shared-memory descriptors as two 32-bit words. dy: K-major, 128-byte swizzle. The weight: MN-major lines of COLUMNS
// elements, swizzled over their length, eight lines per swizzle atom.
constexpr u32 kHighA = 1u << 30 | 64, kLowA = 1 << 16;
constexpr u32 kHighB = (COLUMNS == 16 ? 3u : 2u) << 30 | COLUMNS, kLowB = COLUMNS << 16;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) rlk_linear_dgrad_rows(
    const __grid_constant__ TensorMap dy,  // [M, K]; boxes of ROWS lines of 64
    const __grid_constant__ TensorMap w,   // [K, N]; boxes of a piece
    void* __restrict__ out,                // [M, N]
    int rows, int n, int k) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 dy_at = shared_address(memory), w_at = dy_at + STAGES * kRowBytes, full = w_at + STAGES * kWeightBytes;
  const u32 empty = full + 8 * STAGES;
  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = __shfl_sync(~0u, thread >> 5, 0);  // warp-uniform
  const int first_column = blockIdx.x * COLUMNS, pieces = (k + kPiece - 1) / kPiece;

  if (warp == kMultiplying / 32) {
    // ---- TMA producer warp. TMA fills elements outside a matrix with zeros, which change no bit of a chain.
    if (lane == 0) {
      prefetch(&w);
      prefetch(&dy);
#pragma unroll  // one thread initialises all: the lanes of a warp would serialise
      for (int i = 0; i < STAGES; ++i) {
        barrier_init(full + 8 * i, 1);
        barrier_init(empty + 8 * i, kMultiplying / 32);
      }
      fence_proxy_async();
    }
    __syncwarp();
    asm volatile("bar.arrive 0, %0;" ::"n"(kThreads) : "memory");
    if (lane > 0) return;
    int stage = 0;
    u32 parity = 1;  // the first round does not wait
    for (int piece = 0; piece < pieces; ++piece) {
      const u32 barrier = full + 8 * stage;
      barrier_wait(empty + 8 * stage, parity);
      barrier_arrive_expect_tx(barrier, kWeightBytes + kRowBytes);
      tma_load(w_at + stage * kWeightBytes, &w, first_column, piece * kPiece, barrier);
#pragma unroll
      for (int i = 0; i < kPiece; i += 64)
        tma_load(dy_at + stage * kRowBytes + i * ROWS * 2, &dy, piece * kPiece + i, 0, barrier);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    return;
  }

  // ---- math warpgroup. Rows of dy's tile beyond ROWS are unspecified shared memory, and their results are not stored.
  float sum[COLUMNS / 2] = {};
  int stage = 0;
  u32 parity = 0;
  asm volatile("bar.sync 0, %0;" ::"n"(kThreads) : "memory");
  for (int piece = 0; piece < pieces; ++piece) {
    const u32 a = (dy_at + stage * kRowBytes) >> 4 | kLowA, b = (w_at + stage * kWeightBytes) >> 4 | kLowB;
    barrier_wait(full + 8 * stage, parity);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      wgmma_m64nNk16(sum, a + step / 4 * ROWS * 8 + step % 4 * 2, kHighA, b + step * 2 * COLUMNS, kHighB);
    wgmma_commit();
    wgmma_wait<1>();  // the previous piece is done
    if (piece > 0 && lane == 0) barrier_arrive(empty + 8 * (stage == 0 ? STAGES - 1 : stage - 1));
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) pin(sum[i]);
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) {
    const int row = 16 * warp + (lane >> 2) + 8 * (i >> 1 & 1);
    const int column = first_column + 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
    if (row >= rows || column >= n) continue;
    const i64 to = static_cast<i64>(row) * n + column;
#if FP32_OUT
    static_cast<float*>(out)[to] = sum[i];
#else
    u16 rounded;
    asm("cvt.rn." OPERAND ".f32 %0, %1;" : "=h"(rounded) : "f"(sum[i]));
    static_cast<u16*>(out)[to] = rounded;
#endif
  }
}
