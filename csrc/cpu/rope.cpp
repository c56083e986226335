// rope: rotation of the pairs (x[j], x[j + D/2]) by the angle of an absolute position; one fma form, one rounding.
// The gradient is the rotation by the negative angle: the same code with a negative sine.
#include <algorithm>
#include "common.h"
using namespace rlk;

// x [T,H,D] -> y [T,H,D]; positions [T], cos_sin [P,D] fp32 (first half cos, second half sin).
RLK_API void rlk_rope(const void* x, const int64_t* positions, const float* cos_sin, void* y, int64_t T, int64_t H, int64_t D,
                      int32_t inverse, int32_t dtype, int32_t threads) {
    dispatch(dtype, [&](auto tag) {
        using E = decltype(tag);
        const int64_t half = D / 2;
        const float sign = inverse ? -1.0f : 1.0f;
        parallel_for(T, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, H * D)), threads, [&](int64_t t) {
            const float *cosine = cos_sin + positions[t] * D, *sine = cosine + half;
            for (int64_t h = 0; h < H; ++h) {
                const E *a = static_cast<const E*>(x) + (t * H + h) * D, *b = a + half;
                E *to_a = static_cast<E*>(y) + (t * H + h) * D, *to_b = to_a + half;
                for (int64_t j = 0; j < half; ++j) {
                    float x1 = to_float(a[j]), x2 = to_float(b[j]), c = cosine[j], s = sign * sine[j];
                    to_a[j] = from_float<E>(fma(x1, c, -(x2 * s)));
                    to_b[j] = from_float<E>(fma(x2, c, x1 * s));
                }
            }
        });
    });
}
