// One sequence's view of the KV cache: its block table and how far it is filled. Owns its blocks:
// they go back to the pool with it, so that no path out of the engine can leak one.
#ifndef WINNOW_ENGINE_KV_KV_CACHE_H_
#define WINNOW_ENGINE_KV_KV_CACHE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "engine/kv/block_pool.h"

namespace winnow::engine {

// Blocks that `tokens` tokens take.
constexpr int32_t BlocksFor(int64_t tokens, int32_t block_tokens) {
  return static_cast<int32_t>((tokens + block_tokens - 1) / block_tokens);
}

class KvCache {
 public:
  KvCache(BlockPool& pool, int32_t block_tokens) : pool_(pool), block_tokens_(block_tokens) {}
  ~KvCache() { Release(); }
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  // Logical block -> block of the pool. Valid until Grow or Release.
  std::span<const int32_t> block_table() const { return block_table_; }
  int32_t num_blocks() const { return static_cast<int32_t>(block_table_.size()); }
  int32_t num_tokens() const { return num_tokens_; }  // whose KV is written

  void Grow(int32_t blocks);    // REQUIRES: the pool has them
  void Append(int32_t tokens);  // their KV was written. REQUIRES: blocks for them
  // Takes over a full block that is held for it already. REQUIRES: all blocks before it are full.
  void Adopt(int32_t block);
  void Trim();     // gives back blocks that hold no token of it
  void Release();  // gives every block back; empty afterwards

 private:
  BlockPool& pool_;
  const int32_t block_tokens_;
  std::vector<int32_t> block_table_;
  int32_t num_tokens_ = 0;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_KV_CACHE_H_
