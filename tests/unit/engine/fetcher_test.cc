// Fetcher alone: whatever tier a KV entry is in, its address leads to its bytes, in the order of positions.
#include "engine/retrieval/fetcher.h"

#include <algorithm>
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

using kernels::Selection;
constexpr int32_t kLast = RetrievalScene::kLayers - 1, kPosition = 300;

storage::HostStoreOptions StoreOptions() {
  storage::HostStoreOptions options;
  options.capacity_bytes = options.chunk_bytes = 8 << 20;
  return options;
}

class FetcherTest : public ::testing::Test {
 protected:
  FetcherTest()
      : seed_(testing::TestSeed()),
        store_(std::make_unique<storage::HostStore>(StoreOptions(), &clock_), 1) {}

  // Frames for one sequence in one layer and a few more: writing the second layer saves the first's.
  void Make(int64_t frames, size_t staging_bytes = size_t{1} << 20) {
    scene_ = std::make_unique<RetrievalScene>(seed_, &store_, frames);
    fetcher_ = std::make_unique<Fetcher>(scene_->shape, *scene_->memory, *scene_->backend);
    ScratchAllocator scratch(*scene_->backend);
    ASSERT_TRUE(fetcher_
                    ->Allocate(1 << 16,
                               {.cache_bytes = size_t{1} << 18, .staging_bytes = staging_bytes},
                               scratch)
                    .ok());
    KvMemory& memory = *scene_->memory;
    for (int32_t i = 0; i < RetrievalScene::kUsed; ++i) {
      // A block at a time, as a prompt is read.
      memory.BeginPass(1);
      for (int32_t layer = 0; layer < RetrievalScene::kLayers; ++layer) {
        std::vector<int32_t> table(RetrievalScene::kUsed), frames_of;
        PinnedBlocks pinned;
        ASSERT_TRUE(memory.Pin(0, layer, scene_->blocks, i, i + 1, &frames_of, &pinned, [] {}));
        const int32_t first = i * RetrievalScene::kBlockTokens;
        const kernels::AttentionChunk chunk{first, RetrievalScene::kBlockTokens, first,
                                            pinned.table};
        scene_->backend->WriteKv(RetrievalScene::Rows(scene_->k, RetrievalScene::kKvHeads),
                                 RetrievalScene::Rows(scene_->v, RetrievalScene::kKvHeads),
                                 {&chunk, 1}, pinned.pool, scene_->layout);
        memory.Unpin();
      }
      BlockName name;
      name.chain[0] = static_cast<uint8_t>(i + 1);
      name.index = i;
      memory.Seal(scene_->blocks[i], name, /*keep=*/true);
      memory.EndPass();
      for (int turn = 0; turn < 10; ++turn) memory.Idle();
    }
    state_ = std::make_unique<RetrievalState>(RetrievalScene::Policy("lsh:k=30,window=20,sink=5"),
                                              RetrievalScene::SeesAll());
  }
  int32_t Resident() const {
    return static_cast<int32_t>(std::count_if(
        scene_->blocks.begin(), scene_->blocks.end(),
        [&](int32_t block) { return scene_->memory->residency().IsResident(kLast, block); }));
  }

  // Every ninth candidate of each query, other ones for each head.
  Selection SelectNinths(const SceneCall& made) {
    constexpr int32_t kHeads = RetrievalScene::kKvHeads, kCapacity = 64;
    counts_.assign(made.queries.size() * kHeads, 0);
    tokens_.assign(counts_.size() * kCapacity, 0);
    const Selection selected{kHeads, kCapacity, counts_.data(), tokens_.data()};
    for (size_t i = 0; i < made.queries.size(); ++i) {
      for (int32_t head = 0; head < kHeads; ++head) {
        const kernels::TokenRange mid = made.queries[i].mid;
        for (int32_t t = mid.first + 3 * head; t < mid.last; t += 9) {
          const auto row = static_cast<int64_t>(i);
          selected.chosen(row, head)[selected.count(row, head)++] = t;
        }
      }
    }
    return selected;
  }
  void ExpectRows(const SceneCall& made, const Selection& selected,
                  Fetcher::Entries entries = Fetcher::Entries::kAll) {
    const bool anchors = entries == Fetcher::Entries::kAll;
    constexpr int32_t kHeads = RetrievalScene::kKvHeads, kDim = RetrievalScene::kDim;
    ASSERT_EQ(fetcher_->lists().size(), made.queries.size() * kHeads);
    for (size_t i = 0; i < made.queries.size(); ++i) {
      const kernels::RetrievalQuery& query = made.queries[i];
      for (int32_t head = 0; head < kHeads; ++head) {
        const auto row = static_cast<int64_t>(i);
        std::vector<int32_t> tokens;
        for (int32_t t = 0; anchors && t < query.mid.first; ++t) tokens.push_back(t);
        for (int32_t t = 0; t < selected.count(row, head); ++t) {
          tokens.push_back(selected.chosen(row, head)[t]);
        }
        for (int32_t t = query.mid.last; anchors && t <= query.position; ++t) tokens.push_back(t);
        const kernels::RowList& list = fetcher_->lists()[i * kHeads + head];
        ASSERT_EQ(list.count, std::ssize(tokens));
        EXPECT_EQ(list.chosen_first, anchors ? query.mid.first : 0);
        EXPECT_EQ(list.chosen_last - list.chosen_first, selected.count(row, head));
        for (size_t t = 0; t < tokens.size(); ++t) {
          const float* key = &scene_->k[(tokens[t] * kHeads + head) * kDim];
          const float* value = &scene_->v[(tokens[t] * kHeads + head) * kDim];
          ASSERT_EQ(std::memcmp(list.rows[t], key, kDim * sizeof(float)), 0) << tokens[t];
          ASSERT_EQ(std::memcmp(list.rows[t] + kDim * sizeof(float), value, kDim * sizeof(float)),
                    0)
              << tokens[t];
        }
      }
    }
  }

