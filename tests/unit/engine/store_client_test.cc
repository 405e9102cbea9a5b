#include "engine/kv/store_client.h"

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "storage/clock.h"
#include "storage/format.h"
#include "storage/host_store.h"
#include "tests/fault/faulty_store.h"
#include "tests/unit/engine/sequence_runner.h"

namespace winnow::engine {
namespace {

constexpr int32_t kLayers = 2;
constexpr size_t kBytes = 3 * 4096;

BlockName NameOf(int number) {
  BlockName name;
  name.chain[0] = static_cast<uint8_t>(number);
  name.chain[1] = static_cast<uint8_t>(number >> 8);
  name.tenant[0] = 7;
  return name;
}

std::vector<std::byte> ContentOf(int number, int32_t layer) {
  std::mt19937 random(static_cast<uint32_t>(number * kLayers + layer));
  std::vector<std::byte> content(kBytes);
  for (std::byte& byte : content) byte = static_cast<std::byte>(random());
  return content;
}

struct Answers final : StoreClient::Receiver {
  void OnAnswer(uint64_t number, const StoreAnswer& answer) override {
    EXPECT_TRUE(by_number.emplace(number, answer).second) << "answered twice";
  }
  std::map<uint64_t, StoreAnswer> by_number;
};

class StoreClientTest : public ::testing::Test {
 protected:
  StoreClientTest() : random_(testing::TestSeed()) {}

  static storage::HostStoreOptions Options() {
    storage::HostStoreOptions options;
    options.capacity_bytes = options.chunk_bytes = 16 << 20;
    return options;
  }
  void Save(int number, int32_t layer, bool keep = true) {
    client_.Save({&saves_, ++last_}, NameOf(number), layer, ContentOf(number, layer),
                 {.keep = keep});
  }
  void Finish() {
    client_.Wait([&] { return client_.in_flight() == 0; });
  }

