// attention: forward over packed or paged keys, backward, and the store into pages, in the contract's order.
// Rows are (position, head of the group) pairs, so a key block is unpacked once for all query heads of its KV head.
// QK is vectorised over keys with a sequential chain over d, PV over d with a sequential chain over keys. A key that is
// hidden from a row is not part of its chains, so neither tile nor packing changes a bit. `lse2` is log-sum-exp in base 2.
#include <vector>
#include "gemm.h"
using namespace rlk;

namespace {

constexpr int64_t kBlock = 64;       // contract: keys per online-softmax block
constexpr int64_t kTileRows = 96;    // rows per work item, a multiple of kRows for every vector width; changes no bit

// Continues the chains c[R][W] over k in [0, n): c(i, :) += a(i, k) * b(k, :) with a(i, k) = a[i * RS + k * KS].
template <int R, int W, int RS, int KS>
inline void micro_strided(const float* a, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t n) {
    Vec acc[R][W];
#pragma GCC unroll 12
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) acc[i][w] = Vec::load(c + i * ldc + w * kVec);
    for (int64_t k = 0; k < n; ++k, a += KS, b += ldb) {
        Vec right[W];
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) right[w] = Vec::load(b + w * kVec);
#pragma GCC unroll 12
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w) acc[i][w].fma(a[i * RS], right[w]);
    }
#pragma GCC unroll 12
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) acc[i][w].store(c + i * ldc + w * kVec);
}

// micro_strided for any number of rows and a width that is a multiple of kCols; fewer rows use wider tiles.
template <int RS, int KS>
inline void chain_tile(int rows, const float* a, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t width,
                       int64_t n) {
    if (n <= 0) return;
    for (int i = 0; i < rows;) {
        const float* ai = a + i * RS;
        float* ci = c + i * ldc;
        const int left = rows - i;
        int64_t w = 0;
        if (left >= kRows) {
            for (; w < width; w += kCols) micro_strided<kRows, 2, RS, KS>(ai, b + w, ldb, ci + w, ldc, n);
            i += kRows;
        } else if (left >= 4) {
            for (; w + 2 * kCols <= width; w += 2 * kCols) micro_strided<4, 4, RS, KS>(ai, b + w, ldb, ci + w, ldc, n);
            for (; w < width; w += kCols) micro_strided<4, 2, RS, KS>(ai, b + w, ldb, ci + w, ldc, n);
            i += 4;
        } else if (left >= 2) {
            for (; w + 2 * kCols <= width; w += 2 * kCols) micro_strided<2, 4, RS, KS>(ai, b + w, ldb, ci + w, ldc, n);
            for (; w < width; w += kCols) micro_strided<2, 2, RS, KS>(ai, b + w, ldb, ci + w, ldc, n);
            i += 2;
        } else {
            for (; w + 2 * kCols <= width; w += 2 * kCols) micro_strided<1, 4, RS, KS>(ai, b + w, ldb, ci + w, ldc, n);
            for (; w < width; w += kCols) micro_strided<1, 2, RS, KS>(ai, b + w, ldb, ci + w, ldc, n);
            i += 1;
        }
    }
}

// As chain_tile, but row i only has k in [lo[i], hi[i]). The range that all rows share runs as a tile, the rest by row.
template <int RS, int KS>
inline void chain_ranges(int rows, const float* a, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t width,
                         const int* lo, const int* hi) {
    int first = lo[0], last = hi[0];
    for (int i = 1; i < rows; ++i) {
        first = std::max(first, lo[i]);
        last = std::min(last, hi[i]);
    }
    const bool shared = first < last;
    for (int i = 0; i < rows; ++i) {
        const int stop = shared ? first : hi[i];
        chain_tile<RS, KS>(1, a + i * RS + lo[i] * KS, b + lo[i] * ldb, ldb, c + i * ldc, ldc, width, stop - lo[i]);
    }
    if (!shared) return;
    chain_tile<RS, KS>(rows, a + first * KS, b + first * ldb, ldb, c, ldc, width, last - first);
    for (int i = 0; i < rows; ++i)
        chain_tile<RS, KS>(1, a + i * RS + last * KS, b + last * ldb, ldb, c + i * ldc, ldc, width, hi[i] - last);
}

