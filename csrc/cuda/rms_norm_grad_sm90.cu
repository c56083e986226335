// rms_norm's gradients on Hopper: dx, and one partial sum of the weight gradient per block. Its bits are those of
// kernels/triton/rms_norm.py (docs/ops/rms_norm.md).
//
// Compiled by NVRTC or nvcc for sm_90a with -fmad=false. A block computes one leaf of the weight gradient's tree (16 rows)
// or the two leaves that the tree adds first. TMA loads rows ahead of the math, and a thread holds the same columns of
// every row, in groups of eight neighbours.

#ifndef CHANNELS
#define CHANNELS 4096  // C, a multiple of 8
#endif
#ifndef BLOCK
#define BLOCK 4096  // C rounded up to a power of two, at least 1024
#endif
#ifndef GROUPS
#define GROUPS 4  // groups of eight neighbouring columns per thread
#endif
#ifndef HAS_DR
#define HAS_DR 1  // dx adds a second gradient
#endif
#ifndef STAGES
#define STAGES 2  // steps in shared memory
#endif
#ifndef RESIDENT
#define RESIDENT 2  // least blocks per SM
#endif
#include "sm90.cuh"

struct Arguments {
  const char* dy;      // [T, C] bf16, like x, dr and dx; 16-byte aligned
  const char* dr;
  const char* x;
  const char* weight;  // [C]
  char* dx;            // out
  float* partials;     // out [programs, C]
  i64 tokens;
  int pair;  // distance between a block's two leaves; 0: one leaf per block
  float eps;
};

namespace {

constexpr int kGroups = GROUPS, kWarps = BLOCK / (kGroups * 256), kThreads = 32 * kWarps;
constexpr int kLeaf = 16, kRows = BLOCK >= 2048 ? 1 : 2048 / BLOCK;  // rows per leaf and per step, fixed by the contract
constexpr int kSteps = kLeaf / kRows, kTensors = 2 + HAS_DR, kLine = CHANNELS * 2, kStage = kRows * kTensors * kLine;
constexpr int kSums = 2 * kRows * kGroups;  // per thread: squares and products of each row's groups
constexpr u32 kAll = 0xFFFFFFFFu;
static_assert(CHANNELS % 8 == 0 && CHANNELS <= BLOCK && kWarps >= 1, "channels come in groups of eight");

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ u32 word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
__device__ __forceinline__ float element(const uint4& x, int i) { return i & 1 ? high(word(x, i / 2)) : low(word(x, i / 2)); }

// Pairwise tree sum: neighbours, then neighbouring sums.
template <int N>
__device__ __forceinline__ float tree(const float* x) {
  if constexpr (N == 1) return x[0];
  else return tree<N / 2>(x) + tree<N / 2>(x + N / 2);
}

__device__ __forceinline__ float per_channel(float sum) {
  if constexpr ((CHANNELS & (CHANNELS - 1)) == 0) return sum * (1.0f / CHANNELS);  // exact like the quotient
  else return __fdiv_rn(sum, static_cast<float>(CHANNELS));
}

// Sums each of N values over a warp, neighbours first; a lane ends with the value number `held`. While several values remain,
// two lanes exchange halves of them.
template <int N, int BIT = 0>
__device__ __forceinline__ float over_lanes(const float* x, int lane) {
  if constexpr (BIT == 5) {
    return x[0];
  } else if constexpr (N == 1) {
    const float sum = x[0] + __shfl_xor_sync(kAll, x[0], 1 << BIT);
    return over_lanes<1, BIT + 1>(&sum, lane);
  } else {
    const bool upper = lane >> BIT & 1;
    float sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float mine = upper ? x[i + N / 2] : x[i], other = upper ? x[i] : x[i + N / 2];
      sum[i] = mine + __shfl_xor_sync(kAll, other, 1 << BIT);
    }
    return over_lanes<N / 2, BIT + 1>(sum, lane);
  }
}
template <int N, int BIT = 0>
__device__ __forceinline__ int held(int lane) {
  if constexpr (N == 1) return 0;
  else return (lane >> BIT & 1) * (N / 2) + held<N / 2, BIT + 1>(lane);
}

