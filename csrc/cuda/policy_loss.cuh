// What both kernels of policy_loss on Hopper share: arguments, a token's arithmetic, sums of lanes, how a piece of a sequence
// is brought, its mask counted and its tokens added, and what becomes of the batch's sums. Bits: those of
// kernels/triton/policy_loss.py (docs/ops/policy_loss.md).
#pragma once
#include "sm90.cuh"

#ifndef MASKED
#define MASKED 1  // not every token counts
#endif
#ifndef PIECE
#define PIECE 1024  // tokens that the copy engine brings at a time, of a segment of 1024
#endif

typedef unsigned char u8;

struct Arguments {
  const float* logp;        // [T], as old_logp, mask and dlogp; 16-byte aligned
  const float* old_logp;
  const float* advantages;  // [B]
  const int* borders;       // [B + 1]
  const u8* mask;
  const float* normalizer;  // []
  float* dlogp;             // out
  float* parts;             // what the first kernel leaves to the second, which the source says
  float* loss;              // out []
  float* scale;             // out []: what the gradients are multiplied by in the backward pass
  float* stats;             // out [14]
  i64* totals;              // out [6]
  int tokens, batch;
  int mean;       // the loss adds the sequences' means
  int by_tokens;  // and is divided by counted tokens, else by sequences
  int divide_by;  // 0: so, when they are known; 1: by divisor; 2: by normalizer
  float low, high, divisor;
};

namespace {

constexpr int kSegment = 1024, kPiece = PIECE, kLanes = 128, kSums = 4, kCounts = 7;
constexpr int kValues = (kPiece + 4) * 4, kFlags = MASKED ? kSegment + 16 : 0;  // bytes, with what aligns the first token
constexpr int kStage = 2 * kValues + kFlags;                                    // of a piece in shared memory
enum { kLoss, kRatio, kK1, kK3 };                                                // sums
enum { kTokens, kLow, kHigh, kSequences, kFalls, kLeast, kMost };  // counts of many sequences
constexpr u32 kAll = 0xFFFFFFFFu, kInfinity = 0x7F800000u, kNan = 0x7FFFFFFFu;

// ---- a token -------------------------------------------------------------------------------------

// Adds a token, cut if `more` > `less`, without a branch: the compiler would make one of `if`, and tokens would wait for
// each other. Returns its gradient.
__device__ __forceinline__ float add_token(float& s_loss, float& s_ratio, float& s_k1, float& s_k3, u32& hits, u32& least,
                                           u32& most, u32 counts, float power, float x, float k3, float more, float less,
                                           float clipped, float advantage, float weight) {
  float gradient;
#ifdef __CUDACC__
  asm("{\n.reg .pred on, cut;\n.reg .f32 loss;\n"
      "setp.ne.u32 on, %8, 0;\n"
      "setp.gt.and.f32 cut, %12, %13, on;\n"
      "selp.f32 loss, %14, %9, cut;\n"
      "mul.rn.f32 loss, loss, %15;\n"
      "sub.rn.f32 loss, 0f00000000, loss;\n"  // a difference: 0 from 0, not -0
      "selp.f32 %7, 0f00000000, loss, cut;\n"
      "mul.rn.f32 %7, %7, %16;\n"
      "selp.f32 %7, %7, 0f00000000, on;\n"
      "@on add.rn.f32 %0, %0, loss;\n"
      "@on add.rn.f32 %1, %1, %9;\n"
      "@on sub.rn.f32 %2, %2, %10;\n"
      "@on add.rn.f32 %3, %3, %11;\n"
      "@on add.u32 %4, %4, 1;\n"
      "@cut add.u32 %4, %4, 65536;\n"
      "@on min.u32 %5, %5, %17;\n"
      "@on max.u32 %6, %6, %17;\n}\n"
      : "+f"(s_loss), "+f"(s_ratio), "+f"(s_k1), "+f"(s_k3), "+r"(hits), "+r"(least), "+r"(most), "=&f"(gradient)
      : "r"(counts), "f"(power), "f"(x), "f"(k3), "f"(more), "f"(less), "f"(clipped), "f"(advantage), "f"(weight),
        "r"(__float_as_uint(power)));
#else  // the same for tests that run this on a CPU
  const bool on = counts != 0, cut = on && more > less;
  const float loss = 0.0f - (cut ? clipped : power) * advantage;
  gradient = on ? (cut ? 0.0f : loss) * weight : 0.0f;
  if (on) {
    s_loss = s_loss + loss;
    s_ratio = s_ratio + power;
    s_k1 = s_k1 - x;
    s_k3 = s_k3 + k3;
    least = min(least, __float_as_uint(power));
    most = max(most, __float_as_uint(power));
    hits += cut ? 65537 : 1;
  }
#endif
  return gradient;
}

// e^x - 1 - x without cancellation near 0, with power = e^x.
__device__ __forceinline__ float phi(float x, float power) {
  float p = __fmaf_rn(x, 2.7557319e-6f, 2.4801587e-5f);
  p = __fmaf_rn(p, x, 1.9841270e-4f);
  p = __fmaf_rn(p, x, 1.3888889e-3f);
  p = __fmaf_rn(p, x, 8.3333333e-3f);
  p = __fmaf_rn(p, x, 4.1666667e-2f);
  p = __fmaf_rn(p, x, 1.6666667e-1f);
  p = __fmaf_rn(p, x, 0.5f);
  return fabsf(x) <= 0.5f ? (x * x) * p : (power - 1.0f) - x;
}

// ---- sums ----------------------------------------------------------------------------------------

// Sum of 128 values in halves; a lane holds those 32 apart.
__device__ __forceinline__ float fold(const float (&x)[4]) {
  float y = (x[0] + x[2]) + (x[1] + x[3]);
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) y = y + __shfl_xor_sync(kAll, y, apart);
  return y;
}

