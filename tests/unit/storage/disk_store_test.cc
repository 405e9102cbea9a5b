#include "storage/disk_store.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>

#include "absl/strings/str_format.h"
#include "tests/unit/storage/disk_store_testing.h"

namespace winnow::storage {
namespace {

TEST_F(DiskStoreTest, BlocksOutliveTheProcess) {
  Open();
  for (int i = 0; i < 30; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  client_->Erase(IdOf(7).key);
  store_->SetPinned(IdOf(8).key, true);
  Open();
  EXPECT_FALSE(store_->recovery().index_rebuilt);
  EXPECT_EQ(store_->recovery().dropped_entries, 0u);
  for (int i = 0; i < 30; ++i) {
    EXPECT_EQ(client_->GetAndCheck(IdOf(i), kSmall), i == 7 ? Reason::kAbsent : Reason::kNone);
  }
  EXPECT_TRUE(store_->Find(IdOf(8))->pinned);
  EXPECT_FALSE(store_->Find(IdOf(9))->pinned);
}

TEST_F(DiskStoreTest, UsedBytesAreTheFilesBytes) {
  Open();
  std::mt19937 random(TestSeed(31));
  for (int i = 0; i < 400; ++i) {
    const int number = static_cast<int>(random() % 150);
    if (random() % 5 == 0) {
      client_->Erase(IdOf(number).key);
    } else {
      ASSERT_EQ(client_->Put(IdOf(number), 1 + number * 311), Reason::kNone);
    }
    if (i % 20 != 0) continue;
    Settle();
    ASSERT_EQ(store_->stats().used_bytes, SegmentFileBytes()) << i;
    ASSERT_LE(store_->stats().used_bytes, Options().capacity_bytes);
  }
  EXPECT_GT(store_->stats().evicted_blocks, 0u);
  Open();
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
}

TEST_F(DiskStoreTest, ADirectoryThatOthersMayWriteIsAWarningOrRefused) {
  namespace fs = std::filesystem;
  std::vector<std::string> warnings;
  DiskStoreOptions options = Options();
  options.warn = [&](const std::string& line) { warnings.push_back(line); };
  Open(options);
  EXPECT_TRUE(warnings.empty()) << warnings.front();
  EXPECT_EQ(fs::status(StoreDir()).permissions(), fs::perms::owner_all);
  // RocksDB makes files that everybody may read; the directory keeps others out, also one made before.
  EXPECT_EQ(fs::status(StoreDir() + "/index").permissions(), fs::perms::owner_all);
  Close();
  fs::permissions(StoreDir() + "/index", fs::perms(0755));
  for (const int mode : {0777, 0770, 0702}) {
    fs::permissions(StoreDir(), fs::perms(mode));
    options.strict = true;
    EXPECT_EQ(OpenStatus(options).code(), absl::StatusCode::kPermissionDenied);
    options.strict = false;
    warnings.clear();
    Open(options);
    ASSERT_EQ(warnings.size(), 1u);
    EXPECT_NE(warnings[0].find(absl::StrFormat("mode %04o", mode)), std::string::npos);
    EXPECT_NE(warnings[0].find(StoreDir()), std::string::npos);
    Close();
  }
  EXPECT_EQ(fs::status(StoreDir() + "/index").permissions(), fs::perms::owner_all);
  fs::permissions(StoreDir(), fs::perms(0755));  // others may look at names
  options.strict = true;
  Open(options);
}

TEST_F(DiskStoreTest, TroubleIsAWarningWithBytesAndWhatFollows) {
  std::vector<std::string> warnings;
  DiskStoreOptions options = Options();
  options.warn = [&](const std::string& line) { warnings.push_back(line); };
  Open(options);
  ASSERT_EQ(client_->Put(IdOf(1), kSmall), Reason::kNone);
  plan_->FailAll(Call::kAllocate, ENOSPC);
  for (int i = 2; i < 40; ++i) client_->Put(IdOf(i), kSmall);
  ASSERT_EQ(store_->state(), TierState::kDegraded);
  std::vector<Completion> none;
  store_->Poll(std::chrono::nanoseconds(0), &none);
  const auto warned = [&](const std::vector<std::string>& parts) {
    return std::any_of(warnings.begin(), warnings.end(), [&](const std::string& line) {
      return std::all_of(parts.begin(), parts.end(), [&](const std::string& part) {
        return line.find(part) != std::string::npos;
      });
    });
  };
  const std::string capacity = std::to_string(options.capacity_bytes) + " bytes used";
  EXPECT_TRUE(warned({StoreDir(), "no space left", capacity}));
  EXPECT_TRUE(warned({StoreDir(), "ok -> degraded", capacity, "nothing is put"}));
  plan_->Heal();
  Close();
  warnings.clear();
  options.capacity_bytes = uint64_t{1} << 60;
  Open(options);
  EXPECT_TRUE(warned({StoreDir(), std::to_string(options.capacity_bytes), "has room for"}));
}

TEST_F(DiskStoreTest, SecondOwnerIsRefusedWithTheFirstOnesName) {
  Open();
  FakeClock clock;
  const auto second = DiskStore::Open(Options(), &clock);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(second.status().message().find("pid " + std::to_string(::getpid())), std::string::npos);
  Close();
  Open();
}

TEST_F(DiskStoreTest, OptionsThatCannotHoldAreRefusedByName) {
  const auto refused = [&](auto change, const std::string& name) {
    DiskStoreOptions options = Options();
    change(&options);
    const absl::Status status = options.Validate();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(name), std::string::npos) << status;
    EXPECT_FALSE(DiskStore::Open(options, &clock_).ok());
  };
  refused([](auto* o) { o->directory = ""; }, "directory");
  refused([](auto* o) { o->capacity_bytes = 3 * o->segment_bytes; }, "capacity");
  refused([](auto* o) { o->segment_bytes = 100000; }, "segment_bytes");
  refused([](auto* o) { o->staging_bytes = 4096; }, "staging_bytes");
  refused([](auto* o) { o->operations_max = 0; }, "operations_max");
  refused([](auto* o) { o->read_deadline_ns = 0; }, "deadline");
  refused([](auto* o) { o->open_stall_ns = 0; }, "deadline");
  refused([](auto* o) { o->close_limit_ns = -1; }, "deadline");
  refused([](auto* o) { o->io.depth = 0; }, "depth");
  refused([](auto* o) { o->io.threads = 0; }, "threads");
  EXPECT_TRUE(Options().Validate().ok());
}

TEST_F(DiskStoreTest, NeighbouringPagesAreOneReadAndOnlyThoseAreRead) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(1), 40 * kPageBytes), Reason::kNone);
  const uint64_t reads = store_->io_counters().reads;
  const uint64_t bytes = store_->io_counters().read_bytes;
  EXPECT_EQ(client_->GetPagesAndCheck(IdOf(1), 40 * kPageBytes, {1, 2, 3, 10, 30, 31}),
            Reason::kNone);
  EXPECT_EQ(store_->io_counters().reads - reads, 3u);
  EXPECT_EQ(store_->io_counters().read_bytes - bytes, 6 * kPageBytes);
}

