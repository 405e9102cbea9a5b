// Operands and results of a backend's retrieval operations. One layer of one step:
//
//   index   index_ops.h      EncodeKeys, BoundKeys, QuantizeKeys: what finds keys, made from rows of the KV pool
//   SELECT  selection_ops.h  EncodeQueries + SelectByCodes | SelectByMass | SelectByBounds | SelectByLogits; then PruneSelection
//                            or RerankByMass
//   FETCH                    the caller's: tokens to addresses of rows, where the backend does not find them itself
//   ATTEND  row_ops.h        AttendRows, CompleteStates or MergeTails, FinishStates
//
// An index is a function of the KV rows alone: made in one go or token by token, at the prompt or
// later, it has the same bits.
//
// Shapes: H query heads, Hkv KV heads, G = H / Hkv, d head dimension. All sizes are in elements
// unless a name says bytes. Positions count from 0 in the sequence.
#ifndef WINNOW_KERNELS_RETRIEVAL_H_
#define WINNOW_KERNELS_RETRIEVAL_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kv_layout.h"

namespace winnow::kernels {

struct TokenRange {
  int32_t first = 0, last = 0;  // [first, last)
  constexpr int32_t size() const { return last - first; }
  bool operator==(const TokenRange&) const = default;
};

// Tokens of one sequence whose rows lie in the pool.
struct KeySpan {
  std::span<const int32_t> block_table;  // logical block -> block of the KV pool
  TokenRange tokens;
  // Logical block -> block of the index; empty: as block_table. KV may lie in frames that are fewer
  // than the blocks, while an index holds every block in its own place.
  std::span<const int32_t> index_table = {};

  int32_t IndexBlock(int32_t logical) const {
    return index_table.empty() ? block_table[logical] : index_table[logical];
  }
};

// One query token that retrieves; all its heads.
struct RetrievalQuery {
  int32_t row = 0;  // of q and out
  std::span<const int32_t> block_table;
  int32_t position = 0;  // sees the tokens [0, position]
  TokenRange mid;        // may be chosen; the rest of what it sees are anchors. May be empty
  int32_t k = 0;         // how many to choose, 0 <= k <= mid.size()
  // SelectByMass chooses none whose mass has a smaller key, so that it may choose fewer than k: a
  // multiple of kMassKeyStep (LeastMassKey, transform_code.h). Others do not read it.
  int32_t least_key = 0;
};

// Chosen tokens of each query and KV head, in ascending order. A view; the caller owns the memory.
struct Selection {
  int32_t kv_heads = 0;
  int32_t capacity = 0;       // tokens that fit, for each query and head
  int32_t* counts = nullptr;  // [queries][Hkv]
  int32_t* tokens = nullptr;  // [queries][Hkv][capacity]

