// TailEstimator alone: how far tables of cells reach, and that a state with its tail is what plain loops give.
#include "engine/retrieval/tail_estimator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "engine/retrieval/selector.h"
#include "gtest/gtest.h"
#include "kernels/attention_state.h"
#include "kernels/transform_code.h"
#include "tests/unit/engine/retrieval_scene.h"

namespace winnow::engine {
namespace {

using kernels::Selection;
constexpr int32_t kLast = RetrievalScene::kLayers - 1;

class TailEstimatorTest : public ::testing::Test {
 protected:
  TailEstimatorTest() : scene_(testing::TestSeed()) {
    scene_.WriteKv();
    options_.indexes = {{AttentionPolicy::Kind::kPca, 128}};
    options_.transform = scene_.Fit();
    options_.summaries = 4;
    auto made = Indexes::Create(scene_.config, *scene_.memory, *scene_.backend, options_);
    EXPECT_TRUE(made.ok()) << made.status();
    indexes_ = *std::move(made);
    ScratchAllocator scratch(*scene_.backend);
    selector_ =
        std::make_unique<Selector>(scene_.shape, *scene_.backend, *scene_.memory, *indexes_);
    EXPECT_TRUE(selector_->Allocate(1 << 18, scratch).ok());
    tail_ =
        std::make_unique<TailEstimator>(scene_.shape, *scene_.memory, *scene_.backend, *indexes_);
    EXPECT_TRUE(tail_->Allocate(/*completes=*/false, /*has_tables=*/true, scratch).ok());
  }
  std::unique_ptr<RetrievalState> State(const std::string& policy) {
    auto state =
        std::make_unique<RetrievalState>(RetrievalScene::Policy(policy), RetrievalScene::SeesAll());
    EXPECT_TRUE(indexes_->GivePlace(*state).ok());
    return state;
  }
  // Codes of the tokens below `last`; no query is near enough for a table.
  void Append(RetrievalState& state, int32_t last) {
    const std::vector<int32_t> tokens(last);
    const SequenceChunk chunk{tokens, 0, scene_.blocks, 1, &state, 0};
    PassRows rows;
    rows.chunk = &chunk;  // first_retrieving 0: the table ends at the sink
    PassRows* of_method = &rows;
    scene_.memory->BeginPass(1);
    indexes_->Append(kLast, state.policy(), {&of_method, 1});
  }

