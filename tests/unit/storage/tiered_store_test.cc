#include "storage/tiered_store.h"

#include <gtest/gtest.h>

#include "tests/fault/faulty_store.h"
#include "tests/unit/storage/store_client.h"

namespace winnow::storage {
namespace {

// Host of 1 MiB over a "disk" that is a larger HostStore, so that nothing but the tiers is tested.
class TieredStoreTest : public testing::Test {
 protected:
  static constexpr size_t kBytes = 16 * kPageBytes;  // 16 of them fill host

  void Make(TieredStoreOptions options = {}) {
    HostStoreOptions disk;
    disk.capacity_bytes = uint64_t{16} << 20;
    disk.chunk_bytes = uint64_t{4} << 20;
    auto faulty =
        std::make_unique<FaultyStore>(std::make_unique<HostStore>(disk, &clock_), TestSeed(5));
    disk_ = faulty.get();
    options.host.capacity_bytes = uint64_t{1} << 20;
    options.host.chunk_bytes = uint64_t{1} << 20;
    store_ = std::make_unique<TieredStore>(options, std::move(faulty), &clock_);
    client_ = std::make_unique<StoreClient>(store_.get());
  }

  FakeClock clock_;
  FaultyStore* disk_ = nullptr;
  std::unique_ptr<TieredStore> store_;
  std::unique_ptr<StoreClient> client_;
};

TEST_F(TieredStoreTest, HostAnswersWithoutDisk) {
  Make();
  ASSERT_EQ(client_->Put(IdOf(1), kBytes), Reason::kNone);
  EXPECT_TRUE(store_->Persisted(IdOf(1)));
  const uint64_t started = disk_->started;
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kBytes), Reason::kNone);
  EXPECT_EQ(client_->GetPagesAndCheck(IdOf(1), kBytes, {0, 9}), Reason::kNone);
  EXPECT_EQ(disk_->started, started);
}

TEST_F(TieredStoreTest, WhatLeavesHostIsFoundOnDiskUnderEitherPolicy) {
  for (bool write_through : {true, false}) {
    Make({.write_through = write_through});
    for (int i = 0; i < 50; ++i) ASSERT_EQ(client_->Put(IdOf(i), kBytes), Reason::kNone);
    client_->Finish();
    EXPECT_EQ(store_->demoted_blocks(), write_through ? 0u : 34u);
    for (int i = 0; i < 50; ++i) EXPECT_EQ(client_->GetAndCheck(IdOf(i), kBytes), Reason::kNone);
  }
}

TEST_F(TieredStoreTest, WhatABlockIsForGoesWithItFromTierToTier) {
  Make({.write_through = false});
  ASSERT_EQ(client_->Put(IdOf(0), kBytes, {.in_use = true, .transient = true}), Reason::kNone);
  ASSERT_EQ(client_->Put(IdOf(1), kBytes), Reason::kNone);
  // Down, behind all that nobody uses.
  for (int i = 2; store_->host().Find(IdOf(0)).has_value(); ++i) {
    ASSERT_LT(i, 100) << "never leaves";
    ASSERT_EQ(client_->Put(IdOf(i), kBytes, {.in_use = true}), Reason::kNone);
  }
  EXPECT_FALSE(store_->host().Find(IdOf(1)).has_value());
  ASSERT_TRUE(store_->Persisted(IdOf(0)));
  EXPECT_TRUE(store_->disk().Find(IdOf(0))->in_use && store_->disk().Find(IdOf(0))->transient);
  EXPECT_FALSE(store_->disk().Find(IdOf(1))->in_use || store_->disk().Find(IdOf(1))->transient);
  // Up, and no more in use.
  for (int i = 0; i < 3; ++i) ASSERT_EQ(client_->GetAndCheck(IdOf(0), kBytes), Reason::kNone);
  ASSERT_TRUE(store_->host().Find(IdOf(0)).has_value());
  EXPECT_TRUE(store_->host().Find(IdOf(0))->in_use && store_->host().Find(IdOf(0))->transient);
  store_->SetInUse(IdOf(0).key, false);
  EXPECT_FALSE(store_->host().Find(IdOf(0))->in_use || store_->disk().Find(IdOf(0))->in_use);
}

TEST_F(TieredStoreTest, ColdBlocksOfLowPriorityAreDroppedNotDemoted) {
  Make({.write_through = false, .demote_priority_min = 2});
  ASSERT_EQ(client_->Put(IdOf(0), kBytes, {.priority = 1}), Reason::kNone);
  ASSERT_EQ(client_->Put(IdOf(1), kBytes, {.priority = 2}), Reason::kNone);
  for (int i = 2; i < 40; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), kBytes, {.priority = 2}), Reason::kNone);
  }
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kBytes), Reason::kAbsent);
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kBytes), Reason::kNone);
}

