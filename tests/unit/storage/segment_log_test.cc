#include "storage/segment_log.h"

#include "tests/unit/storage/disk_parts_testing.h"

namespace winnow::storage {
namespace {

using SegmentLogTest = DiskPartsTest;

TEST_F(SegmentLogTest, OneSyncCoversTheBlocksThatWereWrittenMeanwhile) {
  plan_->hold = [](const IoRequest& request) { return request.kind == IoKind::kDatasync; };
  ASSERT_TRUE(Append(1));
  PollUntil([&] { return blocks_.at(1).segment->syncing; });
  for (uint32_t number : {2, 3, 4}) ASSERT_TRUE(Append(number));
  PollUntil([&] { return blocks_.at(1).segment->written.size() == 3; });
  EXPECT_TRUE(synced_.empty()) << "before the sync";
  plan_->hold = nullptr;
  PollUntil([&] { return synced_.size() == 4; });
  EXPECT_EQ(syncs_, 2);
}

TEST_F(SegmentLogTest, BlocksLieOneBehindTheOtherWithGrowingSequences) {
  for (uint32_t number : {1, 2, 3}) ASSERT_TRUE(Append(number));
  for (uint32_t number : {1, 2}) {
    const BlockRecord& here = *blocks_.at(number).record;
    const BlockRecord& next = *blocks_.at(number + 1).record;
    EXPECT_EQ(next.offset, here.offset + here.block_bytes());
    EXPECT_GT(next.sequence, here.sequence);
  }
  EXPECT_EQ(blocks_.at(1).record->offset, kPageBytes) << "behind the header";
  PollUntil([&] { return synced_.size() == 3; });
}

TEST_F(SegmentLogTest, UsedBytesAreTheFilesLengthsAndASealedFileIsCutAndThenDeleted) {
  for (uint32_t number = 0; number < 20; ++number) Store(number);  // 15 fit a segment
  EXPECT_EQ(log_->segments().size(), 2u);
  PollUntil([&] { return log_->idle(); });
  EXPECT_EQ(log_->used_bytes(), FileBytes());
  const uint64_t first = blocks_.at(0).record->segment_id;
  EXPECT_EQ(log_->At(first).state, Segment::State::kSealed);
  EXPECT_EQ(log_->At(first).file_bytes, log_->At(first).end_offset);
  log_->SealOpen();
  PollUntil([&] { return log_->idle(); });
  EXPECT_EQ(log_->used_bytes(), FileBytes());
  EXPECT_LT(log_->used_bytes(), 2 * kSegmentBytes);
  // Its last block goes, and the file with it; the other stays.
  for (uint32_t number = 0; number < 15; ++number) table_->Remove(IdOf(number).key, nullptr);
  PollUntil([&] { return log_->Find(first) == nullptr; });
  EXPECT_EQ(log_->segments().size(), 1u);
  EXPECT_EQ(log_->used_bytes(), FileBytes());
}

TEST_F(SegmentLogTest, AHeldOrDoubtedOrEmptiedFileIsNotDeleted) {
  Store(1);
  Segment* segment = blocks_.at(1).segment;
  const uint64_t id = segment->id;
  log_->SealOpen();
  PollUntil([&] { return log_->idle(); });
  log_->SetVictim(segment, true);
  log_->AddDoubt(segment);
  log_->Hold(segment);
  table_->Remove(IdOf(1).key, nullptr);
  const auto stays = [&] {
    for (int i = 0; i < 20; ++i) Poll();
    return log_->Find(id) != nullptr;
  };
  EXPECT_TRUE(stays());
  log_->SetVictim(segment, false);
  EXPECT_TRUE(stays());
  EXPECT_EQ(log_->DeleteDead(), SegmentLog::Dead::kSoon);
  log_->RemoveDoubt(segment);
  EXPECT_TRUE(stays());
  log_->Release(segment);
  PollUntil([&] { return log_->Find(id) == nullptr; });
  EXPECT_EQ(FileBytes(), 0u);
}

TEST_F(SegmentLogTest, AFailedSyncBreaksItsSegmentAndTheNextBlockGoesElsewhere) {
  Store(1);
  plan_->FailAll(Call::kDatasync, EIO);
  ASSERT_TRUE(Append(2));
  PollUntil([&] { return lost_.contains(2); });
  EXPECT_TRUE(blocks_.at(2).segment->broken);
  plan_->Heal();
  log_->Settle(blocks_.at(2).segment);
  log_->Release(blocks_.at(2).segment);
  Store(3);
  EXPECT_NE(blocks_.at(3).record->segment_id, blocks_.at(1).record->segment_id);
  EXPECT_EQ(log_->At(blocks_.at(1).record->segment_id).live_blocks, 1u) << "committed earlier";
}

TEST_F(SegmentLogTest, WhereNoFileCanBeMadeWhoeverWaitsIsToldAndNoRoomIsRemembered) {
  plan_->FailAll(Call::kOpen, ENOSPC);
  EXPECT_FALSE(Append(1));
  EXPECT_EQ(no_segments_, 1);
  EXPECT_EQ(log_->room_bytes(), 0u);
  EXPECT_EQ(env_->health.state(), TierState::kDegraded);
}

TEST_F(SegmentLogTest, ASegmentsRoomIsKeptForMoves) {
  room_comes_ = true;
  uint32_t number = 0;
  while (Append(number)) {
    PollUntil([&] { return synced_.contains(number); });
    Enter(number++);
  }
  EXPECT_EQ(log_->segments().size(), 5u) << "of six";
  EXPECT_EQ(rooms_asked_, 1);
  bool never = true;
  PollUntil([&] {
    return log_->SegmentFor(BlockBytesFor(kPayload), 0, /*for_move=*/true, &never) != nullptr;
  });
  EXPECT_FALSE(never);
  EXPECT_EQ(log_->segments().size(), 6u);
  EXPECT_EQ(rooms_asked_, 1) << "moves make the room themselves";
  // Puts leave in that segment the room that moves still need.
  EXPECT_NE(log_->SegmentFor(BlockBytesFor(kPayload), kSegmentBytes / 2, false, &never), nullptr);
  EXPECT_EQ(log_->SegmentFor(BlockBytesFor(kPayload), kSegmentBytes, false, &never), nullptr);
}

TEST_F(SegmentLogTest, WhereNoRoomComesTheLastSegmentIsUsedAndThenItIsNever) {
  uint32_t number = 0;
  while (Append(number)) {
    PollUntil([&] { return synced_.contains(number); });
    Enter(number++);
  }
  EXPECT_EQ(log_->segments().size(), 6u);
  EXPECT_EQ(log_->used_bytes(), FileBytes());
  EXPECT_LE(log_->used_bytes(), 6 * kSegmentBytes);
  EXPECT_GT(rooms_asked_, 0);
}

}  // namespace
}  // namespace winnow::storage
