// Staging on two streams that do what they are asked for in any order that streams allow: whatever it is,
// attention finds in its area what the pool held when it was asked for.
#include "kernels/cuda/staging.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "gtest/gtest.h"
#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int32_t kBlockTokens = 16;

// What a block holds is a number, which grows with each write.
class TwoStreams final : public StagingStreams {
 public:
  TwoStreams(Random& random, int32_t num_pools, int32_t num_blocks, int32_t room)
      : random_(random),
        pools_(num_pools, std::vector<int64_t>(num_blocks)),
        written_(pools_),
        areas_(2, std::vector<int64_t>(room, -1)) {}

  bool WaitForAhead() override {
    Ask(
        kMain, [] {}, ahead_.asked());
    return true;
  }
  bool Bring(int32_t pool, std::span<const BlockMove> moves, int area) override {
    EXPECT_FALSE(moves.empty());
    for (const BlockMove& move : moves) Copy(kMain, pool, move, area);
    brought_ += static_cast<int64_t>(moves.size());
    return true;
  }
  bool BringAhead(int32_t pool, std::span<const BlockMove> moves, int area) override {
    EXPECT_FALSE(moves.empty());
    Ask(
        kAhead, [] {}, main_.asked());
    for (const BlockMove& move : moves) Copy(kAhead, pool, move, area);
    ++aheads_;
    brought_ahead_ += static_cast<int64_t>(moves.size());
    return true;
  }
  bool Attend(std::span<const AttentionChunk> chunks, int area) override {
    for (const AttentionChunk& chunk : chunks) {
      const AttentionChunk& wanted = (*attended_pool_chunks_)[attended_++];
      EXPECT_EQ(chunk.first_row, wanted.first_row);
      EXPECT_EQ(chunk.num_tokens, wanted.num_tokens);
      EXPECT_EQ(chunk.position, wanted.position);
      EXPECT_EQ(chunk.window, wanted.window);
      const int32_t blocks = (wanted.position + wanted.num_tokens - 1) / kBlockTokens + 1;
      for (int32_t i = wanted.FirstRead() / kBlockTokens; i < blocks; ++i) {
        // Each block is a step of its own: an area that is filled under attention's eyes shows.
        const int64_t content = written_[attended_pool_][wanted.block_table[i]];
        Ask(kMain, [this, area, place = chunk.block_table[i], content] {
          mistakes_ += areas_[area][place] != content;
        });
      }
    }
    return true;
  }

  // The operation under test asks for attention of these, in this order.
  void Expect(int32_t pool, const std::vector<AttentionChunk>& chunks) {
    attended_pool_ = pool;
    attended_pool_chunks_ = &chunks;
    attended_ = 0;
  }
  size_t attended() const { return attended_; }
  void Write(int32_t pool, int32_t block) {
    const int64_t content = ++last_content_;
    written_[pool][block] = content;
    Ask(kMain, [this, pool, block, content] { pools_[pool][block] = content; });
  }
  // From the host, which has waited.
  void WriteNow(int32_t pool, int32_t block) {
    pools_[pool][block] = written_[pool][block] = ++last_content_;
  }
  // Some more of what was asked for is done; all of it, if `all`.
  void Run(bool all) {
    for (int64_t steps = all ? INT64_MAX : random_.Int(0, 40); steps > 0; --steps) {
      Stream* const first = random_.Int(0, 1) == 0 ? &main_ : &ahead_;
      Stream* const second = first == &main_ ? &ahead_ : &main_;
      if (!DoOne(*first, *second) && !DoOne(*second, *first)) break;
    }
    if (all) {
      ASSERT_TRUE(main_.done == main_.asked() && ahead_.done == ahead_.asked());
    }
  }
  int64_t mistakes() const { return mistakes_; }
  int64_t aheads() const { return aheads_; }
  int64_t brought() const { return brought_; }
  int64_t brought_ahead() const { return brought_ahead_; }

 private:
  enum Which { kMain, kAhead };
  struct Step {
    std::function<void()> work;
    size_t after = 0;  // of the other stream
  };
  struct Stream {
    std::vector<Step> steps;
    size_t done = 0;
    size_t asked() const { return steps.size(); }
  };
  void Ask(Which which, std::function<void()> work, size_t after = 0) {
    (which == kMain ? main_ : ahead_).steps.push_back({std::move(work), after});
  }
  void Copy(Which which, int32_t pool, BlockMove move, int area) {
    // What is read may arrive later.
    const auto on_its_way = std::make_shared<int64_t>();
    Ask(which, [this, pool, move, on_its_way] { *on_its_way = pools_[pool][move.from]; });
    Ask(which, [this, area, move, on_its_way] { areas_[area][move.to] = *on_its_way; });
  }
  static bool DoOne(Stream& stream, const Stream& other) {
    if (stream.done == stream.asked() || stream.steps[stream.done].after > other.done) return false;
    stream.steps[stream.done++].work();
    return true;
  }

