// Hopper's own instructions, of compute capability 9.0 and code for sm_90a alone: matrix instructions of a
// warpgroup (four warps, the first of which has a number divisible by four), bulk copies and the barriers
// that they complete. Defined only where WINNOW_WGMMA is.
//
// A matrix instruction of a warpgroup, c [64][N] += a [64][16] b [16][N], rounds as the instruction m16n8k16 of
// a warp does, and a chain of them as a chain of those. That is nowhere written; on an H200 (2026-11-22), of
// 620,691,456 dot products of 16 to 14336 terms none differed in a bit: N of 8, 64, 128 and 256 (of 176 and 192 the kernels'
// tests); a from registers and from shared memory, b by rows of either kind, a and b exchanged, the first sum cleared or not read; values of like
// size, of exponents of 60, down to denormals, up to overflow, cancelling to nearly nothing, and zeros of either sign.
// tests/cuda/matmul_test.cc and dense_attention_test.cc hold the kernels to it. Fragments are the same too: warp w has
// rows 16w to 16w + 15.
//
// Order: FenceGroup(), the instructions, CommitGroup(), WaitForGroups<n>(). Until that wait neither c nor a may be
// touched, nor what lies at b.
#ifndef WINNOW_KERNELS_CUDA_WGMMA_CUH_
#define WINNOW_KERNELS_CUDA_WGMMA_CUH_

#include <cstdint>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WINNOW_WGMMA 1

namespace winnow::kernels::cuda {

__device__ __forceinline__ void FenceGroup() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void CommitGroup() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WaitForGroups() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// A warpgroup's registers per thread, of a kernel that was compiled with a bound of them: a warpgroup that gives up
// what it does not need, and one that takes it.
template <int kRegisters>
__device__ __forceinline__ void GiveUpRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// b in shared memory: rows of 128 bytes, of which eight follow one another in 1024 bytes, aligned so; the 16
// bytes `i` of row r lie at i ^ (r % 8) of their row.
//   a row is an element of N, and 64 of K           step: 1024 from eight rows to the next eight
//   a row is an element of K, and 64 of N           step: the same; `columns`: from 64 of N to the next 64
// `offset` bytes on, a multiple of 16: Further().
__device__ __forceinline__ uint64_t SharedMatrix(uint32_t address, uint32_t step,
                                                 uint32_t columns = 16) {
  return uint64_t{1} << 62 | uint64_t{step >> 4} << 32 | uint64_t{columns >> 4} << 16 |
         (address & 0x3ffff) >> 4;
}
__device__ __forceinline__ uint64_t Further(uint64_t matrix, uint32_t offset) {
  return matrix + (offset >> 4);
}

// The same of rows of 64 bytes, 32 of K: eight follow one another in 512 bytes, aligned so; the 16 bytes `i` of row r lie
// at i ^ (r / 2 % 4) of their row.
__device__ __forceinline__ uint64_t SharedMatrixOf64(uint32_t address) {
  return uint64_t{2} << 62 | uint64_t{512 >> 4} << 32 | uint64_t{1} << 16 |
         (address & 0x3ffff) >> 4;
}

// The sums of an instruction, which are its first operands, and their numbers in its text, by its columns.
#define WINNOW_TILE_SUMS(kind, c, t) kind(c[t][0]), kind(c[t][1]), kind(c[t][2]), kind(c[t][3])
#define WINNOW_SIX_TILE_SUMS(kind, c, t)                                  \
  WINNOW_TILE_SUMS(kind, c, t), WINNOW_TILE_SUMS(kind, c, t + 1),         \
      WINNOW_TILE_SUMS(kind, c, t + 2), WINNOW_TILE_SUMS(kind, c, t + 3), \
      WINNOW_TILE_SUMS(kind, c, t + 4), WINNOW_TILE_SUMS(kind, c, t + 5)
#define WINNOW_SUMS_64(kind, c, t)                                    \
  WINNOW_SIX_TILE_SUMS(kind, c, t), WINNOW_TILE_SUMS(kind, c, t + 6), \
      WINNOW_TILE_SUMS(kind, c, t + 7)
#define WINNOW_SUMS_128(kind, c) WINNOW_SUMS_64(kind, c, 0), WINNOW_SUMS_64(kind, c, 8)
#define WINNOW_SUMS_176(kind, c) WINNOW_SUMS_128(kind, c), WINNOW_SIX_TILE_SUMS(kind, c, 16)
#define WINNOW_SUMS_192(kind, c) WINNOW_SUMS_128(kind, c), WINNOW_SUMS_64(kind, c, 16)
#define WINNOW_NUMBERS_64                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, "         \
  "%8, %9, %10, %11, %12, %13, %14, %15, "   \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define WINNOW_NUMBERS_128                   \
  WINNOW_NUMBERS_64                          \
  ", "                                       \
  "%32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define WINNOW_NUMBERS_176                   \
  WINNOW_NUMBERS_128                         \
  ", "                                       \
  "%64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87"
#define WINNOW_NUMBERS_192 \
  WINNOW_NUMBERS_176       \
  ", "                     \
  "%88, %89, %90, %91, %92, %93, %94, %95"

// c = a b, or c += a b if `add`; a as a warp's fragments, b described by SharedMatrix().
template <bool kTransposedB = false>
__device__ __forceinline__ void GroupMultiplyAdd(float (&c)[8][4], const uint32_t (&a)[4],
                                                 uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WINNOW_NUMBERS_64
      "}, "
      "{%32, %33, %34, %35}, %36, add, 1, 1, %38;\n"
      "}"
      : WINNOW_SUMS_64("+f", c, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),
        "n"(kTransposedB ? 1 : 0));
}
template <bool kTransposedB = false>
__device__ __forceinline__ void GroupMultiplyAdd(float (&c)[16][4], const uint32_t (&a)[4],
                                                 uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WINNOW_NUMBERS_128
      "}, "
      "{%64, %65, %66, %67}, %68, add, 1, 1, %70;\n"
      "}"
      : WINNOW_SUMS_128("+f", c)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),
        "n"(kTransposedB ? 1 : 0));
}

