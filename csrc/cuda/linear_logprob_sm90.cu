// linear_logprob's products on Hopper: a persistent warp-specialised GEMM. MODE 0 leaves the statistics of vocabulary
// tiles, 1 the gradient of the logits, 2 statistics and bf16 probabilities; 3 adds to the gradient of the hidden states,
// 4 to that of the weight. Bits: those of kernels/triton/linear_logprob.py (docs/ops/linear_logprob.md).
//
// Compiled by NVRTC or nvcc for sm_90a with -fmad=false. A cluster of two blocks holds 256 tokens and shares each [256,
// 64] piece of the weight. In a block one warpgroup fetches, up to four pieces ahead and into the next tile, and two
// multiply, 64 tokens each. Barriers keep their default scope: one of cluster or GPU scope flushes L1 at every piece.
// Tokens without a gradient come behind the others and are left out where they would add zeros: a chain that skips whole
// groups of zero products keeps its bits.

#ifndef MODE
#define MODE 0
#endif
#ifndef HAS_TEMPERATURE
#define HAS_TEMPERATURE 0
#endif
#ifndef HAS_KEPT
#define HAS_KEPT 0
#endif
#ifndef HAS_DENTROPY
#define HAS_DENTROPY 0
#endif

#include "sm90.cuh"

struct Arguments {
  const i64* targets;            // [T]
  const float* inv_temperature;  // [T]
  const u32* kept;               // [T, words]
  // statistics
  float* tile_max;  // [T, tiles]
  int* tile_sum;    // [T, tiles]
  int* tile_entropy;
  float* target_z;  // [T]
  float* logits;    // [T, width] fp32: takes the first entries' logits, or null
  // gradient
  const float* stats;    // [T, 2]
  const float* entropy;  // [T]
  const float* dlogp;
  const float* dentropy;
  const int* order;  // [T]: the token of each row, -1 - token where it has no gradient
  const int* count;  // [1]: rows from which on none has one; of MODE 3 and 4 too
  // products with the gradient
  float* sum;         // [rows, columns] fp32, what the chains are added to; null: nothing
  u16* rounded;       // MODE 4: [rows, columns] bf16: takes the rounded total, or null
  int fresh;          // what sum holds is ignored
  int tokens, vocab, pieces;  // rows and columns of the result; pieces of 64 along the third dimension
  int parts, span;  // of MODE 3: results, one behind the other in sum, each of the next span pieces; else one of all
  int tiles, words;
  int first;  // first entry of the vocabulary here
  int width;  // of logits: whole tiles of kColumns
};

namespace {

constexpr int kRows = 128, kColumns = 256, kDepth = 64, kStages = 4;
constexpr int kGroup = 8;  // clusters of tokens that share what is in L2 of the weight
constexpr int kBytesA = kRows * kDepth * 2, kBytesB = kColumns * kDepth * 2;
constexpr int kStaging = MODE == 1 || MODE == 2 ? 8192 : 0;  // one [64, 64] piece of output; two for each warpgroup
constexpr bool kTransposedA = MODE == 4, kTransposedB = MODE >= 3;  // rows of memory run along the result, not along k
constexpr u32 kOneBits = 0x3f800000u;
constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void fetch_for_both(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  const unsigned short mask = 3;
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(mask)
      : "memory");
}
__device__ __forceinline__ void put(const TensorMap* map, int column, int row, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n" ::"l"(map), "r"(column),
               "r"(row), "r"(from)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void warpgroup_sync(int which) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + which) : "memory");
}

constexpr int kStepA = kTransposedA ? 128 : 2, kStepB = kTransposedB ? 128 : 2;  // 16 of k, in units of 16 bytes

// d [64, 256] = a [64, 16] b [256, 16]^T (+ d)
__device__ __forceinline__ void multiply(float (&d)[128], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, p, 1, 1, %131, %132;\n}\n"
      :
        "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(a), "l"(b), "r"(add), "n"(static_cast<int>(kTransposedA)), "n"(static_cast<int>(kTransposedB)));
}

__device__ __forceinline__ float exponential(float x) {
  return exp2_of(x * kLog2e);
}