// ---- time ----

TEST_F(DiskStoreTest, TimeToLiveCountsWithinABootAndStandsStillBetweenBoots) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(1), kSmall, {.ttl_s = 100}), Reason::kNone);
  ASSERT_EQ(client_->Put(IdOf(2), kSmall, {.ttl_s = 1000}), Reason::kNone);
  clock_.AdvanceSeconds(50);
  Close();
  clock_.AdvanceSeconds(60);  // closed, same boot
  Open();
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kSmall), Reason::kAbsent);
  EXPECT_EQ(client_->GetAndCheck(IdOf(2), kSmall), Reason::kNone);
  Close();
  clock_.boot_id = "boot-2";  // whatever the new clock says, nothing has expired
  clock_.now_ns = 5'000'000'000'000'000;
  Open();
  EXPECT_EQ(client_->GetAndCheck(IdOf(2), kSmall), Reason::kNone);
  clock_.AdvanceSeconds(889);
  EXPECT_EQ(client_->GetAndCheck(IdOf(2), kSmall), Reason::kNone);
  clock_.AdvanceSeconds(2);
  EXPECT_EQ(client_->GetAndCheck(IdOf(2), kSmall), Reason::kAbsent);
}

TEST_F(DiskStoreTest, WhatWasRaisedIsSoAfterARestart) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(1), kSmall, {.priority = 1, .ttl_s = 10}), Reason::kNone);
  ASSERT_EQ(client_->Put(IdOf(2), kSmall, {.priority = 1, .ttl_s = 10}), Reason::kNone);
  store_->Raise(IdOf(1).key, 5, 100);
  // While its header is on its way.
  store_->Put(1, IdOf(3), BytesOf(IdOf(3), kSmall), {.priority = 1, .ttl_s = 10});
  store_->Raise(IdOf(3).key, 4, 0);
  client_->Finish();
  Close();
  Open();
  clock_.AdvanceSeconds(11);
  ASSERT_TRUE(store_->Find(IdOf(1)).has_value());
  EXPECT_EQ(store_->Find(IdOf(1))->priority, 5);
  EXPECT_FALSE(store_->Find(IdOf(2)).has_value());
  ASSERT_TRUE(store_->Find(IdOf(3)).has_value());
  EXPECT_EQ(store_->Find(IdOf(3))->priority, 4);
  EXPECT_EQ(store_->Find(IdOf(3))->ttl_s, 0u);
  clock_.AdvanceSeconds(100);
  EXPECT_FALSE(store_->Find(IdOf(1)).has_value());
}

