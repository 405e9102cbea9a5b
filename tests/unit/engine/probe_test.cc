// Probe and ReadCounter alone: what a selection covers, and what it read, each counted once.
#include "engine/retrieval/probe.h"

#include <cmath>
#include <memory>
#include <vector>

#include "engine/retrieval/read_counter.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/retrieval_scene.h"

namespace winnow::engine {
namespace {

using kernels::Selection;
constexpr int32_t kLast = RetrievalScene::kLayers - 1, kPosition = 300;
constexpr int32_t kHeads = RetrievalScene::kHeads, kKvHeads = RetrievalScene::kKvHeads;
constexpr int32_t kDim = RetrievalScene::kDim;

class ProbeTest : public ::testing::Test {
 protected:
  ProbeTest() : scene_(testing::TestSeed()) {
    scene_.WriteKv();
    scene_.memory->BeginPass(1);
  }
  // The first `count` candidates of every head.
  Selection SelectFirst(const SceneCall& made, int32_t count) {
    counts_.assign(made.queries.size() * kKvHeads, count);
    tokens_.assign(counts_.size() * static_cast<size_t>(count), 0);
    for (size_t i = 0; i < tokens_.size(); ++i) {
      tokens_[i] = made.queries[0].mid.first + static_cast<int32_t>(i) % count;
    }
    return {kKvHeads, count, counts_.data(), tokens_.data()};
  }
  // The share of the mass that a query of a head gives anchors and the first `count` candidates.
  double Covered(int32_t kv_head, const kernels::RetrievalQuery& query, int32_t count) const {
    double covered = 0;
    const int32_t group = scene_.shape.group();
    for (int32_t g = 0; g < group; ++g) {
      double sum = 0, read = 0;
      for (int32_t t = 0; t <= query.position; ++t) {
        double logit = 0;
        for (int32_t i = 0; i < kDim; ++i) {
          logit += double{scene_.q[(query.position * kHeads + kv_head * group + g) * kDim + i]} *
                   scene_.k[(t * kKvHeads + kv_head) * kDim + i];
        }
        const double mass = std::exp(logit * scene_.shape.scale);
        sum += mass;
        if (t < query.mid.first + count || t >= query.mid.last) read += mass;
      }
      covered += read / sum / group;
    }
    return covered;
  }

