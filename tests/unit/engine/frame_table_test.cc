#include "engine/kv/frame_table.h"

#include <random>
#include <set>
#include <vector>

#include "engine/kv/block_table.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/sequence_runner.h"

namespace winnow::engine {
namespace {

constexpr int32_t kLayers = 4, kBlocks = 8;
constexpr int32_t kOwnLayers[] = {1};  // between layers that share frames
constexpr int32_t kSharing[] = {0, 2, 3};
constexpr int32_t kOwn = kBlocks, kShared = 11;

class FrameTableTest : public ::testing::Test {
 protected:
  FrameTableTest() : random_(testing::TestSeed()) {
    for (int32_t block = 0; block < kBlocks; ++block) Seal(block);
  }
  void Seal(int32_t block) {
    BlockName name;
    name.chain[0] = static_cast<uint8_t>(block);
    blocks_.Seal(block, name, /*keep=*/false);
  }
  // Gives the block to other content, unless it is pinned in a layer: nothing of it is saved then.
  void BeginAnew(int32_t block) {
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      if (pinned_.contains(blocks_.IndexOf(layer, block))) return;
    }
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      frames_.Release(blocks_.IndexOf(layer, block));
    }
    blocks_.Leave(block);
    blocks_.Forget(block);
    Seal(block);
  }
  void Save(int64_t index) {
    frames_.OnSaved(index);
    blocks_.MarkSaved(index);
  }
  bool MayGo(int64_t index) const {
    return blocks_.at(index).frame >= kOwn && blocks_.at(index).saved && !pinned_.contains(index);
  }
  // Compares with what the frames of all layer blocks say.
  void ExpectSound() {
    std::set<int32_t> taken;
    int64_t shared = 0, clean = 0;
    for (int64_t index = 0; index < blocks_.num_layer_blocks(); ++index) {
      const LayerBlock& layer_block = blocks_.at(index);
      if (layer_block.frame < 0) continue;
      ASSERT_TRUE(taken.insert(layer_block.frame).second) << "two layer blocks in one frame";
      if (frames_.HasOwnFrames(blocks_.LayerOf(index))) {
        ASSERT_EQ(layer_block.frame, blocks_.BlockOf(index));
      } else {
        ASSERT_GE(layer_block.frame, kOwn);
        ++shared;
        clean += layer_block.saved;
      }
    }
    for (const int64_t index : pinned_) ASSERT_GE(blocks_.at(index).frame, 0) << "a pin is gone";
    ASSERT_EQ(frames_.num_free(), kShared - shared);
    ASSERT_EQ(frames_.num_clean(), clean);
  }

  std::mt19937_64 random_;
  BlockTable blocks_{kLayers, kBlocks};
  FrameTable frames_{blocks_, kOwnLayers, kOwn + kShared};
  std::set<int64_t> pinned_;
};

TEST_F(FrameTableTest, EveryFrameHoldsWhatItsLayerBlockSays) {
  int taken = 0, refused = 0;
  for (int i = 0; i < 50'000; ++i) {
    const auto index = static_cast<int64_t>(random_() % (kLayers * kBlocks));
    const bool resident = blocks_.at(index).frame >= 0;
    switch (random_() % 20) {
      case 0:
        frames_.BeginPass();
        frames_.Unpin();
        pinned_.clear();
        break;
      case 1:
        frames_.Unpin();
        pinned_.clear();
        break;
      case 2:
      case 3:
        if (resident) {
          frames_.Pin(index);
          pinned_.insert(index);
        }
        break;
      case 4:
        if (!pinned_.contains(index)) frames_.Release(index);
        break;
      case 5:
        BeginAnew(blocks_.BlockOf(index));
        break;
      case 6:
      case 7:
        if (!blocks_.at(index).saved) Save(index);
        break;
      default: {
        if (resident) break;
        bool possible = frames_.HasOwnFrames(blocks_.LayerOf(index)) || frames_.num_free() > 0;
        for (int64_t other = 0; other < blocks_.num_layer_blocks(); ++other) {
          possible |= MayGo(other);
        }
        ASSERT_EQ(frames_.Take(index), possible);
        if (possible) pinned_.insert(index);
        ++(possible ? taken : refused);
      }
    }
    ASSERT_NO_FATAL_FAILURE(ExpectSound());
  }
  EXPECT_GT(taken, 1000);
  EXPECT_GT(refused, 10);
  EXPECT_GT(frames_.num_evicted(), 100u);
}

TEST_F(FrameTableTest, FramesThatTwoPassesDidNotUseGoFirst) {
  std::vector<int64_t> held;
  for (int32_t i = 0; i < kShared; ++i) {
    held.push_back(blocks_.IndexOf(kSharing[i / kBlocks], i % kBlocks));
    ASSERT_TRUE(frames_.Take(held.back()));
    Save(held.back());
  }
  const auto idle = static_cast<size_t>(random_() % kShared);
  for (int pass = 0; pass < 2; ++pass) {
    frames_.BeginPass();
    frames_.Unpin();
    for (size_t i = 0; i < held.size(); ++i) {
      if (i != idle) frames_.Use(blocks_.at(held[i]).frame);
    }
  }
  ASSERT_TRUE(frames_.Take(blocks_.IndexOf(3, 0)));
  for (size_t i = 0; i < held.size(); ++i) {
    EXPECT_EQ(blocks_.at(held[i]).frame >= 0, i != idle) << i;
  }
}

// Where everything is in use: layers come in turn, so the one before is needed last.
TEST_F(FrameTableTest, AmongFramesInUseThoseOfTheLayerBeforeGo) {
  std::vector<int64_t> held;
  for (int32_t i = 0; i < kShared; ++i) {
    held.push_back(blocks_.IndexOf(kSharing[i / kBlocks], i % kBlocks));  // layer 0, and some of 2
    ASSERT_TRUE(frames_.Take(held.back()));
    Save(held.back());
  }
  frames_.Unpin();
  ASSERT_TRUE(frames_.Take(blocks_.IndexOf(3, 0)));
  EXPECT_LT(blocks_.at(2, 0).frame, 0);
  for (int32_t block = 0; block < kBlocks; ++block) EXPECT_GE(blocks_.at(0, block).frame, 0);
}

// The first layer follows the last, in the next step.
TEST_F(FrameTableTest, BeforeTheFirstSharingLayerComesTheLast) {
  for (int32_t i = 0; i < kShared; ++i) {
    const int64_t index = blocks_.IndexOf(kSharing[2 - i / kBlocks], i % kBlocks);  // 3, some of 2
    ASSERT_TRUE(frames_.Take(index));
    Save(index);
  }
  frames_.Unpin();
  ASSERT_TRUE(frames_.Take(blocks_.IndexOf(0, 0)));
  EXPECT_LT(blocks_.at(3, 0).frame, 0);
  for (int32_t i = kBlocks; i < kShared; ++i) EXPECT_GE(blocks_.at(2, i % kBlocks).frame, 0);
}

}  // namespace
}  // namespace winnow::engine
