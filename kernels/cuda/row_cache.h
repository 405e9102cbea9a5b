// The row cache: rows of a layer's KV that lies in pinned host memory, kept in device memory because
// consecutive steps choose much the same ones (docs/tiers.md).
//
//   slot_of_row  [rows of the pool] where a row lies in the cache, or -1
//   slots        [slots] whose row a slot holds, and when it was used last
//
// A row of the pool, which begins at a multiple of 16 bytes, is known by its place there: row r lies at pool + r * row_bytes (kv_layout.h:
// (block * Hkv + head) * block_tokens + token). Whoever writes to the pool does so with WriteKvThrough, or
// EncodeTokens (hash_encode.h), which write to the cache what the cache has, or calls ForgetRows first, so that the two
// never differ.
//
// Calls on one cache follow each other on one stream. A call is stamped on the slots that it uses, and
// takes no slot of its own stamp: a row that it was given stays until the call is over. Slots are taken
// in turn, with a second chance for those that were used since the hand came by last. Which rows are
// cached, and where, depends on the order of threads; what a list's addresses point to does not.
#ifndef WINNOW_KERNELS_CUDA_ROW_CACHE_H_
#define WINNOW_KERNELS_CUDA_ROW_CACHE_H_

#include "kernels/cuda/device_types.h"
#include "kernels/cuda/layer_ops.h"
#include "kernels/cuda/staging.h"
#include "kernels/kv_layout.h"
#include "kernels/kv_ops.h"
#include "kernels/retrieval.h"

namespace winnow::kernels::cuda {

// In device memory. Begins as RowCacheState{}.
struct RowCacheState {
  uint32_t call = 1;        // number of the call that is running, or comes next
  uint32_t hand = 0;        // slots that were looked at since the start, modulo 2^32
  uint32_t hand_begin = 0;  // the same when this call began
  uint32_t tickets = 0;     // 0 between calls
};

// Whose row, and when: the owner in the upper half (-1: nobody's), above call * 2 + used.
using RowCacheSlot = unsigned long long;
inline constexpr RowCacheSlot kFreeSlot = 0xffffffff00000000ull;

// Memory of a slot's row: where rows are no multiple of 16 bytes, that of the window of 16 bytes that a row lies in, wherever
// it begins. A row lies in its slot as far behind 16 bytes as in the pool, so that the window is copied as it is.
constexpr int64_t SlotRowBytes(int64_t row_bytes) {
  return row_bytes % 16 == 0 ? row_bytes : (row_bytes + 12 + 15) / 16 * 16;
}

struct DeviceRowCache {
  std::byte* pool = nullptr;       // pinned host memory
  std::byte* rows = nullptr;       // [num_slots][SlotRowBytes]
  int32_t* slot_of_row = nullptr;  // all -1 at first
  RowCacheSlot* slots = nullptr;   // all kFreeSlot at first
  RowCacheState* state = nullptr;
  int32_t num_slots = 0;  // may be 0: everything is read in place
  int32_t row_bytes = 0;  // a multiple of 4
};

// Memory of a slot beside its row.
inline constexpr size_t kRowCacheSlotBytes = sizeof(RowCacheSlot);

// Lists of what each query and KV head attends to, ascending: the anchors before mid, the chosen tokens,
// the anchors after mid. Addresses of their rows, which are brought to the cache where they are missing,
// in the same launch. A row for which no slot is left has its address
// in the pool. reads[query.row] adds up what was found where; a row that several lists want is fetched
// for one of them.
//
//   chosen  counts and tokens in device memory
//   rows    [num_queries][Hkv][capacity] addresses; lists [num_queries][Hkv] point into it
// REQUIRES: capacity >= the anchors and chosen tokens of each list; no query sees a row that was never
// written.
// Reads 4 + 4 + 8 bytes and writes 8 + 8 per row, and moves SlotRowBytes over the bus per missing row.
[[nodiscard]] cudaError_t FetchRows(const DeviceQuery* queries, int32_t num_queries,
                                    const Selection& chosen, const DeviceRowCache& cache,
                                    const KvLayout& layout, int32_t capacity,
                                    const std::byte** rows, RowList* lists, SharedKvReads* reads,
                                    Stream stream);

// WriteKv (layer_ops.h) into such a pool, and into the cache what it has of the rows. A chunk of one
// token, which decodes, brings its rows into the cache: they are the window's newest, and this step
// already reads them. The same bits as WriteKv's.
[[nodiscard]] cudaError_t WriteKvThrough(const DeviceMatrix& k, const DeviceMatrix& v,
                                         const DeviceChunk* chunks, int32_t num_chunks,
                                         int32_t max_chunk_tokens, const DeviceRowCache& cache,
                                         const KvLayout& layout, Stream stream);

// Rows of the pool's `blocks` (in device memory, [num_blocks]) are in no slot afterwards. Reads 4 bytes per
// row, and 8 and writes 12 more per row that was cached.
[[nodiscard]] cudaError_t ForgetRows(const int32_t* blocks, int32_t num_blocks,
                                     const DeviceRowCache& cache, const KvLayout& layout,
                                     Stream stream);

// Copies block moves[i].from of `pool` (pinned host memory) to block moves[i].to of `staging`, i <
// num_moves, with `num_blocks` blocks of 512 threads: kBringBlocks where nothing else runs, and
// kGatherBlocks (row_gather.h) beside something that does. Moves block_bytes (a multiple of 16) per move
// over the bus.
inline constexpr int32_t kBringBlocks = 64;
[[nodiscard]] cudaError_t BringBlocks(const std::byte* pool, const BlockMove* moves,
                                      int32_t num_moves, int64_t block_bytes, std::byte* staging,
                                      int32_t num_blocks, Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_ROW_CACHE_H_