TEST_F(TieredStoreTest, BlockThatComesBackIsPromotedOneThatIsScannedIsNot) {
  Make({.promote_after_reads = 2});
  for (int i = 0; i < 50; ++i) ASSERT_EQ(client_->Put(IdOf(i), kBytes), Reason::kNone);
  client_->GetAndCheck(IdOf(0), kBytes);
  EXPECT_FALSE(store_->host().Find(IdOf(0)).has_value());
  client_->GetAndCheck(IdOf(0), kBytes);
  EXPECT_TRUE(store_->host().Find(IdOf(0)).has_value());
  // Pages asked for often bring the whole block, in the background.
  client_->GetPagesAndCheck(IdOf(1), kBytes, {3});
  client_->GetPagesAndCheck(IdOf(1), kBytes, {5});
  std::vector<Completion> none;
  for (int i = 0; i < 3; ++i) store_->Poll(std::chrono::nanoseconds(0), &none);
  EXPECT_TRUE(none.empty());
  EXPECT_TRUE(store_->host().Find(IdOf(1)).has_value());
  EXPECT_EQ(store_->promoted_blocks(), 2u);
}

TEST_F(TieredStoreTest, PromotedCopyExpiresWithItsBlock) {
  Make({.promote_after_reads = 1});
  ASSERT_EQ(client_->Put(IdOf(0), kBytes, {.ttl_s = 100}), Reason::kNone);
  for (int i = 1; i < 40; ++i) ASSERT_EQ(client_->Put(IdOf(i), kBytes), Reason::kNone);
  clock_.AdvanceSeconds(50);
  ASSERT_EQ(client_->GetAndCheck(IdOf(0), kBytes), Reason::kNone);
  ASSERT_TRUE(store_->host().Find(IdOf(0)).has_value());
  clock_.AdvanceSeconds(51);
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kBytes), Reason::kAbsent);
}

TEST_F(TieredStoreTest, PageInFlightIsReadOnceForAllWhoAsk) {
  Make({.promote_after_reads = 1000});
  for (int i = 0; i < 40; ++i) ASSERT_EQ(client_->Put(IdOf(i), kBytes), Reason::kNone);
  disk_->faults.hold = true;
  const uint64_t started = disk_->started;
  const std::vector<std::vector<uint32_t>> asked = {
      {1, 2, 3}, {2, 3}, {3, 4}, {1, 2, 3, 4}, {4, 9}};
  std::vector<std::vector<std::byte>> into;
  for (const auto& pages : asked) into.emplace_back(pages.size() * kPageBytes);
  for (size_t i = 0; i < asked.size(); ++i) store_->GetPages(i, IdOf(0), asked[i], into[i], 0);
  std::vector<std::byte> whole_a(kBytes);
  std::vector<std::byte> whole_b(kBytes);
  store_->Get(10, IdOf(1), whole_a, 0);
  store_->Get(11, IdOf(1), whole_b, 0);
  disk_->faults.hold = false;
  EXPECT_EQ(client_->Finish().size(), 7u);
  EXPECT_EQ(disk_->started - started, 4u) << "pages 1-3, then 4, then 9, and one whole block";
  const auto all = BytesOf(IdOf(0), kBytes);
  for (size_t i = 0; i < asked.size(); ++i) {
    for (size_t j = 0; j < asked[i].size(); ++j) {
      EXPECT_EQ(std::memcmp(into[i].data() + j * kPageBytes, all.data() + asked[i][j] * kPageBytes,
                            kPageBytes),
                0);
    }
  }
  EXPECT_TRUE(whole_a == BytesOf(IdOf(1), kBytes));
  EXPECT_TRUE(whole_b == whole_a);
  EXPECT_EQ(store_->joined_reads(), 2u + 1u + 4u + 1u + 1u);
}

TEST_F(TieredStoreTest, EarlierDeadlineDoesNotWaitForALaterOnesRead) {
  Make({.promote_after_reads = 1000});
  for (int i = 0; i < 40; ++i) ASSERT_EQ(client_->Put(IdOf(i), kBytes), Reason::kNone);
  disk_->faults.hold = true;
  const uint64_t started = disk_->started;
  std::vector<std::byte> a(kPageBytes);
  std::vector<std::byte> b(kPageBytes);
  const uint32_t page = 1;
  store_->GetPages(1, IdOf(0), {&page, 1}, a, clock_.now_ns + 2'000'000);
  store_->GetPages(2, IdOf(0), {&page, 1}, b, clock_.now_ns + 1'000'000);
  EXPECT_EQ(disk_->started - started, 2u);
  disk_->faults.hold = false;
  client_->Finish();
}

