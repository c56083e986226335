// rms_norm: round(round(r * rstd) * weight) with r = x or round(x + residual), and its gradients.
// A row's sum is 16 lanes of fma folded in halves; a weight gradient is one chain over the rows, ascending.
#include <algorithm>
#include <vector>
#include "common.h"
using namespace rlk;

// Rows up to which one thread is faster.
static int64_t grain(int64_t C) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, C)); }

template <class T> static inline float inverse_rms(const T* r, int64_t C, float eps) {
    auto at = [&](int64_t i) { return to_float(r[i]); };
    return 1.0f / std::sqrt(row_dot(C, at, at) / float(C) + eps);
}

// x, residual (or null) [rows,C], weight [C] -> y [rows,C], r [rows,C] (null if residual is null).
RLK_API void rlk_rms_norm(const void* x, const void* residual, const void* weight, void* y, void* r, int64_t rows, int64_t C,
                          float eps, int32_t dtype, int32_t threads) {
    dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        const T* w = static_cast<const T*>(weight);
        parallel_for(rows, grain(C), threads, [&](int64_t row) {
            const T* from = static_cast<const T*>(x) + row * C;
            if (residual) {
                const T* add = static_cast<const T*>(residual) + row * C;
                T* sum = static_cast<T*>(r) + row * C;
                for (int64_t i = 0; i < C; ++i) sum[i] = from_float<T>(to_float(from[i]) + to_float(add[i]));
                from = sum;
            }
            T* to = static_cast<T*>(y) + row * C;
            float rstd = inverse_rms(from, C, eps);
            for (int64_t i = 0; i < C; ++i) to[i] = from_float<T>(round_to<T>(to_float(from[i]) * rstd) * to_float(w[i]));
        });
    });
}

// dx [rows,C] = rstd * (g - h * mean(g * h)) (+ dr), with g = dy * weight and h = x * rstd; dr may be null.
RLK_API void rlk_rms_norm_dgrad(const void* dy, const void* dr, const void* x, const void* weight, void* dx, int64_t rows,
                                int64_t C, float eps, int32_t dtype, int32_t threads) {
    dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        const T* w = static_cast<const T*>(weight);
        parallel_for(rows, grain(C), threads, [&](int64_t row) {
            const T* from = static_cast<const T*>(x) + row * C;
            const T* up = static_cast<const T*>(dy) + row * C;
            const T* through = dr ? static_cast<const T*>(dr) + row * C : nullptr;
            T* to = static_cast<T*>(dx) + row * C;
            float rstd = inverse_rms(from, C, eps);
            auto g = [&](int64_t i) { return to_float(up[i]) * to_float(w[i]); };
            auto h = [&](int64_t i) { return to_float(from[i]) * rstd; };
            float mean = row_dot(C, g, h) / float(C);
            if (through)
                for (int64_t i = 0; i < C; ++i) to[i] = from_float<T>(rstd * fma(-h(i), mean, g(i)) + to_float(through[i]));
            else
                for (int64_t i = 0; i < C; ++i) to[i] = from_float<T>(rstd * fma(-h(i), mean, g(i)));
        });
    });
}

// dw [C] fp32 = fma(dy, round(x * rstd), dw), rows ascending; each thread owns blocks of channels.
RLK_API void rlk_rms_norm_wgrad(const void* dy, const void* x, float* dw, int64_t rows, int64_t C, float eps, int32_t dtype,
                                int32_t threads) {
    constexpr int64_t kBlock = 64;
    dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        const T *up = static_cast<const T*>(dy), *from = static_cast<const T*>(x);
        std::vector<float> rstd(rows);
        parallel_for(rows, grain(C), threads, [&](int64_t row) { rstd[row] = inverse_rms(from + row * C, C, eps); });
        const int used = rows * C < 16384 ? 1 : threads;
        parallel_for((C + kBlock - 1) / kBlock, 1, used, [&](int64_t block) {
            int64_t c0 = block * kBlock, width = std::min(kBlock, C - c0);
            float acc[kBlock] = {};
            for (int64_t i = 0; i < width; ++i) acc[i] = dw[c0 + i];
            for (int64_t row = 0; row < rows; ++row) {
                const T *u = up + row * C + c0, *f = from + row * C + c0;
                for (int64_t i = 0; i < width; ++i) acc[i] = fma(to_float(u[i]), round_to<T>(to_float(f[i]) * rstd[row]), acc[i]);
            }
            for (int64_t i = 0; i < width; ++i) dw[c0 + i] = acc[i];
        });
    });
}
