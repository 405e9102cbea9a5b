// A pool of KV in pinned memory with a row cache, for tests.
#ifndef WINNOW_TESTS_CUDA_CACHED_POOL_H_
#define WINNOW_TESTS_CUDA_CACHED_POOL_H_

#include <cstring>
#include <span>
#include <vector>

#include "kernels/cuda/row_cache.h"
#include "tests/cuda/cuda_testing.h"

namespace winnow::kernels::cuda {

// A pool in pinned memory, filled with random bytes that are no NaN, and a cache of it.
class CachedPool {
 public:
  CachedPool(Random& random, const KvLayout& layout, int32_t num_blocks, int32_t num_slots,
             int32_t max_rows = 64)
      : layout_(layout),
        bytes_(num_blocks * layout.BlockBytes()),
        num_rows_(num_blocks * layout.kv_heads * layout.block_tokens),
        rows_(std::max<size_t>(num_slots, 1) *
              SlotRowBytes(static_cast<int64_t>(layout.RowBytes()))),
        map_(num_rows_),
        slots_(std::max(num_slots, 1)),
        state_(1),
        reads_(max_rows) {
    void* pool = nullptr;
    WINNOW_CUDA_OK(cudaHostAlloc(&pool, bytes_, cudaHostAllocDefault));
    pool_ = static_cast<std::byte*>(pool);
    for (size_t at = 0; at < bytes_; at += 2) {
      const BF16 value = ToBF16(random.Normal());
      std::memcpy(pool_ + at, &value, 2);
    }
    slots_.Set(std::vector<RowCacheSlot>(slots_.size(), kFreeSlot));
    state_.Set(std::vector<RowCacheState>(1));
    reads_.Zero();
    cache_ = {pool_,
              rows_.data(),
              map_.data(),
              slots_.data(),
              state_.data(),
              num_slots,
              static_cast<int32_t>(layout.RowBytes())};
  }
  ~CachedPool() { cudaFreeHost(pool_); }
  CachedPool(const CachedPool&) = delete;
  CachedPool& operator=(const CachedPool&) = delete;

  const DeviceRowCache& cache() const { return cache_; }
  std::byte* pool() const { return pool_; }
  // The place of `row` if it is in `slot`.
  const std::byte* InSlot(int32_t slot, int32_t row) const {
    return cache_.rows + slot * SlotRowBytes(cache_.row_bytes) +
           int64_t{row} * cache_.row_bytes % 16;
  }
  int32_t RowOf(std::span<const int32_t> table, int32_t head, int32_t token) const {
    return (table[token / layout_.block_tokens] * layout_.kv_heads + head) * layout_.block_tokens +
           token % layout_.block_tokens;
  }
  SharedKvReads* reads() const { return reads_.data(); }
  SharedKvReads Reads(int32_t row) const { return reads_.Get()[row]; }
  void ForgetReads() { reads_.Zero(); }
  std::vector<int32_t> Map() const { return map_.Get(); }
  RowCacheState State() const { return state_.Get()[0]; }

  // Content by address: of the cache, or of the pool.
  std::vector<std::byte> CacheBytes() const { return rows_.Get(); }
  void ExpectRow(const std::vector<std::byte>& cached, const std::byte* address,
                 int32_t row) const {
    const std::byte* found = address;
    const auto at = address - cache_.rows;
    if (address >= cache_.rows && at < static_cast<int64_t>(cached.size())) {
      const auto slot = static_cast<int32_t>(at / SlotRowBytes(cache_.row_bytes));
      ASSERT_EQ(address, InSlot(slot, row));
      found = cached.data() + at;
    } else {
      ASSERT_EQ(address, pool_ + int64_t{row} * cache_.row_bytes) << "row " << row;
    }
    ASSERT_EQ(std::memcmp(found, pool_ + int64_t{row} * cache_.row_bytes, cache_.row_bytes), 0)
        << "row " << row;
  }
  // Between calls slots and map say the same, and every cached row is the pool's.
  void ExpectConsistent() const {
    const std::vector<int32_t> map = map_.Get();
    const std::vector<RowCacheSlot> slots = slots_.Get();
    const std::vector<std::byte> cached = rows_.Get();
    for (int32_t row = 0; row < num_rows_; ++row) {
      if (map[row] < 0) continue;
      ASSERT_LT(map[row], cache_.num_slots);
      ASSERT_EQ(static_cast<int32_t>(slots[map[row]] >> 32), row);
    }
    for (int32_t slot = 0; slot < cache_.num_slots; ++slot) {
      const auto owner = static_cast<int32_t>(slots[slot] >> 32);
      if (owner < 0) continue;
      ASSERT_EQ(map[owner], slot);
      ExpectRow(cached, InSlot(slot, owner), owner);
    }
    const RowCacheState state = state_.Get()[0];
    ASSERT_EQ(state.hand, state.hand_begin);
    ASSERT_EQ(state.tickets, 0u);
  }

 private:
  const KvLayout layout_;
  const size_t bytes_;
  const int32_t num_rows_;
  std::byte* pool_ = nullptr;
  DeviceArray<std::byte> rows_;
  DeviceArray<int32_t> map_;  // all -1, as memory of tests begins
  DeviceArray<RowCacheSlot> slots_;
  DeviceArray<RowCacheState> state_;
  DeviceArray<SharedKvReads> reads_;
  DeviceRowCache cache_;
};

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_TESTS_CUDA_CACHED_POOL_H_
