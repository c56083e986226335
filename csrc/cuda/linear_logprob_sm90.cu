// linear_logprob's products on Hopper: a persistent warp-specialised GEMM with one epilogue per `Pass`, with the bits of
// kernels/triton/linear_logprob.py (docs/ops/linear_logprob.md). Compiled by NVRTC or nvcc for sm_90a with -fmad=false.
//
// A cluster of two CTAs computes 256 rows and multicasts each [256, 64] block of B. In each CTA, one TMA producer warp
// loads up to four k blocks ahead, across tile boundaries, and two math warpgroups compute 64 rows each. mbarriers keep
// their default (CTA) scope, because a wider scope would flush L1 at every k block. Tokens without a gradient are ordered
// last and skipped: leaving out whole wgmmas whose products are all zero keeps the bits of the sum.

#ifndef PASS
#define PASS 0  // an enumerator of `Pass`
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

#include "wgmma.cuh"

enum class Pass {
  Statistics,     // statistics of 128-entry vocabulary tiles
  Dz,             // gradient of the logits, bf16
  Probabilities,  // statistics and bf16 probabilities
  Dhidden,        // adds to the gradient of the hidden states
  Dweight,        // adds to the gradient of the weight
};

struct Arguments {
  const i64* targets;            // [T]
  const float* inv_temperature;  // [T]
  const u32* kept;               // [T, words]
  // Pass::Statistics and Pass::Probabilities
  float* tile_max;  // [T, tiles]
  int* tile_sum;    // [T, tiles]
  int* tile_entropy;
  float* target_z;  // [T]
  float* logits;    // [T, width] fp32: the first `width` logits of each row; or null
  // Pass::Dz
  const float* stats;    // [T, 2]
  const float* entropy;  // [T]
  const float* dlogp;
  const float* dentropy;
  const int* order;  // [T]: token of each row, -1 - token if it has no gradient
  const int* count;  // [1]: number of leading rows that may have a gradient; also for the two passes below
  // Pass::Dhidden and Pass::Dweight
  float* sum;         // [rows, columns] fp32, added to; or null
  u16* rounded;       // Pass::Dweight: [rows, columns] bf16 total; or null
  int fresh;          // overwrite `sum` instead of adding to it
  int tokens, vocab, pieces;  // rows and columns of the result; k blocks of 64
  int parts, span;            // Pass::Dhidden: split-K into `parts` outputs of `span` k blocks each, stored contiguously
  int tiles, words;
  int first;  // vocabulary index of column 0
  int width;  // columns of `logits`, a multiple of kColumns
};

namespace {

constexpr Pass kPass = static_cast<Pass>(PASS);
constexpr bool kAccumulates = kPass == Pass::Dhidden || kPass == Pass::Dweight;
constexpr int kRows = 128, kColumns = 256, kDepth = 64, kStages = 4;
constexpr int kGroup = 8;  // clusters along M that share a column tile of B in L2
constexpr int kBytesA = kRows * kDepth * 2, kBytesB = kColumns * kDepth * 2;
// One [64, 64] 16-bit output piece; each math warpgroup has two.
constexpr int kStagingBytes = kPass == Pass::Dz || kPass == Pass::Probabilities ? 8192 : 0;
constexpr bool kTransposedA = kPass == Pass::Dweight, kTransposedB = kAccumulates;  // MN-major instead of K-major
constexpr u32 kOneBits = 0x3f800000u;
constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ void warpgroup_sync(int which) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + which) : "memory");
}

// Descriptor step of one wgmma, 16 elements of k, in units of 16 bytes.
constexpr int kStepA = kTransposedA ? 128 : 2, kStepB = kTransposedB ? 128 : 2;

__device__ __forceinline__ float exponential(float x) { return exp2_of(x * kLog2e); }