// Rows [n, D] of one head: row(j) is token j of a sequence; paged if `table` is set.
template <class T> struct Tokens {
    const T* data;
    int64_t stride;                  // elements between tokens
    const int32_t* table = nullptr;  // pages of the sequence
    int64_t page = 0;
    const T* row(int64_t j) const {
        return data + (table ? int64_t(table[j / page]) * page + j % page : j) * stride;
    }
};

// The query rows of one (sequence, kv head): row r is query r / group of head r % group.
template <class T> struct Queries {
    const T* data;                   // head 0 of the group at the first query
    int64_t stride, group, d;
    const T* row(int64_t r) const { return data + (r / group) * stride + (r % group) * d; }
};

// A bump allocator that a thread keeps between calls.
struct Scratch {
    std::vector<float> store;
    size_t used = 0;
    static Scratch& of_thread(size_t floats) {
        static thread_local Scratch scratch;
        if (scratch.store.size() < floats) scratch.store.resize(floats);
        scratch.used = 0;
        return scratch;
    }
    float* take(size_t floats) {
        float* p = store.data() + used;
        used += floats;
        return p;
    }
};

inline int64_t padded(int64_t n) { return (n + kCols - 1) / kCols * kCols; }
// Row stride of unpacked rows of d numbers: one of the constants that `scores` dispatches on.
inline int64_t row_stride(int64_t d) { return d <= 32 ? 32 : d <= 64 ? 64 : d <= 128 ? 128 : 256; }

// Keys [first, first + n) as columns: out[D][kBlock]; columns from n to the next multiple of kCols are zero.
template <class T> void load_columns(const Tokens<T>& from, int64_t first, int64_t n, int64_t d, float* out) {
    static const T zeros[256] = {};
    const int64_t wide = padded(n);
    for (int64_t j0 = 0; j0 < wide; j0 += kVec) {
        const T* rows[kVec];
        for (int64_t j = 0; j < kVec; ++j) rows[j] = j0 + j < n ? from.row(first + j0 + j) : zeros;
        int64_t e = 0;
        for (; e + kVec <= d; e += kVec) {
            Vec tile[kVec];
#pragma GCC unroll 16
            for (int j = 0; j < kVec; ++j) tile[j] = Vec::load(rows[j] + e);
            Vec::transpose(tile);
#pragma GCC unroll 16
            for (int i = 0; i < kVec; ++i) tile[i].store(out + (e + i) * kBlock + j0);
        }
        for (; e < d; ++e)
            for (int j = 0; j < kVec; ++j) out[e * kBlock + j0 + j] = to_float(rows[j][e]);
    }
}
// Rows [first, first + n): out[n][row_stride(d)], columns from d on are zero.
template <class Source> void load_rows(const Source& from, int64_t first, int64_t n, int64_t d, float* out) {
    const int64_t stride = row_stride(d);
    for (int64_t j = 0; j < n; ++j) {
        const auto* src = from.row(first + j);
        float* to = out + j * stride;
        for (int64_t e = 0; e < d; ++e) to[e] = to_float(src[e]);
        for (int64_t e = d; e < stride; ++e) to[e] = 0.0f;
    }
}
// s[rows][kBlock] = the chains over d of rows a [rows][row_stride(d)] and the first n of columns [D][kBlock].
inline void scores(int rows, const float* a, const float* columns, int64_t d, int64_t n, float* s) {
    const int64_t wide = padded(n);
    for (int i = 0; i < rows; ++i) std::memset(s + i * kBlock, 0, wide * sizeof(float));
    switch (row_stride(d)) {      // a constant stride lets one register address all rows of the tile
        case 32: return chain_tile<32, 1>(rows, a, columns, kBlock, s, kBlock, wide, d);
        case 64: return chain_tile<64, 1>(rows, a, columns, kBlock, s, kBlock, wide, d);
        case 128: return chain_tile<128, 1>(rows, a, columns, kBlock, s, kBlock, wide, d);
        default: return chain_tile<256, 1>(rows, a, columns, kBlock, s, kBlock, wide, d);
    }
}

// Keys [lo, hi), relative to the block [first, first + n), that position `at` sees; lo <= hi.
inline void visible(int64_t at, int64_t window, int64_t first, int64_t n, int* lo, int* hi) {
    *lo = window > 0 ? int(std::min(n, std::max<int64_t>(0, at - window + 1 - first))) : 0;
    *hi = int(std::min(n, std::max<int64_t>(*lo, at + 1 - first)));
}

struct Shape {
    int64_t batch, heads, kv_heads, d, q_stride, k_stride, v_stride, page, columns, window, split;
    float scale_log2e;
    bool causal;
    int64_t group() const { return heads / kv_heads; }
};

