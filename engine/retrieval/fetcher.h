// FETCH: the tokens that were selected, and the anchors, become places that attention can read (docs/tiers.md). Nothing
// after this step knows which tier a KV entry came from.
//
//   LoadPages   where every layer block has its place and some are in the store alone: the entries come to their places
//   Address     where layer blocks share frames: an address for each entry, in a frame, the entry cache or on its way
//
// Threads: the engine thread.
#ifndef WINNOW_ENGINE_RETRIEVAL_FETCHER_H_
#define WINNOW_ENGINE_RETRIEVAL_FETCHER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "engine/kv/kv_memory.h"
#include "engine/retrieval/query_call.h"
#include "engine/retrieval/row_fetcher.h"
#include "engine/retrieval/scratch.h"
#include "kernels/device_ops.h"
#include "kernels/retrieval.h"
#include "kernels/tensor.h"

namespace winnow::engine {

class Fetcher {
 public:
  // KV entries of one query.
  struct TierRows {
    uint64_t cached = 0, stored = 0;
    uint64_t in_frames = 0;  // of `stored`, where frames are a slower tier themselves
  };

  // The KV entries that Address makes lists of.
  enum class Entries {
    kAll,     // anchors and selected tokens, in the order of their positions
    kChosen,  // the selected tokens alone: the anchors were attended before
  };

  // `memory` and `backend` must outlive it.
  Fetcher(const RetrievalShape& shape, KvMemory& memory, kernels::DeviceOps& backend)
      : shape_(shape), memory_(memory), backend_(backend) {}
  // `max_entries`: addresses of a call. Before anything else; the errors of RowFetcher::Create are its own.
  absl::Status Allocate(int64_t max_entries, const RowFetcherOptions& rows,
                        ScratchAllocator& scratch);

  // Entries that attention will read come to their places, where these are their own and the entries still in the store
  // alone. False: the device has failed.
  bool LoadPages(const QueryCall& call, const kernels::Selection& selected);

  // Makes lists() of addresses, whose bytes are there. `pin_first` makes resident what else the call needs, and may say
  // false where that does not fit; it is done first, because loading it later could take the frames of entries whose
  // addresses are known. False: too many entries are missing for this number of queries, of which there are more than one.
  // REQUIRES: the device is done with the addresses of the call before, and with `selected`.
  bool Address(const QueryCall& call, const kernels::Selection& selected,
               absl::FunctionRef<bool()> pin_first, Entries entries = Entries::kAll);
  std::span<const kernels::RowList> lists() const { return lists_; }  // [queries][Hkv]
  std::span<const TierRows> tier_rows() const { return tier_rows_; }  // [queries]

  // Starts to read entries that `layer`, the next one, may select; Ask ends the list.
  void Expect(const QueryCall& call, const kernels::Selection& selected);
  void Ask() { rows_->Ask(); }

  // Whether EndCall will write to memory that addresses of the call may point to: the device must be done before.
  bool keeps() const { return rows_->keeps(); }
  void EndCall() { rows_->End(); }
  void EndPass() { rows_->EndPass(); }

  const RowFetcher& rows() const { return *rows_; }

 private:
  template <typename Use>
  void ForEachToken(const kernels::RetrievalQuery& query, const kernels::Selection& selected,
                    size_t i, int32_t head, Entries entries, Use use) const;
  bool IsAway(int32_t layer, const kernels::RetrievalQuery& query) const;
  void LoseChunksOfLostBlocks(const QueryCall& call);
  void AddressOneOrLose(const QueryCall& call, const kernels::Selection& selected, Entries entries);
  bool AddressAll(const QueryCall& call, const kernels::Selection& selected, Entries entries);
  // Whole blocks.
  void LoadWanted(const QueryCall& call, const kernels::Selection& selected, double pages_share);
  void MarkWantedPages(const QueryCall& call, const kernels::Selection& selected);
  void ChooseWholeBlocks(int32_t layer, std::span<const int32_t> table, double pages_share);

  const RetrievalShape shape_;
  KvMemory& memory_;
  kernels::DeviceOps& backend_;
  std::unique_ptr<RowFetcher> rows_;
  kernels::Buffer addresses_;  // shared memory
  std::vector<kernels::RowList> lists_;
  std::vector<TierRows> tier_rows_;
  std::vector<uint64_t> wanted_pages_;  // [logical blocks][pages of a block] bits
  std::vector<int32_t> whole_blocks_, whole_frames_, table_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_FETCHER_H_
