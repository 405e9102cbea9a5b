// A hash map whose growth never stops the caller for long: a plain one moves all of its entries in the
// one insertion that finds it full (50 ms at a million), this one a 256th of them.
#ifndef WINNOW_STORAGE_SHARDED_MAP_H_
#define WINNOW_STORAGE_SHARDED_MAP_H_

#include <array>
#include <cstddef>

#include "absl/container/flat_hash_map.h"

namespace winnow::storage {

// As absl::flat_hash_map where the names are the same; not for use by several threads.
template <typename Key, typename Value>
class ShardedMap {
 public:
  using Shard = absl::flat_hash_map<Key, Value>;
  using iterator = typename Shard::iterator;
  using const_iterator = typename Shard::const_iterator;

  iterator find(const Key& key) {
    Shard& shard = ShardOf(key);
    const auto it = shard.find(key);
    return it == shard.end() ? end() : it;
  }
  const_iterator find(const Key& key) const {
    const Shard& shard = ShardOf(key);
    const auto it = shard.find(key);
    return it == shard.end() ? end() : it;
  }
  iterator end() { return {}; }
  const_iterator end() const { return {}; }
  bool contains(const Key& key) const { return ShardOf(key).contains(key); }
  Value& operator[](const Key& key) {
    Shard& shard = ShardOf(key);
    const auto [it, inserted] = shard.try_emplace(key);
    size_ += inserted;
    return it->second;
  }
  void erase(iterator it) {
    ShardOf(it->first).erase(it);
    --size_;
  }
  size_t size() const { return size_; }
  // Calls visit(key, value) for every entry, in no particular order. It must not insert or erase.
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    for (const Shard& shard : shards_) {
      for (const auto& [key, value] : shard) visit(key, value);
    }
  }

 private:
  // The hash's upper bits, because a shard's own table uses the lower ones.
  static size_t IndexOf(const Key& key) {
    return static_cast<uint64_t>(absl::Hash<Key>{}(key)) >> 56;
  }
  Shard& ShardOf(const Key& key) { return shards_[IndexOf(key)]; }
  const Shard& ShardOf(const Key& key) const { return shards_[IndexOf(key)]; }

  std::array<Shard, 256> shards_;
  size_t size_ = 0;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_SHARDED_MAP_H_
