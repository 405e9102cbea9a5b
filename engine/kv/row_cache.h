// KV rows that were read from the store and may be chosen again: consecutive steps choose much the
// same rows. One part of fixed size for each layer and KV head, so that no layer crowds out another;
// in it, sets of eight ways with a second chance for what was used.
//
// A row is known by its block's generation and its token in the pool: when a block is given to other
// content its generation moves on, and what is cached of the old content can no longer be found.
#ifndef WINNOW_ENGINE_KV_ROW_CACHE_H_
#define WINNOW_ENGINE_KV_ROW_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device_ops.h"
#include "kernels/tensor.h"

namespace winnow::engine {

class RowCache {
 public:
  struct Key {
    int32_t part = 0;         // layer * KV heads + head
    uint32_t generation = 0;  // of the block
    uint32_t token = 0;       // block * block_tokens + token in the block
  };

  // As many rows as fit into `size_bytes`, their tags included; none are held if that is less than
  // eight for each part. ResourceExhausted: no memory.
  static absl::StatusOr<RowCache> Create(kernels::DeviceOps& backend, size_t size_bytes,
                                         int32_t parts, size_t row_bytes);
  RowCache() = default;
  // size_bytes() of the cache that Create would make.
  static size_t SizeBytesFor(size_t size_bytes, int32_t parts, size_t row_bytes) {
    return SetsFor(size_bytes, parts, row_bytes) * parts * WaysBytes(row_bytes);
  }

  int64_t rows() const { return int64_t{parts_} * sets_ * kWays; }
  size_t size_bytes() const { return memory_.size_bytes() + tags_.size() * (sizeof(uint64_t) + 1); }

  // Address of the row, or null. Holds until the next Insert.
  const std::byte* Find(const Key& key) {
    if (sets_ == 0) return nullptr;
    const size_t set = SetOf(key);
    const uint64_t tag = TagOf(key);
    for (size_t way = set * kWays; way < (set + 1) * kWays; ++way) {
      if (tags_[way] != tag) continue;
      used_[way] = 1;
      return static_cast<const std::byte*>(memory_.data()) + way * row_bytes_;
    }
    return nullptr;
  }
  // REQUIRES: Find gives null for it.
  void Insert(const Key& key, const std::byte* row);

 private:
  static constexpr size_t kWays = 8;
  static constexpr uint64_t kEmpty = 0;

  // Rows of a set and their tags and marks; a set has a hand beside.
  static size_t WaysBytes(size_t row_bytes) { return kWays * (row_bytes + sizeof(uint64_t) + 1); }
  static size_t SetsFor(size_t size_bytes, int32_t parts, size_t row_bytes) {
    return size_bytes / parts / (WaysBytes(row_bytes) + 1);
  }
  static uint64_t TagOf(const Key& key) { return (uint64_t{key.generation} << 32 | key.token) + 1; }
  size_t SetOf(const Key& key) const {
    // Tokens in a row go to sets in a row: a page of neighbours never fights for one set.
    return static_cast<size_t>(key.part) * sets_ + key.token % sets_;
  }

  int32_t parts_ = 0;
  size_t sets_ = 0;  // of a part
  size_t row_bytes_ = 0;
  kernels::Buffer memory_;      // [parts][sets][kWays] rows; shared memory
  std::vector<uint64_t> tags_;  // the same; kEmpty where there is none
  std::vector<uint8_t> used_;   // the same
  std::vector<uint8_t> hands_;  // [parts][sets]
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_ROW_CACHE_H_
