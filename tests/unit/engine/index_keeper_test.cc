// IndexKeeper alone: an index that was saved is there again, to the byte, and only for those who would have made the same.
#include "engine/retrieval/index_keeper.h"

#include <cstring>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "storage/clock.h"
#include "storage/host_store.h"
#include "tests/fault/faulty_store.h"
#include "tests/unit/engine/retrieval_scene.h"

namespace winnow::engine {
namespace {

using Kind = AttentionPolicy::Kind;

storage::HostStoreOptions StoreOptions() {
  storage::HostStoreOptions options;
  options.capacity_bytes = options.chunk_bytes = 8 << 20;
  return options;
}

// One process: pools of its own, the store that all share.
struct Process {
  Process(uint64_t seed, storage::BlockStore* of_all, const std::string& fit_id)
      : store(of_all), scene(seed, of_all) {
    scene.WriteKv();
    auto fit = std::make_shared<TransformFit>(*scene.Fit());
    fit->id = fit_id;
    options.indexes = {{Kind::kPca, 128}, {Kind::kLsh, 128}};
    options.transform = fit;
    options.residual_codes = true;
    options.summaries = 2;
    auto made = Indexes::Create(scene.config, *scene.memory, *scene.backend, options);
    EXPECT_TRUE(made.ok()) << made.status();
    indexes = *std::move(made);
    keeper = std::make_unique<IndexKeeper>(scene.shape, *scene.memory, *scene.backend, *indexes,
                                           options);
    for (int32_t i = 0; i < RetrievalScene::kUsed; ++i) {
      names.push_back({.index = i});
      names.back().chain[0] = static_cast<uint8_t>(i + 1);
    }
  }
  std::unique_ptr<RetrievalState> State(const std::string& policy) {
    auto state =
        std::make_unique<RetrievalState>(RetrievalScene::Policy(policy), RetrievalScene::SeesAll());
    EXPECT_TRUE(indexes->GivePlace(*state).ok());
    return state;
  }
  void Append(RetrievalState& state) {
    const std::vector<int32_t> tokens(RetrievalScene::kTokens);
    const SequenceChunk chunk{tokens, 0, scene.blocks, 1, &state, 0};
    PassRows rows;
    rows.chunk = &chunk;
    rows.first_retrieving = rows.last_retrieving = rows.size();
    PassRows* of_method = &rows;
    scene.memory->BeginPass(1);
    for (int32_t layer = 0; layer < RetrievalScene::kLayers; ++layer) {
      indexes->Append(layer, state.policy(), {&of_method, 1});
    }
    keeper->Mark(rows, 0, RetrievalScene::kTokens);
    scene.memory->EndPass();
  }
  void Save(const RetrievalState& state) {
    for (int32_t i = 0; i < RetrievalScene::kUsed; ++i) {
      keeper->SaveBlock(scene.blocks[i], names[i]);
    }
    keeper->SaveSummary(state, names.back());
    Finish();
  }
  // A sequence whose tokens are all in the indexes, and whose indexes are in the store.
  std::unique_ptr<RetrievalState> Keep(const std::string& policy) {
    auto state = State(policy);
    Append(*state);
    Save(*state);
    return state;
  }
  // The store has one queue of completions: each process takes its own.
  void Finish() {
    while (store->in_flight() > 0) scene.memory->Idle();
  }
  int32_t Adopt(RetrievalState& state) {
    keeper->Adopt(state, scene.blocks, names, RetrievalScene::kTokens);
    return state.layer(RetrievalScene::kLayers - 1).indexed;
  }

  storage::BlockStore* const store;
  RetrievalScene scene;
  RetrievalOptions options;
  std::unique_ptr<Indexes> indexes;
  std::unique_ptr<IndexKeeper> keeper;
  std::vector<BlockName> names;
};

class IndexKeeperTest : public ::testing::Test {
 protected:
  IndexKeeperTest()
      : seed_(testing::TestSeed()),
        store_(std::make_unique<storage::HostStore>(StoreOptions(), &clock_), 1) {}

