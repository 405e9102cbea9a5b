// Indexes alone: what Append leaves in the pools, and who gets a place for summaries.
#include "engine/retrieval/indexes.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
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
  // Appends tokens [first, last) of the scene's sequence.
  void Append(Indexes& indexes, RetrievalState& state, int32_t first, int32_t last) {
    const std::vector<int32_t> tokens(last - first);
    const SequenceChunk chunk{tokens, first, scene_.blocks, 1, &state, 0};
    PassRows rows;
    rows.chunk = &chunk;
    rows.first_retrieving = rows.last_retrieving = rows.size();
    scene_.memory->BeginPass(1);
    PassRows* of_method = &rows;
    indexes.Append(kLast, state.policy(), {&of_method, 1});
    EXPECT_EQ(rows.indexed_from, first);
    scene_.memory->EndPass();
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
    RetrievalState at_once(policy, RetrievalScene::kLayers),
        by_parts = {policy, RetrievalScene::kLayers};
    ASSERT_TRUE(whole->GivePlace(at_once).ok());
    ASSERT_TRUE(cut->GivePlace(by_parts).ok());
    Append(*whole, at_once, 0, RetrievalScene::kTokens);
    for (const auto& [first, last] : std::vector<std::pair<int32_t, int32_t>>{
             {0, 7}, {7, 100}, {100, 101}, {101, 256}, {256, RetrievalScene::kTokens}}) {
      Append(*cut, by_parts, first, last);
    }
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

// Tokens that are written again after a rollback are encoded again.
TEST_F(IndexesTest, WhatIsWrittenAgainIsTakenInAgain) {
  const std::unique_ptr<Indexes> indexes = Make(), fresh = Make();
  const AttentionPolicy policy = RetrievalScene::Policy("lsh:k=4,dense_layers=0");
  RetrievalState state(policy, RetrievalScene::kLayers), other(policy, RetrievalScene::kLayers);
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
  auto one = std::make_unique<RetrievalState>(policy, RetrievalScene::kLayers);
  RetrievalState two(policy, RetrievalScene::kLayers), three(policy, RetrievalScene::kLayers);
  RetrievalState none(RetrievalScene::Policy("lsh:k=4,dense_layers=0"), RetrievalScene::kLayers);
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
  RetrievalState four(policy, RetrievalScene::kLayers);
  EXPECT_TRUE(indexes->GivePlace(four).ok());
}

}  // namespace
}  // namespace winnow::engine
