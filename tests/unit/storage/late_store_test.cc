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

// Answers about a block: it is there; blocks visited; blocks beside it; bytes of its tenant; it was pinned; its priority.
std::vector<int64_t> AnswersAbout(BlockStore& store, const BlockId& id) {
  int64_t visited = 0;
  store.ForEach([&](const BlockKey&, const BlockInfo&) { ++visited; });
  store.SetInUse(id.key, true);
  store.SetInUse(id.key, false);
  store.Raise(id.key, /*priority=*/5, /*ttl_s=*/0);
  const std::optional<BlockInfo> info = store.Find(id);
  return {store.Contains(id.key),
          visited,
          static_cast<int64_t>(store.AsidesOf(id.key.chain()).size()),
          static_cast<int64_t>(store.TenantBytes(id.tenant)),
          store.SetPinned(id.key, true),
          info.has_value() ? info->priority : -1};
}

TEST(LateStoreTest, HasNothingBeforeItIsOpenedAndThenAnswersAsWhatItOpened) {
  FakeClock clock;
  HostStoreOptions host;
  host.capacity_bytes = 1 << 20;
  host.chunk_bytes = 1 << 20;
  std::atomic<bool> room = false;
  LateStoreOptions options;
  options.open = [&]() -> absl::StatusOr<std::unique_ptr<BlockStore>> {
    if (!room) return absl::ResourceExhaustedError("no room");
    return std::make_unique<HostStore>(host, &clock);
  };
  options.pause = std::chrono::milliseconds(1);
  LateStore store(options);
  StoreClient client(&store);
  EXPECT_EQ(AnswersAbout(store, IdOf(1)), (std::vector<int64_t>{0, 0, 0, 0, 0, -1}));
  room = true;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!store.opened()) {
    ASSERT_LT(std::chrono::steady_clock::now(), limit);
    client.Finish();
  }
  HostStore direct(host, &clock);
  StoreClient direct_client(&direct);
  ASSERT_EQ(client.Put(IdOf(1), 5000), Reason::kNone);
  ASSERT_EQ(direct_client.Put(IdOf(1), 5000), Reason::kNone);
  EXPECT_EQ(client.GetPagesAndCheck(IdOf(1), 5000, {0}), Reason::kNone);
  const std::vector<int64_t> answers = AnswersAbout(store, IdOf(1));
  EXPECT_EQ(answers, AnswersAbout(direct, IdOf(1)));
  EXPECT_EQ(answers.front(), 1);
  EXPECT_EQ(answers.back(), 5);
  EXPECT_EQ(client.Erase(IdOf(1).key), Reason::kNone);
  EXPECT_FALSE(store.Contains(IdOf(1).key));
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
