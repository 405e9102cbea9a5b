#include "kernels/cpu/ops.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string_view>

namespace winnow::kernels {
namespace {

// The functions of one instruction set.
#define WINNOW_CPU_OPS(isa, isa_name, bf16_value_bytes)                                           \
  {                                                                                               \
    .name = isa_name, .rmsnorm_row = isa::RmsNormRow, .rope_row = isa::RopeRow,                   \
    .silu_mul_row = isa::SiluMulRow, .gelu_tanh_mul_row = isa::GeluTanhMulRow,                    \
    .clamped_swiglu_mul_row = isa::ClampedSwigluMulRow, .widen_row = isa::WidenRow,               \
    .write_kv_row = isa::WriteKvRow, .read_kv_row = isa::ReadKvRow,                               \
    .prepare_bf16_row = isa::PrepareBF16Row, .prepared_bf16_value_bytes = bf16_value_bytes,       \
    .matmul_tiles = isa::MatmulTiles, .product_split = {},                                        \
    .quantized_matmul_tiles = isa::QuantizedMatmulTiles, .quantized_split = {},                   \
    .prepare_rounded_row = isa::PrepareRoundedRow, .int8_matmul_tiles = isa::Int8MatmulTiles,     \
    .int8_split = {}, .prepare_int8_row = isa::PrepareInt8Row,                                    \
    .float8_matmul_tiles = isa::Float8MatmulTiles, .float8_split = {}, .float8_prepared = false,  \
    .attend_splits = isa::AttendSplits, .encode_rows = isa::EncodeRows,                           \
    .scan_codes = isa::ScanCodes, .find_candidates = isa::FindCandidates,                         \
    .read_loop = isa::ReadLoop, .split_row_queries = isa::SplitRowQueries,                        \
    .row_scores = isa::RowScores, .attend_parts = isa::AttendParts,                               \
    .score_max_sum = isa::ScoreMaxSum, .weigh_scores = isa::WeighScores,                          \
    .add_masses = isa::AddMasses, .bound_page = isa::BoundPage, .quantize_key = isa::QuantizeKey, \
    .prepare_int4_queries = isa::PrepareInt4Queries, .int4_scores = isa::Int4Scores,              \
    .gelu_mul_row = isa::GeluMulRow, .summary_weights = isa::SummaryWeights,                      \
    .add_outer = isa::AddOuter, .transform_rows = isa::TransformRows, .mass_dots = isa::MassDots, \
    .mass_steps = isa::MassSteps, .mass_sum = isa::MassSum, .mass_weights = isa::MassWeights,     \
    .mass_cells = isa::MassCells, .mass_add = isa::MassAdd, .rerank_logits = isa::RerankLogits,   \
    .rerank_weights = isa::RerankWeights, .rerank_distances = isa::RerankDistances,               \
    .examine_logits = isa::ExamineLogits, .weigh_logits = isa::WeighLogits,                       \
    .draw_tokens = isa::DrawTokens,                                                               \
  }
constexpr CpuOps kScalar = WINNOW_CPU_OPS(scalar, "scalar", 4);
constexpr CpuOps kAvx2 = WINNOW_CPU_OPS(avx2, "avx2", 4);
constexpr CpuOps kAvx512 = WINNOW_CPU_OPS(avx512, "avx512_bf16", 2);
#undef WINNOW_CPU_OPS

constexpr CpuOps WithAmx(CpuOps ops) {
  ops.name = "amx_bf16";
  ops.matmul_tiles = amx::MatmulTiles;
  ops.attend_splits = amx::AttendSplits;
  // 8 panels of a long row and 128 rows are about 2 MiB, the second-level cache of the processors that have AMX.
  // One row of a 1B model's step with 16 threads, ms: 22 to 23 in items of eight panels, 18 to 20 in items of 256 KiB,
  // however few panels those are, when all items had one size.
  ops.product_split = {.panels = 8,
                       .least_rows = 32,
                       .most_rows = 128,
                       .one_row_panels = 1,
                       .one_row_bytes = 256 << 10};
  ops.quantized_matmul_tiles = amx::QuantizedMatmulTiles;
  ops.quantized_split = {.panels = 4, .least_rows = 48, .most_rows = 128};
  ops.int8_matmul_tiles = amx::Int8MatmulTiles;
  ops.int8_split = ops.product_split;
  ops.float8_matmul_tiles = amx::Float8MatmulTiles;
  ops.float8_split = ops.product_split;
  ops.float8_prepared = true;
  return ops;
}
constexpr CpuOps kAmx = WithAmx(kAvx512);

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
         __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("gfni");
}

// Tiles, their products, and the system's leave to use them, which Linux gives to a process that asks: their 8 KiB are
// a part of what is saved of every thread that has used them.
bool HasAmx() {
  static const bool has = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    constexpr unsigned kTile = 1u << 24, kBF16 = 1u << 22, kInt8 = 1u << 25;
    constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
    return HasAvx512() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 &&
           (edx & kTile) != 0 && (edx & kBF16) != 0 && (edx & kInt8) != 0 &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return has;
}

}  // namespace

const CpuOps* FindCpuOps(const char* isa) {
  const std::string_view name(isa);
  if (name == "scalar") return &kScalar;
  if (name == "avx2") return HasAvx2() ? &kAvx2 : nullptr;
  if (name == "amx") return HasAmx() ? &kAmx : nullptr;
  if (name == "avx512") return HasAvx512() ? &kAvx512 : nullptr;
  if (name == "auto")
    return HasAmx() ? &kAmx : HasAvx512() ? &kAvx512 : HasAvx2() ? &kAvx2 : &kScalar;
  return nullptr;
}

}  // namespace winnow::kernels
