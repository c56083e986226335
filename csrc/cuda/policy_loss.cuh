// Shared by the two policy_loss kernels on Hopper: arguments, per-token arithmetic, lane sums, loading and summing one piece
// of a sequence, and the final statistics. Its bits are those of kernels/triton/policy_loss.py (docs/ops/policy_loss.md).
#pragma once
#include "sm90.cuh"

#ifndef MASKED
#define MASKED 1  // there is a token mask
#endif
#ifndef PIECE
#define PIECE 1024  // tokens per TMA load; divides a segment of 1024
#endif

typedef unsigned char u8;

struct Arguments {
  const float* logp;        // [T], like old_logp, mask and dlogp; 16-byte aligned
  const float* old_logp;
  const float* advantages;  // [B]
  const int* borders;       // [B + 1]
  const u8* mask;
  const float* normalizer;  // []
  float* dlogp;             // out
  float* parts;             // partial sums from the first kernel to the second; layout in the .cu
  float* loss;              // out []
  float* scale;             // out []: factor of the gradients in the backward pass
  float* stats;             // out [14]
  i64* totals;              // out [6]
  int tokens, batch;
  int mean;       // the loss sums per-sequence means
  int by_tokens;  // the denominator is the number of counted tokens, else of sequences
  int divide_by;  // 0: that denominator; 1: `divisor`; 2: `normalizer`
  float low, high, divisor;
};

namespace {

constexpr int kSegment = 1024, kPiece = PIECE, kLanes = 128, kSums = 4, kCounts = 7;
// Bytes of one piece in shared memory, padded so that loads may start at aligned addresses.
constexpr int kValues = (kPiece + 4) * 4, kFlags = MASKED ? kSegment + 16 : 0;
constexpr int kStage = 2 * kValues + kFlags;
enum { kLoss, kRatio, kK1, kK3 };  // sums
enum { kTokens, kLow, kHigh, kSequences, kDescending, kLeast, kMost };  // counts
constexpr u32 kAll = 0xFFFFFFFFu, kInfinity = 0x7F800000u, kNan = 0x7FFFFFFFu;

// ---- one token -----------------------------------------------------------------------------------

// Adds a token, clipped if `more` > `less`, and returns its gradient. PTX predicates, because nvcc turns an `if` into a
// branch, which serialises the tokens.
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
#else  // for tests that run this source on a CPU
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

// Sum of 128 values by folding halves; a lane holds the values at a stride of 32.
__device__ __forceinline__ float fold(const float (&x)[4]) {
  float y = (x[0] + x[2]) + (x[1] + x[3]);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) y = y + __shfl_xor_sync(kAll, y, mask);
  return y;
}

// A lane's state of a segment: sums, the number of counted (low 16 bits) and clipped (high 16 bits) tokens, and the smallest
// and largest ratio as integers, which order like non-negative floats with NaN on top.
struct Lanes {
  float loss[4], ratio[4], k1[4], k3[4];
  u32 hits, least, most;
};

// Combines two values of one count.
__device__ __forceinline__ u32 combine_counts(int kind, u32 a, u32 b) {
  return kind == kLeast ? min(a, b) : kind == kMost || kind == kDescending ? max(a, b) : a + b;
}

__device__ __forceinline__ u32 over_warp(int kind, u32 x) {
  return kind == kLeast                     ? __reduce_min_sync(kAll, x)
         : kind == kMost || kind == kDescending ? __reduce_max_sync(kAll, x)
                                            : __reduce_add_sync(kAll, x);
}

// ---- pieces --------------------------------------------------------------------------------------

// A warp loads tokens [start, start + count) and at least as many bytes `counts` of the mask into a stage. Threads copy
// where the aligned TMA load would read beyond the last token.
__device__ __forceinline__ void tma_load_tokens(const Arguments& a, char* stage, u32 barrier, int start, int count,
                                                int counts, int lane) {
  int first = start & ~3, stop = (start + count + 3) & ~3;
  int first_flag = start & ~15, stop_flag = (start + counts + 15) & ~15;
  bool whole = (MASKED ? stop_flag : stop) <= a.tokens;
  if (whole && lane == 0 && count > 0) {
    u32 to = shared_address(stage), values = (stop - first) * 4, flags = MASKED ? stop_flag - first_flag : 0;
    barrier_arrive_expect_tx(barrier, 2 * values + flags);
    tma_load(to, a.logp + first, values, barrier);
    tma_load(to + kValues, a.old_logp + first, values, barrier);
    if (MASKED) tma_load(to + 2 * kValues, a.mask + first_flag, flags, barrier);
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
    fence_proxy_async();
    __syncwarp();
  }
  if ((!whole || count <= 0) && lane == 0) barrier_arrive(barrier);
}

// A lane's count of nonzero bytes in [from, stop): every 32nd word, then at most one trailing byte.
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

// Constants of a sequence. A ratio is clipped if side * ratio > bound; both change sign with the advantage, so that one
// comparison serves both sides.
struct Sequence {
  float advantage, weight, side, bound, clipped;
};
__device__ __forceinline__ Sequence sequence(const Arguments& a, float advantage) {
  const bool below = advantage < 0.0f;
  Sequence of = {advantage, 1.0f, below ? -1.0f : 1.0f, infinity(), below ? a.low : a.high};
  if (below || advantage > 0.0f) of.bound = of.clipped * of.side;
  return of;
}

// Adds 128 tokens; kTail: only the first `left` (relative to the lane) exist.
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

// Writes loss, scale and statistics from the batch's sums and counts; each of four threads has one sum, number `which`.
// `fits`: the borders cover the tokens; `given`: the denominator unless divide_by is 0.
__device__ __forceinline__ void finish(const Arguments& a, int which, float sum, const u32 (&count)[kCounts], bool fits,
                                       float given) {
  const int n = static_cast<int>(count[kTokens]);
  const float shared = static_cast<float>(max(n, 1));
  if (which != kLoss) a.stats[which - 1] = __fdiv_rn(sum, shared);
  if (which == kLoss) {
    float denominator = a.by_tokens ? shared : static_cast<float>(max(a.batch, 1));
    if (n > 0 && a.divide_by != 0) denominator = given;
    // Invalid borders make the loss and every gradient NaN, because a kernel cannot raise.
    const bool broken = !fits || count[kDescending] != 0;
    const float nan = __uint_as_float(0x7FC00000u);
    *a.loss = broken ? nan : __fdiv_rn(sum, denominator);
    *a.scale = broken ? nan : a.divide_by == 0 ? __fdiv_rn(1.0f, denominator) : 1.0f;
  }
  if (which == kRatio) {
    const bool none = count[kMost] > kInfinity;  // a counted ratio is NaN
    a.stats[7] = __uint_as_float(n == 0 ? 0u : none ? kNan : count[kLeast]);
    a.stats[8] = __uint_as_float(n == 0 ? 0u : none ? kNan : count[kMost]);
    a.stats[9] = __uint_as_float(n == 0 ? 0u : 0xFF800000u);  // no rollout log-probabilities
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
