#include "kernels/cpu/ops.h"

#include <cpuid.h>

#include <string_view>

namespace winnow::kernels {
namespace {

constexpr CpuOps kScalar = {
    .name = "scalar",
    .rmsnorm_row = scalar::RmsNormRow,
    .rope_row = scalar::RopeRow,
    .silu_mul_row = scalar::SiluMulRow,
    .widen_row = scalar::WidenRow,
    .narrow_row = scalar::NarrowRow,
    .prepare_bf16_row = scalar::PrepareBF16Row,
    .prepared_bf16_value_bytes = 4,
    .matmul_tiles = scalar::MatmulTiles,
    .attend_splits = scalar::AttendSplits,
    .encode_rows = scalar::EncodeRows,
    .scan_codes = scalar::ScanCodes,
    .find_candidates = scalar::FindCandidates,
    .read_loop = scalar::ReadLoop,
    .split_row_queries = scalar::SplitRowQueries,
    .row_scores = scalar::RowScores,
    .attend_parts = scalar::AttendParts,
    .score_max_sum = scalar::ScoreMaxSum,
    .weigh_scores = scalar::WeighScores,
    .add_masses = scalar::AddMasses,
    .bound_page = scalar::BoundPage,
    .quantize_key = scalar::QuantizeKey,
    .prepare_int4_queries = scalar::PrepareInt4Queries,
    .int4_scores = scalar::Int4Scores,
    .gelu_mul_row = scalar::GeluMulRow,
    .summary_weights = scalar::SummaryWeights,
    .add_outer = scalar::AddOuter,
};
constexpr CpuOps kAvx2 = {
    .name = "avx2",
    .rmsnorm_row = avx2::RmsNormRow,
    .rope_row = avx2::RopeRow,
    .silu_mul_row = avx2::SiluMulRow,
    .widen_row = avx2::WidenRow,
    .narrow_row = avx2::NarrowRow,
    .prepare_bf16_row = avx2::PrepareBF16Row,
    .prepared_bf16_value_bytes = 4,
    .matmul_tiles = avx2::MatmulTiles,
    .attend_splits = avx2::AttendSplits,
    .encode_rows = avx2::EncodeRows,
    .scan_codes = avx2::ScanCodes,
    .find_candidates = avx2::FindCandidates,
    .read_loop = avx2::ReadLoop,
    .split_row_queries = avx2::SplitRowQueries,
    .row_scores = avx2::RowScores,
    .attend_parts = avx2::AttendParts,
    .score_max_sum = avx2::ScoreMaxSum,
    .weigh_scores = avx2::WeighScores,
    .add_masses = avx2::AddMasses,
    .bound_page = avx2::BoundPage,
    .quantize_key = avx2::QuantizeKey,
    .prepare_int4_queries = avx2::PrepareInt4Queries,
    .int4_scores = avx2::Int4Scores,
    .gelu_mul_row = avx2::GeluMulRow,
    .summary_weights = avx2::SummaryWeights,
    .add_outer = avx2::AddOuter,
};
constexpr CpuOps kAvx512 = {
    .name = "avx512_bf16",
    .rmsnorm_row = avx512::RmsNormRow,
    .rope_row = avx512::RopeRow,
    .silu_mul_row = avx512::SiluMulRow,
    .widen_row = avx512::WidenRow,
    .narrow_row = avx512::NarrowRow,
    .prepare_bf16_row = avx512::PrepareBF16Row,
    .prepared_bf16_value_bytes = 2,
    .matmul_tiles = avx512::MatmulTiles,
    .attend_splits = avx512::AttendSplits,
    .encode_rows = avx512::EncodeRows,
    .scan_codes = avx512::ScanCodes,
    .find_candidates = avx512::FindCandidates,
    .read_loop = avx512::ReadLoop,
    .split_row_queries = avx512::SplitRowQueries,
    .row_scores = avx512::RowScores,
    .attend_parts = avx512::AttendParts,
    .score_max_sum = avx512::ScoreMaxSum,
    .weigh_scores = avx512::WeighScores,
    .add_masses = avx512::AddMasses,
    .bound_page = avx512::BoundPage,
    .quantize_key = avx512::QuantizeKey,
    .prepare_int4_queries = avx512::PrepareInt4Queries,
    .int4_scores = avx512::Int4Scores,
    .gelu_mul_row = avx512::GeluMulRow,
    .summary_weights = avx512::SummaryWeights,
    .add_outer = avx512::AddOuter,
};

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
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && HasF16C();
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