  Random& random_;
  std::vector<std::vector<int64_t>> pools_, written_;  // as of now, and when all is done
  std::vector<std::vector<int64_t>> areas_;
  Stream main_, ahead_;
  int64_t last_content_ = 0, mistakes_ = 0, aheads_ = 0, brought_ = 0, brought_ahead_ = 0;
  int32_t attended_pool_ = 0;
  const std::vector<AttentionChunk>* attended_pool_chunks_ = nullptr;
  size_t attended_ = 0;
};

class StagingTest : public testing::Test {
 protected:
  Random random_;
};

// Sequences that grow, share blocks, end and begin again; layers that are left out; last rows only.
TEST_F(StagingTest, AttentionFindsWhatWasWrittenInAnyOrderOfTwoStreams) {
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(random_.seed()));
  int64_t aheads = 0;
  for (int round = 0; round < 1500; ++round) {
    const auto num_pools = static_cast<int32_t>(random_.Int(1, 6));
    const auto room = static_cast<int32_t>(random_.Int(4, 14));  // blocks of the longest sequence
    const auto count = static_cast<int32_t>(random_.Int(1, 5));
    const int32_t num_blocks = count * room + 1;
    const bool waits = random_.Int(0, 1) == 0;  // between passes, as the backend does
    const bool leaves_out = random_.Int(0, 1) == 0;
    TwoStreams streams(random_, num_pools, num_blocks, room);
    Staging staging(kBlockTokens, room, num_pools, num_blocks);
    std::vector<int32_t> windows(num_pools);  // some have one
    for (int32_t& window : windows) {
      if (random_.Int(0, 2) == 0) window = static_cast<int32_t>(random_.Int(1, 100));
    }
    std::vector<int32_t> blocks(num_blocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    random_.Shuffle(blocks);
    std::vector<std::vector<int32_t>> tables(count);
    std::vector<int32_t> lengths(count, 0);
    for (int32_t s = 0; s < count; ++s) {
      tables[s].assign(blocks.begin() + s * room, blocks.begin() + (s + 1) * room);
    }
    // The later half begin with what is the first one's.
    const auto shared = static_cast<int32_t>(random_.Int(1, room - 1));
    const auto begins_at = [&](int32_t s) { return 2 * s > count ? shared * kBlockTokens : 0; };
    for (int32_t s = 0; s < count; ++s) {
      lengths[s] = begins_at(s);
      if (lengths[s] > 0) std::copy_n(tables[0].begin(), shared, tables[s].begin());
    }
    for (int pass = 0; pass < 12; ++pass) {
      std::vector<AttentionChunk> chunks;
      int32_t row = 0;
      for (int32_t s = 0; s < count; ++s) {
        if (random_.Int(0, 5) == 0) continue;
        const auto most = std::min<int64_t>(room * kBlockTokens - lengths[s], 60);
        if (most <= 0 || random_.Int(0, 15) == 0) {
          lengths[s] = begins_at(s);  // others come
          continue;
        }
        const auto tokens = random_.Int(0, 2) == 0 ? random_.Int(1, most) : int64_t{1};
        chunks.push_back({row, static_cast<int32_t>(tokens), lengths[s], tables[s]});
        row += static_cast<int32_t>(tokens);
        lengths[s] += static_cast<int32_t>(tokens);
      }
      if (chunks.empty()) continue;
      for (int32_t pool = 0; pool < num_pools; ++pool) {
        staging.Written(pool, chunks);
        for (const AttentionChunk& chunk : chunks) {
          const int32_t last = (chunk.position + chunk.num_tokens - 1) / kBlockTokens;
          for (int32_t i = chunk.position / kBlockTokens; i <= last; ++i) {
            streams.Write(pool, chunk.block_table[i]);
          }
        }
        streams.Run(/*all=*/false);
        if (leaves_out && random_.Int(0, 2) == 0) continue;
        // In the last layer only those whose last row is wanted.
        std::vector<AttentionChunk> attended = chunks;
        if (pool + 1 == num_pools) {
          std::erase_if(attended, [&](const AttentionChunk&) { return random_.Int(0, 3) == 0; });
          for (AttentionChunk& chunk : attended) {
            chunk.position += chunk.num_tokens - 1;
            chunk.first_row += chunk.num_tokens - 1;
            chunk.num_tokens = 1;
          }
        }
        for (AttentionChunk& chunk : attended) chunk.window = windows[pool];
        streams.Expect(pool, attended);
        ASSERT_TRUE(staging.Attend(streams, pool, attended));
        ASSERT_EQ(streams.attended(), attended.size());
        streams.Run(/*all=*/false);
        ASSERT_EQ(streams.mistakes(), 0) << "round " << round << ", pass " << pass;
      }
      if (waits || random_.Int(0, 9) == 0) {
        ASSERT_NO_FATAL_FAILURE(streams.Run(/*all=*/true));
        if (random_.Int(0, 4) == 0) {  // a prefix comes from elsewhere
          streams.WriteNow(static_cast<int32_t>(random_.Int(0, num_pools - 1)), blocks[0]);
          staging.WrittenAnywhere();
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(streams.Run(/*all=*/true));
    ASSERT_EQ(streams.mistakes(), 0) << "round " << round;
    aheads += streams.aheads();
  }
  EXPECT_GT(aheads, 5000);
}

// A step of each of two sequences, layer by layer: what was there before the step is brought ahead, but
// for the first layer, and all that is left is the blocks that are written.
TEST_F(StagingTest, OldBlocksAreBroughtAheadAndOnce) {
  const int32_t num_pools = 4, room = 8;
  TwoStreams streams(random_, num_pools, 2 * room, 2 * room);
  Staging staging(kBlockTokens, 2 * room, num_pools, 2 * room);
  std::vector<int32_t> tables[2];
  for (int s = 0; s < 2; ++s) {
    tables[s].resize(room);
    std::iota(tables[s].begin(), tables[s].end(), s * room);
  }
  const int32_t position = 5 * kBlockTokens + 3;
  const std::vector<AttentionChunk> chunks = {{0, 1, position, tables[0]},
                                              {1, 1, position, tables[1]}};
  for (int32_t pool = 0; pool < num_pools; ++pool) {
    staging.Written(pool, chunks);
    for (const AttentionChunk& chunk : chunks) streams.Write(pool, chunk.block_table[5]);
    streams.Expect(pool, chunks);
    ASSERT_TRUE(staging.Attend(streams, pool, chunks));
    EXPECT_EQ(streams.aheads(), std::min(pool + 1, num_pools - 1));
    EXPECT_EQ(streams.brought_ahead(), 10 * std::min(pool + 1, num_pools - 1));
    EXPECT_EQ(streams.brought(), 12 + 2 * pool);
  }
  ASSERT_NO_FATAL_FAILURE(streams.Run(/*all=*/true));
  EXPECT_EQ(streams.mistakes(), 0);
}

// Layers 1 and 2 of 4 see a window: once their calls have said so, no block before it is brought for them.
TEST_F(StagingTest, ALayerWithAWindowIsBroughtNoMore) {
  // The window begins in the second unit of 64 tokens, four blocks.
  const int32_t num_pools = 4, room = 8, position = 5 * kBlockTokens + 3;
  TwoStreams streams(random_, num_pools, room, room);
  Staging staging(kBlockTokens, room, num_pools, room);
  std::vector<int32_t> table(room);
  std::iota(table.begin(), table.end(), 0);
  int64_t brought = 0, brought_ahead = 0;
  for (int pass = 0; pass < 2; ++pass) {
    brought = streams.brought();
    brought_ahead = streams.brought_ahead();
    for (int32_t pool = 0; pool < num_pools; ++pool) {
      const bool has_window = pool == 1 || pool == 2;
      const std::vector<AttentionChunk> chunks = {{0, 1, position, table, has_window ? 17 : 0}};
      staging.Written(pool, chunks);
      streams.Write(pool, table[5]);
      streams.Expect(pool, chunks);
      ASSERT_TRUE(staging.Attend(streams, pool, chunks));
    }
  }
  EXPECT_EQ(streams.brought() - brought, 6 + 1 + 1 + 1);
  EXPECT_EQ(streams.brought_ahead() - brought_ahead, 1 + 1 + 5);
  ASSERT_NO_FATAL_FAILURE(streams.Run(/*all=*/true));
  EXPECT_EQ(streams.mistakes(), 0);
}

// Sequences that an area does not hold together: the second comes while the first is attended to.
TEST_F(StagingTest, WhatAnAreaHasNoRoomForIsBroughtMeanwhile) {
  const int32_t room = 8, position = 5 * kBlockTokens + 3;
  TwoStreams streams(random_, 2, 2 * room, room);
  Staging staging(kBlockTokens, room, 2, 2 * room);
  std::vector<int32_t> tables[2];
  for (int s = 0; s < 2; ++s) {
    tables[s].resize(room);
    std::iota(tables[s].begin(), tables[s].end(), s * room);
  }
  const std::vector<AttentionChunk> chunks = {{0, 1, position, tables[0]},
                                              {1, 1, position, tables[1]}};
  streams.Expect(0, chunks);
  ASSERT_TRUE(staging.Attend(streams, 0, chunks));
  EXPECT_EQ(streams.brought(), 6);            // the first sequence's
  EXPECT_EQ(streams.aheads(), 2);             // the second's, then
  EXPECT_EQ(streams.brought_ahead(), 6 + 5);  // the first's old ones of the next layer
  streams.Expect(1, chunks);
  ASSERT_TRUE(staging.Attend(streams, 1, chunks));
  EXPECT_EQ(streams.brought(), 6 + 1);
  EXPECT_EQ(streams.brought_ahead(), 6 + 5 + 6);
  ASSERT_NO_FATAL_FAILURE(streams.Run(/*all=*/true));
  EXPECT_EQ(streams.mistakes(), 0);
}

// Three sequences on one document, which alone fills most of an area.
TEST_F(StagingTest, ABlockThatSeveralSeeComesOnce) {
  const int32_t num_pools = 3, room = 8, shared = 5;
  TwoStreams streams(random_, num_pools, 3 * room, room);
  Staging staging(kBlockTokens, room, num_pools, 3 * room);
  std::vector<int32_t> tables[3];
  for (int s = 0; s < 3; ++s) {
    tables[s].resize(room);
    std::iota(tables[s].begin(), tables[s].end(), s * room);
    std::copy_n(tables[0].begin(), shared, tables[s].begin());
  }
  const int32_t position = shared * kBlockTokens + 3;
  std::vector<AttentionChunk> chunks;
  for (int32_t s = 0; s < 3; ++s) chunks.push_back({s, 1, position, tables[s]});
  for (int32_t pool = 0; pool < num_pools; ++pool) {
    staging.Written(pool, chunks);
    for (const AttentionChunk& chunk : chunks) streams.Write(pool, chunk.block_table[shared]);
    streams.Expect(pool, chunks);
    ASSERT_TRUE(staging.Attend(streams, pool, chunks));
    EXPECT_EQ(streams.attended(), 3u);
    EXPECT_EQ(streams.aheads(), std::min(pool + 1, num_pools - 1)) << "one area holds all three";
    EXPECT_EQ(streams.brought_ahead(), shared * std::min(pool + 1, num_pools - 1));
    EXPECT_EQ(streams.brought(), shared + 3 * (pool + 1));
  }
  ASSERT_NO_FATAL_FAILURE(streams.Run(/*all=*/true));
  EXPECT_EQ(streams.mistakes(), 0);
}

// Nothing is asked of a device that has failed.
TEST_F(StagingTest, AFailureEndsTheCall) {
  class Failing final : public StagingStreams {
   public:
    explicit Failing(int calls) : left_(calls) {}
    bool WaitForAhead() override { return Next(); }
    bool Bring(int32_t, std::span<const BlockMove>, int) override { return Next(); }
    bool BringAhead(int32_t, std::span<const BlockMove>, int) override { return Next(); }
    bool Attend(std::span<const AttentionChunk>, int) override { return Next(); }
    int left_;

   private:
    bool Next() {
      EXPECT_GE(left_, 0) << "asked again";
      return left_-- > 0;
    }
  };
  std::vector<int32_t> table = {0, 1};
  const std::vector<AttentionChunk> chunks = {{0, 1, kBlockTokens, table}};
  for (int calls = 0; calls < 4; ++calls) {
    Staging staging(kBlockTokens, 2, 2, 2);
    Failing streams(calls);
    EXPECT_FALSE(staging.Attend(streams, 0, chunks)) << calls;
    EXPECT_EQ(streams.left_, -1);
  }
  Staging staging(kBlockTokens, 2, 2, 2);
  Failing streams(4);
  EXPECT_TRUE(staging.Attend(streams, 0, chunks));
}

}  // namespace
}  // namespace winnow::kernels::cuda
