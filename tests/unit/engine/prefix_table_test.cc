// Names of prefixes: what they keep, in fast memory and in a store, and what is left when they go.
#include "engine/schedule/prefix_table.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

#include "absl/strings/str_cat.h"
#include "engine/decoder.h"
#include "engine/kv/kv_memory.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/prefix_engine_testing.h"

namespace winnow::engine {
namespace {

using kv_tiers::FrameBytes;
using kv_tiers::kBlockTokens;
using kv_tiers::kContext;
using kv_tiers::Load;

constexpr int32_t kTokens = 10 * kBlockTokens + 3;

class PrefixTableTest : public kv_tiers::PrefixEngineTest {
 protected:
  // Prompt tokens that were found.
  int32_t Ask(const std::string& tenant, std::vector<int32_t> prompt) {
    Request request = MakeRequest(++id_, std::move(prompt), 1);
    request.tenant = tenant;
    return Send(std::move(request)).last.usage.cached_tokens;
  }

  template <typename Work>
  void InEngine(Work work) {
    bool called = false;
    EXPECT_TRUE(engine_->Post([&](PrefixTable* table) {
      called = true;
      EXPECT_NE(table, nullptr);
      if (table != nullptr) work(*table);
      return EngineMailbox::Answer();
    }));
    engine_->Step();
    EXPECT_TRUE(called);
  }
  absl::Status Put(const std::string& tenant, const std::string& name,
                   const std::vector<int32_t>& tokens, bool pinned = false,
                   std::optional<Duration> ttl = std::nullopt) {
    absl::Status status;
    InEngine([&](PrefixTable& table) {
      status = table.Put(tenant, name, tokens, pinned, ttl).status();
    });
    return status;
  }
  std::vector<PrefixInfo> List(const std::string& tenant) {
    std::vector<PrefixInfo> out;
    InEngine([&](PrefixTable& table) { out = table.List(tenant); });
    return out;
  }
  // As the next sweep sees it.
  PrefixInfo Seen(const std::string& tenant) {
    clock_.Advance(std::chrono::seconds(2));
    engine_->Step();
    engine_->Step();
    const std::vector<PrefixInfo> all = List(tenant);
    EXPECT_EQ(all.size(), 1u);
    return all.empty() ? PrefixInfo() : all[0];
  }
  bool SeenUntil(const std::string& tenant, const std::function<bool(const PrefixInfo&)>& good) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (std::chrono::steady_clock::now() < end) {
      if (good(Seen(tenant))) return true;  // each look is two steps of the engine
    }
    return false;
  }
};

TEST_F(PrefixTableTest, NamesAreOfATenant) {
  const auto model = Load(InMemory(80));
  const auto stop = Run(*model);
  EXPECT_TRUE(Put("a", "x", Prompt(kTokens)).ok());
  EXPECT_TRUE(Put("a", "w", Prompt(40)).ok());
  EXPECT_TRUE(List("b").empty());
  EXPECT_TRUE(List("").empty());
  ASSERT_EQ(List("a").size(), 2u);
  EXPECT_EQ(List("a")[0].name, "w");
  EXPECT_EQ(List("a")[1].tokens, 10 * kBlockTokens);
  InEngine([&](PrefixTable& table) {
    EXPECT_TRUE(absl::IsNotFound(table.Delete("b", "x")));
    EXPECT_TRUE(absl::IsNotFound(table.Change("b", "x", true, std::nullopt).status()));
  });
  EXPECT_EQ(List("a").size(), 2u);
  EXPECT_TRUE(absl::IsInvalidArgument(Put("a", "y", Prompt(kBlockTokens - 1))));
  EXPECT_EQ(engine_->stats().named_prefixes, 2);
}

TEST_F(PrefixTableTest, ATenantAndAllTenantsHaveABound) {
  const auto model = Load(InMemory(80));
  const auto stop = Run(*model);
  const std::vector<int32_t> tokens = Prompt(kBlockTokens);
  InEngine([&](PrefixTable& table) {
    for (size_t i = 0; i < PrefixTable::kMaxNames; ++i) {
      const std::string tenant = std::to_string(i / PrefixTable::kMaxPerTenant);
      ASSERT_TRUE(table.Put(tenant, std::to_string(i), tokens, false, std::nullopt).ok());
      if (i + 1 == PrefixTable::kMaxPerTenant) {
        EXPECT_TRUE(absl::IsResourceExhausted(
            table.Put("0", "more", tokens, false, std::nullopt).status()));
        EXPECT_TRUE(table.Put("0", "0", tokens, false, std::nullopt).ok());
      }
    }
    EXPECT_TRUE(
        absl::IsResourceExhausted(table.Put("new", "x", tokens, false, std::nullopt).status()));
    EXPECT_TRUE(table.Delete("0", "1").ok());
    EXPECT_TRUE(table.Put("new", "x", tokens, false, std::nullopt).ok());
  });
}

TEST_F(PrefixTableTest, ANameEndsInTimeAndItsKvStays) {
  const auto model = Load(InMemory(80));
  const auto stop = Run(*model);
  Ask("a", Prompt(kTokens));
  EXPECT_TRUE(Put("a", "x", Prompt(kTokens), true, std::chrono::seconds(10)).ok());
  clock_.Advance(std::chrono::seconds(9));
  ASSERT_EQ(List("a").size(), 1u);
  EXPECT_EQ(*List("a")[0].left, std::chrono::seconds(1));
  clock_.Advance(std::chrono::seconds(1));
  EXPECT_TRUE(List("a").empty());
  EXPECT_EQ(engine_->stats().named_prefixes, 0);
  EXPECT_EQ(Ask("a", Prompt(kTokens)), 10 * kBlockTokens);
}

TEST_F(PrefixTableTest, DeletedKvIsComputedAgainButForWhatOthersName) {
  const auto model = Load(InMemory(80));
  const auto stop = Run(*model);
  Ask("a", Prompt(kTokens));
  Ask("b", Prompt(kTokens));
  EXPECT_TRUE(Put("a", "long", Prompt(kTokens)).ok());
  std::vector<int32_t> start = Prompt(kTokens);
  start.resize(4 * kBlockTokens);
  EXPECT_TRUE(Put("a", "short", start).ok());
  InEngine([](PrefixTable& table) { EXPECT_TRUE(table.Delete("a", "long").ok()); });
  EXPECT_EQ(engine_->stats().blocks_idle, 4 + 10);
  EXPECT_EQ(Ask("a", Prompt(kTokens)), 4 * kBlockTokens);
  EXPECT_EQ(Ask("b", Prompt(kTokens)), 10 * kBlockTokens);
}

TEST_F(PrefixTableTest, DeletingWhatARequestRunsWithLeavesTheRequestAlone) {
  const auto model = Load(InMemory(80));
  const auto stop = Run(*model);
  Client client;
  Request request = MakeRequest(++id_, Prompt(kTokens), 8);
  request.tenant = "a";
  const Reply expected = [&] {
    const auto other = Load(InMemory(80));
    Client alone;
    FakeClock clock;
    EngineOptions options;
    options.max_running = kv_tiers::kRunning;
    options.step_tokens = kv_tiers::kStepTokens;
    const auto engine = MakeEngine(options, *other->decoder, clock);
    EXPECT_TRUE(engine->Submit(request, alone.output).ok());
    StepUntilIdle(*engine);
    return alone.Read();
  }();
  EXPECT_TRUE(engine_->Submit(request, client.output).ok());
  for (int i = 0; i < 4; ++i) engine_->Step();  // its prompt, in chunks
  EXPECT_TRUE(Put("a", "x", Prompt(kTokens)).ok());
  InEngine([](PrefixTable& table) { EXPECT_TRUE(table.Delete("a", "x").ok()); });
  StepUntilIdle(*engine_);
  EXPECT_EQ(client.Read().tokens, expected.tokens);
  EXPECT_EQ(engine_->stats().blocks_used, 0);
  EXPECT_EQ(Ask("a", Prompt(kTokens)), 0);
}

TEST_F(PrefixTableTest, PinnedBlocksLeaveFastMemoryLastAndMakeRoomAtTheEnd) {
  const auto model = Load(InMemory(kContext / kBlockTokens));
  const auto stop = Run(*model);
  Ask("a", Prompt(kTokens, 1));
  Ask("a", Prompt(kTokens, 2));
  EXPECT_TRUE(Put("a", "first", Prompt(kTokens, 1), true).ok());
  EXPECT_EQ(Seen("a").fast_blocks, 10);
  // More than fits beside both: what was used last goes before what is pinned.
  Ask("b", Prompt(300, 3));
  Ask("b", Prompt(300, 4));
  EXPECT_EQ(Ask("a", Prompt(kTokens, 2)), 0);
  EXPECT_EQ(Ask("a", Prompt(kTokens, 1)), 10 * kBlockTokens);
  // A request that needs all there is gets it.
  Ask("b", Prompt(kContext - 1, 5));
  EXPECT_EQ(Seen("a").fast_blocks, 0);
  // The pin comes back with the content, and goes when it is taken back.
  Ask("a", Prompt(kTokens, 1));
  EXPECT_EQ(Seen("a").fast_blocks, 10);
  InEngine([](PrefixTable& table) {
    EXPECT_TRUE(table.Change("a", "first", false, std::nullopt).ok());
  });
  Ask("b", Prompt(300, 6));
  Ask("b", Prompt(300, 7));
  EXPECT_EQ(Ask("a", Prompt(kTokens, 1)), 0);
}

TEST_F(PrefixTableTest, PinsAreInTheStoreAndComeBackWithTheirNames) {
  std::vector<SavedPrefix> saved;
  const ModelOptions options = OnDisk();
  {
    const auto model = Load(options);
    const auto stop = Run(*model);
    Ask("a", Prompt(kTokens, 1));
    Ask("b", Prompt(kTokens, 2));
    EXPECT_TRUE(Put("a", "x", Prompt(kTokens, 1), true).ok());
    EXPECT_TRUE(Put("b", "orphan", Prompt(kTokens, 2), true).ok());
    for (const char* tenant : {"a", "b"}) {
      EXPECT_TRUE(SeenUntil(tenant, [](const PrefixInfo& seen) {
        return seen.stored_blocks == 10 && seen.pinned_blocks == 10;
      }));
    }
    InEngine([&](PrefixTable& table) { saved = table.Save(); });
    engine_.reset();
  }
  std::erase_if(saved, [](const SavedPrefix& entry) { return entry.name == "orphan"; });
  ASSERT_EQ(saved.size(), 1u);
  const auto model = Load(options);
  const uint64_t pinned = model->store.store->stats().pinned_bytes;
  EXPECT_GT(pinned, 0u);
  const auto stop = Run(*model);
  engine_->RestorePrefixes(saved);
  EXPECT_EQ(model->store.store->stats().pinned_bytes, pinned / 2) << "the orphan's pins are free";
  EXPECT_EQ(Seen("a").pinned_blocks, 10);
  EXPECT_TRUE(List("b").empty());
  EXPECT_EQ(Ask("a", Prompt(kTokens, 1)), 10 * kBlockTokens);
  // What two names pin stays pinned until both are gone.
  std::vector<int32_t> start = Prompt(kTokens, 1);
  start.resize(4 * kBlockTokens);
  EXPECT_TRUE(Put("a", "start", start, true).ok());
  InEngine(
      [](PrefixTable& table) { EXPECT_TRUE(table.Change("a", "x", false, std::nullopt).ok()); });
  EXPECT_EQ(model->store.store->stats().pinned_bytes, pinned / 2 * 4 / 10);
  InEngine([](PrefixTable& table) { EXPECT_TRUE(table.Delete("a", "start").ok()); });
  EXPECT_EQ(model->store.store->stats().pinned_bytes, 0u);
}

TEST_F(PrefixTableTest, DeletedKvLeavesTheStoreEvenIfASaveWasUnderWay) {
  const ModelOptions options = OnDisk();
  storage::FaultyStore* faulty = nullptr;
  const auto model = LoadOver(&faulty, options);
  const auto stop = Run(*model);
  EXPECT_TRUE(Put("a", "x", Prompt(kTokens, 1)).ok());
  faulty->faults.hold = true;
  Ask("a", Prompt(kTokens, 1));
  engine_->Step();
  EXPECT_GT(faulty->in_flight(), 0u);
  InEngine([](PrefixTable& table) { EXPECT_TRUE(table.Delete("a", "x").ok()); });
  faulty->faults.hold = false;
  const auto left = [&] {
    size_t count = 0;
    faulty->ForEach([&](const storage::BlockKey&, const storage::BlockInfo&) { ++count; });
    return count;
  };
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  bool idle = false;
  while (std::chrono::steady_clock::now() < end && !idle) {
    clock_.Advance(std::chrono::seconds(2));
    engine_->Step();
    idle = faulty->idle() && left() == 0;
  }
  EXPECT_TRUE(idle);
  for (int i = 0; i < 5; ++i) {
    clock_.Advance(std::chrono::seconds(2));
    engine_->Step();
  }
  EXPECT_EQ(left(), 0u);
  EXPECT_EQ(Ask("a", Prompt(kTokens, 1)), 0);
}

TEST_F(PrefixTableTest, DeletingErasesCodesAndSummariesAlsoAfterARestart) {
  ModelOptions options = OnDisk();
  options.retrieval.index = "lsh,pca";
  const auto asides = [](const LoadedModel& model) {
    std::map<Digest, int> count;
    model.store.store->ForEach([&](const storage::BlockKey& key, const storage::BlockInfo&) {
      if (key.kind() != 0) ++count[key.chain()];
    });
    return count;
  };
  // One token more than whole blocks, so that the summary goes by the name of the last of them.
  const std::vector<int32_t> tokens = Prompt(20 * kBlockTokens + 1, 1);
  const auto ask = [&](const char* policy) {
    Client client;
    Request request = MakeRequest(++id_, tokens, 4);
    request.tenant = "a";
    request.policy = *ParseAttentionPolicy(policy);
    EXPECT_TRUE(engine_->Submit(std::move(request), client.output).ok());
    StepUntilIdle(*engine_);
  };
  {
    const auto model = Load(options);
    const auto stop = Run(*model);
    // Each its own summary, of a kind that the process after this one does not know.
    ask("pca:k=5,window=9,suffix=0,sink=3");
    ask("pca:k=5,window=9,suffix=0,sink=4");
    ask("lsh:k=5,window=9,suffix=0");
    engine_.reset();
    const std::map<Digest, int> count = asides(*model);
    EXPECT_EQ(count.size(), 20u);
    EXPECT_GT(std::max_element(count.begin(), count.end(),
                               [](const auto& a, const auto& b) { return a.second < b.second; })
                  ->second,
              2)
        << "codes of two kinds alone";
  }
  const auto model = Load(options);
  const auto stop = Run(*model);
  std::vector<int32_t> start = tokens;
  start.resize(6 * kBlockTokens);
  EXPECT_TRUE(Put("a", "start", start).ok());
  EXPECT_TRUE(Put("a", "x", tokens).ok());
  InEngine([](PrefixTable& table) { EXPECT_TRUE(table.Delete("a", "x").ok()); });
  const auto until = [&](size_t chains) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (asides(*model).size() != chains && std::chrono::steady_clock::now() < end) {
      engine_->Step();
    }
    return asides(*model).size();
  };
  EXPECT_EQ(until(6), 6u) << "what another name has stays";
  InEngine([](PrefixTable& table) { EXPECT_TRUE(table.Delete("a", "start").ok()); });
  EXPECT_EQ(until(0), 0u);
}

