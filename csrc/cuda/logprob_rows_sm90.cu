// logprob of many rows of a large vocabulary on Hopper: persistent blocks that read their rows once, by TMA bulk copies.
// Its bits are those of kernels/triton/logprob.py (docs/ops/logprob.md); maxima and integer sums do not depend on order.
//
// Compiled by NVRTC or nvcc for sm_90a with -fmad=false. Each reader warp owns PIECES buffers in shared memory, takes every
// WARPS-th piece of the block's rows, and issues its next load as soon as the current piece is in registers, so that most
// of shared memory is always in flight. The warps share only the tile statistics of a row; one more warp combines them
// while the readers are in later rows.

#ifndef HALF
#define HALF 0  // logits are fp16, else bf16
#endif
#ifndef HAS_TEMPERATURE
#define HAS_TEMPERATURE 0
#endif
#ifndef WARPS
#define WARPS 16  // reader warps
#endif
#ifndef PIECES
#define PIECES 1  // buffers per warp
#endif
#ifndef LANES
#define LANES 1  // lanes per vocabulary tile: 1 or 2
#endif
#ifndef TURNS
#define TURNS 2  // rows with statistics in shared memory: a power of two
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
  float* tile_max;               // [shared, tiles]: tile statistics of the shared rows, which another kernel combines
  int* tile_sum;                 // [shared, tiles]
  int* tile_entropy;             // [shared, tiles]
  float* target_z;               // [shared]
  i64 logits_row;
  int vocab, tiles;
  int shared, whole;  // leading rows split across all blocks; then `whole` rows per block
};

