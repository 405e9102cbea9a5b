// One suite for every BlockStore: host, disk over io_uring, disk over threads, tiered, and the one that
// the engine's tests put under it, over a disk and with answers late and in another order.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <set>

#include "storage/block_store.h"
#include "storage/disk_store.h"
#include "storage/host_store.h"
#include "storage/tiered_store.h"
#include "tests/fault/faulty_store.h"
#include "tests/unit/storage/store_client.h"

namespace winnow::storage {
namespace {

enum class Kind { kHost, kDiskUring, kDiskThreads, kTiered, kFaulty };

class BlockStoreSuite : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (GetParam() == Kind::kDiskUring && !MakeUringEngine(8).ok()) {
      GTEST_SKIP() << "io_uring is refused here";
    }
    store_ = Make(uint64_t{8} << 20);
    client_ = std::make_unique<StoreClient>(store_.get());
  }

  std::unique_ptr<BlockStore> Make(uint64_t capacity_bytes) {
    if (GetParam() == Kind::kHost) {
      HostStoreOptions options;
      options.capacity_bytes = capacity_bytes;
      options.chunk_bytes = uint64_t{1} << 20;
      return std::make_unique<HostStore>(options, &clock_);
    }
    DiskStoreOptions options;
    options.directory = dir_.path() + "/store";
    options.capacity_bytes = capacity_bytes;
    options.segment_bytes = uint64_t{1} << 20;
    options.staging_bytes = uint64_t{4} << 20;
    options.io.kind =
        GetParam() == Kind::kDiskUring ? IoEngineKind::kUring : IoEngineKind::kThreads;
    auto store = DiskStore::Open(options, &clock_);
    EXPECT_TRUE(store.ok()) << store.status();
    if (GetParam() == Kind::kFaulty) {
      auto faulty = std::make_unique<FaultyStore>(*std::move(store), TestSeed(5));
      faulty->faults = {.polls_max = 3, .reorder = true};
      return faulty;
    }
    if (GetParam() != Kind::kTiered) return *std::move(store);
    TieredStoreOptions tiered;
    tiered.host.capacity_bytes = uint64_t{2} << 20;
    tiered.host.chunk_bytes = uint64_t{1} << 20;
    return std::make_unique<TieredStore>(tiered, *std::move(store), &clock_);
  }

  TempDir dir_;
  FakeClock clock_;
  std::unique_ptr<BlockStore> store_;
  std::unique_ptr<StoreClient> client_;
};

TEST_P(BlockStoreSuite, WhatWasPutIsReadBackInAllSizes) {
  for (size_t bytes : {1, 100, 4095, 4096, 4097, 65536, 262144, 300001}) {
    const BlockId id = IdOf(bytes);
    ASSERT_EQ(client_->Put(id, bytes), Reason::kNone) << bytes;
    EXPECT_EQ(client_->GetAndCheck(id, bytes), Reason::kNone) << bytes;
    const auto info = store_->Find(id);
    ASSERT_TRUE(info.has_value());
    EXPECT_EQ(info->payload_bytes, bytes);
  }
}

TEST_P(BlockStoreSuite, ChosenPagesAreReadAlone) {
  const size_t bytes = 20 * kPageBytes - 100;
  ASSERT_EQ(client_->Put(IdOf(1), bytes), Reason::kNone);
  for (const std::vector<uint32_t>& pages :
       {std::vector<uint32_t>{0}, {19}, {0, 1, 2, 3}, {0, 2, 4, 5, 6, 19}, {7, 9}, {}}) {
    EXPECT_EQ(client_->GetPagesAndCheck(IdOf(1), bytes, pages), Reason::kNone);
  }
  EXPECT_EQ(client_->GetPagesAndCheck(IdOf(1), bytes, {3, 20}), Reason::kIdentity);
  EXPECT_EQ(client_->GetPagesAndCheck(IdOf(2), bytes, {3}), Reason::kAbsent);
}

