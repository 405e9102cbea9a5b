// Exact attention of few queries over keys that lie in rows (AttendRows of row_ops.h): at addresses (AttendRows) or in a
// pool, as tokens (AttendChosen). Split over the keys, with the heads of a group packed into one matrix product.
//
//   q        [rows][H*d] f32, rows `q_stride` floats apart; query i reads row queries[i].row
//   lists    [num_queries][Hkv] RowList in device memory. Rows are bf16, K then V (kv_layout.h),
//            16-byte aligned, in device memory or in pinned host memory (read over the bus)
//   states   [num_queries][H][d + 2] f32 (attention_state.h); of no keys where a list is empty
//   out      instead of states: [rows][H*d] f32, rows `out_stride` apart; zeros where of no keys
//   d 64, 80, 96 or 128, with rows of bfloat16 also 256; any group (heads beyond 8 read the rows again, from L2)
//
// Precision: scores and sums are float32; q, scaled, and the weights enter the matrix instructions
// as two bfloat16 (high and low half) each, which keeps 16 bits of them. The two halves are rows of
// the same instruction, so for up to 8 heads this costs nothing.
//
// Order, fixed by a row's place in its list alone: tiles of 16 rows, of which every 64th belongs to one
// chain; chains c, c + 8, c + 16, ... are added from left to right, and so are the eight sums.
//
// Reads each row once: 2*d values, and 8 bytes of address; 4*G*d FLOPs per row.
#ifndef WINNOW_KERNELS_CUDA_ROW_ATTENTION_H_
#define WINNOW_KERNELS_CUDA_ROW_ATTENTION_H_

#include "kernels/cuda/device_types.h"

namespace winnow::kernels::cuda {

struct RowAttentionShape {
  int32_t num_queries = 0;
  int32_t group = 0;  // G
  KvLayout layout;    // of the rows; block_tokens does not matter where keys are gathered
  // Only what any device has, for tests and benchmarks: the same bits.
  bool portable = false;
  // No list is longer, which many short ones gain by: the same bits. 0: it is not known.
  int32_t max_rows = 0;
};

// Where the result goes: states, or finished attention.
struct AttentionOutput {
  float* states = nullptr;
  float* out = nullptr;
  int64_t out_stride = 0;
  const float* sinks = nullptr;  // of `out`, as FinishStates() has them
};

size_t RowAttentionWorkspaceBytes(const RowAttentionShape& shape);
ZeroedPart RowAttentionZeroedPart(const RowAttentionShape& shape);

[[nodiscard]] cudaError_t AttendRows(const RowAttentionShape& shape, const float* q,
                                     int64_t q_stride, const DeviceQuery* queries,
                                     const RowList* lists, float scale,
                                     const AttentionOutput& output, void* workspace, Stream stream);

// Query i attends to what it sees outside mid and to its chosen tokens (`chosen` in device memory), all
// in `pool`'s blocks.
[[nodiscard]] cudaError_t AttendChosen(const RowAttentionShape& shape, const float* q,
                                       int64_t q_stride, const DeviceQuery* queries,
                                       const Selection& chosen, const void* pool, float scale,
                                       const AttentionOutput& output, void* workspace,
                                       Stream stream);

// Row queries[i].row of out [H*d] = attention of states [i][H]; zeros where of no keys. sinks [H] in device memory
// (attention_state.h); null: none.
[[nodiscard]] cudaError_t FinishStates(const float* states, const DeviceQuery* queries,
                                       int32_t num_queries, int32_t heads, int32_t head_dim,
                                       const float* sinks, float* out, int64_t out_stride,
                                       Stream stream);

// masses[i] = the natural logarithm of the sum of exp(score) over the keys of state i; minus infinity
// if it is of no keys.
[[nodiscard]] cudaError_t StateMasses(const float* states, int64_t count, int32_t head_dim,
                                      float* masses, Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_ROW_ATTENTION_H_