  RetrievalScene scene_;
  std::vector<int32_t> counts_, tokens_;
};

TEST_F(ProbeTest, CoverageIsTheShareOfTheMassThatWasRead) {
  RetrievalState state(RetrievalScene::Policy("lsh:k=40,window=9"), RetrievalScene::SeesAll());
  SceneCall made(scene_, &state, kPosition, kPosition + 1);
  Probe probe(scene_.shape, *scene_.memory, *scene_.backend, /*interval=*/1);
  probe.Measure(made.call, SelectFirst(made, 40), scene_.Queries());
  EXPECT_EQ(state.counts().probes, uint64_t{kKvHeads});
  double expected = 0;
  for (int32_t head = 0; head < kKvHeads; ++head) expected += Covered(head, made.queries[0], 40);
  EXPECT_NEAR(state.counts().coverage, expected, 1e-3);
  EXPECT_GT(state.counts().iou, 0);
  EXPECT_LT(state.counts().iou, kKvHeads);
}

TEST_F(ProbeTest, OnlyQueriesThatAreDueAreMeasuredAndNoneTwice) {
  RetrievalState state(RetrievalScene::Policy("lsh:k=40,window=9"), RetrievalScene::SeesAll());
  SceneCall made(scene_, &state, kPosition - 20, kPosition);
  Probe never(scene_.shape, *scene_.memory, *scene_.backend, /*interval=*/0);
  never.Measure(made.call, SelectFirst(made, 40), scene_.Queries());
  EXPECT_EQ(state.counts().probes, 0u);
  EXPECT_FALSE(never.IsDue(made.call));
  Probe some(scene_.shape, *scene_.memory, *scene_.backend, /*interval=*/3);
  uint64_t due = 0;
  for (const kernels::RetrievalQuery& query : made.queries) {
    due += IsProbed(query.position, kLast, 3) ? 1 : 0;
  }
  ASSERT_GT(due, 0u);
  ASSERT_LT(due, made.queries.size());
  EXPECT_TRUE(some.IsDue(made.call));
  for (size_t i = 0; i < made.queries.size(); ++i) {
    EXPECT_EQ(some.IsDue(made.call.Part(i, 1)), IsProbed(made.queries[i].position, kLast, 3));
  }
  some.Measure(made.call, SelectFirst(made, 40), scene_.Queries());
  EXPECT_EQ(state.counts().probes, due * kKvHeads);
  state.CountedUpTo(kPosition);
  some.Measure(made.call, SelectFirst(made, 40), scene_.Queries());
  EXPECT_EQ(state.counts().probes, due * kKvHeads);
}

TEST_F(ProbeTest, BelowTheFloorTheNextTokenReadsMore) {
  for (const bool below : {false, true}) {
    RetrievalState state(RetrievalScene::Policy(below ? "lsh:k=4,window=9,floor=1"
                                                      : "lsh:k=4,window=9,floor=0.0001"),
                         RetrievalScene::SeesAll());
    SceneCall made(scene_, &state, kPosition, kPosition + 1);
    Probe probe(scene_.shape, *scene_.memory, *scene_.backend, /*interval=*/1);
    probe.Measure(made.call, SelectFirst(made, 4), scene_.Queries());
    EXPECT_EQ(state.floor().Taken(kPosition), 0);
    EXPECT_EQ(state.floor().Taken(kPosition + 1), below ? 1 : 0);
  }
}

class ReadCounterTest : public ProbeTest {};

TEST_F(ReadCounterTest, APositionCountsOnceHoweverOftenItIsComputed) {
  RetrievalState state(RetrievalScene::Policy("lsh:k=7,window=9"), RetrievalScene::SeesAll());
  SceneCall made(scene_, &state, kPosition, kPosition + 2);
  ReadCounter counter(scene_.shape, *scene_.memory, *scene_.backend);
  ASSERT_TRUE(counter.Allocate().ok());
  for (int turn = 0; turn < 2; ++turn) {
    counter.Defer(made.call, SelectFirst(made, 7), {});
    EXPECT_EQ(counter.slot(), 1);
    counter.EndPass({&made.rows, 1}, true);
    EXPECT_EQ(counter.slot(), 0);
    const uint64_t dense = (301 + 302) * uint64_t{RetrievalScene::kLayers} * kKvHeads;
    const auto mid = static_cast<uint64_t>(made.queries[0].mid.size() + made.queries[1].mid.size());
    EXPECT_EQ(state.counts().rows_dense, dense);
    EXPECT_EQ(state.counts().selected_rows, 2u * 7 * kKvHeads);
    EXPECT_EQ(state.counts().candidate_rows, mid * kKvHeads);
    EXPECT_EQ(state.counts().rows_read, dense - (mid - 2 * 7) * kKvHeads);
  }
}

// Anchors that were read before their selection was known lie in the cache the second time, and count as read once.
TEST_F(ReadCounterTest, AnchorsThatWereFetchedFirstCountWhereTheyCameFrom) {
  RetrievalState state(RetrievalScene::Policy("lsh:k=7,window=9"), RetrievalScene::SeesAll());
  SceneCall made(scene_, &state, kPosition, kPosition + 1);
  ReadCounter counter(scene_.shape, *scene_.memory, *scene_.backend);
  ASSERT_TRUE(counter.Allocate().ok());
  const Fetcher::TierRows all{.cached = 30, .stored = 12}, anchors{.cached = 1, .stored = 20};
  using Entries = Fetcher::Entries;
  counter.Count(made.call, SelectFirst(made, 7), {&all, 1}, {&anchors, 1}, Entries::kAll);
  EXPECT_EQ(state.counts().rows_cached, 10u);
  EXPECT_EQ(state.counts().rows_stored, 32u);
  counter.Count(made.call, SelectFirst(made, 7), {&all, 1}, {}, Entries::kAll);
  EXPECT_EQ(state.counts().rows_cached, 40u);
  EXPECT_EQ(state.counts().rows_stored, 44u);
  // Chosen entries alone were fetched after the anchors: both were read.
  counter.Count(made.call, SelectFirst(made, 7), {&all, 1}, {&anchors, 1}, Entries::kChosen);
  EXPECT_EQ(state.counts().rows_cached, 71u);
  EXPECT_EQ(state.counts().rows_stored, 76u);
}

// When all slots are taken they are counted before the pass ends.
TEST_F(ReadCounterTest, SlotsAreNeverMoreThanThereAre) {
  RetrievalState state(RetrievalScene::Policy("lsh:k=7,window=9"), RetrievalScene::SeesAll());
  SceneCall made(scene_, &state, kPosition, kPosition + 1);
  ReadCounter counter(scene_.shape, *scene_.memory, *scene_.backend);
  ASSERT_TRUE(counter.Allocate().ok());
  for (int32_t i = 0; i < kCallSlots + 3; ++i) {
    ASSERT_LT(counter.slot(), kCallSlots);
    counter.Defer(made.call, SelectFirst(made, 7), {});
  }
  EXPECT_EQ(state.counts().selected_rows, uint64_t{kCallSlots} * 7 * kKvHeads);
  counter.EndPass({&made.rows, 1}, true);
  EXPECT_EQ(state.counts().selected_rows, uint64_t{kCallSlots + 3} * 7 * kKvHeads);
}

}  // namespace
}  // namespace winnow::engine
