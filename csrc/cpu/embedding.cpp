// embedding: a gather of weight rows, and the weight gradient, which adds dy per id with the tokens ascending.
#include <algorithm>
#include "common.h"
using namespace rlk;

// ids [T], weight [V,C] with `bytes` bytes per row -> y [T,C], of any dtype.
RLK_API void rlk_embedding(const int64_t* ids, const void* weight, void* y, int64_t T, int64_t bytes, int32_t threads) {
    parallel_for(T, std::max<int64_t>(1, 262144 / std::max<int64_t>(1, bytes)), threads, [&](int64_t t) {
        std::memcpy(static_cast<char*>(y) + t * bytes, static_cast<const char*>(weight) + ids[t] * bytes, bytes);
    });
}

// dw [V,C] fp32 += dy [T,C] by id. A thread owns a block of channels and loops over all tokens, so threads never collide.
RLK_API void rlk_embedding_wgrad(const int64_t* ids, const void* dy, float* dw, int64_t T, int64_t C, int32_t dtype,
                                 int32_t threads) {
    constexpr int64_t kBlock = 64;
    dispatch(dtype, [&](auto tag) {
        using E = decltype(tag);
        parallel_for((C + kBlock - 1) / kBlock, 1, T * C < 32768 ? 1 : threads, [&](int64_t block) {
            int64_t c0 = block * kBlock, width = std::min(kBlock, C - c0);
            for (int64_t t = 0; t < T; ++t) {
                const E* from = static_cast<const E*>(dy) + t * C + c0;
                float* to = dw + ids[t] * C + c0;
                for (int64_t i = 0; i < width; ++i) to[i] += to_float(from[i]);
            }
        });
    });
}