TEST_P(BlockStoreSuite, AnotherIdentityUnderTheSameKeyIsAMiss) {
  const BlockId id = IdOf(1);
  ASSERT_EQ(client_->Put(id, 5000), Reason::kNone);
  std::vector<BlockId> others(4, id);
  others[0].model[5] ^= 1;
  others[1].tenant[5] ^= 1;
  others[2].layer ^= 1;
  others[3].token_block ^= 1;
  for (const BlockId& other : others) {
    EXPECT_EQ(client_->GetAndCheck(other, 5000), Reason::kIdentity);
    EXPECT_EQ(client_->GetPagesAndCheck(other, 5000, {0}), Reason::kIdentity);
    EXPECT_FALSE(store_->Find(other).has_value());
  }
  EXPECT_EQ(client_->GetAndCheck(id, 5001), Reason::kIdentity) << "another length";
  EXPECT_EQ(client_->GetAndCheck(id, 5000), Reason::kNone);
}

TEST_P(BlockStoreSuite, ErasedBlockIsAMissAndItsRoomIsGivenBack) {
  ASSERT_EQ(client_->Put(IdOf(1), 5000), Reason::kNone);
  EXPECT_EQ(client_->Erase(IdOf(1).key), Reason::kNone);
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), 5000), Reason::kAbsent);
  EXPECT_EQ(client_->Erase(IdOf(1).key), Reason::kAbsent);
  EXPECT_EQ(store_->stats().blocks, 0u);
  ASSERT_EQ(client_->Put(IdOf(1), 5000), Reason::kNone);
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), 5000), Reason::kNone);
}

TEST_P(BlockStoreSuite, ManyAtOnceAreAllAnsweredOnce) {
  const int count = 64;
  std::vector<std::vector<std::byte>> into(count, std::vector<std::byte>(32768));
  for (int i = 0; i < count; ++i) {
    store_->Put(i, IdOf(i), BytesOf(IdOf(i), 32768), {});
  }
  for (const auto& [tag, completion] : client_->Finish()) {
    EXPECT_EQ(completion.reason, Reason::kNone);
    EXPECT_EQ(completion.operation, Operation::kPut);
  }
  for (int i = 0; i < count; ++i) store_->Get(100 + i, IdOf(i), into[i], 0);
  EXPECT_EQ(client_->Finish().size(), static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) EXPECT_TRUE(into[i] == BytesOf(IdOf(i), 32768));
  const StoreStats stats = store_->stats();
  EXPECT_EQ(stats.puts_stored, static_cast<uint64_t>(count));
  EXPECT_EQ(stats.hits, static_cast<uint64_t>(count));
  EXPECT_EQ(stats.blocks, static_cast<uint64_t>(count));
}

TEST_P(BlockStoreSuite, OneBlockPutTwiceAtOnceIsOneBlock) {
  store_->Put(1, IdOf(1), BytesOf(IdOf(1), 9000), {});
  store_->Put(2, IdOf(1), BytesOf(IdOf(1), 9000), {});
  const auto answers = client_->Finish();
  EXPECT_EQ(answers.at(1).reason, Reason::kNone);
  EXPECT_EQ(answers.at(2).reason, Reason::kNone);
  EXPECT_EQ(store_->stats().blocks, 1u);
}

TEST_P(BlockStoreSuite, NeverHoldsMoreThanItsCapacityAndKeepsWhatIsUsed) {
  // Four times what fits; block 0 is read all the time, block 1 is pinned.
  ASSERT_EQ(client_->Put(IdOf(0), 65536), Reason::kNone);
  ASSERT_EQ(client_->Put(IdOf(1), 65536, {.pinned = true}), Reason::kNone);
  for (int i = 2; i < 500; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), 65536), Reason::kNone) << i;
    EXPECT_LE(store_->stats().used_bytes, store_->stats().capacity_bytes);
    if (i % 10 == 0) {
      ASSERT_EQ(client_->GetAndCheck(IdOf(0), 65536), Reason::kNone) << i;
    }
  }
  EXPECT_GT(store_->stats().evicted_blocks, 300u);
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), 65536), Reason::kNone);
  EXPECT_EQ(client_->GetAndCheck(IdOf(499), 65536), Reason::kNone);
  EXPECT_EQ(client_->GetAndCheck(IdOf(2), 65536), Reason::kAbsent);
}

