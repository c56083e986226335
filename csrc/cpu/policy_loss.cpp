// policy_loss: loss, gradients and statistics of log-probability vectors in one pass over each sequence.
// A sequence is cut into segments of kSegment tokens; row_sum adds inside a segment, segments are added ascending, and
// the batch adds its sequences the same way. Same operations as rlkernel/kernels/reference/policy_loss.py.
#include <algorithm>
#include <vector>
#include "common.h"
using namespace rlk;

namespace {

constexpr int64_t kSegment = 1024;
enum Form : int32_t { kClipped = 0, kCispo = 1, kReinforce = 2 };
enum Sum { kLoss, kRatio, kK1, kK3, kKl, kEntropy, kTis, kDrift, kSlope, kSums };
enum Count { kTokens, kSequences, kLow, kHigh, kDual, kTisCut, kCounts };

struct Inputs {
    const float *logp, *old_logp, *advantages;
    const int32_t* cu_seqlens;
    const uint8_t* mask;
    const float *ref_logp, *entropy, *rollout_logp;
    bool advantage_per_token;
};

struct Options {
    int32_t form, kl_type;
    bool sequence_ratio, sequence_mean, divide_by_tokens;
    float low, high, dual, kl_coef, entropy_coef, tis_cap;  // dual: inf is off; tis_cap: 0 is off
};

struct Partial {
    float sum[kSums] = {};
    int64_t count[kCounts] = {};
    float ratio_min = 0.0f, ratio_max = 0.0f, drift_max = 0.0f;
};

// e^x - 1 - x without cancellation near 0.
RLK_INLINE float phi(float x) {
    float p = 2.7557319e-6f;
    p = fma(p, x, 2.4801587e-5f);
    p = fma(p, x, 1.9841270e-4f);
    p = fma(p, x, 1.3888889e-3f);
    p = fma(p, x, 8.3333333e-3f);
    p = fma(p, x, 4.1666667e-2f);
    p = fma(p, x, 1.6666667e-1f);
    p = fma(p, x, 0.5f);
    return std::fabs(x) <= 0.5f ? (x * x) * p : (exp(x) - 1.0f) - x;
}

RLK_INLINE float lower(float a, float b) { return b < a || b != b ? b : a; }   // propagates NaN, as torch.min does
RLK_INLINE float higher(float a, float b) { return b > a || b != b ? b : a; }

// Returns the sums, counts and extremes of a sequence and writes its unscaled gradient to dlogp.
Partial sequence(const Inputs& in, const Options& opt, int64_t row, float* dlogp) {
    const int64_t begin = in.cu_seqlens[row], end = in.cu_seqlens[row + 1];
    auto counts = [&](int64_t t) { return !in.mask || in.mask[t]; };
    Partial out;
    for (int64_t t = begin; t < end; ++t) out.count[kTokens] += counts(t);
    const float share = float(std::max<int64_t>(1, out.count[kTokens]));
    out.count[kSequences] = out.count[kTokens] > 0;

    float shared_ratio = 0.0f;
    if (opt.sequence_ratio) {
        float total = 0.0f;
        for (int64_t s = begin; s < end; s += kSegment)
            total += row_sum(std::min(kSegment, end - s), [&](int64_t i) {
                return counts(s + i) ? in.logp[s + i] - in.old_logp[s + i] : 0.0f;
            });
        shared_ratio = exp(total / share);
    }

    float terms[kSums][kSegment];
    bool first = true;
    for (int64_t s = begin; s < end; s += kSegment) {
        const int64_t width = std::min(kSegment, end - s);
        for (int64_t i = 0; i < width; ++i) {
            const int64_t t = s + i;
            if (!counts(t)) {
                for (auto& term : terms) term[i] = 0.0f;
                dlogp[t] = 0.0f;
                continue;
            }
            const float logp = in.logp[t], old = in.old_logp[t], a = in.advantages[in.advantage_per_token ? t : row];
            const float log_ratio = logp - old;
            const float ratio = opt.sequence_ratio ? shared_ratio : exp(log_ratio);
            bool cut_low = false, cut_high = false, cut_dual = false;
            float loss, slope;
            if (opt.form == kClipped) {
                cut_low = a < 0.0f && ratio < opt.low;
                cut_high = a > 0.0f && ratio > opt.high;
                cut_dual = a < 0.0f && ratio > opt.dual;
                loss = -((cut_low ? opt.low : cut_high ? opt.high : cut_dual ? opt.dual : ratio) * a);
                slope = cut_low || cut_high || cut_dual ? 0.0f : loss;
            } else if (opt.form == kCispo) {
                cut_low = ratio < opt.low;
                cut_high = ratio > opt.high;
                slope = -((cut_low ? opt.low : cut_high ? opt.high : ratio) * a);
                loss = slope * logp;
            } else {
                slope = -a;
                loss = slope * logp;
            }
            float tis = 0.0f, drift = 0.0f;
            if (in.rollout_logp) {
                drift = std::fabs(logp - in.rollout_logp[t]);
                if (opt.tis_cap > 0.0f) {
                    tis = exp(old - in.rollout_logp[t]);
                    const bool cut = tis > opt.tis_cap;
                    out.count[kTisCut] += cut;
                    tis = cut ? opt.tis_cap : tis;
                    loss *= tis;
                    slope *= tis;
                }
            }
            float kl = 0.0f, dkl = 0.0f;
            if (in.ref_logp) {
                const float d = logp - in.ref_logp[t];
                kl = opt.kl_type == 0 ? d : opt.kl_type == 1 ? 0.5f * (d * d) : phi(-d);
                dkl = opt.kl_type == 0 ? 1.0f : opt.kl_type == 1 ? d : d - kl;
                if (opt.kl_coef != 0.0f) loss = fma(opt.kl_coef, kl, loss);
            }
            const float entropy = in.entropy ? in.entropy[t] : 0.0f;
            if (in.entropy && opt.entropy_coef != 0.0f) loss = fma(-opt.entropy_coef, entropy, loss);

            const bool through_mean = opt.sequence_ratio && opt.form == kClipped;
            if (through_mean) dlogp[t] = dkl;       // the slope of the sequence is added after this loop
            else dlogp[t] = in.ref_logp && opt.kl_coef != 0.0f ? fma(opt.kl_coef, dkl, slope) : slope;
            terms[kLoss][i] = loss;
            terms[kRatio][i] = ratio;
            terms[kK1][i] = -log_ratio;
            terms[kK3][i] = phi(log_ratio);
            terms[kKl][i] = kl;
            terms[kEntropy][i] = entropy;
            terms[kTis][i] = tis;
            terms[kDrift][i] = drift;
            terms[kSlope][i] = slope;
            out.count[kLow] += cut_low;
            out.count[kHigh] += cut_high;
            out.count[kDual] += cut_dual;
            out.ratio_min = first ? ratio : lower(out.ratio_min, ratio);
            out.ratio_max = first ? ratio : higher(out.ratio_max, ratio);
            out.drift_max = higher(out.drift_max, drift);
            first = false;
        }
        for (int k = 0; k < kSums; ++k) out.sum[k] += row_sum(width, [&](int64_t i) { return terms[k][i]; });
    }

    if (opt.sequence_ratio && opt.form == kClipped) {
        const float slope = out.sum[kSlope] / share;
        const bool with_kl = in.ref_logp && opt.kl_coef != 0.0f;
        for (int64_t t = begin; t < end; ++t)
            if (counts(t)) dlogp[t] = with_kl ? fma(opt.kl_coef, dlogp[t], slope) : slope;
    }
    return out;
}

// Sum of f(row) over the batch: segments of kSegment sequences, ascending.
template <class F> float batch_sum(int64_t batch, F f) {
    float total = 0.0f;
    for (int64_t s = 0; s < batch; s += kSegment)
        total += row_sum(std::min(kSegment, batch - s), [&](int64_t i) { return f(s + i); });
    return total;
}

}  // namespace

