// Reads of whole layer blocks for sequences that are left out of the steps meanwhile: a slow disk costs the sequence
// whose KV is on it, and not those that step beside it.
//
//   Begin ─▶ reads in flight, into transit ─ Pump ─▶ in fast memory, held ─ done ─▶ the sequence steps ─ End ─▶
//
// Answers come whenever the store is asked for some, within a pass, too. What they brought stays in transit until the
// next Pump, because within a pass frames are pinned and the device reads them. A fetch is done when everything has come,
// and also when the rest is left to the step: the store has lost something, or no frame can be had.
//
// Threads: the engine thread only.
#ifndef WINNOW_ENGINE_KV_BLOCK_FETCHER_H_
#define WINNOW_ENGINE_KV_BLOCK_FETCHER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "engine/kv/pass_tally.h"
#include "engine/kv/residency.h"
#include "engine/kv/store_client.h"

namespace winnow::engine {

class BlockFetcher final : public StoreClient::Receiver {
 public:
  static constexpr uint64_t kNone = 0, kLater = ~uint64_t{0};

  // `residency` outlives the fetcher.
  BlockFetcher(const KvRooms& rooms, Residency& residency);
  // Waits for reads in flight, because the store owns their memory until it has answered.
  ~BlockFetcher() override;

  // Begins to read the layer blocks of `blocks` that the store alone has, in each layer from blocks[first_wanted(layer)] on.
  // Its number. kNone: nothing is to be fetched, because all are in fast memory, one is lost, or together they are too many to be held.
  // kLater: too many beside those of other fetches, which have to end first.
  uint64_t Begin(std::span<const int32_t> blocks,
                 absl::FunctionRef<size_t(int32_t layer)> first_wanted);
  // Whether there is nothing to wait for any more. REQUIRES: begun, and not ended.
  bool done(uint64_t fetch) const { return IsDone(fetches_.at(fetch)); }
  // Fetches that have not ended, and whether nothing of those that have is left either: reads, and answers to take in.
  size_t num_open() const { return fetches_.size(); }
  bool idle() const { return fetches_.empty() && reads_.empty() && answered_.empty(); }
  // Holds nothing in fast memory any more, and forgets the fetch. Bytes that it read. REQUIRES: begun, and not ended.
  TierBytes End(uint64_t fetch);

  // Between passes: takes in what the store has answered, and asks for more. Never waits.
  void Pump();
  // Waits for an answer, at most so long. Pump takes it in.
  void Wait(std::chrono::nanoseconds most);

  void OnAnswer(uint64_t number, const StoreAnswer& answer) override;

 private:
  // A layer block to be read: the block may be given to other content meanwhile.
  struct Wanted {
    int64_t index = 0;
    uint32_t generation = 0;
  };
  struct Fetch {
    std::vector<Wanted> missing;
    int64_t held = 0;  // layer blocks that have no frames of their own
    bool left_to_step = false;
    TierBytes bytes;
  };
  struct Read {
    Wanted what;
    uint64_t fetch = kNone;
    size_t slot = 0;  // of transit
  };
  struct Answered {
    Read read;
    StoreAnswer answer;
  };

  static bool IsDone(const Fetch& fetch) { return fetch.left_to_step || fetch.missing.empty(); }
  bool IsCurrent(const Wanted& wanted) const {
    return rooms_.blocks[rooms_.blocks.BlockOf(wanted.index)].generation == wanted.generation;
  }
  std::byte* Slot(size_t slot) const {
    return rooms_.pools.fetched().data() + slot * rooms_.pools.block_bytes();
  }
  void Submit();
  void Start(uint64_t fetch, const Wanted& what);
  void TakeIn();
  void Place(const Answered& answered);
  void DropPresent();

  const KvRooms rooms_;
  Residency& residency_;
  std::map<uint64_t, Fetch> fetches_;  // by number: the first to begin is read first
  uint64_t last_ = kNone;
  int64_t held_ = 0;
  Tickets<Read> reads_;
  absl::flat_hash_set<int64_t> reading_;  // layer blocks
  std::vector<Answered> answered_;
  std::vector<size_t> free_slots_;
  std::vector<kernels::CopyPart> copies_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_BLOCK_FETCHER_H_
