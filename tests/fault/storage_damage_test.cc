// What damage on disk may do: cost blocks. Never wrong bytes, never a failed open.
#include <gtest/gtest.h>

#include <filesystem>
#include <iostream>

#include "tests/fault/memory_index.h"
#include "tests/unit/storage/disk_store_testing.h"

namespace winnow::storage {
namespace {

namespace fs = std::filesystem;

class StorageDamage : public DiskStoreTest {
 protected:
  static constexpr int kBlocks = 12;

  // A store with several segments, an SST and a write-ahead log; kept to start each round from.
  void MakePristine() {
    Open();
    for (int i = 0; i < kBlocks - 2; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
    Open();  // the log of the first run becomes a table
    for (int i = kBlocks - 2; i < kBlocks; ++i) {
      ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
    }
    Close();
    fs::copy(StoreDir(), pristine(), fs::copy_options::recursive);
  }
  std::string pristine() const { return dir_.path() + "/pristine"; }
  void Restore() {
    Close();
    fs::remove_all(StoreDir());
    fs::copy(pristine(), StoreDir(), fs::copy_options::recursive);
  }

  // Opens, reads everything twice, and writes something: no wrong byte, no failed open. Returns
  // hits.
  int OpenAndReadAll() {
    const absl::Status status = OpenStatus(Options());
    EXPECT_TRUE(status.ok()) << status;
    if (!status.ok()) return 0;
    EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
    int hits = 0;
    for (int i = 0; i < kBlocks; ++i) {
      const Reason pages = client_->GetPagesAndCheck(IdOf(i), kSmall, {0, 1, 2, 3, 4});
      const Reason reason = client_->GetAndCheck(IdOf(i), kSmall);
      hits += reason == Reason::kNone;
      for (Reason r : {pages, reason}) {
        EXPECT_TRUE(r == Reason::kNone || r == Reason::kAbsent || r == Reason::kCorrupt ||
                    r == Reason::kIoError)
            << ReasonName(r);
      }
    }
    EXPECT_EQ(client_->Put(IdOf(1000), kSmall), Reason::kNone);
    EXPECT_EQ(client_->GetAndCheck(IdOf(1000), kSmall), Reason::kNone);
    return hits;
  }

  // For who runs it long, with WINNOW_TEST_ROUNDS.
  static void Tell(int flips, int misses) {
    std::cout << flips << " bits flipped, " << misses << " blocks lost, no wrong byte\n";
  }

  std::vector<std::string> AllFiles() const {
    std::vector<std::string> paths;
    for (const auto& entry : fs::recursive_directory_iterator(StoreDir())) {
      if (entry.is_regular_file()) paths.push_back(entry.path());
    }
    std::sort(paths.begin(), paths.end());
    return paths;
  }
};

TEST_F(StorageDamage, FlippedBitsInSegmentsAreMisses) {
  MakePristine();
  const uint32_t seed = TestSeed(77);
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  int misses = 0, flips = 0;
  for (int round = 0; round < TestRounds(8); ++round) {
    Restore();
    for (const std::string& path : SegmentFiles()) {
      std::string bytes = ReadFile(path);
      // One flip in each stretch of the size of a block, header and padding included.
      for (size_t at = 0; at < bytes.size(); at += BlockBytesFor(kSmall)) {
        const size_t flip = at + random() % std::min(bytes.size() - at, BlockBytesFor(kSmall));
        bytes[flip] = static_cast<char>(bytes[flip] ^ (1 << (random() % 8)));
        ++flips;
      }
      WriteFile(path, bytes);
    }
    misses += kBlocks - OpenAndReadAll();
    if (HasFailure()) return;
  }
  EXPECT_GT(misses, 0);
  Tell(flips, misses);
}

TEST_F(StorageDamage, FlippedBitsInAnyFileOfTheIndexCostBlocksAtMost) {
  MakePristine();
  const uint32_t seed = TestSeed(78);
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const size_t files = AllFiles().size();
  int rebuilt = 0, misses = 0, flips = 0;
  for (size_t i = 0; i < files; ++i) {
    for (int round = 0; round < TestRounds(3); ++round) {
      Restore();
      const std::string path = AllFiles()[i];
      if (path.find("/index/") == std::string::npos) break;
      SCOPED_TRACE(path);
      std::string bytes = ReadFile(path);
      if (bytes.empty()) break;
      const size_t at = random() % bytes.size();
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << (random() % 8)));
      WriteFile(path, bytes);
      ++flips;
      misses += kBlocks - OpenAndReadAll();
      if (HasFailure()) return;
      rebuilt += store_->recovery().index_rebuilt;
    }
  }
  EXPECT_GT(rebuilt, 0) << "some flips must have been noticed";
  Tell(flips, misses);
}

// Damage to the list of erased blocks costs nothing while the index stands; when both are gone,
// what it listed does not come back.
TEST_F(StorageDamage, FlippedBitsInTheListOfErasedBlocksNeverBringOneBack) {
  MakePristine();
  Open();
  ASSERT_EQ(client_->Erase(IdOf(4).key), Reason::kNone);
  Close();
  const std::string log = ReadFile(StoreDir() + "/erased");
  fs::remove_all(pristine());
  fs::copy(StoreDir(), pristine(), fs::copy_options::recursive);
  const uint32_t seed = TestSeed(79);
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < TestRounds(10); ++round) {
    Restore();
    std::string bytes = log;
    const size_t at =
        round % 2 == 0 ? log.size() - 1 - random() % kErasureBytes : random() % log.size();
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << (random() % 8)));
    WriteFile(StoreDir() + "/erased", bytes);
    const bool lose_index = round % 4 != 3;
    if (lose_index) fs::remove_all(StoreDir() + "/index");
    const int hits = OpenAndReadAll();
    EXPECT_EQ(hits, lose_index ? 0 : kBlocks - 1) << "flipped byte " << at;
    EXPECT_EQ(client_->GetAndCheck(IdOf(4), kSmall), Reason::kAbsent);
  }
}

