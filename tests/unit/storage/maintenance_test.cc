#include "storage/maintenance.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <map>

#include "tests/unit/storage/disk_store_testing.h"

namespace winnow::storage {
namespace {

namespace fs = std::filesystem;

class Maintenance : public DiskStoreTest {
 protected:
  static constexpr int kBlocks = 30;

  void SetUp() override {
    options_.directory = StoreDir();
    options_.log = [this](const std::string& line) { log_.push_back(line); };
  }
  void MakeStore() {
    Open();
    for (int i = 0; i < kBlocks; ++i) {
      ASSERT_EQ(client_->Put(IdOf(i), kSmall,
                             {.priority = static_cast<uint8_t>(i % 3),
                              .pinned = i < 2,
                              .ttl_s = i < 5 ? 1000u : 0u}),
                Reason::kNone);
    }
    ASSERT_EQ(client_->Erase(IdOf(29).key), Reason::kNone);
  }
  StoreInspection Verify() {
    const auto out = VerifyStore(options_, &clock_);
    EXPECT_TRUE(out.ok()) << out.status();
    return out.ok() ? *out : StoreInspection();
  }
  std::map<std::string, std::string> AllBytes() const {
    std::map<std::string, std::string> bytes;
    for (const auto& entry : fs::recursive_directory_iterator(dir_.path())) {
      bytes[entry.path()] = entry.is_regular_file() ? ReadFile(entry.path()) : "";
    }
    return bytes;
  }
  void Flip(const std::string& path, size_t at) {
    std::string bytes = ReadFile(path);
    bytes[at] ^= 1;
    WriteFile(path, bytes);
  }