// ---- reads that fail ----

TEST_F(DiskStoreTest, ReadErrorIsAMissAndTheBlockStays) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(1), kSmall), Reason::kNone);
  plan_->FailAll(Call::kRead, EIO);
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kSmall), Reason::kIoError);
  EXPECT_EQ(client_->GetPagesAndCheck(IdOf(1), kSmall, {0, 4}), Reason::kIoError);
  plan_->Heal();
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kSmall), Reason::kNone);
  EXPECT_EQ(store_->stats().io_errors, 2u);
}

TEST_F(DiskStoreTest, ReadsAreCountedByTheTimeTheyTook) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(1), kSmall), Reason::kNone);
  const auto total = [this] {
    const StoreStats stats = store_->stats();
    return std::accumulate(stats.read_latency.begin(), stats.read_latency.end(), uint64_t{0});
  };
  EXPECT_EQ(total(), 0u) << "a write is no read";
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kSmall), Reason::kNone);
  EXPECT_EQ(client_->GetPagesAndCheck(IdOf(1), kSmall, {0, 4}), Reason::kNone);
  EXPECT_EQ(client_->GetAndCheck(IdOf(9), kSmall), Reason::kAbsent);
  // The clock stands still, and the disk was not asked for what is absent.
  EXPECT_EQ(store_->stats().read_latency[0], 2u);
  EXPECT_EQ(total(), 2u);

  std::vector<std::byte> into(kSmall);
  store_->Get(77, IdOf(1), into, 0);
  EXPECT_EQ(store_->stats().in_flight, 1u);
  clock_.now_ns += 3'000'000;  // 3 ms
  std::vector<Completion> done;
  while (done.empty()) store_->Poll(std::chrono::milliseconds(10), &done);
  const StoreStats stats = store_->stats();
  EXPECT_EQ(stats.read_latency[6], 1u) << "of more than 1.6 ms and at most 3.2";
  EXPECT_EQ(stats.read_latency_ns, 3'000'000u);
  EXPECT_EQ(stats.in_flight, 0u);
}

TEST_F(DiskStoreTest, ManyReadErrorsTurnTheTierOffAndItComesBack) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(1), kSmall), Reason::kNone);
  plan_->FailAll(Call::kRead, EIO);
  for (int i = 0; i < 20; ++i) client_->GetAndCheck(IdOf(1), kSmall);
  EXPECT_EQ(store_->stats().state, TierState::kOff);
  const int64_t calls = plan_->calls;
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kSmall), Reason::kOff);
  EXPECT_EQ(client_->Put(IdOf(2), kSmall), Reason::kOff);
  EXPECT_EQ(plan_->calls, calls) << "a disk that is off is left alone";
  plan_->Heal();
  clock_.AdvanceSeconds(10);
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kSmall), Reason::kNone);
  EXPECT_EQ(client_->Put(IdOf(2), kSmall), Reason::kNone);
  EXPECT_EQ(store_->stats().state, TierState::kOk);
}