  RetrievalScene scene_;
  RetrievalOptions options_;
  std::unique_ptr<Indexes> indexes_;
  std::unique_ptr<Selector> selector_;
  std::unique_ptr<TailEstimator> tail_;
};

TEST_F(TailEstimatorTest, ATableReachesTheLastBorderThatTheQuerySees) {
  const auto state = State("pca:k=4,window=9,sink=5,dense_layers=0");
  Append(*state, RetrievalScene::kTokens);
  const kernels::Summary& table = state->layer(kLast).summary;
  for (const int32_t position : {126, 127, 190, 191, 300}) {
    SceneCall made(scene_, state.get(), position, position + 1);
    ASSERT_TRUE(tail_->ExtendTables(made.call));
    EXPECT_EQ(table.tokens.first, 5);
    EXPECT_EQ(table.tokens.last, (position + 1) / 64 * 64) << position;
  }
  // Step by step or at once: the same sums.
  const auto other = State("pca:k=4,window=9,sink=5,dense_layers=0");
  Append(*other, RetrievalScene::kTokens);
  SceneCall made(scene_, other.get(), 300, 301);
  ASSERT_TRUE(tail_->ExtendTables(made.call));
  EXPECT_EQ(std::memcmp(other->summaries().data(), state->summaries().data(),
                        state->summaries().size_bytes()),
            0);
}

// A query that sees no border has a table without tokens, in a place that was another sequence's.
TEST_F(TailEstimatorTest, ATableWithoutTokensIsTheSameWhateverItsPlaceHeld) {
  const auto states_over = [&](float held) {
    const auto state = State("pca:k=4,window=9,sink=5,dense_layers=0");
    Append(*state, 60);
    std::fill_n(state->layer(kLast).summary.data,
                kernels::CellTableFloats(RetrievalScene::kKvHeads, RetrievalScene::kDim), held);
    SceneCall made(scene_, state.get(), 58, 59);
    EXPECT_TRUE(tail_->ExtendTables(made.call));
    EXPECT_EQ(state->layer(kLast).summary.tokens.size(), 0);
    std::vector<float> anchors(RetrievalScene::kHeads, 0.0f);
    selector_->Select(made.call, scene_.Queries(), {anchors.data(), tail_->MassesFor(made.policy)});
    std::vector<float> states(RetrievalScene::kHeads *
                              kernels::AttentionStateFloats(RetrievalScene::kDim));
    for (int32_t head = 0; head < RetrievalScene::kHeads; ++head) {
      kernels::ResetAttentionState(
          &states[head * kernels::AttentionStateFloats(RetrievalScene::kDim)],
          RetrievalScene::kDim);
    }
    tail_->MergeTables(made.call, states.data(), /*measured=*/false);
    return states;
  };
  EXPECT_EQ(states_over(0), states_over(3));
}

// With no key read and the tail's masses over all candidates, a state is the masses' weighted mean of cells' means: its
// attention lies among the values, and its mass is the estimated one.
TEST_F(TailEstimatorTest, TheTailIsOneMoreState) {
  const auto state = State("pca:k=4,window=9,sink=5,dense_layers=0");
  Append(*state, RetrievalScene::kTokens);
  SceneCall made(scene_, state.get(), 300, 301);
  ASSERT_TRUE(tail_->ExtendTables(made.call));
  std::vector<float> anchors(RetrievalScene::kHeads, -std::numeric_limits<float>::infinity());
  ASSERT_NE(tail_->MassesFor(made.policy), nullptr);
  const Selection selected = selector_->Select(made.call, scene_.Queries(),
                                               {anchors.data(), tail_->MassesFor(made.policy)});
  constexpr int32_t kDim = RetrievalScene::kDim, kHeads = RetrievalScene::kHeads;
  const int64_t stride = kernels::AttentionStateFloats(kDim);
  // The exact state of the selected tokens alone.
  std::vector<const std::byte*> addresses;
  std::vector<kernels::RowList> lists;
  for (int32_t head = 0; head < RetrievalScene::kKvHeads; ++head) {
    for (int32_t t = 0; t < selected.count(0, head); ++t) {
      const int32_t token = selected.chosen(0, head)[t];
      addresses.push_back(scene_.memory->residency().Resident(
          kLast, scene_.blocks[token / 16], scene_.layout.RowOffset(0, head, token % 16)));
    }
  }
  const std::byte* const* rows = addresses.data();
  for (int32_t head = 0; head < RetrievalScene::kKvHeads; ++head) {
    lists.push_back({rows, selected.count(0, head), 0, selected.count(0, head)});
    rows += selected.count(0, head);
  }
  std::vector<float> states(kHeads * stride), before(kHeads), after(kHeads);
  scene_.backend->AttendRows({.q = scene_.Queries(),
                              .queries = made.queries,
                              .rows = {.layout = scene_.layout, .lists = lists},
                              .scale = scene_.shape.scale,
                              .states = states.data()});
  scene_.backend->StateMasses(states.data(), kHeads, kDim, before.data());
  std::vector<float> unmeasured = states;
  tail_->MergeTables(made.call, unmeasured.data(), /*measured=*/false);
  tail_->MergeTables(made.call, states.data(), /*measured=*/true);
  EXPECT_EQ(states, unmeasured);
  scene_.backend->StateMasses(states.data(), kHeads, kDim, after.data());
  const StateMasses measured = tail_->MassesOf(made.call.slot);
  EXPECT_EQ(std::vector(measured.before, measured.before + kHeads), before);
  EXPECT_EQ(std::vector(measured.after, measured.after + kHeads), after);
  const kernels::TransformCodeWeights& weights = options_.transform->layers[kLast];
  for (int32_t head = 0; head < kHeads; ++head) {
    const int32_t kv_head = head / scene_.shape.group();
    const float scale2 = scene_.shape.scale * kernels::kTransformLog2E;
    const kernels::TransformQuery query = kernels::PrepareTransformQueryRef(
        &scene_.q[(300 * kHeads + head) * kDim], weights, kv_head, scale2);
    double unread = 0;
    for (int32_t t = made.queries[0].mid.first; t < made.queries[0].mid.last; ++t) {
      const int32_t* tokens = selected.chosen(0, kv_head);
      if (std::find(tokens, tokens + selected.count(0, kv_head), t) !=
          tokens + selected.count(0, kv_head)) {
        continue;
      }
      const std::vector<uint8_t> index = kernels::TransformIndexesRef(
          &scene_.k[(t * RetrievalScene::kKvHeads + kv_head) * kDim], weights, kv_head);
      double dot = 0;
      for (size_t i = 0; i < index.size(); ++i) dot += query.coef[i] * index[i];
      unread += std::exp((query.a * dot + query.b) / kernels::kTransformLog2E);
    }
    const double expected = std::log(std::exp(double{before[head]}) + unread);
    EXPECT_GT(after[head], before[head]);
    // Masses of cells are sums of whole numbers; deltas shift what the fit says they should.
    EXPECT_NEAR(after[head], expected, 0.5) << head;
  }
}

TEST_F(TailEstimatorTest, APolicyWithoutATailLeavesTheTableAlone) {
  const auto state = State("pca:k=4,window=9,tail=off,dense_layers=0");
  EXPECT_EQ(tail_->MassesFor(state->policy()), nullptr);
  SceneCall made(scene_, state.get(), 300, 301);
  EXPECT_TRUE(tail_->ExtendTables(made.call));
  EXPECT_EQ(state->layer(kLast).summary.tokens.size(), 0);
  EXPECT_TRUE(tail_->PinCompletion(made.call));
}

}  // namespace
}  // namespace winnow::engine