  MaintenanceOptions options_;
};

TEST_F(Maintenance, StatCountsWhatTheStoreHoldsAndWritesNothing) {
  MakeStore();
  const uint64_t segments = store_->segments();
  const uint64_t used_bytes = store_->stats().used_bytes;
  Close();
  const auto before = AllBytes();
  const auto out = StatStore(options_);
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_TRUE(AllBytes() == before);
  EXPECT_EQ(out->owner, "");
  EXPECT_EQ(out->segments, segments);
  EXPECT_GE(out->sealed_segments, segments - 1);
  EXPECT_EQ(out->segment_bytes, Options().segment_bytes);
  EXPECT_EQ(out->file_bytes, SegmentFileBytes());
  EXPECT_LE(out->file_bytes, used_bytes);
  EXPECT_EQ(out->blocks, kBlocks - 1u);
  EXPECT_EQ(out->payload_bytes, (kBlocks - 1) * kSmall);
  EXPECT_EQ(out->live_bytes, (kBlocks - 1) * BlockBytesFor(kSmall));
  EXPECT_EQ(out->pinned_blocks, 2u);
  EXPECT_EQ(out->pinned_bytes, 2 * BlockBytesFor(kSmall));
  EXPECT_EQ(out->expiring_blocks, 5u);
  EXPECT_EQ(out->blocks_by_priority, (std::array<uint64_t, kPriorityMax + 1>{10, 10, 9}));
  EXPECT_EQ(out->erasures, 1u);
  EXPECT_TRUE(out->sound()) << out->findings[0];
}

TEST_F(Maintenance, StatOfAServedStoreTellsItsOwnerAndDisturbsNothing) {
  MakeStore();
  const auto out = StatStore(options_);
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_NE(out->owner.find("pid " + std::to_string(::getpid())), std::string::npos) << out->owner;
  EXPECT_EQ(out->blocks, kBlocks - 1u);
  EXPECT_EQ(client_->Put(IdOf(100), kSmall), Reason::kNone);
  EXPECT_EQ(client_->GetAndCheck(IdOf(3), kSmall), Reason::kNone);
}

TEST_F(Maintenance, VerifyRepairAndCollectAreRefusedWhileTheStoreIsServed) {
  MakeStore();
  for (const absl::Status& status :
       {VerifyStore(options_, &clock_).status(), RepairStore(options_, &clock_).status(),
        CollectStore(options_, 0.5, &clock_).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_NE(status.message().find("pid " + std::to_string(::getpid())), std::string::npos);
  }
}

TEST_F(Maintenance, WhereThereIsNoStoreNoneIsMade) {
  ASSERT_TRUE(fs::create_directory(StoreDir()));
  WriteFile(StoreDir() + "/notes.txt", "someone's");
  const auto before = AllBytes();
  for (const absl::Status& status :
       {StatStore(options_).status(), VerifyStore(options_, &clock_).status(),
        RepairStore(options_, &clock_).status(), CollectStore(options_, 0.5, &clock_).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  }
  options_.directory += "/nowhere";
  EXPECT_EQ(StatStore(options_).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(RepairStore(options_, &clock_).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(AllBytes() == before);
}

TEST_F(Maintenance, VerifyOfASoundStoreReadsEveryBlockAndWritesNothing) {
  MakeStore();
  Close();
  const auto before = AllBytes();
  const StoreInspection out = Verify();
  EXPECT_TRUE(AllBytes() == before);
  EXPECT_TRUE(out.sound()) << out.findings[0];
  EXPECT_EQ(out.checked_blocks, kBlocks - 1u);
}

TEST_F(Maintenance, VerifyFindsAFlipOfEveryPartOfABlockThatIsLive) {
  MakeStore();
  Close();
  const std::string path = SegmentFiles()[0];
  const std::string sound = ReadFile(path);
  // In the first block: magic, key, a page sum, the payload's ends, the padding.
  for (const size_t at : {size_t{0}, size_t{50}, size_t{257}, kPageBytes, kPageBytes + kSmall - 1,
                          BlockBytesFor(kSmall) - 1}) {
    Flip(path, kPageBytes + at);
    const StoreInspection out = Verify();
    EXPECT_EQ(out.corrupt_blocks, 1u) << at;
    EXPECT_EQ(out.checked_blocks, kBlocks - 2u);
    EXPECT_FALSE(out.sound());
    WriteFile(path, sound);
  }
  EXPECT_TRUE(Verify().sound());
}

TEST_F(Maintenance, VerifyFindsLostAndDamagedFiles) {
  MakeStore();
  Close();
  const std::string pristine = dir_.path() + "/pristine";
  fs::copy(StoreDir(), pristine, fs::copy_options::recursive);
  const auto expect_finding = [&](const std::string& what, const std::string& finding) {
    const StoreInspection out = Verify();
    EXPECT_FALSE(out.sound()) << what;
    ASSERT_FALSE(out.findings.empty()) << what;
    EXPECT_NE(out.findings[0].find(finding), std::string::npos) << out.findings[0];
    fs::remove_all(StoreDir());
    fs::copy(pristine, StoreDir(), fs::copy_options::recursive);
  };
  Flip(SegmentFiles()[1], 20);
  expect_finding("header", "no sound header");
  fs::resize_file(SegmentFiles()[0], 5 * kPageBytes);
  expect_finding("cut", "not there");
  fs::remove(SegmentFiles()[1]);
  expect_finding("segment gone", "not there");
  fs::remove_all(StoreDir() + "/index");
  expect_finding("index gone", "index");
  WriteFile(StoreDir() + "/index/CURRENT", "nonsense");
  expect_finding("index damaged", "index");
  fs::remove(StoreDir() + "/erased");
  expect_finding("list gone", "erased");
  Flip(StoreDir() + "/erased", kPageBytes + 1);
  expect_finding("list damaged", "erased");
  EXPECT_TRUE(Verify().sound());
}

TEST_F(Maintenance, RepairForgetsWhatIsUnsoundAndKeepsTheRest) {
  MakeStore();
  Close();
  Flip(SegmentFiles()[0], 3 * kPageBytes);
  const auto report = RepairStore(options_, &clock_);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->verify.removed_blocks, 1u);
  EXPECT_EQ(report->blocks, kBlocks - 2u);
  EXPECT_EQ(report->used_bytes, SegmentFileBytes());
  EXPECT_TRUE(Verify().sound());
  Open();
  for (int i = 0; i < kBlocks; ++i) {
    EXPECT_EQ(client_->GetAndCheck(IdOf(i), kSmall),
              i == 0 || i == 29 ? Reason::kAbsent : Reason::kNone);
  }
}

TEST_F(Maintenance, RepairRebuildsALostIndex) {
  MakeStore();
  Close();
  fs::remove_all(StoreDir() + "/index");
  const auto report = RepairStore(options_, &clock_);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->recovery.index_rebuilt);
  EXPECT_EQ(report->blocks, kBlocks - 1u);
  EXPECT_TRUE(Verify().sound());
}

// The configuration of the server is not known here: nothing may depend on it.
TEST_F(Maintenance, RepairAndCollectDropNoBlockOfALargerStore) {
  DiskStoreOptions options = Options();
  options.segment_bytes = 20 << 20;
  options.capacity_bytes = 8 * options.segment_bytes;
  options.staging_bytes = 64 << 20;
  Open(options);
  const size_t bytes = kPayloadBytesMax;
  for (int i = 0; i < 3; ++i) ASSERT_EQ(client_->Put(IdOf(i), bytes), Reason::kNone);
  Close();
  ASSERT_EQ(RepairStore(options_, &clock_)->blocks, 3u);
  ASSERT_EQ(CollectStore(options_, 1, &clock_)->blocks, 3u);
  Open(options);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(client_->GetAndCheck(IdOf(i), bytes), Reason::kNone);
}

TEST_F(Maintenance, CollectingEverythingLeavesNoByteOfAnErasedBlock) {
  MakeStore();
  for (int i = 5; i < kBlocks; i += 4) client_->Erase(IdOf(i).key);
  Close();
  const auto holds = [this](int i) {
    const auto payload = BytesOf(IdOf(i), kSmall);
    const std::string_view some(reinterpret_cast<const char*>(payload.data()), 64);
    for (const std::string& path : SegmentFiles()) {
      if (ReadFile(path).find(some) != std::string::npos) return true;
    }
    return false;
  };
  ASSERT_TRUE(holds(5)) << "erased from the index, not from the file";
  clock_.AdvanceSeconds(2000);  // the first five expire
  const uint64_t before_bytes = SegmentFileBytes();
  const auto report = CollectStore(options_, 1, &clock_);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->gc.expired_blocks, 5u);
  EXPECT_EQ(report->gc.freed_bytes, before_bytes - SegmentFileBytes());
  EXPECT_GE(report->gc.freed_bytes, 11 * BlockBytesFor(kSmall));
  EXPECT_EQ(report->used_bytes, SegmentFileBytes());
  for (int i = 0; i < kBlocks; ++i) {
    EXPECT_EQ(holds(i), i >= 5 && i != 29 && (i - 5) % 4 != 0) << i;
  }
  EXPECT_TRUE(Verify().sound());
}

}  // namespace
}  // namespace winnow::storage
