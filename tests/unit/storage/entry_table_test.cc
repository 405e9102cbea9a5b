#include "storage/entry_table.h"

#include "tests/unit/storage/disk_parts_testing.h"

namespace winnow::storage {
namespace {

using EntryTableTest = DiskPartsTest;

TEST_F(EntryTableTest, SegmentsAndOrderCountTheBlocksThatAreThere) {
  for (uint32_t number : {1, 2, 3}) Store(number);
  const uint64_t bytes = blocks_.at(1).record->block_bytes();
  const Segment& segment = *blocks_.at(1).segment;
  EXPECT_EQ(segment.live_blocks, 3u);
  EXPECT_EQ(segment.live_bytes, 3 * bytes);
  EXPECT_EQ(order_->blocks(), 3u);
  bool indexed = false;
  EXPECT_TRUE(table_->Remove(IdOf(2).key, &indexed));
  EXPECT_TRUE(indexed);
  EXPECT_FALSE(table_->Remove(IdOf(2).key, &indexed));
  EXPECT_EQ(segment.live_blocks, 2u);
  EXPECT_EQ(segment.live_bytes, 2 * bytes);
  EXPECT_EQ(order_->blocks(), 2u);
  EXPECT_EQ(table_->size(), 2u);
}

TEST_F(EntryTableTest, SettingAKeyAnewCountsItOnce) {
  Store(1);
  Entry entry = *table_->Find(IdOf(1).key);
  entry.order = EvictionOrder::kNone;
  entry.pinned = true;
  table_->Set(IdOf(1).key, entry);
  table_->Set(IdOf(1).key, [&] {
    Entry again = entry;
    again.order = EvictionOrder::kNone;
    return again;
  }());
  EXPECT_EQ(table_->size(), 1u);
  EXPECT_EQ(order_->blocks(), 1u);
  EXPECT_EQ(blocks_.at(1).segment->live_blocks, 1u);
  EXPECT_EQ(table_->pinned_bytes(), blocks_.at(1).record->block_bytes());
}

TEST_F(EntryTableTest, PinsBeyondTheLimitAreNotHonoured) {
  const uint64_t bytes = BlockBytesFor(kPayload);
  EntryTable table(*log_, *order_, 2 * bytes);
  for (uint32_t number : {1, 2, 3}) {
    ASSERT_TRUE(Append(number));
    Entry entry;
    entry.record = blocks_.at(number).record;
    entry.last_use = table.NextUse();
    entry.pinned = true;
    EXPECT_EQ(table.Set(IdOf(number).key, entry)->pinned, number < 3);
  }
  EXPECT_EQ(table.pinned_bytes(), 2 * bytes);
  EXPECT_FALSE(table.SetPinned(table.Find(IdOf(3).key), true));
  EXPECT_TRUE(table.SetPinned(table.Find(IdOf(1).key), false));
  EXPECT_TRUE(table.SetPinned(table.Find(IdOf(3).key), true));
  EXPECT_EQ(table.pinned_bytes(), 2 * bytes);
  PollUntil([&] { return synced_.size() == 3; });
}

TEST_F(EntryTableTest, ATouchedBlockLeavesLater) {
  for (uint32_t number = 0; number < 15; ++number) Store(number);
  log_->SealOpen();
  PollUntil([&] { return log_->idle(); });
  table_->Touch(table_->Find(IdOf(0).key));
  order_->Advance(0, SIZE_MAX);
  ASSERT_TRUE(order_->Choose([](uint64_t) { return true; }).has_value());
  EXPECT_EQ(order_->TakeNext()->key, IdOf(0).key) << "the warmest comes first";
}

}  // namespace
}  // namespace winnow::storage
