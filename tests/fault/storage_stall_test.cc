// A disk that takes its time, or never answers: what was given up may still happen, whenever the
// kernel likes. It costs misses, never a hang, a wrong byte or a byte that is not accounted for.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>

#include "tests/unit/storage/disk_store_testing.h"

namespace winnow::storage {
namespace {

// One step in the life of a segment, told by what the ring sees of it.
struct Step {
  const char* name;
  IoKind kind;
  const char* magic = nullptr;  // of the page that is written
};

void PrintTo(const Step& step, std::ostream* out) { *out << step.name; }

bool IsStep(const Step& step, const IoRequest& request) {
  if (request.kind != step.kind) return false;
  return step.magic == nullptr || std::memcmp(request.data, step.magic, 8) == 0;
}

class StorageStall : public DiskStoreTest {
 protected:
  void TearDown() override {  // also where an assertion left the test early
    plan_->Heal();
    if (index_faults_ != nullptr) index_faults_->Release();
  }
  void PollFor(int polls) {
    for (int i = 0; i < polls; ++i) store_->Poll(std::chrono::milliseconds(1), &done_);
  }
};

class StorageStallAtStep : public StorageStall, public testing::WithParamInterface<Step> {};

TEST_P(StorageStallAtStep, AStepThatLandsAfterItWasGivenUpLeavesUsedBytesEqualToFileBytes) {
  Open();
  // The first segment is open and holds a promise.
  ASSERT_EQ(client_->Put(IdOf(0), kSmall), Reason::kNone);
  int held = 0;
  plan_->hold = [&](const IoRequest& request) {
    const bool is = IsStep(GetParam(), request);
    held += is;
    return is;
  };
  // Enough to fill the first segment and begin the next one.
  for (int i = 1; i < 14; ++i) store_->Put(i, IdOf(i), BytesOf(IdOf(i), kSmall), {});
  PollUntilQuiet();
  ASSERT_GT(held, 0) << "the step was not reached";
  clock_.AdvanceSeconds(31);
  PollUntilQuiet();
  plan_->hold = nullptr;
  Settle();
  EXPECT_EQ(store_->in_flight(), 0u);
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kSmall), Reason::kNone);
  clock_.AdvanceSeconds(10);
  for (int i = 20; i < 40; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  Settle();
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
  Open();
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kSmall), Reason::kNone);
  for (int i = 20; i < 40; ++i) EXPECT_EQ(client_->GetAndCheck(IdOf(i), kSmall), Reason::kNone);
}

INSTANTIATE_TEST_SUITE_P(
    Steps, StorageStallAtStep,
    testing::Values(Step{"Allocate", IoKind::kAllocate}, Step{"Header", IoKind::kWrite, "WNWSEGM1"},
                    Step{"CreateSync", IoKind::kSync}, Step{"Block", IoKind::kWrite, "WNWBLCK1"},
                    Step{"Sync", IoKind::kDatasync}, Step{"Footer", IoKind::kWrite, "WNWFOOT1"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_F(StorageStall, APutThatWaitsForAStuckSegmentIsLateNotHung) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(0), kSmall), Reason::kNone);
  plan_->hold = [](const IoRequest& request) { return request.kind == IoKind::kAllocate; };
  int puts = 0;
  for (; puts < 14; ++puts)
    store_->Put(puts, IdOf(100 + puts), BytesOf(IdOf(100 + puts), kSmall), {});
  PollUntilQuiet();
  EXPECT_GT(store_->in_flight(), 0u);
  clock_.AdvanceSeconds(31);
  PollFor(20);
  EXPECT_EQ(store_->in_flight(), 0u);
  ASSERT_EQ(done_.size(), static_cast<size_t>(puts));
  plan_->hold = nullptr;
  Settle();
}