// Stores four 8x8 matrices of 16-bit elements, [16, 16] in all, into a swizzled [64, 64] piece.
__device__ __forceinline__ void stmatrix(u32 piece, int row, int block, int lane, const u32 (&r)[4]) {
  const int line = row + (lane & 15);
  const u32 at = piece + line * 128 + (((block + (lane >> 4)) ^ (line & 7)) << 4);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

struct Position {
  int m, n;
};

// Tile rasterisation for L2: kGroup clusters along M, then the next 256 columns.
__device__ __forceinline__ Position tile_position(int tile, int across_m, int across_n) {
  const int whole = kGroup * across_n, group = tile / whole, rest = tile - group * whole;
  const int height = min(kGroup, across_m - group * kGroup);
  return {group * kGroup + rest % height, rest / height};
}

// The two rows of an epilogue thread; the second is row + 8.
struct Rows {
  int row[2];      // row of the inputs; in Pass::Dz a token
  bool inside[2];  // exists; in Pass::Dz: has a gradient
  i64 target[2];
  float inverse[2];
  float top[2], log_total[2], g[2], h[2], entropy[2];
};

__device__ __forceinline__ void read_rows(Rows& rows, const Arguments& args, int first_row) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int row = first_row + 8 * i;
    if (kPass == Pass::Dz && row < args.tokens) row = args.order[row];
    const bool in = row >= 0 && row < args.tokens;
    rows.row[i] = row;
    rows.inside[i] = in;
    rows.target[i] = (in ? args.targets[row] : -1) - args.first;
    if (HAS_TEMPERATURE) rows.inverse[i] = in ? args.inv_temperature[row] : 0.0f;
    if (kPass == Pass::Dz) {
      rows.top[i] = in ? args.stats[2 * static_cast<i64>(row)] : 0.0f;
      rows.log_total[i] = in ? args.stats[2 * static_cast<i64>(row) + 1] : 0.0f;
      rows.g[i] = in && args.dlogp ? args.dlogp[row] : 0.0f;
      rows.h[i] = HAS_DENTROPY && in ? args.dentropy[row] : 0.0f;
      rows.entropy[i] = HAS_DENTROPY && in ? args.entropy[row] : 0.0f;
    }
  }
}

// Applies the temperature and sets entries outside the vocabulary or the kept set to -inf.
__device__ __forceinline__ void scale_and_mask(float (&d)[128], const Rows& rows, const Arguments& args, int n0, int lane) {
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

// Double-buffered staging pieces between the epilogue and TMA stores.
struct Staging {
  u32 base;
  int turn, which;
  bool leader;
  // A piece that the previous TMA store from it has finished reading.
  __device__ __forceinline__ u32 acquire() {
    if (leader) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    warpgroup_sync(which);
    return base + (turn++ & 1) * 8192;
  }
  __device__ __forceinline__ void store(const TensorMap* map, int column, int row, u32 piece) {
    fence_proxy_async();
    warpgroup_sync(which);
    if (leader) tma_store(map, column, row, piece);
  }
};

// Stores the tile's logits with the streaming hint (.cs), because they are next read in the backward pass. Four lanes fill
// a 32-byte sector.
__device__ __forceinline__ void epilogue_logits(const float (&d)[128], const Rows& rows, const Arguments& args, int n0,
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

__device__ __forceinline__ void epilogue_statistics(float (&d)[128], const Rows& rows, const Arguments& args, int n0,
                                                 int lane, int warp_row, int first_row, Staging& staging,
                                                 const TensorMap* out) {
  if (kPass == Pass::Statistics && args.logits && n0 < args.width) epilogue_logits(d, rows, args, n0, lane);
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
        m[i] = max_nan(max_nan(m[i], d[64 * half + 4 * j + 2 * i]), d[64 * half + 4 * j + 2 * i + 1]);
      m[i] = max_nan(m[i], __shfl_xor_sync(0xffffffffu, m[i], 1));
      m[i] = max_nan(m[i], __shfl_xor_sync(0xffffffffu, m[i], 2));
      base[i] = m[i] == minus_infinity() ? 0.0f : m[i];
    }
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const u32 to = kPass == Pass::Probabilities ? staging.acquire() : 0;
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
              const float q = p[c] * fminf(-x, 3.402823466e38f);  // 0 where p is 0, also for x = -inf
              s[i] += __float_as_uint(p[c] + 1.0f);
              e[i] += __float_as_uint(q + 1.0f);
            }
            packed[2 * k + i] = kPass == Pass::Probabilities ? bf16_pair(p[0], p[1]) : 0;
          }
        if (kPass == Pass::Probabilities) stmatrix(to, warp_row, 2 * pair, lane, packed);
      }
      if (kPass == Pass::Probabilities) staging.store(out, n0 + 128 * half + 64 * piece, first_row, to);
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
    const bool second = lane & 1;  // the first two lanes of a quad write one row each
    if ((lane & 2) == 0 && (second ? rows.inside[1] : rows.inside[0]) && tile < args.tiles) {
      const i64 at = static_cast<i64>(second ? rows.row[1] : rows.row[0]) * args.tiles + tile;
      args.tile_max[at] = second ? m[1] : m[0];
      args.tile_sum[at] = static_cast<int>(second ? s[1] : s[0]);
      args.tile_entropy[at] = static_cast<int>(second ? e[1] : e[0]);
    }
  }
}

