// The FETCH step: from tokens to addresses of their KV rows, wherever they lie (docs/tiers.md).
//
//   frame   the row's block is resident: its place in the frame
//   cache   the row was read before: its place in the row cache
//   store   the rest: grouped by block and page, each page read once for all heads and queries that
//           want rows of it, its rows copied to a staging area, and kept in the cache afterwards
//
// Reads are submitted as rows are resolved, and Wait ends when all have come. A row that the store
// does not give marks its block lost; its address then points to zeros, and the caller drops whoever
// wanted it.
#ifndef WINNOW_ENGINE_RETRIEVAL_ROW_FETCHER_H_
#define WINNOW_ENGINE_RETRIEVAL_ROW_FETCHER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/kv/kv_memory.h"
#include "engine/kv/row_cache.h"
#include "kernels/device_ops.h"
#include "kernels/kv_layout.h"
#include "kernels/tensor.h"

namespace winnow::engine {

struct RowFetcherOptions {
  size_t cache_bytes = 0;    // of the row cache
  size_t staging_bytes = 0;  // rows and pages on their way; at least two blocks of one layer
  bool prefetch = false;     // Expect and Ask are used: as many bytes again
};

// Rows and pages since the start.
struct RowFetcherStats {
  uint64_t frame_rows = 0;
  uint64_t cache_rows = 0;
  uint64_t store_rows = 0;     // missing in both; a row wanted twice in a call counts once
  uint64_t shared_rows = 0;    // wanted again in the same call
  uint64_t payload_bytes = 0;  // of rows that were read
  uint64_t pages = 0;
  uint64_t page_bytes = 0;
  uint64_t asked_rows = 0;  // read ahead of time, beside store_rows
  uint64_t asked_hits = 0;  // resolved to one of them; the rest of asked_rows was read in vain
};

class RowFetcher {
 public:
  static absl::StatusOr<std::unique_ptr<RowFetcher>> Create(kernels::DeviceOps& backend,
                                                            KvMemory& memory, int32_t num_layers,
                                                            const RowFetcherOptions& options);

  // Begins a call: addresses of the one before are void. REQUIRES: what was asked of the device with
  // them is done.
  void Begin(int32_t layer);

  // A row of a layer to come that may be chosen there. Ask starts to read those that are missing; it
  // waits for what was asked for before. What no call of that layer resolves was read in vain.
  void Expect(int32_t layer, int32_t chunk, int32_t block, int32_t head, int32_t token);
  void Ask();

  // Address of the row of `token` (in the block) of `head`, for a chunk of the pass; its bytes are there after Wait. Null: the
  // staging area is full, and the caller takes fewer queries at a time or pins what they need.
  const std::byte* Resolve(int32_t chunk, int32_t block, int32_t head, int32_t token) {
    if (const std::byte* row =
            memory_.residency().Resident(layer_, block, layout_.RowOffset(0, head, token))) {
      ++stats_.frame_rows;
      return row;
    }
    return ResolveAway(chunk, block, head, token);
  }
  // Forgets what was resolved since Begin; nothing has been read for it.
  void Abandon();
  // Reads what is missing. False: blocks were lost (LayerBlock::lost).
  bool Wait();
  // Whether End will write to memory that addresses of this call may point to.
  bool keeps() const {
    return cache_.rows() > 0 &&
           (!call_.misses.empty() || (ahead_.layer == layer_ && !ahead_.misses.empty()));
  }
  // The call's rows were used: keeps what was read in the cache.
  void End();

  // The pass is over: nothing stays in flight, because blocks may change hands now.
  void EndPass();

  const RowFetcherStats& stats() const { return stats_; }
  size_t cache_bytes() const { return cache_.size_bytes(); }
  size_t staging_bytes() const {
    return call_.rows.size_bytes() + call_.pages.size_bytes() + ahead_.rows.size_bytes() +
           ahead_.pages.size_bytes();
  }
  int64_t staging_rows() const { return staging_rows_; }

 private:
  struct Miss {
    int32_t block = 0;
    int32_t row = 0;    // head * block_tokens + token
    int32_t slot = 0;   // of staging
    int32_t chunk = 0;  // that wanted it first
  };
  // Pages of one block on their way.
  struct Read {
    int32_t first_miss = 0, last_miss = 0;
    size_t first_page = 0;  // in pages_
    std::vector<uint32_t> pages;
  };

  // Rows that are missing, and where they go. Takes the answers to its reads when it is next waited for.
  struct Batch final : StoreClient::Receiver {
    void OnAnswer(uint64_t number, const StoreAnswer& answer) override {
      answers.emplace_back(number, answer);
    }

    int32_t layer = 0;
    kernels::Buffer rows;   // [staging_rows_], shared memory, as what addresses point to must be
    kernels::Buffer pages;  // [staging_pages_] of storage's pages
    std::vector<Miss> misses;
    absl::flat_hash_map<int64_t, int32_t> slots;  // by block and row
    std::vector<Read> reads;                      // of the wave in flight
    size_t pages_taken = 0;
    size_t reads_left = 0;
    std::vector<std::pair<uint64_t, StoreAnswer>> answers;  // by number of the read; not taken in
  };

  explicit RowFetcher(KvMemory& memory) : memory_(memory), layout_(memory.places().layout()) {}
  int64_t PlaceOf(int32_t block, int32_t head, int32_t token) const {
    return (int64_t{block} * layout_.kv_heads + head) * layout_.block_tokens + token;
  }
  RowCache::Key KeyOf(int32_t layer, int32_t block, int32_t head, int32_t token) const {
    return {layer * layout_.kv_heads + head, memory_.blocks()[block].generation,
            static_cast<uint32_t>(block) * static_cast<uint32_t>(layout_.block_tokens) + token};
  }
  std::byte* Slot(const Batch& batch, int32_t slot) const {
    return static_cast<std::byte*>(batch.rows.data()) + slot * layout_.RowBytes();
  }
  const std::byte* ResolveAway(int32_t chunk, int32_t block, int32_t head, int32_t token);
  void SubmitAll(Batch* batch, bool may_wait);
  bool Submit(Batch* batch, size_t first, size_t last, bool may_wait);
  void TakeIn(Batch* batch);
  void OnRead(Batch& batch, const Read& read, const StoreAnswer& answer);
  void Collect(Batch* batch);
  void Keep(const Batch& batch);
  void Clear(Batch* batch);

  KvMemory& memory_;
  const kernels::KvLayout layout_;
  RowCache cache_;
  int64_t staging_rows_ = 0;
  size_t staging_pages_ = 0;
  int32_t layer_ = 0;
  Batch call_;   // of the call that Begin began
  Batch ahead_;  // of a layer to come, or of this one, asked for before
  std::vector<uint32_t> scratch_pages_;
  bool lost_ = false;
  RowFetcherStats stats_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_ROW_FETCHER_H_
