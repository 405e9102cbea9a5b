#include "storage/page_memory.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/unit/storage/storage_testing.h"

namespace winnow::storage {
namespace {

TEST(PageAllocator, RunsNeverOverlapAndNothingIsLost) {
  std::mt19937 random(TestSeed(3));
  PageAllocator allocator(100);
  std::map<size_t, size_t> held;
  for (int round = 0; round < 20000; ++round) {
    if (random() % 2 == 0) {
      const size_t pages = 1 + random() % 20;
      const auto first = allocator.Allocate(pages);
      if (!first) continue;
      ASSERT_LE(*first + pages, 100u);
      for (const auto& [at, length] : held) {
        ASSERT_TRUE(*first + pages <= at || at + length <= *first);
      }
      held[*first] = pages;
    } else if (!held.empty()) {
      auto it = std::next(held.begin(), random() % held.size());
      allocator.Free(it->first, it->second);
      held.erase(it);
    }
    size_t used = 0;
    for (const auto& [at, length] : held) used += length;
    ASSERT_EQ(allocator.free_pages(), 100 - used);
  }
  for (const auto& [at, length] : held) allocator.Free(at, length);
  EXPECT_EQ(allocator.Allocate(100), 0u);
  EXPECT_EQ(allocator.Allocate(1), std::nullopt);
}

TEST(PageAllocator, FindsTheLastHoleWhereverTheCursorIs) {
  PageAllocator allocator(10);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(allocator.Allocate(1).has_value());
  for (size_t hole = 0; hole + 3 <= 10; ++hole) {
    allocator.Free(hole, 3);
    EXPECT_EQ(allocator.Allocate(4), std::nullopt);
    EXPECT_EQ(allocator.Allocate(3), hole);
  }
}

TEST(PageMemory, IsPageAlignedZeroedAndMoves) {
  PageMemory memory(5000);
  EXPECT_EQ(memory.bytes().size(), 8192u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.bytes().data()) % 4096, 0u);
  for (std::byte b : memory.bytes()) ASSERT_EQ(b, std::byte{0});
  PageMemory other = std::move(memory);
  EXPECT_EQ(other.bytes().size(), 8192u);
  EXPECT_TRUE(memory.bytes().empty());
}

}  // namespace
}  // namespace winnow::storage