TEST_F(TieredStoreTest, BlockErasedWhileItIsReadIsNotPromoted) {
  Make({.promote_after_reads = 1});
  for (int i = 0; i < 40; ++i) ASSERT_EQ(client_->Put(IdOf(i), kBytes), Reason::kNone);
  disk_->faults.polls_max = 3;
  std::vector<std::byte> into(kBytes);
  store_->Get(1, IdOf(0), into, 0);
  store_->Erase(2, IdOf(0).key);
  client_->Finish();
  EXPECT_FALSE(store_->Find(IdOf(0)).has_value());
}

// They are asked for after every step of an engine.
TEST_F(TieredStoreTest, StatsLookAtNoBlock) {
  for (const bool write_through : {true, false}) {
    Make({.write_through = write_through});
    for (int i = 0; i < 16; ++i) ASSERT_EQ(client_->Put(IdOf(i), kBytes), Reason::kNone);
    const uint64_t finds = disk_->finds;
    EXPECT_EQ(store_->stats().blocks, 16u);
    EXPECT_EQ(disk_->finds, finds);
  }
}

TEST_F(TieredStoreTest, DiskThatFailsDoesNotFailWhatHostHolds) {
  Make();
  disk_->faults.miss_share = 1;
  ASSERT_EQ(client_->Put(IdOf(0), kBytes), Reason::kNone);
  EXPECT_FALSE(store_->Persisted(IdOf(0)));
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kBytes), Reason::kNone);
  EXPECT_NE(client_->GetAndCheck(IdOf(1), kBytes), Reason::kNone);
  EXPECT_NE(client_->GetPagesAndCheck(IdOf(1), kBytes, {2}), Reason::kNone);
}

TEST_F(TieredStoreTest, RandomFaultsBelowNeverGiveWrongBytes) {
  const uint32_t seed = TestSeed(66);
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (bool write_through : {true, false}) {
    Make({.write_through = write_through, .promote_after_reads = 2});
    disk_->faults = {.miss_share = 0.1, .lose_share = 0.1, .polls_max = 4, .reorder = true};
    std::map<uint64_t, std::pair<BlockId, std::vector<std::byte>>> gets;
    std::map<uint64_t, std::vector<uint32_t>> pages;
    std::vector<Completion> done;
    int hits = 0;
    for (uint64_t tag = 1; tag < 4000; ++tag) {
      const BlockId id = IdOf(random() % 40);
      switch (random() % 6) {
        case 0:
        case 1:
          store_->Put(tag, id, BytesOf(id, kBytes), {});
          break;
        case 2:
          if (random() % 4 == 0) store_->Erase(tag, id.key);
          break;
        case 3:
          gets[tag] = {id, std::vector<std::byte>(kBytes, std::byte{0xee})};
          store_->Get(tag, id, gets[tag].second, 0);
          break;
        default: {
          std::vector<uint32_t>& chosen = pages[tag];
          for (uint32_t page = 0; page < 16; ++page) {
            if (random() % 4 == 0) chosen.push_back(page);
          }
          gets[tag] = {id, std::vector<std::byte>(chosen.size() * kPageBytes, std::byte{0xee})};
          store_->GetPages(tag, id, chosen, gets[tag].second, 0);
        }
      }
      done.clear();
      store_->Poll(std::chrono::nanoseconds(0), &done);
      for (const Completion& completion : done) {
        const auto it = gets.find(completion.tag);
        if (it == gets.end()) continue;
        const auto& [asked, bytes] = it->second;
        std::vector<std::byte> right;
        const auto all = BytesOf(asked, kBytes);
        if (completion.operation == Operation::kGet) {
          right = all;
        } else {
          for (uint32_t page : pages[completion.tag]) {
            right.insert(right.end(), all.begin() + page * kPageBytes,
                         all.begin() + (page + 1) * kPageBytes);
          }
        }
        if (completion.outcome != Outcome::kOk) right.assign(right.size(), std::byte{0xee});
        ASSERT_TRUE(bytes == right);
        hits += completion.outcome == Outcome::kOk;
        gets.erase(it);
      }
    }
    EXPECT_GT(hits, 500);
    client_->Finish();
  }
}

}  // namespace
}  // namespace winnow::storage
