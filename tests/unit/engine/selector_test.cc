// Selector alone: kinds that score single keys find one that stands out (quest scores pages), and selections of a pass stay
// apart.
#include "engine/retrieval/selector.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/engine/retrieval_scene.h"

namespace winnow::engine {
namespace {

using kernels::Selection;
using Kind = AttentionPolicy::Kind;
constexpr int32_t kLast = RetrievalScene::kLayers - 1;
constexpr int32_t kPlanted = 77, kPosition = 300;

class SelectorTest : public ::testing::Test {
 protected:
  SelectorTest() : scene_(testing::TestSeed()) {
    // One key is what every query of kPosition looks for.
    constexpr int32_t kDim = RetrievalScene::kDim;
    for (int32_t kv_head = 0; kv_head < RetrievalScene::kKvHeads; ++kv_head) {
      float* key = &scene_.k[(kPlanted * RetrievalScene::kKvHeads + kv_head) * kDim];
      for (int32_t g = 0; g < scene_.shape.group(); ++g) {
        float* query =
            &scene_.q[(kPosition * RetrievalScene::kHeads + kv_head * scene_.shape.group() + g) *
                      kDim];
        for (int32_t i = 0; i < kDim; ++i) query[i] = 2 * key[i];
      }
    }
    scene_.WriteKv();
    options_.indexes = {{Kind::kLsh, 128}, {Kind::kQuest, 0}, {Kind::kPca, 128}};
    options_.four_bit_keys = options_.residual_codes = true;
    options_.transform = scene_.Fit();
    auto made = Indexes::Create(scene_.config, *scene_.memory, *scene_.backend, options_);
    EXPECT_TRUE(made.ok()) << made.status();
    indexes_ = *std::move(made);
    selector_ =
        std::make_unique<Selector>(scene_.shape, *scene_.backend, *scene_.memory, *indexes_);
    ScratchAllocator scratch(*scene_.backend);
    EXPECT_TRUE(selector_->Allocate(1 << 18, scratch).ok());
  }
  std::unique_ptr<RetrievalState> Indexed(const std::string& policy) {
    auto state =
        std::make_unique<RetrievalState>(RetrievalScene::Policy(policy), RetrievalScene::SeesAll());
    EXPECT_TRUE(indexes_->GivePlace(*state).ok());
    const std::vector<int32_t> tokens(RetrievalScene::kTokens);
    const SequenceChunk chunk{tokens, 0, scene_.blocks, 1, state.get(), 0};
    PassRows rows;
    rows.chunk = &chunk;
    rows.first_retrieving = rows.last_retrieving = rows.size();
    PassRows* of_method = &rows;
    scene_.memory->BeginPass(1);
    indexes_->Append(kLast, state->policy(), {&of_method, 1});
    return state;
  }
  static bool Has(const Selection& selected, int64_t query, int32_t head, int32_t token) {
    const int32_t* tokens = selected.chosen(query, head);
    return std::find(tokens, tokens + selected.count(query, head), token) !=
           tokens + selected.count(query, head);
  }

  RetrievalScene scene_;
  RetrievalOptions options_;
  std::unique_ptr<Indexes> indexes_;
  std::unique_ptr<Selector> selector_;
};

TEST_F(SelectorTest, KindsThatScoreKeysSelectTheOneThatStandsOut) {
  for (const char* text :
       {"oracle:k=4,window=9,dense_layers=0", "lsh:k=4,window=9,dense_layers=0",
        "lsh:k=4,p=0.5,window=9,dense_layers=0", "pca:k=4,window=9,tail=off,dense_layers=0",
        "pca:k=4,rerank=on,window=9,tail=off,dense_layers=0"}) {
    const auto state = Indexed(text);
    SceneCall made(scene_, state.get(), kPosition, kPosition + 2);
    std::vector<float> anchors(2 * RetrievalScene::kHeads, -1e30f);
    const Selection selected = selector_->Select(made.call, scene_.Queries(), {anchors.data()});
    for (int32_t head = 0; head < RetrievalScene::kKvHeads; ++head) {
      EXPECT_TRUE(Has(selected, 0, head, kPlanted)) << text << " " << head;
      for (int64_t query = 0; query < 2; ++query) {
        const kernels::RetrievalQuery& planned = made.queries[query];
        const int32_t count = selected.count(query, head);
        if (made.policy.p.has_value()) {
          EXPECT_LE(count, made.candidates[query]) << text;
        } else {
          EXPECT_EQ(count, planned.k) << text;
        }
        for (int32_t i = 0; i < count; ++i) {
          const int32_t token = selected.chosen(query, head)[i];
          EXPECT_TRUE(token >= planned.mid.first && token < planned.mid.last) << text;
          EXPECT_TRUE(i == 0 || token > selected.chosen(query, head)[i - 1]) << text;
        }
      }
    }
    // Select leaves the plan as it was.
    EXPECT_EQ(made.queries[0].k, PlanQuery(made.policy, kPosition, 0).k);
    EXPECT_EQ(made.candidates[0], PlanQuery(made.policy, kPosition, 0).candidates);
  }
}

// A query whose anchors have nearly all mass still selects k, and so does one whose anchors are not known: as if they had
// next to none.
TEST_F(SelectorTest, AnchorsThatAreNotKnownHaveNoMass) {
  const auto state = Indexed("pca:k=4,window=9,tail=off,dense_layers=0");
  SceneCall made(scene_, state.get(), kPosition, kPosition + 1);
  const auto select = [&](float mass) {
    const std::vector<float> anchors(RetrievalScene::kHeads, mass);
    const Selection selected = selector_->Select(made.call, scene_.Queries(), {anchors.data()});
    std::vector<int32_t> tokens;
    for (int32_t head = 0; head < RetrievalScene::kKvHeads; ++head) {
      EXPECT_EQ(selected.count(0, head), 4);
      tokens.insert(tokens.end(), selected.chosen(0, head), selected.chosen(0, head) + 4);
    }
    return tokens;
  };
  EXPECT_EQ(select(-std::numeric_limits<float>::infinity()), select(-100));
  select(50);
}

TEST_F(SelectorTest, AWindowSelectsNothing) {
  const auto state = Indexed("window:window=9,dense_layers=0");
  SceneCall made(scene_, state.get(), kPosition, kPosition + 3);
  const Selection selected = selector_->Select(made.call, scene_.Queries(), {});
  for (int64_t query = 0; query < 3; ++query) EXPECT_EQ(selected.count(query, 1), 0);
  const Selection nothing = selector_->Nothing();
  EXPECT_EQ(nothing.count(kMaxCallQueries - 1, RetrievalScene::kKvHeads - 1), 0);
}

// The counts of a call are read at the end of the pass.
TEST_F(SelectorTest, ASlotKeepsItsCountsWhileOthersSelect) {
  const auto few = Indexed("lsh:k=4,window=9,dense_layers=0"),
             many = Indexed("lsh:k=40,window=9,dense_layers=0");
  SceneCall a(scene_, few.get(), kPosition, kPosition + 2);
  SceneCall b(scene_, many.get(), kPosition, kPosition + 2);
  b.call.slot = kCallSlots - 1;
  const Selection first = selector_->Select(a.call, scene_.Queries(), {});
  const Selection second = selector_->Select(b.call, scene_.Queries(), {});
  for (int64_t query = 0; query < 2; ++query) {
    EXPECT_EQ(first.count(query, 1), 4);
    EXPECT_EQ(second.count(query, 1), 40);
  }
}

}  // namespace
}  // namespace winnow::engine