TEST_F(DiskStoreTest, BitFlippedOnceOnTheWayIsReadAgain) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(1), kSmall), Reason::kNone);
  int hits = 0;
  plan_->corrupt_share = 0.5;
  for (int i = 0; i < 40; ++i) {
    const Reason reason = client_->GetAndCheck(IdOf(1), kSmall);
    if (reason == Reason::kNone) ++hits;
    if (reason != Reason::kCorrupt) continue;
    ASSERT_EQ(client_->Put(IdOf(1), kSmall), Reason::kNone);
  }
  EXPECT_GT(hits, 20);
  EXPECT_GT(store_->stats().corrupt_blocks, 0u);
}

TEST_F(DiskStoreTest, LateReadIsAMissAndItsBufferIsKeptFromOthers) {
  Open();
  for (int i = 0; i < 4; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  plan_->hold_reads = true;
  std::vector<std::byte> into(kSmall, std::byte{0xee});
  store_->Get(1, IdOf(1), into, clock_.now_ns + 1'000'000);
  std::vector<Completion> done;
  store_->Poll(std::chrono::milliseconds(0), &done);
  EXPECT_TRUE(done.empty());
  clock_.now_ns += 2'000'000;
  store_->Poll(std::chrono::milliseconds(0), &done);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].reason, Reason::kLate);
  EXPECT_EQ(store_->in_flight(), 0u);
  EXPECT_FALSE(store_->idle()) << "the kernel still has a buffer";
  // Others are served meanwhile, and the late bytes go nowhere.
  EXPECT_EQ(client_->Put(IdOf(9), kSmall), Reason::kNone);
  plan_->hold_reads = false;
  EXPECT_EQ(client_->GetAndCheck(IdOf(2), kSmall), Reason::kNone);
  Settle();
  EXPECT_TRUE(into == std::vector<std::byte>(kSmall, std::byte{0xee}));
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kSmall), Reason::kNone);
}

TEST_F(DiskStoreTest, ReadsThatWaitForBuffersAreServedOrLateInTurn) {
  Open();
  const size_t bytes = 200 * 1024;  // five fill the staging of 1 MiB
  for (int i = 0; i < 4; ++i) ASSERT_EQ(client_->Put(IdOf(i), bytes), Reason::kNone);
  std::vector<std::vector<std::byte>> into(40, std::vector<std::byte>(bytes));
  for (int i = 0; i < 40; ++i) store_->Get(i, IdOf(i % 4), into[i], 0);
  for (const auto& [tag, completion] : client_->Finish()) {
    EXPECT_EQ(completion.reason, Reason::kNone);
  }
  plan_->hold_reads = true;
  for (int i = 0; i < 40; ++i) {
    store_->Get(i, IdOf(i % 4), into[i], clock_.now_ns + 1'000'000);
  }
  std::vector<Completion> done;
  store_->Poll(std::chrono::milliseconds(0), &done);
  clock_.now_ns += 2'000'000;
  for (int i = 0; i < 3; ++i) store_->Poll(std::chrono::milliseconds(0), &done);
  EXPECT_EQ(done.size(), 40u);
  for (const Completion& completion : done) EXPECT_EQ(completion.reason, Reason::kLate);
  plan_->hold_reads = false;
  Settle();
}

// ---- writes that fail ----

TEST_F(DiskStoreTest, FailedWriteFailsThatPutAndTheNextOneIsStoredElsewhere) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(0), kSmall), Reason::kNone);
  plan_->FailAll(Call::kWrite, EIO);
  EXPECT_EQ(client_->Put(IdOf(1), kSmall), Reason::kIoError);
  plan_->Heal();
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kSmall), Reason::kAbsent);
  EXPECT_EQ(client_->Put(IdOf(2), kSmall), Reason::kNone);
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kSmall), Reason::kNone);
  EXPECT_EQ(store_->segments(), 2u);
  Settle();
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
}

