// sample: the kept set of top-k, top-p and min-p, and Gumbel-max over it with noise keyed by seed, position and token.
// Masses are integers, so thresholds do not depend on the order; noise depends neither on the row nor on the thread.
#include <cmath>
#include "logprob.h"
using namespace rlk;

RLK_INLINE uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

struct Key {
    uint32_t a, b;
    Key(int64_t seed, int64_t position) : a(0x9e3779b9u), b(0x3c6ef372u) {
        const uint64_t s = uint64_t(seed), p = uint64_t(position);
        const uint32_t words[4] = {uint32_t(s), uint32_t(s >> 32), uint32_t(p), uint32_t(p >> 32)};
        for (int i = 0; i < 4; ++i) { a = mix(a ^ words[i]); b = mix(b ^ words[3 - i]); }
    }
    inline __attribute__((always_inline)) uint32_t hash(uint32_t token) const { return mix(mix(token ^ a) + b); }
};

// -log(-log(u)) with u = (h + 0.5) / 2^32; for u > 1/2 it computes with 1 - u, which fp32 represents accurately.
RLK_INLINE float gumbel(uint32_t h) {
    const bool high = h >= 0x80000000u;
    const float s = (float(int32_t(high ? ~h : h)) + 0.5f) * 0x1p-32f;
    const float x = high ? 1.0f - s : s;
    const int32_t exponent = log2_exponent(x);
    float r = as_float(as_bits(x) - uint32_t(exponent) * (1u << 23)) - 1.0f;
    r = high && exponent == 0 ? -s : r;
    const float e = -(log2_parts(r, float(exponent)) * kLn2);
    return -log(e);
}

// A value and its weight: 1 for top-k, the mass for top-p.
struct Item { float z; int64_t weight; };
// Quickselect: the value at which the weights, added in descending order of values, reach `limit` (1 to their sum).
static float weighted_threshold(std::vector<Item>& items, int64_t limit) {
    int64_t lo = 0, hi = int64_t(items.size()), above = 0;
    for (;;) {
        const float a = items[lo].z, b = items[(lo + hi) / 2].z, c = items[hi - 1].z;
        const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
        auto begin = items.begin();
        auto equal = std::partition(begin + lo, begin + hi, [=](const Item& i) { return i.z > pivot; });
        auto below = std::partition(equal, begin + hi, [=](const Item& i) { return i.z == pivot; });
        int64_t larger = above, same = 0;
        for (auto i = begin + lo; i != equal; ++i) larger += i->weight;
        for (auto i = equal; i != below; ++i) same += i->weight;
        if (larger >= limit) { hi = equal - begin; continue; }
        if (larger + same >= limit || below - begin == hi) return pivot;
        above = larger + same;
        lo = below - begin;
    }
}

struct Filters { int32_t top_k; float top_p, min_p; };

// Sets the bits of kept; z [V] are logits times 1/T, `top` their maximum.
static void filter(const float* z, int64_t V, float top, Filters f, uint32_t* kept, std::vector<Item>& items) {
    float least = -kInf;
    if (f.top_k > 0 && f.top_k < V) {
        items.clear();
        for (int64_t v = 0; v < V; ++v) items.push_back({z[v], 1});
        least = weighted_threshold(items, f.top_k);
    }
    if (f.top_p < 1.0f) {
        items.clear();
        int64_t total = 0;
        for (int64_t v = 0; v < V; ++v) {
            if (!(z[v] >= least)) continue;
            const int64_t mass = int64_t(exp(z[v] - top) * 0x1p31f);
            if (mass > 0) items.push_back({z[v], mass});
            total += mass;
        }
        least = std::max(least, weighted_threshold(items, int64_t(std::ceil(double(f.top_p) * double(total)))));
    }
    const bool by_share = f.min_p > 0.0f;
    for (int64_t w = 0; w * 32 < V; ++w) {
        uint32_t word = 0;
        for (int64_t v = w * 32; v < std::min(V, w * 32 + 32); ++v) {
            const bool keep = z[v] >= least && (!by_share || exp(z[v] - top) >= f.min_p);
            word |= uint32_t(keep) << (v & 31);
        }
        kept[w] = word;
    }
}

// Gumbel-max over the kept entries of z [V]; a greedy row has no noise.
static int64_t argmax(const float* z, int64_t V, const uint32_t* kept, bool greedy, Key key) {
    float best = -kInf;
    int64_t token = 0;
    for (int64_t v0 = 0; v0 < V; v0 += kVocabTile) {
        const int n = int(std::min<int64_t>(kVocabTile, V - v0));
        float score[kVocabTile];
        const int padded = load_tile(z + v0, n, 1.0f, kept ? kept + v0 / 32 : nullptr, score);
        if (!greedy)
#pragma omp simd
            for (int i = 0; i < padded; ++i) score[i] += gumbel(key.hash(uint32_t(v0) + uint32_t(i)));
        float tile = -kInf;
#pragma omp simd reduction(max : tile)
        for (int i = 0; i < padded; ++i) tile = score[i] > tile ? score[i] : tile;
        if (!(tile > best)) continue;
        best = tile;
        token = v0 + (std::find(score, score + padded, tile) - score);
    }
    return token;
}

// logits [B,V]; tokens [B]; kept [B, ceil(V/32)] or null without a filter; bad [B]: 1 if a row of logits defines no
// distribution (contains NaN or +inf, or only -inf).
RLK_API void rlk_sample(const float* logits, const int64_t* seeds, const int64_t* positions, const float* temperature,
                        const int32_t* top_k, const float* top_p, const float* min_p, int64_t* tokens, uint32_t* kept,
                        int32_t* bad, int64_t B, int64_t V, int32_t threads) {
    const int64_t words = (V + 31) / 32;
    parallel_for(B, 1, B * V < 8192 ? 1 : threads, [&](int64_t b) {
        static thread_local std::vector<float> z;
        static thread_local std::vector<Item> items;
        z.resize(V);
        const bool greedy = temperature[b] == 0.0f;
        const float inv = greedy ? 1.0f : 1.0f / temperature[b];
        float top = -kInf;
        int32_t wrong = 0;
        for (int64_t v = 0; v < V; ++v) {
            const float x = logits[b * V + v] * inv;
            z[v] = x;
            wrong |= x < kInf ? 0 : 1;
        }
        for (int64_t v = 0; v < V; ++v) top = z[v] > top ? z[v] : top;
        bad[b] = wrong || top == -kInf;
        tokens[b] = 0;
        if (bad[b]) return;
        uint32_t* row_kept = kept ? kept + b * words : nullptr;
        if (row_kept) {
            Filters f{top_k ? top_k[b] : 0, top_p ? top_p[b] : 1.0f, min_p ? min_p[b] : 0.0f};
            if (greedy) f = {0, 1.0f, 0.0f};
            filter(z.data(), V, top, f, row_kept, items);
        }
        tokens[b] = argmax(z.data(), V, row_kept, greedy, Key(seeds[b], positions[b]));
    });
}
