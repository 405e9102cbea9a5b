// Saves of layer blocks to the store: which wait in line, which are in flight.
//
//   Enqueue ─▶ when_scarce  saved when frames get scarce (SaveAhead, SaveSome)
//          ├─▶ wanted       saved in any case (SaveWanted)
//          └─▶ by_copy      of layers with places: copied out at the end of one pass, saved at the end of the
//                           next (SaveByCopy)
//
// To save a layer block the store copies it and sums it up, at some GB/s, and a GPU makes KV about as fast. So
// that is done while the device works: a pass ends before the host waits for what it asked of the device, and
// saves what earlier passes wrote. Memory that the host cannot reach is copied at the end of one pass, when the
// device is waited for, and saved in the next.
//
// A block that is forgotten meanwhile stays in line; its generation tells. Threads: the engine thread only.
#ifndef WINNOW_ENGINE_KV_BLOCK_SAVER_H_
#define WINNOW_ENGINE_KV_BLOCK_SAVER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "engine/kv/residency.h"
#include "engine/kv/store_client.h"

namespace winnow::engine {

class BlockSaver final : public StoreClient::Receiver {
 public:
  // `owner` is told of what was saved. `write_through`: blocks that are to be kept do not wait for frames to
  // get scarce.
  BlockSaver(const KvRooms& rooms, Residency& owner, bool write_through)
      : rooms_(rooms), owner_(owner), write_through_(write_through) {}

  // All layer blocks of a sealed block that are worth saving.
  void EnqueueBlock(int32_t block);
  // One layer block.
  void Enqueue(int64_t index);

  void SaveByCopy();
  void SaveWanted();
  // Saves until `clean` frames and what is in flight reach `reserve`.
  void SaveAhead(int64_t clean, int64_t reserve);
  // Waits until one more layer block is saved, or could not be. False: nothing can be saved.
  bool SaveSome();

  bool has_work() const {
    return !wanted_.empty() || !by_copy_.empty() || !saves_.empty() || !copied_.empty();
  }
  size_t num_queued() const { return wanted_.size() + when_scarce_.size() + by_copy_.size(); }

  void OnAnswer(uint64_t number, const StoreAnswer& answer) override;

 private:
  static constexpr size_t kSavesInFlight = 256;  // the store has copied them: bounds memory
  static constexpr size_t kSavesAtOnce = 64;     // when a pass must wait for them

  struct Waiting {
    int64_t index = 0;
    uint32_t generation = 0;
  };
  using Queue = std::deque<Waiting>;
  struct Save {
    Waiting what;
    BlockName name;
    bool keep = false;
  };
  struct Copied {
    Waiting what;
    const std::byte* content = nullptr;  // in KvPools::outgoing()
  };

  bool IsCurrent(const Waiting& waiting) const {
    return rooms_.blocks[rooms_.blocks.BlockOf(waiting.index)].generation == waiting.generation;
  }
  Queue& QueueOf(int64_t index);
  bool MaySave(int64_t index) const;
  void Start(int64_t index, const std::byte* content);
  bool StartNext(Queue* queue);
  void SaveCopied();
  void CopyNext();
  void DropForgotten();

  const KvRooms rooms_;
  Residency& owner_;
  const bool write_through_;
  Queue when_scarce_, wanted_, by_copy_;
  std::vector<Copied> copied_;  // to be saved by the next SaveByCopy
  std::vector<kernels::CopyPart> copies_;
  Tickets<Save> saves_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_BLOCK_SAVER_H_