// What a warp keeps of a segment: sums of its lanes' tokens, how many count and how many of those are cut, and the
// least and largest ratio as words, which order as ratios do, NaN above all.
struct Lanes {
  float loss[4], ratio[4], k1[4], k3[4];
  u32 hits, least, most;
};

// Two counts of a kind.
__device__ __forceinline__ u32 joined(int kind, u32 a, u32 b) {
  return kind == kLeast ? min(a, b) : kind == kMost || kind == kFalls ? max(a, b) : a + b;
}

__device__ __forceinline__ u32 over_warp(int kind, u32 x) {
  return kind == kLeast                     ? __reduce_min_sync(kAll, x)
         : kind == kMost || kind == kFalls ? __reduce_max_sync(kAll, x)
                                            : __reduce_add_sync(kAll, x);
}

// ---- pieces --------------------------------------------------------------------------------------

// Tokens [start, start + count) on their way into a stage, and `counts` bytes of the mask, as many or more; of a warp. What
// the copy engine would fetch beyond the last token, the threads copy instead.
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

// Bytes that are not 0 among bytes [from, stop), of a lane: words that end inside and the bytes behind, in turns.
__device__ __forceinline__ int counted(const u8* bytes, int from, int stop, int lane) {
  const u32* words = reinterpret_cast<const u32*>(bytes);
  const int whole = max(from, stop & ~3);
  int n = 0;
#pragma unroll 4
  for (int w = from / 4 + lane; 4 * w + 4 <= whole; w += 32) {
    u32 four = words[w];
    if (4 * w < from) four &= kAll << 8 * (from - 4 * w);
    n += __popc((((four & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | four) & 0x80808080u);
  }
  return n + (whole + lane < stop && bytes[whole + lane] != 0);
}

// What is the same for a sequence's tokens. A ratio is cut if `side` times it is above `bound`: where the advantage is
// negative both are, and one comparison does for either side.
struct Sequence {
  float advantage, weight, side, bound, clipped;
};
__device__ __forceinline__ Sequence sequence(const Arguments& a, float advantage) {
  const bool below = advantage < 0.0f;
  Sequence of = {advantage, 1.0f, below ? -1.0f : 1.0f, infinity(), below ? a.low : a.high};
  if (below || advantage > 0.0f) of.bound = of.clipped * of.side;
  return of;
}

// 128 tokens; kTail: some do not exist.
template <bool kTail>
__device__ __forceinline__ void add_tokens(Lanes& s, const Sequence& of, const float* logp, const float* old_logp,
                                           const u8* mask, float* dlogp, int left) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const bool inside = !kTail || 32 * j < left;
    u32 counts = MASKED ? mask[32 * j] : 1;
    if (kTail) counts = inside ? counts : 0;
    const float x = logp[32 * j] - old_logp[32 * j], power = exp2_of(x * 1.4426950408889634f);
    const float gradient =
        add_token(s.loss[j], s.ratio[j], s.k1[j], s.k3[j], s.hits, s.least, s.most, counts, power, x, phi(x, power),
                  power * of.side, of.bound, of.clipped, of.advantage, of.weight);
    if (inside) dlogp[32 * j] = gradient;
  }
}

