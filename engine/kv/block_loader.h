// Reads of layer blocks from the store: whole, or pages of them. An answer is counted for the chunk that
// needed it, and a read that fails loses the layer block.
//
// Threads: the engine thread only.
#ifndef WINNOW_ENGINE_KV_BLOCK_LOADER_H_
#define WINNOW_ENGINE_KV_BLOCK_LOADER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/kv/residency.h"
#include "engine/kv/store_client.h"

namespace winnow::engine {

class BlockLoader final : public StoreClient::Receiver {
 public:
  // `owner` is told of layer blocks that came whole (OnLoaded, by LoadToPlaces) or were lost.
  BlockLoader(const KvRooms& rooms, Residency& owner) : rooms_(rooms), owner_(owner) {}

  // Starts to read all of the layer block. Waits first for others where many are in flight: a read's deadline
  // runs from its start, and behind too many it would be late, and its layer block lost.
  void Load(int64_t index, int32_t chunk, std::byte* into);
  // Starts to read pages of it, `payload_bytes` of which are KV.
  void LoadPages(int64_t index, int32_t chunk, std::span<const uint32_t> pages,
                 uint64_t payload_bytes, std::span<std::byte> into);
  // Waits for everything in flight.
  void Finish() {
    rooms_.store.Wait([this] { return reads_.empty(); });
  }
  bool idle() const { return reads_.empty(); }
  // Reads whole layer blocks of the layer to their places, and waits. Places that the host does not reach get
  // them by way of KvPools::incoming(). REQUIRES: nothing is in flight.
  void LoadToPlaces(int32_t layer, std::span<const int64_t> indices, int32_t chunk);

  void OnAnswer(uint64_t number, const StoreAnswer& answer) override;

 private:
  struct Read {
    int64_t index = 0;
    int32_t chunk = 0;
    uint64_t bytes = 0;
  };
  void Start(int64_t index, int32_t chunk, std::byte* into);
  void LoadWave(int32_t layer, std::span<const int64_t> indices, int32_t chunk);

  const KvRooms rooms_;
  Residency& owner_;
  Tickets<Read> reads_;
  std::vector<kernels::CopyPart> copies_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_BLOCK_LOADER_H_
