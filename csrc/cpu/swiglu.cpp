// swiglu: round(round(silu(gate)) * up) and its gradient, which recomputes the sigmoid. Elementwise.
#include <algorithm>
#include "common.h"
using namespace rlk;

static int64_t grain(int64_t F) { return std::max<int64_t>(1, 8192 / std::max<int64_t>(1, F)); }

// gate_up [T,2F] (gate first, up second) -> y [T,F].
RLK_API void rlk_swiglu(const void* gate_up, void* y, int64_t T, int64_t F, int32_t dtype, int32_t threads) {
    dispatch(dtype, [&](auto tag) {
        using E = decltype(tag);
        parallel_for(T, grain(F), threads, [&](int64_t t) {
            const E *gate = static_cast<const E*>(gate_up) + t * 2 * F, *up = gate + F;
            E* to = static_cast<E*>(y) + t * F;
            for (int64_t i = 0; i < F; ++i) {
                float g = to_float(gate[i]);
                to[i] = from_float<E>(round_to<E>(g / (1.0f + rlk::exp(-g))) * to_float(up[i]));
            }
        });
    });
}

// dy [T,F] -> dgate_up [T,2F]: dup = dy * round(silu), dgate = dy * up * s * (1 + gate * (1 - s)) with s = sigmoid(gate).
RLK_API void rlk_swiglu_grad(const void* dy, const void* gate_up, void* dgate_up, int64_t T, int64_t F, int32_t dtype,
                             int32_t threads) {
    dispatch(dtype, [&](auto tag) {
        using E = decltype(tag);
        parallel_for(T, grain(F), threads, [&](int64_t t) {
            const E *gate = static_cast<const E*>(gate_up) + t * 2 * F, *up = gate + F, *from = static_cast<const E*>(dy) + t * F;
            E *dgate = static_cast<E*>(dgate_up) + t * 2 * F, *dup = dgate + F;
            for (int64_t i = 0; i < F; ++i) {
                float g = to_float(gate[i]), u = to_float(up[i]), d = to_float(from[i]);
                float below = 1.0f + rlk::exp(-g), s = 1.0f / below;
                dup[i] = from_float<E>(d * round_to<E>(g / below));
                dgate[i] = from_float<E>((d * u) * (s * fma(g, 1.0f - s, 1.0f)));
            }
        });
    });
}
