#include "engine/kv_cache.h"

#include <memory>
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