TEST_F(StorageStall, PutsThatWaitForAHungCompactionAreLateAndLaterOnesFindRoomElsewhere) {
  Open();
  int i = 0;
  for (; store_->stats().moved_blocks == 0; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
    // Every second block stays warm, so that a victim has something to move.
    for (int j = 0; j < i; j += 2) client_->GetAndCheck(IdOf(j), kSmall);
  }
  Settle();
  int held = -1;
  plan_->hold = [&held](const IoRequest& request) {
    if (request.kind == IoKind::kRead && held < 0) held = request.fd;
    return request.kind == IoKind::kRead && request.fd == held;
  };
  int puts = 0;
  for (; store_->in_flight() == 0 && puts < 100; ++puts) {
    store_->Put(puts, IdOf(1000 + puts), BytesOf(IdOf(1000 + puts), kSmall), {});
    PollUntilQuiet();
  }
  ASSERT_EQ(store_->in_flight(), 1u) << "no Put waits for a hung compaction";
  clock_.AdvanceSeconds(31);
  PollFor(3);
  EXPECT_EQ(store_->in_flight(), 0u);
  ASSERT_EQ(done_.size(), static_cast<size_t>(puts));
  EXPECT_EQ(done_.back().reason, Reason::kLate);
  EXPECT_EQ(client_->Put(IdOf(2000), kSmall), Reason::kNone) << "another victim is there";
  plan_->hold = nullptr;
  Settle();
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
}

// Reads that never come back keep their segment's file, so its room does not come back either;
// other segments make room instead.
TEST_F(StorageStall, ASegmentThatAStuckReadHoldsDoesNotKeepOthersFromMakingRoom) {
  Open();
  int i = 0;
  for (; store_->stats().evicted_blocks == 0; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  }
  Settle();
  // A read of one block hangs; then all blocks of its segment are erased.
  std::byte* held = nullptr;
  plan_->hold = [&held](const IoRequest& request) {
    if (request.kind != IoKind::kRead) return false;
    if (held == nullptr) held = request.data;
    return request.data == held;  // no other read gets this buffer
  };
  std::vector<std::byte> into(kSmall);
  const int last = i - 1;
  const int stuck = last - 30;
  store_->Get(1, IdOf(stuck), into, clock_.now_ns + 1'000'000);
  PollFor(2);
  clock_.now_ns += 2'000'000;
  PollFor(2);
  ASSERT_EQ(done_.size(), 1u);
  ASSERT_EQ(done_[0].reason, Reason::kLate);
  for (int j = stuck - 12; j < stuck + 12; ++j) client_->Erase(IdOf(j).key);
  for (int j = 0; j < 100; ++j) {
    ASSERT_EQ(client_->Put(IdOf(1000 + j), kSmall), Reason::kNone) << j;
  }
  plan_->hold = nullptr;
  Settle();
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
}