template <bool HIT>
__device__ __forceinline__ float dz_of(float z, const Rows& rows, int i, bool hit) {
  const float log_p = (z - rows.top[i]) - rows.log_total[i];
  const float p = exponential(log_p);
  float u = rows.g[i] * ((HIT && hit ? 1.0f : 0.0f) - p);
  if (HAS_DENTROPY) u = __fmaf_rn(0.0f - rows.h[i] * p, p == 0.0f ? 0.0f : log_p + rows.entropy[i], u);
  if (HAS_TEMPERATURE) u = u * rows.inverse[i];
  if (HAS_KEPT) u = z == minus_infinity() ? 0.0f : u;
  return u;
}

template <bool HIT>
__device__ __forceinline__ void dz_piece(const float (&d)[128], const Rows& rows, int piece, int n0, int lane,
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
        const u32 r = bf16_pair(dz_of<HIT>(d[at], rows, i, y == 0), dz_of<HIT>(d[at + 1], rows, i, y == 1));
        packed[2 * k + i] = rows.inside[i] ? r : 0u;
      }
    stmatrix(to, warp_row, 2 * pair, lane, packed);
  }
}

__device__ __forceinline__ void epilogue_dz(const float (&d)[128], const Rows& rows, int n0, int lane, int warp_row,
                                               int first_row, Staging& staging, const TensorMap* out) {
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) {
    const u32 to = staging.acquire();
    const int low = n0 + 64 * piece;
    const bool has_hit = has_target(rows.target[0], low, 64) || has_target(rows.target[1], low, 64);
    if (__any_sync(0xffffffffu, has_hit))
      dz_piece<true>(d, rows, piece, n0, lane, to, warp_row);
    else
      dz_piece<false>(d, rows, piece, n0, lane, to, warp_row);
    staging.store(out, n0 + 64 * piece, first_row, to);
  }
}

// Whether a cluster's 256 rows contain a gradient; Dz and Dhidden skip clusters without one.
__device__ __forceinline__ bool has_gradient(int cluster, int count) {
  return (kPass != Pass::Dz && kPass != Pass::Dhidden) || cluster * 2 * kRows < count;
}

