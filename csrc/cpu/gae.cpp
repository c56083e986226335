// gae: advantages and returns of each sequence, from its last token to its first.
// Same operations as rlkernel/kernels/reference/gae.py.
#include <algorithm>
#include "common.h"
using namespace rlk;

// rewards, values, advantages, returns [T], cu_seqlens [B + 1]; decay = gamma * lambda.
RLK_API void rlk_gae(const float* rewards, const float* values, const int32_t* cu_seqlens, float* advantages, float* returns,
                     int64_t B, float gamma, float decay, int32_t threads) {
    const int64_t length = cu_seqlens[B] / std::max<int64_t>(1, B);  // average length of a sequence
    parallel_for(B, 16384 / std::max<int64_t>(1, length), threads, [=](int64_t row) {
        float advantage = 0.0f, after = 0.0f;
        for (int64_t t = int64_t(cu_seqlens[row + 1]) - 1; t >= cu_seqlens[row]; --t) {
            const float delta = fma(gamma, after, rewards[t]) - values[t];
            advantage = fma(decay, advantage, delta);
            after = values[t];
            advantages[t] = advantage;
            returns[t] = advantage + after;
        }
    });
}
