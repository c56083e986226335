// attention forward of prefill on Hopper, with the bits of kernels/triton/attention.py (docs/ops/attention.md).
// Persistent CTAs have two math warpgroups, 64 rows each, and one producer warpgroup. A row is a (position, query head)
// pair of one KV head. Compiled by NVRTC or nvcc for sm_90a with -fmad=false.
//
// As in FlashAttention-3's ping-pong schedule, one warpgroup's softmax of a block of 64 keys overlaps the other's wgmma:
// they take turns issuing QK of the next block and PV of this one. Q stays in registers, because an SS wgmma for QK would
// be bound by shared-memory bandwidth.

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef HALF
#define HALF 0  // operands are fp16, else bf16
#endif
#ifndef PADDED
#define PADDED 0  // k and v hold `capacity` rows per sequence, `lens` of them valid; else `lens` is cumulative
#endif
#ifndef SKIP
#define SKIP 0  // skip rescaling if all factors of a warp are 1, which changes no bit
#endif

#include "wgmma.cuh"

struct Arguments {
  const u16* q;     // [T, H, D]
  const int* cu_q;  // [B + 1]
  const int* lens;  // cumulative keys [B + 1], or keys [B] with PADDED
  u16* out;         // [T, H, D]
  float* lse;       // [T, H] natural log
  int* next;        // [1], zero at launch: atomic tile counter; each CTA starts with tile blockIdx.x
  i64 q_stride;
  int tiles;        // row tiles of the longest sequence
  int hk, group, batch, capacity, split;
  int interleave;    // KV heads whose tiles of equal length are adjacent in tile order: hk or 1
  int tokens, keys;  // rows of q, and of k unless PADDED; cumulative lengths are clamped to these
  float scale_log2e;
};

namespace {

constexpr int kGroups = 2, kStages = 4;
constexpr int kKeys = 64, kRows = 64, kSteps = HEAD_DIM / 16, kBoxes = HEAD_DIM / 64;
constexpr int kBoxBytes = kKeys * 128, kTileBytes = kBoxes * kBoxBytes;  // a TMA box has 64 rows of 64 elements
constexpr int kTileRows = kGroups * kRows;
constexpr int kQueryLoaders = 96;                         // threads that load Q
constexpr int kRegisters = 232, kProducerRegisters = 40;  // per thread; 64,512 of an SM's 65,536 in total
constexpr int kSavedBytes = kGroups * kRows * HEAD_DIM * 4;  // merged output of the earlier splits

// ---- instructions --------------------------------------------------------------------------------

// Copies 16 bytes asynchronously, or zero-fills them.
__device__ __forceinline__ void cp_async16(u32 to, const u16* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void store16(u32 to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ void load16(float (&d)[4], u32 from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void ldmatrix(u32 (&to)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void named_barrier_sync(int which, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int which, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(which), "r"(threads) : "memory");
}
// Re-reads %tid.x, because hoisted out of the loop it would cost a register and spill.
__device__ __forceinline__ int read_tid() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 r;
  asm("cvt.rn." OPERAND "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// ---- arithmetic ----------------------------------------------------------------------------------

__device__ __forceinline__ float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// x / y from r = 1 / y, as `attention_splits.divide_exact`.
__device__ __forceinline__ float divide_exact(float x, float y, float r) {
  const float about = x * r;
  float near = __fmaf_rn(__fmaf_rn(-about, y, x), r, about);
  near = __fmaf_rn(__fmaf_rn(-near, y, x), r, near);
  return near == near ? near : about;
}

// Largest of a thread's 16 scores of row i.
__device__ __forceinline__ float largest(const float (&s)[32], int i) {
  float t[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) t[j] = fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]);
#pragma unroll
  for (int n = 4; n > 0; n >>= 1)
#pragma unroll
    for (int j = 0; j < n; ++j) t[j] = fmaxf(t[j], t[j + n]);
  return t[0];
}

__device__ __forceinline__ int clamp_border(int border, int most) { return max(0, min(border, most)); }

// A tile, published by the TMA producer; negative `blocks` ends the loop.
struct TileMessage {
  int blocks, q_first, queries, keys, first, head;
};

// Softmax state of one row. A thread holds two rows, each shared with the other three threads of its quad.
struct Row {
  float m, l, factor, part;
};

// Replaces the scores by p and updates m and the factor; `part` is the thread's part of the row sum.
__device__ __forceinline__ void softmax(float (&s)[32], Row (&rows)[2], float scale) {
  float best[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) best[i] = largest(s, i);
#pragma unroll
  for (int distance = 2; distance > 0; distance >>= 1)
#pragma unroll
    for (int i = 0; i < 2; ++i) best[i] = fmaxf(best[i], shuffle_xor(best[i], distance));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float new_max = fmaxf(rows[i].m, best[i] * scale);
    const float base = new_max == minus_infinity() ? 0.0f : new_max;
    rows[i].factor = exp2_of(rows[i].m - base);
    rows[i].m = new_max;
    float part = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float p = exp2_of(__fmaf_rn(s[4 * j + 2 * i + e], scale, -base));
        s[4 * j + 2 * i + e] = p;
        part = j + e == 0 ? p : part + p;
      }
    rows[i].part = part;
  }
}

__device__ __forceinline__ void add_sum(Row (&rows)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = rows[i].part + shuffle_xor(rows[i].part, 2);
    sum = sum + shuffle_xor(sum, 1);
    rows[i].l = __fmaf_rn(rows[i].l, rows[i].factor, sum);
  }
}