  std::mt19937_64 random_;
  storage::SystemClock clock_;
  storage::FaultyStore store_{std::make_unique<storage::HostStore>(Options(), &clock_),
                              static_cast<uint32_t>(random_())};
  StoreClient client_{&store_, {}, kLayers, kBytes};
  Answers saves_;
  uint64_t last_ = 0;
};

TEST_F(StoreClientTest, EveryAnswerGoesToItsReceiverUnderItsNumber) {
  store_.faults.reorder = true;
  store_.faults.polls_max = 3;
  constexpr int kBlocks = 30;
  for (int i = 0; i < kBlocks; ++i) {
    for (int32_t layer = 0; layer < kLayers; ++layer) Save(i, layer);
  }
  Finish();
  ASSERT_EQ(saves_.by_number.size(), size_t{kBlocks} * kLayers);
  for (const auto& [number, answer] : saves_.by_number) EXPECT_TRUE(answer.ok) << number;

  // Two receivers with the same numbers, whole layer blocks and pages, and some that are not there.
  Answers whole, pages;
  std::vector<std::vector<std::byte>> into(kBlocks + 5, std::vector<std::byte>(kBytes));
  std::vector<std::vector<std::byte>> page(kBlocks + 5, std::vector<std::byte>(4096));
  for (int i = 0; i < kBlocks + 5; ++i) {
    client_.Load({&whole, static_cast<uint64_t>(i)}, NameOf(i), 1, into[i]);
    const uint32_t second[] = {1};
    client_.LoadPages({&pages, static_cast<uint64_t>(i)}, NameOf(i), 0, second, page[i]);
  }
  Finish();
  for (int i = 0; i < kBlocks + 5; ++i) {
    ASSERT_EQ(whole.by_number.at(i).ok, i < kBlocks);
    ASSERT_EQ(pages.by_number.at(i).ok, i < kBlocks);
    if (i >= kBlocks) continue;
    EXPECT_EQ(into[i], ContentOf(i, 1));
    const std::vector<std::byte> content = ContentOf(i, 0);
    EXPECT_TRUE(std::equal(page[i].begin(), page[i].end(), content.begin() + 4096));
  }
  EXPECT_GE(client_.waits(), 2u);
}

TEST_F(StoreClientTest, PayloadsAreKeptAsTheirBlockIs) {
  const TimePoint now = TimePoint(std::chrono::hours(5));
  client_.SetNow(now);
  EXPECT_EQ(client_.KeptAs(NameOf(1)), std::nullopt);
  Retention retention{.priority = 5, .expires = now + std::chrono::milliseconds(99'001)};
  client_.SetRetentions(
      [&](const Digest& chain) { return chain == NameOf(1).chain ? &retention : nullptr; });
  const storage::BlockId side = client_.names().Id(NameOf(1), 100, 0);
  const auto expect = [&](const storage::BlockId& id, uint8_t priority, uint32_t ttl_s) {
    const auto info = store_.Find(id);
    ASSERT_TRUE(info.has_value());
    EXPECT_EQ(info->priority, priority);
    EXPECT_NEAR(info->ttl_s, ttl_s, ttl_s == 0 ? 0 : 1);
  };
  for (const int number : {1, 2}) {
    for (int32_t layer = 0; layer < kLayers; ++layer) Save(number, layer);
  }
  client_.PutSide(side, ContentOf(1, 0));
  Finish();
  expect(client_.IdOf(NameOf(1), 0), 5, 100);  // whole seconds, and none too few
  expect(client_.IdOf(NameOf(2), 0), kPriorityNormal, 0);
  expect(side, 5, 100);
  ASSERT_TRUE(client_.KeptAs(NameOf(1)).has_value());
  EXPECT_EQ(client_.KeptAs(NameOf(1))->priority, 5);
  EXPECT_NEAR(std::chrono::duration<double>(*client_.KeptAs(NameOf(1))->expires - now).count(), 100,
              1);
  EXPECT_EQ(client_.KeptAs(NameOf(2))->expires, std::nullopt);
  // Also what is on its way.
  const storage::BlockId coming = client_.names().Id(NameOf(1), 101, 0);
  store_.faults.hold = true;
  client_.PutSide(coming, ContentOf(2, 0));
  client_.Raise(NameOf(1), {.priority = 6});
  store_.faults.hold = false;
  Finish();
  for (int32_t layer = 0; layer < kLayers; ++layer) expect(client_.IdOf(NameOf(1), layer), 6, 0);
  expect(side, 6, 0);
  expect(coming, 6, 0);
  expect(client_.IdOf(NameOf(2), 0), kPriorityNormal, 0);
  // A payload without time left when it is saved is not kept for good.
  retention.expires = now - std::chrono::seconds(1);
  const storage::BlockId late = client_.names().Id(NameOf(1), 102, 0);
  client_.PutSide(late, ContentOf(3, 0));
  Finish();
  if (const auto info = store_.Find(late)) {
    EXPECT_EQ(info->ttl_s, 1u);
  }
}

TEST_F(StoreClientTest, ABlockIsStoredWhenAllItsLayersAre) {
  Save(1, 0);
  Finish();
  EXPECT_FALSE(client_.Stored(NameOf(1)));
  EXPECT_FALSE(client_.SetPinned(NameOf(1), true));
  Save(1, 1);
  Finish();
  EXPECT_TRUE(client_.Stored(NameOf(1)));
  EXPECT_TRUE(client_.SetPinned(NameOf(1), true));
  EXPECT_EQ(client_.PinnedChains(), std::vector<Digest>{NameOf(1).chain});
  EXPECT_GE(client_.TenantBytes(NameOf(1).tenant), kLayers * kBytes);
  client_.SetInUse(NameOf(1), true);
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_TRUE(store_.Find(client_.IdOf(NameOf(1), layer))->in_use);
    EXPECT_FALSE(store_.Find(client_.IdOf(NameOf(1), layer))->transient);
  }
  client_.Erase(NameOf(1));
  Finish();
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_FALSE(store_.Find(client_.IdOf(NameOf(1), layer)).has_value());
  }
}

TEST_F(StoreClientTest, WhatIsNotToBeKeptIsOfThisProcessOnly) {
  Save(1, 0, /*keep=*/false);
  Finish();
  EXPECT_TRUE(store_.Find(client_.IdOf(NameOf(1), 0))->transient);
}

TEST_F(StoreClientTest, AfterFailuresInARowNothingIsSavedUntilTheyAreForgiven) {
  store_.faults.miss_share = 1;
  for (int i = 0; i < 7; ++i) Save(i, 0);
  Finish();
  EXPECT_TRUE(client_.AcceptsSaves());
  Save(7, 0);
  Finish();
  EXPECT_FALSE(client_.AcceptsSaves());
  client_.ForgiveFailures();
  EXPECT_TRUE(client_.AcceptsSaves());
  // One that succeeds ends the row.
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 7; ++i) Save(i, 0);
    Finish();
    store_.faults.miss_share = 0;
    Save(100 + round, 0);
    Finish();
    store_.faults.miss_share = 1;
    EXPECT_TRUE(client_.AcceptsSaves()) << round;
  }
  store_.faults.miss_share = 0;
  store_.faults.state = storage::TierState::kDegraded;
  EXPECT_FALSE(client_.AcceptsSaves());
}