TEST_F(DiskStoreTest, FailedSyncPoisonsTheSegmentAndIsNotRepeated) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(0), kSmall), Reason::kNone);
  plan_->FailAll(Call::kDatasync, EIO);
  EXPECT_EQ(client_->Put(IdOf(1), kSmall), Reason::kIoError);
  plan_->Heal();
  Settle();
  const uint64_t syncs = store_->io_counters().syncs;
  EXPECT_EQ(client_->Put(IdOf(2), kSmall), Reason::kNone);
  EXPECT_EQ(store_->segments(), 2u) << "the next block goes to another segment";
  EXPECT_EQ(store_->io_counters().syncs, syncs + 3) << "two to make the segment, one to commit";
  Open();
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kSmall), Reason::kNone);
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kSmall), Reason::kAbsent);
  EXPECT_EQ(client_->GetAndCheck(IdOf(2), kSmall), Reason::kNone);
}

// ENOSPC, and EDQUOT, which is the same to a store: its own bytes are all that it may have.
class DiskStoreNoSpaceTest : public DiskStoreTest, public ::testing::WithParamInterface<int> {};

INSTANTIATE_TEST_SUITE_P(Errors, DiskStoreNoSpaceTest, ::testing::Values(ENOSPC, EDQUOT));

TEST_P(DiskStoreNoSpaceTest, MakesTheTierReadOnlyThenItMakesRoomAndGoesOn) {
  Open();
  for (int i = 0; i < 40; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  plan_->FailAll(Call::kAllocate, GetParam());
  int i = 40;
  while (client_->Put(IdOf(i), kSmall) == Reason::kNone) ++i;
  EXPECT_EQ(store_->stats().state, TierState::kDegraded);
  EXPECT_EQ(client_->Put(IdOf(i), kSmall), Reason::kOff);
  EXPECT_EQ(client_->GetAndCheck(IdOf(20), kSmall), Reason::kNone);
  Settle();
  const uint64_t full_bytes = SegmentFileBytes();
  EXPECT_EQ(store_->stats().used_bytes, full_bytes);
  plan_->Heal();
  clock_.AdvanceSeconds(10);
  EXPECT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  EXPECT_EQ(store_->stats().state, TierState::kOk);
  EXPECT_GT(store_->stats().evicted_blocks, 0u) << "the first new segment replaced an old one";
  EXPECT_EQ(client_->GetAndCheck(IdOf(i), kSmall), Reason::kNone);
}

TEST_F(DiskStoreTest, FailingIndexStopsWritesNotReads) {
  Open();
  ASSERT_EQ(client_->Put(IdOf(0), kSmall), Reason::kNone);
  index_faults_->fail = true;
  EXPECT_EQ(client_->Put(IdOf(1), kSmall), Reason::kIoError);
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kSmall), Reason::kAbsent);
  for (int i = 2; i < 20; ++i) client_->Put(IdOf(i), kSmall);
  EXPECT_EQ(store_->stats().state, TierState::kDegraded);
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kSmall), Reason::kNone);
  EXPECT_EQ(client_->Erase(IdOf(0).key), Reason::kIoError) << "it may come back";
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kSmall), Reason::kAbsent);
  index_faults_->fail = false;
  clock_.AdvanceSeconds(10);
  EXPECT_EQ(client_->Put(IdOf(1), kSmall), Reason::kNone);
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kSmall), Reason::kNone);
}

TEST_F(DiskStoreTest, LateWriteFailsItsPutAndNothingElse) {
  DiskStoreOptions options = Options();
  Open(options);
  ASSERT_EQ(client_->Put(IdOf(0), kSmall), Reason::kNone);
  plan_->hold_writes = true;
  store_->Put(50, IdOf(1), BytesOf(IdOf(1), kSmall), {});
  std::vector<Completion> done;
  store_->Poll(std::chrono::milliseconds(0), &done);
  clock_.AdvanceSeconds(31);
  for (int i = 0; i < 5; ++i) store_->Poll(std::chrono::milliseconds(1), &done);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].reason, Reason::kLate);
  plan_->hold_writes = false;
  Settle();
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kSmall), Reason::kAbsent);
  EXPECT_EQ(client_->Put(IdOf(1), kSmall), Reason::kNone);
  Settle();
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes()) << "the late write landed inside";
}

