#include "engine/kv/block_table.h"

#include <algorithm>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/engine/sequence_runner.h"

namespace winnow::engine {
namespace {

constexpr int32_t kLayers = 3, kBlocks = 10, kIndexes = 2;

BlockName NameOf(int number, int tenant = 0) {
  BlockName name;
  name.chain[0] = static_cast<uint8_t>(number);
  name.chain[1] = static_cast<uint8_t>(tenant);  // which a chain is of, too
  name.tenant[0] = static_cast<uint8_t>(tenant);
  return name;
}

// The table as it would be without its sums: every answer is counted anew.
struct PlainTable {
  struct Block {
    BlockName name;
    uint32_t generation = 0;
    bool sealed = false, keep = false, held = false, counted = false;
    bool saved[kLayers] = {}, lost[kLayers] = {}, away[kLayers] = {}, waits[kLayers] = {},
         saving[kLayers] = {};
    int32_t indexed_from[kIndexes] = {kLayers, kLayers};
  };
  // A save that the store has not answered; its block may be gone.
  struct Save {
    int32_t block = 0, layer = 0;
    uint32_t generation = 0;
    Digest tenant = {};
    bool keep = false;
  };
  std::vector<Block> blocks = std::vector<Block>(kBlocks);
  std::vector<Save> saves;

  int64_t Sealed(const Digest& chain) const {
    return std::count_if(blocks.begin(), blocks.end(), [&](const Block& block) {
      return block.sealed && block.name.chain == chain;
    });
  }
  bool InUse(const Digest& chain) const {
    return std::any_of(blocks.begin(), blocks.end(), [&](const Block& block) {
      return block.sealed && block.held && block.name.chain == chain;
    });
  }
  int64_t Coming(const Digest& tenant) const {
    int64_t sum = std::count_if(saves.begin(), saves.end(), [&](const Save& save) {
      return save.keep && save.tenant == tenant;
    });
    for (const Block& block : blocks) {
      if (block.sealed && block.keep && block.name.tenant == tenant) {
        sum += std::count(std::begin(block.waits), std::end(block.waits), true);
      }
    }
    return sum;
  }
  int64_t Away(int32_t layer) const {
    return std::count_if(blocks.begin(), blocks.end(),
                         [&](const Block& block) { return block.away[layer]; });
  }
};

class BlockTableTest : public ::testing::Test {
 protected:
  BlockTableTest() : random_(testing::TestSeed()) {
    for (int32_t index = 0; index < kIndexes; ++index) EXPECT_EQ(table_.AddIndex(), index);
  }

