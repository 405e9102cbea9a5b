// A disk that takes its time, or never answers: what was given up may still happen, whenever the
// kernel likes. It costs misses, never a hang, a wrong byte or a byte that is not accounted for.
#include <gtest/gtest.h>

#include "tests/unit/storage/disk_store_testing.h"

namespace winnow::storage {
namespace {

// One step in the life of a segment, told by what the ring sees of it.
struct Step {
  const char* name;
  IoKind kind;
  const char* magic = nullptr;  // of the page that is written
};

bool IsStep(const Step& step, const IoRequest& request) {
  if (request.kind != step.kind) return false;
  return step.magic == nullptr || std::memcmp(request.data, step.magic, 8) == 0;
}

class StorageStall : public DiskStoreTest {
 protected:
  void TearDown() override { plan_->Heal(); }  // also where an assertion left the test early
  void PollFor(int polls) {
    for (int i = 0; i < polls; ++i) store_->Poll(std::chrono::milliseconds(1), &done_);
  }
  std::vector<Completion> done_;
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
  PollFor(50);
  ASSERT_GT(held, 0) << "the step was not reached";
  clock_.AdvanceSeconds(31);
  PollFor(50);
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
  PollFor(50);
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
    PollFor(50);
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

}  // namespace
}  // namespace winnow::storage
