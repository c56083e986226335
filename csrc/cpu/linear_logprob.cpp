// linear_logprob: log-probabilities and their gradients from hidden states and the LM head's weight, in blocks of rows
// and vocabulary. Logits come from gemm.h and the rest from logprob.h, so the bits are those of linear and logprob. No
// [T, V] tensor exists, except the probabilities that a forward may save for its backward.
#include "gemm.h"
#include "logprob.h"
using namespace rlk;

// Blocks: at most kBlockRows x kBlockVocab logits at a time (2 MiB); twice the rows if the vocabulary is smaller.
constexpr int64_t kBlockRows = 512, kBlockVocab = 1024;
static int64_t block_vocab(int64_t V) { return std::min(V, kBlockVocab); }
static int64_t block_rows(int64_t T, int64_t V) { return std::min(T, block_vocab(V) < kBlockVocab ? 2 * kBlockRows : kBlockRows); }

// Thread-local buffers, kept between calls because page faults would cost more than a small GEMM. A call uses 2 MiB of
// logits and block_rows x (2 C + 3 tiles) floats.
static float* scratch(int which, int64_t count) {
    static thread_local std::vector<float> buffers[3];
    if (int64_t(buffers[which].size()) < count) buffers[which].resize(count);
    return buffers[which].data();
}

// z [rows, n] (stride ld) = x [rows, C] times the rows [v0, v0 + n) of weight, transposed.
template <class T>
static void logits_block(const T* x, const T* weight, float* z, int64_t ld, int64_t rows, int64_t n, int64_t C, int threads) {
    gemm(rows, n, C, 1, View<T>{x, C, 1}, View<T>{weight, 1, C}, threads, no_init,
         [&](int64_t m, int64_t v, int height, int width, const float* c) {
             for (int i = 0; i < height; ++i) std::copy(c + i * kCols, c + i * kCols + width, z + (m + i) * ld + v);
         });
}

// Continues sums [M, C] with a [M, K] b [K, C], k ascending.
template <class T>
static void add_product(View<float> a, View<T> b, float* sums, int64_t M, int64_t C, int64_t K, int threads) {
    gemm(M, C, K, 1, a, b, threads,
         [&](int64_t m, int64_t n, int rows, int cols, float* c) {
             for (int i = 0; i < rows; ++i) std::copy_n(sums + (m + i) * C + n, cols, c + i * kCols);
         },
         [&](int64_t m, int64_t n, int rows, int cols, const float* c) {
             for (int i = 0; i < rows; ++i) std::copy_n(c + i * kCols, cols, sums + (m + i) * C + n);
         });
}

// Returns the maximum of the tile z [0, padded) (NaN if it contains one); p[0, n) = exp(z - maximum), rounded once.
template <class T> static float tile_probs(const float* z, int n, int padded, T* p) {
    float m = -kInf;
    for (int i = 0; i < padded; ++i) m = z[i] > m || z[i] != z[i] ? z[i] : m;
    const float from = m == -kInf ? 0.0f : m;
#pragma omp simd
    for (int i = 0; i < n; ++i) p[i] = from_float<T>(exp(z[i] - from));
    return m;
}

// z[0, n) = gradient of the logits [v0, v0 + n) of row t from its saved probabilities, rounded to T.
template <class T>
static void grads_of_saved_probs(const Upstream& up, int64_t t, const T* probs, const float* tile_max, int64_t v0, int64_t n, float* z) {
    const float inv = up.inv ? up.inv[t] : 1.0f, g = up.g(t), m = up.stats[2 * t], log_s = up.stats[2 * t + 1];
    auto grad = [=](T p, float scale, float hit) __attribute__((always_inline)) {
        return round_to<T>(g * (hit - to_float(p) * scale) * inv);
    };
    auto scale_of = [&](int64_t v) { return exp((tile_max[v / kVocabTile] - m) - log_s); };
    for (int64_t i = 0; i < n; i += kVocabTile) {
        const float scale = scale_of(v0 + i);
        const int64_t end = std::min<int64_t>(n, i + kVocabTile);
#pragma omp simd
        for (int64_t j = i; j < end; ++j) z[j] = grad(probs[v0 + j], scale, 0.0f);
    }
    const int64_t y = up.targets[t] - v0;
    if (y >= 0 && y < n) z[y] = grad(probs[v0 + y], scale_of(v0 + y), 1.0f);
    if (const uint32_t* kept = up.row_kept(t))
        for (int64_t i = 0; i < n; ++i)
            if (!is_kept(kept, v0 + i)) z[i] = 0.0f;
}

