#include "engine/block_pool.h"

#include "engine/kv_memory.h"
#include "kernels/check.h"

namespace winnow::engine {

BlockPool::BlockPool(int32_t num_blocks, KvMemory* memory) : memory_(memory) {
  WINNOW_CHECK(num_blocks >= 1);
  taken_.resize(num_blocks, false);
  free_.reserve(num_blocks);
  for (int32_t block = num_blocks - 1; block >= 0; --block) free_.push_back(block);
}

int32_t BlockPool::Take() {
  WINNOW_CHECK(!free_.empty());
  const int32_t block = free_.back();
  free_.pop_back();
  taken_[block] = true;
  return block;
}

void BlockPool::Give(int32_t block) {
  WINNOW_CHECK(block >= 0 && block < num_blocks());
  WINNOW_CHECK(taken_[block]);
  taken_[block] = false;
  if (memory_ != nullptr) memory_->Forget(block, /*keep=*/false);
  free_.push_back(block);
}

}  // namespace winnow::engine