template <bool kTransposedB = false>
__device__ __forceinline__ void GroupMultiplyAdd(float (&c)[22][4], const uint32_t (&a)[4],
                                                 uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %93, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 {" WINNOW_NUMBERS_176
      "}, "
      "{%88, %89, %90, %91}, %92, add, 1, 1, %94;\n"
      "}"
      : WINNOW_SUMS_176("+f", c)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),
        "n"(kTransposedB ? 1 : 0));
}

// The same, a in shared memory too: its rows are elements of M, by SharedMatrix() or SharedMatrixOf64().
__device__ __forceinline__ void GroupMultiplyAdd(float (&c)[8][4], uint64_t a, uint64_t b,
                                                 bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WINNOW_NUMBERS_64
      "}, "
      "%32, %33, add, 1, 1, 0, 0;\n"
      "}"
      : WINNOW_SUMS_64("+f", c, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void GroupMultiplyAdd(float (&c)[16][4], uint64_t a, uint64_t b,
                                                 bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WINNOW_NUMBERS_128
      "}, "
      "%64, %65, add, 1, 1, 0, 0;\n"
      "}"
      : WINNOW_SUMS_128("+f", c)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void GroupMultiplyAdd(float (&c)[22][4], uint64_t a, uint64_t b,
                                                 bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %90, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 {" WINNOW_NUMBERS_176
      "}, "
      "%88, %89, add, 1, 1, 0, 0;\n"
      "}"
      : WINNOW_SUMS_176("+f", c)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void GroupMultiplyAdd(float (&c)[24][4], uint64_t a, uint64_t b,
                                                 bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" WINNOW_NUMBERS_192
      "}, "
      "%96, %97, add, 1, 1, 0, 0;\n"
      "}"
      : WINNOW_SUMS_192("+f", c)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// c = a b, or c += a b if `add`, of 8-bit integers with signs, exactly; both [64 or N][32] by SharedMatrix(), whose rows of 128 bytes are
// 128 of K here.
__device__ __forceinline__ void GroupMultiplyAdd(int32_t (&c)[1][4], uint64_t a, uint64_t b,
                                                 bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {"
      "%0, %1, %2, %3"
      "}, "
      "%4, %5, add;\n"
      "}"
      : WINNOW_TILE_SUMS("+r", c, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void GroupMultiplyAdd(int32_t (&c)[2][4], uint64_t a, uint64_t b,
                                                 bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, "
      "%8, %9, add;\n"
      "}"
      : WINNOW_TILE_SUMS("+r", c, 0), WINNOW_TILE_SUMS("+r", c, 1)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void GroupMultiplyAdd(int32_t (&c)[4][4], uint64_t a, uint64_t b,
                                                 bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, "
      "%16, %17, add;\n"
      "}"
      : WINNOW_TILE_SUMS("+r", c, 0), WINNOW_TILE_SUMS("+r", c, 1), WINNOW_TILE_SUMS("+r", c, 2),
        WINNOW_TILE_SUMS("+r", c, 3)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void GroupMultiplyAdd(int32_t (&c)[8][4], uint64_t a, uint64_t b,
                                                 bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {" WINNOW_NUMBERS_64
      "}, "
      "%32, %33, add;\n"
      "}"
      : WINNOW_SUMS_64("+r", c, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void GroupMultiplyAdd(int32_t (&c)[16][4], uint64_t a, uint64_t b,
                                                 bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" WINNOW_NUMBERS_128
      "}, "
      "%64, %65, add;\n"
      "}"
      : WINNOW_SUMS_128("+r", c)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// Operand a as a warp's fragments: of rows lane / 4 and 8 more, four of K from 4 * (lane % 4) on, and then of those 16 further.
__device__ __forceinline__ void GroupMultiplyAdd(int32_t (&c)[1][4], const uint32_t (&a)[4],
                                                 uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %9, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {"
      "%0, %1, %2, %3"
      "}, "
      "{%4, %5, %6, %7}, %8, add;\n"
      "}"
      : WINNOW_TILE_SUMS("+r", c, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void GroupMultiplyAdd(int32_t (&c)[2][4], const uint32_t (&a)[4],
                                                 uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, "
      "{%8, %9, %10, %11}, %12, add;\n"
      "}"
      : WINNOW_TILE_SUMS("+r", c, 0), WINNOW_TILE_SUMS("+r", c, 1)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void GroupMultiplyAdd(int32_t (&c)[4][4], const uint32_t (&a)[4],
                                                 uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, "
      "{%16, %17, %18, %19}, %20, add;\n"
      "}"
      : WINNOW_TILE_SUMS("+r", c, 0), WINNOW_TILE_SUMS("+r", c, 1), WINNOW_TILE_SUMS("+r", c, 2),
        WINNOW_TILE_SUMS("+r", c, 3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void GroupMultiplyAdd(int32_t (&c)[8][4], const uint32_t (&a)[4],
                                                 uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {" WINNOW_NUMBERS_64
      "}, "
      "{%32, %33, %34, %35}, %36, add;\n"
      "}"
      : WINNOW_SUMS_64("+r", c, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

#undef WINNOW_TILE_SUMS
#undef WINNOW_SIX_TILE_SUMS
#undef WINNOW_SUMS_64
#undef WINNOW_SUMS_128
#undef WINNOW_SUMS_176
#undef WINNOW_SUMS_192
#undef WINNOW_NUMBERS_64
#undef WINNOW_NUMBERS_128
#undef WINNOW_NUMBERS_176
#undef WINNOW_NUMBERS_192

}  // namespace winnow::kernels::cuda

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

#endif  // WINNOW_KERNELS_CUDA_WGMMA_CUH_