__device__ __forceinline__ void pack_all(u32 (&p)[16], const float (&s)[32]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) p[j] = pack(s[2 * j], s[2 * j + 1]);
}

// The first of a thread's two rows in the tile; the second is row + 8.
__device__ __forceinline__ int row_of(int thread) { return thread / 32 * 16 + (thread & 31) / 4; }

// Sets the scores of masked keys to -inf.
__device__ __forceinline__ void mask_keys(float (&s)[32], int first_key, const volatile TileMessage& tile, int group) {
  const int thread = read_tid();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int position = tile.keys - tile.queries + (tile.first + row_of(thread) + 8 * i) / group;
    const int last = position - first_key - 2 * (thread & 3);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        s[4 * j + 2 * i + e] = 8 * j + e <= last ? s[4 * j + 2 * i + e] : minus_infinity();
  }
}

// ---- math warpgroup ------------------------------------------------------------------------------

struct MathWarpgroup {
  u32 k_tiles, v_tiles, q_tile, k_full, v_full, k_free, v_free;
  int lane;
  int blocks_done;  // key blocks of earlier tiles

  __device__ __forceinline__ u32 slot(int b) const { return static_cast<u32>(blocks_done + b) % kStages; }
  __device__ __forceinline__ u32 parity(int b) const { return static_cast<u32>(blocks_done + b) / kStages & 1; }

