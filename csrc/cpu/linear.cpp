// linear: y = x w^T + bias, its input gradient and its weight gradient, with the contract's chain (gemm.h).
#include "gemm.h"
using namespace rlk;

// x [M,K], w [N,K], bias [N] or null (dtype of w), y [M,N] in y_dtype; K / chunks per chain.
RLK_API void rlk_linear(const void* x, const void* w, const void* bias, void* y, int64_t M, int64_t N, int64_t K,
                        int32_t chunks, int32_t x_dtype, int32_t y_dtype, int32_t threads) {
    dispatch(x_dtype, [&](auto tag) {
        using T = decltype(tag);
        const T* add = static_cast<const T*>(bias);
        dispatch(y_dtype, [&](auto out) {
            using O = decltype(out);
            O* to = static_cast<O*>(y);
            gemm(M, N, K, chunks, View<T>{static_cast<const T*>(x), K, 1}, View<T>{static_cast<const T*>(w), 1, K}, threads,
                 no_init, [&](int64_t m, int64_t n, int rows, int cols, const float* c) {
                     for (int i = 0; i < rows; ++i)
                         for (int j = 0; j < cols; ++j) {
                             float v = c[i * kCols + j];
                             if (add) v = v + to_float(add[n + j]);
                             to[(m + i) * N + n + j] = from_float<O>(v);
                         }
                 });
        });
    });
}

// dx [M,K] = dy [M,N] w [N,K]; the chain is over n, in `chunks` chunks.
RLK_API void rlk_linear_dgrad(const void* dy, const void* w, void* dx, int64_t M, int64_t N, int64_t K, int32_t chunks,
                              int32_t dtype, int32_t threads) {
    dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        T* to = static_cast<T*>(dx);
        gemm(M, K, N, chunks, View<T>{static_cast<const T*>(dy), N, 1}, View<T>{static_cast<const T*>(w), K, 1}, threads, no_init,
             [&](int64_t m, int64_t k, int rows, int cols, const float* c) {
                 for (int i = 0; i < rows; ++i)
                     for (int j = 0; j < cols; ++j) to[(m + i) * K + k + j] = from_float<T>(c[i * kCols + j]);
             });
    });
}

// dw [N,K] fp32 += dy^T x; each element continues its chain over the tokens, ascending.
RLK_API void rlk_linear_wgrad(const void* dy, const void* x, float* dw, int64_t M, int64_t N, int64_t K, int32_t dtype,
                              int32_t threads) {
    dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        auto move = [&](auto copy) {
            return [=](int64_t n, int64_t k, int rows, int cols, auto* c) {
                for (int i = 0; i < rows; ++i)
                    for (int j = 0; j < cols; ++j) copy(dw[(n + i) * K + k + j], c[i * kCols + j]);
            };
        };
        gemm(N, K, M, 1, View<T>{static_cast<const T*>(dy), 1, N}, View<T>{static_cast<const T*>(x), K, 1}, threads,
             move([](float& d, float& c) { c = d; }), move([](float& d, float& c) { d = c; }));
    });
}

// db [N] fp32 += dy summed over the tokens, ascending.
RLK_API void rlk_bias_grad(const void* dy, float* db, int64_t M, int64_t N, int32_t dtype, int32_t threads) {
    dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        const T* from = static_cast<const T*>(dy);
        parallel_for((N + 255) / 256, 1, threads, [&](int64_t block) {
            for (int64_t m = 0; m < M; ++m)
                for (int64_t n = block * 256; n < std::min(N, block * 256 + 256); ++n) db[n] += to_float(from[m * N + n]);
        });
    });
}
