// Blocks for one process only: as good as others while it lives, and gone with it, however it ends.
#include <gtest/gtest.h>

#include <filesystem>

#include "storage/maintenance.h"
#include "tests/fault/memory_index.h"
#include "tests/unit/storage/disk_store_testing.h"

namespace winnow::storage {
namespace {

namespace fs = std::filesystem;

class StorageTransient : public DiskStoreTest {
 protected:
  static constexpr PutOptions kTransient = {.transient = true};

  // The directory as a process that is killed now leaves it.
  std::string Killed(const std::string& name) {
    const std::string copy = dir_.path() + "/" + name;
    fs::copy(StoreDir(), copy, fs::copy_options::recursive);
    return copy;
  }
  void OpenAt(const std::string& directory) {
    DiskStoreOptions options = Options();
    options.directory = directory;
    Open(options);
  }
  static uint64_t FileBytesIn(const std::string& directory) {
    uint64_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(directory)) {
      if (ParseSegmentName(entry.path().filename().string())) bytes += entry.file_size();
    }
    return bytes;
  }
};

TEST_F(StorageTransient, AfterAKillOnlyWhatWasPutToStayIsThere) {
  Open();
  constexpr int kMixed = 15,
                kAll = 45;  // nine fill a segment: the later ones have nothing that stays
  for (int i = 0; i < kAll; ++i) {
    const bool stays = i < kMixed && i % 3 == 0;
    ASSERT_EQ(client_->Put(IdOf(i), kSmall, {.transient = !stays}), Reason::kNone);
  }
  Settle();
  for (int i = 0; i < kAll; ++i) {
    ASSERT_EQ(client_->GetAndCheck(IdOf(i), kSmall), Reason::kNone) << i;
  }
  const size_t segments = SegmentFiles().size();
  for (const bool index_is_lost : {false, true}) {
    SCOPED_TRACE(index_is_lost);
    const std::string left = Killed(index_is_lost ? "lost" : "killed");
    if (index_is_lost) {
      fs::remove_all(left + "/index");
    } else {
      MaintenanceOptions verify;
      verify.directory = left;
      const auto seen = VerifyStore(verify, &clock_);
      ASSERT_TRUE(seen.ok()) << seen.status();
      EXPECT_TRUE(seen->sound()) << seen->findings[0];
      EXPECT_EQ(seen->blocks, kMixed / 3);
    }
    DiskStoreOptions options = Options();
    options.directory = left;
    auto opened = DiskStore::Open(options, &clock_);
    ASSERT_TRUE(opened.ok()) << opened.status();
    DiskStore& next = **opened;
    StoreClient client(&next);
    EXPECT_EQ(next.recovery().index_rebuilt, index_is_lost);
    EXPECT_EQ(next.recovery().hidden_blocks, index_is_lost ? kAll - kMixed / 3 : 0);
    EXPECT_EQ(next.recovery().blocks, kMixed / 3);
    EXPECT_EQ(next.recovery().removed_segments, segments - 2);
    EXPECT_EQ(next.stats().used_bytes, FileBytesIn(left));
    for (int i = 0; i < kAll; ++i) {
      const bool stays = i < kMixed && i % 3 == 0;
      EXPECT_EQ(client.GetAndCheck(IdOf(i), kSmall), stays ? Reason::kNone : Reason::kAbsent) << i;
    }
  }
}

TEST_F(StorageTransient, NothingIsSyncedIndexedOrWrittenDown) {
  int syncs = 0;
  uint64_t batches = 0;
  auto index = std::make_shared<MemoryIndexData>();
  index->denies = [&batches](const IndexBatch& batch) {
    batches += !batch.puts.empty() || !batch.erases.empty() || !batch.erasures.empty();
    return false;
  };
  DiskStoreOptions options = Options();
  options.seams.passed = [&](const char* point) {
    syncs += std::string_view(point) == "put.before_sync";
  };
  options.seams.open_index = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<IndexDb>> {
    return std::make_unique<MemoryIndex>(index);
  };
  Open(options);
  const uint64_t log_bytes = fs::file_size(StoreDir() + "/erased");
  // Also pinned, read, put again, evicted, moved because it is in use, and erased in flight.
  for (int i = 0; i < 200; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), kSmall, {.in_use = i % 3 == 0, .transient = true}),
              Reason::kNone)
        << i;
    if (i >= 60) store_->SetInUse(IdOf(i - 60).key, false);
    if (i % 7 == 0) {
      ASSERT_TRUE(store_->SetPinned(IdOf(i).key, true));
      ASSERT_EQ(client_->Put(IdOf(i), kSmall, {.priority = 3, .transient = true}), Reason::kNone);
      ASSERT_TRUE(store_->SetPinned(IdOf(i).key, false));
    }
    store_->Put(1000, IdOf(1000), BytesOf(IdOf(1000), kSmall), kTransient);
    if (i % 2 == 0) client_->Finish();
    ASSERT_EQ(client_->Erase(IdOf(1000).key), Reason::kNone);
    if (i % 5 == 0) {
      ASSERT_EQ(client_->Erase(IdOf(i).key), Reason::kNone);
      ASSERT_EQ(client_->GetAndCheck(IdOf(i), kSmall), Reason::kAbsent);
    }
  }
  Settle();
  EXPECT_GT(store_->stats().moved_blocks, 0u);
  EXPECT_GT(store_->stats().evicted_blocks, 0u);
  int found = 0;
  for (int i = 0; i < 200; ++i) found += client_->GetAndCheck(IdOf(i), kSmall) == Reason::kNone;
  EXPECT_GT(found, 20);
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
  EXPECT_EQ(syncs, 0);
  EXPECT_EQ(batches, 0u);
  EXPECT_EQ(fs::file_size(StoreDir() + "/erased"), log_bytes);
}