// Four 8x8 matrices of 16-bit elements, two blocks of eight columns, into a swizzled [64, 64] piece.
__device__ __forceinline__ void stage(u32 piece, int row, int block, int lane, const u32 (&r)[4]) {
  const int line = row + (lane & 15);
  const u32 at = piece + line * 128 + (((block + (lane >> 4)) ^ (line & 7)) << 4);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

struct Position {
  int m, n;
};

// Tiles run down kGroup clusters of tokens before they move to the next 256 entries: both operands stay in L2.
__device__ __forceinline__ Position position(int tile, int across_m, int across_n) {
  const int whole = kGroup * across_n, group = tile / whole, rest = tile - group * whole;
  const int height = min(kGroup, across_m - group * kGroup);
  return {group * kGroup + rest % height, rest / height};
}

// What an epilogue knows of its thread's two rows, eight apart.
struct Rows {
  int row[2];  // of what is read: in MODE 1 a token
  bool inside[2];  // in MODE 1: has a gradient
  i64 target[2];
  float inverse[2];
  float top[2], log_total[2], g[2], h[2], entropy[2];
};

__device__ __forceinline__ void read_rows(Rows& rows, const Arguments& args, int first_row) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int row = first_row + 8 * i;
    if (MODE == 1 && row < args.tokens) row = args.order[row];
    const bool in = row >= 0 && row < args.tokens;
    rows.row[i] = row;
    rows.inside[i] = in;
    rows.target[i] = (in ? args.targets[row] : -1) - args.first;
    if (HAS_TEMPERATURE) rows.inverse[i] = in ? args.inv_temperature[row] : 0.0f;
    if (MODE == 1) {
      rows.top[i] = in ? args.stats[2 * static_cast<i64>(row)] : 0.0f;
      rows.log_total[i] = in ? args.stats[2 * static_cast<i64>(row) + 1] : 0.0f;
      rows.g[i] = in && args.dlogp ? args.dlogp[row] : 0.0f;
      rows.h[i] = HAS_DENTROPY && in ? args.dentropy[row] : 0.0f;
      rows.entropy[i] = HAS_DENTROPY && in ? args.entropy[row] : 0.0f;
    }
  }
}

// Scales the logits and drops entries outside the vocabulary or the kept set.
__device__ __forceinline__ void prepare(float (&d)[128], const Rows& rows, const Arguments& args, int n0, int lane) {
  if (HAS_TEMPERATURE) {
#pragma unroll
    for (int i = 0; i < 128; ++i) d[i] = d[i] * rows.inverse[(i >> 1) & 1];
  }
  if (HAS_KEPT) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32* words = args.kept + static_cast<i64>(rows.row[i]) * args.words + (args.first + n0) / 32;
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        const bool here = rows.inside[i] && (args.first + n0) / 32 + w < args.words;
        const u32 bits = (here ? words[w] : 0u) >> (2 * (lane & 3));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float(&z)[128] = d;
          const int at = 4 * (4 * w + j) + 2 * i;
          z[at] = bits >> (8 * j) & 1 ? z[at] : minus_infinity();
          z[at + 1] = bits >> (8 * j + 1) & 1 ? z[at + 1] : minus_infinity();
        }
      }
    }
  }
  if (n0 + kColumns > args.vocab) {
#pragma unroll
    for (int i = 0; i < 128; ++i)
      if (n0 + 8 * (i >> 2) + 2 * (lane & 3) + (i & 1) >= args.vocab) d[i] = minus_infinity();
  }
}

__device__ __forceinline__ bool has_target(i64 relative, int low, int width) {
  return relative >= low && relative < low + width;
}

// A staging piece that the copy engine has read; two take turns.
struct Staging {
  u32 base;
  int turn, which;
  bool leader;
  __device__ __forceinline__ u32 next() {
    if (leader) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    warpgroup_sync(which);
    return base + (turn++ & 1) * 8192;
  }
  __device__ __forceinline__ void send(const TensorMap* map, int column, int row, u32 piece) {
    stores_fence();
    warpgroup_sync(which);
    if (leader) put(map, column, row, piece);
  }
};

// Stores the tile's logits past L2's own: they are read in the backward at the earliest. Four lanes fill 32 bytes.
__device__ __forceinline__ void leave_logits(const float (&d)[128], const Rows& rows, const Arguments& args, int n0,
                                             int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float* line = args.logits + static_cast<i64>(rows.row[i]) * args.width + n0 + 2 * (lane & 3);
    if (!rows.inside[i]) continue;
#pragma unroll
    for (int j = 0; j < 32; ++j)
      asm volatile("st.global.cs.v2.f32 [%0], {%1, %2};" ::"l"(line + 8 * j), "f"(d[4 * j + 2 * i]),
                   "f"(d[4 * j + 2 * i + 1])
                   : "memory");
  }
}