  __device__ __forceinline__ void issue_qk(float (&s)[32], const u32 (&q)[kSteps][4], int b) const {
    const u32 tile = k_tiles + slot(b) * kTileBytes;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const u64 right = descriptor<false>(tile + (j >> 2) * kBoxBytes) + 2 * (j & 3);
      j == 0 ? wgmma_m64n64k16<false>(s, q[j], right) : wgmma_m64n64k16<true>(s, q[j], right);
    }
  }
  __device__ __forceinline__ void issue_pv(float (&acc)[HEAD_DIM / 2], const u32 (&p)[16], int b) const {
    const u64 right = descriptor<true>(v_tiles + slot(b) * kTileBytes);
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma_m64nNk16(acc, p, j, right + 128 * j);
  }
  __device__ __forceinline__ void release(u32 barriers, int b) const {
    if (lane == 0) barrier_arrive(barriers + 8 * slot(b));
  }
  // Whether this is warpgroup 0; warp-uniform.
  __device__ __forceinline__ bool is_first() const { return __shfl_sync(0xffffffffu, read_tid(), 0) < 128; }
  // Zeroes V past the sequence's end, because 0 times the memory there may be NaN. Warpgroup 0 does it for both, because
  // it has rows in every tile and warpgroup 1 issues its PV of this block after warpgroup 0's turn.
  __device__ __forceinline__ void zero_values(int b, int keys) const {
    const int from = keys - b * kKeys;
    const u32 tile = v_tiles + slot(b) * kTileBytes;
    for (int unit = read_tid() & 127; unit < kTileBytes / 16; unit += 128) {
      const int row = (unit & (kBoxBytes / 16 - 1)) >> 3;
      if (row >= from) store16(tile + 16 * unit, 0.0f, 0.0f, 0.0f, 0.0f);
    }
    fence_proxy_async();
    named_barrier_sync(3, 128);
  }
  // Ping-pong: between these two calls only one warpgroup issues wgmma. Named barrier 1 + i is warpgroup i's turn.
  __device__ __forceinline__ void turn_wait() const { named_barrier_sync(1 + read_tid() / 128, 256); }
  __device__ __forceinline__ void turn_pass() const { named_barrier_arrive(2 - read_tid() / 128, 256); }

  // Softmax of block b, whose scores are s, and its PV. PV of b - 1 is in flight unless b is the first block of a split.
  // MORE: also issues QK of b + 1 into s.
  template <bool MORE>
  __device__ __forceinline__ void step(float (&s)[32], float (&acc)[HEAD_DIM / 2], u32 (&p)[16], Row (&rows)[2],
                                       const u32 (&q)[kSteps][4], int b, bool first, const volatile TileMessage& tile,
                                       int unmasked, int group, float scale) const {
    release(k_free, b);
    if (b >= unmasked) mask_keys(s, b * kKeys, tile, group);
    softmax(s, rows, scale);
    fence_operand(s);
    fence_operand(rows[0].part);
    fence_operand(rows[1].part);
    barrier_wait(v_full + 8 * slot(b), parity(b));  // its loop keeps ptxas from hoisting wgmma_wait above the softmax
    if (b >= unmasked && (b + 1) * kKeys > tile.keys && is_first()) zero_values(b, tile.keys);
    wgmma_wait<0>(acc);
    if (!first) release(v_free, b - 1);
    pack_all(p, s);
    fence_operand(p);
    if (!SKIP || !__all_sync(0xffffffffu, rows[0].factor == 1.0f && rows[1].factor == 1.0f)) {
#pragma unroll
      for (int j = 0; j < HEAD_DIM / 2; ++j) acc[j] = acc[j] * rows[j >> 1 & 1].factor;
    }
    if (MORE) barrier_wait(k_full + 8 * slot(b + 1), parity(b + 1));
    fence_operand(acc);
    turn_wait();
    wgmma_fence();
    if (MORE) {
      issue_qk(s, q, b + 1);
      wgmma_commit();
    }
    issue_pv(acc, p, b);
    wgmma_commit();
    turn_pass();
    add_sum(rows);
  }
};

// Merges the saved splits and the split in `acc` into `acc`; an empty side leaves the other unchanged.
template <bool EMPTY>
__device__ __forceinline__ void merge(float (&acc)[HEAD_DIM / 2], const float (&w)[2], const float (&w_split)[2],
                                      const float (&y)[2], const float (&r)[2], const bool (&empty)[2],
                                      const bool (&fresh)[2], u32 saved_at) {
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 2; j += 4) {
    float o[4];
    load16(o, saved_at + 512 * j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = e >> 1;
      const float both = divide_exact(__fmaf_rn(o[e], w[i], acc[j + e] * w_split[i]), y[i], r[i]);
      acc[j + e] = EMPTY && empty[i] ? o[e] : EMPTY && fresh[i] ? acc[j + e] : both;
    }
  }
}

