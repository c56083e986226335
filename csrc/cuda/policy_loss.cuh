// What both kernels of policy_loss on Hopper share: arguments, a token's arithmetic, sums of lanes, and what becomes of the
// batch's sums. Bits: those of kernels/triton/policy_loss.py (docs/ops/policy_loss.md).
#pragma once
#include "sm90.cuh"

#ifndef MASKED
#define MASKED 1  // not every token counts
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

constexpr int kSegment = 1024, kLanes = 128, kSums = 4, kCounts = 7;
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