__device__ __forceinline__ void leave_statistics(float (&d)[128], const Rows& rows, const Arguments& args, int n0,
                                                 int lane, int warp_row, int first_row, Staging& staging,
                                                 const TensorMap* out) {
  if (MODE == 0 && args.logits && n0 < args.width) leave_logits(d, rows, args, n0, lane);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const i64 y = rows.target[i] - n0;
    if (has_target(y, 0, kColumns) && ((y >> 1) & 3) == (lane & 3) && rows.target[i] < args.vocab) {
      float z = 0.0f;
#pragma unroll
      for (int j = 0; j < 64; ++j) {
        const int at = 4 * (j >> 1) + 2 * i + (j & 1);
        if (y == 8 * (j >> 1) + 2 * (lane & 3) + (j & 1)) z = d[at];
      }
      args.target_z[rows.row[i]] = z;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float m[2], base[2];
    u32 s[2] = {0, 0}, e[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      m[i] = minus_infinity();
#pragma unroll
      for (int j = 0; j < 16; ++j)
        m[i] = larger(larger(m[i], d[64 * half + 4 * j + 2 * i]), d[64 * half + 4 * j + 2 * i + 1]);
      m[i] = larger(m[i], __shfl_xor_sync(0xffffffffu, m[i], 1));
      m[i] = larger(m[i], __shfl_xor_sync(0xffffffffu, m[i], 2));
      base[i] = m[i] == minus_infinity() ? 0.0f : m[i];
    }
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const u32 to = MODE == 2 ? staging.next() : 0;
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        u32 packed[4];
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float p[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const float x = d[64 * half + 32 * piece + 8 * pair + 4 * k + 2 * i + c] - base[i];
              p[c] = exponential(x);
              const float q = p[c] * fminf(-x, 3.402823466e38f);  // 0 where p is, also at a distance of infinity
              s[i] += __float_as_uint(p[c] + 1.0f);
              e[i] += __float_as_uint(q + 1.0f);
            }
            packed[2 * k + i] = MODE == 2 ? bf16_pair(p[0], p[1]) : 0;
          }
        if (MODE == 2) stage(to, warp_row, 2 * pair, lane, packed);
      }
      if (MODE == 2) staging.send(out, n0 + 128 * half + 64 * piece, first_row, to);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s[i] -= 32u * kOneBits;
      e[i] -= 32u * kOneBits;
      s[i] += __shfl_xor_sync(0xffffffffu, s[i], 1);
      s[i] += __shfl_xor_sync(0xffffffffu, s[i], 2);
      e[i] += __shfl_xor_sync(0xffffffffu, e[i], 1);
      e[i] += __shfl_xor_sync(0xffffffffu, e[i], 2);
    }
    const int tile = n0 / 128 + half;
    const bool second = lane & 1;  // the first two lanes of four write a row each
    if ((lane & 2) == 0 && (second ? rows.inside[1] : rows.inside[0]) && tile < args.tiles) {
      const i64 at = static_cast<i64>(second ? rows.row[1] : rows.row[0]) * args.tiles + tile;
      args.tile_max[at] = second ? m[1] : m[0];
      args.tile_sum[at] = static_cast<int>(second ? s[1] : s[0]);
      args.tile_entropy[at] = static_cast<int>(second ? e[1] : e[0]);
    }
  }
}

template <bool HIT>
__device__ __forceinline__ float gradient(float z, const Rows& rows, int i, bool hit) {
  const float log_p = (z - rows.top[i]) - rows.log_total[i];
  const float p = exponential(log_p);
  float u = rows.g[i] * ((HIT && hit ? 1.0f : 0.0f) - p);
  if (HAS_DENTROPY) u = __fmaf_rn(0.0f - rows.h[i] * p, p == 0.0f ? 0.0f : log_p + rows.entropy[i], u);
  if (HAS_TEMPERATURE) u = u * rows.inverse[i];
  if (HAS_KEPT) u = z == minus_infinity() ? 0.0f : u;
  return u;
}