TEST_F(DiskStoreTest, EraseDuringAPutWins) {
  Open();
  for (int polls = 0; polls < 12; ++polls) {
    store_->Put(1, IdOf(1), BytesOf(IdOf(1), kSmall), {});
    std::vector<Completion> done;
    for (int i = 0; i < polls; ++i) store_->Poll(std::chrono::microseconds(200), &done);
    store_->Erase(2, IdOf(1).key);
    client_->Finish();
    ASSERT_FALSE(store_->Find(IdOf(1)).has_value()) << polls;
    if (polls % 4 == 0) Open();
    ASSERT_FALSE(store_->Find(IdOf(1)).has_value()) << polls;
  }
}

// What is written down of a block while the index has not taken its new place yet must not leave it
// with the old one, whose file is about to go.
TEST_F(DiskStoreTest, ABlockThatIsPutOrPinnedWhileItMovesIsThereAfterARestart) {
  bool chosen = false;
  DiskStoreOptions options = Options();
  options.seams.passed = [&, count = options.seams.passed](const char* point) {
    count(point);
    if (chosen || std::string_view(point) != "reclaim.chosen") return;
    index_faults_->hang = chosen = true;
  };
  Open(options);
  int puts = 0;
  for (; !chosen && puts < 200; ++puts) {
    store_->Put(puts, IdOf(puts), BytesOf(IdOf(puts), kSmall), {});
    PollUntil([&] { return chosen || store_->in_flight() == 0; });
    // Every second block stays warm, so that a victim has something to move.
    for (int i = 0; !chosen && i < puts; i += 2) client_->GetAndCheck(IdOf(i), kSmall);
  }
  int quiet = 0;
  PollUntil([&] {  // all copies are written, and wait for the index
    quiet = commits_ > 0 && plan_->passed == 0 ? quiet + 1 : 0;
    return quiet > 5;
  });
  for (int i = 0; i < puts; ++i) {
    if (!store_->Find(IdOf(i)).has_value()) continue;
    if (i % 4 == 0) {
      store_->Put(1000 + i, IdOf(i), BytesOf(IdOf(i), kSmall), {});
    } else {
      ASSERT_TRUE(store_->SetPinned(IdOf(i).key, true));
      ASSERT_TRUE(store_->SetPinned(IdOf(i).key, false));
    }
  }
  index_faults_->Release();
  PollUntil([&] { return store_->in_flight() == 0; });
  Settle();
  EXPECT_GT(store_->stats().moved_blocks, 1u);
  std::vector<int> kept;
  for (int i = 0; i < puts; ++i) {
    if (store_->Find(IdOf(i)).has_value()) kept.push_back(i);
  }
  Open();
  EXPECT_EQ(store_->recovery().dropped_entries, 0u);
  for (const int i : kept) EXPECT_EQ(client_->GetAndCheck(IdOf(i), kSmall), Reason::kNone) << i;
}

// The same for a block that takes an older one's place under one key: what becomes of the older one
// meanwhile must not take its place in the index.
TEST_F(DiskStoreTest, ABlockThatReplacesAnotherIsThereAfterARestartWhateverBecameOfTheOther) {
  Open();
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), kSmall, {.ttl_s = 10}), Reason::kNone);
  }
  index_faults_->hang = true;
  for (int i = 0; i < 2; ++i) store_->Put(i, IdOf(i), BytesOf(IdOf(i), kSmall / 2), {});
  int quiet = 0;
  PollUntil([&] {
    quiet = commits_ > 0 && plan_->passed == 0 ? quiet + 1 : 0;
    return quiet > 5;
  });
  ASSERT_TRUE(store_->SetPinned(IdOf(0).key, true));
  clock_.AdvanceSeconds(11);
  std::vector<std::byte> into(kSmall);
  store_->Get(2, IdOf(1), into, 0);  // finds that it has expired
  EXPECT_FALSE(store_->Find(IdOf(1)).has_value());
  index_faults_->Release();
  Settle();
  Open();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(client_->GetAndCheck(IdOf(i), kSmall / 2), Reason::kNone) << i;
  }
}

