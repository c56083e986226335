// linear's input gradient of at most 16 rows on Hopper: dx [M, N] = dy [M, K] w [K, N], one fp32 chain over K a column,
// with the bits of kernels/triton/linear.py. Nothing shortens the chain, so what counts is that no step of it waits.
//
// Compiled by NVRTC or nvcc for sm_90a with -fmad=false. The sums of a block's few columns stay in the tensor core's
// pipeline from one wgmma to the next, and no operand goes to registers. The copy engine keeps as many pieces of 256 k
// under way as shared memory holds.

#ifndef HALF
#define HALF 0  // operands are fp16, else bf16
#endif
#ifndef FP32_OUT
#define FP32_OUT 0  // the result is fp32, else of the operands' type
#endif
#ifndef ROWS
#define ROWS 8  // at most: 8 or 16
#endif
#ifndef COLUMNS
#define COLUMNS 16  // of a block: 16 or 32
#endif
#ifndef STAGES
#define STAGES 16  // pieces that shared memory holds
#endif

#include "sm90.cuh"

#if HALF
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

namespace {

constexpr int kPiece = 256, kSteps = kPiece / 16;  // k, and products of 16
constexpr int kMultiplying = 128, kThreads = kMultiplying + 32;
constexpr int kWeightBytes = kPiece * COLUMNS * 2, kRowBytes = kPiece * ROWS * 2;

__device__ __forceinline__ void prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Descriptors, in two words, so that a step adds to one register. dy: lines of 64 k in 128 swizzled bytes, eight of them a
// unit of 1024. The weight: lines of COLUMNS elements, swizzled over their length, eight of them a unit.
constexpr u32 kHighA = 1u << 30 | 64, kLowA = 1 << 16;
constexpr u32 kHighB = (COLUMNS == 16 ? 3u : 2u) << 30 | COLUMNS, kLowB = COLUMNS << 16;

// d [64, COLUMNS] += a [64, 16] b [16, COLUMNS]; the rows of a beyond ROWS are whatever follows in shared memory
__device__ __forceinline__ void multiply(float (&d)[COLUMNS / 2], u32 a, u32 b) {
#if COLUMNS == 16
  asm volatile(
      "{\n.reg .b64 a, b;\n"
      "mov.b64 a, {%8, %9};\n"
      "mov.b64 b, {%10, %11};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE
      " {%0, %1, %2, %3, %4, %5, %6, %7}, a, b, 1, 1, 1, 0, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a), "r"(kHighA), "r"(b), "r"(kHighB));
#else
  asm volatile(
      "{\n.reg .b64 a, b;\n"
      "mov.b64 a, {%16, %17};\n"
      "mov.b64 b, {%18, %19};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, a, b, 1, 1, 1, 0, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a), "r"(kHighA), "r"(b), "r"(kHighB));
#endif
}

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
  const int warp = __shfl_sync(~0u, thread >> 5, 0);  // this way the compiler knows that a warp agrees
  const int first_column = blockIdx.x * COLUMNS, pieces = (k + kPiece - 1) / kPiece;

  if (warp == kMultiplying / 32) {
    // ---- fetch: what lies beyond a matrix arrives as zeros, which change no bit of a chain
    if (lane == 0) {
      prefetch(&w);
      prefetch(&dy);
#pragma unroll  // by one thread: the lanes of a warp would take turns
      for (int i = 0; i < STAGES; ++i) {
        barrier_init(full + 8 * i, 1);
        barrier_init(empty + 8 * i, kMultiplying / 32);
      }
      stores_fence();
    }
    __syncwarp();
    asm volatile("bar.arrive 0, %0;" ::"n"(kThreads) : "memory");
    if (lane > 0) return;
    int stage = 0;
    u32 parity = 1;  // of the first round, which waits for nobody
    for (int piece = 0; piece < pieces; ++piece) {
      const u32 barrier = full + 8 * stage;
      barrier_wait(empty + 8 * stage, parity);
      barrier_expect(barrier, kWeightBytes + kRowBytes);
      fetch(w_at + stage * kWeightBytes, &w, first_column, piece * kPiece, barrier);
#pragma unroll
      for (int i = 0; i < kPiece; i += 64)
        fetch(dy_at + stage * kRowBytes + i * ROWS * 2, &dy, piece * kPiece + i, 0, barrier);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    return;
  }

  // ---- multiply
  float sum[COLUMNS / 2] = {};
  int stage = 0;
  u32 parity = 0;
  asm volatile("bar.sync 0, %0;" ::"n"(kThreads) : "memory");
  for (int piece = 0; piece < pieces; ++piece) {
    const u32 a = (dy_at + stage * kRowBytes) >> 4 | kLowA, b = (w_at + stage * kWeightBytes) >> 4 | kLowB;
    barrier_wait(full + 8 * stage, parity);
    products_begin();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      multiply(sum, a + step / 4 * ROWS * 8 + step % 4 * 2, b + step * 2 * COLUMNS);
    products_queued();
    products_wait<1>();  // the piece before this one is done
    if (piece > 0 && lane == 0) barrier_arrive(empty + 8 * (stage == 0 ? STAGES - 1 : stage - 1));
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  products_wait<0>();
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) asm volatile("" : "+f"(sum[i])::"memory");  // no use of a sum moves up
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
    asm("cvt.rn." TYPE ".f32 %0, %1;" : "=h"(rounded) : "f"(sum[i]));
    static_cast<u16*>(out)[to] = rounded;
#endif
  }
}