// Normalises a split and merges it with the earlier ones, which each thread keeps in its own part of shared memory.
__device__ __forceinline__ void close_split(float (&acc)[HEAD_DIM / 2], const Row (&rows)[2], float (&lse2)[2],
                                            u32 saved_at, bool only) {
  float y[2], r[2], lse2_split[2];
  bool none[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    none[i] = rows[i].l == 0.0f;
    y[i] = none[i] ? 1.0f : rows[i].l;
    r[i] = __fdiv_rn(1.0f, y[i]);
    lse2_split[i] = none[i] ? minus_infinity() : rows[i].m + log2_of(rows[i].l);
  }
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 2; ++j) {
    const int i = j >> 1 & 1;
    acc[j] = divide_exact(acc[j], y[i], r[i]);
  }
  if (__any_sync(0xffffffffu, none[0] || none[1])) {
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 2; ++j) acc[j] = none[j >> 1 & 1] ? 0.0f : acc[j];
  }
  if (only) {
    lse2[0] = lse2_split[0];
    lse2[1] = lse2_split[1];
    return;
  }
  float w[2], w_split[2];
  bool empty[2], fresh[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float high = fmaxf(lse2[i], lse2_split[i]);
    w[i] = exp2_of(lse2[i] - high);
    w_split[i] = exp2_of(lse2_split[i] - high);
    y[i] = w[i] + w_split[i];
    r[i] = __fdiv_rn(1.0f, y[i]);
    fresh[i] = lse2[i] == minus_infinity();
    empty[i] = lse2_split[i] == minus_infinity();
    const float merged = high + log2_of(y[i]);
    lse2[i] = empty[i] ? lse2[i] : fresh[i] ? lse2_split[i] : merged;
  }
  if (__any_sync(0xffffffffu, empty[0] || empty[1] || fresh[0] || fresh[1])) {
    merge<true>(acc, w, w_split, y, r, empty, fresh, saved_at);
  } else {  // the common case
    merge<false>(acc, w, w_split, y, r, empty, fresh, saved_at);
  }
}

__device__ __forceinline__ void save_split(const float (&acc)[HEAD_DIM / 2], u32 saved_at) {
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 2; j += 4)
    store16(saved_at + 512 * j, acc[j], acc[j + 1], acc[j + 2], acc[j + 3]);
}