__device__ __forceinline__ bool inside(int group) { return CHANNELS == BLOCK || group < CHANNELS / 8; }
__device__ __forceinline__ void store(float4* to, const float (&x)[8]) {
  to[0] = make_float4(x[0], x[1], x[2], x[3]);
  to[1] = make_float4(x[4], x[5], x[6], x[7]);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT) rlk_rms_norm_grad(const __grid_constant__ Arguments a) {
  DYNAMIC_SHARED(raw);  // stages, their mbarriers, the weight, sums of the first leaf
  alignas(16) __shared__ float sums[2][kSums][kWarps];  // per warp, double-buffered
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const u32 barriers = shared_address(raw + STAGES * kStage);
  uint4* const weight = reinterpret_cast<uint4*>(raw + STAGES * kStage + (STAGES * 8 + 15) / 16 * 16);
  float4* const first = reinterpret_cast<float4*>(weight + CHANNELS / 8);
  if (thread == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(barriers + 8 * i, 1);
    fence_barrier_init();
    fence_proxy_async();
  }
  griddepcontrol_wait();

  // The later leaf comes first, because the end of the preceding op's output may still be in L2.
  const i64 block = blockIdx.x, leaf = a.pair ? block + block / a.pair * a.pair : block;
  const int leaves = a.pair && (leaf + a.pair) * kLeaf < a.tokens ? 2 : 1, steps = leaves * kSteps;
  const auto row_of = [&](int step) {
    return (leaf + (step < steps - kSteps ? a.pair : 0)) * kLeaf + step % kSteps * kRows;
  };
  const auto load_step = [&](int step) {  // one thread; every step is one phase of its stage's mbarrier
    if (step >= steps) return;
    const i64 row = row_of(step);
    const int rows = static_cast<int>(min(static_cast<i64>(kRows), a.tokens - row));
    const u32 to = shared_address(raw + step % STAGES * kStage), barrier = barriers + step % STAGES * 8;
    if (rows <= 0) return barrier_arrive(barrier);
    const u32 bytes = rows * kLine;
    barrier_arrive_expect_tx(barrier, kTensors * bytes);
    tma_load(to, a.x + row * kLine, bytes, barrier);
    tma_load(to + kRows * kLine, a.dy + row * kLine, bytes, barrier);
    if (HAS_DR) tma_load(to + 2 * kRows * kLine, a.dr + row * kLine, bytes, barrier);
  };
  if (thread == 0)
    for (int i = 0; i < STAGES; ++i) load_step(i);
  for (int i = thread; i < CHANNELS / 8; i += kThreads) weight[i] = reinterpret_cast<const uint4*>(a.weight)[i];
  __syncthreads();

  float total[kGroups][8];
#pragma unroll
  for (int k = 0; k < kGroups; ++k)
#pragma unroll
    for (int i = 0; i < 8; ++i) total[k][i] = 0.0f;

#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const i64 row = row_of(step);
    const uint4* stage = reinterpret_cast<const uint4*>(raw + step % STAGES * kStage);
    barrier_wait(barriers + step % STAGES * 8, step / STAGES & 1);
    uint4 x[kRows][kGroups], up[kRows][kGroups], dr[kRows][kGroups];
    float of_thread[kSums];  // [rows, squares and products, groups]
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
        const int group = thread + kThreads * k;
        const bool exists = row + r < a.tokens && inside(group);
        const uint4 zero = {0, 0, 0, 0};
        const uint4* at = stage + r * (CHANNELS / 8) + group;
        x[r][k] = exists ? at[0] : zero;
        up[r][k] = exists ? at[kRows * (CHANNELS / 8)] : zero;
        if (HAS_DR) dr[r][k] = exists ? at[2 * kRows * (CHANNELS / 8)] : zero;
        const uint4 w = inside(group) ? weight[group] : zero;
        float squares[8], products[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float h = element(x[r][k], i);
          squares[i] = h * h;
          products[i] = (element(up[r][k], i) * element(w, i)) * h;
        }
        of_thread[2 * r * kGroups + k] = tree<8>(squares);
        of_thread[(2 * r + 1) * kGroups + k] = tree<8>(products);
      }
    }
    const float over = over_lanes<kSums>(of_thread, lane);
    if (lane < kSums) sums[step & 1][held<kSums>(lane)][warp] = over;
    __syncthreads();
    if (thread == 0) load_step(step + STAGES);

    float rstd[kRows], mean[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float square[kGroups], dot[kGroups];  // summed over warps, then over groups
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
        square[k] = tree<kWarps>(sums[step & 1][2 * r * kGroups + k]);
        dot[k] = tree<kWarps>(sums[step & 1][(2 * r + 1) * kGroups + k]);
      }
      // A missing row gets 1, because with eps = 0 it would be 0 / 0 and make the weight gradient NaN.
      const float all = row + r < a.tokens ? tree<kGroups>(square) : 1.0f;
      rstd[r] = __fdiv_rn(1.0f, __fsqrt_rn(per_channel(all) + a.eps));
      mean[r] = per_channel(tree<kGroups>(dot) * rstd[r]);
    }
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      const int group = thread + kThreads * k;
      if (!inside(group)) continue;
      const uint4 w = weight[group];
      float products[kRows][8];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        u32 out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float d[2], h[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            h[j] = element(x[r][k], 2 * i + j) * rstd[r];
            const float g = element(up[r][k], 2 * i + j) * element(w, 2 * i + j);
            d[j] = rstd[r] * __fmaf_rn(-h[j], mean[r], g);
            if (HAS_DR) d[j] = d[j] + element(dr[r][k], 2 * i + j);
          }
          out[i] = bf16_pair(d[0], d[1]);
          const u32 n = bf16_pair(h[0], h[1]);
          products[r][2 * i] = low(word(up[r][k], i)) * low(n);
          products[r][2 * i + 1] = high(word(up[r][k], i)) * high(n);
        }
        if (row + r < a.tokens)
          reinterpret_cast<uint4*>(a.dx + (row + r) * kLine)[group] = make_uint4(out[0], out[1], out[2], out[3]);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
        total[k][i] = total[k][i] + (kRows == 1 ? products[0][i] : products[0][i] + products[kRows - 1][i]);
    }
    if (leaves == 2 && step == kSteps - 1) {
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
        const int group = thread + kThreads * k;
        if (inside(group)) store(first + 2 * group, total[k]);
#pragma unroll
        for (int i = 0; i < 8; ++i) total[k][i] = 0.0f;
      }
    }
  }
  griddepcontrol_launch_dependents();

#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    const int group = thread + kThreads * k;
    if (!inside(group)) continue;
    if (leaves == 2) {
      const float4 front = first[2 * group], back = first[2 * group + 1];
      const float before[8] = {front.x, front.y, front.z, front.w, back.x, back.y, back.z, back.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) total[k][i] = total[k][i] + before[i];
    }
    store(reinterpret_cast<float4*>(a.partials + block * CHANNELS) + 2 * group, total[k]);
  }
}
