// One lane of float32: plain C++ for processors without AVX2.
//
// Everything is in an anonymous namespace: each instruction set compiles its own copy, and none can
// be linked in the place of another.
#ifndef WINNOW_KERNELS_CPU_VEC_SCALAR_H_
#define WINNOW_KERNELS_CPU_VEC_SCALAR_H_

// The namespace of what this instruction set defines for kernels/cpu/ops.h.
#define WINNOW_ISA scalar

#include <cmath>
#include <cstdint>

#include "kernels/dtype.h"

namespace winnow::kernels {
namespace {

struct Vec {
  static constexpr int kLanes = 1;
  using Reg = float;

  static Reg Zero() { return 0; }
  static Reg Set1(float x) { return x; }
  static Reg Load(const float* p) { return *p; }
  static void Store(float* p, Reg x) { *p = x; }
  // The first n lanes, 0 < n < kLanes; the others read as zero and are not written.
  static Reg LoadFirst(const float*, int) { return 0; }
  static void StoreFirst(float*, int, Reg) {}
  static Reg LoadBF16(const uint16_t* p) { return ToFloat(BF16{*p}); }
  static Reg LoadF16(const uint16_t* p) { return ToFloat(F16{*p}); }
  // Rounds to nearest even; returns what was stored.
  static Reg StoreBF16(uint16_t* p, Reg x) {
    const BF16 rounded = ToBF16(x);
    *p = rounded.bits;
    return ToFloat(rounded);
  }

  static Reg Add(Reg a, Reg b) { return a + b; }
  static Reg Sub(Reg a, Reg b) { return a - b; }
  static Reg Mul(Reg a, Reg b) { return a * b; }
  static Reg Div(Reg a, Reg b) { return a / b; }
  // Of a NaN and a number, both yield b.
  static Reg Max(Reg a, Reg b) { return a > b ? a : b; }
  static Reg Min(Reg a, Reg b) { return a < b ? a : b; }
  static Reg MulAdd(Reg a, Reg b, Reg c) { return a * b + c; }
  // Rounds once, as vectors do.
  static Reg FusedMulAdd(Reg a, Reg b, Reg c) { return std::fma(a, b, c); }
  static float ReduceAdd(Reg a) { return a; }
  static float ReduceMax(Reg a) { return a; }

  // The lanes 0..n-1 of x, minus infinity in the others (n may be outside 0..kLanes).
  static Reg KeepFirst(Reg x, int n) { return n >= 1 ? x : -INFINITY; }
  static Reg RoundToNearest(Reg x) { return std::nearbyint(x); }
  // x * 2^n for whole n in -126..127, and NaN for NaN.
  static Reg ScaleByPowerOf2(Reg x, Reg n) {
    return n == n ? std::ldexp(x, static_cast<int>(n)) : n;
  }
  // Zero in the lanes where a < limit, else x.
  static Reg ZeroWhereLess(Reg x, Reg a, Reg limit) { return a < limit ? 0.0f : x; }
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_VEC_SCALAR_H_