template <bool HIT>
__device__ __forceinline__ void gradient_piece(const float (&d)[128], const Rows& rows, int piece, int n0, int lane,
                                               u32 to, int warp_row) {
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    u32 packed[4];
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 32 * piece + 8 * pair + 4 * k + 2 * i;
        const i64 y = rows.target[i] - (n0 + 8 * (at >> 2) + 2 * (lane & 3));
        const u32 r = bf16_pair(gradient<HIT>(d[at], rows, i, y == 0), gradient<HIT>(d[at + 1], rows, i, y == 1));
        packed[2 * k + i] = rows.inside[i] ? r : 0u;
      }
    stage(to, warp_row, 2 * pair, lane, packed);
  }
}

__device__ __forceinline__ void leave_gradient(const float (&d)[128], const Rows& rows, int n0, int lane, int warp_row,
                                               int first_row, Staging& staging, const TensorMap* out) {
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) {
    const u32 to = staging.next();
    const bool near = has_target(rows.target[0], n0 + 64 * piece, 64) || has_target(rows.target[1], n0 + 64 * piece, 64);
    if (__any_sync(0xffffffffu, near))
      gradient_piece<true>(d, rows, piece, n0, lane, to, warp_row);
    else
      gradient_piece<false>(d, rows, piece, n0, lane, to, warp_row);
    staging.send(out, n0 + 64 * piece, first_row, to);
  }
}

// Whether a cluster's 256 rows have a gradient; only the gradient of the logits and of the hidden states ask.
__device__ __forceinline__ bool wanted(int cluster, int count) {
  return (MODE != 1 && MODE != 3) || cluster * 2 * kRows < count;
}