  void Begin(int32_t block) {
    PlainTable::Block& plain = plain_.blocks[block];
    plain.name = NameOf(static_cast<int>(random_() % 6), static_cast<int>(random_() % 2));
    plain.sealed = true;
    if (random_() % 3 == 0) {
      plain.keep = true;
      std::fill(std::begin(plain.saved), std::end(plain.saved), true);
      table_.Adopt(block, plain.name);
    } else {
      plain.keep = random_() % 2 == 0;
      std::fill(std::begin(plain.waits), std::end(plain.waits), plain.keep);
      table_.Seal(block, plain.name, plain.keep);
    }
  }
  void SetHeld(int32_t block, bool held) {
    PlainTable::Block& plain = plain_.blocks[block];
    const bool before = plain_.InUse(plain.name.chain);
    plain.held = plain.sealed && held;
    const bool changed = plain.sealed && before != plain_.InUse(plain.name.chain);
    EXPECT_EQ(table_.SetHeld(block, held), changed);
  }
  void BeginSave(int32_t block, int32_t layer) {
    PlainTable::Block& plain = plain_.blocks[block];
    if (!plain.sealed || plain.saved[layer] || plain.lost[layer] || plain.saving[layer]) return;
    plain.saving[layer] = true;
    plain.waits[layer] = false;
    plain_.saves.push_back({block, layer, plain.generation, plain.name.tenant, plain.keep});
    table_.BeginSave(table_.IndexOf(layer, block));
  }
  // Answers one of the saves.
  void EndSave(bool ok) {
    if (plain_.saves.empty()) return;
    std::swap(plain_.saves[random_() % plain_.saves.size()], plain_.saves.back());
    const PlainTable::Save save = plain_.saves.back();
    plain_.saves.pop_back();
    PlainTable::Block& plain = plain_.blocks[save.block];
    const bool current = plain.generation == save.generation;
    const int64_t index = table_.IndexOf(save.layer, save.block);
    table_.EndSave(index, save.tenant, save.keep, current, ok);
    if (!current) return;
    plain.saving[save.layer] = false;
    plain.saved[save.layer] = ok;
    plain.waits[save.layer] = !ok && save.keep && plain.keep;
    if (!ok) return;
    const bool all = std::all_of(std::begin(plain.saved), std::end(plain.saved),
                                 [](bool saved) { return saved; });
    EXPECT_EQ(table_.MarkSaved(index), plain.keep && all);
  }
  void Lose(int32_t block, int32_t layer) {
    PlainTable::Block& plain = plain_.blocks[block];
    if (!plain.saved[layer] && !plain.lost[layer]) return;
    EXPECT_EQ(table_.MarkLost(table_.IndexOf(layer, block)), !plain.lost[layer]);
    if (plain.lost[layer]) return;  // nothing changes
    plain.saved[layer] = false;
    plain.lost[layer] = true;
  }
  void SetAway(int32_t block, int32_t layer, bool away) {
    bool& plain = plain_.blocks[block].away[layer];
    EXPECT_EQ(table_.SetAway(table_.IndexOf(layer, block), away), plain != away);
    plain = away;
  }
  void SetIndexedFrom(int32_t block, int32_t layer) {
    const auto index = static_cast<int32_t>(random_() % kIndexes);
    table_.SetIndexedFrom(index, block, layer);
    plain_.blocks[block].indexed_from[index] = layer;
  }
  void Forget(int32_t block) {
    PlainTable::Block& plain = plain_.blocks[block];
    SetHeld(block, false);
    for (int32_t layer = 0; layer < kLayers; ++layer) SetAway(block, layer, false);
    const bool last = plain.sealed && plain_.Sealed(plain.name.chain) == 1;
    EXPECT_EQ(table_.Leave(block), last && !plain.keep);
    table_.Forget(block);
    const uint32_t generation = plain.generation + 1;
    plain = {};
    plain.generation = generation;
  }
  void ExpectEqual() {
    for (int32_t i = 0; i < kBlocks; ++i) {
      const PlainTable::Block& plain = plain_.blocks[i];
      ASSERT_EQ(table_[i].generation, plain.generation);
      ASSERT_EQ(table_[i].sealed, plain.sealed);
      ASSERT_EQ(table_[i].keep, plain.keep);
      ASSERT_EQ(table_[i].held, plain.held);
      ASSERT_EQ(table_[i].name.chain, plain.name.chain);
      bool any_lost = false;
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        ASSERT_EQ(table_.at(layer, i).saved, plain.saved[layer]);
        ASSERT_EQ(table_.lost(layer, i), plain.lost[layer]);
        ASSERT_EQ(table_.at(layer, i).away, plain.away[layer]);
        ASSERT_EQ(table_.at(layer, i).saving, plain.saving[layer]);
        any_lost |= plain.lost[layer];
      }
      ASSERT_EQ(table_.AnyLost(i), any_lost);
      for (int32_t index = 0; index < kIndexes; ++index) {
        ASSERT_EQ(table_.IndexedFrom(index, i), plain.indexed_from[index]);
      }
    }
    for (int number = 0; number < 6; ++number) {
      const Digest chain = NameOf(number).chain;
      ASSERT_EQ(table_.Knows(chain), plain_.Sealed(chain) > 0);
      ASSERT_EQ(table_.InUse(chain), plain_.InUse(chain));
    }
    for (int tenant = 0; tenant < 2; ++tenant) {
      const Digest digest = NameOf(0, tenant).tenant;
      ASSERT_EQ(table_.NumComing(digest), plain_.Coming(digest));
    }
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      ASSERT_EQ(table_.num_away(layer), plain_.Away(layer));
    }
  }

  std::mt19937_64 random_;
  BlockTable table_{kLayers, kBlocks};
  PlainTable plain_;
};

TEST(CollisionTest, ANameThatSharesNothingButItsHashIsSeen) {
  BlockTable table(2, 2);
  BlockName name = NameOf(1);
  name.index = 3;
  name.check = 4;
  EXPECT_FALSE(table.Collides(name));
  table.Seal(0, name, /*keep=*/true);
  EXPECT_FALSE(table.Collides(name));
  EXPECT_FALSE(table.Collides(NameOf(2)));
  BlockName others[3] = {name, name, name};
  others[0].check = 5;
  others[1].index = 4;
  others[2].tenant[31] = 1;
  for (const BlockName& other : others) {
    EXPECT_TRUE(table.Collides(other));
    EXPECT_DEATH(table.Seal(1, other, /*keep=*/true), "");
  }
  table.Leave(0);
  table.Forget(0);
  EXPECT_FALSE(table.Collides(others[0]));
}