TEST_F(StorageDamage, IndexFilesCutEmptiedReplacedOrGoneAreRebuiltOrBorne) {
  MakePristine();
  const size_t files = AllFiles().size();
  for (size_t i = 0; i < files; ++i) {
    for (int kind = 0; kind < 4; ++kind) {
      Restore();
      const std::string path = AllFiles()[i];
      if (path.find("/index/") == std::string::npos) break;
      SCOPED_TRACE(testing::Message() << path << " kind " << kind);
      const std::string bytes = ReadFile(path);
      if (kind == 0) WriteFile(path, bytes.substr(0, bytes.size() / 2));
      if (kind == 1) WriteFile(path, "");
      if (kind == 2) WriteFile(path, std::string(bytes.size() + 100, 'x'));
      if (kind == 3) fs::remove(path);
      OpenAndReadAll();
    }
  }
}

TEST_F(StorageDamage, LostIndexIsRebuiltWithEveryBlock) {
  MakePristine();
  Restore();
  fs::remove_all(StoreDir() + "/index");
  EXPECT_EQ(OpenAndReadAll(), kBlocks);
  EXPECT_TRUE(store_->recovery().index_rebuilt);
  Open();
  EXPECT_FALSE(store_->recovery().index_rebuilt) << "once is enough";
  EXPECT_EQ(store_->stats().blocks, kBlocks + 1u);
}

