// logprob of many rows of a large vocabulary on Hopper: persistent blocks that read their rows once, by the copy engine.
// Bits: those of kernels/triton/logprob.py (docs/ops/logprob.md); maxima and integer sums have no order to keep.
//
// Compiled by NVRTC or nvcc for sm_90a with -fmad=false. Warps share nothing but the statistics of a row: each has pieces
// of shared memory of its own, takes every WARPS-th piece of the block's rows, and asks for its next one as soon as it
// holds this one in registers, so that most of shared memory is always under way. One more warp combines a row while the
// others are in the next ones.

#ifndef HALF
#define HALF 0  // logits are fp16, else bf16
#endif
#ifndef HAS_TEMPERATURE
#define HAS_TEMPERATURE 0
#endif
#ifndef WARPS
#define WARPS 16  // that read
#endif
#ifndef PIECES
#define PIECES 1  // of a warp, in shared memory
#endif
#ifndef LANES
#define LANES 1  // that hold a tile of the vocabulary: 1 or 2
#endif
#ifndef TURNS
#define TURNS 2  // rows whose statistics shared memory holds: a power of two
#endif

#include "sm90.cuh"

struct Arguments {
  const u16* logits;             // [T, V]
  const i64* targets;            // [T]
  const float* inv_temperature;  // [T]
  float* logp;                   // [T]
  float* entropy;                // [T]
  float* lse;                    // [T]
  float* stats;                  // [T, 2]
  float* tile_max;               // [shared, tiles]: of the rows that all blocks share, which another kernel combines
  int* tile_sum;                 // [shared, tiles]
  int* tile_entropy;             // [shared, tiles]
  float* target_z;               // [shared]
  i64 logits_row;
  int vocab, tiles;
  int shared, whole;  // rows: the first ones, which all blocks share, then `whole` rows a block
};

