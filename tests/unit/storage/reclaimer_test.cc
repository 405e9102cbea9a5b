#include "storage/reclaimer.h"

#include <set>

#include "tests/unit/storage/disk_parts_testing.h"

namespace winnow::storage {
namespace {

class ReclaimerTest : public DiskPartsTest, public Reclaimer::Host {
 protected:
  void SetUp() override {
    DiskPartsTest::SetUp();
    StartIndex();
    reclaimer_ = std::make_unique<Reclaimer>(*env_, *log_, *table_, *committer_, *order_, *this);
  }
  void TearDown() override {
    reclaimer_.reset();
    DiskPartsTest::TearDown();
  }
  bool StartMove(const BlockKey& key, const Entry& entry, Segment* victim) override {
    if (buffers_ == 0) return false;
    --buffers_;
    EXPECT_EQ(entry.record->segment_id, victim->id);
    EXPECT_TRUE(victim->victim);
    moved_.push_back(key);
    return true;
  }
  // Fills two segments of 15 blocks and seals them.
  void Fill() {
    for (uint32_t number = 0; number < 30; ++number) Store(number);
    log_->SealOpen();
    PollUntil([&] { return log_->idle(); });
    order_->Advance(0, SIZE_MAX);
  }
  uint64_t SegmentOf(uint32_t number) { return blocks_.at(number).record->segment_id; }

  int buffers_ = 1000;
  std::vector<BlockKey> moved_;
  std::unique_ptr<Reclaimer> reclaimer_;
};

TEST_F(ReclaimerTest, DropsTheColdBlocksAndTheFileGoes) {
  Fill();
  const uint64_t first = SegmentOf(0);
  EXPECT_TRUE(reclaimer_->Start());
  EXPECT_EQ(env_->stats.evicted_blocks, 15u) << "a segment's worth is cold: all of the oldest";
  EXPECT_TRUE(moved_.empty());
  EXPECT_TRUE(reclaimer_->idle());
  PollUntil([&] { return log_->Find(first) == nullptr; });
  EXPECT_EQ(table_->size(), 15u);
}

TEST_F(ReclaimerTest, BlocksInUseMoveAndTheVictimWaitsForThem) {
  for (uint32_t number = 0; number < 30; ++number) {
    Store(number);
    if (number >= 3) continue;
    Entry* entry = table_->Find(IdOf(number).key);
    entry->in_use = true;
    table_->Reorder(*entry);
  }
  log_->SealOpen();
  PollUntil([&] { return log_->idle(); });
  order_->Advance(0, SIZE_MAX);
  const uint64_t first = SegmentOf(0);
  Segment* victim = log_->Find(first);
  buffers_ = 2;
  ASSERT_TRUE(reclaimer_->Start());
  reclaimer_->Advance();
  EXPECT_EQ(moved_.size(), 2u) << "no buffer for the third yet";
  EXPECT_FALSE(reclaimer_->idle());
  EXPECT_EQ(reclaimer_->bytes_to_place(), victim->live_bytes);
  reclaimer_->MovePlaced(BlockBytesFor(kPayload));
  EXPECT_EQ(reclaimer_->bytes_to_place(), victim->live_bytes - BlockBytesFor(kPayload));
  buffers_ = 2;
  reclaimer_->Advance();
  EXPECT_EQ(moved_.size(), 3u);
  // The moves are over: the blocks are elsewhere, as far as the victim can tell.
  for (const BlockKey& key : moved_) {
    table_->Remove(key, nullptr);
    EXPECT_NE(log_->Find(first), nullptr);
    reclaimer_->EndMove();
  }
  reclaimer_->MoveSettled(BlockBytesFor(kPayload));
  EXPECT_TRUE(victim->victim) << "until the reclaimer looks again";
  reclaimer_->Advance();
  EXPECT_TRUE(reclaimer_->idle());
  EXPECT_EQ(reclaimer_->bytes_to_place(), 0u);
  PollUntil([&] { return log_->Find(first) == nullptr; });
}

TEST_F(ReclaimerTest, ABlockThatWasErasedMeanwhileDoesNotMove) {
  Fill();
  Segment* segment = log_->Find(SegmentOf(0));
  ASSERT_TRUE(reclaimer_->Empty(segment));
  EXPECT_FALSE(reclaimer_->Empty(log_->Find(SegmentOf(29)))) << "one at a time";
  for (uint32_t number = 0; number < 10; ++number) committer_->Discard(IdOf(number).key);
  reclaimer_->Advance();
  EXPECT_EQ(moved_.size(), 5u);
  for (const BlockKey& key : moved_) {
    committer_->Discard(key);
    reclaimer_->EndMove();
  }
  reclaimer_->Advance();
  EXPECT_TRUE(reclaimer_->idle());
}

TEST_F(ReclaimerTest, WhereEverythingIsPinnedThereIsNoRoom) {
  Fill();
  for (uint32_t number = 0; number < 30; ++number) {
    table_->SetPinned(table_->Find(IdOf(number).key), true);
  }
  order_->Advance(0, SIZE_MAX);
  EXPECT_FALSE(reclaimer_->Start());
  EXPECT_EQ(env_->stats.evicted_blocks, 0u);
}

TEST_F(ReclaimerTest, AnUnsettledOrderIsWaitedFor) {
  for (uint32_t number = 0; number < 30; ++number) Store(number);
  log_->SealOpen();
  PollUntil([&] { return log_->idle(); });
  ASSERT_FALSE(order_->settled());
  EXPECT_TRUE(reclaimer_->Start()) << "soon";
  EXPECT_EQ(env_->stats.evicted_blocks, 0u);
}

}  // namespace
}  // namespace winnow::storage