TEST_F(StorageTransient, WhatIsPutToStayStaysWhateverWasThereBefore) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(0), kSmall, kTransient), Reason::kNone);
  ASSERT_EQ(client_->Put(IdOf(0), kSmall), Reason::kNone);  // one after the other
  ASSERT_EQ(client_->Put(IdOf(1), kSmall), Reason::kNone);
  ASSERT_EQ(client_->Put(IdOf(1), kSmall, kTransient), Reason::kNone);
  store_->Put(2, IdOf(2), BytesOf(IdOf(2), kSmall), kTransient);  // both at once
  store_->Put(3, IdOf(2), BytesOf(IdOf(2), kSmall), {});
  const auto both = client_->Finish();
  EXPECT_EQ(both.at(2).reason, Reason::kNone);
  EXPECT_EQ(both.at(3).reason, Reason::kNone);
  // Where the first is being written its header says what it is: the second is told to come again.
  bool placed = false;
  DiskStoreOptions options = Options();
  options.seams.passed = [&](const char* point) {
    placed |= std::string_view(point) == "put.placed";
  };
  Open(options);
  ASSERT_EQ(client_->Put(IdOf(100), kSmall), Reason::kNone);  // there is a segment
  placed = false;
  plan_->hold_writes = true;
  store_->Put(4, IdOf(3), BytesOf(IdOf(3), kSmall), kTransient);
  PollUntil([&] { return placed; });
  store_->Put(5, IdOf(3), BytesOf(IdOf(3), kSmall), {});
  plan_->hold_writes = false;
  const auto late = client_->Finish();
  EXPECT_EQ(late.at(4).reason, Reason::kNone);
  EXPECT_EQ(late.at(5).reason, Reason::kBusy);
  ASSERT_EQ(client_->Put(IdOf(3), kSmall), Reason::kNone);
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(store_->Find(IdOf(i)).has_value()) << i;
    EXPECT_FALSE(store_->Find(IdOf(i))->transient) << i;
  }
  OpenAt(Killed("killed"));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(client_->GetAndCheck(IdOf(i), kSmall), Reason::kNone) << i;
  // And with the index lost: the headers say the same.
  Close();
  const std::string lost = Killed("lost");
  fs::remove_all(lost + "/index");
  OpenAt(lost);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(client_->GetAndCheck(IdOf(i), kSmall), Reason::kNone) << i;
}

// A Put to stay is on its way to the index when its transient forerunner and it are erased.
TEST_F(StorageTransient, ErasedWhileItIsPutToStayItIsGone) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(0), kSmall, kTransient), Reason::kNone);
  index_faults_->hang = true;
  store_->Put(1, IdOf(0), BytesOf(IdOf(0), kSmall), {});
  PollUntil([&] { return commits_ > 0; });
  store_->Erase(2, IdOf(0).key);
  index_faults_->Release();
  client_->Finish();
  EXPECT_FALSE(store_->Find(IdOf(0)).has_value());
  OpenAt(Killed("killed"));
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kSmall), Reason::kAbsent);
}

}  // namespace
}  // namespace winnow::storage
