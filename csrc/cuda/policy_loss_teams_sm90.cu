// policy_loss on Hopper as in policy_loss_sm90.cu, for long sequences: one block (a team of warps) per sequence, which the
// hardware schedules, because SMs are not equally fast. Its bits are those of kernels/triton/policy_loss.py.
//
// Compiled by NVRTC or nvcc for sm_90a with -fmad=false. A block's warps take the sequence's segments round-robin, loaded by
// TMA. Each sequence leaves a record of 32 bytes; a second kernel, one cluster, adds the records of the batch.

#ifndef WARPS
#define WARPS 4  // per block
#endif
#include "policy_loss.cuh"

namespace {

constexpr int kTurn = kSegment * WARPS;
static_assert(kPiece == kSegment, "a warp loads whole segments");
constexpr int kBlocks = 8, kOwn = kLanes / kBlocks;  // blocks of the cluster; lanes of 128 per block
constexpr u32 kInvalid = 1u << 31;                   // flag in a sequence's token count: its borders descend
// Counts of a record, after kTokens; kCut (clipped tokens) is negated where the advantage is negative.
enum { kCut = 1, kSmallest, kLargest };

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * WARPS) rlk_policy_loss_tokens(const __grid_constant__ Arguments a) {
  DYNAMIC_SHARED(raw);  // one stage per warp, then their mbarriers
  __shared__ float segments[2][WARPS][kSums];  // sums of a round's segments, double-buffered
  __shared__ u32 parts[WARPS][kSums];          // counts per warp
  __shared__ int seen[WARPS];                  // counted tokens per warp
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x;
  char* const stage = raw + warp * kStage;
  const u32 barrier = shared_address(raw + WARPS * kStage) + 8 * warp;
  griddepcontrol_launch_dependents();
  const int left = a.borders[row], right = a.borders[row + 1];
  const int begin = min(max(left, 0), a.tokens), end = max(begin, min(right, a.tokens));
  const int first = begin + kSegment * warp;  // of this warp's first segment
  if (lane == 0) {
    barrier_init(barrier, 1);
    fence_barrier_init();
    fence_proxy_async();
  }
  __syncwarp();
  const auto load_segment = [&](int start) {
    const int count = min(kSegment, end - start);
    if (count > 0) tma_load_tokens(a, stage, barrier, start, count, count, lane);
  };
  load_segment(first);

  Sequence of = sequence(a, a.advantages[row]);
  const u8* mask = reinterpret_cast<const u8*>(stage) + 2 * kValues;
  if (a.mean) {
    int all = end - begin;
    if (MASKED) {
      all = 0;
      for (int at = first + kTurn; at < end; at += kTurn) all += counted(a.mask, at, min(at + kSegment, end), lane);
      if (first < end) {
        barrier_wait(barrier, 0);
        all += counted(mask, first & 15, (first & 15) + min(kSegment, end - first), lane);
      }
      all = __reduce_add_sync(kAll, all);
      if (lane == 0) seen[warp] = all;
      __syncthreads();
      all = 0;
      for (int w = 0; w < WARPS; ++w) all += seen[w];
    }
    of.weight = __fdiv_rn(1.0f, static_cast<float>(max(all, 1)));
  }
  if (a.divide_by != 0) of.weight = __fdiv_rn(of.weight, a.divide_by == 2 ? *a.normalizer : a.divisor);

  Lanes s;
  s.least = kInfinity;
  s.most = 0;
  float whole = 0.0f;  // in warp 0, lane i has sum i
  u32 n = 0, cuts = 0;
  int turn = 0;
#pragma unroll 1
  for (int front = begin, at = first; front == begin || front < end; front += kTurn, at += kTurn, ++turn) {
#pragma unroll
    for (int j = 0; j < 4; ++j) s.loss[j] = s.ratio[j] = s.k1[j] = s.k3[j] = 0.0f;
    s.hits = 0;
    if (at < end) {
      barrier_wait(barrier, turn & 1);
      const float* logp = reinterpret_cast<const float*>(stage) + (at & 3) + lane;
      add_piece(s, of, logp, logp + kValues / 4, mask + (at & 15) + lane, a.dlogp + at + lane,
                min(kSegment, end - at), lane);
    }
    __syncwarp();
    load_segment(at + kTurn);
    const float sums[kSums] = {fold(s.loss), fold(s.ratio), fold(s.k1), fold(s.k3)};
    const u32 hits = __reduce_add_sync(kAll, s.hits);
    n += hits & 0xFFFF;
    cuts += hits >> 16;
    const float mine = lane & 1 ? (lane & 2 ? sums[3] : sums[1]) : (lane & 2 ? sums[2] : sums[0]);
    if (lane < kSums) segments[turn & 1][warp][lane] = mine;
    __syncthreads();
    if (warp == 0 && lane < kSums)
      for (int w = 0; w < WARPS; ++w)
        if (front + kSegment * w < end || (w == 0 && turn == 0)) {
          const float of_segment = segments[turn & 1][w][lane];
          whole = w == 0 && turn == 0 ? of_segment : whole + of_segment;
        }
  }
  const u32 least = __reduce_min_sync(kAll, s.least), most = __reduce_max_sync(kAll, s.most);
  if (lane == 0) {
    parts[warp][kTokens] = n;
    parts[warp][kCut] = cuts;
    parts[warp][kSmallest] = least;
    parts[warp][kLargest] = most;
  }
  __syncthreads();
  if (warp == 0 && lane < kSums) {
    u32 count = parts[0][lane];
    for (int w = 1; w < WARPS; ++w) {
      const u32 other = parts[w][lane];
      count = lane == kSmallest ? min(count, other) : lane == kLargest ? max(count, other) : count + other;
    }
    if (lane == kLoss && a.mean) whole = __fdiv_rn(whole, static_cast<float>(max(static_cast<int>(count), 1)));
    if (lane == kTokens && left > right) count |= kInvalid;
    if (lane == kCut && of.advantage < 0.0f) count = 0u - count;
    reinterpret_cast<float2*>(a.parts)[kSums * row + lane] = make_float2(whole, __uint_as_float(count));
  }
}

