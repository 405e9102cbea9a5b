// Indexes alone: what Append leaves in the pools, and who gets a place for summaries.
#include "engine/retrieval/indexes.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "storage/clock.h"
#include "storage/host_store.h"
#include "tests/unit/engine/retrieval_scene.h"

namespace winnow::engine {
namespace {

using Kind = AttentionPolicy::Kind;
constexpr int32_t kLast = RetrievalScene::kLayers - 1;

class IndexesTest : public ::testing::Test {
 protected:
  IndexesTest() : scene_(testing::TestSeed()) {
    scene_.WriteKv();
    options_.indexes = {{Kind::kLsh, 128}, {Kind::kQuest, 0}, {Kind::kPca, 128}};
    options_.four_bit_keys = options_.residual_codes = true;
    options_.transform = scene_.Fit();
  }
  std::unique_ptr<Indexes> Make() {
    auto made = Indexes::Create(scene_.config, *scene_.memory, *scene_.backend, options_);
    EXPECT_TRUE(made.ok()) << made.status();
    return *std::move(made);
  }
  // Appends tokens [first, last) of the scene's sequence, the last of which selects or not. The first token that was taken
  // in, -1: none. Tokens from `settled` on are a draft's.
  int32_t Append(Indexes& indexes, RetrievalState& state, int32_t first, int32_t last,
                 bool selects = true, int32_t settled = std::numeric_limits<int32_t>::max()) {
    const std::vector<int32_t> tokens(last - first);
    const SequenceChunk chunk{tokens, first, scene_.blocks, 1, &state, 0, settled};
    PassRows rows;
    rows.chunk = &chunk;
    rows.last_retrieving = rows.size();
    rows.first_retrieving = rows.size() - (selects ? 1 : 0);
    scene_.memory->BeginPass(1);
    PassRows* of_method = &rows;
    indexes.Append(kLast, state.policy(), {&of_method, 1});
    scene_.memory->EndPass();
    return rows.indexed_from;
  }
  static std::vector<std::byte> Bytes(const Indexes::Part& part) {
    const std::byte* pool = part.pools[kLast];
    return {pool, pool + part.block_bytes * RetrievalScene::kBlocks};
  }