// Adds a block of keys to a row's running softmax: p[kBlock] becomes the rounded probabilities. Returns the factor that
// rescales the row's sum of values.
template <class T> inline float online_softmax(float* p, int64_t n, int lo, int hi, float c, float* m, float* l) {
    float block_max = -std::numeric_limits<float>::infinity();
    for (int j = lo; j < hi; ++j) block_max = p[j] > block_max ? p[j] : block_max;
    const float before = *m, scaled = block_max * c, now = scaled > before ? scaled : before;
    float lanes[kLanes] = {};
    const int64_t wide = (n + kLanes - 1) / kLanes * kLanes;
    for (int64_t j0 = 0; j0 < wide; j0 += kLanes)
        for (int j = 0; j < kLanes; ++j) {
            const int at = int(j0) + j;
            const float e = exp2(fma(p[at], c, -now));
            const float kept = (at >= lo) & (at < hi) ? e : 0.0f;
            lanes[j] += kept;
            p[at] = round_to<T>(kept);
        }
    const float factor = exp2(before - now);
    *l = fma(*l, factor, lane_fold(lanes));
    *m = now;
    return factor;
}

// Merges a normalised split (o_split, lse2_split) into (o, lse2); o is [d].
inline void merge(float* o, float* lse2, const float* o_split, float lse2_split, int64_t d) {
    const float high = *lse2 > lse2_split ? *lse2 : lse2_split;
    const float w = exp2(*lse2 - high), w_split = exp2(lse2_split - high), total = w + w_split;
    for (int64_t e = 0; e < d; ++e) o[e] = fma(o[e], w, o_split[e] * w_split) / total;
    *lse2 = high + log2(total);
}

// Rows [r0, r1) of one (sequence, kv head) that has `past` keys before its first query. Without the causal mask every
// row has the position of the last query.
template <class T>
void forward_tile(const Shape& s, const Queries<T>& q, const Tokens<T>& k, const Tokens<T>& v, int64_t past, int64_t last_query,
                  int64_t r0, int64_t r1, T* out, float* lse) {
    const int64_t d = s.d, wide = padded(d), stride = row_stride(d), rows = r1 - r0, groups = (rows + kRows - 1) / kRows;
    Scratch& scratch = Scratch::of_thread(rows * stride + kBlock * d + kBlock * stride + kRows * kBlock + 2 * rows * wide + 3 * rows);
    float* query_rows = scratch.take(rows * stride);
    float* columns = scratch.take(kBlock * d);
    float* values = scratch.take(kBlock * stride);
    float* p = scratch.take(kRows * kBlock);
    float* acc = scratch.take(rows * wide);
    float* o = scratch.take(rows * wide);
    float* m = scratch.take(rows);
    float* l = scratch.take(rows);
    float* lse2 = scratch.take(rows);
    const float none = -std::numeric_limits<float>::infinity();
    load_rows(q, r0, rows, d, query_rows);
    const auto position = [&](int64_t r) { return past + (s.causal ? (r0 + r) / q.group : last_query); };
    const int64_t stop = position(rows - 1) + 1;
    const int64_t start = s.window > 0 ? std::max<int64_t>(0, position(0) - s.window + 1) / kBlock * kBlock : 0;
    std::fill(lse2, lse2 + rows, none);
    std::fill(o, o + rows * wide, 0.0f);          // the result of a row that sees no key
    for (int64_t split = start / s.split * s.split; split < stop; split += s.split) {
        std::fill(m, m + rows, none);
        std::fill(l, l + rows, 0.0f);
        std::fill(acc, acc + rows * wide, 0.0f);
        for (int64_t first = std::max(split, start); first < std::min(split + s.split, stop); first += kBlock) {
            const int64_t n = std::min(kBlock, stop - first);
            load_columns(k, first, n, d, columns);
            load_rows(v, first, n, d, values);
            for (int64_t g = 0; g < groups; ++g) {
                const int count = int(std::min<int64_t>(kRows, rows - g * kRows));
                int lo[kRows], hi[kRows];
                bool any = false;
                for (int i = 0; i < count; ++i) {
                    visible(position(g * kRows + i), s.window, first, n, lo + i, hi + i);
                    any |= lo[i] < hi[i];
                }
                if (!any) continue;
                scores(count, query_rows + g * kRows * stride, columns, d, n, p);
                for (int i = 0; i < count; ++i) {
                    if (lo[i] >= hi[i]) continue;
                    const int64_t r = g * kRows + i;
                    const float factor = online_softmax<T>(p + i * kBlock, n, lo[i], hi[i], s.scale_log2e, m + r, l + r);
                    for (int64_t e = 0; e < wide; ++e) acc[r * wide + e] *= factor;
                }
                chain_ranges<kBlock, 1>(count, p, values, stride, acc + g * kRows * wide, wide, wide, lo, hi);
            }
        }
        for (int64_t r = 0; r < rows; ++r) {      // normalise the split
            if (l[r] == 0.0f) continue;           // the row sees no key of the split, or none has a probability
            float* o_split = acc + r * wide;
            for (int64_t e = 0; e < d; ++e) o_split[e] = o_split[e] / l[r];
            const float lse2_split = m[r] + log2(l[r]);
            if (lse2[r] == none) {
                std::memcpy(o + r * wide, o_split, d * sizeof(float));
                lse2[r] = lse2_split;
            } else {
                merge(o + r * wide, lse2 + r, o_split, lse2_split, d);
            }
        }
    }
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = (r0 + r) / q.group * s.heads + (r0 + r) % q.group;
        for (int64_t e = 0; e < d; ++e) out[at * d + e] = from_float<T>(o[r * wide + e]);
        lse[at] = lse2[r] * kLn2;
    }
}

