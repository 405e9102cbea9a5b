#include "engine/kv/kv_cache.h"

#include "kernels/check.h"

namespace winnow::engine {

void KvCache::Grow(int32_t blocks) {
  for (int32_t i = 0; i < blocks; ++i) block_table_.push_back(pool_.Take());
}

void KvCache::Append(int32_t tokens) {
  num_tokens_ += tokens;
  WINNOW_CHECK(int64_t{num_tokens_} <= int64_t{num_blocks()} * block_tokens_);
}

void KvCache::Adopt(int32_t block) {
  WINNOW_CHECK(num_tokens_ == num_blocks() * block_tokens_);
  block_table_.push_back(block);
  num_tokens_ += block_tokens_;
}

void KvCache::Trim() {
  const auto used = static_cast<size_t>(BlocksFor(num_tokens_, block_tokens_));
  while (block_table_.size() > used) {
    pool_.Give(block_table_.back());
    block_table_.pop_back();
  }
}

void KvCache::Release() {
  // The end first: what goes idle first is taken first, and a prefix is of use without its end.
  for (auto block = block_table_.rbegin(); block != block_table_.rend(); ++block) {
    pool_.Give(*block);
  }
  block_table_.clear();
  num_tokens_ = 0;
}

}  // namespace winnow::engine