// hidden [T,C], weight [V,C]; probs [T,V] of their dtype and tile_max [T,tiles], or null; the rest as rlk_logprob.
RLK_API void rlk_linear_logprob(const void* hidden, const void* weight, const int64_t* targets, const float* inv,
                                const uint32_t* kept, float* logp, float* entropy, float* lse, float* stats, void* probs,
                                float* tile_max, int64_t T, int64_t V, int64_t C, int32_t dtype, int32_t threads) {
    if (T == 0) return;
    const int64_t tiles = vocab_tiles(V), words = (V + 31) / 32;
    const int64_t height = block_rows(T, V), width = block_vocab(V), ld = width + 16;   // + 16: the stride is not a power of two
    const Outputs outputs{logp, entropy, lse, stats};
    float *z = scratch(0, height * ld), *folds = scratch(1, height * tiles * 3), *target = scratch(2, height);
    dispatch(dtype, [&](auto tag) {
        using W = decltype(tag);
        for (int64_t t0 = 0; t0 < T; t0 += height) {
            const int64_t rows = std::min(height, T - t0);
            for (int64_t v0 = 0; v0 < V; v0 += width) {
                const int64_t n = std::min(width, V - v0);
                logits_block(static_cast<const W*>(hidden) + t0 * C, static_cast<const W*>(weight) + v0 * C, z, ld, rows,
                             n, C, threads);
                parallel_for(rows, 4096 / n, threads, [&](int64_t r) {
                    const int64_t t = t0 + r, y = targets[t] - v0;
                    const float scale = inv ? inv[t] : 1.0f;
                    const float* x = z + r * ld;
                    float* m = folds + r * tiles * 3;
                    float *s = m + tiles, *e = s + tiles;
                    if (y >= 0 && y < n) target[r] = x[y] * scale;
                    for (int64_t i = 0; i < n; i += kVocabTile) {
                        float tile_z[kVocabTile];
                        const uint32_t* tile_kept = kept ? kept + t * words + (v0 + i) / 32 : nullptr;
                        int padded = load_tile(x + i, int(std::min<int64_t>(kVocabTile, n - i)), scale, tile_kept, tile_z);
                        Tile tile = tile_stats(tile_z, padded);
                        const int64_t at = (v0 + i) / kVocabTile;
                        m[at] = tile.m, s[at] = tile.s, e[at] = tile.e;
                        if (probs)
                            tile_max[t * tiles + at] = tile_probs(tile_z, int(std::min<int64_t>(kVocabTile, n - i)), padded,
                                                                  static_cast<W*>(probs) + t * V + v0 + i);
                    }
                });
            }
            parallel_for(rows, 64, threads, [&](int64_t r) {
                const int64_t t = t0 + r;
                const float* m = folds + r * tiles * 3;
                Row row = fold_tiles(tiles, m, m + tiles, m + 2 * tiles);
                finish_row(outputs, t, row, target[r], is_kept(kept ? kept + t * words : nullptr, targets[t]));
            });
        }
    });
}

// grad [V,C] fp32 (added to) or null; dhidden [T,C] or null. Tokens without a gradient are skipped. With the forward's
// probs and tile_max, no logits are computed.
RLK_API void rlk_linear_logprob_grad(float* grad, const void* hidden, const void* weight, const int64_t* targets,
                                     const float* inv, const uint32_t* kept, const float* stats, const float* entropy,
                                     const float* dlogp, const float* dentropy, const void* probs, const float* tile_max,
                                     void* dhidden, int64_t T, int64_t V, int64_t C, int32_t dtype, int32_t threads) {
    PlainFloats plain;
    const Upstream up{targets, inv, stats, entropy, dlogp, dentropy, kept, (V + 31) / 32};
    const int64_t tiles = vocab_tiles(V);
    std::vector<int64_t> active;
    for (int64_t t = 0; t < T; ++t)
        if (up.active(t)) active.push_back(t);
    dispatch(dtype, [&](auto tag) {
        using W = decltype(tag);
        const W *x = static_cast<const W*>(hidden), *w = static_cast<const W*>(weight);
        W* dx = static_cast<W*>(dhidden);
        if (dx) std::fill(dx, dx + T * C, from_float<W>(0.0f));
        const int64_t count = int64_t(active.size());
        if (count == 0) return;
        const int64_t height = block_rows(count, V), width = block_vocab(V), ld = width + 16;
        float *z = scratch(0, height * ld), *sums = scratch(1, dx ? height * C : 0);
        W* gathered = reinterpret_cast<W*>(scratch(2, height * C));
        for (int64_t a0 = 0; a0 < count; a0 += height) {
            const int64_t rows = std::min(height, count - a0);
            const int64_t* at = active.data() + a0;
            for (int64_t r = 0; r < rows; ++r) std::copy_n(x + at[r] * C, C, gathered + r * C);
            if (dx) std::fill(sums, sums + rows * C, 0.0f);
            for (int64_t v0 = 0; v0 < V; v0 += width) {
                const int64_t n = std::min(width, V - v0);
                if (!probs) logits_block(gathered, w + v0 * C, z, ld, rows, n, C, threads);
                parallel_for(rows, 4096 / n, threads, [&](int64_t r) {
                    if (probs)
                        grads_of_saved_probs(up, at[r], static_cast<const W*>(probs) + at[r] * V, tile_max + at[r] * tiles, v0, n,
                                   z + r * ld);
                    else logit_grads<W>(up, at[r], z + r * ld, v0, n, z + r * ld);
                });
                if (dx) add_product(View<float>{z, ld, 1}, View<W>{w + v0 * C, C, 1}, sums, rows, C, n, threads);
                if (grad) add_product(View<float>{z, 1, ld}, View<W>{gathered, C, 1}, grad + v0 * C, n, C, rows, threads);
            }
            if (dx)
                for (int64_t r = 0; r < rows; ++r)
                    for (int64_t c = 0; c < C; ++c) dx[at[r] * C + c] = from_float<W>(sums[r * C + c]);
        }
    });
}
