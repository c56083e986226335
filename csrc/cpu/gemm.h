// The GEMM of linear, its gradients and linear_logprob: k is cut into P chunks, each an ascending fp32 chain of fma, which
// a balanced binary tree adds. Vectorised over n with k sequential, so neither tile nor batch size nor thread count
// changes a bit. Operands are strided views, packed into fp32 panels.
#pragma once
#include <algorithm>
#include <memory>
#if defined(__AVX2__) || defined(__AVX512F__)
// GCC 12 warns about _mm512_undefined in its own header, in every inlined shuffle.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
#include "common.h"

namespace rlk {

#if defined(__AVX512F__)
constexpr int kVec = 16, kRows = 12;
struct Vec {
    __m512 v;
    static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Vec load(const bf16* p) {
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
    }
    static Vec load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void fma(float s, Vec b) { v = _mm512_fmadd_ps(_mm512_set1_ps(s), b.v, v); }
    // Transposes r in place: pairs, then quads within 128-bit lanes, then the lanes.
    static inline __attribute__((always_inline)) void transpose(Vec* r) {
        __m512 t[16];
        for (int i = 0; i < 8; ++i) {
            t[2 * i] = _mm512_unpacklo_ps(r[2 * i].v, r[2 * i + 1].v);
            t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i].v, r[2 * i + 1].v);
        }
        auto low = [](__m512 a, __m512 b) { return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); };
        auto high = [](__m512 a, __m512 b) { return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); };
        __m512 q[16];
        for (int i = 0; i < 16; i += 4) {
            q[i] = low(t[i], t[i + 2]), q[i + 1] = high(t[i], t[i + 2]);
            q[i + 2] = low(t[i + 1], t[i + 3]), q[i + 3] = high(t[i + 1], t[i + 3]);
        }
        for (int i = 0; i < 4; ++i) {
            __m512 a = _mm512_shuffle_f32x4(q[i], q[4 + i], 0x88), b = _mm512_shuffle_f32x4(q[8 + i], q[12 + i], 0x88);
            __m512 c = _mm512_shuffle_f32x4(q[i], q[4 + i], 0xdd), d = _mm512_shuffle_f32x4(q[8 + i], q[12 + i], 0xdd);
            r[i].v = _mm512_shuffle_f32x4(a, b, 0x88), r[8 + i].v = _mm512_shuffle_f32x4(a, b, 0xdd);
            r[4 + i].v = _mm512_shuffle_f32x4(c, d, 0x88), r[12 + i].v = _mm512_shuffle_f32x4(c, d, 0xdd);
        }
    }
};
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kVec = 8, kRows = 6;
struct Vec {
    __m256 v;
    static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Vec load(const bf16* p) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
    }
    static Vec load(const f16* p) { Vec r; for (int i = 0; i < kVec; ++i) r.v[i] = to_float(p[i]); return r; }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
    void fma(float s, Vec b) { v = _mm256_fmadd_ps(_mm256_set1_ps(s), b.v, v); }
    // Transposes r in place: pairs, then quads within 128-bit lanes, then the lanes.
    static inline __attribute__((always_inline)) void transpose(Vec* r) {
        __m256 q[8];
        for (int i = 0; i < 8; i += 4) {
            __m256 a = _mm256_unpacklo_ps(r[i].v, r[i + 1].v), b = _mm256_unpackhi_ps(r[i].v, r[i + 1].v);
            __m256 c = _mm256_unpacklo_ps(r[i + 2].v, r[i + 3].v), d = _mm256_unpackhi_ps(r[i + 2].v, r[i + 3].v);
            q[i] = _mm256_shuffle_ps(a, c, 0x44), q[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
            q[i + 2] = _mm256_shuffle_ps(b, d, 0x44), q[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            r[i].v = _mm256_permute2f128_ps(q[i], q[4 + i], 0x20);
            r[4 + i].v = _mm256_permute2f128_ps(q[i], q[4 + i], 0x31);
        }
    }
};
#else
constexpr int kVec = 4, kRows = 6;
struct Vec {
    float v[kVec];
    template <class T> static Vec load(const T* p) { Vec r; for (int i = 0; i < kVec; ++i) r.v[i] = to_float(p[i]); return r; }
    void store(float* p) const { for (int i = 0; i < kVec; ++i) p[i] = v[i]; }
    void fma(float s, Vec b) { for (int i = 0; i < kVec; ++i) v[i] = rlk::fma(s, b.v[i], v[i]); }
    static void transpose(Vec* r) {
        for (int i = 0; i < kVec; ++i)
            for (int j = 0; j < i; ++j) { float t = r[i].v[j]; r[i].v[j] = r[j].v[i]; r[j].v[i] = t; }
    }
};
#endif
constexpr int kCols = 2 * kVec;
constexpr int kTile = kRows * kCols;

// Strided matrix view: element (i, j) is data[i * row + j * col].
template <class T> struct View {
    const T* data;
    int64_t row, col;
    float at(int64_t i, int64_t j) const { return to_float(data[i * row + j * col]); }
};

// Microkernel: continues the chains c[R][kCols] over k in [k0, k1); a is packed as [K][kRows], b as [K][kCols].
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
// micro with the smallest R that holds `rows` rows.
static inline void micro_rows(int rows, const float* a, const float* b, float* c, int64_t k0, int64_t k1) {
    if (rows == 1) micro<1>(a, b, c, k0, k1);
    else if (rows <= 4) micro<4>(a, b, c, k0, k1);
    else if (rows <= 8 && kRows > 8) micro<std::min(8, kRows)>(a, b, c, k0, k1);
    else micro<kRows>(a, b, c, k0, k1);
}
// Adds the chunks [lo, hi) of `span` k each to c as a balanced binary tree; the first chain starts from c.
// chain(k0, k1, c) continues c over one chunk.
template <class Chain> static inline void tree(float* c, int64_t span, int lo, int hi, Chain chain) {
    if (hi - lo == 1) { chain(lo * span, hi * span, c); return; }
    int mid = (lo + hi) / 2;
    float right[kTile] = {};
    tree(c, span, lo, mid, chain);
    tree(right, span, mid, hi, chain);
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
    int64_t full = 0;
    if (b.row == 1) {  // a row-major weight: transposes kVec x kVec squares in registers
        full = K / kVec * kVec;
        for (int half = 0; half < kCols; half += kVec)
            for (int64_t k0 = 0; k0 < full; k0 += kVec) {
                Vec square[kVec];
#pragma GCC unroll 16
                for (int j = 0; j < kVec; ++j)
                    square[j] = half + j < cols ? Vec::load(b.data + k0 + (n0 + half + j) * b.col) : Vec{};
                Vec::transpose(square);
#pragma GCC unroll 16
                for (int k = 0; k < kVec; ++k) square[k].store(out + (k0 + k) * kCols + half);
            }
    }
    for (int64_t j = 0; j < kCols; ++j)
        for (int64_t k = full; k < K; ++k) out[k * kCols + j] = j < cols ? b.at(k, n0 + j) : 0.0f;
}
// Packs a(m0 + i, k) for k in [0, K) into [K][kRows]; rows past M are zero.
template <class T> static inline void pack_a(View<T> a, int64_t M, int64_t K, int64_t m0, float* out) {
    int64_t rows = std::min<int64_t>(kRows, M - m0);
    for (int64_t k0 = 0; k0 < K; k0 += 16) {
        int64_t k1 = std::min(K, k0 + 16);
        for (int64_t i = 0; i < kRows; ++i)
            for (int64_t k = k0; k < k1; ++k) out[k * kRows + i] = i < rows ? a.at(m0 + i, k) : 0.0f;
    }
}

// gemm for at most kRows rows. B is used only once, so it is packed in strips that stay in L1.
template <class TA, class TB, class Init, class Done>
static void gemm_few_rows(int64_t M, int64_t N, int64_t K, int chunks, View<TA> a, View<TB> b, int threads, Init init, Done done) {
    constexpr int64_t kStrip = 128;
    std::unique_ptr<float[]> pa(new float[std::max<int64_t>(1, K) * kRows]);
    pack_a(a, M, K, 0, pa.get());
    parallel_for((N + kCols - 1) / kCols, 1, threads, [&](int64_t p) {
        int64_t n = p * kCols;
        int rows = int(M), cols = int(std::min<int64_t>(kCols, N - n));
        float c[kTile] = {}, strip[kStrip * kCols];
        init(0, n, rows, cols, c);
        tree(c, K / chunks, 0, chunks, [&](int64_t k0, int64_t k1, float* to) {
            for (int64_t k = k0; k < k1; k += kStrip) {
                int64_t length = std::min(kStrip, k1 - k);
                pack_b(View<TB>{b.data + k * b.row, b.row, b.col}, length, N, n, strip);
                micro_rows(rows, pa.get() + k * kRows, strip, to, 0, length);
            }
        });
        done(0, n, rows, cols, c);
    });
}

// For every tile: init(m, n, rows, cols, c) sets the initial values of c [kRows][kCols], which is zero before; the chains
// add a(m, k) * b(k, n); the epilogue done(m, n, rows, cols, c) reads the first `rows` and `cols` of c.
template <class TA, class TB, class Init, class Done>
static void gemm(int64_t M, int64_t N, int64_t K, int chunks, View<TA> a, View<TB> b, int threads, Init init, Done done) {
    if (M == 0 || N == 0) return;
    const int64_t width = std::max<int64_t>(1, K);
    const int used = 2 * M * N * width < 200000 ? 1 : threads;
    if (M <= kRows) return gemm_few_rows(M, N, K, chunks, a, b, used, init, done);
    const int64_t panels = std::max<int64_t>(1, (int64_t(1) << 21) / (width * kCols));   // packed B: at most 8 MiB
    const int64_t blocks = std::max<int64_t>(1, (int64_t(1) << 20) / (width * kRows));   // packed A: at most 4 MiB
    const int64_t all_panels = (N + kCols - 1) / kCols, all_blocks = (M + kRows - 1) / kRows;
    std::unique_ptr<float[]> pb(new float[std::min(panels, all_panels) * width * kCols]);
    std::unique_ptr<float[]> pa(new float[std::min(blocks, all_blocks) * width * kRows]);
    for (int64_t p0 = 0; p0 < all_panels; p0 += panels) {
        int64_t np = std::min(panels, all_panels - p0);
        parallel_for(np, 1, used, [&](int64_t p) { pack_b(b, K, N, (p0 + p) * kCols, pb.get() + p * width * kCols); });
        for (int64_t i0 = 0; i0 < all_blocks; i0 += blocks) {
            int64_t nb = std::min(blocks, all_blocks - i0);
            parallel_for(nb, 4, used, [&](int64_t i) { pack_a(a, M, K, (i0 + i) * kRows, pa.get() + i * width * kRows); });
            parallel_for(np * nb, 1, used, [&](int64_t t) {
                int64_t p = t / nb, i = t % nb, m = (i0 + i) * kRows, n = (p0 + p) * kCols;
                int rows = int(std::min<int64_t>(kRows, M - m)), cols = int(std::min<int64_t>(kCols, N - n));
                const float *ai = pa.get() + i * width * kRows, *bp = pb.get() + p * width * kCols;
                float c[kTile] = {};
                init(m, n, rows, cols, c);
                tree(c, K / chunks, 0, chunks, [&](int64_t k0, int64_t k1, float* to) { micro_rows(rows, ai, bp, to, k0, k1); });
                done(m, n, rows, cols, c);
            });
        }
    }
}
static inline void no_init(int64_t, int64_t, int, int, float*) {}

}  // namespace rlk