// One after the other: of prompts that begin together none finds the others' blocks.
TEST_F(PrefixTableTest, RequestsShareWithinASaltAndNowhereElse) {
  const auto model = Load(InMemory(4 * (kContext / kBlockTokens)));
  const auto stop = Run(*model);
  const auto ask = [&](const std::string& tenant, std::optional<Digest> salt, bool keeps = true) {
    Client client;
    Request request = MakeRequest(++id_, Prompt(kTokens), 1);
    request.tenant = tenant;
    request.salt = salt;
    request.keeps_prefix = keeps;
    EXPECT_TRUE(engine_->Submit(std::move(request), client.output).ok());
    StepUntilIdle(*engine_);
    return client.Read().last.usage.cached_tokens;
  };
  constexpr int32_t kAll = 10 * kBlockTokens;
  EXPECT_EQ(ask("a", std::nullopt), 0);
  EXPECT_EQ(ask("a", std::nullopt), kAll);
  EXPECT_EQ(ask("b", std::nullopt), 0);
  EXPECT_EQ(ask("a", DomainSalt("team")), 0);
  EXPECT_EQ(ask("b", DomainSalt("team")), kAll);
  EXPECT_EQ(ask("b", DomainSalt("others")), 0);
  EXPECT_EQ(ask("", CallSalt(1), false), 0);
  EXPECT_EQ(ask("", CallSalt(2), false), 0);
  EXPECT_EQ(ask("", CallSalt(1), false), kAll) << "another choice of the same call";
  EXPECT_EQ(ask("", std::nullopt), 0);
}