// Adds the tile to `sum` and stores the rounded total in `rounded`, two adjacent columns at a time. Eight loads are issued
// before their stores, because the compiler cannot move a load above a store that may alias it.
// Tiles without a gradient leave `sum` untouched, because adding 0 would turn the caller's -0 into +0.
__device__ __forceinline__ void epilogue_accumulate(const float (&d)[128], const Arguments& args, int part, int first_row,
                                          int first_column, bool any) {
  if (kPass == Pass::Dhidden && !any && !args.fresh) return;
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
        // Also true of the second column, because the width is even.
        inside[j] = row < args.tokens && first_column + 8 * (8 * group + j) < args.vocab;
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
    rlk_linear_logprob(const __grid_constant__ TensorMap a,    // hidden; Dhidden and Dweight: dz [T, V]
                       const __grid_constant__ TensorMap b,    // weight; Dweight: hidden
                       const __grid_constant__ TensorMap out,  // [T, V] bf16: dz or probabilities
                       const __grid_constant__ Arguments args) {
  extern __shared__ char raw[];
  const u32 memory = (shared_address(raw) + 1023) & ~1023u;
  const u32 a_at = memory, b_at = memory + kStages * kBytesA, staging_at = b_at + kStages * kBytesB;
  const u32 full = staging_at + 4 * kStagingBytes, empty = full + 8 * kStages;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);  // warp-uniform
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int across_m = (args.tokens + 2 * kRows - 1) / (2 * kRows), across_n = (args.vocab + kColumns - 1) / kColumns;
  const int part_tiles = across_m * across_n, clusters = gridDim.x >> 1;
  const int tiles = kPass == Pass::Dhidden ? args.parts * part_tiles : part_tiles;
  const int count = kPass == Pass::Dz || kAccumulates ? *args.count : 0;
  const int all_k_blocks = kPass == Pass::Dweight ? (count + kDepth - 1) / kDepth : args.pieces;
  // The split-K part of a tile, and the k blocks of a part.
  const auto part_of = [&](int tile) { return kPass == Pass::Dhidden && args.parts > 1 ? tile / part_tiles : 0; };
  const auto k_blocks_of = [&](int part) {
    return kPass == Pass::Dhidden && args.parts > 1 ? min(args.span, all_k_blocks - part * args.span) : all_k_blocks;
  };

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 16);  // the eight math warps of both CTAs
    }
    fence_barrier_init();
  }
  cluster_arrive();
  cluster_wait();

  if (warpgroup == 2) {  // TMA producer warp; the other three of this warpgroup idle
    setmaxnreg_dec<40>();
    if (threadIdx.x == 256) {
      int stage = 0;
      u32 phase = 1;
      for (int tile = blockIdx.x >> 1; tile < tiles; tile += clusters) {
        const int part = part_of(tile);
        const Position at = tile_position(tile - part * part_tiles, across_m, across_n);
        const int m0 = at.m * 2 * kRows + static_cast<int>(rank) * kRows;
        const int n0 = at.n * kColumns + static_cast<int>(rank) * (kColumns / 2);
        const int k_blocks = has_gradient(at.m, count) ? k_blocks_of(part) : 0;
        for (int i = 0; i < k_blocks; ++i) {
          const int k = (part * args.span + i) * kDepth;
          barrier_wait(empty + 8 * stage, phase);
          const u32 ready = full + 8 * stage;
          const u32 to_a = a_at + stage * kBytesA, to_b = b_at + stage * kBytesB + rank * (kBytesB / 2);
          barrier_arrive_expect_tx(ready, kBytesA + kBytesB);
          if (kTransposedA) {
            tma_load(to_a, &a, m0, k, ready);
            tma_load(to_a + 8192, &a, m0 + 64, k, ready);
          } else {
            tma_load(to_a, &a, k, m0, ready);
          }
          if (kTransposedB) {
            tma_load_multicast(to_b, &b, n0, k, ready);
            tma_load_multicast(to_b + 8192, &b, n0 + 64, k, ready);
          } else {
            tma_load_multicast(to_b, &b, k, n0, ready);
          }
          if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
    }
  } else {  // math warpgroups
    setmaxnreg_inc<232>();
    const int lane = threadIdx.x & 31, warp_row = (threadIdx.x & 127) / 32 * 16;
    Staging staging{staging_at + warpgroup * 2 * kStagingBytes, 0, warpgroup, (threadIdx.x & 127) == 0};
    int stage = 0;
    u32 phase = 0;
    for (int tile = blockIdx.x >> 1; tile < tiles; tile += clusters) {
      const int part = part_of(tile);
      const Position at = tile_position(tile - part * part_tiles, across_m, across_n);
      const int first_row = at.m * 2 * kRows + static_cast<int>(rank) * kRows + warpgroup * 64, n0 = at.n * kColumns;
      Rows rows;
      if (!kAccumulates) read_rows(rows, args, first_row + warp_row + (lane >> 2));
      const int k_blocks = has_gradient(at.m, count) ? k_blocks_of(part) : 0;
      float d[128];
      if (k_blocks == 0) {
#pragma unroll
        for (int i = 0; i < 128; ++i) d[i] = 0.0f;
      }
      int previous_stage = 0;
      for (int k = 0; k < k_blocks; ++k) {
        barrier_wait(full + 8 * stage, phase);
        wgmma_fence();
        const u64 left = descriptor<kTransposedA>(a_at + stage * kBytesA + warpgroup * 8192);
        const u64 right = descriptor<kTransposedB>(b_at + stage * kBytesB);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          wgmma_m64n256k16<kTransposedA, kTransposedB>(d, left + kStepA * j, right + kStepB * j, k > 0 || j > 0);
        wgmma_commit();
        if (k > 0) {
          wgmma_wait<1>();
          if (lane < 2) barrier_arrive_in_cluster(empty + 8 * previous_stage, lane);
        }
        previous_stage = stage;
        if (++stage == kStages) {
          stage = 0;
          phase ^= 1;
        }
      }
      wgmma_wait<0>();
      if (k_blocks > 0 && lane < 2) barrier_arrive_in_cluster(empty + 8 * previous_stage, lane);
      if (kAccumulates) {
        epilogue_accumulate(d, args, part, first_row + warp_row + (lane >> 2), n0 + 2 * (lane & 3), k_blocks > 0);
        continue;
      }
      scale_and_mask(d, rows, args, n0, lane);
      if (kPass == Pass::Dz)
        epilogue_dz(d, rows, n0, lane, warp_row, first_row, staging, &out);
      else
        epilogue_statistics(d, rows, args, n0, lane, warp_row, first_row, staging, &out);
    }
    if (kStagingBytes > 0 && staging.leader) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  __syncwarp();  // reconverges the producer warp, whose lane 0 is late
  // A CTA must not exit while its peer may still multicast into its shared memory or arrive at its barriers.
  cluster_arrive();
  cluster_wait();
}
