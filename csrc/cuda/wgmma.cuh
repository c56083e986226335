// The wgmma instructions that the Hopper kernels use: one function per instruction shape, fences, and the shared-memory
// descriptor. Operands are fp16 where the source defines HALF as 1, else bf16; accumulators are fp32.
// All four warps of a warpgroup execute each of these together.
#pragma once
#include "sm90.cuh"

#if defined(HALF) && HALF
#define OPERAND "f16"
#else
#define OPERAND "bf16"
#endif

// Accumulator registers as asm operands, and their placeholders.
#define F4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define F8(x, i) F4(x, i), F4(x, i + 4)
#define F16(x, i) F8(x, i), F8(x, i + 8)
#define F32(x, i) F16(x, i), F16(x, i + 16)
#define F64(x, i) F32(x, i), F32(x, i + 32)
#define D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define D16 D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define D32 D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D64                                                                                             \
  D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
      "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define D128                                                                                                   \
  D64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "    \
      "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, " \
      "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, "   \
      "%121, %122, %123, %124, %125, %126, %127"

namespace {

// ---- fences --------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N committed groups are in flight.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// The same; the accumulators as operands keep the compiler from using them before the wait.
template <int N>
__device__ __forceinline__ void wgmma_wait(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : F32(d, 0) : "n"(N) : "memory");
}
template <int N>
__device__ __forceinline__ void wgmma_wait(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : F64(d, 0) : "n"(N) : "memory");
}

// ---- shared-memory descriptors -------------------------------------------------------------------

// Descriptor of an operand in 128-byte swizzle, whose 1024-byte atom is eight lines of 128 bytes. K-major: a line holds 64
// elements of k. TRANSPOSED (MN-major): a line holds 64 rows or columns of the result; the next 64 are one box (64 lines)
// further.
template <bool TRANSPOSED>
__device__ __forceinline__ u64 descriptor(u32 address) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | (TRANSPOSED ? 512ull : 1ull) << 16 | 64ull << 32 | 1ull << 62;
}

// ---- both operands from shared memory (SS) -------------------------------------------------------

// d [64, 256] = a [64, 16] b [256, 16]^T, + d where `accumulate`
template <bool TRANSPOSED_A, bool TRANSPOSED_B>
__device__ __forceinline__ void wgmma_m64n256k16(float (&d)[128], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." OPERAND "." OPERAND " {" D128
      "}, %128, %129, p, 1, 1, %131, %132;\n}\n"
      : F64(d, 0), F64(d, 64)
      : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(TRANSPOSED_A)), "n"(static_cast<int>(TRANSPOSED_B)));
}

// ---- a from registers, b from shared memory (RS) -------------------------------------------------

// d [64, 64] = a [64, 16] b [64, 16]^T, + d where ACCUMULATE
template <bool ACCUMULATE>
__device__ __forceinline__ void wgmma_m64n64k16(float (&d)[32], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." OPERAND "." OPERAND " {" D32
               "}, {%32, %33, %34, %35}, %36, %37, 1, 1, 0;\n"
               : F32(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ACCUMULATE)));
}
// d [64, N] += x[4 j : 4 j + 4] [64, 16] b [16, N] with b MN-major; N is 64 or 128 by the number of accumulators.
__device__ __forceinline__ void wgmma_m64nNk16(float (&d)[32], const u32 (&x)[16], int j, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." OPERAND "." OPERAND " {" D32
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
               : F32(d, 0)
               : "r"(x[4 * j]), "r"(x[4 * j + 1]), "r"(x[4 * j + 2]), "r"(x[4 * j + 3]), "l"(b));
}
__device__ __forceinline__ void wgmma_m64nNk16(float (&d)[64], const u32 (&x)[16], int j, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." OPERAND "." OPERAND " {" D64
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
               : F64(d, 0)
               : "r"(x[4 * j]), "r"(x[4 * j + 1]), "r"(x[4 * j + 2]), "r"(x[4 * j + 3]), "l"(b));
}

// ---- compiler barriers ---------------------------------------------------------------------------

// As CUTLASS's warpgroup_fence_operand: no use of the registers moves across, because wgmma owns them while in flight.
__device__ __forceinline__ void fence_operand(float& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ __forceinline__ void fence_operand(float (&d)[32]) { asm volatile("" : F32(d, 0)::"memory"); }
__device__ __forceinline__ void fence_operand(float (&d)[64]) { asm volatile("" : F64(d, 0)::"memory"); }
__device__ __forceinline__ void fence_operand(u32 (&x)[16]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) asm volatile("" : "+r"(x[j])::"memory");
}

}  // namespace