TEST_F(PrefixTableTest, WhatTwoTenantsOfADomainHaveNamedStaysUntilBothForgetIt) {
  const auto model = Load(InMemory(2 * (kContext / kBlockTokens)));
  const auto stop = Run(*model);
  const std::vector<int32_t> tokens = Prompt(kTokens);
  const Digest team = DomainSalt("team");
  const auto ask = [&](const std::string& tenant, std::optional<Digest> salt) {
    Client client;
    Request request = MakeRequest(++id_, tokens, 1);
    request.tenant = tenant;
    request.salt = salt;
    EXPECT_TRUE(engine_->Submit(std::move(request), client.output).ok());
    StepUntilIdle(*engine_);
    return client.Read().last.usage.cached_tokens;
  };
  EXPECT_EQ(ask("a", team), 0);
  for (const char* tenant : {"a", "b"}) {
    InEngine([&](PrefixTable& table) {
      EXPECT_TRUE(table.Put(tenant, "x", tokens, true, std::nullopt, team).ok());
    });
  }
  InEngine([](PrefixTable& table) {
    EXPECT_TRUE(table.Delete("a", "x").ok());
    EXPECT_TRUE(table.List("a").empty());
    EXPECT_EQ(table.List("b").size(), 1u);
  });
  EXPECT_EQ(ask("a", team), 10 * kBlockTokens) << "b's name keeps it";
  EXPECT_EQ(ask("a", std::nullopt), 0) << "outside the domain nothing is found";
  InEngine([](PrefixTable& table) { EXPECT_TRUE(table.Delete("b", "x").ok()); });
  EXPECT_EQ(ask("b", team), 0);
}