namespace {

constexpr int kTile = 128;                        // of the vocabulary
constexpr int kTiles = 32 / LANES;                // of a piece
constexpr int kPiece = kTiles * kTile * 2;        // bytes
constexpr int kLoads = 2 * kTile / 16 / LANES;    // of 16 bytes, by a thread
constexpr int kThreads = 32 * (WARPS + 1);
constexpr u32 kOnes = 0u - kTile * 0x3f800000u;   // less the bits of 128 ones
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kUnit = 1.0f / 8388608.0f, kRowUnits = 1099511627776.0f;  // 2^-23, 2^40
constexpr u32 kMinusInfinities = HALF ? 0xfc00fc00u : 0xff80ff80u;

// ---- instructions --------------------------------------------------------------------------------

__device__ __forceinline__ void load16(u32* to, u32 from) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ u32 larger_pair(u32 a, u32 b) {
  u32 c;
#if HALF
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#else
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#endif
  return c;
}
__device__ __forceinline__ float widen(u16 x) {
  float y;
#if HALF
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
#else
  y = __int_as_float(static_cast<int>(x) << 16);
#endif
  return y;
}
// a * b, clamped to [0, 1]; NaN, which is 0 * inf here, counts as 0.
__device__ __forceinline__ float clamped_product(float a, float b) {
  float c;
  asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// ---- arithmetic ----------------------------------------------------------------------------------

// Two packed logits, as fp32.
__device__ __forceinline__ float low(u32 pair) { return widen(static_cast<u16>(pair)); }
__device__ __forceinline__ float high(u32 pair) {
  return HALF ? widen(static_cast<u16>(pair >> 16)) : __int_as_float(static_cast<int>(pair & 0xffff0000u));
}

// `whole_units`: x in units of 2^-40, rounded to nearest even.
__device__ __forceinline__ u64 whole_units(float x) {
  x = x * kRowUnits;
  return static_cast<u64>(static_cast<i64>(x < 8388608.0f ? (x + 8388608.0f) - 8388608.0f : x));
}

// The largest of a thread's packed logits, as a pair.
__device__ __forceinline__ u32 largest(const u32 (&x)[4 * kLoads]) {
  u32 t[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) t[i] = x[i];
#pragma unroll
  for (int i = 4; i < 4 * kLoads; ++i) t[i & 3] = larger_pair(t[i & 3], x[i]);
  return larger_pair(larger_pair(t[0], t[1]), larger_pair(t[2], t[3]));
}

// Adds the bits of 1 + exp(z - m) and of 1 + exp(z - m) * (m - z): `units`
__device__ __forceinline__ void add_units(u32& s, u32& e, u32 pair, float m, float inverse) {
  float z[2] = {low(pair), high(pair)};
  u32 p_bits[2], q_bits[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (HAS_TEMPERATURE) z[i] = z[i] * inverse;
    const float d = m - z[i], p = exp2_of(d * -kLog2e), q = clamped_product(p, d);
    p_bits[i] = __float_as_uint(1.0f + p);
    q_bits[i] = __float_as_uint(1.0f + q);
  }
  s += p_bits[0] + p_bits[1];
  e += q_bits[0] + q_bits[1];
}

// ---- what a block does ---------------------------------------------------------------------------

// Tiles of one row. Segments 0 and 1 are the block's share of the first rows, two as the share may lie across a border;
// from segment 2 on each is a row of its own.
struct Segment {
  int row, first, end, pieces;
};

struct Share {
  Segment part[2];
};

__device__ __forceinline__ int pieces_of(int tiles) { return (tiles + kTiles - 1) / kTiles; }

__device__ __forceinline__ Share share_of(const Arguments& args) {
  const i64 all = static_cast<i64>(args.shared) * args.tiles;
  const int from = static_cast<int>(all * blockIdx.x / gridDim.x);
  const int to = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
  const int row = from / args.tiles, first = from - row * args.tiles, here = min(args.tiles, first + to - from);
  const int beyond = max(0, first + to - from - args.tiles);
  return {{{row, first, here, pieces_of(here - first)}, {row + 1, 0, beyond, pieces_of(beyond)}}};
}

// The block's i-th row of its own.
__device__ __forceinline__ int whole_row(const Arguments& args, int i) {
  return args.shared + static_cast<int>(blockIdx.x) + i * static_cast<int>(gridDim.x);
}

__device__ __forceinline__ Segment segment_of(const Arguments& args, const Share& share, int number) {
  if (number == 0) return share.part[0];
  if (number == 1) return share.part[1];
  return {whole_row(args, number - 2), 0, args.tiles, pieces_of(args.tiles)};
}

// A warp's place in the segments; it takes every WARPS-th piece.
struct Place {
  int number, piece;
  Segment segment;
};

__device__ __forceinline__ bool inside(const Arguments& args, const Place& place) {
  return place.number < 2 + args.whole;
}

struct Statistics {
  float* max;
  int *sum, *entropy;
};

// Of the block's i-th row, in shared memory; row i + TURNS takes its place.
__device__ __forceinline__ int turn_of(int i) { return i & (TURNS - 1); }
__device__ __forceinline__ u32 phase_of(int i) { return static_cast<u32>(i / TURNS) & 1; }
__device__ __forceinline__ Statistics statistics_of(float* memory, int tiles, int i) {
  float* const at = memory + turn_of(i) * 3 * tiles;
  return {at, reinterpret_cast<int*>(at + tiles), reinterpret_cast<int*>(at + 2 * tiles)};
}

// Moves on to a piece that exists. With statistics to write, every lane tells of each row that it leaves and waits before
// each that it enters, its own or not: a row ends once all have left it, and no phase of a barrier can be missed, however
// far a warp falls behind.
template <bool WRITES>
__device__ __forceinline__ void settle(const Arguments& args, const Share& share, Place& place, u32 complete,
                                       u32 combined) {
  while (inside(args, place) && place.piece >= place.segment.pieces) {
    if (WRITES && place.number >= 2) barrier_arrive(complete + 8 * turn_of(place.number - 2));
    place.piece -= place.segment.pieces;
    ++place.number;
    place.segment = segment_of(args, share, place.number);
    const int i = place.number - 2;
    if (WRITES && i >= TURNS && i < args.whole) barrier_wait(combined + 8 * turn_of(i), phase_of(i - TURNS));
  }
}

// Entries of a place's piece.
__device__ __forceinline__ int entries_of(const Arguments& args, const Place& place) {
  const int first = place.segment.first + place.piece * kTiles;
  return min(min(kTiles, place.segment.end - first) * kTile, args.vocab - first * kTile);
}

__device__ __forceinline__ void fetch_piece(const Arguments& args, const Place& place, u32 to, u32 barrier) {
  const u32 bytes = 2 * entries_of(args, place);
  const i64 first = place.segment.row * args.logits_row + (place.segment.first + place.piece * kTiles) * kTile;
  barrier_expect(barrier, bytes);
  fetch(to, args.logits + first, bytes, barrier);
}

// A thread's tile, or half of one. Lanes begin at different 16 bytes, so that eight of them read from all banks; which
// entry lies in which register is of no concern.
template <bool WHOLE>
__device__ __forceinline__ void load_piece(u32 (&x)[4 * kLoads], u32 from, int lane, int entries) {
  const u32 at = from + lane * (16 * kLoads) + ((lane & 7) << 4);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const u32 here = (at ^ ((i & 7) << 4)) + ((i & 8) << 4);
    if (WHOLE || static_cast<int>(here - from) < 2 * entries) {
      load16(&x[4 * i], here);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[4 * i + j] = kMinusInfinities;
    }
  }
}

__device__ __forceinline__ float target_logit(const Arguments& args, int row) {
  const i64 target = args.targets[row];
  if (target < 0 || target >= args.vocab) return minus_infinity();
  const float z = widen(args.logits[row * args.logits_row + target]);
  return HAS_TEMPERATURE ? z * args.inv_temperature[row] : z;
}

__device__ __forceinline__ float warp_sum(u64 x) {
#pragma unroll
  for (int apart = 16; apart > 0; apart >>= 1) x += __shfl_xor_sync(0xffffffffu, x, apart);
  return static_cast<float>(static_cast<i64>(x)) * (1.0f / kRowUnits);
}

// `finish_rows` of one row, by a warp; its lanes tell `read` once the statistics may be overwritten.
__device__ __forceinline__ void combine(const Arguments& args, const Statistics& tiles, int row, float z, int lane,
                                        u32 read) {
  float top = minus_infinity();
#pragma unroll 8
  for (int t = lane; t < args.tiles; t += 32) top = larger(top, tiles.max[t]);
#pragma unroll
  for (int apart = 16; apart > 0; apart >>= 1) top = larger(top, __shfl_xor_sync(0xffffffffu, top, apart));
  top = top + 0.0f;
  u64 sum = 0, away = 0;  // of a row with NaN they are nothing, and may wrap
#pragma unroll 8
  for (int t = lane; t < args.tiles; t += 32) {
    const float s = static_cast<float>(tiles.sum[t]) * kUnit, e = static_cast<float>(tiles.entropy[t]) * kUnit;
    const float distance = top - tiles.max[t], w = exp2_of(distance * -kLog2e);
    sum += whole_units(w * s);
    away += whole_units(w == 0.0f ? 0.0f : w * __fmaf_rn(s, distance, e));  // the distance may be infinite
  }
  barrier_arrive(read);
  float total = warp_sum(sum);
  const float weighted = warp_sum(away);
  if (lane > 0) return;
  const bool bad = top != top || top == infinity(), empty = top == minus_infinity();
  const float nan = __int_as_float(0x7fc00000);
  total = empty ? 1.0f : total;
  const float log_total = log2_of(total) * kLn2;
  args.logp[row] = bad ? nan : empty ? minus_infinity() : (z - top) - log_total;
  args.lse[row] = bad ? nan : empty ? minus_infinity() : top + log_total;
  args.entropy[row] = bad ? nan : empty ? 0.0f : log_total + __fdiv_rn(weighted, total);
  args.stats[2 * static_cast<i64>(row)] = bad ? nan : top;
  args.stats[2 * static_cast<i64>(row) + 1] = bad ? nan : log_total;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) rlk_logprob_rows(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  // Pieces; statistics of TURNS rows; barriers: a piece has arrived, a row is complete, a row was combined. Where memory
  // passes from warp to warp all lanes arrive, not one for all behind __syncwarp, which racecheck does not follow.
  float* const statistics = reinterpret_cast<float*>(memory + WARPS * PIECES * kPiece);
  const u32 arrived = shared_address(statistics) + TURNS * 12 * args.tiles;
  const u32 complete = arrived + 8 * WARPS * PIECES, combined = complete + 8 * TURNS;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);

