#include "engine/kv/row_cache.h"

#include <cstring>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/engine/sequence_runner.h"

namespace winnow::engine {
namespace {

constexpr size_t kRowBytes = 64;

std::vector<std::byte> RowOf(const RowCache::Key& key) {
  std::vector<std::byte> row(kRowBytes);
  const uint64_t values[] = {static_cast<uint64_t>(key.part), key.generation, key.token};
  std::memcpy(row.data(), values, sizeof values);
  return row;
}

RowCache Make(size_t size_bytes, int32_t parts) {
  const auto backend = kernels::MakeCpuBackend("scalar", 1);
  auto cache = RowCache::Create(*backend, size_bytes, parts, kRowBytes);
  EXPECT_TRUE(cache.ok()) << cache.status();
  return *std::move(cache);
}

TEST(RowCacheTest, WhatIsFoundIsWhatWasInserted) {
  const uint64_t seed = testing::TestSeed();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  RowCache cache = Make(1 << 16, 6);
  EXPECT_LE(cache.size_bytes(), size_t{1} << 16);
  int found = 0;
  for (int i = 0; i < 50'000; ++i) {
    const RowCache::Key key{static_cast<int32_t>(random() % 6), static_cast<uint32_t>(random() % 3),
                            static_cast<uint32_t>(random() % 400)};
    const std::vector<std::byte> row = RowOf(key);
    if (const std::byte* hit = cache.Find(key)) {
      ++found;
      ASSERT_EQ(std::memcmp(hit, row.data(), kRowBytes), 0);
    } else {
      cache.Insert(key, row.data());
      const std::byte* now = cache.Find(key);
      ASSERT_NE(now, nullptr);
      ASSERT_EQ(std::memcmp(now, row.data(), kRowBytes), 0);
    }
  }
  EXPECT_GT(found, 1000);
}

TEST(RowCacheTest, ABlocksOldContentIsNotFound) {
  RowCache cache = Make(1 << 16, 1);
  const RowCache::Key old_key{0, 7, 100};
  cache.Insert(old_key, RowOf(old_key).data());
  EXPECT_EQ(cache.Find({0, 8, 100}), nullptr);
  EXPECT_NE(cache.Find(old_key), nullptr);
}

TEST(RowCacheTest, APartKeepsItsRowsWhateverOthersRead) {
  RowCache cache = Make(1 << 16, 2);
  const auto rows = static_cast<uint32_t>(cache.rows() / 2);
  for (uint32_t token = 0; token < rows / 2; ++token) {
    const RowCache::Key key{0, 1, token};
    cache.Insert(key, RowOf(key).data());
  }
  for (uint32_t token = 0; token < 20 * rows; ++token) {
    const RowCache::Key key{1, 1, token};
    cache.Insert(key, RowOf(key).data());
  }
  for (uint32_t token = 0; token < rows / 2; ++token) {
    EXPECT_NE(cache.Find({0, 1, token}), nullptr) << token;
  }
}

TEST(RowCacheTest, WithoutRoomItHoldsNothing) {
  RowCache cache = Make(100, 4);
  EXPECT_EQ(cache.rows(), 0);
  const RowCache::Key key{0, 1, 2};
  cache.Insert(key, RowOf(key).data());
  EXPECT_EQ(cache.Find(key), nullptr);
}

}  // namespace
}  // namespace winnow::engine
