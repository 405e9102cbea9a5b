#include "storage/committer.h"

#include <optional>

#include "tests/unit/storage/disk_parts_testing.h"

namespace winnow::storage {
namespace {

class CommitterTest : public DiskPartsTest {
 protected:
  void SetUp() override {
    DiskPartsTest::SetUp();
    StartIndex();
  }
  // The index says no until told otherwise; what it was told may be in it all the same.
  void DenyIndex(bool deny) {
    const MutexLock lock(index_->mutex);
    index_->denies =
        deny ? [](const IndexBatch&) { return true; } : std::function<bool(const IndexBatch&)>();
  }
  void AppendSynced(uint32_t number) {
    ASSERT_TRUE(Append(number));
    PollUntil([&] { return synced_.contains(number); });
  }
  void Idle() {
    PollUntil([&] { return committer_->in_flight() == 0; });
  }
};

TEST_F(CommitterTest, ACommittedBlockIsInTheIndexBeforeItIsSaid) {
  AppendSynced(1);
  Commit(1);
  EXPECT_TRUE(committer_->IsCommitting(IdOf(1).key));
  PollUntil([&] { return committed_.contains(1); });
  EXPECT_FALSE(committer_->IsCommitting(IdOf(1).key));
  ASSERT_TRUE(Indexed(1).has_value());
  EXPECT_EQ(Indexed(1)->offset, blocks_.at(1).record->offset);
}

TEST_F(CommitterTest, AChangeWaitsBehindANewPlaceThatIsOnItsWay) {
  AppendSynced(1);
  Commit(1);
  Entry* entry = Enter(1);
  entry->priority = 3;
  committer_->Save(IdOf(1).key, entry);
  EXPECT_TRUE(entry->save_later);
  PollUntil([&] { return committed_.contains(1); });
  Idle();
  EXPECT_EQ(Indexed(1)->priority, blocks_.at(1).record->priority) << "not told yet";
  committer_->SaveLater(IdOf(1).key);
  EXPECT_FALSE(entry->save_later);
  Idle();
  EXPECT_EQ(Indexed(1)->priority, 3);
  entry->moving = true;
  entry->priority = 2;
  committer_->Save(IdOf(1).key, entry);
  EXPECT_TRUE(entry->save_later) << "of a block that moves, too";
}

TEST_F(CommitterTest, ARemovedBlockIsErasedUnlessANewerOneIsOnItsWay) {
  AppendSynced(1);
  Commit(1);
  Enter(1);
  std::vector<BlockKey> erased;
  committer_->Remove(IdOf(1).key, &erased);
  EXPECT_TRUE(erased.empty()) << "it would be the newer block's erasure";
  PollUntil([&] { return committed_.contains(1); });
  AppendSynced(2);
  Enter(2);
  committer_->Remove(IdOf(2).key, &erased);
  EXPECT_EQ(erased, std::vector<BlockKey>{IdOf(2).key});
  ASSERT_TRUE(Append(3, /*transient=*/true));
  PollUntil([&] { return synced_.contains(3); });
  Enter(3);
  erased.clear();
  committer_->Remove(IdOf(3).key, &erased);
  EXPECT_TRUE(erased.empty()) << "the index never had a transient block";
}

TEST_F(CommitterTest, AnErasureIsInTheListBeforeItIsSaid) {
  AppendSynced(1);
  Commit(1);
  PollUntil([&] { return committed_.contains(1); });
  committer_->Erase(7, IdOf(1).key, Reason::kNone);
  committer_->Erase(8, IdOf(2).key, Reason::kAbsent);
  PollUntil([&] { return erased_.size() == 2; });
  EXPECT_EQ(erased_.at(7), Reason::kNone);
  EXPECT_EQ(erased_.at(8), Reason::kAbsent);
  EXPECT_FALSE(Indexed(1).has_value());
  const EraseLog list(&files_, directory_);
  EXPECT_TRUE(list.Lists(IdOf(1).key, blocks_.at(1).record->sequence));
  EXPECT_TRUE(list.Lists(IdOf(2).key, 1));
}

TEST_F(CommitterTest, AfterABatchThatFailedItsSegmentStaysUntilTheIndexIsSetRight) {
  AppendSynced(1);
  Segment* segment = blocks_.at(1).segment;
  DenyIndex(true);
  Commit(1);
  PollUntil([&] { return commit_failed_.contains(1); });
  EXPECT_TRUE(committer_->InDoubt(IdOf(1).key));
  EXPECT_EQ(segment->doubts, 1u);
  EXPECT_TRUE(Indexed(1).has_value()) << "the index may have it all the same";
  // Nothing else comes by: it is told by itself, but not at once after a failure.
  committer_->RepairIfDue();
  Idle();
  EXPECT_TRUE(committer_->InDoubt(IdOf(1).key)) << "failed again";
  DenyIndex(false);
  committer_->RepairIfDue();
  EXPECT_EQ(committer_->in_flight(), 0u) << "too early";
  clock_.AdvanceSeconds(2);
  committer_->RepairIfDue();
  Idle();
  EXPECT_FALSE(committer_->InDoubt(IdOf(1).key));
  EXPECT_EQ(segment->doubts, 0u);
  EXPECT_FALSE(Indexed(1).has_value()) << "the store does not know the block";
}

TEST_F(CommitterTest, ALateBatchIsAnsweredOnceAndCountsAsOneError) {
  AppendSynced(1);
  index_->mutex.Lock();
  Commit(1);
  committer_->Erase(7, IdOf(2).key, Reason::kNone);
  committer_->AnswerLate();
  EXPECT_TRUE(commit_late_.empty());
  const uint64_t errors = env_->stats.io_errors;
  clock_.now_ns += env_->options().write_deadline_ns + 1;
  committer_->AnswerLate();
  EXPECT_TRUE(commit_late_.contains(1));
  EXPECT_EQ(erased_.at(7), Reason::kIoError);
  EXPECT_EQ(env_->stats.io_errors, errors + 2) << "two batches";
  erased_.clear();
  committer_->AnswerLate();
  EXPECT_TRUE(erased_.empty());
  EXPECT_EQ(env_->stats.io_errors, errors + 2);
  index_->mutex.Unlock();
  PollUntil([&] { return committed_.contains(1); });
  Idle();
  EXPECT_TRUE(erased_.empty()) << "answered already";
}

}  // namespace
}  // namespace winnow::storage