  const uint64_t seed_;
  storage::SystemClock clock_;
  storage::FaultyStore store_;
  std::unique_ptr<RetrievalScene> scene_;
  std::unique_ptr<Fetcher> fetcher_;
  std::unique_ptr<RetrievalState> state_;
  std::vector<int32_t> counts_, tokens_;
};

constexpr int64_t kFewFrames = RetrievalScene::kUsed + 6;

TEST_F(FetcherTest, EntriesOfEveryTierHaveTheirBytes) {
  Make(kFewFrames);
  EXPECT_LT(Resident(), RetrievalScene::kUsed);
  scene_->memory->BeginPass(1);
  SceneCall made(*scene_, state_.get(), kPosition, kPosition + 2);
  const Selection selected = SelectNinths(made);
  ASSERT_TRUE(fetcher_->Address(made.call, selected, [] { return true; }));
  ExpectRows(made, selected);
  const Fetcher::TierRows first = fetcher_->tier_rows()[0];
  EXPECT_GT(first.stored, 0u);
  fetcher_->EndCall();
  // Again: what was read is in the cache now.
  ASSERT_TRUE(fetcher_->Address(made.call, selected, [] { return true; }));
  ExpectRows(made, selected);
  EXPECT_EQ(fetcher_->tier_rows()[0].stored, 0u);
  EXPECT_EQ(fetcher_->tier_rows()[0].cached, first.stored);
  fetcher_->EndCall();
  // Without the anchors, which somebody has attended already.
  ASSERT_TRUE(fetcher_->Address(
      made.call, selected, [] { return true; }, Fetcher::Entries::kChosen));
  ExpectRows(made, selected, Fetcher::Entries::kChosen);
  EXPECT_LE(fetcher_->tier_rows()[0].cached, first.stored);
  fetcher_->EndCall();
  fetcher_->EndPass();
}

TEST_F(FetcherTest, WhereNothingFitsFewerQueriesAreAskedFor) {
  Make(kFewFrames, /*staging_bytes=*/4 * 2 * 64 * 4 * 2 * 16);
  scene_->memory->BeginPass(1);
  SceneCall made(*scene_, state_.get(), kPosition, kPosition + 2);
  const Selection selected = SelectNinths(made);
  bool pinned = false;
  EXPECT_FALSE(fetcher_->Address(made.call, selected, [&] {
    pinned = true;
    return false;
  }));
  EXPECT_TRUE(pinned);
  // One query is served whatever it takes.
  QueryCall one = made.call.Part(0, 1);
  ASSERT_TRUE(fetcher_->Address(one, selected, [] { return true; }));
  EXPECT_EQ(fetcher_->lists().size(), size_t{RetrievalScene::kKvHeads});
  fetcher_->EndCall();
  fetcher_->EndPass();
}

TEST_F(FetcherTest, AChunkWhoseEntriesTheStoreLostIsLost) {
  Make(kFewFrames);
  scene_->memory->BeginPass(1);
  SceneCall made(*scene_, state_.get(), kPosition, kPosition + 1);
  const Selection selected = SelectNinths(made);
  store_.faults.miss_share = 1;
  ASSERT_TRUE(fetcher_->Address(made.call, selected, [] { return true; }));
  EXPECT_TRUE(scene_->memory->chunk_lost(0));
  fetcher_->EndCall();
  fetcher_->EndPass();
}

}  // namespace
}  // namespace winnow::engine