TEST_F(PrefixTableTest, TheStoreKeepsNoMoreOfATenantThanItsQuota) {
  const ModelOptions options = OnDisk();
  const int64_t block = FrameBytes(config_) * config_.num_layers();
  const auto ask = [&](const std::string& tenant, int32_t salt, int64_t quota) {
    Client client;
    Request request = MakeRequest(++id_, Prompt(kTokens, salt), 1);
    request.tenant = tenant;
    request.tenant_store_bytes = quota;
    EXPECT_TRUE(engine_->Submit(std::move(request), client.output).ok());
    StepUntilIdle(*engine_);
    return client.Read().last.usage.cached_tokens;
  };
  // What a block takes in the store, with its index: learned from one tenant without a quota.
  uint64_t stored = 0;
  {
    const auto model = Load(options);
    const auto stop = Run(*model);
    ask("free", 1, 0);
    engine_.reset();  // waits until all is saved
    stored = model->store.store->TenantBytes(Sha256("free"));
    EXPECT_GE(stored, static_cast<uint64_t>(10 * block));
  }
  const auto quota = static_cast<int64_t>(stored) / 2;
  uint64_t kept = 0;
  {
    const auto model = Load(options);
    EXPECT_EQ(model->store.store->TenantBytes(Sha256("free")), stored) << "known after a restart";
    const auto stop = Run(*model);
    ask("small", 1, quota);
    ask("small", 2, quota);
    EXPECT_EQ(ask("small", 1, quota), 10 * kBlockTokens) << "in fast memory it is shared";
    EXPECT_GT(engine_->stats().blocks_over_store_quota, 10u);
    engine_.reset();
    kept = model->store.store->TenantBytes(Sha256("small"));
    EXPECT_GT(kept, static_cast<uint64_t>(quota) / 2);
    EXPECT_LE(kept, static_cast<uint64_t>(quota));
    EXPECT_EQ(model->store.store->TenantBytes(Sha256("free")), stored);
  }
  const auto model = Load(options);
  const auto stop = Run(*model);
  const int32_t found = ask("small", 1, quota);
  EXPECT_GT(found, 0);
  EXPECT_LT(found, 10 * kBlockTokens);
  EXPECT_EQ(ask("small", 2, quota), 0) << "nothing was left for it";
  EXPECT_EQ(ask("free", 1, 0), 10 * kBlockTokens);
}

