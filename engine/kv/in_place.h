// Residency without a store: every layer block has its place, and nothing moves (residency.h).
#ifndef WINNOW_ENGINE_KV_IN_PLACE_H_
#define WINNOW_ENGINE_KV_IN_PLACE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/kv/residency.h"

namespace winnow::engine {

class InPlace final : public Residency {
 public:
  explicit InPlace(const KvRooms& rooms) : Residency(rooms) {}

  PinResult TryPin(const PinRequest& request, std::vector<int32_t>* /*frames*/,
                   PinnedBlocks* pinned) override {
    *pinned = {rooms_.pools.LayerPool(request.layer), request.blocks};
    return PinResult::kOk;
  }
  const std::byte* Resident(int32_t layer, int32_t block, size_t offset) override {
    return rooms_.pools.Place(layer, block) + offset;
  }
  bool IsResident(int32_t /*layer*/, int32_t /*block*/) const override { return true; }
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_IN_PLACE_H_