__device__ __forceinline__ void add_piece(Lanes& s, const Sequence& of, const float* logp, const float* old_logp,
                                          const u8* mask, float* dlogp, int count, int lane) {
  int first = 0;
#pragma unroll 1
  for (; first + kLanes <= count; first += kLanes)
    add_tokens<false>(s, of, logp + first, old_logp + first, mask + first, dlogp + first, 0);
  if (first < count)
    add_tokens<true>(s, of, logp + first, old_logp + first, mask + first, dlogp + first, count - first - lane);
}

// ---- the batch -----------------------------------------------------------------------------------

// Loss, scale and statistics from the batch's sums, one of which each of four threads has, and counts. `fits`: the borders
// are those of the tokens; `given`: what the loss is divided by where that is known.
__device__ __forceinline__ void finish(const Arguments& a, int which, float sum, const u32 (&count)[kCounts], bool fits,
                                       float given) {
  const int n = static_cast<int>(count[kTokens]);
  const float shared = static_cast<float>(max(n, 1));
  if (which != kLoss) a.stats[which - 1] = __fdiv_rn(sum, shared);
  if (which == kLoss) {
    float denominator = a.by_tokens ? shared : static_cast<float>(max(a.batch, 1));
    if (n > 0 && a.divide_by != 0) denominator = given;
    // A GPU cannot raise: borders that do not fit make the loss and every gradient NaN.
    const bool broken = !fits || count[kFalls] != 0;
    const float nan = __uint_as_float(0x7FC00000u);
    *a.loss = broken ? nan : __fdiv_rn(sum, denominator);
    *a.scale = broken ? nan : a.divide_by == 0 ? __fdiv_rn(1.0f, denominator) : 1.0f;
  }
  if (which == kRatio) {
    const bool none = count[kMost] > kInfinity;  // a counted ratio is NaN
    a.stats[7] = __uint_as_float(n == 0 ? 0u : none ? kNan : count[kLeast]);
    a.stats[8] = __uint_as_float(n == 0 ? 0u : none ? kNan : count[kMost]);
    a.stats[9] = __uint_as_float(n == 0 ? 0u : 0xFF800000u);  // of no rollout
    for (int i = 3; i < 7; ++i) a.stats[i] = 0.0f;
  }
  if (which == kK1) {
    a.stats[10] = __fdiv_rn(static_cast<float>(static_cast<int>(count[kLow])), shared);
    a.stats[11] = __fdiv_rn(static_cast<float>(static_cast<int>(count[kHigh])), shared);
    a.stats[12] = a.stats[13] = 0.0f;
  }
  if (which == kK3) {
    a.totals[0] = n;
    a.totals[1] = count[kSequences];
    a.totals[2] = count[kLow];
    a.totals[3] = count[kHigh];
    a.totals[4] = a.totals[5] = 0;
  }
}

}  // namespace