TEST_F(StoreClientTest, WhatBelongsToABlockIsReadTogether) {
  storage::BlockId ids[6];
  for (uint32_t i = 0; i < 6; ++i) {
    ids[i] = client_.names().Id(NameOf(1), /*kind=*/100 + i, 0);
    if (i != 3) client_.PutSide(ids[i], ContentOf(static_cast<int>(i), 0));
  }
  Finish();
  EXPECT_EQ(client_.SideBytes(ids[0]), kBytes);
  EXPECT_EQ(client_.SideBytes(ids[3]), 0u);
  store_.faults.reorder = true;
  std::vector<std::vector<std::byte>> into(6, std::vector<std::byte>(kBytes));
  std::vector<StoreClient::SideRead> reads;
  for (size_t i = 0; i < 6; ++i) reads.push_back({.id = ids[i], .bytes = kBytes, .into = into[i]});
  client_.GetSides(reads);
  for (size_t i = 0; i < 6; ++i) {
    ASSERT_EQ(reads[i].good, i != 3) << i;
    if (reads[i].good) {
      EXPECT_EQ(into[i], ContentOf(static_cast<int>(i), 0));
    }
  }
  EXPECT_TRUE(client_.GetSide(ids[5], into[0]));
  EXPECT_FALSE(client_.GetSide(ids[3], into[0]));
}

TEST_F(StoreClientTest, ErasingABlockTakesItsSidePayloadsAlsoThoseOnTheirWay) {
  const storage::BlockId stored = client_.names().Id(NameOf(1), /*kind=*/100, 0),
                         coming = client_.names().Id(NameOf(1), /*kind=*/101, 1),
                         other = client_.names().Id(NameOf(2), /*kind=*/100, 0);
  Save(1, 0);
  client_.PutSide(stored, ContentOf(1, 0));
  client_.PutSide(other, ContentOf(2, 0));
  Finish();
  EXPECT_TRUE(client_.StoredInPart(NameOf(1)));
  client_.PutSide(coming, ContentOf(3, 0));
  client_.Erase(NameOf(1));
  Finish();
  EXPECT_FALSE(client_.StoredInPart(NameOf(1)));
  EXPECT_EQ(client_.SideBytes(stored), 0u);
  EXPECT_EQ(client_.SideBytes(coming), 0u);
  EXPECT_EQ(client_.SideBytes(other), kBytes);
  // A side payload alone is a part, too.
  EXPECT_TRUE(client_.StoredInPart(NameOf(2)));
}

TEST_F(StoreClientTest, SidePayloadsKeepToAQuotaThatCountsWhatIsOnItsWay) {
  const BlockName name = NameOf(1);
  const uint64_t each = storage::BlockBytesFor(kBytes), quota = 3 * each;
  std::vector<uint64_t> asked;
  client_.SetSideQuota([&](const Digest& tenant, uint64_t bytes) {
    EXPECT_EQ(tenant, name.tenant);
    asked.push_back(bytes);
    return client_.TenantBytes(tenant) + client_.SideBytesInFlight(tenant) + bytes <= quota;
  });
  store_.faults.hold = true;
  for (uint32_t i = 0; i < 5; ++i) {
    client_.PutSide(client_.names().Id(name, 100 + i, 0), ContentOf(static_cast<int>(i), 0));
  }
  EXPECT_EQ(asked, std::vector<uint64_t>(5, each));
  EXPECT_EQ(client_.SideBytesInFlight(name.tenant), quota);
  EXPECT_EQ(client_.SideBytesInFlight(Digest{}), 0u);
  store_.faults.hold = false;
  Finish();
  EXPECT_EQ(client_.SideBytesInFlight(name.tenant), 0u);
  EXPECT_EQ(client_.SideBytes(client_.names().Id(name, 102, 0)), kBytes);
  EXPECT_EQ(client_.SideBytes(client_.names().Id(name, 103, 0)), 0u);
}

TEST(StoreClientWithoutAStoreTest, HasNothingAndTakesNothing) {
  StoreClient client(nullptr, {}, kLayers, kBytes);
  EXPECT_FALSE(client.exists());
  EXPECT_FALSE(client.AcceptsSaves());
  EXPECT_FALSE(client.Stored(NameOf(1)));
  EXPECT_FALSE(client.SetPinned(NameOf(1), true));
  EXPECT_TRUE(client.PinnedChains().empty());
  EXPECT_EQ(client.TenantBytes({}), 0u);
  EXPECT_EQ(client.SideBytes({}), 0u);
  EXPECT_EQ(client.in_flight(), 0u);
  EXPECT_TRUE(client.idle());
  client.SetInUse(NameOf(1), true);
  client.Erase(NameOf(1));
  EXPECT_FALSE(client.StoredInPart(NameOf(1)));
  std::vector<std::byte> into(16);
  client.PutSide({}, into);
  EXPECT_FALSE(client.GetSide({}, into));
  client.Poll(std::chrono::nanoseconds(0));
}

}  // namespace
}  // namespace winnow::engine