__device__ __forceinline__ void reset(float (&acc)[HEAD_DIM / 2], Row (&rows)[2]) {
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 2; ++j) acc[j] = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) rows[i] = {minus_infinity(), 0.0f, 0.0f, 0.0f};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    rlk_attention_prefill(const __grid_constant__ TensorMap k,  // k and v as [S, HK * D]
                          const __grid_constant__ TensorMap v, const __grid_constant__ Arguments args) {
  extern __shared__ char raw[];
  const u32 memory = (shared_address(raw) + 1023) & ~1023u;
  const u32 k_tiles = memory, v_tiles = k_tiles + kStages * kTileBytes, q_tiles = v_tiles + kStages * kTileBytes;
  const u32 saved = q_tiles + kGroups * kTileBytes;
  const u32 k_full = saved + kSavedBytes, v_full = k_full + 8 * kStages;
  const u32 k_free = v_full + 8 * kStages, v_free = k_free + 8 * kStages;
  const u32 q_full = v_free + 8 * kStages, q_free = q_full + 8, published = q_free + 8, received = published + 16;
  volatile TileMessage* const messages =
      reinterpret_cast<volatile TileMessage*>(raw + (received + 16 - shared_address(raw)));
  const int group_of = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);  // warp-uniform
  const int lane = threadIdx.x & 31;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(k_full + 8 * i, 1);
      barrier_init(v_full + 8 * i, 1);
      barrier_init(k_free + 8 * i, 4 * kGroups);
      barrier_init(v_free + 8 * i, 4 * kGroups);
    }
    barrier_init(q_full, kQueryLoaders);
    barrier_init(q_free, 4 * kGroups);
    for (int i = 0; i < 2; ++i) {
      barrier_init(published + 8 * i, 1);
      barrier_init(received + 8 * i, 4 * kGroups + 3);
    }
    fence_barrier_init();
  }
  __syncthreads();

  const int total = args.tiles * args.hk * args.batch;
  if (group_of == kGroups) {
    setmaxnreg_dec<kProducerRegisters>();
    const int thread = threadIdx.x - 128 * kGroups;
    if (thread == 0) {  // TMA producer: chooses tiles, loads keys and values
      u32 n = 0;
      int index = blockIdx.x;
      for (int turn = 0;; ++turn) {
        int q_first = 0, queries = 0, keys = 0, k_first = 0, first = 0, head = 0, blocks = -1;
        while (index < total) {
          // Longest tiles first; the tiles of `interleave` heads are adjacent.
          const int run = index / (args.tiles * args.interleave), place = index - run * args.tiles * args.interleave;
          const int tile = args.tiles - 1 - place / args.interleave;
          const int pair = run * args.interleave + place % args.interleave;
          const int sequence = pair / args.hk;
          head = pair - sequence * args.hk;
          q_first = clamp_border(args.cu_q[sequence], args.tokens);
          queries = clamp_border(args.cu_q[sequence + 1], args.tokens) - q_first;
          first = tile * kTileRows;
          const int rows = max(0, queries) * args.group;
          if (first >= rows)  // a shorter sequence: advances the counter past all its missing tiles
            atomicMax(args.next, (run + 1) * args.tiles * args.interleave -
                                     (rows + kTileRows - 1) / kTileRows * args.interleave - static_cast<int>(gridDim.x));
          index = gridDim.x + atomicAdd(args.next, 1);
          if (first >= rows) continue;
          k_first = PADDED ? sequence * args.capacity : clamp_border(args.lens[sequence], args.keys);
          keys = PADDED ? min(args.lens[sequence], args.capacity)
                        : clamp_border(args.lens[sequence + 1], args.keys) - k_first;
          const int stop = min(keys, keys - queries + (first + kTileRows - 1) / args.group + 1);
          blocks = max(0, (stop + kKeys - 1) / kKeys);
          break;
        }
        barrier_wait(received + 8 * (turn & 1), (turn >> 1 & 1) ^ 1);
        volatile TileMessage& message = messages[turn & 1];
        message.blocks = blocks;
        message.q_first = q_first;
        message.queries = queries;
        message.keys = keys;
        message.first = first;
        message.head = head;
        barrier_arrive(published + 8 * (turn & 1));
        if (blocks < 0) break;
        const int column = head * HEAD_DIM;
#pragma unroll 1
        for (int b = 0; b < blocks; ++b, ++n) {
          const u32 slot = n % kStages, parity = n / kStages & 1;
          barrier_wait(k_free + 8 * slot, parity ^ 1);
          barrier_arrive_expect_tx(k_full + 8 * slot, kTileBytes);
#pragma unroll
          for (int i = 0; i < kBoxes; ++i)
            tma_load(k_tiles + slot * kTileBytes + i * kBoxBytes, &k, column + 64 * i, k_first + b * kKeys,
                     k_full + 8 * slot);
          barrier_wait(v_free + 8 * slot, parity ^ 1);
          barrier_arrive_expect_tx(v_full + 8 * slot, kTileBytes);
#pragma unroll
          for (int i = 0; i < kBoxes; ++i)
            tma_load(v_tiles + slot * kTileBytes + i * kBoxBytes, &v, column + 64 * i, k_first + b * kKeys,
                     v_full + 8 * slot);
        }
      }
    } else if (thread >= 32) {  // three warps load Q of the next tile
      for (int turn = 0;; ++turn) {
        barrier_wait(published + 8 * (turn & 1), turn >> 1 & 1);
        const volatile TileMessage& message = messages[turn & 1];
        const int blocks = message.blocks, q_first = message.q_first, queries = message.queries;
        const int first = message.first, head = message.head;
        __syncwarp();
        if (lane == 0) barrier_arrive(received + 8 * (turn & 1));
        if (blocks < 0) break;
        barrier_wait(q_free, (turn & 1) ^ 1);
        const u16* const base = args.q + q_first * args.q_stride + head * args.group * HEAD_DIM;
        for (int unit = thread - 32; unit < kTileRows * (HEAD_DIM / 8); unit += kQueryLoaders) {
          const int row = unit / (HEAD_DIM / 8), c = unit % (HEAD_DIM / 8);
          const int token = (first + row) / args.group, member = (first + row) - token * args.group;
          const bool inside = token < queries;
          const u16* const at = base + (inside ? token : 0) * args.q_stride + member * HEAD_DIM + 8 * c;
          const u32 line = q_tiles + (row >> 6) * kTileBytes + (c >> 3) * kBoxBytes + (row & 63) * 128;
          const u32 to = line + (((c & 7) ^ (row & 7)) << 4);
          cp_async16(to, at, inside);
        }
        cp_async_wait();
        fence_proxy_async();
        barrier_arrive(q_full);
      }
    }
  } else {  // math warpgroups
    setmaxnreg_inc<kRegisters>();
    MathWarpgroup group{k_tiles, v_tiles, q_tiles + group_of * kTileBytes, k_full, v_full, k_free, v_free, lane, 0};
    const u32 saved_at = saved + group_of * (kSavedBytes / kGroups) + 16 * (threadIdx.x & 127);
    const float scale = args.scale_log2e;
    float s[32], acc[HEAD_DIM / 2];
    u32 p[16], q[kSteps][4];
    if (group_of == 1) group.turn_pass();  // warpgroup 0 has the first turn
    for (int turn = 0;; ++turn) {
      barrier_wait(published + 8 * (turn & 1), turn >> 1 & 1);
      const volatile TileMessage& tile = messages[turn & 1];
      const int blocks = tile.blocks;
      if (blocks < 0) break;
      const int offset = tile.keys - tile.queries;
      // Blocks below it need no mask.
      const int unmasked = (offset + (tile.first + group_of * kRows) / args.group + 1) / kKeys;
      barrier_wait(q_full, turn & 1);
      const int thread = read_tid(), line = (thread & 127) / 32 * 16 + (thread & 15);
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const int c = 2 * (j & 3) + (thread >> 4 & 1);
        ldmatrix(q[j], group.q_tile + (j >> 2) * kBoxBytes + line * 128 + ((c ^ (line & 7)) << 4));
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(q_free);
      float lse2[2] = {minus_infinity(), minus_infinity()};
      Row rows[2];
      reset(acc, rows);
      fence_operand(acc);
      int b = 0, first = 0;  // block, and the first block of its split
      if (blocks > 0) {
        barrier_wait(k_full + 8 * group.slot(0), group.parity(0));
        wgmma_fence();
        group.issue_qk(s, q, 0);
        wgmma_commit();
        wgmma_wait<0>(s);
        while (b + 1 < blocks) {
          group.step<true>(s, acc, p, rows, q, b, b == first, tile, unmasked, args.group, scale);
          wgmma_wait<1>(s);
          ++b;
          if ((b - first) * kKeys == args.split) {
            wgmma_wait<0>(acc);
            group.release(v_free, b - 1);
            close_split(acc, rows, lse2, saved_at, first == 0);
            save_split(acc, saved_at);
            first = b;
            reset(acc, rows);
          }
        }
        group.step<false>(s, acc, p, rows, q, b, b == first, tile, unmasked, args.group, scale);
        ++b;
        wgmma_wait<0>(acc);
        group.release(v_free, b - 1);
        close_split(acc, rows, lse2, saved_at, first == 0);
      }
      group.blocks_done += blocks;
      const int first_row = tile.first + row_of(read_tid()), queries = tile.queries, head = tile.head;
      const i64 q_first = tile.q_first;
      __syncwarp();
      if (lane == 0) barrier_arrive(received + 8 * (turn & 1));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first_row + 8 * i, token = row / args.group;
        if (token >= queries) continue;
        const i64 to = ((q_first + token) * args.hk + head) * args.group + (row - token * args.group);
        if ((lane & 3) == 0) args.lse[to] = lse2[i] * 0.6931471805599453f;
        u32* const line = reinterpret_cast<u32*>(args.out + to * HEAD_DIM) + (lane & 3);
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; ++j) line[4 * j] = pack(acc[4 * j + 2 * i], acc[4 * j + 2 * i + 1]);
      }
    }
  }
}