  RetrievalScene scene_;
  RetrievalOptions options_;
};

// However a prompt is cut, codes, residual codes, bounds, four-bit keys and tables of cells have the same bits, and there are some.
TEST_F(IndexesTest, ChunksDoNotShow) {
  for (const char* text :
       {"lsh:k=4,dense_layers=0", "quest:k=16,dense_layers=0", "lsh:k=4,p=0.9,dense_layers=0",
        "pca:k=4,sink=3,dense_layers=0", "pca:k=4,sink=3,rerank=on,dense_layers=0"}) {
    const AttentionPolicy policy = RetrievalScene::Policy(text);
    const std::unique_ptr<Indexes> whole = Make(), cut = Make();
    RetrievalState at_once(policy, RetrievalScene::SeesAll()),
        by_parts = {policy, RetrievalScene::SeesAll()};
    ASSERT_TRUE(whole->GivePlace(at_once).ok());
    ASSERT_TRUE(cut->GivePlace(by_parts).ok());
    Append(*whole, at_once, 0, RetrievalScene::kTokens);
    // A query that selects by masses does not need its own key: that waits for the next tokens.
    const int32_t alone = policy.select_by() == SelectBy::kMasses ? -1 : 100;
    EXPECT_EQ(Append(*cut, by_parts, 0, 7), 0);
    EXPECT_EQ(Append(*cut, by_parts, 7, 100), 7);
    EXPECT_EQ(Append(*cut, by_parts, 100, 101), alone);
    EXPECT_EQ(Append(*cut, by_parts, 101, 256), alone < 0 ? 100 : 101);
    EXPECT_EQ(Append(*cut, by_parts, 256, RetrievalScene::kTokens), 256);
    EXPECT_EQ(by_parts.layer(kLast).indexed, RetrievalScene::kTokens);
    const std::vector<std::string> titles = whole->TitlesFor(policy);
    EXPECT_EQ(titles.size(), policy.p.has_value() || policy.rerank ? 2u : 1u);
    const std::vector<Indexes::Part> a = whole->Parts(), b = cut->Parts();
    ASSERT_EQ(a.size(), 5u);
    for (size_t i = 0; i < a.size(); ++i) {
      const bool used = std::find(titles.begin(), titles.end(), a[i].title) != titles.end();
      const std::vector<std::byte> bytes = Bytes(a[i]);
      EXPECT_EQ(bytes == std::vector<std::byte>(bytes.size()), !used) << text << " " << a[i].title;
      EXPECT_TRUE(bytes == Bytes(b[i])) << text << " " << a[i].title;
    }
    if (!policy.HasTail()) continue;
    const kernels::Summary &table = at_once.layer(kLast).summary,
                           &other = by_parts.layer(kLast).summary;
    EXPECT_EQ(table.tokens, other.tokens);
    EXPECT_EQ(table.tokens.first, 3);
    EXPECT_EQ(std::memcmp(table.data, other.data,
                          kernels::CellTableFloats(RetrievalScene::kKvHeads, RetrievalScene::kDim) *
                              sizeof(float)),
              0);
  }
}

// Tokens that are decoded densely, one by one, are taken in with the last of eight blocks, or with the next that selects, and
// the indexes have the same bits.
TEST_F(IndexesTest, DenseTokensWaitForEightBlocksOrForAQuery) {
  constexpr int32_t kPrompt = 37, kTogether = 8 * RetrievalScene::kBlockTokens, kSelects = 291;
  static_assert(kPrompt % kTogether != 0 && kPrompt < kTogether && kTogether < kSelects &&
                (kSelects + 1) % kTogether != 0);
  for (const char* text : {"lsh:k=4,p=0.9,dense_layers=0", "quest:k=16,dense_layers=0",
                           "pca:k=4,sink=3,window=1,rerank=on,dense_layers=0",
                           "pca:k=4,sink=3,window=1,verify=4,dense_layers=0"}) {
    const AttentionPolicy policy = RetrievalScene::Policy(text);
    const std::unique_ptr<Indexes> whole = Make(), waiting = Make();
    RetrievalState at_once(policy, RetrievalScene::SeesAll()),
        one_by_one(policy, RetrievalScene::SeesAll());
    ASSERT_TRUE(whole->GivePlace(at_once).ok());
    ASSERT_TRUE(waiting->GivePlace(one_by_one).ok());
    EXPECT_EQ(Append(*waiting, one_by_one, 0, kPrompt, /*selects=*/false), 0);
    int32_t from = kPrompt;
    for (int32_t token = kPrompt; token < kSelects; ++token) {
      const bool is_last = (token + 1) % kTogether == 0;
      EXPECT_EQ(Append(*waiting, one_by_one, token, token + 1, /*selects=*/false),
                is_last ? from : -1);
      if (is_last) from = token + 1;
      EXPECT_EQ(one_by_one.layer(kLast).indexed, from);
    }
    EXPECT_EQ(from, kSelects / kTogether * kTogether);
    EXPECT_EQ(Append(*waiting, one_by_one, kSelects, kSelects + 1), from);
    EXPECT_EQ(one_by_one.layer(kLast).indexed, kSelects + 1);
    Append(*whole, at_once, 0, kSelects + 1);
    const std::vector<Indexes::Part> a = whole->Parts(), b = waiting->Parts();
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_TRUE(Bytes(a[i]) == Bytes(b[i])) << text << " " << a[i].title;
    }
    EXPECT_EQ(at_once.layer(kLast).summary.tokens, one_by_one.layer(kLast).summary.tokens);
  }
}

// The rows of a verification wait together where their own keys cannot be chosen yet; elsewhere they are taken in at once. What
// a draft said in their place is forgotten either way.
TEST_F(IndexesTest, RowsOfAVerificationWaitWhereSelectionIsByMass) {
  constexpr int32_t kTogether = 8 * RetrievalScene::kBlockTokens;
  options_.summaries = 2;
  const std::unique_ptr<Indexes> indexes = Make(), plain = Make();
  const AttentionPolicy policy =
      RetrievalScene::Policy("pca:k=4,sink=3,window=40,verify=4,dense_layers=0");
  RetrievalState state(policy, RetrievalScene::SeesAll()), other(policy, RetrievalScene::SeesAll());
  ASSERT_TRUE(indexes->GivePlace(state).ok());
  ASSERT_TRUE(plain->GivePlace(other).ok());
  Append(*indexes, state, 0, 108);  // from 100 on a draft
  Append(*plain, other, 0, 100);
  for (float& value : scene_.k) value = -value;  // other tokens
  scene_.WriteKv();
  const auto verify = [&](int32_t first, int32_t last) {
    return Append(*indexes, state, first, last, /*selects=*/false, /*settled=*/first);
  };
  EXPECT_EQ(verify(100, 105), -1);
  EXPECT_EQ(state.layer(kLast).indexed, 100);
  EXPECT_EQ(verify(105, 114), -1);
  EXPECT_EQ(verify(kTogether - 5, kTogether - 1), -1);
  EXPECT_EQ(verify(kTogether - 1, kTogether + 3), 100);
  Append(*plain, other, 100, kTogether + 3);
  EXPECT_TRUE(Bytes(indexes->Parts()[2]) == Bytes(plain->Parts()[2]));

  for (const char* text :
       {"lsh:k=4,verify=4,dense_layers=0", "pca:k=4,p=0.9,verify=4,dense_layers=0"}) {
    RetrievalState eager(RetrievalScene::Policy(text), RetrievalScene::SeesAll());
    ASSERT_TRUE(indexes->GivePlace(eager).ok());
    Append(*indexes, eager, 0, 100);
    EXPECT_EQ(Append(*indexes, eager, 100, 105, /*selects=*/false, /*settled=*/100), 100) << text;
  }
}

// A token that replaces a refused one and waits is not the one that was taken in at its place.
TEST_F(IndexesTest, ADenseTokenThatWaitsDropsWhatStoodInItsPlace) {
  const std::unique_ptr<Indexes> refused = Make(), plain = Make();
  const AttentionPolicy policy = RetrievalScene::Policy("lsh:k=4,dense_layers=0");
  RetrievalState state(policy, RetrievalScene::SeesAll()), other(policy, RetrievalScene::SeesAll());
  Append(*refused, state, 0, 105);  // from 100 on a draft
  Append(*plain, other, 0, 100);
  for (float& value : scene_.k) value = -value;  // other tokens
  scene_.WriteKv();
  EXPECT_EQ(Append(*refused, state, 100, 101, /*selects=*/false), -1);
  EXPECT_EQ(state.layer(kLast).indexed, 100);
  EXPECT_EQ(Append(*refused, state, 101, 111), 100);
  Append(*plain, other, 100, 111);
  EXPECT_TRUE(Bytes(refused->Parts()[0]) == Bytes(plain->Parts()[0]));
}

// In tiers a block may be gone when its last token comes.
TEST_F(IndexesTest, InTiersNothingWaits) {
  storage::SystemClock clock;
  storage::HostStoreOptions of_store;
  of_store.capacity_bytes = of_store.chunk_bytes = 8 << 20;
  storage::HostStore store(of_store, &clock);
  RetrievalScene paged(testing::TestSeed(), &store);
  paged.WriteKv();
  options_.transform = paged.Fit();
  auto indexes = Indexes::Create(paged.config, *paged.memory, *paged.backend, options_);
  ASSERT_TRUE(indexes.ok()) << indexes.status();
  RetrievalState state(RetrievalScene::Policy("lsh:k=4,dense_layers=0"), RetrievalScene::SeesAll());
  const std::vector<int32_t> tokens(1);
  const SequenceChunk chunk{tokens, 0, paged.blocks, 1, &state, 0};
  PassRows rows;
  rows.chunk = &chunk;
  rows.first_retrieving = rows.last_retrieving = 1;
  PassRows* of_method = &rows;
  paged.memory->BeginPass(1);
  (*indexes)->Append(kLast, state.policy(), {&of_method, 1});
  EXPECT_EQ(rows.indexed_from, 0);
  paged.memory->EndPass();
}

// Tokens that are written again after a rollback are encoded again.
TEST_F(IndexesTest, WhatIsWrittenAgainIsTakenInAgain) {
  const std::unique_ptr<Indexes> indexes = Make(), fresh = Make();
  const AttentionPolicy policy = RetrievalScene::Policy("lsh:k=4,dense_layers=0");
  RetrievalState state(policy, RetrievalScene::SeesAll()), other(policy, RetrievalScene::SeesAll());
  Append(*indexes, state, 0, 200);
  const std::vector<std::byte> before = Bytes(indexes->Parts()[0]);
  state.Rewind(150);
  EXPECT_EQ(state.layer(kLast).indexed, 150);
  for (float& value : scene_.k) value = -value;  // other tokens
  scene_.WriteKv();
  Append(*indexes, state, 150, 200);
  Append(*fresh, other, 0, 200);
  const std::vector<std::byte> after = Bytes(indexes->Parts()[0]),
                               all_anew = Bytes(fresh->Parts()[0]);
  const size_t block_bytes = indexes->Parts()[0].block_bytes;
  for (int32_t block = 0; block < 200 / RetrievalScene::kBlockTokens; ++block) {
    const size_t at = scene_.blocks[block] * block_bytes;
    const auto same = [&](const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
      return std::equal(a.begin() + at, a.begin() + at + block_bytes, b.begin() + at);
    };
    // Block 9 has the last token before the border, too.
    EXPECT_EQ(same(after, before), block < 9) << block;
    EXPECT_EQ(same(after, all_anew), block > 9) << block;
  }
}

TEST_F(IndexesTest, PlacesForSummariesAreFewAndComeBack) {
  options_.summaries = 2;
  const std::unique_ptr<Indexes> indexes = Make();
  const AttentionPolicy policy = RetrievalScene::Policy("pca:k=4,dense_layers=0");
  auto one = std::make_unique<RetrievalState>(policy, RetrievalScene::SeesAll());
  RetrievalState two(policy, RetrievalScene::SeesAll()), three(policy, RetrievalScene::SeesAll());
  RetrievalState none(RetrievalScene::Policy("lsh:k=4,dense_layers=0"), RetrievalScene::SeesAll());
  ASSERT_TRUE(indexes->GivePlace(*one).ok());
  ASSERT_TRUE(indexes->GivePlace(two).ok());
  EXPECT_TRUE(indexes->GivePlace(two).ok());  // has one
  EXPECT_TRUE(indexes->GivePlace(none).ok());
  EXPECT_EQ(none.summaries().data(), nullptr);
  EXPECT_EQ(indexes->GivePlace(three).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(one->layer(0).summary.data, two.layer(0).summary.data);
  one.reset();
  EXPECT_TRUE(indexes->GivePlace(three).ok());
  two.Suspend();
  EXPECT_EQ(two.layer(0).summary.data, nullptr);
  RetrievalState four(policy, RetrievalScene::SeesAll());
  EXPECT_TRUE(indexes->GivePlace(four).ok());
}

}  // namespace
}  // namespace winnow::engine
