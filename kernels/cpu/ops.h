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

#include "kernels/backend.h"

namespace winnow::kernels {

// ---- rows ----
using RmsNormRowFn = void(const float* x, int64_t n, const float* weight, float eps, float* out);
using RopeRowFn = void(float* x, int64_t heads, int64_t head_dim, const float* cos_sin);
using SiluMulRowFn = void(const float* gate_up, int64_t n, float* out);
using WidenRowFn = void(const void* values, DType dtype, int64_t n, float* out);   // embed_rows
using NarrowRowFn = void(const float* values, int64_t n, DType dtype, void* out);  // write_kv
// Makes of a row of x what products with kBF16 panels read; `n` is rounded up to even with a zero.
using PrepareBF16RowFn = void(const float* x, int64_t n, void* out);

// ---- matmul ----
struct MatmulCall {
  DType compute = DType::kF32;
  const void* rows = nullptr;         // f32, or prepared for kBF16
  size_t row_bytes = 0;               // distance of rows
  const std::byte* panels = nullptr;  // panel.h
  int64_t in_features = 0;
  int64_t out_features = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
  const float* bias = nullptr;
  bool accumulate = false;
};
// Rows [first_row, last_row) times panels [first_panel, last_panel).
using MatmulTilesFn = void(const MatmulCall& call, int64_t first_row, int64_t last_row,
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
};
// For each split of [first_split, last_split): computes the tile's states over the split's keys.
//   merge   merges them from left to right into states [rows][AttentionStateFloats(d)], which it
//   resets first else    writes them one split after the other:
//   [splits][rows][AttentionStateFloats(d)]
// `scratch`: AttentionScratchBytes(layout, rows) bytes, aligned to 64.
using AttendSplitsFn = void(const AttentionCall& call, const AttentionTile& tile,
                            int32_t first_split, int32_t last_split, bool merge, float* states,
                            std::byte* scratch);

// ---- bench ----
// The exclusive-or of all 8-byte words. REQUIRES: data aligned to 64, whole cache lines.
using ReadLoopFn = uint64_t(const void* data, size_t size_bytes);

struct CpuOps {
  const char* name;  // "avx512_bf16"
  RmsNormRowFn* rmsnorm_row;
  RopeRowFn* rope_row;
  SiluMulRowFn* silu_mul_row;
  WidenRowFn* widen_row;
  NarrowRowFn* narrow_row;
  PrepareBF16RowFn* prepare_bf16_row;
  size_t prepared_bf16_value_bytes;  // of a value in a prepared row
  MatmulTilesFn* matmul_tiles;
  AttendSplitsFn* attend_splits;
  ReadLoopFn* read_loop;
};

#define WINNOW_DECLARE_CPU_OPS(isa) \
  namespace isa {                   \
  RmsNormRowFn RmsNormRow;          \
  RopeRowFn RopeRow;                \
  SiluMulRowFn SiluMulRow;          \
  WidenRowFn WidenRow;              \
  NarrowRowFn NarrowRow;            \
  PrepareBF16RowFn PrepareBF16Row;  \
  MatmulTilesFn MatmulTiles;        \
  AttendSplitsFn AttendSplits;      \
  ReadLoopFn ReadLoop;              \
  }
WINNOW_DECLARE_CPU_OPS(scalar)
WINNOW_DECLARE_CPU_OPS(avx2)
WINNOW_DECLARE_CPU_OPS(avx512)
#undef WINNOW_DECLARE_CPU_OPS

// The functions for `isa` ("auto", "avx512", "avx2", "scalar"); null if the processor or the system
// lacks it, or the name is unknown.
const CpuOps* FindCpuOps(const char* isa);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_OPS_H_