  if (warp == WARPS) {
    if (lane == 0) {
      for (int i = 0; i < TURNS; ++i) {
        barrier_init(complete + 8 * i, 32 * WARPS);
        barrier_init(combined + 8 * i, 32);
      }
      barriers_made();
      if (static_cast<int>(blockIdx.x) < args.shared) args.target_z[blockIdx.x] = target_logit(args, blockIdx.x);
    }
    __syncthreads();
    float z = 0.0f;
    for (int i = 0; i < args.whole; ++i) {
      // Of 32 rows at once, one a lane: of two loads the second waits for the first, which is long beside a short row.
      if (i % 32 == 0 && i + lane < args.whole) z = target_logit(args, whole_row(args, i + lane));
      const float own = __shfl_sync(0xffffffffu, z, i % 32);
      barrier_wait(complete + 8 * turn_of(i), phase_of(i));
      combine(args, statistics_of(statistics, args.tiles, i), whole_row(args, i), own, lane, combined + 8 * turn_of(i));
    }
    return;
  }

  const Share share = share_of(args);
  const u32 pieces = shared_address(memory) + warp * PIECES * kPiece, own = arrived + 8 * PIECES * warp;
  Place next = {0, warp, segment_of(args, share, 0)}, here = next;
  settle<false>(args, share, next, 0, 0);
  if (lane == 0) {
    for (int i = 0; i < PIECES; ++i) barrier_init(own + 8 * i, 1);
    barriers_made();
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    if (!inside(args, next)) break;
    if (lane == 0) fetch_piece(args, next, pieces + i * kPiece, own + 8 * i);
    next.piece += WARPS;
    settle<false>(args, share, next, 0, 0);
  }
  __syncthreads();
  settle<true>(args, share, here, complete, combined);

