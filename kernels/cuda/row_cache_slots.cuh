// Whose slot is whose: what kernels do to the tables of a row cache (row_cache.h). For row_cache.cu and
// hash_encode.cu; the rest of the folder asks those.
//
// The cache is shared by all blocks. A thread that misses claims the row in slot_of_row, takes a slot (a
// ticket of the hand, then a compare-and-swap on the slot, which says whose it is and since which call)
// and publishes it in place of the claim. Threads that want a claimed row wait for that: the claimer runs
// and waits for nobody. Whoever hits stamps the slot with a compare-and-swap that fails if it has changed
// hands meanwhile; then it is a miss. So what slot_of_row says is a hint that the slot confirms.
#ifndef WINNOW_KERNELS_CUDA_ROW_CACHE_SLOTS_CUH_
#define WINNOW_KERNELS_CUDA_ROW_CACHE_SLOTS_CUH_

#include "kernels/cuda/row_cache.h"

namespace winnow::kernels::cuda {

inline constexpr int32_t kClaimed = -2;  // in slot_of_row, within a call

__device__ __forceinline__ RowCacheSlot SlotOf(int32_t row, uint32_t call, uint32_t used) {
  return static_cast<RowCacheSlot>(static_cast<uint32_t>(row)) << 32 | (call << 1 | used);
}
__device__ __forceinline__ int32_t OwnerOf(RowCacheSlot slot) {
  return static_cast<int32_t>(slot >> 32);
}
// Taken or used in this call. A free slot never is.
__device__ __forceinline__ bool IsOfCall(RowCacheSlot slot, uint32_t call) {
  return OwnerOf(slot) >= 0 && (static_cast<uint32_t>(slot) >> 1) == (call & 0x7fffffffu);
}
__device__ __forceinline__ int32_t Exchange(int32_t* at, int32_t expected, int32_t value) {
  return atomicCAS(at, expected, value);
}

// A slot for the row, stamped with this call; -1: all are of this call.
__device__ __forceinline__ int32_t TakeSlot(const DeviceRowCache& cache, uint32_t call,
                                            uint32_t begin, int32_t row) {
  const auto slots = static_cast<uint32_t>(cache.num_slots);
  while (true) {
    const uint32_t at = atomicAdd(&cache.state->hand, 1u);
    if (at - begin >= 2 * slots) return -1;  // the second round finds what the first one spared
    const auto index = static_cast<int32_t>(at % slots);
    RowCacheSlot slot = __ldcg(&cache.slots[index]);
    while (!IsOfCall(slot, call)) {
      const bool spare = OwnerOf(slot) >= 0 && (slot & 1) != 0;
      const RowCacheSlot wanted = spare ? slot & ~RowCacheSlot{1} : SlotOf(row, call, 0);
      const RowCacheSlot found = atomicCAS(&cache.slots[index], slot, wanted);
      if (found != slot) {
        slot = found;
        continue;
      }
      if (spare) break;
      if (OwnerOf(slot) >= 0) Exchange(&cache.slot_of_row[OwnerOf(slot)], index, -1);
      return index;
    }
  }
}

// A row's place in the pool, how far behind 16 bytes that is, and its place and its window's in a slot.
__device__ __forceinline__ std::byte* RowInPool(const DeviceRowCache& cache, int32_t row) {
  return cache.pool + int64_t{row} * cache.row_bytes;
}
__device__ __forceinline__ int64_t WindowOffset(const DeviceRowCache& cache, int32_t row) {
  return int64_t{row} * cache.row_bytes & 15;
}
__device__ __forceinline__ std::byte* WindowInSlot(const DeviceRowCache& cache, int32_t slot) {
  return cache.rows + slot * SlotRowBytes(cache.row_bytes);
}
__device__ __forceinline__ std::byte* RowInSlot(const DeviceRowCache& cache, int32_t slot,
                                                int32_t row) {
  return WindowInSlot(cache, slot) + WindowOffset(cache, row);
}

enum class Found : uint8_t { kCached, kTaken, kNowhere };

// Where the row lies, or may be put (kTaken: by the caller). Stamps the slot.
__device__ __forceinline__ Found FindSlot(const DeviceRowCache& cache, uint32_t call,
                                          uint32_t begin, int32_t row, bool may_take,
                                          int32_t* slot) {
  int32_t index = __ldcg(&cache.slot_of_row[row]);
  while (true) {
    while (index == kClaimed) {
      __nanosleep(20);
      index = __ldcg(&cache.slot_of_row[row]);
    }
    if (index >= 0) {
      RowCacheSlot found = __ldcg(&cache.slots[index]);
      while (OwnerOf(found) == row) {
        const RowCacheSlot before =
            IsOfCall(found, call) ? found
                                  : atomicCAS(&cache.slots[index], found, SlotOf(row, call, 1));
        if (before == found) {
          *slot = index;
          return Found::kCached;
        }
        found = before;
      }
    }
    // Nothing is claimed in vain once the slots are used up.
    if (!may_take ||
        __ldcg(&cache.state->hand) - begin >= 2 * static_cast<uint32_t>(cache.num_slots)) {
      return Found::kNowhere;
    }
    const int32_t before = Exchange(&cache.slot_of_row[row], index, kClaimed);
    if (before == index) {
      *slot = TakeSlot(cache, call, begin, row);
      atomicExch(&cache.slot_of_row[row], *slot);
      return *slot < 0 ? Found::kNowhere : Found::kTaken;
    }
    index = before;
  }
}

// The last of `blocks` blocks to come here begins the next call. Every thread of each comes here, behind a barrier
// of its block and its last look at the cache.
__device__ __forceinline__ void EndCall(const DeviceRowCache& cache, uint32_t blocks) {
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicInc(&cache.state->tickets, blocks - 1) != blocks - 1) return;
  __threadfence();
  cache.state->call += 1;
  cache.state->hand_begin = __ldcg(&cache.state->hand);
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_ROW_CACHE_SLOTS_CUH_