// Adds the tile to sum and rounds the total where that is wanted; two adjacent columns at a time. The old values of
// eight such pairs are under way together: a load behind a store that might overlap it would wait for its turn.
// Without a gradient there is nothing to add to running sums; a caller's buffer may hold -0, which + 0 makes 0.
__device__ __forceinline__ void leave_sum(const float (&d)[128], const Arguments& args, int part, int first_row,
                                          int first_column, bool any) {
  if (MODE == 3 && !any && !args.fresh) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + 8 * i;
    const i64 line = (static_cast<i64>(part) * args.tokens + row) * args.vocab + first_column;
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      float2 total[8];
      bool inside[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        inside[j] = row < args.tokens && first_column + 8 * (8 * group + j) < args.vocab;  // even, as the width is
        total[j] = make_float2(0.0f, 0.0f);
        if (!args.fresh && inside[j])
          total[j] = *reinterpret_cast<const float2*>(args.sum + line + 8 * (8 * group + j));
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int at = 4 * (8 * group + j) + 2 * i;
        const float2 t = args.fresh ? make_float2(d[at], d[at + 1])
                                    : make_float2(total[j].x + d[at], total[j].y + d[at + 1]);
        if (inside[j] && args.sum) *reinterpret_cast<float2*>(args.sum + line + 8 * (8 * group + j)) = t;
        if (inside[j] && args.rounded)
          *reinterpret_cast<u32*>(args.rounded + line + 8 * (8 * group + j)) = bf16_pair(t.x, t.y);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    rlk_linear_logprob(const __grid_constant__ TensorMap a,    // modes 0 to 2: hidden; 3 and 4: gradient [T, V]
                       const __grid_constant__ TensorMap b,    // 0 to 3: weight; 4: hidden
                       const __grid_constant__ TensorMap out,  // [T, V] bf16: gradient or probabilities
                       const __grid_constant__ Arguments args) {
  extern __shared__ char raw[];
  const u32 memory = (shared_address(raw) + 1023) & ~1023u;
  const u32 a_at = memory, b_at = memory + kStages * kBytesA, staging_at = b_at + kStages * kBytesB;
  const u32 full = staging_at + 4 * kStaging, empty = full + 8 * kStages;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);  // known to be one for a warp
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int across_m = (args.tokens + 2 * kRows - 1) / (2 * kRows), across_n = (args.vocab + kColumns - 1) / kColumns;
  const int part_tiles = across_m * across_n, clusters = gridDim.x >> 1;
  const int tiles = MODE == 3 ? args.parts * part_tiles : part_tiles;
  const int count = MODE == 1 || MODE >= 3 ? *args.count : 0;
  const int most = MODE == 4 ? (count + kDepth - 1) / kDepth : args.pieces;
  // Which result a tile is of, and the pieces of that.
  const auto part_of = [&](int tile) { return MODE == 3 && args.parts > 1 ? tile / part_tiles : 0; };
  const auto pieces_of = [&](int part) {
    return MODE == 3 && args.parts > 1 ? min(args.span, most - part * args.span) : most;
  };

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 16);  // eight warps in each of the two blocks
    }
    barriers_made();
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");

  if (warpgroup == 2) {
    fewer_registers<40>();
    if (threadIdx.x == 256) {
      int stage = 0;
      u32 phase = 1;
      for (int tile = blockIdx.x >> 1; tile < tiles; tile += clusters) {
        const int part = part_of(tile);
        const Position at = position(tile - part * part_tiles, across_m, across_n);
        const int m0 = at.m * 2 * kRows + static_cast<int>(rank) * kRows;
        const int n0 = at.n * kColumns + static_cast<int>(rank) * (kColumns / 2);
        const int pieces = wanted(at.m, count) ? pieces_of(part) : 0;
        for (int i = 0; i < pieces; ++i) {
          const int k = (part * args.span + i) * kDepth;
          barrier_wait(empty + 8 * stage, phase);
          const u32 ready = full + 8 * stage;
          const u32 to_a = a_at + stage * kBytesA, to_b = b_at + stage * kBytesB + rank * (kBytesB / 2);
          barrier_expect(ready, kBytesA + kBytesB);
          if (kTransposedA) {
            fetch(to_a, &a, m0, k, ready);
            fetch(to_a + 8192, &a, m0 + 64, k, ready);
          } else {
            fetch(to_a, &a, k, m0, ready);
          }
          if (kTransposedB) {
            fetch_for_both(to_b, &b, n0, k, ready);
            fetch_for_both(to_b + 8192, &b, n0 + 64, k, ready);
          } else {
            fetch_for_both(to_b, &b, k, n0, ready);
          }
          if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
    }
  } else {
    more_registers<232>();
    const int lane = threadIdx.x & 31, warp_row = (threadIdx.x & 127) / 32 * 16;
    Staging staging{staging_at + warpgroup * 2 * kStaging, 0, warpgroup, (threadIdx.x & 127) == 0};
    int stage = 0;
    u32 phase = 0;
    for (int tile = blockIdx.x >> 1; tile < tiles; tile += clusters) {
      const int part = part_of(tile);
      const Position at = position(tile - part * part_tiles, across_m, across_n);
      const int first_row = at.m * 2 * kRows + static_cast<int>(rank) * kRows + warpgroup * 64, n0 = at.n * kColumns;
      Rows rows;
      if (MODE < 3) read_rows(rows, args, first_row + warp_row + (lane >> 2));
      const int pieces = wanted(at.m, count) ? pieces_of(part) : 0;
      float d[128];
      if (pieces == 0) {
#pragma unroll
        for (int i = 0; i < 128; ++i) d[i] = 0.0f;
      }
      int before = 0;
      for (int k = 0; k < pieces; ++k) {
        barrier_wait(full + 8 * stage, phase);
        products_begin();
        const u64 left = descriptor<kTransposedA>(a_at + stage * kBytesA + warpgroup * 8192);
        const u64 right = descriptor<kTransposedB>(b_at + stage * kBytesB);
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply(d, left + kStepA * j, right + kStepB * j, k > 0 || j > 0);
        products_queued();
        if (k > 0) {
          products_wait<1>();
          if (lane < 2) barrier_arrive_at(empty + 8 * before, lane);
        }
        before = stage;
        if (++stage == kStages) {
          stage = 0;
          phase ^= 1;
        }
      }
      products_wait<0>();
      if (pieces > 0 && lane < 2) barrier_arrive_at(empty + 8 * before, lane);
      if (MODE >= 3) {
        leave_sum(d, args, part, first_row + warp_row + (lane >> 2), n0 + 2 * (lane & 3), pieces > 0);
        continue;
      }
      prepare(d, rows, args, n0, lane);
      if (MODE == 1)
        leave_gradient(d, rows, n0, lane, warp_row, first_row, staging, &out);
      else
        leave_statistics(d, rows, args, n0, lane, warp_row, first_row, staging, &out);
    }
    if (kStaging > 0 && staging.leader) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  __syncwarp();  // of the fetching warp one thread comes late
  // A block must not leave while the other may still write into it or signal it.
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
