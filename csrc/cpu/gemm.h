// One GEMM for linear, its gradients and the fused log-probability: every output element is one fp32 chain of fma
// over k ascending, cut into P chunks that a balanced binary tree adds. Vectorised over n with k sequential, so no
// tile, batch size or thread count can change a bit. Operands are strided views, packed to fp32 panels.
#pragma once
#include <algorithm>
#include <memory>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#include "common.h"

namespace rlk {

#if defined(__AVX512F__)
constexpr int kVec = 16, kRows = 12;
struct Vec {
    __m512 v;
    static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void fma(float s, Vec b) { v = _mm512_fmadd_ps(_mm512_set1_ps(s), b.v, v); }
};
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kVec = 8, kRows = 6;
struct Vec {
    __m256 v;
    static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
    void fma(float s, Vec b) { v = _mm256_fmadd_ps(_mm256_set1_ps(s), b.v, v); }
};
#else
constexpr int kVec = 4, kRows = 6;
struct Vec {
    float v[kVec];
    static Vec load(const float* p) { Vec r; for (int i = 0; i < kVec; ++i) r.v[i] = p[i]; return r; }
    void store(float* p) const { for (int i = 0; i < kVec; ++i) p[i] = v[i]; }
    void fma(float s, Vec b) { for (int i = 0; i < kVec; ++i) v[i] = rlk::fma(s, b.v[i], v[i]); }
};
#endif
constexpr int kCols = 2 * kVec;
constexpr int kTile = kRows * kCols;

// Strided matrix view; element (i, j) lies at data[i * row + j * col].
template <class T> struct View {
    const T* data;
    int64_t row, col;
    float at(int64_t i, int64_t j) const { return to_float(data[i * row + j * col]); }
};

// c[R][kCols] continues its chains over k in [k0, k1); a is packed [K][kRows], b [K][kCols].
template <int R> static inline void micro(const float* a, const float* b, float* c, int64_t k0, int64_t k1) {
    Vec acc[R][2];
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < 2; ++j) acc[i][j] = Vec::load(c + i * kCols + j * kVec);
    a += k0 * kRows;
    b += k0 * kCols;
    for (int64_t k = k0; k < k1; ++k, a += kRows, b += kCols) {
        Vec b0 = Vec::load(b), b1 = Vec::load(b + kVec);
#pragma GCC unroll 12
        for (int i = 0; i < R; ++i) { acc[i][0].fma(a[i], b0); acc[i][1].fma(a[i], b1); }
    }
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < 2; ++j) acc[i][j].store(c + i * kCols + j * kVec);
}
static inline void micro_rows(int rows, const float* a, const float* b, float* c, int64_t k0, int64_t k1) {
    if (rows == 1) micro<1>(a, b, c, k0, k1);
    else if (rows <= 4) micro<4>(a, b, c, k0, k1);
    else micro<kRows>(a, b, c, k0, k1);
}
// Sum over chunks [lo, hi) of `span` k each, as a balanced binary tree; the first chain continues what c holds.
static inline void tree(int rows, const float* a, const float* b, float* c, int64_t span, int lo, int hi) {
    if (hi - lo == 1) { micro_rows(rows, a, b, c, lo * span, hi * span); return; }
    int mid = (lo + hi) / 2;
    float right[kTile] = {};
    tree(rows, a, b, c, span, lo, mid);
    tree(rows, a, b, right, span, mid, hi);
    for (int i = 0; i < kTile; ++i) c[i] += right[i];
}

// Packs b(k, n0 + j) for k in [0, K) into [K][kCols]; columns past N are zero.
template <class T> static inline void pack_b(View<T> b, int64_t K, int64_t N, int64_t n0, float* out) {
    int64_t cols = std::min<int64_t>(kCols, N - n0);
    if (b.col == 1) {
        for (int64_t k = 0; k < K; ++k) {
            const T* src = b.data + k * b.row + n0;
            float* dst = out + k * kCols;
            for (int64_t j = 0; j < cols; ++j) dst[j] = to_float(src[j]);
            for (int64_t j = cols; j < kCols; ++j) dst[j] = 0.0f;
        }
        return;
    }
    for (int64_t k0 = 0; k0 < K; k0 += 16) {
        int64_t k1 = std::min(K, k0 + 16);
        for (int64_t j = 0; j < kCols; ++j)
            for (int64_t k = k0; k < k1; ++k) out[k * kCols + j] = j < cols ? b.at(k, n0 + j) : 0.0f;
    }
}
template <class T> static inline void pack_a(View<T> a, int64_t M, int64_t K, int64_t m0, float* out) {
    int64_t rows = std::min<int64_t>(kRows, M - m0);
    for (int64_t k0 = 0; k0 < K; k0 += 16) {
        int64_t k1 = std::min(K, k0 + 16);
        for (int64_t i = 0; i < kRows; ++i)
            for (int64_t k = k0; k < k1; ++k) out[k * kRows + i] = i < rows ? a.at(m0 + i, k) : 0.0f;
    }
}

// For every tile: init(m, n, rows, cols, c) fills the starting values (c is zeroed before), then the chains run over
// a(m, k) * b(k, n), then done(m, n, rows, cols, c) consumes c[rows][kCols].
template <class TA, class TB, class Init, class Done>
static void gemm(int64_t M, int64_t N, int64_t K, int chunks, View<TA> a, View<TB> b, int threads, Init init, Done done) {
    if (M == 0 || N == 0) return;
    const int64_t width = std::max<int64_t>(1, K);
    const int64_t panels = std::max<int64_t>(1, (int64_t(1) << 21) / (width * kCols));   // packed B: 8 MiB at most
    const int64_t blocks = std::max<int64_t>(1, (int64_t(1) << 20) / (width * kRows));   // packed A: 4 MiB at most
    const int64_t all_panels = (N + kCols - 1) / kCols, all_blocks = (M + kRows - 1) / kRows;
    std::unique_ptr<float[]> pb(new float[std::min(panels, all_panels) * width * kCols]);
    std::unique_ptr<float[]> pa(new float[std::min(blocks, all_blocks) * width * kRows]);
    const int64_t work = 2 * M * N * width;
    const int used = work < 200000 ? 1 : threads;
    for (int64_t p0 = 0; p0 < all_panels; p0 += panels) {
        int64_t np = std::min(panels, all_panels - p0);
        parallel_for(np, 1, used, [&](int64_t p) { pack_b(b, K, N, (p0 + p) * kCols, pb.get() + p * width * kCols); });
        for (int64_t i0 = 0; i0 < all_blocks; i0 += blocks) {
            int64_t nb = std::min(blocks, all_blocks - i0);
            parallel_for(nb, 4, used, [&](int64_t i) { pack_a(a, M, K, (i0 + i) * kRows, pa.get() + i * width * kRows); });
            parallel_for(np * nb, 1, used, [&](int64_t t) {
                int64_t p = t / nb, i = t % nb, m = (i0 + i) * kRows, n = (p0 + p) * kCols;
                int rows = int(std::min<int64_t>(kRows, M - m)), cols = int(std::min<int64_t>(kCols, N - n));
                float c[kTile] = {};
                init(m, n, rows, cols, c);
                tree(rows, pa.get() + i * width * kRows, pb.get() + p * width * kCols, c, K / chunks, 0, chunks);
                done(m, n, rows, cols, c);
            });
        }
    }
}
static inline void no_init(int64_t, int64_t, int, int, float*) {}

}  // namespace rlk
