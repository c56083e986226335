// logprob: selected log-probability, entropy and log-sum-exp of given logits, and the gradient of the logits.
#include "logprob.h"
using namespace rlk;

static int used_threads(int64_t T, int64_t V, int threads) { return T * V < 16384 ? 1 : threads; }

// logits [T,V]; inv [T] or null; kept [T, ceil(V/32)] or null; logp, entropy, lse [T]; stats [T,2].
RLK_API void rlk_logprob(const void* logits, const int64_t* targets, const float* inv, const uint32_t* kept, float* logp,
                         float* entropy, float* lse, float* stats, int64_t T, int64_t V, int32_t dtype, int32_t threads) {
    const int64_t tiles = vocab_tiles(V), words = (V + 31) / 32;
    const Outputs outputs{logp, entropy, lse, stats};
    dispatch(dtype, [&](auto tag) {
        using L = decltype(tag);
        parallel_for(T, 1, used_threads(T, V, threads), [&](int64_t t) {
            static thread_local std::vector<float> scratch;
            scratch.resize(3 * tiles);
            float *m = scratch.data(), *s = m + tiles, *e = s + tiles;
            const L* x = static_cast<const L*>(logits) + t * V;
            const uint32_t* row_kept = kept ? kept + t * words : nullptr;
            const float scale = inv ? inv[t] : 1.0f;
            for (int64_t i = 0; i < tiles; ++i) {
                float z[kVocabTile];
                int n = int(std::min<int64_t>(kVocabTile, V - i * kVocabTile));
                int padded = load_tile(x + i * kVocabTile, n, scale, row_kept ? row_kept + i * kVocabTile / 32 : nullptr, z);
                Tile tile = tile_stats(z, padded);
                m[i] = tile.m, s[i] = tile.s, e[i] = tile.e;
            }
            const int64_t y = targets[t];
            finish_row(outputs, t, fold_tiles(tiles, m, s, e), to_float(x[y]) * scale, is_kept(row_kept, y));
        });
    });
}

// dlogits [T,V] in the logits' dtype; dlogp, dentropy [T] or null.
RLK_API void rlk_logprob_dgrad(const void* logits, const int64_t* targets, const float* inv, const uint32_t* kept,
                               const float* stats, const float* entropy, const float* dlogp, const float* dentropy,
                               void* dlogits, int64_t T, int64_t V, int32_t dtype, int32_t threads) {
    const Upstream up{targets, inv, stats, entropy, dlogp, dentropy, kept, (V + 31) / 32};
    dispatch(dtype, [&](auto tag) {
        using L = decltype(tag);
        parallel_for(T, 1, used_threads(T, V, threads), [&](int64_t t) {
            const L* x = static_cast<const L*>(logits) + t * V;
            L* out = static_cast<L*>(dlogits) + t * V;
            if (up.active(t)) logit_grads<L>(up, t, x, 0, V, out);
            else std::fill(out, out + V, from_float<L>(0.0f));
        });
    });
}