  int piece = 0;
  u32 parity = 0;
  float inverse = 1.0f;
  int inverse_of = -1;
  while (inside(args, here)) {
    if (HAS_TEMPERATURE && here.number != inverse_of) {
      inverse = args.inv_temperature[here.segment.row];
      inverse_of = here.number;
    }
    const int entries = entries_of(args, here);
    u32 x[4 * kLoads];
    barrier_wait(own + 8 * piece, parity);
    if (entries == kTiles * kTile)
      load_piece<true>(x, pieces + piece * kPiece, lane, entries);
    else
      load_piece<false>(x, pieces + piece * kPiece, lane, entries);
    u32 top = largest(x);
    if (LANES == 2) top = larger_pair(top, __shfl_xor_sync(0xffffffffu, top, 1));
    // All of the piece is in registers: a vote on what became of it, as the copy engine could overtake a load that nothing
    // waits for. No maximum is this NaN. A vote orders no memory.
    const bool loaded = __all_sync(0xffffffffu, top != 0xffffffffu);
    __syncwarp();
    if (inside(args, next)) {
      if (lane == 0 && loaded) fetch_piece(args, next, pieces + piece * kPiece, own + 8 * piece);
      next.piece += WARPS;
      settle<false>(args, share, next, 0, 0);
    } else {
      next_may_start();
    }
    if (++piece == PIECES) piece = 0, parity ^= 1;

    float m = larger(low(top), high(top));
    if (HAS_TEMPERATURE) m = m * inverse;  // exact: multiplying is monotone
    u32 s = 0, e = 0;
#pragma unroll
    for (int i = 0; i < 4 * kLoads; ++i) add_units(s, e, x[i], m, inverse);
    if (LANES == 2) {
      s += __shfl_xor_sync(0xffffffffu, s, 1);
      e += __shfl_xor_sync(0xffffffffu, e, 1);
    }
    const bool empty = m == minus_infinity();  // then the distances are NaN
    s = empty ? 0u : s + kOnes;
    e = empty ? 0u : e + kOnes;

    const int tile = here.segment.first + here.piece * kTiles + lane / LANES;
    const bool writes = tile < here.segment.end && lane % LANES == 0;
    if (here.number >= 2) {
      const Statistics to = statistics_of(statistics, args.tiles, here.number - 2);
      if (writes) {
        to.max[tile] = m;
        to.sum[tile] = static_cast<int>(s);
        to.entropy[tile] = static_cast<int>(e);
      }
    } else if (writes) {
      const int at = here.segment.row * args.tiles + tile;
      args.tile_max[at] = m;
      args.tile_sum[at] = static_cast<int>(s);
      args.tile_entropy[at] = static_cast<int>(e);
    }
    here.piece += WARPS;
    settle<true>(args, share, here, complete, combined);
  }
}
