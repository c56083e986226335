// policy_loss on Hopper: clipped ratios of tokens, one advantage a sequence, no further vectors; loss, statistics and
// gradients in one pass. Bits: those of kernels/triton/policy_loss.py (docs/ops/policy_loss.md); what waits for what is
// this file's own.
//
// Compiled by NVRTC or nvcc for sm_90a with -fmad=false. Block p of 128 takes the sequences p, p + 128, ...: they make up
// the lanes p, p + 128, ... of the sum over the batch, whose fold in halves pairs those with each other before any others.
// So a block leaves one number a sum, and 128 of them are all that is left to add. A warp takes a sequence at a time, whose
// tokens the copy engine has brought: registers hold none that is under way.

#ifndef WARPS
#define WARPS 12
#endif
#ifndef STAGES
#define STAGES 2  // pieces that a warp has in shared memory
#endif
#ifndef PIECE
#define PIECE 512  // tokens, of a segment of 1024
#endif
#include "policy_loss.cuh"

namespace {

constexpr int kBlocks = 128, kPiece = PIECE;  // `parts` is [4, kBlocks], then as many words of counts
constexpr int kValues = (kPiece + 4) * 4, kFlags = MASKED ? kSegment + 16 : 0;  // bytes, with what aligns the first token
constexpr int kStage = 2 * kValues + kFlags;

// A piece in shared memory, and the sequence it is of.
struct Part {
  int unit, begin, end, start;
  float advantage;
};
// A sequence, before its borders are looked at.
struct Unit {
  int number, left, right;
  float advantage;
};

// ---- arithmetic ----------------------------------------------------------------------------------

// Bytes that are not 0 among the words' bytes [from, from + count); of the whole warp. Words are aligned.
__device__ __forceinline__ int counted(const u8* bytes, int from, int count, int lane) {
  const u32* words = reinterpret_cast<const u32*>(bytes);
  const auto set = [](u32 four) { return __popc((((four & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | four) & 0x80808080u); };
  int n = 0;
  const int stop = from + count;
  if ((from | count) % 4 == 0) {
#pragma unroll 4
    for (int w = from / 4 + lane; 4 * w < stop; w += 32) n += set(words[w]);
  } else {
#pragma unroll 1
    for (int w = from / 4 + lane; 4 * w < stop; w += 32) {
      u32 four = words[w];
      if (4 * w < from) four &= kAll << 8 * (from - 4 * w);
      if (4 * w + 4 > stop) four &= kAll >> 8 * (4 * w + 4 - stop);
      n += set(four);
    }
  }
  return __reduce_add_sync(kAll, n);
}

// 128 tokens; kTail: some do not exist. The advantage's sign says on which side a ratio may be cut.
template <bool kBelow, bool kTail>
__device__ __forceinline__ void add_tokens(Lanes& s, const float* logp, const float* old_logp, const u8* mask, float* dlogp,
                                           int left, float bound, float clipped, float advantage, float weight) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const bool inside = !kTail || 32 * j < left;
    u32 counts = MASKED ? mask[32 * j] : 1;
    if (kTail) counts = inside ? counts : 0;
    const float x = logp[32 * j] - old_logp[32 * j], power = exp2_of(x * 1.4426950408889634f);
    const float gradient =
        add_token(s.loss[j], s.ratio[j], s.k1[j], s.k3[j], s.hits, s.least, s.most, counts, power, x, phi(x, power),
                  kBelow ? bound : power, kBelow ? power : bound, clipped, advantage, weight);
    if (inside) dlogp[32 * j] = gradient;
  }
}

template <bool kBelow>
__device__ __forceinline__ void add_piece(Lanes& s, const float* logp, const float* old_logp, const u8* mask,
                                            float* dlogp, int count, float bound, float clipped, float advantage,
                                            float weight) {
  int first = 0;
#pragma unroll 1
  for (; first + kLanes <= count; first += kLanes)
    add_tokens<kBelow, false>(s, logp + first, old_logp + first, mask + first, dlogp + first, 0, bound, clipped,
                              advantage, weight);
  if (first < count) {
    int lane = threadIdx.x % 32;
    add_tokens<kBelow, true>(s, logp + first, old_logp + first, mask + first, dlogp + first, count - first - lane, bound,
                             clipped, advantage, weight);
  }
}

// ---- pieces --------------------------------------------------------------------------------------

__device__ __forceinline__ Unit take(const Arguments& a, int* next, int units, int lane) {
  Unit u;
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

// Tokens [start, start + count) on their way into a stage, and as many bytes of the mask or more. What the copy engine
// would fetch beyond the last token, the threads copy instead.
__device__ __forceinline__ void bring(const Arguments& a, char* stage, u32 barrier, int start, int count, int counts,
                                      int lane) {
  int first = start & ~3, stop = (start + count + 3) & ~3;
  int first_flag = start & ~15, stop_flag = (start + counts + 15) & ~15;
  bool whole = (MASKED ? stop_flag : stop) <= a.tokens;
  if (whole && lane == 0 && count > 0) {
    u32 to = shared_address(stage), values = (stop - first) * 4, flags = MASKED ? stop_flag - first_flag : 0;
    barrier_expect(barrier, 2 * values + flags);
    fetch(to, a.logp + first, values, barrier);
    fetch(to + kValues, a.old_logp + first, values, barrier);
    if (MASKED) fetch(to + 2 * kValues, a.mask + first_flag, flags, barrier);
  }
  if (!whole) {
    float* values = reinterpret_cast<float*>(stage);
    for (int t = start + lane; t < start + count; t += 32) {
      values[t - first] = a.logp[t];
      values[kValues / 4 + t - first] = a.old_logp[t];
    }
    if (MASKED)
      for (int t = start + lane; t < start + counts; t += 32)
        reinterpret_cast<u8*>(stage)[2 * kValues + t - first_flag] = a.mask[t];
    stores_fence();
    __syncwarp();
  }
  if ((!whole || count <= 0) && lane == 0) barrier_arrive(barrier);
}

// ---- the batch -----------------------------------------------------------------------------------

// Loss, scale and statistics from what each block left; of four warps, a sum each.
__device__ __forceinline__ void add_over_batch(const Arguments& a, int warp, int lane) {
  // What no block writes is under way already while they end.
  const bool fits = a.borders[0] == 0 && a.borders[a.batch] == a.tokens;
  const float given = a.divide_by == 2 ? *a.normalizer : a.divisor;
  wait_for_previous();
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
    counts[c] = over_warp(c, joined(c, joined(c, of[0], of[1]), joined(c, of[2], of[3])));
  }
  const float total = fold(x);
  if (lane == 0) finish(a, warp, total, counts, fits, given);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) rlk_policy_loss_tokens(const __grid_constant__ Arguments a) {
  DYNAMIC_SHARED(raw);
  // stages, barriers, parts, counts of the block, the next sequence, sums of the block's sequences
  u64* barriers = reinterpret_cast<u64*>(raw + WARPS * STAGES * kStage);
  Part* parts = reinterpret_cast<Part*>(barriers + WARPS * STAGES);
  u32* counts = reinterpret_cast<u32*>(parts + WARPS * STAGES);
  int* next = reinterpret_cast<int*>(counts + kCounts);
  float* sums = reinterpret_cast<float*>(next + 1);  // [units, kSums]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int units = (a.batch - static_cast<int>(blockIdx.x) + kBlocks - 1) / kBlocks;
  next_may_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < WARPS * STAGES; ++i) barrier_init(shared_address(barriers + i), 1);
    for (int i = 0; i < kCounts; ++i) counts[i] = i == kLeast ? kInfinity : 0;
    *next = 0;
    barriers_made();
    stores_fence();
  }
  __syncthreads();

  const float divisor = a.divide_by == 2 ? *a.normalizer : a.divisor;
  char* const stages = raw + warp * STAGES * kStage;
  barriers += warp * STAGES;
  parts += warp * STAGES;
  int falls = 0, tokens = 0, low = 0, high = 0, sequences = 0;  // of the warp
  Unit now = take(a, next, units, lane), then = take(a, next, units, lane);
  int brought = 0, begin = 0, end = 0, at = 0;
  bool inside = false;  // of a sequence, of which `at` comes next

  // The next piece that there is, into the stage that is free. A sequence's first one has the mask of its segment.
  auto bring_next = [&]() {
    if (!inside) {
      if (now.number >= units) return;
      falls |= now.left > now.right;
      begin = min(max(now.left, 0), a.tokens);
      end = max(begin, min(now.right, a.tokens));
      at = begin;
    }
    int slot = brought % STAGES;
    if (lane == 0) {
      parts[slot].unit = now.number;
      parts[slot].begin = begin;
      parts[slot].end = end;
      parts[slot].start = at;
      parts[slot].advantage = now.advantage;
    }
    const int left = max(0, end - at), counts = a.mean && at == begin ? kSegment : kPiece;
    bring(a, stages + slot * kStage, shared_address(barriers + slot), at, min(kPiece, left), min(counts, left), lane);
    at += kPiece;
    inside = at < end;
    if (!inside) {
      now = then;
      then = take(a, next, units, lane);
    }
    ++brought;
  };
  for (int i = 0; i < STAGES; ++i) bring_next();

  Lanes s;
  s.least = kInfinity;
  s.most = 0;
  float weight = 1.0f, whole[kSums] = {0.0f, 0.0f, 0.0f, 0.0f};
  int n = 0;
  for (int done = 0; done < brought; ++done) {
    int slot = done % STAGES;
    __syncwarp();
    const Part part = parts[slot];
    const char* stage = stages + slot * kStage;
    const int left = max(0, part.end - part.start);
    const int within = kPiece == kSegment ? 0 : (part.start - part.begin) % kSegment;  // the segment
    const u8* mask = reinterpret_cast<const u8*>(stage) + 2 * kValues;
    barrier_wait(shared_address(barriers + slot), done / STAGES & 1);
    if (part.start == part.begin) {
      weight = 1.0f;
      n = 0;
      if (a.mean) {
        int all = max(0, part.end - part.begin);
        if (MASKED) {
          all = counted(mask, part.start & 15, min(kSegment, left), lane);
          const int from = part.start + kSegment, stop = max(from, part.end & ~3);
          if (from < part.end) {  // words of the mask that end inside it, and the bytes behind
            all += counted(a.mask, from, stop - from, lane);
            all += __popc(__ballot_sync(kAll, stop + lane < part.end && a.mask[stop + lane] != 0));
          }
        }
        weight = __fdiv_rn(1.0f, static_cast<float>(max(all, 1)));
      }
      if (a.divide_by != 0) weight = __fdiv_rn(weight, divisor);
    }

    if (within == 0) {
#pragma unroll
      for (int j = 0; j < 4; ++j) s.loss[j] = s.ratio[j] = s.k1[j] = s.k3[j] = 0.0f;
      s.hits = 0;
    }
    const float* logp = reinterpret_cast<const float*>(stage) + (part.start & 3) + lane;
    const float* old_logp = logp + kValues / 4;
    const u8* flags = mask + (part.start & 15) + lane;
    float* dlogp = a.dlogp + part.start + lane;
    const bool below = part.advantage < 0.0f;
    if (below)
      add_piece<true>(s, logp, old_logp, flags, dlogp, min(kPiece, left), a.low, a.low, part.advantage, weight);
    else
      add_piece<false>(s, logp, old_logp, flags, dlogp, min(kPiece, left), part.advantage > 0.0f ? a.high : infinity(),
                         a.high, part.advantage, weight);
    __syncwarp();
    bring_next();
    if (within + kPiece < kSegment && left > kPiece) continue;

    const float of_segment[kSums] = {fold(s.loss), fold(s.ratio), fold(s.k1), fold(s.k3)};
    const u32 hits = __reduce_add_sync(kAll, s.hits);
    n += hits & 0xFFFF;
    (below ? low : high) += hits >> 16;
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
    atomicMax(counts + kFalls, static_cast<u32>(falls));
    atomicMin(counts + kLeast, least);
    atomicMax(counts + kMost, most);
  }
  __syncthreads();
  if (warp == 0) {
    // Lane k of 8 is lane p + 128 k of the batch's 1024.
    float total = 0.0f;
#pragma unroll 4
    for (int i = lane % 8; i < units; i += 8) total = total + sums[i * kSums + lane / 8];
#pragma unroll
    for (int apart = 4; apart > 0; apart /= 2) total = total + __shfl_xor_sync(kAll, total, apart);
    if (lane % 8 == 0) a.parts[lane / 8 * kBlocks + blockIdx.x] = total;
    if (lane < kCounts) reinterpret_cast<u32*>(a.parts)[(kSums + lane) * kBlocks + blockIdx.x] = counts[lane];
  }
}

extern "C" __global__ void __launch_bounds__(32 * kSums, 1) rlk_policy_loss_batch(const __grid_constant__ Arguments a) {
  next_may_start();
  add_over_batch(a, threadIdx.x / 32, threadIdx.x % 32);
}