TEST_F(DiskStoreTest, ShortTransfersRepeatsAndReorderingChangeNothing) {
  plan_->short_share = 0.4;
  plan_->repeat_share = 0.1;
  plan_->reorder = true;
  Open();
  for (int i = 0; i < 60; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  for (int i = 0; i < 60; ++i) ASSERT_EQ(client_->GetAndCheck(IdOf(i), kSmall), Reason::kNone);
  Open();
  for (int i = 0; i < 60; ++i) ASSERT_EQ(client_->GetAndCheck(IdOf(i), kSmall), Reason::kNone);
}

TEST_F(DiskStoreTest, TooMuchAtOnceIsBusyNotAHang) {
  DiskStoreOptions options = Options();
  options.operations_max = 8;
  Open(options);
  for (int i = 0; i < 100; ++i) store_->Put(i, IdOf(i), BytesOf(IdOf(i), kSmall), {});
  int busy = 0;
  for (const auto& [tag, completion] : client_->Finish()) {
    busy += completion.reason == Reason::kBusy;
  }
  EXPECT_EQ(busy, 92);
}

// ---- maintenance ----

TEST_F(DiskStoreTest, VerifyFindsWhatRepairRemoves) {
  Open();
  for (int i = 0; i < 20; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  Close();
  std::string bytes = ReadFile(SegmentFiles()[0]);
  bytes[3 * kPageBytes + 5] ^= 1;  // the payload of the first block
  WriteFile(SegmentFiles()[0], bytes);
  Open();
  VerifyReport report = store_->VerifyAll(/*repair=*/false);
  EXPECT_EQ(report.blocks, 20u);
  EXPECT_EQ(report.corrupt_blocks, 1u);
  EXPECT_EQ(report.removed_blocks, 0u);
  EXPECT_EQ(store_->VerifyAll(/*repair=*/true).removed_blocks, 1u);
  report = store_->VerifyAll(/*repair=*/false);
  EXPECT_EQ(report.blocks, 19u);
  EXPECT_EQ(report.corrupt_blocks, 0u);
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kSmall), Reason::kAbsent);
}

TEST_F(DiskStoreTest, GarbageCollectionFreesDeadBytesAndKeepsEveryBlock) {
  Open();
  for (int i = 0; i < 50; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), kSmall, {.ttl_s = i % 5 == 1 ? 10u : 0u}), Reason::kNone);
  }
  for (int i = 0; i < 50; ++i) {
    if (i % 5 > 1) client_->Erase(IdOf(i).key);
  }
  clock_.AdvanceSeconds(20);
  const uint64_t before_bytes = SegmentFileBytes();
  const GcReport report = store_->CollectGarbage();
  EXPECT_EQ(report.expired_blocks, 10u);
  EXPECT_GT(report.freed_bytes, before_bytes / 3);
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
  for (int i = 0; i < 50; i += 5) {
    EXPECT_EQ(client_->GetAndCheck(IdOf(i), kSmall), Reason::kNone);
  }
  Open();
  for (int i = 0; i < 50; i += 5) {
    EXPECT_EQ(client_->GetAndCheck(IdOf(i), kSmall), Reason::kNone);
  }
}