  int32_t& count(int64_t query, int32_t head) const { return counts[query * kv_heads + head]; }
  int32_t* chosen(int64_t query, int32_t head) const {
    return tokens + (query * kv_heads + head) * capacity;
  }
  // The same without the queries before `query`.
  Selection From(int64_t query) const {
    return {kv_heads, capacity, &count(query, 0), chosen(query, 0)};
  }
};

// ---- indexes ----

// Codes beside KV: [num_blocks][Hkv][block_tokens] codes of bits / 8 bytes
// (docs/artifact-format.md).
struct CodeLayout {
  int32_t kv_heads = 0;
  int32_t block_tokens = 64;
  int32_t bits = 128;  // 32, 64, 128, 256, 512 or 1024
  constexpr size_t CodeBytes() const { return static_cast<size_t>(bits) / 8; }
  constexpr size_t HeadBytes() const { return CodeBytes() * block_tokens; }
  constexpr size_t BlockBytes() const { return HeadBytes() * kv_heads; }
};

// One affine map of every KV head: weight [kv_heads][out][in] in bfloat16, bias [kv_heads][out].
struct AffineStage {
  std::span<const uint16_t> weight;
  std::span<const float> bias;
  int32_t in = 0, out = 0;
};

// Hash functions of one side of one layer: stages with SiLU between them and the sign after the
// last.
struct EncoderWeights {
  int32_t kv_heads = 0;
  // Queries that one evaluation reads and gives codes for: 1, or G side by side in the order of
  // heads.
  int32_t queries_per_input = 1;
  std::vector<AffineStage>
      stages;  // the first has in = queries_per_input * d, the last out = queries_per_input * bits
};

// The same in the backend's own order. Made by IndexOps::PackEncoder.
class PackedEncoder {
 public:
  virtual ~PackedEncoder() = default;
  virtual int32_t bits() const = 0;
  virtual size_t size_bytes() const = 0;
};

// Quest's index: of each page of 16 tokens the smallest and the largest value of each channel of K.
// [num_blocks][Hkv][block_tokens / 16] pages of min[d], then max[d], in the KV's dtype (exact). Those of KV in 8 bits are
// bfloat16, the smallest values rounded down and the largest up.
inline constexpr int32_t kBoundPageTokens = 16;
constexpr DType BoundType(const KvLayout& kv) {
  return HasScales(kv.dtype) ? DType::kBF16 : kv.dtype;
}
constexpr size_t BoundPageBytes(const KvLayout& kv) {
  return size_t{2} * kv.head_dim * DTypeBytes(BoundType(kv));
}
constexpr size_t BoundBlockBytes(const KvLayout& kv) {
  return BoundPageBytes(kv) * (kv.block_tokens / kBoundPageTokens) * kv.kv_heads;
}

// K in four bits, asymmetric, for each token and head: d/2 bytes of codes, then scale and zero in
// bfloat16: [num_blocks][Hkv][block_tokens]. Value = zero + scale * code; channel c is the low half
// of byte c/2 where c is even.
constexpr size_t Int4KeyBytes(int32_t head_dim) { return static_cast<size_t>(head_dim) / 2 + 4; }
constexpr size_t Int4BlockBytes(const KvLayout& kv) {
  return Int4KeyBytes(kv.head_dim) * kv.block_tokens * kv.kv_heads;
}

// ---- attention over rows ----

// What one query and KV head attends to: addresses of rows in ascending order of position, as the
// FETCH step found them (in the pool, in a cache, in pinned memory). Of them [chosen_first,
// chosen_last) are of chosen mid tokens, those around them are anchors.
struct RowList {
  const std::byte* const* rows = nullptr;
  int32_t count = 0;
  int32_t chosen_first = 0, chosen_last = 0;
};

// The place of the rows that queries read: addresses, or tokens among the blocks of a pool. Attention over selected rows
// differs from place to place in this alone.
struct RowSource {
  KvLayout layout;
  const void* pool =
      nullptr;  // the layer's, which the queries' block tables are about; addresses alone may do without

  // Addresses: [queries][Hkv] lists, as the FETCH step made them. They lie in shared memory.
  std::span<const RowList> lists = {};

  // Tokens: what each query sees outside mid, and these of mid. A query whose mid is all it sees has no anchors.
  Selection chosen = {};

