// Arithmetic shared by the CPU kernels: dtype conversion, exp2, log2, the fixed row sum, parallel loops.
// Each function has the operations of its namesake in rlkernel/kernels/reference/arith.py. Every fma is explicit and
// -ffp-contract=off keeps the compiler from adding others, so the bits depend neither on the vector width (AVX2, AVX-512)
// nor on the number of threads.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <omp.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define RLK_API extern "C" __attribute__((visibility("default")))
#define RLK_INLINE static inline __attribute__((always_inline))

namespace rlk {

// dtype codes of the C interface; rlkernel/kernels/cpu/library.py has the same table.
enum DType : int32_t { F32 = 0, BF16 = 1, F16 = 2 };

constexpr int kLanes = 16;
constexpr int kVocabTile = 128;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

struct bf16 { uint16_t bits; };
struct f16 { _Float16 value; };

RLK_INLINE uint32_t as_bits(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
RLK_INLINE float as_float(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }

RLK_INLINE float to_float(float x) { return x; }
RLK_INLINE float to_float(bf16 x) { return as_float(uint32_t(x.bits) << 16); }
RLK_INLINE float to_float(f16 x) { return float(x.value); }

template <class T> inline T from_float(float x);
template <> inline __attribute__((always_inline)) float from_float<float>(float x) { return x; }
// Rounds to nearest even; NaN becomes 0x7fc0, as in torch.
template <> inline __attribute__((always_inline)) bf16 from_float<bf16>(float x) {
    uint32_t u = as_bits(x);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return {uint16_t(x != x ? 0x7fc0 : rounded)};
}
template <> inline __attribute__((always_inline)) f16 from_float<f16>(float x) { return {_Float16(x)}; }
template <class T> RLK_INLINE float round_to(float x) { return to_float(from_float<T>(x)); }

RLK_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// 2^x; results below 2^-126 are +0.
RLK_INLINE float exp2(float x) {
    float c = x < -127.0f ? -127.0f : (x > 128.0f ? 128.0f : x);
    float whole = std::nearbyintf(c);
    float f = c - whole;
    float p = 1.5403530e-4f;
    p = fma(p, f, 1.3333558e-3f);
    p = fma(p, f, 9.6181291e-3f);
    p = fma(p, f, 5.5504109e-2f);
    p = fma(p, f, 2.4022651e-1f);
    p = fma(p, f, 6.9314718e-1f);
    p = fma(p, f, 1.0f);
    float e = whole > 127.0f ? 127.0f : (whole < -126.0f ? -126.0f : whole);
    float out = p * as_float(uint32_t(int32_t(e) + 127) << 23);
    out = whole > 127.0f ? out * 2.0f : out;
    out = x < -126.0f ? 0.0f : out;
    out = x >= 128.0f ? std::numeric_limits<float>::infinity() : out;
    return x != x ? x : out;
}
RLK_INLINE float exp(float x) { return exp2(x * kLog2e); }

// exponent + log2(1 + r) for 1 + r in [sqrt(1/2), sqrt(2)).
RLK_INLINE float log2_parts(float r, float exponent) {
    float p = -0.11020159721374512f;
    p = fma(p, r, 0.18631209433078766f);
    p = fma(p, r, -0.19102497398853302f);
    p = fma(p, r, 0.2045752853155136f);
    p = fma(p, r, -0.23961904644966125f);
    p = fma(p, r, 0.2885688841342926f);
    p = fma(p, r, -0.3606966435909271f);
    p = fma(p, r, 0.4808982014656067f);
    p = fma(p, r, -0.7213473320007324f);
    p = fma(p, r, 1.4426950216293335f);
    return fma(r, p, exponent);
}
// Exponent of a positive normal number such that its mantissa lies in [sqrt(1/2), sqrt(2)).
RLK_INLINE int32_t log2_exponent(float x) { return (int32_t(as_bits(x)) - 0x3f3504f3) >> 23; }
// log2 of a positive normal number; +0 gives -inf, inf gives inf, NaN gives NaN.
RLK_INLINE float log2(float x) {
    int32_t exponent = log2_exponent(x);
    float r = as_float(as_bits(x) - uint32_t(exponent) * (1u << 23)) - 1.0f;
    float out = log2_parts(r, float(exponent));
    out = x == 0.0f ? -std::numeric_limits<float>::infinity() : out;
    return (x == std::numeric_limits<float>::infinity()) | (x != x) ? x : out;
}
RLK_INLINE float log(float x) { return log2(x) * kLn2; }

// Sum of the lanes, folded in halves; overwrites them.
RLK_INLINE float lane_fold(float* lanes) {
    for (int width = kLanes / 2; width >= 1; width /= 2)
        for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
    return lanes[0];
}

// Sum of f(i) for i in [0, n): element i goes to lane i % 16, lanes are folded in halves.
template <class F> RLK_INLINE float row_sum(int64_t n, F f) {
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int j = 0; j < kLanes; ++j) lanes[j] += f(i + j);
    for (int j = 0; i + j < n; ++j) lanes[j] += f(i + j);
    return lane_fold(lanes);
}
// Sum of f(i) * g(i); each lane is a chain of fma.
template <class F, class G> RLK_INLINE float row_dot(int64_t n, F f, G g) {
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int j = 0; j < kLanes; ++j) lanes[j] = fma(f(i + j), g(i + j), lanes[j]);
    for (int j = 0; i + j < n; ++j) lanes[j] = fma(f(i + j), g(i + j), lanes[j]);
    return lane_fold(lanes);
}

// RAII: rounds to nearest and keeps denormals in the current thread, because torch.set_flush_denormal and libraries built
// with -ffast-math make only some threads of a process flush denormals, so results would depend on the thread.
class PlainFloats {
#if defined(__SSE2__)
    unsigned before = _mm_getcsr();
    void set(unsigned mode) { _mm_setcsr(mode); }
    static constexpr unsigned kPlain = 0x1f80;  // the mode of a new process
#elif defined(__aarch64__)
    uint64_t before = get();
    static uint64_t get() { uint64_t mode; __asm__ volatile("mrs %0, fpcr" : "=r"(mode)); return mode; }
    void set(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
    static constexpr uint64_t kPlain = 0;
#else
    int before = 0;
    void set(int) {}
    static constexpr int kPlain = 0;
#endif

public:
    PlainFloats() { set(kPlain); }
    ~PlainFloats() { set(before); }
    PlainFloats(const PlainFloats&) = delete;
};

// Runs f(i) for i in [0, n) on `threads` threads, or on the calling thread if n <= grain.
template <class F> static inline void parallel_for(int64_t n, int64_t grain, int threads, F f) {
    if (threads <= 1 || n <= grain) {
        PlainFloats plain;
        for (int64_t i = 0; i < n; ++i) f(i);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        PlainFloats plain;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n; ++i) f(i);
    }
}

// Calls f(T{}) with the C++ type of a dtype code.
template <class F> static inline void dispatch(int32_t dtype, F f) {
    if (dtype == F32) f(float{});
    else if (dtype == BF16) f(bf16{});
    else f(f16{});
}

}  // namespace rlk