TEST_F(PrefixTableTest, NoStoreExceedsAQuotaWhateverIsOnItsWay) {
  for (const int64_t host_bytes : {int64_t{0}, int64_t{64} << 20}) {
    for (const bool disk : {true, false}) {
      if (!disk && host_bytes == 0) continue;
      ModelOptions options = disk ? OnDisk() : InMemory(2 * (kContext / kBlockTokens));
      if (disk) options.tiers.store_dir = directory_.File(absl::StrCat("store", host_bytes));
      options.tiers.host_bytes = host_bytes;
      options.retrieval.index = "lsh,pca";
      storage::FaultyStore* faulty = nullptr;
      const auto model = LoadOver(&faulty, options);
      const auto stop = Run(*model);
      const int64_t quota = 12 * FrameBytes(config_) * config_.num_layers();
      const Digest tenant = Sha256("small");
      // Some of it is answered late, and some requests end before all of theirs is saved.
      for (int i = 0; i < 12; ++i) {
        faulty->faults.hold = i % 3 != 2;
        Client client;
        Request request = MakeRequest(++id_, Prompt(kTokens + 7 * i, 1 + i), 2);
        request.tenant = "small";
        request.tenant_store_bytes = quota;
        if (i % 2 == 1) request.policy = *ParseAttentionPolicy("pca:k=5,window=9,suffix=0");
        EXPECT_TRUE(engine_->Submit(std::move(request), client.output).ok());
        StepUntilIdle(*engine_);
        EXPECT_LE(faulty->TenantBytes(tenant), static_cast<uint64_t>(quota)) << i;
      }
      faulty->faults.hold = false;
      engine_.reset();
      EXPECT_LE(faulty->TenantBytes(tenant), static_cast<uint64_t>(quota));
      EXPECT_GT(faulty->TenantBytes(tenant), static_cast<uint64_t>(quota) / 2);
    }
  }
}