TEST_P(BlockStoreSuite, LowPriorityLeavesFirst) {
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), 65536, {.priority = 3}), Reason::kNone);
  }
  for (int i = 20; i < 300; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), 65536, {.priority = 0}), Reason::kNone);
  }
  int kept = 0;
  for (int i = 0; i < 20; ++i) kept += client_->GetAndCheck(IdOf(i), 65536) == Reason::kNone;
  EXPECT_EQ(kept, 20);
}

// However old, however low its priority, and spread over all segments, so that none is without.
TEST_P(BlockStoreSuite, WhatIsInUseStaysAsLongAsAnythingElseCanGo) {
  const size_t bytes = 100'000;
  constexpr int kInUse = 45;  // of some 72 to 80 that fit
  for (int i = 0; i < kInUse; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), bytes, {.priority = 0, .in_use = i % 2 == 0}), Reason::kNone);
    if (i % 2 == 1) {
      store_->SetInUse(IdOf(i).key, true);
    } else {
      ASSERT_EQ(client_->Put(IdOf(100 + i), bytes, {.priority = 3}), Reason::kNone);
    }
  }
  // Many at once: while room is made they must not take that of what is moved.
  for (int i = 0; i < 300; ++i) {
    const BlockId id = IdOf(1000 + i);
    store_->Put(i, id, BytesOf(id, bytes), {.priority = 3});
    if (i % 30 < 29) continue;
    for (const auto& [tag, answer] : client_->Finish()) EXPECT_EQ(answer.reason, Reason::kNone);
  }
  EXPECT_GT(store_->stats().evicted_blocks, 200u);
  for (int i = 0; i < kInUse; ++i) {
    const auto info = store_->Find(IdOf(i));
    ASSERT_TRUE(info.has_value()) << i;
    EXPECT_TRUE(info->in_use);
    EXPECT_EQ(client_->GetAndCheck(IdOf(i), bytes), Reason::kNone) << i;
  }
  // Nobody works with them any more: they are as the others, and the first to go.
  for (int i = 0; i < kInUse; ++i) store_->SetInUse(IdOf(i).key, false);
  for (int i = 0; i < 300; ++i) {
    ASSERT_EQ(client_->Put(IdOf(2000 + i), bytes, {.priority = 3}), Reason::kNone);
  }
  for (int i = 0; i < kInUse; ++i) EXPECT_FALSE(store_->Find(IdOf(i)).has_value()) << i;
  store_->SetInUse(IdOf(0).key, true);  // it is gone: nothing happens
  EXPECT_FALSE(store_->Find(IdOf(0)).has_value());
  // Said of a block that is on its way.
  for (const bool in_use : {false, true}) {
    const BlockId id = IdOf(in_use ? 1 : 2);
    store_->Put(1, id, BytesOf(id, bytes), {.in_use = !in_use});
    store_->SetInUse(id.key, in_use);
    EXPECT_EQ(client_->Finish().at(1).reason, Reason::kNone);
    EXPECT_EQ(store_->Find(id)->in_use, in_use);
  }
}

TEST_P(BlockStoreSuite, WhereAllIsInUseTheOldestLeaves) {
  const size_t bytes = 100'000;
  constexpr int kPuts = 300;
  for (int i = 0; i < kPuts; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), bytes, {.in_use = true}), Reason::kNone) << i;
  }
  EXPECT_LE(store_->stats().used_bytes, store_->stats().capacity_bytes);
  EXPECT_FALSE(store_->Find(IdOf(0)).has_value());
  for (int i = kPuts - 20; i < kPuts; ++i) EXPECT_TRUE(store_->Find(IdOf(i)).has_value()) << i;
}

