// policy_loss on Hopper for token-level clipped ratios with one advantage per sequence and no further vectors: loss,
// statistics and gradients in one pass. Its bits are those of kernels/triton/policy_loss.py (docs/ops/policy_loss.md).
//
// Compiled by NVRTC or nvcc for sm_90a with -fmad=false. Block p of 128 takes the sequences p, p + 128, ..., which are lanes
// p, p + 128, ... of the contract's sum over the batch. Its fold in halves pairs these lanes first, so a block reduces each
// sum to one number and the second kernel adds 128 of them. Each warp processes one sequence at a time from shared memory,
// filled by TMA, so no loads in flight occupy registers.

#ifndef WARPS
#define WARPS 12
#endif
#ifndef STAGES
#define STAGES 2  // pieces per warp in shared memory
#endif
#include "policy_loss.cuh"

namespace {

static_assert(kSegment % kPiece == 0, "pieces make up segments");
constexpr int kBlocks = 128;  // `parts` is [4, kBlocks] sums, then [7, kBlocks] words of counts

// A piece in shared memory and its sequence.
struct PieceInfo {
  int unit, begin, end, start;
  float advantage;
};
// A claimed sequence; its borders are not validated yet.
struct Claim {
  int number, left, right;
  float advantage;
};

// ---- pieces --------------------------------------------------------------------------------------

__device__ __forceinline__ Claim claim(const Arguments& a, int* next, int units, int lane) {
  Claim u;
  u.number = 0;
  if (lane == 0) u.number = atomicAdd(next, 1);
  u.number = __shfl_sync(kAll, u.number, 0);
  u.left = u.right = 0;
  u.advantage = 0.0f;
  if (u.number < units) {
    int row = blockIdx.x + u.number * kBlocks;
    u.left = a.borders[row];
    u.right = a.borders[row + 1];
    u.advantage = a.advantages[row];
  }
  return u;
}

// ---- the batch -----------------------------------------------------------------------------------

// Adds the blocks' results; each of four warps has one sum.
__device__ __forceinline__ void add_over_batch(const Arguments& a, int warp, int lane) {
  // Inputs that the first kernel does not write are loaded before the wait.
  const bool fits = a.borders[0] == 0 && a.borders[a.batch] == a.tokens;
  const float given = a.divide_by == 2 ? *a.normalizer : a.divisor;
  griddepcontrol_wait();
  const u32* counted = reinterpret_cast<const u32*>(a.parts) + kSums * kBlocks;
  float x[4];
  u32 counts[kCounts];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __ldcg(a.parts + warp * kBlocks + 32 * i + lane);
#pragma unroll
  for (int c = 0; c < kCounts; ++c) {
    u32 of[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) of[i] = __ldcg(counted + c * kBlocks + 32 * i + lane);
    counts[c] = over_warp(c, combine_counts(c, combine_counts(c, of[0], of[1]), combine_counts(c, of[2], of[3])));
  }
  const float total = fold(x);
  if (lane == 0) finish(a, warp, total, counts, fits, given);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) rlk_policy_loss_tokens(const __grid_constant__ Arguments a) {
  DYNAMIC_SHARED(raw);
  // Layout: stages, mbarriers, piece infos, the block's counts, the next sequence, sums of the block's sequences.
  u64* barriers = reinterpret_cast<u64*>(raw + WARPS * STAGES * kStage);
  PieceInfo* parts = reinterpret_cast<PieceInfo*>(barriers + WARPS * STAGES);
  u32* counts = reinterpret_cast<u32*>(parts + WARPS * STAGES);
  int* next = reinterpret_cast<int*>(counts + kCounts);
  float* sums = reinterpret_cast<float*>(next + 1);  // [units, kSums]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int units = (a.batch - static_cast<int>(blockIdx.x) + kBlocks - 1) / kBlocks;
  griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < WARPS * STAGES; ++i) barrier_init(shared_address(barriers + i), 1);
    for (int i = 0; i < kCounts; ++i) counts[i] = i == kLeast ? kInfinity : 0;
    *next = 0;
    fence_barrier_init();
    fence_proxy_async();
  }
  __syncthreads();

  const float divisor = a.divide_by == 2 ? *a.normalizer : a.divisor;
  char* const stages = raw + warp * STAGES * kStage;
  barriers += warp * STAGES;
  parts += warp * STAGES;
  int descending = 0, tokens = 0, low = 0, high = 0, sequences = 0;  // of this warp
  Claim now = claim(a, next, units, lane), then = claim(a, next, units, lane);
  int issued = 0, begin = 0, end = 0, at = 0;
  bool inside = false;  // of a sequence that continues at token `at`

  // Loads the next piece into the free stage. The first piece of a sequence includes the mask of its whole segment.
  auto load_next = [&]() {
    if (!inside) {
      if (now.number >= units) return;
      descending |= now.left > now.right;
      begin = min(max(now.left, 0), a.tokens);
      end = max(begin, min(now.right, a.tokens));
      at = begin;
    }
    int slot = issued % STAGES;
    if (lane == 0) {
      parts[slot].unit = now.number;
      parts[slot].begin = begin;
      parts[slot].end = end;
      parts[slot].start = at;
      parts[slot].advantage = now.advantage;
    }
    const int left = max(0, end - at), counts = a.mean && at == begin ? kSegment : kPiece;
    tma_load_tokens(a, stages + slot * kStage, shared_address(barriers + slot), at, min(kPiece, left), min(counts, left),
                    lane);
    at += kPiece;
    inside = at < end;
    if (!inside) {
      now = then;
      then = claim(a, next, units, lane);
    }
    ++issued;
  };
  for (int i = 0; i < STAGES; ++i) load_next();

  Lanes s;
  s.least = kInfinity;
  s.most = 0;
  Sequence of = {};
  float whole[kSums] = {0.0f, 0.0f, 0.0f, 0.0f};
  int n = 0;
  for (int done = 0; done < issued; ++done) {
    int slot = done % STAGES;
    __syncwarp();
    const PieceInfo part = parts[slot];
    const char* stage = stages + slot * kStage;
    const int left = max(0, part.end - part.start);
    const int within = kPiece == kSegment ? 0 : (part.start - part.begin) % kSegment;  // offset in the segment
    const u8* mask = reinterpret_cast<const u8*>(stage) + 2 * kValues;
    barrier_wait(shared_address(barriers + slot), done / STAGES & 1);
    if (part.start == part.begin) {
      of = sequence(a, part.advantage);
      n = 0;
      if (a.mean) {
        int all = max(0, part.end - part.begin);
        if (MASKED) {
          const int from = part.start & 15;
          all = counted(mask, from, from + min(kSegment, left), lane);
          all += counted(a.mask, part.start + kSegment, part.end, lane);
          all = __reduce_add_sync(kAll, all);
        }
        of.weight = __fdiv_rn(1.0f, static_cast<float>(max(all, 1)));
      }
      if (a.divide_by != 0) of.weight = __fdiv_rn(of.weight, divisor);
    }

    if (within == 0) {
#pragma unroll
      for (int j = 0; j < 4; ++j) s.loss[j] = s.ratio[j] = s.k1[j] = s.k3[j] = 0.0f;
      s.hits = 0;
    }
    const float* logp = reinterpret_cast<const float*>(stage) + (part.start & 3) + lane;
    const u8* flags = mask + (part.start & 15) + lane;
    add_piece(s, of, logp, logp + kValues / 4, flags, a.dlogp + part.start + lane, min(kPiece, left), lane);
    __syncwarp();
    load_next();
    if (within + kPiece < kSegment && left > kPiece) continue;

    const float of_segment[kSums] = {fold(s.loss), fold(s.ratio), fold(s.k1), fold(s.k3)};
    const u32 hits = __reduce_add_sync(kAll, s.hits);
    n += hits & 0xFFFF;
    (of.advantage < 0.0f ? low : high) += hits >> 16;
#pragma unroll
    for (int i = 0; i < kSums; ++i) whole[i] = part.start - within == part.begin ? of_segment[i] : whole[i] + of_segment[i];
    if (left <= kPiece) {
      if (a.mean) whole[kLoss] = __fdiv_rn(whole[kLoss], static_cast<float>(max(n, 1)));
      float mine = lane & 1 ? (lane & 2 ? whole[3] : whole[1]) : (lane & 2 ? whole[2] : whole[0]);
      if (lane < kSums) sums[part.unit * kSums + lane] = mine;
      tokens += n;
      sequences += n > 0;
    }
  }
  const u32 least = __reduce_min_sync(kAll, s.least), most = __reduce_max_sync(kAll, s.most);
  if (lane == 0) {
    atomicAdd(counts + kTokens, static_cast<u32>(tokens));
    atomicAdd(counts + kLow, static_cast<u32>(low));
    atomicAdd(counts + kHigh, static_cast<u32>(high));
    atomicAdd(counts + kSequences, static_cast<u32>(sequences));
    atomicMax(counts + kDescending, static_cast<u32>(descending));
    atomicMin(counts + kLeast, least);
    atomicMax(counts + kMost, most);
  }
  __syncthreads();
  if (warp == 0) {
    // Lane k of 8 is lane p + 128 k of the contract's 1024.
    float total = 0.0f;
#pragma unroll 4
    for (int i = lane % 8; i < units; i += 8) total = total + sums[i * kSums + lane / 8];
#pragma unroll
    for (int mask = 4; mask > 0; mask /= 2) total = total + __shfl_xor_sync(kAll, total, mask);
    if (lane % 8 == 0) a.parts[lane / 8 * kBlocks + blockIdx.x] = total;
    if (lane < kCounts) reinterpret_cast<u32*>(a.parts)[(kSums + lane) * kBlocks + blockIdx.x] = counts[lane];
  }
}

extern "C" __global__ void __launch_bounds__(32 * kSums, 1) rlk_policy_loss_batch(const __grid_constant__ Arguments a) {
  griddepcontrol_launch_dependents();
  add_over_batch(a, threadIdx.x / 32, threadIdx.x % 32);
}
