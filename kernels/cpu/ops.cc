#include "kernels/cpu/ops.h"

#include <cpuid.h>

#include <string_view>

namespace winnow::kernels {
namespace {

constexpr CpuOps kScalar = {"scalar",
                            scalar::RmsNormRow,
                            scalar::RopeRow,
                            scalar::SiluMulRow,
                            scalar::WidenRow,
                            scalar::NarrowRow,
                            scalar::PrepareBF16Row,
                            4,
                            scalar::MatmulTiles,
                            scalar::AttendSplits,
                            scalar::ReadLoop};
constexpr CpuOps kAvx2 = {"avx2",
                          avx2::RmsNormRow,
                          avx2::RopeRow,
                          avx2::SiluMulRow,
                          avx2::WidenRow,
                          avx2::NarrowRow,
                          avx2::PrepareBF16Row,
                          4,
                          avx2::MatmulTiles,
                          avx2::AttendSplits,
                          avx2::ReadLoop};
constexpr CpuOps kAvx512 = {
    "avx512_bf16",       avx512::RmsNormRow,   avx512::RopeRow,        avx512::SiluMulRow,
    avx512::WidenRow,    avx512::NarrowRow,    avx512::PrepareBF16Row, 2,
    avx512::MatmulTiles, avx512::AttendSplits, avx512::ReadLoop};

// Clang 14 does not know the names of these two for __builtin_cpu_supports.
bool HasF16C() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & (1u << 29)) != 0;
}
bool HasAvx512BF16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & (1u << 5)) != 0;
}

// __builtin_cpu_supports also asks whether the system saves the registers (XCR0).
bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2") && HasF16C();
}

// Every extension that the compiler may use in *_avx512.cc (CMakeLists.txt). Processors with
// AVX-512 but without BF16 take the AVX2 path.
bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         HasAvx512BF16() && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512vpopcntdq");
}

}  // namespace

const CpuOps* FindCpuOps(const char* isa) {
  const std::string_view name(isa);
  if (name == "scalar") return &kScalar;
  if (name == "avx2") return HasAvx2() ? &kAvx2 : nullptr;
  if (name == "avx512") return HasAvx512() ? &kAvx512 : nullptr;
  if (name == "auto") return HasAvx512() ? &kAvx512 : HasAvx2() ? &kAvx2 : &kScalar;
  return nullptr;
}

}  // namespace winnow::kernels