// Vectors of T tokens; advantages [T] or [B]; absent inputs are null. flags: advantage_per_token, form, kl_type,
// sequence_ratio, sequence_mean, divide_by_tokens. scalars: low, high, dual, kl_coef, entropy_coef, tis_cap.
// Out: loss [1], dlogp [T], dentropy [T] or null, stats [14], counts [6].
RLK_API void rlk_policy_loss(const float* logp, const float* old_logp, const float* advantages, const int32_t* cu_seqlens,
                             const uint8_t* mask, const float* ref_logp, const float* entropy, const float* rollout_logp,
                             const float* normalizer, const int32_t* flags, const float* scalars, float* loss, float* dlogp,
                             float* dentropy, float* stats, int64_t* counts, int64_t batch, int32_t threads) {
    PlainFloats plain;
    const Inputs in{logp, old_logp, advantages, cu_seqlens, mask, ref_logp, entropy, rollout_logp, flags[0] != 0};
    const Options opt{flags[1], flags[2], flags[3] != 0, flags[4] != 0, flags[5] != 0,
                      scalars[0], scalars[1], scalars[2], scalars[3], scalars[4], scalars[5]};
    std::vector<Partial> parts(batch);
    parallel_for(batch, 1, threads, [&](int64_t row) { parts[row] = sequence(in, opt, row, dlogp); });

    std::fill(counts, counts + kCounts, 0);
    for (const Partial& part : parts)
        for (int k = 0; k < kCounts; ++k) counts[k] += part.count[k];
    const int64_t total = counts[kTokens];
    const float denominator =
        normalizer && total > 0 ? *normalizer : float(std::max<int64_t>(1, opt.divide_by_tokens ? total : batch));
    auto share = [&](int64_t row) { return float(std::max<int64_t>(1, parts[row].count[kTokens])); };

    *loss = batch_sum(batch, [&](int64_t row) {
        return opt.sequence_mean ? parts[row].sum[kLoss] / share(row) : parts[row].sum[kLoss];
    }) / denominator;
    for (int k = kRatio; k <= kDrift; ++k)
        stats[k - kRatio] = batch_sum(batch, [&](int64_t row) { return parts[row].sum[k]; }) / float(std::max<int64_t>(1, total));
    float* extremes = stats + (kDrift - kRatio + 1);
    std::fill(extremes, extremes + 3, 0.0f);
    bool first = true;
    for (const Partial& part : parts) {
        if (part.count[kTokens] == 0) continue;
        extremes[0] = first ? part.ratio_min : lower(extremes[0], part.ratio_min);
        extremes[1] = first ? part.ratio_max : higher(extremes[1], part.ratio_max);
        extremes[2] = higher(extremes[2], part.drift_max);
        first = false;
    }
    for (int k = kLow; k <= kTisCut; ++k) extremes[3 + k - kLow] = float(counts[k]) / float(std::max<int64_t>(1, total));

    parallel_for(batch, 1, threads, [&](int64_t row) {
        const float weight = (opt.sequence_mean ? 1.0f / share(row) : 1.0f) / denominator;
        for (int64_t t = cu_seqlens[row]; t < cu_seqlens[row + 1]; ++t) {
            const bool counted = !mask || mask[t];
            dlogp[t] = counted ? dlogp[t] * weight : 0.0f;
            if (dentropy) dentropy[t] = counted ? -opt.entropy_coef * weight : 0.0f;
        }
    });
}

// x [n] = (x * scale) * dloss in place; scale and dloss point to one number each.
RLK_API void rlk_policy_loss_scale(float* x, const float* scale, const float* dloss, int64_t n, int32_t threads) {
    constexpr int64_t kBlock = 4096;
    parallel_for((n + kBlock - 1) / kBlock, 8, threads, [=](int64_t block) {
        const int64_t end = std::min(n, (block + 1) * kBlock);
#pragma omp simd
        for (int64_t i = block * kBlock; i < end; ++i) x[i] = (x[i] * *scale) * *dloss;
    });
}