TEST_P(BlockStoreSuite, PinsTakeAtMostHalfAndCanBeGivenBack) {
  int pinned = 0;
  for (int i = 0; i < 200; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), 65536), Reason::kNone);
    pinned += store_->SetPinned(IdOf(i).key, true);
  }
  EXPECT_LE(store_->stats().pinned_bytes, store_->stats().capacity_bytes / 2);
  EXPECT_GT(pinned, 40);
  for (int i = 0; i < pinned; ++i) {
    ASSERT_EQ(client_->GetAndCheck(IdOf(i), 65536), Reason::kNone) << i;
  }
  for (int i = 0; i < pinned; ++i) EXPECT_TRUE(store_->SetPinned(IdOf(i).key, false));
  EXPECT_EQ(store_->stats().pinned_bytes, 0u);
  EXPECT_FALSE(store_->SetPinned(IdOf(1000).key, true));
}

TEST_P(BlockStoreSuite, ForEachVisitsWhatFindFindsOnce) {
  for (int i = 0; i < 20; ++i) ASSERT_EQ(client_->Put(IdOf(i), 5000 + i), Reason::kNone);
  ASSERT_EQ(client_->Put(IdOf(20), 5000, {.ttl_s = 10}), Reason::kNone);
  EXPECT_TRUE(store_->SetPinned(IdOf(3).key, true));
  ASSERT_EQ(client_->Erase(IdOf(4).key), Reason::kNone);
  clock_.AdvanceSeconds(11);
  std::map<std::array<uint8_t, 40>, BlockInfo> seen;
  store_->ForEach([&](const BlockKey& key, const BlockInfo& info) {
    EXPECT_TRUE(seen.emplace(key.bytes, info).second) << "twice";
  });
  EXPECT_EQ(seen.size(), 19u);
  for (int i = 0; i < 21; ++i) {
    const auto found = seen.find(IdOf(i).key.bytes);
    ASSERT_EQ(found != seen.end(), store_->Find(IdOf(i)).has_value()) << i;
    if (found == seen.end()) continue;
    EXPECT_EQ(found->second.payload_bytes, static_cast<uint32_t>(5000 + i));
    EXPECT_EQ(found->second.pinned, i == 3);
  }
  for (int i = 0; i < 22; ++i) {
    BlockId other = IdOf(i);
    other.token_block ^= uint64_t{1} << 40;
    EXPECT_EQ(store_->Contains(other.key), seen.contains(other.key.bytes)) << i;
    EXPECT_FALSE(store_->Find(other).has_value()) << "of other tokens";
  }
}

TEST_P(BlockStoreSuite, AsidesAreFoundByTheirChain) {
  std::vector<BlockId> ids;
  for (uint8_t chain : {1, 2}) {
    for (uint32_t kind : {0u, 7u, 0x80000001u, 0xffffffffu}) {
      BlockId id = IdOf(ids.size());
      id.key = BlockKey::Make({chain}, kind, 0);
      ids.push_back(id);
      ASSERT_EQ(client_->Put(id, 5000), Reason::kNone);
    }
  }
  const auto kinds = [&](uint8_t chain) {
    std::set<uint32_t> found;
    for (const BlockKey& key : store_->AsidesOf({chain})) {
      EXPECT_EQ(key.chain()[0], chain);
      EXPECT_TRUE(found.insert(key.kind()).second) << "twice";
    }
    return found;
  };
  EXPECT_EQ(kinds(1), (std::set<uint32_t>{7, 0x80000001, 0xffffffff}));
  EXPECT_EQ(kinds(2), kinds(1));
  EXPECT_EQ(kinds(3), std::set<uint32_t>());
  ASSERT_EQ(client_->Put(ids[1], 6000), Reason::kNone);  // in place of the other bytes
  ASSERT_EQ(client_->Erase(ids[2].key), Reason::kNone);
  EXPECT_EQ(kinds(1), (std::set<uint32_t>{7, 0xffffffff}));
  // What leaves to make room is not listed either.
  for (int i = 100; i < 900; ++i) client_->Put(IdOf(i), 30000);
  for (const BlockKey& key : store_->AsidesOf({2})) {
    bool there = false;
    store_->ForEach([&](const BlockKey& other, const BlockInfo&) { there |= other == key; });
    EXPECT_TRUE(there);
  }
}

