// The keys of what is kept beside blocks, of kinds other than 0, in their order: those of one chain are found without a look
// at all others.
//
// Threads: the store's, one at a time.
#ifndef WINNOW_STORAGE_ASIDE_KEYS_H_
#define WINNOW_STORAGE_ASIDE_KEYS_H_

#include <array>
#include <cstdint>
#include <vector>

#include "absl/container/btree_set.h"
#include "storage/block_id.h"

namespace winnow::storage {

class AsideKeys {
 public:
  void Add(const BlockKey& key) {
    if (key.kind() != 0) keys_.insert(key);
  }
  void Remove(const BlockKey& key) {
    if (key.kind() != 0) keys_.erase(key);
  }
  std::vector<BlockKey> Of(const std::array<uint8_t, 32>& chain) const {
    std::vector<BlockKey> found;
    for (auto at = keys_.lower_bound(BlockKey::Make(chain, 0, 0));
         at != keys_.end() && at->chain() == chain; ++at) {
      found.push_back(*at);
    }
    return found;
  }

 private:
  absl::btree_set<BlockKey> keys_;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_ASIDE_KEYS_H_