TEST_F(StorageDamage, RebuildKeepsTheNewestAndStopsAtWhatIsTorn) {
  Open();
  for (int i = 0; i < kBlocks; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  // Dropped for a fault on the way, so that its sound bytes stay behind, and put again.
  plan_->corrupt_share = 1;
  ASSERT_EQ(client_->GetAndCheck(IdOf(3), kSmall), Reason::kCorrupt);
  plan_->Heal();
  ASSERT_EQ(client_->Put(IdOf(3), BytesOf(IdOf(3), kSmall, /*version=*/1)), Reason::kNone);
  Close();
  fs::remove_all(StoreDir() + "/index");
  // The last block of the unsealed segment: its payload never reached the disk.
  const std::string path = SegmentFiles().back();
  std::string bytes = ReadFile(path);
  for (size_t at = bytes.size() - 2 * kPageBytes; at < bytes.size(); ++at) bytes[at] = 0;
  WriteFile(path, bytes);
  Open();
  std::vector<std::byte> into(kSmall);
  EXPECT_EQ(client_->Get(IdOf(3), &into), Reason::kNone);
  EXPECT_TRUE(into == BytesOf(IdOf(3), kSmall)) << "the torn newest does not hide an older one";
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
}

TEST_F(StorageDamage, DamagedIndexIsPutAsideNotDeleted) {
  MakePristine();
  Restore();
  WriteFile(StoreDir() + "/index/CURRENT", "nonsense");
  OpenAndReadAll();
  EXPECT_TRUE(fs::exists(StoreDir() + "/quarantine/CURRENT"));
  EXPECT_EQ(store_->recovery().quarantined, StoreDir() + "/quarantine");
}

TEST_F(StorageDamage, SegmentCutAtAnySectorLosesOnlyWhatIsBehind) {
  MakePristine();
  Restore();
  const std::string name = fs::path(SegmentFiles()[0]).filename();
  const size_t bytes = fs::file_size(SegmentFiles()[0]);
  const size_t step = TestRounds(0) > 0 ? 512 : 512 * 37;
  for (size_t cut = 0; cut < bytes; cut += step) {
    Restore();
    SCOPED_TRACE(cut);
    fs::resize_file(StoreDir() + "/" + name, cut);
    const int hits = OpenAndReadAll();
    const int whole =
        cut < kPageBytes ? 0 : static_cast<int>((cut - kPageBytes) / BlockBytesFor(kSmall));
    EXPECT_GE(hits, whole);
  }
}

TEST_F(StorageDamage, SwappedBlocksAndSegmentsAreMisses) {
  MakePristine();
  Restore();
  const std::string path = SegmentFiles()[0];
  const size_t block = BlockBytesFor(kSmall);
  std::string bytes = ReadFile(path);
  const std::string first = bytes.substr(kPageBytes, block);
  const std::string second = bytes.substr(kPageBytes + block, block);
  bytes.replace(kPageBytes, block, second);
  bytes.replace(kPageBytes + block, block, first);
  WriteFile(path, bytes);
  EXPECT_EQ(OpenAndReadAll(), kBlocks - 2) << "sound blocks in each other's place";
  Restore();
  ASSERT_GE(SegmentFiles().size(), 2u);
  const std::string a = SegmentFiles()[0];
  const std::string b = SegmentFiles()[1];
  fs::rename(a, a + ".tmp");
  fs::rename(b, a);
  fs::rename(a + ".tmp", b);
  EXPECT_EQ(OpenAndReadAll(), 0);
}

TEST_F(StorageDamage, TrailingGarbageAndForeignFilesAreBorne) {
  MakePristine();
  Restore();
  const std::string path = SegmentFiles()[0];
  WriteFile(path, ReadFile(path) + std::string(10000, 'g'));
  WriteFile(StoreDir() + "/seg-00000000000000ff.wseg", "not a segment");
  WriteFile(StoreDir() + "/seg-xyz.wseg", "not even a name");
  WriteFile(StoreDir() + "/notes.txt", "someone's");
  EXPECT_EQ(OpenAndReadAll(), kBlocks);
  EXPECT_TRUE(fs::exists(StoreDir() + "/notes.txt"));
  EXPECT_FALSE(fs::exists(StoreDir() + "/seg-00000000000000ff.wseg"));
}

// ---- the Nth call fails ----

class StorageSweep : public DiskStoreTest,
                     public testing::WithParamInterface<std::tuple<int, bool>> {
 protected:
  DiskStoreOptions SweepOptions() {
    DiskStoreOptions options = Options();
    options.segment_bytes = 64 * 1024;
    options.capacity_bytes = 5 * 64 * 1024;  // so that reclaim is part of the sweep
    options.seams.open_index =
        [this](const std::string&) -> absl::StatusOr<std::unique_ptr<IndexDb>> {
      return std::make_unique<MemoryIndex>(index_);
    };
    return options;
  }
  std::shared_ptr<MemoryIndexData> index_ = std::make_shared<MemoryIndexData>();
};

TEST_P(StorageSweep, NoCallWhoseFailureIsWrongBytesAHangOrAStoreThatCannotOpen) {
  const auto [error, persistent] = GetParam();
  int64_t swept = 0;
  // CI takes every 13th call, another set for each error; WINNOW_TEST_ROUNDS takes all.
  const int64_t stride = TestRounds(0) > 0 ? 1 : 13;
  for (int64_t n = 1 + (error + (persistent ? 5 : 0)) % stride;; n += stride) {
    SCOPED_TRACE(testing::Message() << "call " << n);
    Close();
    fs::remove_all(StoreDir());
    index_ = std::make_shared<MemoryIndexData>();
    plan_->Heal();
    plan_->FailNth(n, error, persistent);
    for (int run = 0; run < 2; ++run) {
      if (!OpenStatus(SweepOptions()).ok()) continue;  // a disk that cannot be opened is told
      for (int i = 0; i < 12; ++i) client_->Put(IdOf(i), kSmall);
      for (int i = 0; i < 12; ++i) client_->GetAndCheck(IdOf(i), kSmall);
      client_->GetPagesAndCheck(IdOf(11), kSmall, {1, 3});
      client_->Erase(IdOf(11).key);
      EXPECT_LE(store_->stats().used_bytes, SweepOptions().capacity_bytes);
    }
    const bool tripped = plan_->tripped;
    plan_->Heal();
    const absl::Status status = OpenStatus(SweepOptions());
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
    for (int i = 0; i < 12; ++i) client_->GetAndCheck(IdOf(i), kSmall);
    ASSERT_EQ(client_->Put(IdOf(50), kSmall), Reason::kNone);
    ASSERT_EQ(client_->GetAndCheck(IdOf(50), kSmall), Reason::kNone);
    Settle();
    ASSERT_EQ(store_->stats().used_bytes, SegmentFileBytes());
    if (testing::Test::HasFailure()) return;
    if (!tripped) break;
    swept = n;
  }
  EXPECT_GT(swept, 100);
  RecordProperty("calls", static_cast<int>(swept));
}

INSTANTIATE_TEST_SUITE_P(Errors, StorageSweep,
                         testing::Values(std::tuple(EIO, false), std::tuple(EIO, true),
                                         std::tuple(ENOSPC, false), std::tuple(ENOSPC, true)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) == EIO ? "Eio" : "Enospc") +
                                  (std::get<1>(info.param) ? "ForGood" : "Once");
                         });

}  // namespace
}  // namespace winnow::storage
