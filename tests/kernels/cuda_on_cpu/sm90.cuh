// Replaces csrc/cuda/sm90.cuh where a test runs a kernel's source on a CPU. Threads are fibers scheduled in random order;
// a TMA load completes as late as its mbarrier allows, into memory that was poisoned. The process exits on a deadlock, an
// arrival too many, a load outside the inputs, and loads that are in flight when a block ends.
// Not emulated: `__shared__` arrays keep the previous block's content, a cluster's blocks run one after another, and proxy
// fences, programmatic dependent launch and the capacity of shared memory have no effect.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <utility>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static  // blocks run one after another
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)
#define DYNAMIC_SHARED(name) char* const name = emulated::shared

using std::max;
using std::min;
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

namespace emulated {

constexpr i64 kPatience = 4000000;  // fiber switches without progress before a deadlock is reported

struct Rendezvous {
  int here = 0, times = 0;
};
struct Copy {
  void* to;
  const void* from;
  u32 bytes;
};
struct Barrier {
  u32 count = 0, pending = 0, phases = 0;
  i64 bytes = 0;
  std::vector<Copy> copies;  // in flight
};
struct Range {
  const char *begin, *end;
};

alignas(128) inline char shared[1 << 20];
inline std::vector<Range> readable;  // by TMA
inline std::vector<ucontext_t> fibers;
inline std::vector<std::vector<char>> stacks;
inline std::vector<bool> ended;
inline ucontext_t scheduler;
inline int current = 0, threads = 0;
inline i64 idle = 0;
inline u32 chance = 1;
inline Rendezvous block, warps[32];
inline u32 lanes[32][32];
inline std::map<u32, Barrier> barriers;
inline std::function<void()> kernel;

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "%s (thread %d)\n", what, current);
  _Exit(3);
}
inline u32 draw() { return (chance = chance * 1664525u + 1013904223u) >> 8; }
inline void turn() {
  if (++idle > kPatience) fail("deadlock");
  swapcontext(&fibers[current], &scheduler);
}
inline void meet(Rendezvous& r, int count) {
  const int before = r.times;
  if (++r.here == count) {
    r.here = idle = 0;
    ++r.times;
  }
  while (r.times == before) turn();
}
inline void enter() {
  kernel();
  ended[current] = true;
  swapcontext(&fibers[current], &scheduler);
}
inline void settle(Barrier& b) {
  if (b.pending > 0 || b.bytes != 0) return;
  ++b.phases;
  b.pending = b.count;
  idle = 0;
}
inline void arrive(u32 at, u32 bytes) {
  Barrier& b = barriers.at(at);
  if (b.pending == 0) fail("a barrier had one arrival too many");
  b.bytes += bytes;
  --b.pending;
  settle(b);
}

inline void run_block(int count, std::function<void()> body) {
  threads = count;
  kernel = std::move(body);
  fibers.assign(count, {});
  ended.assign(count, false);
  barriers.clear();
  block = {};
  for (Rendezvous& w : warps) w = {};
  memset(shared, 0xFF, sizeof shared);
  idle = 0;
  while (static_cast<int>(stacks.size()) < count) stacks.emplace_back(1 << 16);
  for (int i = 0; i < count; ++i) {
    getcontext(&fibers[i]);
    fibers[i].uc_stack.ss_sp = stacks[i].data();
    fibers[i].uc_stack.ss_size = stacks[i].size();
    makecontext(&fibers[i], enter, 0);
  }
  for (int left = count; left > 0;) {
    const int first = draw() % count, step = draw() % 2 ? 1 : count - 1;
    for (int i = 0; i < count; ++i) {
      current = static_cast<int>((first + static_cast<i64>(i) * step) % count);
      if (ended[current]) continue;
      swapcontext(&scheduler, &fibers[current]);
      left -= ended[current];
    }
  }
  for (const auto& [at, b] : barriers)
    if (!b.copies.empty() || b.bytes != 0) fail("a block ended before its copies");
}

struct Current {
  operator int() const { return current; }
};

}  // namespace emulated

inline struct {
  emulated::Current x;
} threadIdx;
inline struct {
  int x = 0;
} blockIdx;

// ---- threads -------------------------------------------------------------------------------------