// One cluster of 8 blocks. The contract's sum over the batch has 1024 lanes, to which sequences belong round-robin. Block c
// has the lanes l with l % 128 in [16 c, 16 c + 16), adds those at distances 512, 256 and 128, and block 0 adds the rest.
extern "C" __global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kLanes, 1)
    rlk_policy_loss_batch(const __grid_constant__ Arguments a) {
  __shared__ float sums[kSums][kLanes], rest[kSums][kLanes];
  __shared__ u32 of_warps[kCounts][4], of_blocks[kCounts][kBlocks];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, block = blockIdx.x;
  griddepcontrol_launch_dependents();
  cluster_arrive();
  // Inputs that the first kernel does not write are loaded before the wait.
  const bool fits = a.borders[0] == 0 && a.borders[a.batch] == a.tokens;
  const float given = a.divide_by == 2 ? *a.normalizer : a.divisor;
  griddepcontrol_wait();

  float total[kSums] = {0.0f, 0.0f, 0.0f, 0.0f};
  u32 count[kCounts];
#pragma unroll
  for (int c = 0; c < kCounts; ++c) count[c] = c == kLeast ? kInfinity : 0;
#pragma unroll 16
  for (int row = thread / kOwn * kLanes + kOwn * block + thread % kOwn; row < a.batch; row += kLanes * kBlocks) {
    const float4* record = reinterpret_cast<const float4*>(a.parts) + 2 * row;
    const float4 front = __ldcg(record), back = __ldcg(record + 1);
    const u32 n = __float_as_uint(front.y);
    const int cut = __float_as_int(front.w);
    total[kLoss] = total[kLoss] + front.x;
    total[kRatio] = total[kRatio] + front.z;
    total[kK1] = total[kK1] + back.x;
    total[kK3] = total[kK3] + back.z;
    count[kTokens] += n & ~kInvalid;
    count[kSequences] += (n & ~kInvalid) != 0;
    count[kDescending] |= n >> 31;
    count[kLow] += max(-cut, 0);
    count[kHigh] += max(cut, 0);
    count[kLeast] = min(count[kLeast], __float_as_uint(back.y));
    count[kMost] = max(count[kMost], __float_as_uint(back.w));
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i][thread] = total[i];
#pragma unroll
  for (int c = 0; c < kCounts; ++c) {
    const u32 x = over_warp(c, count[c]);
    if (lane == 0) of_warps[c][warp] = x;
  }
  __syncthreads();
  cluster_wait();  // block 0 has started, so its shared memory may be written
  if (thread < kSums * kOwn) {
    const float* x = sums[thread / kOwn] + thread % kOwn;
    store_to_block0(&rest[thread / kOwn][kOwn * block + thread % kOwn],
                   __float_as_uint(((x[0] + x[4 * kOwn]) + (x[2 * kOwn] + x[6 * kOwn])) +
                                   ((x[kOwn] + x[5 * kOwn]) + (x[3 * kOwn] + x[7 * kOwn]))));
  }
  if (thread < kCounts) {
    const u32* x = of_warps[thread];
    store_to_block0(&of_blocks[thread][block], combine_counts(thread, combine_counts(thread, x[0], x[1]),
                                                              combine_counts(thread, x[2], x[3])));
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  if (block != 0) return;

  const float mine[4] = {rest[warp][lane], rest[warp][lane + 32], rest[warp][lane + 64], rest[warp][lane + 96]};
  const float sum = fold(mine);
#pragma unroll
  for (int c = 0; c < kCounts; ++c) {
    count[c] = of_blocks[c][0];
    for (int b = 1; b < kBlocks; ++b) count[c] = combine_counts(c, count[c], of_blocks[c][b]);
  }
  if (lane == 0) finish(a, warp, sum, count, fits, given);
}
