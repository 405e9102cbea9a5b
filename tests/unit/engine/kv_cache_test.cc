#include "engine/kv/kv_cache.h"

#include <memory>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace winnow::engine {
namespace {

TEST(BlocksForTest, RoundsUp) {
  EXPECT_EQ(BlocksFor(0, 64), 0);
  EXPECT_EQ(BlocksFor(1, 64), 1);
  EXPECT_EQ(BlocksFor(64, 64), 1);
  EXPECT_EQ(BlocksFor(65, 64), 2);
  EXPECT_EQ(BlocksFor(int64_t{1} << 31, 64), 1 << 25);
}

TEST(BlockPoolTest, GivesEveryBlockOnce) {
  BlockPool pool(10);
  std::set<int32_t> seen;
  while (pool.num_free() > 0) seen.insert(pool.Take());
  EXPECT_EQ(seen.size(), 10u);
  EXPECT_EQ(*seen.begin(), 0);
  EXPECT_EQ(*seen.rbegin(), 9);
  EXPECT_EQ(pool.num_used(), 10);
}

TEST(BlockPoolDeathTest, GivingBackTwiceIsABug) {
  BlockPool pool(2);
  const int32_t block = pool.Take();
  pool.Give(block);
  EXPECT_DEATH(pool.Give(block), "CHECK failed");
}

TEST(BlockPoolDeathTest, TakingFromAnEmptyPoolIsABug) {
  BlockPool pool(1);
  pool.Take();
  EXPECT_DEATH(pool.Take(), "CHECK failed");
}

Digest Name(uint8_t text) {
  Digest name = {};
  name[0] = text;
  return name;
}

TEST(BlockPoolTest, WhatIsPublishedIsFoundUntilItsBlockIsNeeded) {
  BlockPool pool(2);
  const int32_t first = pool.Take();
  pool.Publish(first, Name(1));
  EXPECT_EQ(pool.Find(Name(1)), first);
  EXPECT_EQ(pool.Find(Name(2)), std::nullopt);
  pool.Give(first);
  EXPECT_EQ(pool.num_idle(), 1);
  EXPECT_EQ(pool.num_used(), 0);
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_EQ(pool.Find(Name(1)), first);  // idle, but there

  const int32_t second = pool.Take();  // the free one, not the idle one
  EXPECT_NE(second, first);
  EXPECT_EQ(pool.Find(Name(1)), first);
  EXPECT_EQ(pool.Take(), first);
  EXPECT_EQ(pool.Find(Name(1)), std::nullopt);
  pool.Give(first);
  pool.Give(second);
  EXPECT_EQ(pool.num_idle(), 0);
}

TEST(BlockPoolTest, ABlockIsHeldUntilItsLastHolderGivesIt) {
  BlockPool pool(1);
  const int32_t block = pool.Take();
  pool.Publish(block, Name(1));
  pool.Share(block);
  pool.Share(block);
  pool.Give(block);
  pool.Give(block);
  EXPECT_EQ(pool.num_used(), 1);
  pool.Give(block);
  EXPECT_EQ(pool.num_used(), 0);
  pool.Share(block);  // an idle one is held again
  EXPECT_EQ(pool.num_idle(), 0);
  EXPECT_EQ(pool.num_used(), 1);
  pool.Withdraw(block);
  EXPECT_EQ(pool.Find(Name(1)), std::nullopt);
  pool.Give(block);
  EXPECT_EQ(pool.num_idle(), 0);
  EXPECT_EQ(pool.num_free(), 1);
}

TEST(BlockPoolTest, TheOldestIdleBlockGoesFirstAndAPrefixFromItsEnd) {
  BlockPool pool(4);
  std::vector<int32_t> blocks;
  {
    KvCache cache(pool, 4);
    cache.Grow(4);
    blocks.assign(cache.block_table().begin(), cache.block_table().end());
    for (int i = 0; i < 4; ++i) pool.Publish(blocks[i], Name(static_cast<uint8_t>(i)));
  }
  EXPECT_EQ(pool.num_idle(), 4);
  for (int i = 3; i >= 0; --i) EXPECT_EQ(pool.Take(), blocks[i]);
  for (const int32_t block : blocks) pool.Give(block);
}

TEST(BlockPoolTest, TheFirstBlockOfANameStaysItsBlock) {
  BlockPool pool(2);
  const int32_t first = pool.Take(), second = pool.Take();
  pool.Publish(first, Name(1));
  pool.Publish(second, Name(1));
  EXPECT_EQ(pool.Find(Name(1)), first);
  pool.Give(second);
  EXPECT_EQ(pool.num_idle(), 0);  // nobody could find it
  pool.Give(first);
  EXPECT_EQ(pool.num_idle(), 1);
}

TEST(BlockPoolTest, IdleBlocksOfALowerPriorityGoFirst) {
  constexpr int kBlocks = 5;
  BlockPool pool(kBlocks);
  const auto name = [](uint8_t value) {
    Digest digest = {};
    digest[0] = value;
    return digest;
  };
  int32_t blocks[kBlocks];
  for (int32_t& block : blocks) block = pool.Take();
  for (uint8_t i = 0; i < kBlocks; ++i) EXPECT_TRUE(pool.Publish(blocks[i], name(i)));
  EXPECT_TRUE(pool.SetPriority(name(0), 5));  // held
  for (const int32_t block : blocks) pool.Give(block);
  EXPECT_TRUE(pool.SetPinned(name(1), true));
  EXPECT_TRUE(pool.SetPriority(name(1), 0));  // it stays pinned
  EXPECT_TRUE(pool.SetPriority(name(3), 1));  // idle
  EXPECT_FALSE(pool.SetPriority(name(9), 1));
  EXPECT_EQ(pool.num_idle(), kBlocks);
  for (const int i : {3, 2, 4, 0, 1}) EXPECT_EQ(pool.Take(), blocks[i]);
  // With its name it loses its priority.
  EXPECT_TRUE(pool.Publish(blocks[0], name(7)));
  EXPECT_TRUE(pool.Publish(blocks[2], name(8)));
  EXPECT_TRUE(pool.SetPriority(name(8), 4));
  pool.Give(blocks[2]);
  pool.Give(blocks[0]);
  EXPECT_EQ(pool.Take(), blocks[0]);
  for (const int i : {0, 1, 3, 4}) pool.Give(blocks[i]);
}

TEST(BlockPoolTest, PinnedIdleBlocksGoLastAndDroppedOnesAtOnce) {
  BlockPool pool(3);
  const auto name = [](uint8_t value) {
    Digest digest = {};
    digest[0] = value;
    return digest;
  };
  int32_t blocks[3];
  for (int32_t& block : blocks) block = pool.Take();
  for (uint8_t i = 0; i < 3; ++i) EXPECT_TRUE(pool.Publish(blocks[i], name(i)));
  EXPECT_TRUE(pool.SetPinned(name(0), true));  // held
  for (const int32_t block : blocks) pool.Give(block);
  EXPECT_TRUE(pool.SetPinned(name(1), true));  // idle
  EXPECT_TRUE(pool.SetPinned(name(1), true));
  EXPECT_FALSE(pool.SetPinned(name(9), true));
  EXPECT_EQ(pool.num_idle(), 3);
  EXPECT_EQ(pool.Take(), blocks[2]);
  EXPECT_TRUE(pool.Drop(name(1)));
  EXPECT_FALSE(pool.Drop(name(1)));
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_EQ(pool.num_idle(), 1);
  EXPECT_EQ(pool.Take(), blocks[1]);
  EXPECT_TRUE(pool.Find(name(0)).has_value());
  EXPECT_EQ(pool.Take(), blocks[0]) << "pinned, and nothing else is left";
  // Its pin went with its name.
  EXPECT_TRUE(pool.Publish(blocks[0], name(0)));
  EXPECT_TRUE(pool.Publish(blocks[1], name(1)));
  EXPECT_TRUE(pool.Drop(name(1)));  // held: given back it is free
  pool.Give(blocks[0]);
  pool.Give(blocks[1]);
  pool.Give(blocks[2]);
  EXPECT_EQ(pool.num_idle(), 1);
}

TEST(KvCacheTest, AdoptedBlocksAreFullOnes) {
  BlockPool pool(4);
  const int32_t block = pool.Take();
  {
    KvCache cache(pool, 4);
    cache.Adopt(block);
    EXPECT_EQ(cache.num_tokens(), 4);
    cache.Grow(1);
    cache.Append(1);
    EXPECT_EQ(cache.num_tokens(), 5);
    EXPECT_EQ(cache.block_table()[0], block);
  }
  EXPECT_EQ(pool.num_used(), 0);
}

TEST(KvCacheTest, GivesItsBlocksBackWhenItGoes) {
  BlockPool pool(8);
  {
    KvCache cache(pool, 4);
    cache.Grow(3);
    cache.Append(12);
    EXPECT_EQ(pool.num_used(), 3);
    EXPECT_EQ(cache.num_tokens(), 12);
  }
  EXPECT_EQ(pool.num_used(), 0);
}

TEST(KvCacheTest, ReleaseForgetsItsTokens) {
  BlockPool pool(8);
  KvCache cache(pool, 4);
  cache.Grow(2);
  cache.Append(5);
  cache.Release();
  EXPECT_EQ(cache.num_tokens(), 0);
  EXPECT_EQ(cache.num_blocks(), 0);
  EXPECT_EQ(pool.num_used(), 0);
}

TEST(KvCacheDeathTest, TokensWithoutBlocksAreABug) {
  BlockPool pool(8);
  KvCache cache(pool, 4);
  cache.Grow(1);
  EXPECT_DEATH(cache.Append(5), "CHECK failed");
}

TEST(KvCacheTest, NoBlockIsEverInTwoTables) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto pick = [&random](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(random);
    };
    BlockPool pool(32);
    std::vector<std::unique_ptr<KvCache>> caches;
    for (int i = 0; i < 6; ++i) caches.push_back(std::make_unique<KvCache>(pool, 4));
    for (int step = 0; step < 300; ++step) {
      KvCache& cache = *caches[pick(0, 5)];
      if (pick(0, 5) == 0) {
        cache.Release();
      } else {
        cache.Grow(std::min(pick(0, 4), pool.num_free()));
      }
      std::set<int32_t> seen;
      size_t total = 0;
      for (const auto& each : caches) {
        seen.insert(each->block_table().begin(), each->block_table().end());
        total += each->block_table().size();
      }
      ASSERT_EQ(seen.size(), total);
      ASSERT_EQ(pool.num_used(), static_cast<int32_t>(total));
    }
    caches.clear();
    EXPECT_EQ(pool.num_used(), 0);
  }
}

}  // namespace
}  // namespace winnow::engine