TEST_F(StorageStall, AFileStaysUntilTheReadsOfItAreBack) {
  Open();
  constexpr int kBlocks = 12;
  for (int i = 0; i < kBlocks; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  Settle();
  ASSERT_EQ(SegmentFiles().size(), 2u);
  plan_->hold_reads = true;
  std::vector<std::byte> into(kSmall);
  store_->Get(kBlocks, IdOf(0), into, 0);
  for (int i = 0; i < kBlocks; ++i) store_->Erase(i, IdOf(i).key);
  PollUntil([this] { return store_->in_flight() == 1; });
  PollFor(3);
  EXPECT_EQ(SegmentFiles().size(), 2u) << "one is read, the other is open";
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
  plan_->hold_reads = false;
  PollUntil([this] { return store_->in_flight() == 0; });
  EXPECT_EQ(done_.back().tag, uint64_t{kBlocks});
  EXPECT_EQ(done_.back().reason, Reason::kNone);
  EXPECT_TRUE(into == BytesOf(IdOf(0), kSmall));
  Settle();
  EXPECT_EQ(SegmentFiles().size(), 1u);
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
}

// A disk that takes 10 s for every call: within the deadlines of writes, past those of reads.
TEST_F(StorageStall, TenSecondsForEveryCallIsSlowPutsLateReadsAndNothingElse) {
  Open();
  for (int i = 0; i < 5; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  // Each call is held until its 10 s have passed on the store's clock.
  std::map<std::pair<int, const std::byte*>, int64_t> begun;
  plan_->hold = [&](const IoRequest& request) {
    const auto [it, first] =
        begun.try_emplace({request.fd * 8 + static_cast<int>(request.kind), request.data},
                          clock_.now_ns + 10'000'000'000);
    if (clock_.now_ns < it->second) return true;
    begun.erase(it);
    return false;
  };
  for (int i = 10; i < 24; ++i) store_->Put(i, IdOf(i), BytesOf(IdOf(i), kSmall), {});
  std::vector<std::byte> into(kSmall, std::byte{0xee});
  store_->Get(1, IdOf(1), into, 0);
  for (int second = 0; second < 400 && store_->in_flight() > 0; ++second) {
    PollUntilQuiet();
    clock_.AdvanceSeconds(1);
  }
  EXPECT_EQ(store_->in_flight(), 0u);
  std::map<uint64_t, Completion> by_tag;
  for (const Completion& completion : done_) by_tag[completion.tag] = completion;
  EXPECT_EQ(by_tag.at(1).reason, Reason::kLate);
  EXPECT_TRUE(into == std::vector<std::byte>(kSmall, std::byte{0xee}));
  int stored = 0;
  for (int i = 10; i < 24; ++i) {
    const Reason reason = by_tag.at(i).reason;
    stored += reason == Reason::kNone;
    EXPECT_TRUE(reason == Reason::kNone || reason == Reason::kLate) << ReasonName(reason);
  }
  EXPECT_GE(stored, 5) << "those that fit the open segment take two calls";
  plan_->hold = nullptr;
  Settle();
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
  Open();
  for (int i = 10; i < 24; ++i) {
    const Reason reason = client_->GetAndCheck(IdOf(i), kSmall);
    if (by_tag.at(i).reason == Reason::kNone) {
      EXPECT_EQ(reason, Reason::kNone);
    }
  }
}

// A disk that never answers again: each time that the tier is tried, reads are late, whether the ring
// has no place left for them or the store no buffer.
TEST_F(StorageStall, ReadsOfADiskThatIsFullOfStuckOnesAreLateAndTheTierGoesOff) {
  for (const size_t bytes : {kSmall, size_t{200} * 1024}) {
    SCOPED_TRACE(bytes);
    Open();
    ASSERT_EQ(client_->Put(IdOf(0), bytes), Reason::kNone);
    plan_->hold_reads = true;
    std::vector<std::vector<std::byte>> into(40, std::vector<std::byte>(bytes));
    for (int attempt = 0; attempt < 4; ++attempt) {
      SCOPED_TRACE(attempt);
      ASSERT_EQ(store_->state(), TierState::kOk);
      done_.clear();
      for (int i = 0; i < 40; ++i) store_->Get(i, IdOf(0), into[i], 0);
      PollFor(3);
      clock_.AdvanceSeconds(3);
      PollFor(3);
      EXPECT_EQ(store_->in_flight(), 0u);
      ASSERT_EQ(done_.size(), 40u);
      for (const Completion& completion : done_) EXPECT_EQ(completion.reason, Reason::kLate);
      EXPECT_EQ(store_->state(), TierState::kOff);
      clock_.AdvanceSeconds(100);
      PollFor(1);
    }
    plan_->hold_reads = false;
    Settle();
    EXPECT_EQ(client_->GetAndCheck(IdOf(0), bytes), Reason::kNone);
    Close();
  }
}

// ---- opening, maintenance, closing ----

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST_F(StorageStall, OpeningAHungDiskFailsInTimeAndWorksOnceTheDiskAnswers) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(1), kSmall), Reason::kNone);
  Close();
  const auto hangs = std::make_shared<std::atomic<bool>>(true);
  plan_->hold = [hangs](const IoRequest& request) { return hangs->load(); };
  DiskStoreOptions options = Options();
  options.open_stall_ns = 1'000'000'000;
  options.seams.files = nullptr;  // the plan belongs to the thread that opens
  log_.clear();
  // A store's options go last, after its hold on the directory.
  auto [token, first_gone] = MakeWatched<int>();
  const auto start = std::chrono::steady_clock::now();
  {
    DiskStoreOptions first = options;
    first.seams.decorate_engine =
        [token = std::move(token), decorate = options.seams.decorate_engine](
            std::unique_ptr<IoEngine> engine) { return decorate(std::move(engine)); };
    const absl::Status status = OpenStatus(first);
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_NE(status.message().find(options.directory), std::string::npos) << status;
  }
  EXPECT_LT(SecondsSince(start), 60);
  options.open_stall_ns = 20'000'000'000;
  EXPECT_EQ(OpenStatus(options).code(), absl::StatusCode::kFailedPrecondition)
      << "the first opening still waits for the disk";
  *hangs = false;
  ASSERT_EQ(first_gone.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  Open(options);
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kSmall), Reason::kNone);
  Close();
  plan_->hold = nullptr;
}

