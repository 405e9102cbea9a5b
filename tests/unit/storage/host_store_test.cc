#include "storage/host_store.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/unit/storage/store_client.h"

namespace winnow::storage {
namespace {

class HostStoreTest : public testing::Test {
 protected:
  void Make(uint64_t capacity_bytes) {
    HostStoreOptions options;
    options.capacity_bytes = capacity_bytes;
    options.chunk_bytes = 64 * kPageBytes;
    options.on_chunk = [this](std::span<std::byte> chunk) { chunks_.push_back(chunk); };
    options.on_evict = [this](const BlockId& id, std::span<const std::byte> payload,
                              const PutOptions&) {
      EXPECT_TRUE(std::ranges::equal(payload, BytesOf(id, payload.size())));
      evicted_.push_back(id.token_block);
    };
    store_ = std::make_unique<HostStore>(options, &clock_);
    client_ = std::make_unique<StoreClient>(store_.get());
  }

  FakeClock clock_;
  std::vector<std::span<std::byte>> chunks_;
  std::vector<uint64_t> evicted_;
  std::unique_ptr<HostStore> store_;
  std::unique_ptr<StoreClient> client_;
};

TEST_F(HostStoreTest, ArenaGrowsChunkByChunkAndEachIsSeenOnce) {
  Make(200 * kPageBytes);  // three chunks of 64 pages and one of 8
  EXPECT_TRUE(chunks_.empty());
  ASSERT_EQ(client_->Put(IdOf(0), kPageBytes), Reason::kNone);
  EXPECT_EQ(chunks_.size(), 1u);
  for (int i = 1; i < 300; ++i) ASSERT_EQ(client_->Put(IdOf(i), kPageBytes), Reason::kNone);
  EXPECT_EQ(chunks_.size(), 4u);
  EXPECT_EQ(store_->stats().used_bytes, 200 * kPageBytes);
  EXPECT_EQ(evicted_.size(), 100u);
}

TEST_F(HostStoreTest, LeastRecentlyUsedLeavesFirstAndIsSeenLeaving) {
  Make(64 * kPageBytes);
  for (int i = 0; i < 4; ++i) ASSERT_EQ(client_->Put(IdOf(i), 16 * kPageBytes), Reason::kNone);
  client_->GetAndCheck(IdOf(0), 16 * kPageBytes);
  ASSERT_EQ(client_->Put(IdOf(4), 16 * kPageBytes), Reason::kNone);
  ASSERT_EQ(client_->Put(IdOf(5), 16 * kPageBytes), Reason::kNone);
  EXPECT_EQ(evicted_, (std::vector<uint64_t>{1, 2}));
}

TEST_F(HostStoreTest, LeasedBytesStayWhateverHappensAndAreFreedOnce) {
  Make(64 * kPageBytes);
  ASSERT_EQ(client_->Put(IdOf(0), 20 * kPageBytes), Reason::kNone);
  HostStore::Lease lease = store_->Acquire(IdOf(0));
  ASSERT_TRUE(lease);
  for (int i = 1; i < 50; ++i) ASSERT_EQ(client_->Put(IdOf(i), 10 * kPageBytes), Reason::kNone);
  EXPECT_TRUE(std::ranges::equal(lease.bytes(), BytesOf(IdOf(0), 20 * kPageBytes)));
  EXPECT_EQ(client_->Erase(IdOf(0).key), Reason::kNone);
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), 20 * kPageBytes), Reason::kAbsent);
  for (int i = 50; i < 99; ++i) ASSERT_EQ(client_->Put(IdOf(i), 10 * kPageBytes), Reason::kNone);
  EXPECT_TRUE(std::ranges::equal(lease.bytes(), BytesOf(IdOf(0), 20 * kPageBytes)));
  const uint64_t before_bytes = store_->stats().used_bytes;
  lease = {};
  EXPECT_EQ(store_->stats().used_bytes, before_bytes - 20 * kPageBytes);
}

// A machine that gives no more memory (a limit of the process or its container) costs blocks only.
TEST_F(HostStoreTest, MemoryThatIsRefusedIsSaidOnceAndCostsBlocksOnly) {
  std::vector<std::string> lines;
  HostStoreOptions options;
  // More than there are addresses.
  options.capacity_bytes = options.chunk_bytes = uint64_t{1} << 47;
  options.log = [&](const std::string& line) { lines.push_back(line); };
  store_ = std::make_unique<HostStore>(options, &clock_);
  client_ = std::make_unique<StoreClient>(store_.get());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(client_->Put(IdOf(i), kPageBytes), Reason::kFull);
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kPageBytes), Reason::kAbsent);
  EXPECT_EQ(lines.size(), 1u);
  EXPECT_EQ(store_->stats().used_bytes, 0u);
}

TEST_F(HostStoreTest, EverythingLeasedOrPinnedRefusesMore) {
  Make(64 * kPageBytes);
  ASSERT_EQ(client_->Put(IdOf(0), 32 * kPageBytes, {.pinned = true}), Reason::kNone);
  ASSERT_EQ(client_->Put(IdOf(1), 32 * kPageBytes), Reason::kNone);
  const HostStore::Lease lease = store_->Acquire(IdOf(1));
  EXPECT_EQ(client_->Put(IdOf(2), kPageBytes), Reason::kFull);
}

TEST_F(HostStoreTest, FlippedBitInMemoryIsAMiss) {
  Make(64 * kPageBytes);
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), 5 * kPageBytes), Reason::kNone);
  }
  for (std::byte& byte : chunks_[0].subspan(0, 15 * kPageBytes)) byte ^= std::byte{4};
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), 5 * kPageBytes), Reason::kCorrupt);
  EXPECT_EQ(client_->GetPagesAndCheck(IdOf(1), 5 * kPageBytes, {3}), Reason::kCorrupt);
  EXPECT_FALSE(store_->Acquire(IdOf(2)));
  EXPECT_EQ(store_->stats().corrupt_blocks, 3u);
  EXPECT_EQ(store_->stats().used_bytes, 0u);
}

TEST_F(HostStoreTest, AccountingIsExactOverRandomOperations) {
  const uint32_t seed = TestSeed(8);
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  Make(128 * kPageBytes);
  std::map<uint64_t, HostStore::Lease> leases;
  for (int round = 0; round < 3000; ++round) {
    const uint64_t number = random() % 60;
    const size_t bytes = 1 + number * 613 % 60000;
    switch (random() % 4) {
      case 0:
        client_->Put(IdOf(number), bytes);
        break;
      case 1:
        client_->Erase(IdOf(number).key);
        break;
      case 2:
        if (leases.size() < 3) {
          if (auto lease = store_->Acquire(IdOf(number))) leases[round] = std::move(lease);
        }
        break;
      default:
        if (!leases.empty()) leases.erase(leases.begin());
    }
    uint64_t live_bytes = 0;
    for (uint64_t i = 0; i < 60; ++i) {
      if (const auto info = store_->Find(IdOf(i))) live_bytes += PageAlign(info->payload_bytes);
    }
    ASSERT_GE(store_->stats().used_bytes, live_bytes);
    if (leases.empty()) {
      ASSERT_EQ(store_->stats().used_bytes, live_bytes);
    }
  }
}

}  // namespace
}  // namespace winnow::storage