  const uint64_t seed_;
  storage::SystemClock clock_;
  storage::FaultyStore store_;
};

constexpr char kPolicy[] = "pca:k=4,dense_layers=0";
constexpr char kReRanked[] = "pca:k=4,rerank=on,dense_layers=0";

TEST_F(IndexKeeperTest, ResidualCodesComeBackToTheByteUnderTheirOwnFit) {
  Process first(seed_, &store_, "a fit"), second(seed_, &store_, "a fit"),
      third(seed_, &store_, "another fit");
  const auto saved = first.Keep(kReRanked);
  const auto adopted = second.State(kReRanked);
  ASSERT_EQ(second.Adopt(*adopted), RetrievalScene::kTokens);
  const Indexes::Part a = first.indexes->Parts()[1], b = second.indexes->Parts()[1];
  ASSERT_EQ(a.title, "residual");
  for (int32_t layer = 0; layer < RetrievalScene::kLayers; ++layer) {
    for (const int32_t block : first.scene.blocks) {
      const std::byte* of_block = a.pools[layer] + block * a.block_bytes;
      ASSERT_EQ(std::memcmp(of_block, b.pools[layer] + block * b.block_bytes, a.block_bytes), 0);
    }
  }
  // It has first codes of its own fit, and nothing of its own in the store that refines them.
  const auto plain = third.Keep(kPolicy);
  const auto other = third.State(kReRanked);
  EXPECT_EQ(third.Adopt(*other), 0);
}

// A prefix that was read without re-ranking has the first codes alone: under rerank they are made anew from its KV.
TEST_F(IndexKeeperTest, FirstCodesAloneAreNotEnoughForReRanking) {
  Process first(seed_, &store_, "a fit"), second(seed_, &store_, "a fit");
  const auto saved = first.Keep(kPolicy);
  const auto plain = second.State(kPolicy);
  EXPECT_EQ(second.Adopt(*plain), RetrievalScene::kTokens);
  const auto reranked = second.State(kReRanked);
  EXPECT_EQ(second.Adopt(*reranked), 0);
}

TEST_F(IndexKeeperTest, WhatWasSavedComesBackToTheByte) {
  Process first(seed_, &store_, "a fit"), second(seed_, &store_, "a fit");
  const auto saved = first.Keep(kPolicy);
  const auto adopted = second.State(kPolicy);
  ASSERT_EQ(second.Adopt(*adopted), RetrievalScene::kTokens);
  const Indexes::Part a = first.indexes->Parts()[0], b = second.indexes->Parts()[0];
  ASSERT_EQ(a.title, "pca:128");
  for (int32_t layer = 0; layer < RetrievalScene::kLayers; ++layer) {
    for (const int32_t block : first.scene.blocks) {
      ASSERT_EQ(std::memcmp(a.pools[layer] + block * a.block_bytes,
                            b.pools[layer] + block * b.block_bytes, a.block_bytes),
                0)
          << layer << " " << block;
    }
    const kernels::Summary &table = saved->layer(layer).summary,
                           &other = adopted->layer(layer).summary;
    EXPECT_GT(table.tokens.size(), 0);
    EXPECT_EQ(table.tokens, other.tokens);
  }
  EXPECT_EQ(std::memcmp(saved->summaries().data(), adopted->summaries().data(),
                        saved->summaries().size_bytes()),
            0);
}

TEST_F(IndexKeeperTest, AnotherFitsCodesAndTablesAreNotTaken) {
  Process first(seed_, &store_, "a fit"), second(seed_, &store_, "another");
  const auto saved = first.Keep(kPolicy);
  const auto adopted = second.State(kPolicy);
  EXPECT_EQ(second.Adopt(*adopted), 0);
  EXPECT_EQ(adopted->layer(0).summary.tokens.size(), 0);
}

// Lsh depends on no fit.
TEST_F(IndexKeeperTest, CodesWithoutAFitAreEverybodys) {
  Process first(seed_, &store_, "a fit"), second(seed_, &store_, "another");
  const auto saved = first.State("lsh:k=4,dense_layers=0");
  first.Append(*saved);
  first.Save(*saved);
  EXPECT_EQ(second.Adopt(*second.State("lsh:k=4,dense_layers=0")), RetrievalScene::kTokens);
}

// An index that begins at a later layer does not serve a policy with fewer dense layers; the other way round it does.
TEST_F(IndexKeeperTest, LayersThatWereDenseHaveNoIndex) {
  Process first(seed_, &store_, "a fit"), second(seed_, &store_, "a fit");
  const auto saved = first.State("lsh:k=4,dense_layers=1");
  first.Append(*saved);
  first.Save(*saved);
  EXPECT_EQ(second.Adopt(*second.State("lsh:k=4,dense_layers=0")), 0);
  EXPECT_EQ(second.Adopt(*second.State("lsh:k=4,dense_layers=1")), RetrievalScene::kTokens);
}

TEST_F(IndexKeeperTest, ABlockThatTheStoreLostEndsThePrefix) {
  Process first(seed_, &store_, "a fit"), second(seed_, &store_, "a fit");
  const auto saved = first.State(kPolicy);
  first.Append(*saved);
  for (int32_t i = 0; i < RetrievalScene::kUsed; ++i) {
    if (i != 5) first.keeper->SaveBlock(first.scene.blocks[i], first.names[i]);
  }
  first.Finish();
  EXPECT_EQ(second.Adopt(*second.State(kPolicy)), 5 * RetrievalScene::kBlockTokens);
  store_.faults.miss_share = 1;
  Process third(seed_, &store_, "a fit");
  EXPECT_EQ(third.Adopt(*third.State(kPolicy)), 0);
}

}  // namespace
}  // namespace winnow::engine