// Turns p = q k and ds = dout v [kBlock] of a row into the rounded probabilities and score gradients.
template <class T>
inline void gradients_of_scores(float* p, float* ds, int64_t n, int lo, int hi, float c, float lse2, float delta) {
    const int wide = int((n + kLanes - 1) / kLanes * kLanes);
    for (int j = 0; j < wide; ++j) {
        const bool seen = (j >= lo) & (j < hi);
        const float e = exp2(fma(p[j], c, -lse2));
        const float gradient = e * (ds[j] - delta);
        p[j] = seen ? round_to<T>(e) : 0.0f;
        ds[j] = seen ? round_to<T>(gradient) : 0.0f;
    }
}

// Gradients of all rows of one (sequence, kv head). The outer loop is over key blocks, the inner loop over rows, both
// ascending: dq continues its chain over the keys from block to block, dk and dv are complete after their block.
template <class T>
void backward_sequence(const Shape& s, const Queries<T>& q, const Queries<T>& dout, const Queries<T>& out,
                       const float* lse, const Tokens<T>& k, const Tokens<T>& v, int64_t queries, int64_t keys, float scale,
                       T* dq, T* dk, T* dv) {
    const int64_t d = s.d, wide = padded(d), stride = row_stride(d), rows = queries * q.group, past = keys - queries;
    const int64_t tile = kTileRows;
    Scratch& scratch = Scratch::of_thread(rows * wide + 2 * rows + 2 * kBlock * d + kBlock * stride + 2 * kBlock * wide +
                                          2 * tile * stride + 2 * tile * kBlock);
    float* dq_sum = scratch.take(rows * wide);
    float* delta = scratch.take(rows);
    float* lse2 = scratch.take(rows);
    float* k_columns = scratch.take(kBlock * d);
    float* v_columns = scratch.take(kBlock * d);
    float* k_rows = scratch.take(kBlock * stride);
    float* dk_sum = scratch.take(kBlock * wide);
    float* dv_sum = scratch.take(kBlock * wide);
    float* q_rows = scratch.take(tile * stride);
    float* dout_rows = scratch.take(tile * stride);
    float* p = scratch.take(tile * kBlock);
    float* ds = scratch.take(tile * kBlock);
    std::fill(dq_sum, dq_sum + rows * wide, 0.0f);
    for (int64_t r = 0; r < rows; ++r) {
        const T *a = dout.row(r), *b = out.row(r);
        delta[r] = row_dot(d, [&](int64_t e) { return to_float(a[e]); }, [&](int64_t e) { return to_float(b[e]); });
        lse2[r] = lse[r / q.group * s.heads + r % q.group] * kLog2e;
    }
    for (int64_t first = 0; first < keys; first += kBlock) {
        const int64_t n = std::min(kBlock, keys - first);
        load_columns(k, first, n, d, k_columns);
        load_columns(v, first, n, d, v_columns);
        load_rows(k, first, n, d, k_rows);
        std::fill(dk_sum, dk_sum + kBlock * wide, 0.0f);
        std::fill(dv_sum, dv_sum + kBlock * wide, 0.0f);
        const int64_t end = s.window > 0 ? std::min(rows, (first + n - 1 + s.window - past) * q.group) : rows;
        for (int64_t r0 = s.causal ? std::max<int64_t>(0, first - past) * q.group : 0; r0 < end; r0 += tile) {
            const int64_t count = std::min(tile, end - r0);
            load_rows(q, r0, count, d, q_rows);
            load_rows(dout, r0, count, d, dout_rows);
            for (int64_t i0 = 0; i0 < count; i0 += kRows) {
                const int tile_rows = int(std::min<int64_t>(kRows, count - i0));
                int lo[kRows], hi[kRows];
                float *p_rows = p + i0 * kBlock, *ds_rows = ds + i0 * kBlock;
                scores(tile_rows, q_rows + i0 * stride, k_columns, d, n, p_rows);
                scores(tile_rows, dout_rows + i0 * stride, v_columns, d, n, ds_rows);
                for (int i = 0; i < tile_rows; ++i) {
                    const int64_t r = r0 + i0 + i;
                    visible(s.causal ? past + r / q.group : keys - 1, s.window, first, n, lo + i, hi + i);
                    gradients_of_scores<T>(p_rows + i * kBlock, ds_rows + i * kBlock, n, lo[i], hi[i], s.scale_log2e, lse2[r],
                                           delta[r]);
                }
                chain_ranges<kBlock, 1>(tile_rows, ds_rows, k_rows, stride, dq_sum + (r0 + i0) * wide, wide, wide, lo, hi);
            }
            for (int64_t j0 = 0; j0 < n; j0 += kRows) {
                const int tile_rows = int(std::min<int64_t>(kRows, n - j0));
                int lo[kRows], hi[kRows];
                for (int j = 0; j < tile_rows; ++j) {       // rows [lo, hi) of the tile see the key
                    const int64_t from = s.causal ? (first + j0 + j - past) * q.group - r0 : 0;
                    lo[j] = int(std::min(count, std::max<int64_t>(0, from)));
                    hi[j] = s.window > 0 ? int(std::min(count, std::max<int64_t>(lo[j], from + s.window * q.group))) : int(count);
                }
                chain_ranges<1, kBlock>(tile_rows, ds + j0, q_rows, stride, dk_sum + j0 * wide, wide, wide, lo, hi);
                chain_ranges<1, kBlock>(tile_rows, p + j0, dout_rows, stride, dv_sum + j0 * wide, wide, wide, lo, hi);
            }
        }
        for (int64_t j = 0; j < n; ++j)
            for (int64_t e = 0; e < d; ++e) {
                const int64_t at = (first + j) * s.kv_heads * d + e;
                dk[at] = from_float<T>(dk_sum[j * wide + e] * scale);
                dv[at] = from_float<T>(dv_sum[j * wide + e]);
            }
    }
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t e = 0; e < d; ++e)
            dq[(r / q.group * s.heads + r % q.group) * d + e] = from_float<T>(dq_sum[r * wide + e] * scale);
}

