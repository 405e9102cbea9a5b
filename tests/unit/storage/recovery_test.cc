#include "storage/recovery.h"

#include <fstream>

#include "tests/unit/storage/disk_parts_testing.h"

namespace winnow::storage {
namespace {

class RecoveryTest : public DiskPartsTest {
 protected:
  static constexpr size_t kPayloadMax = 16 * kPageBytes;

  // Blocks 0 to 19: fifteen in a sealed segment, five in one that nobody sealed; all in the index.
  void WriteStore() {
    StartIndex();
    for (uint32_t number = 0; number < 20; ++number) {
      Store(number);
      Commit(number);
    }
    PollUntil([&] { return committed_.size() == 20; });
    PollUntil([&] { return committer_->in_flight() == 0; });
    PollUntil([&] { return log_->idle(); });  // a busy machine seals after all that
    sealed_ = blocks_.at(0).record->segment_id;
    unsealed_ = blocks_.at(19).record->segment_id;
  }
  // Open's steps, up to the point where the index is handed over.
  RecoveryReport Recover() {
    Restart();
    Recovery recovery(*env_, *log_, *table_, *reader_, kPayloadMax);
    auto opened = recovery.Run();
    EXPECT_TRUE(opened.ok()) << opened.status();
    if (!opened.ok()) return {};
    dropped_ = std::move(opened->dropped);
    committer_->Start(std::move(opened->writer));
    recovery.Trim();
    return recovery.report();
  }
  std::string PathOf(uint64_t segment) { return directory_ + "/" + SegmentName(segment); }
  void FlipByte(uint64_t segment, uint64_t offset) {
    std::fstream file(PathOf(segment), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(byte);
  }
  void LoseIndex() {
    const MutexLock lock(index_->mutex);
    index_->entries.clear();
    index_->meta.clear();
  }

  uint64_t sealed_ = 0, unsealed_ = 0;
  std::vector<BlockKey> dropped_;
};

TEST_F(RecoveryTest, AnEmptyDirectoryIsAnEmptyStore) {
  const RecoveryReport report = Recover();
  EXPECT_FALSE(report.index_rebuilt);
  EXPECT_EQ(table_->size(), 0u);
  EXPECT_EQ(log_->used_bytes(), 0u);
}

TEST_F(RecoveryTest, FindsEveryBlockAndCutsTheUnsealedFile) {
  WriteStore();
  const uint64_t sequence = blocks_.at(19).record->sequence;
  const RecoveryReport report = Recover();
  EXPECT_FALSE(report.index_rebuilt);
  EXPECT_EQ(table_->size(), 20u);
  EXPECT_EQ(log_->used_bytes(), FileBytes());
  EXPECT_EQ(report.truncated_bytes,
            kSegmentBytes - kPageBytes - 5 * blocks_.at(19).record->block_bytes());
  EXPECT_GT(log_->next_segment(), unsealed_) << "an id is never used twice";
  EXPECT_GT(log_->next_sequence() >> kLifeShift, sequence >> kLifeShift) << "another life";
}

TEST_F(RecoveryTest, ALostIndexIsRebuiltFromHeadersAndWholeBlocks) {
  WriteStore();
  LoseIndex();
  FlipByte(sealed_, blocks_.at(3).record->payload_offset());     // found when it is read
  FlipByte(unsealed_, blocks_.at(17).record->payload_offset());  // found now: it may be torn
  FlipByte(sealed_, blocks_.at(5).record->offset + 200);         // a header
  const RecoveryReport report = Recover();
  EXPECT_TRUE(report.index_rebuilt);
  EXPECT_NE(table_->Find(IdOf(0).key), nullptr);
  EXPECT_EQ(table_->Find(IdOf(17).key), nullptr);
  EXPECT_EQ(table_->Find(IdOf(5).key), nullptr);
  // A header that does not count with the footer makes the scan read whole blocks.
  EXPECT_EQ(table_->Find(IdOf(3).key), nullptr);
  EXPECT_EQ(table_->size(), 17u);
  EXPECT_TRUE(Indexed(0).has_value()) << "written anew";
}

TEST_F(RecoveryTest, WhereTheFooterStandsHeadersAreEnough) {
  WriteStore();
  LoseIndex();
  FlipByte(sealed_, blocks_.at(3).record->payload_offset());
  Recover();
  EXPECT_NE(table_->Find(IdOf(3).key), nullptr);
  EXPECT_EQ(table_->size(), 20u);
}

TEST_F(RecoveryTest, AnErasedBlockIsNotFoundAgainByARebuild) {
  WriteStore();
  committer_->Erase(1, IdOf(4).key, Reason::kNone);
  PollUntil([&] { return erased_.size() == 1; });
  LoseIndex();
  const RecoveryReport report = Recover();
  EXPECT_EQ(report.hidden_blocks, 1u);
  EXPECT_EQ(table_->Find(IdOf(4).key), nullptr);
  EXPECT_EQ(table_->size(), 19u);
}

TEST_F(RecoveryTest, EntriesWithoutASoundPlaceAreDropped) {
  WriteStore();
  ASSERT_TRUE(std::filesystem::remove(PathOf(unsealed_)));
  const RecoveryReport report = Recover();
  EXPECT_EQ(report.dropped_entries, 5u);
  EXPECT_EQ(dropped_.size(), 5u);
  EXPECT_EQ(table_->size(), 15u);
}

TEST_F(RecoveryTest, AFileWithoutASoundHeaderGoes) {
  WriteStore();
  FlipByte(sealed_, 16);
  const RecoveryReport report = Recover();
  EXPECT_EQ(report.removed_segments, 1u);
  EXPECT_FALSE(std::filesystem::exists(PathOf(sealed_)));
  EXPECT_EQ(table_->size(), 5u);
  EXPECT_EQ(log_->used_bytes(), FileBytes());
}

TEST_F(RecoveryTest, TheStoresTimeGoesOnWithinOneBootOnly) {
  WriteStore();
  env_->SetStoreSeconds(1000);
  committer_->SaveMeta();
  PollUntil([&] { return committer_->in_flight() == 0; });
  clock_.AdvanceSeconds(50);
  Recover();
  EXPECT_EQ(env_->StoreSeconds(), 1050u);
  committer_->SaveMeta();
  PollUntil([&] { return committer_->in_flight() == 0; });
  clock_.AdvanceSeconds(50);
  clock_.boot_id = "boot-2";
  Recover();
  EXPECT_EQ(env_->StoreSeconds(), 1050u) << "how long it was closed is not known";
}

}  // namespace
}  // namespace winnow::storage