namespace {

constexpr int kTile = 128;                       // vocabulary entries
constexpr int kTiles = 32 / LANES;               // per piece
constexpr int kPiece = kTiles * kTile * 2;       // bytes
constexpr int kLoads = 2 * kTile / 16 / LANES;   // 16-byte loads per thread and piece
constexpr int kThreads = 32 * (WARPS + 1);
constexpr u32 kOnes = 0u - kTile * 0x3f800000u;  // minus 128 times the bits of 1.0f
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

__device__ __forceinline__ u32 max_nan_pair(u32 a, u32 b) {
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
// a * b clamped to [0, 1]; NaN (0 * inf here) becomes 0.
__device__ __forceinline__ float clamped_product(float a, float b) {
  float c;
  asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// ---- arithmetic ----------------------------------------------------------------------------------

// The halves of two packed logits as fp32.
__device__ __forceinline__ float low(u32 pair) { return widen(static_cast<u16>(pair)); }
__device__ __forceinline__ float high(u32 pair) {
  return HALF ? widen(static_cast<u16>(pair >> 16)) : __int_as_float(static_cast<int>(pair & 0xffff0000u));
}

// x in units of 2^-40, rounded to nearest even; `whole_units` of the Triton kernels.
__device__ __forceinline__ u64 whole_units(float x) {
  x = x * kRowUnits;
  return static_cast<u64>(static_cast<i64>(x < 8388608.0f ? (x + 8388608.0f) - 8388608.0f : x));
}

// Maxima of a thread's packed logits: of the low halves, and of the high halves.
__device__ __forceinline__ u32 largest(const u32 (&x)[4 * kLoads]) {
  u32 t[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) t[i] = x[i];
#pragma unroll
  for (int i = 4; i < 4 * kLoads; ++i) t[i & 3] = max_nan_pair(t[i & 3], x[i]);
  return max_nan_pair(max_nan_pair(t[0], t[1]), max_nan_pair(t[2], t[3]));
}

// Adds the bits of 1 + exp(z - m) and of 1 + exp(z - m) * (m - z); `units` of the Triton kernels.
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

// ---- work of a block -----------------------------------------------------------------------------

// Tiles of one row. Segments 0 and 1 are the block's part of the shared rows, which may cross one row boundary; each segment
// from 2 on is one whole row.
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

// The block's i-th whole row.
__device__ __forceinline__ int whole_row(const Arguments& args, int i) {
  return args.shared + static_cast<int>(blockIdx.x) + i * static_cast<int>(gridDim.x);
}

__device__ __forceinline__ Segment segment_of(const Arguments& args, const Share& share, int number) {
  if (number == 0) return share.part[0];
  if (number == 1) return share.part[1];
  return {whole_row(args, number - 2), 0, args.tiles, pieces_of(args.tiles)};
}

// A warp's position in the segments; it takes every WARPS-th piece.
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

// Shared-memory statistics of the block's i-th whole row; row i + TURNS reuses them.
__device__ __forceinline__ int turn_of(int i) { return i & (TURNS - 1); }
__device__ __forceinline__ u32 phase_of(int i) { return static_cast<u32>(i / TURNS) & 1; }
__device__ __forceinline__ Statistics statistics_of(float* memory, int tiles, int i) {
  float* const at = memory + turn_of(i) * 3 * tiles;
  return {at, reinterpret_cast<int*>(at + tiles), reinterpret_cast<int*>(at + 2 * tiles)};
}

// Advances to the next piece that exists. WRITES: every lane arrives at `complete` for each row that it leaves and waits for
// `combined` before each row that it enters, even if it has no piece there. A row is complete once all lanes have left it,
// and a slow warp cannot miss a barrier phase.
template <bool WRITES>
__device__ __forceinline__ void advance(const Arguments& args, const Share& share, Place& place, u32 complete,
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

// Vocabulary entries of the piece.
__device__ __forceinline__ int entries_of(const Arguments& args, const Place& place) {
  const int first = place.segment.first + place.piece * kTiles;
  return min(min(kTiles, place.segment.end - first) * kTile, args.vocab - first * kTile);
}

__device__ __forceinline__ void tma_load_piece(const Arguments& args, const Place& place, u32 to, u32 barrier) {
  const u32 bytes = 2 * entries_of(args, place);
  const i64 first = place.segment.row * args.logits_row + (place.segment.first + place.piece * kTiles) * kTile;
  barrier_arrive_expect_tx(barrier, bytes);
  tma_load(to, args.logits + first, bytes, barrier);
}

// Loads a thread's tile (LANES 1) or half tile into registers. Lanes start at different 16-byte units to avoid bank
// conflicts; the order of entries in registers does not matter.
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
  for (int mask = 16; mask > 0; mask >>= 1) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return static_cast<float>(static_cast<i64>(x)) * (1.0f / kRowUnits);
}

// Combines the tile statistics of one row with one warp, as `finish_rows` of the Triton kernels. The lanes arrive at `read`
// once the statistics may be overwritten.
__device__ __forceinline__ void combine(const Arguments& args, const Statistics& tiles, int row, float z, int lane,
                                        u32 read) {
  float top = minus_infinity();
#pragma unroll 8
  for (int t = lane; t < args.tiles; t += 32) top = max_nan(top, tiles.max[t]);
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) top = max_nan(top, __shfl_xor_sync(0xffffffffu, top, mask));
  top = top + 0.0f;
  u64 sum = 0, away = 0;  // may wrap in a row with NaN, where they are not used
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
  // Layout: pieces, statistics of TURNS rows, mbarriers (piece arrived, row complete, row combined). Where warps pass memory
  // to each other all lanes arrive, because racecheck does not follow one arrival after __syncwarp.
  float* const statistics = reinterpret_cast<float*>(memory + WARPS * PIECES * kPiece);
  const u32 arrived = shared_address(statistics) + TURNS * 12 * args.tiles;
  const u32 complete = arrived + 8 * WARPS * PIECES, combined = complete + 8 * TURNS;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);

  if (warp == WARPS) {  // combining warp
    if (lane == 0) {
      for (int i = 0; i < TURNS; ++i) {
        barrier_init(complete + 8 * i, 32 * WARPS);
        barrier_init(combined + 8 * i, 32);
      }
      fence_barrier_init();
      if (static_cast<int>(blockIdx.x) < args.shared) args.target_z[blockIdx.x] = target_logit(args, blockIdx.x);
    }
    __syncthreads();
    float z = 0.0f;
    for (int i = 0; i < args.whole; ++i) {
      // 32 rows at once, one per lane, because the two dependent loads take long compared with a short row.
      if (i % 32 == 0 && i + lane < args.whole) z = target_logit(args, whole_row(args, i + lane));
      const float own = __shfl_sync(0xffffffffu, z, i % 32);
      barrier_wait(complete + 8 * turn_of(i), phase_of(i));
      combine(args, statistics_of(statistics, args.tiles, i), whole_row(args, i), own, lane, combined + 8 * turn_of(i));
    }
    return;
  }

  // reader warps
  const Share share = share_of(args);
  const u32 pieces = shared_address(memory) + warp * PIECES * kPiece, own = arrived + 8 * PIECES * warp;
  Place next = {0, warp, segment_of(args, share, 0)}, here = next;
  advance<false>(args, share, next, 0, 0);
  if (lane == 0) {
    for (int i = 0; i < PIECES; ++i) barrier_init(own + 8 * i, 1);
    fence_barrier_init();
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    if (!inside(args, next)) break;
    if (lane == 0) tma_load_piece(args, next, pieces + i * kPiece, own + 8 * i);
    next.piece += WARPS;
    advance<false>(args, share, next, 0, 0);
  }
  __syncthreads();
  advance<true>(args, share, here, complete, combined);

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
    if (LANES == 2) top = max_nan_pair(top, __shfl_xor_sync(0xffffffffu, top, 1));
    // The vote depends on every load of the piece, so all of it is in registers before TMA overwrites the buffer. No
    // maximum has this NaN payload. __syncwarp follows, because a vote does not order memory.
    const bool loaded = __all_sync(0xffffffffu, top != 0xffffffffu);
    __syncwarp();
    if (inside(args, next)) {
      if (lane == 0 && loaded) tma_load_piece(args, next, pieces + piece * kPiece, own + 8 * piece);
      next.piece += WARPS;
      advance<false>(args, share, next, 0, 0);
    } else {
      griddepcontrol_launch_dependents();
    }
    if (++piece == PIECES) piece = 0, parity ^= 1;

    float m = max_nan(low(top), high(top));
    if (HAS_TEMPERATURE) m = m * inverse;  // exact, because multiplication is monotonic
    u32 s = 0, e = 0;
#pragma unroll
    for (int i = 0; i < 4 * kLoads; ++i) add_units(s, e, x[i], m, inverse);
    if (LANES == 2) {
      s += __shfl_xor_sync(0xffffffffu, s, 1);
      e += __shfl_xor_sync(0xffffffffu, e, 1);
    }
    const bool empty = m == minus_infinity();  // the differences are NaN then
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
    advance<true>(args, share, here, complete, combined);
  }
}