// Slow is not hung: what counts is that the disk answers at all.
TEST_F(StorageStall, OpeningASlowDiskTakesLongerThanTheLimitAndSucceeds) {
  Open();
  for (int i = 0; i < 60; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  Close();
  std::filesystem::remove_all(StoreDir() + "/index");
  // Time goes on with the reads, and each waits until the opening has been looked at. Shared with the
  // thread that opens, which goes on by itself should the opening be given up.
  constexpr int kSlowReads = 20;
  static constexpr auto kRead = std::chrono::milliseconds(10), kLimit = 4 * kRead;
  struct SlowDisk {
    std::mutex mutex;
    std::condition_variable changed;
    int looks = 0, reads = 0;
    bool given_up = false;
    std::chrono::steady_clock::time_point now;
  };
  const auto disk = std::make_shared<SlowDisk>();
  plan_->hold = [disk](const IoRequest& request) {
    std::unique_lock lock(disk->mutex);
    if (disk->reads == kSlowReads) return false;
    ++disk->reads;
    disk->now += kRead;
    disk->changed.wait(
        lock, [&, before = disk->looks] { return disk->given_up || disk->looks > before; });
    return false;
  };
  DiskStoreOptions options = Options();
  options.open_stall_ns = std::chrono::nanoseconds(kLimit).count();
  options.seams.steady_now = [disk] {
    const std::lock_guard lock(disk->mutex);
    ++disk->looks;
    disk->changed.notify_all();
    return disk->now;
  };
  // A store's options go last: then nobody uses what the fixture owns any more.
  auto [token, gone] = MakeWatched<int>();
  options.seams.decorate_engine =
      [token = std::move(token), decorate = options.seams.decorate_engine](
          std::unique_ptr<IoEngine> engine) { return decorate(std::move(engine)); };
  if (const absl::Status status = OpenStatus(options); !status.ok()) {
    {
      const std::lock_guard lock(disk->mutex);
      disk->given_up = true;
    }
    disk->changed.notify_all();
    options = {};
    gone.wait();
    FAIL() << status;
  }
  EXPECT_EQ(disk->reads, kSlowReads);  // five times the limit
  EXPECT_TRUE(store_->recovery().index_rebuilt);
  EXPECT_EQ(store_->stats().blocks, 60u);
  plan_->hold = nullptr;
}

TEST_F(StorageStall, VerifyLeavesASegmentThatHangsAndChecksTheOthers) {
  Open();
  for (int i = 0; i < 30; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  Settle();
  ASSERT_EQ(store_->segments(), 3u);
  int held = -1;
  plan_->hold = [this, &held](const IoRequest& request) {
    if (request.kind == IoKind::kRead && held < 0) {
      held = request.fd;
      clock_.AdvanceSeconds(31);
    }
    return request.kind == IoKind::kRead && request.fd == held;
  };
  VerifyReport report = store_->VerifyAll(/*repair=*/true);
  EXPECT_EQ(report.blocks, 30u);
  EXPECT_EQ(report.unchecked_blocks, 10u);
  EXPECT_EQ(report.corrupt_blocks + report.unreadable_blocks + report.removed_blocks, 0u);
  EXPECT_FALSE(store_->idle()) << "the kernel still has a buffer";
  plan_->hold = nullptr;
  Settle();
  report = store_->VerifyAll(/*repair=*/false);
  EXPECT_EQ(report.unchecked_blocks, 0u);
  EXPECT_EQ(report.bytes, 30 * kSmall);
}

TEST_F(StorageStall, ClosingAHungStoreReturnsAndKeepsTheDirectoryFromOthers) {
  DiskStoreOptions options = Options();
  options.close_limit_ns = 300'000'000;
  auto [faults, index_gone] = MakeWatched<IndexFaults>();
  index_faults_ = std::move(faults);
  Open(options);
  ASSERT_EQ(client_->Put(IdOf(1), kSmall), Reason::kNone);
  plan_->hold_reads = true;
  auto into = std::make_shared<std::vector<std::byte>>(kSmall, std::byte{0xee});
  store_->Get(1, IdOf(1), *into, 0);
  store_->Poll(std::chrono::milliseconds(0), &done_);
  const auto start = std::chrono::steady_clock::now();
  Close();
  EXPECT_LT(SecondsSince(start), 30);
  EXPECT_NE(log_.back().find("hangs"), std::string::npos);
  EXPECT_EQ(OpenStatus(options).code(), absl::StatusCode::kFailedPrecondition)
      << "a write may still land";
  // The index was given little time to close: RocksDB must not be at work while the process's statics go.
  index_faults_.reset();
  EXPECT_EQ(index_gone.wait_for(std::chrono::seconds(60)), std::future_status::ready);
}

TEST_F(StorageStall, ClosingWhileTheIndexHangsReturns) {
  DiskStoreOptions options = Options();
  options.close_limit_ns = 300'000'000;
  auto [faults, index_gone] = MakeWatched<IndexFaults>();
  index_faults_ = std::move(faults);
  Open(options);
  index_faults_->hang = true;
  store_->Put(1, IdOf(1), BytesOf(IdOf(1), kSmall), {});
  PollUntil([this] { return commits_ == 1; });
  const auto start = std::chrono::steady_clock::now();
  Close();
  EXPECT_LT(SecondsSince(start), 30);
  // What was left behind ends: RocksDB must not be at work while the process's statics go.
  index_faults_->Release();
  index_faults_.reset();
  EXPECT_EQ(index_gone.wait_for(std::chrono::seconds(60)), std::future_status::ready);
}

TEST_F(StorageStall, WhoWaitsForAHungIndexIsToldInTime) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(1), kSmall), Reason::kNone);
  index_faults_->hang = true;
  store_->Put(2, IdOf(2), BytesOf(IdOf(2), kSmall), {});
  PollUntil([this] { return commits_ == 1; });
  store_->Erase(3, IdOf(1).key);
  PollFor(5);
  EXPECT_EQ(store_->in_flight(), 2u);
  clock_.AdvanceSeconds(31);
  PollFor(2);
  ASSERT_EQ(done_.size(), 2u);
  EXPECT_EQ(done_[0].reason, Reason::kLate);
  EXPECT_EQ(done_[1].reason, Reason::kIoError) << "it may come back";
  EXPECT_EQ(store_->in_flight(), 0u);
  EXPECT_EQ(client_->Put(IdOf(2), kSmall), Reason::kBusy) << "still on its way";
  index_faults_->Release();
  Settle();
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kSmall), Reason::kAbsent);
  EXPECT_EQ(client_->GetAndCheck(IdOf(2), kSmall), Reason::kNone);
}

// Who is told each time that it was too late must not be asked to wait again and again.
TEST_F(StorageStall, AHungIndexMakesTheTierReadOnlyUntilItAnswers) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(0), kSmall), Reason::kNone);
  index_faults_->hang = true;
  for (int i = 1; i < 10; ++i) {
    store_->Put(i, IdOf(i), BytesOf(IdOf(i), kSmall), {});
    PollUntil([&] { return commits_ == i; });
  }
  EXPECT_EQ(store_->state(), TierState::kOk);
  clock_.AdvanceSeconds(31);
  PollFor(2);
  EXPECT_EQ(store_->in_flight(), 0u);
  EXPECT_EQ(store_->state(), TierState::kDegraded);
  EXPECT_EQ(client_->Put(IdOf(20), kSmall), Reason::kOff);
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kSmall), Reason::kNone);
  index_faults_->Release();
  Settle();
  clock_.AdvanceSeconds(10);
  EXPECT_EQ(client_->Put(IdOf(20), kSmall), Reason::kNone);
  for (int i = 1; i < 10; ++i) EXPECT_EQ(client_->GetAndCheck(IdOf(i), kSmall), Reason::kNone);
}

}  // namespace
}  // namespace winnow::storage