inline void __syncthreads() { emulated::meet(emulated::block, emulated::threads); }
inline void __syncwarp() { emulated::meet(emulated::warps[emulated::current / 32], 32); }
template <class F>
u32 over_lanes_of(u32 x, F&& found) {
  auto& lanes = emulated::lanes[emulated::current / 32];
  lanes[emulated::current % 32] = x;
  __syncwarp();
  const u32 y = found(lanes);
  __syncwarp();
  return y;
}
inline float __shfl_xor_sync(u32, float x, int apart) {
  const int from = emulated::current % 32 ^ apart;
  return std::bit_cast<float>(over_lanes_of(std::bit_cast<u32>(x), [&](const u32* all) { return all[from]; }));
}
inline int __shfl_sync(u32, int x, int from) {
  return static_cast<int>(over_lanes_of(x, [&](const u32* all) { return all[from]; }));
}
template <class F>
u32 reduced(u32 x, F&& two) {
  return over_lanes_of(x, [&](const u32* all) {
    u32 y = all[0];
    for (int i = 1; i < 32; ++i) y = two(y, all[i]);
    return y;
  });
}
template <class T>
T __reduce_add_sync(u32, T x) {
  return static_cast<T>(reduced(x, [](u32 a, u32 b) { return a + b; }));
}
inline u32 __reduce_min_sync(u32, u32 x) { return reduced(x, [](u32 a, u32 b) { return min(a, b); }); }
inline u32 __reduce_max_sync(u32, u32 x) { return reduced(x, [](u32 a, u32 b) { return max(a, b); }); }
template <class T>
T atomicAdd(T* at, T x) {
  return std::exchange(*at, *at + x);
}
inline u32 atomicMin(u32* at, u32 x) { return std::exchange(*at, min(*at, x)); }
inline u32 atomicMax(u32* at, u32 x) { return std::exchange(*at, max(*at, x)); }

// A cluster's blocks run one after another, the first one last.
inline void cluster_arrive() {}
inline void cluster_wait() { __syncthreads(); }
inline void store_to_block0(void* to, u32 x) { memcpy(to, &x, sizeof x); }
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}

// ---- mbarriers and TMA ---------------------------------------------------------------------------

inline u32 shared_address(const void* p) { return static_cast<u32>(static_cast<const char*>(p) - emulated::shared); }
inline void fence_barrier_init() {}
inline void fence_proxy_async() {}
inline void barrier_init(u32 at, u32 count) { emulated::barriers[at] = {count, count}; }
inline void barrier_arrive_expect_tx(u32 at, u32 bytes) { emulated::arrive(at, bytes); }
inline void barrier_arrive(u32 at) { emulated::arrive(at, 0); }
inline void barrier_wait(u32 at, u32 parity) {
  for (;;) {
    emulated::Barrier& b = emulated::barriers.at(at);
    if ((b.phases & 1) != parity) return;
    if (b.copies.empty() || emulated::draw() % 8 != 0) {
      emulated::turn();
      continue;
    }
    const emulated::Copy copy = b.copies.back();
    b.copies.pop_back();
    memcpy(copy.to, copy.from, copy.bytes);
    b.bytes -= copy.bytes;
    emulated::settle(b);
  }
}
inline void tma_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  const char* begin = static_cast<const char*>(from);
  if (bytes % 16 || to % 16 || reinterpret_cast<u64>(from) % 16) emulated::fail("a TMA address or size is not a multiple of 16");
  const bool inside = std::any_of(emulated::readable.begin(), emulated::readable.end(),
                                  [&](const auto& r) { return begin >= r.begin && begin + bytes <= r.end; });
  if (!inside) emulated::fail("TMA reads outside the inputs");
  memset(emulated::shared + to, 0xFF, bytes);
  emulated::barriers.at(barrier).copies.push_back({emulated::shared + to, from, bytes});
}

// ---- numbers -------------------------------------------------------------------------------------

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline u32 __float_as_uint(float x) { return std::bit_cast<u32>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(u32 x) { return std::bit_cast<float>(x); }
inline int __popc(u32 x) { return std::popcount(x); }
template <class T>
T __ldcg(const T* p) {
  return *p;
}
inline float infinity() { return INFINITY; }
inline float exp2_of(float x) { return std::exp2(x); }
inline u32 bf16_pair(float low, float high) {
  const auto rounded = [](float x) {
    const u32 bits = std::bit_cast<u32>(x);
    return x != x ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
  };
  return rounded(low) | rounded(high) << 16;
}