// Runs f(i) for i in [0, n) with dynamic scheduling, because items differ in length.
template <class F> void for_items(int64_t n, int threads, F f) {
    if (threads <= 1 || n <= 1) {
        PlainFloats plain;
        for (int64_t i = 0; i < n; ++i) f(i);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        PlainFloats plain;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < n; ++i) f(i);
    }
}

}  // namespace

// q [T,H,D], out [T,H,D], lse [T,H] fp32. page = 0: k, v [S,HK,D] and seqlens_k cumulative [B+1]. page > 0: k, v are
// pages, seqlens_k holds lengths [B] and `table` is [B][columns]. window 0: no window.
RLK_API void rlk_attention(const void* q, const void* k, const void* v, const int32_t* table, const int32_t* cu_q,
                           const int32_t* seqlens_k, void* out, float* lse, int64_t batch, int64_t heads, int64_t kv_heads,
                           int64_t d, int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t page, int64_t columns,
                           int64_t window, int64_t split, float scale_log2e, int32_t causal, int32_t dtype,
                           int32_t threads) {
    const Shape s{batch, heads, kv_heads, d, q_stride, k_stride, v_stride, page, columns, window, split, scale_log2e, causal != 0};
    struct Item { int64_t sequence, head, r0, r1; };
    std::vector<Item> items;
    int64_t work = 0;
    const auto keys_of = [&](int64_t b) { return int64_t(page ? seqlens_k[b] : seqlens_k[b + 1] - seqlens_k[b]); };
    for (int64_t b = 0; b < batch; ++b) {
        const int64_t rows = (cu_q[b + 1] - cu_q[b]) * s.group();
        work += rows * kv_heads * keys_of(b) * d;
        for (int64_t h = 0; h < kv_heads; ++h)
            for (int64_t r = 0; r < rows; r += kTileRows) items.push_back({b, h, r, std::min(rows, r + kTileRows)});
    }
    dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        for_items(int64_t(items.size()), work < 200000 ? 1 : threads, [&](int64_t i) {
            const Item& item = items[i];
            const int64_t b = item.sequence, g = s.group(), first = page ? 0 : seqlens_k[b];
            const Queries<T> queries{static_cast<const T*>(q) + cu_q[b] * q_stride + item.head * g * d, q_stride, g, d};
            const auto tokens = [&](const void* data, int64_t stride) {
                return Tokens<T>{static_cast<const T*>(data) + first * stride + item.head * d, stride,
                                 page ? table + b * columns : nullptr, page};
            };
            const int64_t at = cu_q[b] * heads + item.head * g;
            const int64_t count = cu_q[b + 1] - cu_q[b];
            forward_tile<T>(s, queries, tokens(k, k_stride), tokens(v, v_stride), keys_of(b) - count, count - 1, item.r0,
                            item.r1, static_cast<T*>(out) + at * d, lse + at);
        });
    });
}

