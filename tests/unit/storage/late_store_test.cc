#include "storage/late_store.h"

#include <gtest/gtest.h>

#include <atomic>

#include "storage/host_store.h"
#include "tests/unit/storage/store_client.h"

namespace winnow::storage {
namespace {

TEST(LateStoreTest, IsOffUntilItCanBeOpened) {
  FakeClock clock;
  std::atomic<bool> room = false;
  std::atomic<int> tries = 0;
  std::vector<std::string> log;
  LateStoreOptions options;
  options.open = [&]() -> absl::StatusOr<std::unique_ptr<BlockStore>> {
    ++tries;
    if (!room) return absl::ResourceExhaustedError("no room");
    HostStoreOptions host;
    host.capacity_bytes = 1 << 20;
    host.chunk_bytes = 1 << 20;
    return std::make_unique<HostStore>(host, &clock);
  };
  options.capacity_bytes = 77;
  options.pause = std::chrono::milliseconds(1);
  options.log = [&](const std::string& line) { log.push_back(line); };
  LateStore store(options);
  StoreClient client(&store);
  EXPECT_EQ(client.Put(IdOf(1), 5000), Reason::kOff);
  EXPECT_EQ(client.GetAndCheck(IdOf(1), 5000), Reason::kOff);
  EXPECT_EQ(client.GetPagesAndCheck(IdOf(1), 5000, {0}), Reason::kOff);
  EXPECT_EQ(client.Erase(IdOf(1).key), Reason::kOff);
  EXPECT_FALSE(store.Find(IdOf(1)).has_value());
  EXPECT_FALSE(store.SetPinned(IdOf(1).key, true));
  EXPECT_EQ(store.state(), TierState::kOff);
  EXPECT_EQ(store.stats().state, TierState::kOff);
  EXPECT_EQ(store.stats().capacity_bytes, 77u);
  EXPECT_TRUE(store.idle());
  while (tries < 3) {
    client.Finish();
  }
  EXPECT_FALSE(store.opened());
  room = true;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!store.opened()) {
    ASSERT_LT(std::chrono::steady_clock::now(), limit);
    client.Finish();
  }
  EXPECT_EQ(log.size(), 1u);
  EXPECT_EQ(client.Put(IdOf(1), 5000), Reason::kNone);
  EXPECT_EQ(client.GetAndCheck(IdOf(1), 5000), Reason::kNone);
  EXPECT_EQ(store.state(), TierState::kOk);
}

TEST(LateStoreTest, ItsEndStopsTheTries) {
  LateStoreOptions options;
  options.open = []() -> absl::StatusOr<std::unique_ptr<BlockStore>> {
    return absl::ResourceExhaustedError("no room");
  };
  options.pause = std::chrono::hours(1);
  LateStore store(options);
}

}  // namespace
}  // namespace winnow::storage
