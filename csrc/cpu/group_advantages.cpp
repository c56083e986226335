// group_advantages: rewards minus their group's mean, over the standard deviation of the group or the batch.
// Rows are shifted by their first element before they are summed. Same operations as
// rlkernel/kernels/reference/group_advantages.py, also on denormals.
#include <algorithm>
#include "common.h"
using namespace rlk;

namespace {

// Codes of _MODES in rlkernel/kernels/cpu/group_advantages.py; "none" needs no kernel.
enum Mode : int32_t { kGroup = 0, kLeaveOneOut = 1, kBatch = 2 };

float over(float x, int64_t count) { return x / float(std::max<int64_t>(1, count)); }

float mean_from_first(const float* row, int64_t n) {
    return over(row_sum(n, [=](int64_t i) { return row[i] - row[0]; }), n);
}

float deviation(const float* row, int64_t n) {
    const float mean = mean_from_first(row, n);
    auto centred = [=](int64_t i) { return (row[i] - row[0]) - mean; };
    const float squares = row_sum(n, [=](int64_t i) { const float c = centred(i); return c * c; });
    return std::sqrt(over(squares, n - 1));
}

}  // namespace

// rewards, out [B] in groups of n.
RLK_API void rlk_group_advantages(const float* rewards, float* out, int64_t B, int64_t n, int32_t mode, int32_t normalize_std,
                                  float eps, int32_t threads) {
    PlainFloats plain;
    const float batch_deviation = normalize_std && mode == kBatch ? deviation(rewards, B) : 0.0f;
    parallel_for(B / n, std::max<int64_t>(1, 4096 / n), threads, [=](int64_t group) {
        const float* row = rewards + group * n;
        float* to = out + group * n;
        if (mode == kLeaveOneOut) {
            const float sum = row_sum(n, [=](int64_t i) { return row[i] - row[0]; });
            for (int64_t i = 0; i < n; ++i) to[i] = (row[i] - row[0]) - over(sum - (row[i] - row[0]), n - 1);
            return;
        }
        const float mean = mean_from_first(row, n);
        const float spread = (mode == kBatch ? batch_deviation : normalize_std ? deviation(row, n) : 0.0f) + eps;
        for (int64_t i = 0; i < n; ++i) {
            const float centred = (row[i] - row[0]) - mean;
            to[i] = normalize_std ? centred / spread : centred;
        }
    });
}