TEST(RetentionTest, BlocksOfAHashAreKeptAsLongAsTheOneThatAskedForMost) {
  BlockTable table(2, 4);
  const auto at = [](int64_t seconds) { return TimePoint(std::chrono::seconds(seconds)); };
  const Digest chain = NameOf(1).chain;
  EXPECT_EQ(table.RetentionOf(chain), nullptr);
  EXPECT_FALSE(table.Raise(chain, {.priority = 5}));
  EXPECT_FALSE(table.any_expires());
  table.Seal(0, NameOf(1), /*keep=*/true, {.priority = 2, .expires = at(10)});
  EXPECT_TRUE(table.any_expires());
  EXPECT_FALSE(table.Raise(chain, {.priority = 1, .expires = at(5)}));
  EXPECT_EQ(table.RetentionOf(chain)->priority, 2);
  EXPECT_FALSE(table.RetentionOf(chain)->Expired(at(9)));
  EXPECT_TRUE(table.RetentionOf(chain)->Expired(at(10)));
  table.Adopt(1, NameOf(1), {.priority = 4, .expires = at(20)});  // another of its hash
  EXPECT_EQ(table.RetentionOf(chain)->priority, 4);
  EXPECT_FALSE(table.RetentionOf(chain)->Expired(at(19)));
  EXPECT_TRUE(table.Raise(chain, {.priority = 0}));  // for good
  EXPECT_FALSE(table.any_expires());
  EXPECT_FALSE(table.Raise(chain, {.priority = 0, .expires = at(1000)}));
  EXPECT_FALSE(table.RetentionOf(chain)->Expired(at(100'000)));
  table.Seal(2, NameOf(2), /*keep=*/true, {.expires = at(10)});
  EXPECT_TRUE(table.any_expires());
  for (const int32_t block : {0, 1, 2}) {
    table.Leave(block);
    table.Forget(block);
  }
  EXPECT_FALSE(table.any_expires());
  EXPECT_EQ(table.RetentionOf(chain), nullptr);
}

TEST_F(BlockTableTest, AnswersWhatCountingAnewWouldSay) {
  for (int i = 0; i < 20'000; ++i) {
    const auto block = static_cast<int32_t>(random_() % kBlocks);
    const auto layer = static_cast<int32_t>(random_() % kLayers);
    const bool sealed = plain_.blocks[block].sealed;
    switch (random_() % 9) {
      case 7:
        SetIndexedFrom(block, layer);
        break;
      case 0:
        if (!sealed) Begin(block);
        break;
      case 1:
      case 2:
        SetHeld(block, random_() % 2 == 0);
        break;
      case 3:
        BeginSave(block, layer);
        break;
      case 4:
        EndSave(random_() % 4 != 0);
        break;
      case 5:
        Lose(block, layer);
        break;
      case 6:
        if (sealed) SetAway(block, layer, random_() % 2 == 0);
        break;
      default:
        if (random_() % 3 == 0) {
          Forget(block);
        } else if (random_() % 3 == 0) {
          table_.Distrust(block);
          plain_.blocks[block].keep = false;
          std::fill(std::begin(plain_.blocks[block].waits), std::end(plain_.blocks[block].waits),
                    false);
        }
    }
    ASSERT_NO_FATAL_FAILURE(ExpectEqual());
  }
}

TEST(BlockTableDeathTest, ASealedBlockIsNotSealedAgain) {
  BlockTable table(kLayers, kBlocks);
  table.Seal(3, NameOf(1), /*keep=*/false);
  EXPECT_DEATH(table.Seal(3, NameOf(2), /*keep=*/false), "");
  EXPECT_DEATH(table.Adopt(3, NameOf(2)), "");
}

TEST(BlockTableDeathTest, ABlockThatHasAFrameIsNotForgotten) {
  BlockTable table(kLayers, kBlocks);
  table.SetFrame(table.IndexOf(1, 4), 0);
  EXPECT_DEATH(table.Forget(4), "");
}

}  // namespace
}  // namespace winnow::engine
