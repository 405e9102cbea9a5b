// Transform codes (kernels/transform_code.h) on the device: codes of keys, selection by estimated mass, and the tail.
//
// Codes, coefficients, masses, selected tokens, cell sums and table rows have the reference's bits: integer sums have no
// order, and every float expression is the header's, rounding by rounding. Only merging a tail into an attention state
// uses the device's exp2.
//
//   pool    one layer's KV, bfloat16 (KvLayout)
//   codes   one layer's pool (CodeLayout), 16-byte aligned; block_tokens a multiple of 16
//   q       [rows][H*d] f32, rows `q_stride` floats apart; G up to 16, d a multiple of 16 up to 256
#ifndef WINNOW_KERNELS_CUDA_TRANSFORM_CODE_H_
#define WINNOW_KERNELS_CUDA_TRANSFORM_CODE_H_

#include <span>

#include "kernels/cuda/device_types.h"
#include "kernels/retrieval.h"

namespace winnow::kernels::cuda {

inline constexpr int kTransformWordsMax = kTransformBitsMax / 32;
inline constexpr int kTransformQuadsMax = 64;
inline constexpr int kTransformFieldsMax = 8 * kTransformWordsMax;
inline constexpr int32_t kTransformGroupMax = 16;
inline constexpr int kTransformFusedSteps = 4;  // a word has up to 8 fields
inline constexpr int kTransformCellSteps = 4;   // and bits of a cell at 8 places of its bytes

// How the codes of one KV head are laid out.
struct DeviceTransformHead {
  // A slice of a quad: the word rotated right by `rotate`, masked with `mask`, is its bytes at their place in the index.
  struct Field {
    uint32_t rotate = 0;
    uint32_t mask = 0;
    uint32_t quad = 0;
  };
  Field fields[kTransformFieldsMax];                 // by word
  int32_t word_fields[kTransformWordsMax + 1] = {};  // where each word's fields begin
  uint32_t field_shift[kTransformFieldsMax] = {};    // CodeField's, for encoding
  uint32_t field_low[kTransformFieldsMax] = {};
  uint32_t field_width[kTransformFieldsMax] = {};
  int32_t widths[kTransformQuadsMax] = {};  // [quads]
  int32_t quads = 0;
  int32_t num_cell_bits = 0;
  int32_t cell_bits[8] = {};
  int32_t tail = 0;
  int32_t delta_rows = 0;
  // Bits of the cell, one of each byte at most: the word as above, times four signed bytes, adds them to the cell (modulo 256).
  struct CellField {
    uint32_t rotate = 0;
    uint32_t mask = 0;
    uint32_t weights = 0;
  };
  // The same for transform_select_fused.cuh, by slot and class of lanes: fields of the code and of the cell, two of each
  // step. Steps are the most of any class; masks of 0 stand where a class has fewer fields.
  struct Class {
    Field fields[kTransformFusedSteps][2];
    CellField cell_fields[kTransformCellSteps][2];
  };
  Class classes[kTransformWordsMax / 4][4];
  int32_t steps[kTransformWordsMax / 4] = {};
  int32_t cell_steps[kTransformWordsMax / 4] = {};
};

// Of one layer, in memory of the caller. n = 4 * quads, the most of any head.
struct DeviceTransform {
  const DeviceTransformHead* heads = nullptr;  // [kv_heads]
  const float* key_weight = nullptr;           // [kv_heads][d][n], zeros past a head's own
  const float* key_bias = nullptr;             // [kv_heads][n]
  const float* query_weight = nullptr;         // [kv_heads][d][n]
  const float* mean = nullptr;                 // [kv_heads][d]
  const float* delta_weight = nullptr;         // [kv_heads][delta_rows][d]
  const int32_t* first_dims = nullptr;         // [kv_heads][n], of a residual code
  const float* first_steps = nullptr;          // [kv_heads][n], of a residual code
  int32_t kv_heads = 0, head_dim = 0, bits = 0, quads = 0, delta_rows = 0;
  int32_t unused = 0;
};

// As PackEncoder (hash_encode.h): `host` is packed bytes, which the caller copies to `device`.
size_t PackedTransformBytes(const TransformCodeWeights& weights);
DeviceTransform PackTransform(const TransformCodeWeights& weights, void* host, void* device);

[[nodiscard]] cudaError_t EncodeTransformKeys(const DeviceTransform& transform,
                                              const DeviceKeySpan* spans, int32_t num_spans,
                                              int32_t max_span_tokens, const void* pool,
                                              const KvLayout& layout, void* codes,
                                              const CodeLayout& code_layout, Stream stream);

// Codes of a key that are made, which a residual code refines.
struct FirstCodes {
  const DeviceTransformHead* heads = nullptr;
  const void* codes = nullptr;
  CodeLayout layout;
  int32_t unused = 0;
};
[[nodiscard]] cudaError_t EncodeResiduals(const DeviceTransform& residual, const FirstCodes& first,
                                          const DeviceKeySpan* spans, int32_t num_spans,
                                          int32_t max_span_tokens, const void* pool,
                                          const KvLayout& layout, void* codes,
                                          const CodeLayout& code_layout, Stream stream);

struct MassSelectShape {
  int32_t num_queries = 0;
  int32_t group = 0;           // G, 1 to 16
  CodeLayout layout;           // bits 64, 128, 192 or 256
  int32_t max_mid_tokens = 0;  // no query's mid is longer
  // In one launch, where the blocks of all rows run at once. False: in passes, however few they are.
  bool fused = true;
};

// Masses [num_queries][H] of anchors. With `states` [num_queries][H][d + 2] they are made of these first.
struct AnchorMasses {
  AnchorMasses() = default;
  AnchorMasses(const float* of_heads)
      : masses(of_heads) {}  // NOLINT: masses are what it stands for
  AnchorMasses(const float* of_states, float* to, bool attended_just_now = false)
      : masses(to), states(of_states), made(to), just_attended(attended_just_now) {}