TEST(EngineMailboxTest, IsBoundedAndAnswersEveryTaskOnce) {
  EngineMailbox mailbox(3);
  int called = 0, answered = 0, refused = 0;
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(mailbox.Post([&](PrefixTable* table) {
      ++called;
      EXPECT_EQ(table, nullptr);
      return [&] { ++answered; };
    }));
  }
  const auto refuse = [&](PrefixTable*) {
    ++refused;
    return EngineMailbox::Answer();
  };
  EXPECT_FALSE(mailbox.Post(refuse));
  mailbox.Close();
  EXPECT_EQ(called, 3);
  EXPECT_EQ(answered, 3);
  EXPECT_FALSE(mailbox.Post(refuse));
  mailbox.Close();
  EXPECT_EQ(called, 3);
  EXPECT_EQ(refused, 0);
}

// An administrator who asks after the answer would miss what it says was done.
TEST_F(PrefixTableTest, AnAnswerComesWhenTheStatisticsShowWhatWasDone) {
  const auto model = Load(InMemory(80));
  const auto stop = Run(*model);
  int32_t named = -1;
  const std::vector<int32_t> prompt = Prompt(kTokens);
  EXPECT_TRUE(engine_->Post([&](PrefixTable* table) {
    EXPECT_TRUE(table->Put("a", "x", prompt, false, std::nullopt).ok());
    EXPECT_EQ(engine_->stats().named_prefixes, 0);
    return [&] { named = engine_->stats().named_prefixes; };
  }));
  engine_->Step();
  EXPECT_EQ(named, 1);
}

TEST_F(PrefixTableTest, ManyThreadsMayPost) {
  const auto model = Load(InMemory(80));
  const auto stop = Run(*model);
  std::atomic<int> called = 0, taken = 0, stopped = 0;
  {
    std::jthread engine_thread([&](const std::stop_token& stop) { engine_->Run(stop); });
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 200; ++i) {
          taken += engine_->Post([&](PrefixTable* table) {
            ++called;
            stopped += table == nullptr;
            return EngineMailbox::Answer();
          });
        }
      });
    }
    threads.clear();
  }
  EXPECT_EQ(called.load(), taken.load());
  EXPECT_GT(taken.load(), 0);
  EXPECT_FALSE(engine_->Post([](PrefixTable*) { return EngineMailbox::Answer(); }));
}

}  // namespace
}  // namespace winnow::engine
