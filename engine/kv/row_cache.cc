#include "engine/kv/row_cache.h"

#include "absl/status/status.h"
#include "fmt/format.h"

namespace winnow::engine {

absl::StatusOr<RowCache> RowCache::Create(kernels::DeviceOps& backend, size_t size_bytes,
                                          int32_t parts, size_t row_bytes) {
  RowCache cache;
  cache.parts_ = parts;
  cache.row_bytes_ = row_bytes;
  cache.sets_ = SetsFor(size_bytes, parts, row_bytes);
  if (cache.sets_ == 0) return cache;
  const size_t sets = cache.sets_ * parts;
  cache.memory_ = backend.AllocateShared(sets * kWays * row_bytes);
  if (cache.memory_.data() == nullptr) {
    return absl::ResourceExhaustedError(
        fmt::format("no memory for the row cache: {} bytes", sets * kWays * row_bytes));
  }
  cache.tags_.assign(sets * kWays, kEmpty);
  cache.used_.assign(sets * kWays, 0);
  cache.hands_.assign(sets, 0);
  return cache;
}

void RowCache::Insert(const Key& key, const std::byte* row) {
  if (sets_ == 0) return;
  const size_t set = SetOf(key);
  uint8_t& hand = hands_[set];
  size_t way = set * kWays + hand;
  while (tags_[way] != kEmpty && used_[way] != 0) {
    used_[way] = 0;
    hand = (hand + 1) % kWays;
    way = set * kWays + hand;
  }
  hand = (hand + 1) % kWays;
  tags_[way] = TagOf(key);
  used_[way] = 1;
  std::memcpy(static_cast<std::byte*>(memory_.data()) + way * row_bytes_, row, row_bytes_);
}

}  // namespace winnow::engine
