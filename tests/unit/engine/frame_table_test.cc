#include "engine/kv/frame_table.h"

#include <algorithm>
#include <map>
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
      held_.erase(blocks_.IndexOf(layer, block));
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
    return blocks_.at(index).frame >= kOwn && blocks_.at(index).saved && !pinned_.contains(index) &&
           !IsHeld(index);
  }
  bool IsHeld(int64_t index) const {
    const auto held = held_.find(index);
    return held != held_.end() && holders_.contains(held->second);
  }
  void ChangeHolds(int64_t index) {
    switch (random_() % 8) {
      case 0:
        frames_.BeginHold(++last_holder_);
        holders_.insert(last_holder_);
        break;
      case 1:
        if (holders_.empty()) break;
        frames_.EndHold(*holders_.begin());
        holders_.erase(holders_.begin());
        break;
      case 2:
        if (random_() % 8 != 0) break;
        ASSERT_EQ(frames_.DropHolds(), !holders_.empty());
        holders_.clear();
        break;
      default:
        if (holders_.empty()) break;
        frames_.Hold(index, last_holder_);
        if (blocks_.at(index).frame >= 0) held_[index] = last_holder_;
    }
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
    for (const auto& [index, holder] : held_) {
      ASSERT_TRUE(!IsHeld(index) || blocks_.at(index).frame >= 0) << "a hold is gone";
    }
    for (const int64_t index : pinned_) ASSERT_GE(blocks_.at(index).frame, 0) << "a pin is gone";
    ASSERT_EQ(frames_.num_free(), kShared - shared);
    ASSERT_EQ(frames_.num_clean(), clean);
  }

  std::mt19937_64 random_;
  BlockTable blocks_{kLayers, kBlocks};
  FrameTable frames_{blocks_, kOwnLayers, kOwn + kShared};
  std::set<int64_t> pinned_;
  std::map<int64_t, uint64_t> held_;  // layer blocks with a frame, by the last who held it
  std::set<uint64_t> holders_;
  uint64_t last_holder_ = 0;
};

TEST_F(FrameTableTest, EveryFrameHoldsWhatItsLayerBlockSays) {
  int taken = 0, refused = 0, kept_by_holds = 0;
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
        if (pinned_.contains(index)) break;
        frames_.Release(index);
        held_.erase(index);
        break;
      case 5:
        BeginAnew(blocks_.BlockOf(index));
        break;
      case 6:
      case 7:
        if (!blocks_.at(index).saved) Save(index);
        break;
      case 8:
        ChangeHolds(index);
        break;
      default: {
        if (resident) break;
        bool possible = frames_.HasOwnFrames(blocks_.LayerOf(index)) || frames_.num_free() > 0;
        for (int64_t other = 0; other < blocks_.num_layer_blocks(); ++other) {
          possible |= MayGo(other);
        }
        ASSERT_EQ(frames_.Take(index), possible);
        if (possible) pinned_.insert(index);
        if (possible) held_.erase(index);
        kept_by_holds += std::any_of(held_.begin(), held_.end(), [&](const auto& held) {
          return !possible && IsHeld(held.first) && blocks_.at(held.first).saved;
        });
        ++(possible ? taken : refused);
      }
    }
    ASSERT_NO_FATAL_FAILURE(ExpectSound());
  }
  EXPECT_GT(taken, 1000);
  EXPECT_GT(refused, 10);
  EXPECT_GT(kept_by_holds, 10);
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