TEST_P(BlockStoreSuite, TenantBytesAreThoseOfBlocksThatStay) {
  BlockId other = IdOf(100);
  other.tenant.fill(0x77);
  EXPECT_EQ(store_->TenantBytes(other.tenant), 0u);
  ASSERT_EQ(client_->Put(IdOf(1), 5000), Reason::kNone);
  const uint64_t one = store_->TenantBytes(IdOf(1).tenant);
  EXPECT_GE(one, 8192u);
  EXPECT_LE(one, 12288u);
  ASSERT_EQ(client_->Put(IdOf(2), 5000), Reason::kNone);
  ASSERT_EQ(client_->Put(IdOf(2), 5000), Reason::kNone);  // again
  EXPECT_EQ(store_->TenantBytes(IdOf(1).tenant), 2 * one);
  ASSERT_EQ(client_->Put(IdOf(3), 5000, {.transient = true}), Reason::kNone);
  EXPECT_EQ(store_->TenantBytes(IdOf(1).tenant), 2 * one);
  ASSERT_EQ(client_->Put(IdOf(3), 5000), Reason::kNone);  // it stays after all
  EXPECT_EQ(store_->TenantBytes(IdOf(1).tenant), 3 * one);
  EXPECT_EQ(store_->TenantBytes(other.tenant), 0u);
  for (const int i : {1, 2, 3}) ASSERT_EQ(client_->Erase(IdOf(i).key), Reason::kNone);
  EXPECT_EQ(store_->TenantBytes(IdOf(1).tenant), 0u);
}

TEST_P(BlockStoreSuite, ExpiredBlockIsAMiss) {
  ASSERT_EQ(client_->Put(IdOf(1), 5000, {.ttl_s = 10}), Reason::kNone);
  ASSERT_EQ(client_->Put(IdOf(2), 5000), Reason::kNone);
  clock_.AdvanceSeconds(9);
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), 5000), Reason::kNone);
  clock_.AdvanceSeconds(2);
  EXPECT_FALSE(store_->Find(IdOf(1)).has_value());
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), 5000), Reason::kAbsent);
  EXPECT_EQ(client_->GetAndCheck(IdOf(2), 5000), Reason::kNone);
  EXPECT_EQ(store_->stats().expired_blocks, 1u);
}

// A caller that puts or raises a block must not shorten what others asked for.
TEST_P(BlockStoreSuite, ABlockTakesTheLaterExpiryAndTheLargerPriority) {
  const auto left = [&](int block) -> int64_t {
    const auto info = store_->Find(IdOf(block));
    return info.has_value() ? int64_t{info->ttl_s} : -1;
  };
  const auto put = [&](int block, uint8_t priority, uint32_t ttl_s) {
    ASSERT_EQ(client_->Put(IdOf(block), 5000, {.priority = priority, .ttl_s = ttl_s}),
              Reason::kNone);
  };
  for (const bool raise : {false, true}) {
    const int first = raise ? 10 : 0;
    const auto again = [&](int block, uint8_t priority, uint32_t ttl_s) {
      if (raise) return store_->Raise(IdOf(first + block).key, priority, ttl_s);
      put(first + block, priority, ttl_s);
    };
    put(first + 1, 2, 10);
    again(1, 1, 5);  // neither
    EXPECT_EQ(left(first + 1), 10);
    EXPECT_EQ(store_->Find(IdOf(first + 1))->priority, 2);
    again(1, 5, 20);  // both
    EXPECT_EQ(left(first + 1), 20);
    EXPECT_EQ(store_->Find(IdOf(first + 1))->priority, 5);
    put(first + 2, 2, 10);
    again(2, 2, 0);  // for good
    EXPECT_EQ(left(first + 2), 0);
    put(first + 3, 2, 0);
    again(3, 2, 10);
    EXPECT_EQ(left(first + 3), 0) << "what was for good stays";
    again(3, 255, 0);
    EXPECT_EQ(store_->Find(IdOf(first + 3))->priority, kPriorityMax);
  }
  // On its way.
  store_->Put(1, IdOf(20), BytesOf(IdOf(20), 5000), {.priority = 1, .ttl_s = 10});
  store_->Raise(IdOf(20).key, 4, 30);
  EXPECT_EQ(client_->Finish().at(1).reason, Reason::kNone);
  EXPECT_EQ(left(20), 30);
  EXPECT_EQ(store_->Find(IdOf(20))->priority, 4);
  store_->Raise(IdOf(21).key, 4, 30);  // neither there nor on its way
  EXPECT_EQ(left(21), -1);
  clock_.AdvanceSeconds(21);
  store_->Raise(IdOf(1).key, 4, 100);  // expired: it does not come back
  EXPECT_EQ(left(1), -1);
  EXPECT_EQ(left(2), 0);
  EXPECT_EQ(left(20), 9);
}