  bool are_tokens() const { return chosen.counts != nullptr; }
};

// Rows of a part: the state of a list is that of its parts of so many rows, merged from left to
// right. Fixed, so that it does not show in the result which rows came first.
inline constexpr int32_t kRowsPerPart = 64;

// ---- completion ----

// One side's log-feature map of one layer: h = stem(x); h += down(gelu(gate(h)) * up(h)); out(h).
struct FeatureMapWeights {
  int32_t kv_heads = 0;
  AffineStage stem, gate, up, down, out;  // out.out = F
};

class PackedFeatureMap {
 public:
  virtual ~PackedFeatureMap() = default;
  virtual int32_t features() const = 0;
  virtual size_t size_bytes() const = 0;
};

// The summary of a set of keys of one layer and KV head (Linear-attention completion: completion.h):
// m[F] largest log-feature, S[F] sum of exp(a - m), Z[F][d] sum of exp(a - m) v. float32. The sums
// are kept in two parts of the same m, first that of the tokens before the last border of
// kSummaryBlockTokens, then that of the tokens since: added one by one to a single sum, a million
// tokens would each lose what a float of that size cannot hold. Layout: m[F], S[F], Z[F][d], then S
// and Z of the second part.
inline constexpr int32_t kSummaryBlockTokens = 64;
constexpr int64_t SummaryFloats(int32_t features, int32_t head_dim) {
  return int64_t{features} * (2 * int64_t{head_dim} + 3);
}
// A sequence's summaries of one layer, of tokens [tokens.first, tokens.last). Tokens enter one
// after the other in ascending order, so that the bits do not depend on how many entered at a time.
// While `tokens` is empty, what `data` holds does not matter.
struct Summary {
  float* data = nullptr;  // [Hkv][SummaryFloats]
  TokenRange tokens;
};

struct SummaryExtension {
  Summary* summary = nullptr;
  std::span<const int32_t> block_table;
  int32_t last = 0;  // REQUIRES: >= summary->tokens.last
};

// The queries of one sequence, in ascending order of position, and its summary.
struct CompletionGroup {
  int32_t first_query = 0, num_queries = 0;  // of the call's queries
  Summary* summary = nullptr;  // REQUIRES: tokens.first == mid.first and tokens.last <= mid.last of
                               // its first query
};

// ---- transform codes (kernels/transform_code.h) ----

inline constexpr int32_t kCodeTileTokens = 16;
inline constexpr int32_t kTransformCells = 256;
inline constexpr int32_t kTransformBitsMin = 64, kTransformBitsMax = 256;
inline constexpr int32_t kCellRefreshTokens = 64;

// A slice of a quad's level indexes in a code.
struct CodeField {
  uint8_t word = 0;   // of the code
  uint8_t shift = 0;  // its lowest bit in each byte of the word
  uint8_t width = 0;  // bits, 1 to 8
  uint8_t low = 0;    // the index's bit that is the slice's lowest
  uint8_t quad = 0;
  bool operator==(const CodeField&) const = default;
};

// The transform of one KV head. n = 4 * quads kept dimensions.
struct TransformCodeHead {
  int32_t quads = 0;
  std::vector<uint8_t> widths;      // [quads]
  std::vector<CodeField> fields;    // by word, then shift: they fill the words
  std::vector<float> key_weight;    // [d][n]
  std::vector<float> key_bias;      // [n]
  std::vector<float> query_weight;  // [d][n]
  std::vector<float> mean;          // [d] of the keys
  std::vector<float> delta_weight;  // [rows][d]; empty: no delta
  std::vector<uint8_t>
      cell_bits;      // bits of the code (32 * word + bit), the highest first; at most 8
  bool tail = false;  // whether the tail estimate is merged for this head's queries
  // Only a residual code has these. For each of its dimensions the first code's dimension that it refines (-1:
  // one that the first code does not keep), and that dimension's step, in steps of this one (0 where there is none).
  std::vector<int16_t> first_dims;  // [n]
  std::vector<float> first_steps;   // [n]
};

// Of one layer.
struct TransformCodeWeights {
  int32_t head_dim = 0;
  int32_t bits = 128;                    // of a code: 64, 128, 192 or 256
  std::vector<TransformCodeHead> heads;  // [Hkv]
};

// The same in the backend's own order. Made by IndexOps::PackTransformCode.
class PackedTransformCode {
 public:
  virtual ~PackedTransformCode() = default;
  virtual int32_t bits() const = 0;
  virtual size_t size_bytes() const = 0;
};

// What SelectByMass leaves for the tail of each query head. Device memory.
struct TailMasses {
  int32_t heads = 0;            // H
  int64_t* masses = nullptr;    // [queries][H][kTransformCells] M_c
  float* references = nullptr;  // [queries][H] (transform_code.h)
  float* deltas = nullptr;      // [queries][H] delta
  // Masses of all of mid, selected or not: TakeFromTail subtracts those of the tokens that are read.
  bool of_all = false;
};

// The denominators that SelectByMass leaves for RerankByMass, for each query head. Device memory.
struct MassScales {
  float* references = nullptr;  // [queries][H] (transform_code.h)
  float* inverses = nullptr;    // [queries][H] inv
};

// A sequence's table of one layer: sums and counts of V for each cell, and last of all cells together, of the tokens
// [tokens.first, tokens.last). Float32: [Hkv][kTransformCells + 1][d] sums, then [Hkv][kTransformCells + 1] counts.
// While `tokens` is empty, what `data` holds does not matter.
constexpr int64_t CellTableFloats(int32_t kv_heads, int32_t head_dim) {
  return int64_t{kv_heads} * (kTransformCells + 1) * (int64_t{head_dim} + 1);
}
struct CellTableExtension {
  Summary* table = nullptr;
  std::span<const int32_t> block_table;  // of the KV pool
  std::span<const int32_t> index_table;  // of the codes' pool
  int32_t last =
      0;  // REQUIRES: >= table->tokens.last, a multiple of kCellRefreshTokens or tokens.first
};

// ---- quality ----

struct SelectionQuality {
  float coverage =
      0;          // share of the attention mass on anchors and chosen tokens, mean over the group
  float iou = 0;  // of the chosen tokens with as many of SelectByLogits; 1 where both are empty
};

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_RETRIEVAL_H_