// A move writes new checksums for the block's new place: of what is damaged they would make something
// sound.
// More is in use in each segment than is moved at once, and more Puts are in flight than what is left
// of the segment that it is moved to: they wait for those that come after.
TEST_F(DiskStoreTest, PutsLeaveTheRoomThatMovesNeed) {
  constexpr size_t kBytes = 100'000;
  DiskStoreOptions options = Options();
  options.segment_bytes = 8 << 20;
  options.capacity_bytes = 4 * options.segment_bytes;
  options.staging_bytes = 2 << 20;
  Open(options);
  const auto in_segment = static_cast<int>(BlocksInSegment(options.segment_bytes, kBytes));
  std::vector<int> in_use;
  for (int i = 0; i < 3 * in_segment; ++i) {
    if (i % 6 != 0) in_use.push_back(i);
    ASSERT_EQ(client_->Put(IdOf(i), kBytes, {.in_use = i % 6 != 0, .transient = true}),
              Reason::kNone);
  }
  for (int i = 0; i < 300; ++i) {
    const BlockId id = IdOf(1000 + i);
    store_->Put(i, id, BytesOf(id, kBytes), {.transient = true});
    if (i % 18 == 17) client_->Finish();
  }
  client_->Finish();
  Settle();
  EXPECT_GT(store_->stats().moved_blocks, 0u);
  for (const int i : in_use) EXPECT_TRUE(store_->Find(IdOf(i)).has_value()) << i;
}

TEST_F(DiskStoreTest, DamagedBlockIsNotMovedButDropped) {
  Open();
  for (int i = 0; i < 50; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  Close();
  std::string bytes = ReadFile(SegmentFiles()[0]);
  bytes[3 * kPageBytes + 5] ^= 1;  // the payload of the first block
  WriteFile(SegmentFiles()[0], bytes);
  Open();
  for (int i = 0; i < 50; ++i) {
    if (i % 5 != 0) client_->Erase(IdOf(i).key);
  }
  const GcReport report = store_->CollectGarbage();
  EXPECT_GT(report.freed_bytes, 0u);
  EXPECT_NE(ReadFile(SegmentFiles()[0]), bytes);  // its segment was emptied
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kSmall), Reason::kAbsent);
  EXPECT_EQ(store_->stats().corrupt_blocks, 1u);
  for (int i = 5; i < 50; i += 5) {
    EXPECT_EQ(client_->GetAndCheck(IdOf(i), kSmall), Reason::kNone) << i;
  }
}

TEST_F(DiskStoreTest, LoweredCapacityOnADiskThatCannotWriteDoesNotKeepTheStoreClosed) {
  Open();
  for (int i = 0; i < 60; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  for (int i = 0; i < 60; ++i) ASSERT_TRUE(i % 3 != 0 || store_->SetPinned(IdOf(i).key, true));
  Close();
  plan_->FailAll(Call::kAllocate, EIO);
  DiskStoreOptions options = Options();
  options.capacity_bytes = 4 * options.segment_bytes;
  Open(options);
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kSmall), Reason::kNone);
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
}

TEST_F(DiskStoreTest, LoweredCapacityKeepsWhatIsPinned) {
  DiskStoreOptions large = Options();
  large.capacity_bytes = 30 * large.segment_bytes;
  Open(large);
  constexpr int kPuts = 200;
  for (int i = 0; i < kPuts; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  for (int i = 0; i < kPuts; i += 10) ASSERT_TRUE(store_->SetPinned(IdOf(i).key, true));
  Settle();
  DiskStoreOptions options = Options();
  options.capacity_bytes = 4 * options.segment_bytes;
  Open(options);
  EXPECT_LE(SegmentFileBytes(), options.capacity_bytes);
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
  for (int i = 0; i < kPuts; i += 10) {
    EXPECT_EQ(client_->GetAndCheck(IdOf(i), kSmall), Reason::kNone) << i;
  }
  EXPECT_EQ(client_->Put(IdOf(1000), kSmall), Reason::kNone);
}

TEST_F(DiskStoreTest, LoweredCapacityIsKeptFromTheStart) {
  Open();
  for (int i = 0; i < 60; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  DiskStoreOptions options = Options();
  options.capacity_bytes = 4 * options.segment_bytes;
  Open(options);
  EXPECT_LE(SegmentFileBytes(), options.capacity_bytes);
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
  EXPECT_GT(store_->stats().blocks, 10u);
  EXPECT_EQ(client_->Put(IdOf(100), kSmall), Reason::kNone);
}

}  // namespace
}  // namespace winnow::storage