// Two that put one block at once, and differ.
TEST_P(BlockStoreSuite, JoinedPutsTakeTheLaterExpiryAndTheLargerPriority) {
  store_->Put(1, IdOf(1), BytesOf(IdOf(1), 5000), {.priority = 1, .ttl_s = 30});
  store_->Put(2, IdOf(1), BytesOf(IdOf(1), 5000), {.priority = 4, .ttl_s = 10});
  client_->Finish();
  EXPECT_EQ(store_->Find(IdOf(1))->ttl_s, 30u);
  EXPECT_EQ(store_->Find(IdOf(1))->priority, 4);
}

TEST_P(BlockStoreSuite, RaisedBlocksLeaveLast) {
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), 65536, {.priority = 3}), Reason::kNone);
    store_->Raise(IdOf(i).key, kPriorityMax, 0);
  }
  for (int i = 20; i < 300; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), 65536, {.priority = kPriorityMax - 1}), Reason::kNone);
  }
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(client_->GetAndCheck(IdOf(i), 65536), Reason::kNone) << i;
  }
}

TEST_P(BlockStoreSuite, BlockThatCannotFitIsRefused) {
  const std::vector<std::byte> payload(2 << 20);
  EXPECT_EQ(client_->Put(IdOf(1), payload), Reason::kFull);
}

// Random operations against a map. The model allows a miss where the store may have evicted, never
// wrong bytes and never a block that was erased.
TEST_P(BlockStoreSuite, AgreesWithAModelOverRandomOperations) {
  const uint32_t seed = TestSeed(42);
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  std::map<uint64_t, size_t> model;  // what may be there
  for (int round = 0; round < 1500; ++round) {
    const uint64_t number = random() % 150;
    const BlockId id = IdOf(number);
    const size_t bytes = 1 + number * 997 % 120000;
    switch (random() % 8) {
      case 0:
      case 1:
      case 2:
        ASSERT_EQ(client_->Put(id, bytes, {.priority = static_cast<uint8_t>(random() % 4)}),
                  Reason::kNone);
        model[number] = bytes;
        ASSERT_EQ(client_->GetAndCheck(id, bytes), Reason::kNone) << "just put";
        break;
      case 3:
        client_->Erase(id.key);
        model.erase(number);
        break;
      case 4: {
        const auto page = static_cast<uint32_t>(random() % PagesFor(bytes));
        const Reason reason = client_->GetPagesAndCheck(id, bytes, {page});
        ASSERT_TRUE(reason == Reason::kAbsent || (reason == Reason::kNone && model.count(number)));
        break;
      }
      default: {
        const Reason reason = client_->GetAndCheck(id, bytes);
        ASSERT_TRUE(reason == Reason::kAbsent || (reason == Reason::kNone && model.count(number)));
      }
    }
    ASSERT_LE(store_->stats().used_bytes, store_->stats().capacity_bytes);
    ASSERT_LE(store_->stats().blocks, model.size());
  }
}

INSTANTIATE_TEST_SUITE_P(Stores, BlockStoreSuite,
                         testing::Values(Kind::kHost, Kind::kDiskUring, Kind::kDiskThreads,
                                         Kind::kTiered, Kind::kFaulty),
                         [](const auto& info) {
                           switch (info.param) {
                             case Kind::kHost:
                               return "Host";
                             case Kind::kDiskUring:
                               return "DiskUring";
                             case Kind::kDiskThreads:
                               return "DiskThreads";
                             case Kind::kTiered:
                               return "Tiered";
                             case Kind::kFaulty:
                               return "Faulty";
                           }
                           return "";
                         });

}  // namespace
}  // namespace winnow::storage