// Gradients of rlk_attention over dense keys. dout, out, dq [T,H,D] and dk, dv [S,HK,D] are contiguous.
RLK_API void rlk_attention_backward(const void* dout, const void* q, const void* k, const void* v, const void* out,
                                    const float* lse, const int32_t* cu_q, const int32_t* cu_k, void* dq, void* dk, void* dv,
                                    int64_t batch, int64_t heads, int64_t kv_heads, int64_t d, int64_t q_stride,
                                    int64_t k_stride, int64_t v_stride, int64_t window, float scale_log2e, float scale,
                                    int32_t causal, int32_t dtype, int32_t threads) {
    const Shape s{batch, heads, kv_heads, d, q_stride, k_stride, v_stride, 0, 0, window, 0, scale_log2e, causal != 0};
    int64_t work = 0;
    for (int64_t b = 0; b < batch; ++b) work += int64_t(cu_q[b + 1] - cu_q[b]) * (cu_k[b + 1] - cu_k[b]) * heads * d;
    dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        for_items(batch * kv_heads, work < 100000 ? 1 : threads, [&](int64_t i) {
            const int64_t b = i / kv_heads, h = i % kv_heads, g = s.group();
            const int64_t row = cu_q[b] * heads + h * g, key = cu_k[b] * kv_heads + h;
            const Queries<T> queries{static_cast<const T*>(q) + cu_q[b] * q_stride + h * g * d, q_stride, g, d};
            const auto packed = [&](const void* data) {
                return Queries<T>{static_cast<const T*>(data) + row * d, heads * d, g, d};
            };
            backward_sequence<T>(s, queries, packed(dout), packed(out), lse + row,
                                 Tokens<T>{static_cast<const T*>(k) + cu_k[b] * k_stride + h * d, k_stride},
                                 Tokens<T>{static_cast<const T*>(v) + cu_k[b] * v_stride + h * d, v_stride},
                                 cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b], scale, static_cast<T*>(dq) + row * d,
                                 static_cast<T*>(dk) + key * d, static_cast<T*>(dv) + key * d);
        });
    });
}

// Copies the rows (row_bytes each) of k and v into the pages; row t goes to slots[t], negative slots are skipped.
RLK_API void rlk_store_kv(char* k_cache, char* v_cache, const char* k, const char* v, const int64_t* slots, int64_t tokens,
                          int64_t row_bytes, int64_t k_stride, int64_t v_stride, int32_t threads) {
    const int used = tokens * row_bytes < (int64_t(1) << 20) ? 1 : threads;
    parallel_for(tokens, 1, used, [&](int64_t t) {
        if (slots[t] < 0) return;
        std::memcpy(k_cache + slots[t] * row_bytes, k + t * k_stride, row_bytes);
        std::memcpy(v_cache + slots[t] * row_bytes, v + t * v_stride, row_bytes);
    });
}
