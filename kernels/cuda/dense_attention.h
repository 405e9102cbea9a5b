// Attend (backend.h, kernels/attention.h) on the device: exact causal attention over paged KV, for
// prompts and decoding alike, on tensor cores.
//
//   q      [rows][H*d] f32, rows `q_stride` floats apart; out likewise
//   chunks [num_chunks] DeviceChunk; query i of a chunk sees the keys [0, position + i], or the last `window` of them
//   pool   one layer's blocks (kv_layout.h), of fewer than 2^31 rows
//   d 64, 80, 96 or 128, with KV in bfloat16 also 256; any group; any block_tokens
//
// Order, fixed by a query's position alone:
//   unit   64 tokens, from position 0 on, taken whole: what a query does not see has weight zero, and units of which it sees
//          nothing count for nothing. The unit's largest score becomes what weights are relative to if it is larger by 2^8
//   split  whole units, more of them further on (dense_splits.h): a fresh state. States of splits are merged from left to
//          right
// A query alone, in a chunk of any size, and beside others thus gets the same bits, and so do the
// ways to launch: with the splits one after the other in a block (`kInTurn` and `kWidened`, for prompts), or each in
// a block of its own and merged by a second launch (`kSideBySide`, for few queries).
//
// Precision: q, scaled, and the weights are rounded to bf16, sums are float32; the rounded weights
// are what is summed. As the CPU's on AVX-512 (kernels/attention.h).
//
// Cost: attention.h's. kInTurn reads the keys once per 128 rows of queries times heads of a group, kSideBySide once per 64
// (on Hopper, where blocks of the pool are whole units; else 16), and writes and reads the splits' states. kWidened reads the
// keys' codes once, whatever the queries.
#ifndef WINNOW_KERNELS_CUDA_DENSE_ATTENTION_H_
#define WINNOW_KERNELS_CUDA_DENSE_ATTENTION_H_

#include "kernels/cuda/dense_splits.h"
#include "kernels/cuda/dense_widening.h"
#include "kernels/cuda/device_types.h"

namespace winnow::kernels::cuda {

inline constexpr int32_t kDenseTileRows = 16;  // tokens times heads of a group that share a tile
inline constexpr int32_t kDenseTilesTogether = 4;  // that share a reading of the keys, side by side

// kWidened, of 8-bit types: kInTurn over a copy in bfloat16, which has the same bits (kv_rows.cuh).
enum class DenseWay : uint8_t { kInTurn, kSideBySide, kWidened };

inline constexpr int32_t kWideHeadDim = 256;
// Whether a block of the current device has room for units of such heads.
bool HasWideHeads();

struct DenseAttentionShape {
  int32_t num_chunks = 0;
  int32_t max_chunk_tokens = 0;  // no chunk has more queries
  int32_t max_keys = 0;          // no query sees more
  int32_t group = 0;             // G
  KvLayout layout;
  DenseWay way = DenseWay::kInTurn;
  // Only kernels that any device has, for tests and benchmarks: the same bits.
  bool portable = false;
  // On Hopper up to eight rows go to blocks of one warp where each has so many units, or else to blocks of four, which are sooner
  // done with few: tests take less.
  int32_t least_share = 4;
  // Most of the copy at once, unless a head of each chunk takes more: tests take less.
  size_t widened_bytes = kWidenedKvBytes;
  // Chunks have windows. Kernels that any device has do it: a layer with a window has few keys to read. Not kWidened.
  bool windowed = false;
  const float* sinks = nullptr;  // [H] in device memory (kernels/attention_state.h); null: none
};

// kSideBySide: 4 (d + 2) bytes for every split and row of a tile, of each KV head. kWidened: the copy (dense_widening.h), and a few
// for each chunk. Need not be zeroed.
size_t DenseAttentionWorkspaceBytes(const DenseAttentionShape& shape);

[[nodiscard]] cudaError_t AttendDense(const DenseAttentionShape& shape, const float* q,
                                      int64_t q_stride, const DeviceChunk* chunks, const void* pool,
                                      float scale, float* out, int64_t out_stride, void* workspace,
                                      Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_DENSE_ATTENTION_H_