  const float* masses = nullptr;
  const float* states = nullptr;
  float* made = nullptr;  // masses, where they are made
  // The launch right before SelectByMass is that of AttendRows or AttendChosen (row_attention.h) with the same q. It lets the
  // next kernel begin when all before it has ended, so that q is there.
  bool just_attended = false;
};

// Prepare makes coefficients of the queries; then, where there is room for the blocks of all rows, one launch whose blocks
// meet; or four: Pieces (steps and cells, each piece's peak and sum; the row's last block makes R and the sum of masses),
// Masses (each token's key, counted by its upper 9 bits), Count (the lower 7 bits of those in the cut's bin, and where each
// chunk's tokens go) and Compact (tokens, and the masses of the cells of the others). Then steps (2 bytes a token and head),
// keys (2 bytes a token) and cells (1) go through the workspace.
size_t MassSelectWorkspaceBytes(const MassSelectShape& shape);
ZeroedPart MassSelectZeroedPart(const MassSelectShape& shape);

// `tail.masses` null: nothing is left for a tail. `scales.references` null: nothing is left for re-ranking.
[[nodiscard]] cudaError_t SelectByMass(const MassSelectShape& shape,
                                       const DeviceTransform& transform, const float* q,
                                       int64_t q_stride, const DeviceQuery* queries,
                                       const AnchorMasses& anchors, float scale, const void* codes,
                                       const Selection& chosen, const TailMasses& tail,
                                       void* workspace, Stream stream,
                                       const MassScales& scales = {});

// Re-ranking (transform_rerank.cu): Prepare for both codes, then a kernel whose blocks share a row's candidates, and one with
// a block a row. `selection` has the candidates, of which queries[i].k are kept in their place.
struct RerankCodes {
  const DeviceTransform* transform = nullptr;
  const void* codes = nullptr;
  CodeLayout layout;
};
size_t RerankWorkspaceBytes(int32_t num_queries, int32_t kv_heads, int32_t group, int32_t capacity);
[[nodiscard]] cudaError_t RerankByMass(int32_t num_queries, int32_t group, const RerankCodes& first,
                                       const RerankCodes& residual, const float* q,
                                       int64_t q_stride, const DeviceQuery* queries, float scale,
                                       const MassScales& scales, const Selection& selection,
                                       void* workspace, Stream stream);

// Subtracts the masses of `read` from `tail`, which SelectByMass left `of_all`. Its workspace: coefficients of the queries.
size_t TakeFromTailWorkspaceBytes(const MassSelectShape& shape);
[[nodiscard]] cudaError_t TakeFromTail(const MassSelectShape& shape,
                                       const DeviceTransform& transform, const float* q,
                                       int64_t q_stride, const DeviceQuery* queries, float scale,
                                       const void* codes, const Selection& read,
                                       const TailMasses& tail, void* workspace, Stream stream);

// retrieval.h's CellTableExtension: tokens that enter a table. With `clear` it is made that of no tokens first.
struct DeviceTableExtension {
  const int32_t* block_table = nullptr;
  const int32_t* index_table = nullptr;
  float* table = nullptr;  // CellTableFloats(Hkv, d)
  TokenRange tokens;
  int32_t clear = 0, unused = 0;
};
[[nodiscard]] cudaError_t ExtendCellTables(const DeviceTransform& transform,
                                           const DeviceTableExtension* extensions,
                                           int32_t num_extensions, int32_t max_tokens,
                                           const void* pool, const KvLayout& layout,
                                           const void* codes, const CodeLayout& code_layout,
                                           Stream stream);

// tables: of each query, in device memory.
[[nodiscard]] cudaError_t MergeTails(const DeviceTransform& transform,
                                     std::span<const float* const> tables, const TailMasses& tail,
                                     float* states, Stream stream);

// states [count][d + 2] become those of both parts.
[[nodiscard]] cudaError_t MergeStates(const float* parts, int64_t count, int32_t head_dim,
                                      float* states, Stream stream);

// The last steps of states [num_queries][H][d + 2], in this order: merged with `parts`, then with the tails of `tables` (of
// each query, in device memory), then attention, as FinishStates (row_attention.h) has it. Null steps are left out. With
// attention the states stay as they were.
struct StateEnd {
  float* states = nullptr;
  int32_t num_queries = 0, heads = 0, head_dim = 0;
  const float* parts = nullptr;
  const DeviceTransform* transform = nullptr;  // of `tables`
  std::span<const float* const> tables = {};
  TailMasses tail = {};
  const DeviceQuery* queries = nullptr;
  float* out = nullptr;  // row queries[i].row
  int64_t out_stride = 0;
  const float* sinks = nullptr;  // of `out`
};
// The bits of its steps one by one.
[[nodiscard]] cudaError_t EndStates(const StateEnd& end, Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_TRANSFORM_CODE_H_
