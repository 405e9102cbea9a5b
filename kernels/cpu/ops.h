// What one instruction set provides: leaf functions over rows, tiles of rows and panels, and tiles
// of queries. They use no threads and allocate nothing; cpu_backend.cc and the drivers beside it
// (matmul.cc, attention.cc) split the work and own the memory.
//
// X_impl.h holds the one algorithm of operation X, written against the vectors of vec_*.h;
// X_scalar.cc, X_avx2.cc and X_avx512.cc compile it, each with its own flags. Those files include
// no shared inline functions of any size and no containers: a function that two of them emit under
// one name could be linked in its AVX-512 form and then run on a processor without it.
#ifndef WINNOW_KERNELS_CPU_OPS_H_
#define WINNOW_KERNELS_CPU_OPS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/kv_layout.h"
#include "kernels/quantized.h"
#include "kernels/retrieval.h"
#include "kernels/silu_mul.h"

namespace winnow::kernels {

// ---- rows ----
using RmsNormRowFn = void(const float* x, int64_t n, const float* weight, float eps, float* out);
using RopeRowFn = void(float* x, int64_t heads, int64_t head_dim, const float* cos_sin);
using SiluMulRowFn = void(const float* gate_up, int64_t n, float* out);
using GeluTanhMulRowFn = SiluMulRowFn;
using ClampedSwigluMulRowFn = void(const float* gate_up, int64_t n, const ClampedSwiglu& by,
                                   float* out);
using WidenRowFn = void(const void* values, DType dtype, int64_t n, float* out);  // embed_rows
// Writes a row of KV: `d` values of K, as many of V. REQUIRES: d a multiple of 16.
using WriteKvRowFn = void(const float* key, const float* value, int64_t d, DType dtype,
                          std::byte* row);
// Reads what WriteKvRow wrote: K, V or both; null: not wanted.
using ReadKvRowFn = void(const std::byte* row, int64_t d, DType dtype, float* key, float* value);
// Makes of a row of x what products with kBF16 panels read; `n` is rounded up to even with a zero.
using PrepareBF16RowFn = void(const float* x, int64_t n, void* out);

// ---- matmul ----
// Operands of a product, whatever its weights are.
struct MatmulOperands {
  const void* rows = nullptr;  // of x, as the kind of weights reads them
  size_t row_bytes = 0;        // distance of rows
  const std::byte* panels = nullptr;
  int64_t in_features = 0;
  int64_t out_features = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
  const float* bias = nullptr;
  bool accumulate = false;
};
// Rows are f32, or prepared for kBF16; panel.h has the panels.
struct MatmulCall : MatmulOperands {
  DType compute = DType::kF32;
};
// How the rows and panels of a product are dealt out to threads: no influence on its bits.
struct ProductSplit {
  int64_t panels = 4;       // of an item, where there are several rows
  int64_t least_rows = 48;  // of an item; a multiple of every tile's
  int64_t most_rows = 0;    // the same; 0: all
  // For a single row an item has as many panels as fit into so many bytes, in multiples of those that are read side by side.
  int64_t one_row_panels = 8;
  size_t one_row_bytes = 128 << 10;
};
// Rows [first_row, last_row) times panels [first_panel, last_panel).
using MatmulTilesFn = void(const MatmulCall& call, int64_t first_row, int64_t last_row,
                           int64_t first_panel, int64_t last_panel);

// ---- matmul with quantised weights (kernels/quantized_matmul.h) ----
// Rows are prepared; quantized_panel.h has the panels.
struct QuantizedMatmulCall : MatmulOperands {
  BlockShape shape;
  // How far ahead a single row's weights are asked for; 0: not at all, where the processor does better by itself.
  int64_t ahead_bytes = 0;
};
using QuantizedMatmulTilesFn = void(const QuantizedMatmulCall& call, int64_t first_row,
                                    int64_t last_row, int64_t first_panel, int64_t last_panel);
// Rounds a row of x: PreparedRow (quantized_panel.h) says where its parts lie.
using PrepareRoundedRowFn = void(const float* x, int64_t n, void* out);

// ---- matmul of W8A8 and W4A8 (kernels/int8_matmul.h) ----
// Rows are prepared; int8_panel.h has them and the panels.
struct Int8MatmulCall : MatmulOperands {
  int integer_bits = 8;     // of the weights, or 4
  int64_t ahead_bytes = 0;  // as QuantizedMatmulCall's
};
using Int8MatmulTilesFn = void(const Int8MatmulCall& call, int64_t first_row, int64_t last_row,
                               int64_t first_panel, int64_t last_panel);

// ---- matmul with weights of 8-bit floats (kernels/float8_matmul.h) ----
// Rows are f32, or prepared; float8_panel.h has the panels.
struct Float8MatmulCall : MatmulOperands {
  int64_t block_values = 0;  // of one scale
};
using Float8MatmulTilesFn = void(const Float8MatmulCall& call, int64_t first_row, int64_t last_row,
                                 int64_t first_panel, int64_t last_panel);

// ---- attention ----
struct AttentionCall {
  KvLayout layout;
  const std::byte* pool = nullptr;
  int32_t group = 0;     // G
  float scale_log2 = 0;  // scale * log2 e
};
// The queries of a few adjacent tokens of a chunk, for a few adjacent KV heads. Its rows are in the
// order of (KV head, token, query head of the group), so that the rows of a head see ever more
// keys.
struct AttentionTile {
  const float* q = nullptr;  // the first token's, for the first KV head
  int64_t q_stride = 0;      // distance of tokens
  const int32_t* block_table = nullptr;
  int32_t first_kv_head = 0;
  int32_t num_kv_heads = 0;
  int32_t position = 0;  // of the first token
  int32_t num_tokens = 0;
  int32_t window = 0;     // as AttentionChunk's
  int32_t first_key = 0;  // that the first token sees
};
// For each split of [first_split, last_split): computes the tile's states over the split's keys.
//   merge   merges them from left to right into states [rows][AttentionStateFloats(d)], which it
//   resets first else    writes them one split after the other:
//   [splits][rows][AttentionStateFloats(d)]
// `scratch`: AttentionScratchBytes(layout, rows) bytes, aligned to 64.
using AttendSplitsFn = void(const AttentionCall& call, const AttentionTile& tile,
                            int32_t first_split, int32_t last_split, bool merge, float* states,
                            std::byte* scratch);

// ---- completion (kernels/completion.h) ----
// out [n] = gelu(gate) * up, where gate_up [2n] holds gate, then up.
using GeluMulRowFn = void(const float* gate_up, int64_t n, float* out);
// Log-features [tokens][stride] of one KV head become weights exp(a - m), as tokens enter a summary
// one after the other; where a token raises m, what the sums held is to be multiplied by a factor
// first.
struct SummaryWeightsCall {
  float* features = nullptr;  // in: a; out: exp(a - m) with m as of that token
  float* factors = nullptr;   // out, as features: of the tokens that `raising` names
  int64_t stride = 0;
  int32_t num_tokens = 0;  // at most 64
  int32_t num_features = 0;
  float* m = nullptr;            // [F], minus infinity for no tokens yet
  float* sum = nullptr;          // [F], gets the weights
  float* earlier_sum = nullptr;  // [F], is only multiplied
};
// Bit t of the result: token t raised m of a feature.
using SummaryWeightsFn = uint64_t(const SummaryWeightsCall& call);
// sums [rows][cols] += Σ_i of weights[i][row] * values[i][col], one chain for each in ascending i.
struct AddOuterCall {
  const float* weights = nullptr;  // [count][weights_stride]
  int64_t weights_stride = 0;
  const float* values = nullptr;  // [count][cols]
  int64_t count = 0;
  int64_t rows = 0;
  int64_t cols = 0;  // a multiple of 16
  float* sums = nullptr;
};
using AddOuterFn = void(const AddOuterCall& call);
// ---- codes ----
// One stage of an encoder, its outputs padded with zeros to a multiple of 32. Panels of 32 outputs:
// weights [kv_heads][out / 32][in][16], a word of outputs o (lower half) and o + 16 (upper half).
struct EncodeStage {
  const uint32_t* weights = nullptr;
  const float* bias = nullptr;  // [kv_heads][out]
  int32_t in = 0, out = 0;
};
struct EncodeCall {
  const EncodeStage* stages = nullptr;
  int32_t num_stages = 0;
  const uint16_t* silu = nullptr;  // SiluTable()
  int32_t width = 0;               // the largest in or out of all stages
};
inline constexpr int32_t kEncodeTileRows = 24;
// Codes of up to kEncodeTileRows inputs of one head. `scratch`: 2 * kEncodeTileRows * width floats.
using EncodeRowsFn = void(const EncodeCall& call, int32_t head, const void* const* rows,
                          DType dtype, int32_t num_rows, std::byte* const* codes, float* scratch);

struct CodePattern;
struct ScanCall {
  const void* codes = nullptr;  // the layer's pool
  CodeLayout layout;
  int32_t planes = 0;  // CodePlanes(group)
  int32_t head = 0;
  const int32_t* block_table = nullptr;
};
// Distances of the tokens [first, last).
using ScanCodesFn = void(const ScanCall& call, const CodePattern& pattern, int32_t first,
                         int32_t last, uint16_t* distances);
// Writes slot << 16 | distance of those of n distances that are at most `bound`, where slots count
// from first_slot; returns how many they are. Reads up to 64 distances and writes up to 4
// candidates more than there are.
using FindCandidatesFn = int32_t(const uint16_t* distances, int32_t n, int32_t bound,
                                 uint32_t first_slot, uint32_t* candidates);
// ---- retrieval: rows that lie anywhere (row_attention.h, logit_select.h, page_bounds.h,
// int4_keys.h)
struct RowsCall {
  int32_t dim = 0;      // values of a key and of a query, a multiple of 16
  int32_t queries = 0;  // a group's, one after the other: [queries][dim]
  DType dtype = DType::kBF16;
  float scale_log2 = 0;  // scale * log2 e
};
// Puts queries in the order that RowScores and AttendParts read: [queries][dim].
using SplitRowQueriesFn = void(const RowsCall& call, const float* queries, float* split);
// scores[g * stride + i] = q_g . key_i (not scaled), where rows[i] begins with key_i.
using RowScoresFn = void(const RowsCall& call, const float* split, const std::byte* const* rows,
                         int32_t count, float* scores, int64_t stride);
// The states of parts [first_part, last_part) of a list, for the queries of a group.
//   merge   merged from left to right into states [queries][AttentionStateFloats(dim)], reset first
//   else    one part after the other: [parts][queries][AttentionStateFloats(dim)]
// `scratch`: AttendPartsFloats(call) floats.
using AttendPartsFn = void(const RowsCall& call, const float* split, const RowList& list,
                           int32_t first_part, int32_t last_part, bool merge, float* states,
                           float* scratch);
constexpr int64_t AttendPartsFloats(const RowsCall& call) {
  return int64_t{call.queries} * (call.dim + 2 + kRowsPerPart);
}
// max_sum[0] = largest scale * score, max_sum[1] = sum of 2^(scale * score - max). REQUIRES: count
// > 0.
using ScoreMaxSumFn = void(const float* scores, int64_t count, float scale, float* max_sum);
// Scores become 2^(scale * score - max).
using WeighScoresFn = void(float* scores, int64_t count, float scale);
// masses[i] = sum over g of 2^(scale * scores[g * stride + i] - max) * inverse, where max_inverse
// [queries][2]. `masses` may be `scores`.
using AddMassesFn = void(const float* scores, int64_t stride, int32_t queries, int64_t count,
                         float scale, const float* max_inverse, float* masses);
// The bounds of the keys of `count` rows, row_bytes apart. REQUIRES: count > 0.
using BoundPageFn = void(const std::byte* rows, size_t row_bytes, int32_t count, int64_t d,
                         DType dtype, std::byte* page);
using QuantizeKeyFn = void(const std::byte* key, DType dtype, int64_t d, std::byte* out);
// Puts queries in the order that Int4Scores reads: Int4QueryFloats(call) floats.
using PrepareInt4QueriesFn = void(const RowsCall& call, const float* queries, float* prepared);
constexpr int64_t Int4QueryFloats(const RowsCall& call) {
  return int64_t{call.queries} * (call.dim + 16 + 1);  // whole registers, and the sum
}
// scores[g * stride + i] = the estimate of q_g . key_i (not scaled) from four-bit keys.
using Int4ScoresFn = void(const RowsCall& call, const float* prepared, const std::byte* const* keys,
                          int32_t count, float* scores, int64_t stride);

// ---- transform codes (kernels/transform_code.h) ----
// y [rows][n] = chains over d of x [rows][d] and weights [d][n], each begun with begin [n]. REQUIRES: n a multiple of 16.
using TransformRowsFn = void(const float* x, int64_t rows, int32_t d, const float* weights,
                             int32_t n, const float* begin, float* y);
// Fields of one `low` come one after the other, the narrow ones first.
struct MassField {
  int32_t word = 0, shift = 0, low = 0, quad = 0;
  // Last of a run of fields whose products are added up in 16 bits, two of each field: the next one has another `low`, or a sum
  // could exceed kMassPairMost. A field of 8 bits exceeds it alone, and is a run of its own.
  bool ends_pairs = false;
  uint32_t mask = 0;  // of the four bytes, after the shift
  uint64_t matrix =
      0;  // takes the field out of a byte and to its place in the index (vgf2p8affineqb)
};
inline constexpr int32_t kMassPairMost = 32767;
struct MassCall {
  const void* codes = nullptr;  // the layer's pool
  CodeLayout layout;
  int32_t head = 0;
  const int32_t* block_table = nullptr;
  const MassField* fields = nullptr;
  int32_t num_fields = 0;
  int32_t group = 0;
  const int32_t* coefs = nullptr;  // [group][num_fields] four bytes each, of the field's quad
  int32_t last = 0;                // codes of tokens from here on are not read, nor asked for ahead
};
// Places for a piece's tokens, in whole tiles, and what vectors read and write past them.
inline constexpr int32_t kMassStride = 512 + 32;
inline constexpr int kMassAddQueries = 4;
// D_j of the tokens of whole tiles that hold [first, last), at most a piece: dots [group][kMassStride], the first is that of
// the first tile's first token. They are integers far below 2^24, so that float32 has each of them.
using MassDotsFn = void(const MassCall& call, int32_t first, int32_t last, float* dots);
struct MassHead {
  float step = 0, origin = 0;
  int32_t reference = 0;  // R
  float inverse = 0;
};
// X_j of the same tokens: steps [group][kMassStride]. Of `heads` it takes step and origin.
using MassStepsFn = void(const MassCall& call, const MassHead* heads, int32_t first, int32_t last,
                         int16_t* steps);
// S_p of `count` tokens, and P_p in `peak`. REQUIRES: count > 0.
using MassSumFn = int64_t(const int16_t* steps, int32_t count, int32_t* peak);
// Takes steps [group][kMassStride]: distances = 65535 - key, and int(w_j * 2^30) in `fixed` unless it is null:
// [group / kMassAddQueries, rounded up][kMassStride][kMassAddQueries], tokens in the order that MassAdd reads. Queries that
// fill up the last four have zeros. Reads and writes up to 31 places past `count`.
using MassWeightsFn = void(const MassHead* heads, int32_t group, const int16_t* steps,
                           int32_t count, uint16_t* distances, int32_t* fixed);
// Cells of the same tokens as MassDots; writes whole tiles.
using MassCellsFn = void(const MassCall& call, const uint8_t* cell_bits, int32_t num_bits,
                         int32_t first, int32_t last, uint8_t* cells);
// For kMassAddQueries queries: masses [cell][kMassAddQueries] += fixed, of the tokens [begin, end), each at its cell.
using MassAddFn = void(const int32_t* fixed, const uint8_t* cells, int32_t begin, int32_t end,
                       int64_t* masses);

// Re-ranking of one query head, in three passes over its candidates. Each reads and writes whole vectors past `count`.
struct RerankHead {
  float a = 0, b = 0;  // of the first code
  float reference = 0;
  float residual_a = 0, residual_b = 0;
};
// logits = L'_j of dots and residual dots; `most` rises to the largest. Returns the sum of int(E2(min(L_j - R, 0)) * 2^26).
using RerankLogitsFn = int64_t(const RerankHead& head, const float* dots,
                               const float* residual_dots, int32_t count, float* logits,
                               float* most);
// weights = E2(logit - most), in the place of the logits. Returns the sum of int(weight * 2^26).
using RerankWeightsFn = int64_t(float most, int32_t count, float* logits);
// distances = 65535 - key of weights [group][stride].
using RerankDistancesFn = void(const float* weights, int64_t stride, const float* inverses,
                               int32_t group, int32_t count, uint16_t* distances);

// ---- sampling (kernels/sample.h) ----
struct LogitFacts {
  float max;  // of those that are no NaN
  bool has_nan;
};
using ExamineLogitsFn = LogitFacts(const float* logits, int64_t n);
struct LogitWeighing {
  float max = 0, high = 0, low = 0;  // high + low = log2 e / temperature
};
// weights[i] = exp((logits[i] - max) / temperature), zero below 2^-41; null: nobody wants them. Returns their
// sum, in an order that n fixes.
using WeighLogitsFn = double(const LogitWeighing& call, const float* logits, int64_t n,
                             float* weights);
// The token that leads in a draw (token_noise.h), and its weight over its time.
struct DrawLead {
  double speed = 0;
  int32_t token = -1;
};
// Lets tokens [first, first + n) take part. weights[i] of token first + i.
using DrawTokensFn = void(uint64_t noise, int32_t first, const float* weights, int64_t n,
                          DrawLead* lead);

// ---- bench ----
// The exclusive-or of all 8-byte words. REQUIRES: data aligned to 64, whole cache lines.
using ReadLoopFn = uint64_t(const void* data, size_t size_bytes);

struct CpuOps {
  const char* name;  // "avx512_bf16"
  RmsNormRowFn* rmsnorm_row;
  RopeRowFn* rope_row;
  SiluMulRowFn* silu_mul_row;
  GeluTanhMulRowFn* gelu_tanh_mul_row;
  ClampedSwigluMulRowFn* clamped_swiglu_mul_row;
  WidenRowFn* widen_row;
  WriteKvRowFn* write_kv_row;
  ReadKvRowFn* read_kv_row;
  PrepareBF16RowFn* prepare_bf16_row;
  size_t prepared_bf16_value_bytes;  // of a value in a prepared row
  MatmulTilesFn* matmul_tiles;
  ProductSplit product_split;  // for matmul_tiles
  QuantizedMatmulTilesFn* quantized_matmul_tiles;
  ProductSplit quantized_split;
  PrepareRoundedRowFn* prepare_rounded_row;
  Int8MatmulTilesFn* int8_matmul_tiles;
  ProductSplit int8_split;
  PrepareRoundedRowFn* prepare_int8_row;  // PreparedInt8Row (int8_panel.h)
  Float8MatmulTilesFn* float8_matmul_tiles;
  ProductSplit float8_split;
  bool float8_prepared;  // its rows are those of prepare_bf16_row; else f32
  AttendSplitsFn* attend_splits;
  EncodeRowsFn* encode_rows;
  ScanCodesFn* scan_codes;
  FindCandidatesFn* find_candidates;
  ReadLoopFn* read_loop;
  SplitRowQueriesFn* split_row_queries;
  RowScoresFn* row_scores;
  AttendPartsFn* attend_parts;
  ScoreMaxSumFn* score_max_sum;
  WeighScoresFn* weigh_scores;
  AddMassesFn* add_masses;
  BoundPageFn* bound_page;
  QuantizeKeyFn* quantize_key;
  PrepareInt4QueriesFn* prepare_int4_queries;
  Int4ScoresFn* int4_scores;
  GeluMulRowFn* gelu_mul_row;
  SummaryWeightsFn* summary_weights;
  AddOuterFn* add_outer;
  TransformRowsFn* transform_rows;
  MassDotsFn* mass_dots;
  MassStepsFn* mass_steps;
  MassSumFn* mass_sum;
  MassWeightsFn* mass_weights;
  MassCellsFn* mass_cells;
  MassAddFn* mass_add;
  RerankLogitsFn* rerank_logits;
  RerankWeightsFn* rerank_weights;
  RerankDistancesFn* rerank_distances;
  ExamineLogitsFn* examine_logits;
  WeighLogitsFn* weigh_logits;
  DrawTokensFn* draw_tokens;
};

#define WINNOW_DECLARE_CPU_OPS(isa)            \
  namespace isa {                              \
  RmsNormRowFn RmsNormRow;                     \
  RopeRowFn RopeRow;                           \
  SiluMulRowFn SiluMulRow;                     \
  GeluTanhMulRowFn GeluTanhMulRow;             \
  ClampedSwigluMulRowFn ClampedSwigluMulRow;   \
  WidenRowFn WidenRow;                         \
  WriteKvRowFn WriteKvRow;                     \
  ReadKvRowFn ReadKvRow;                       \
  PrepareBF16RowFn PrepareBF16Row;             \
  MatmulTilesFn MatmulTiles;                   \
  QuantizedMatmulTilesFn QuantizedMatmulTiles; \
  PrepareRoundedRowFn PrepareRoundedRow;       \
  Int8MatmulTilesFn Int8MatmulTiles;           \
  PrepareRoundedRowFn PrepareInt8Row;          \
  Float8MatmulTilesFn Float8MatmulTiles;       \
  AttendSplitsFn AttendSplits;                 \
  EncodeRowsFn EncodeRows;                     \
  ScanCodesFn ScanCodes;                       \
  FindCandidatesFn FindCandidates;             \
  ReadLoopFn ReadLoop;                         \
  SplitRowQueriesFn SplitRowQueries;           \
  RowScoresFn RowScores;                       \
  AttendPartsFn AttendParts;                   \
  ScoreMaxSumFn ScoreMaxSum;                   \
  WeighScoresFn WeighScores;                   \
  AddMassesFn AddMasses;                       \
  BoundPageFn BoundPage;                       \
  QuantizeKeyFn QuantizeKey;                   \
  PrepareInt4QueriesFn PrepareInt4Queries;     \
  Int4ScoresFn Int4Scores;                     \
  GeluMulRowFn GeluMulRow;                     \
  SummaryWeightsFn SummaryWeights;             \
  AddOuterFn AddOuter;                         \
  TransformRowsFn TransformRows;               \
  MassDotsFn MassDots;                         \
  MassStepsFn MassSteps;                       \
  MassSumFn MassSum;                           \
  MassWeightsFn MassWeights;                   \
  MassCellsFn MassCells;                       \
  MassAddFn MassAdd;                           \
  RerankLogitsFn RerankLogits;                 \
  RerankWeightsFn RerankWeights;               \
  RerankDistancesFn RerankDistances;           \
  ExamineLogitsFn ExamineLogits;               \
  WeighLogitsFn WeighLogits;                   \
  DrawTokensFn DrawTokens;                     \
  }
WINNOW_DECLARE_CPU_OPS(scalar)
WINNOW_DECLARE_CPU_OPS(avx2)
WINNOW_DECLARE_CPU_OPS(avx512)
#undef WINNOW_DECLARE_CPU_OPS
// AMX has the rest of avx512.
namespace amx {
MatmulTilesFn MatmulTiles;
QuantizedMatmulTilesFn QuantizedMatmulTiles;
Int8MatmulTilesFn Int8MatmulTiles;
Float8MatmulTilesFn Float8MatmulTiles;
AttendSplitsFn AttendSplits;
}  // namespace amx

// The functions for `isa` ("auto", "amx", "avx512", "avx2", "scalar"); null if the processor or the system
// lacks it, or the name is unknown.
const CpuOps* FindCpuOps(const char* isa);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_OPS_H_
