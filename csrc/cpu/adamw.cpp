// adamw_ and grad_norm over many tensors: elementwise AdamW, and sums of squares in fp64 in the contract's order.
// Same operations as rlkernel/kernels/reference/adamw.py.
#include <algorithm>
#include <vector>
#include "common.h"
using namespace rlk;

namespace {

constexpr int64_t kLaneCount = 1024, kSegment = 16384;  // SEGMENT and NORM_SEGMENT of rlkernel/contract/orders.py
constexpr int64_t kBlock = 1024;                        // elements whose gradient is converted to fp32 at a time

struct Coefficients { float weight, beta2, fresh, inverse_root, eps, rate, decay; };

struct Piece { int64_t tensor, begin, end; };

// Splits all tensors into pieces of `length` elements, in order.
std::vector<Piece> cut(const int64_t* sizes, int64_t count, int64_t length) {
    std::vector<Piece> pieces;
    for (int64_t i = 0; i < count; ++i)
        for (int64_t begin = 0; begin < sizes[i]; begin += length)
            pieces.push_back({i, begin, std::min(sizes[i], begin + length)});
    return pieces;
}

template <bool NearMean>
void update(const Coefficients& c, int64_t n, const float* __restrict grad, float* __restrict w, float* __restrict m,
            float* __restrict v) {
    for (int64_t i = 0; i < n; ++i) {
        const float g = grad[i];
        m[i] = NearMean ? fma(c.weight, g - m[i], m[i]) : fma(c.weight, m[i] - g, g);
        v[i] = fma(c.fresh * g, g, c.beta2 * v[i]);
        const float step = m[i] / fma(std::sqrt(v[i]), c.inverse_root, c.eps);
        w[i] = w[i] - fma(c.rate, step, c.decay * w[i]);
    }
}

double fold(double* lanes) {
    for (int64_t width = kLaneCount / 2; width >= 1; width /= 2)
        for (int64_t j = 0; j < width; ++j) lanes[j] = lanes[2 * j] + lanes[2 * j + 1];
    return lanes[0];
}

// Sum of f(i) for i in [0, n): element i goes to lane i % kLaneCount, ascending; a tree of neighbours adds the lanes.
template <class F> double lane_sum(int64_t n, F f) {
    double lanes[kLaneCount] = {};
    int64_t i = 0;
    for (; i + kLaneCount <= n; i += kLaneCount)
        for (int64_t j = 0; j < kLaneCount; ++j) lanes[j] += f(i + j);
    for (int64_t j = 0; i + j < n; ++j) lanes[j] += f(i + j);
    return fold(lanes);
}

}  // namespace

// Tensor i has sizes[i] elements; masters, exp_avgs and exp_avg_sqs are fp32, grads and params have grad_dtypes[i] and
// param_dtypes[i]. params may be null; scale is null or points to one number, and nothing is updated unless it is
// finite. coefficients: weight, beta2, fresh, inverse_root, eps, rate, decay.
RLK_API void rlk_adamw(const int64_t* sizes, float* const* masters, void* const* grads, const int32_t* grad_dtypes,
                       float* const* exp_avgs, float* const* exp_avg_sqs, void* const* params, const int32_t* param_dtypes,
                       const float* scale, const float* coefficients, int64_t count, int32_t near_mean, int32_t zero_grad,
                       int32_t threads) {
    Coefficients c;
    std::memcpy(&c, coefficients, sizeof c);
    const bool skip = scale && !std::isfinite(*scale);
    const std::vector<Piece> pieces = cut(sizes, count, 16 * kBlock);
    parallel_for(pieces.size(), 1, threads, [&](int64_t p) {
        const Piece& piece = pieces[p];
        const int64_t t = piece.tensor;
        for (int64_t at = piece.begin; at < piece.end; at += kBlock) {
            const int64_t n = std::min(kBlock, piece.end - at);
            dispatch(grad_dtypes[t], [&](auto tag) {
                using G = decltype(tag);
                G* from = static_cast<G*>(grads[t]) + at;
                if (!skip) {
                    float g[kBlock];
                    for (int64_t i = 0; i < n; ++i) g[i] = to_float(from[i]);
                    if (scale)
                        for (int64_t i = 0; i < n; ++i) g[i] *= *scale;
                    (near_mean ? update<true> : update<false>)(c, n, g, masters[t] + at, exp_avgs[t] + at, exp_avg_sqs[t] + at);
                }
                if (zero_grad) std::fill(from, from + n, from_float<G>(0.0f));
            });
            if (!params || skip) continue;
            dispatch(param_dtypes[t], [&](auto tag) {
                using P = decltype(tag);
                P* to = static_cast<P*>(params[t]) + at;
                for (int64_t i = 0; i < n; ++i) to[i] = from_float<P>(masters[t][at + i]);
            });
        }
    });
}

// Out: squares [count], the sums of squares; norm, the root of their sum over *loss_scale (null: 1); scale, the factor
// that clips to max_norm (infinite: no limit) and divides by the loss scale, NaN unless the norm is finite.
RLK_API void rlk_grad_norm(const int64_t* sizes, void* const* grads, const int32_t* dtypes, const float* loss_scale,
                           double* squares, double* norm, float* scale, int64_t count, float max_norm, int32_t threads) {
    PlainFloats plain;
    const std::vector<Piece> pieces = cut(sizes, count, kSegment);
    std::vector<double> partials(pieces.size());
    parallel_for(pieces.size(), 1, threads, [&](int64_t p) {
        const Piece& piece = pieces[p];
        dispatch(dtypes[piece.tensor], [&](auto tag) {
            const auto* g = static_cast<const decltype(tag)*>(grads[piece.tensor]) + piece.begin;
            partials[p] = lane_sum(piece.end - piece.begin, [&](int64_t i) {
                const double x = to_float(g[i]);
                return x * x;  // exact
            });
        });
    });
    const double* from = partials.data();
    for (int64_t i = 0; i < count; ++i) {
        const int64_t segments = (sizes[i] + kSegment - 1) / kSegment;
        squares[i] = lane_sum(segments, [&](int64_t s) { return from[s]; });
        from += segments;
    }
    const double divisor = loss_scale ? double(*loss_scale) : 1.0, limit = max_norm;
    *norm = std::sqrt(lane_sum(count, [&](int64_t i) { return squares[i]; })) / divisor;
    const double factor = *norm > limit ? limit / *norm : 1.0;
    *scale = std::isfinite(*norm) ? float(factor / divisor) : std::numeric_limits<float>::quiet_NaN();
}
