// Shared by logprob and linear_logprob: statistics of a vocabulary tile, their combination over tiles, the gradient of a
// logit. Sums are integers, so neither vector width nor order changes a bit.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>
#include "common.h"

namespace rlk {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kFixed = 1.0f / (1 << 23);            // unit of the fixed-point sums inside a tile
constexpr float kRowUnits = float(int64_t(1) << 40);  // units per 1 of the fixed-point sums over tiles

static inline int64_t vocab_tiles(int64_t V) { return (V + kVocabTile - 1) / kVocabTile; }
static inline bool is_kept(const uint32_t* kept, int64_t v) { return !kept || (kept[v >> 5] >> (v & 31) & 1); }

// z[0, padded) = x[0, n) * inv with dropped and missing entries -inf. Returns padded, n rounded up to kLanes.
// `kept` points to the tile's words, or is null.
template <class T> RLK_INLINE int load_tile(const T* x, int n, float inv, const uint32_t* kept, float* z) {
    const int padded = (n + kLanes - 1) / kLanes * kLanes;
#pragma omp simd
    for (int i = 0; i < n; ++i) z[i] = to_float(x[i]) * inv;
    for (int i = n; i < padded; ++i) z[i] = -kInf;
    if (!kept) return padded;
    for (int w = 0; w * 32 < n; ++w) {
        if (kept[w] == ~0u) continue;
        for (int i = w * 32; i < std::min(n, w * 32 + 32); ++i) z[i] = (kept[w] >> (i & 31) & 1) ? z[i] : -kInf;
    }
    return padded;
}

// Statistics of a tile: maximum (-inf: empty; NaN: contains NaN or +inf), sum of p = exp(d), sum of p * -d with d = z - m.
struct Tile { float m, s, e; };
RLK_INLINE Tile tile_stats(const float* z, int padded) {
    float m = -kInf;
    int32_t bad = 0;
#pragma omp simd reduction(max : m) reduction(| : bad)
    for (int i = 0; i < padded; ++i) {
        m = z[i] > m ? z[i] : m;
        bad |= z[i] < kInf ? 0 : 1;
    }
    if (bad) return {kNan, 0.0f, 0.0f};
    if (m == -kInf) return {m, 0.0f, 0.0f};
    const int32_t one = int32_t(as_bits(1.0f));
    int32_t s = 0, e = 0;
#pragma omp simd reduction(+ : s, e)
    for (int i = 0; i < padded; ++i) {
        float d = z[i] - m;
        float p = exp(d);
        float q = p * -d;
        q = p == 0.0f ? 0.0f : q;
        s += int32_t(as_bits(p + 1.0f)) - one;
        e += int32_t(as_bits(q + 1.0f)) - one;
    }
    return {m, float(s) * kFixed, float(e) * kFixed};
}

struct Row { float m, log_s, entropy; };
// Combines a row's tiles by integer sums in units of 2^-40, whose order changes no bit.
static inline Row fold_tiles(int64_t tiles, const float* m, const float* s, const float* e) {
    float top = -kInf;
    for (int64_t t = 0; t < tiles; ++t) {
        if (m[t] != m[t]) return {kNan, kNan, kNan};
        top = m[t] > top ? m[t] : top;
    }
    top = top + 0.0f;
    if (top == -kInf) return {top, 0.0f, 0.0f};
    int64_t sums = 0, distance_sums = 0;
#pragma omp simd reduction(+ : sums, distance_sums)
    for (int64_t t = 0; t < tiles; ++t) {
        float w = exp(m[t] - top);
        float a = w * s[t], b = w * fma(s[t], top - m[t], e[t]);
        sums += int64_t(std::nearbyint(a * kRowUnits));
        distance_sums += w == 0.0f ? 0 : int64_t(std::nearbyint(b * kRowUnits));  // because the distance may be infinite
    }
    const float sum = float(sums) / kRowUnits, distance_sum = float(distance_sums) / kRowUnits;
    const float log_s = log(sum);
    return {top, log_s, log_s + distance_sum / sum};
}

// Results of a forward, one number per row (two in stats).
struct Outputs { float *logp, *entropy, *lse, *stats; };
// `target` is the target's logit times 1/T; `kept` says whether the target was kept.
static inline void finish_row(const Outputs& out, int64_t t, const Row& row, float target, bool kept) {
    out.stats[2 * t] = row.m;
    out.stats[2 * t + 1] = row.log_s;
    out.entropy[t] = row.entropy;
    out.lse[t] = row.m + row.log_s;
    float logp = row.m == -kInf ? -kInf : (target - row.m) - row.log_s;
    out.logp[t] = kept || row.m != row.m ? logp : -kInf;
}

// Upstream gradients and saved tensors of a backward; a null gradient is zero.
struct Upstream {
    const int64_t* targets;
    const float *inv, *stats, *entropy, *dlogp, *dentropy;
    const uint32_t* kept;
    int64_t words;
    const uint32_t* row_kept(int64_t t) const { return kept ? kept + t * words : nullptr; }
    float g(int64_t t) const { return dlogp ? dlogp[t] : 0.0f; }
    float h(int64_t t) const { return dentropy ? dentropy[t] : 0.0f; }
    // Whether row t has a gradient.
    bool active(int64_t t) const {
        return (g(t) != 0.0f || h(t) != 0.0f) && stats[2 * t] != -kInf && is_kept(row_kept(t), targets[t]);
    }
};

// out[0, n) = gradient of the logits x[0, n) of row t, which are entries [v0, v0 + n), rounded to R; out may be x.
template <class R, class T, class O>
static void logit_grads(const Upstream& up, int64_t t, const T* x, int64_t v0, int64_t n, O* out) {
    const float inv = up.inv ? up.inv[t] : 1.0f, g = up.g(t), h = up.h(t), entropy = up.entropy[t];
    const float m = up.stats[2 * t], log_s = up.stats[2 * t + 1];
    const int64_t y = up.targets[t] - v0;
    const bool inside = y >= 0 && y < n;
    auto row = [&](auto with_entropy) {
        auto grad = [=](float logit, float hit) __attribute__((always_inline)) {
            float l = (logit * inv - m) - log_s;
            float p = exp(l);
            float dz = g * (hit - p);
            if constexpr (decltype(with_entropy)::value) dz = fma(-(h * p), p == 0.0f ? 0.0f : l + entropy, dz);
            return from_float<O>(round_to<R>(dz * inv));
        };
        const O target = inside ? grad(to_float(x[y]), 1.0f) : from_float<O>(0.0f);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) out[i] = grad(to_float(x[i]), 0.0f);
        if (inside) out[y] = target;
    };
    if (up.dentropy) row(std::true_type{});
    else row(std::false_type{});
    if (const uint32_t* kept = up.row_kept(t))
        for (int64_t i = 0; i < n; ++i)
            if (!is_kept(kept, v0 + i)) out[i] = from_float<O>(0.0f);
}

}  // namespace rlk
