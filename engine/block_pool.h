// Which KV blocks are free. Exact: a block is in the pool or in one sequence's table, never in
// both, and giving back what was not taken is a bug that ends the process. Engine thread only.
//
// Blocks have one owner here; a block shared by sequences comes with the prefix store.
#ifndef WINNOW_ENGINE_BLOCK_POOL_H_
#define WINNOW_ENGINE_BLOCK_POOL_H_

#include <cstdint>
#include <vector>

namespace winnow::engine {

class KvMemory;

class BlockPool {
 public:
  // `memory` is told of each block that is given back; null: nobody. REQUIRES: at least 1.
  explicit BlockPool(int32_t num_blocks, KvMemory* memory = nullptr);
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  int32_t num_blocks() const { return static_cast<int32_t>(taken_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_used() const { return num_blocks() - num_free(); }

  int32_t Take();            // REQUIRES: num_free() > 0
  void Give(int32_t block);  // REQUIRES: taken

 private:
  KvMemory* const memory_;
  std::vector<int32_t> free_;  // a stack: the block freed last is the warmest
  std::vector<bool> taken_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_BLOCK_POOL_H_
