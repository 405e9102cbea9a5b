#include "storage/ring.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <thread>

#include "storage/format.h"
#include "storage/page_memory.h"
#include "tests/fault/faulty_ring.h"
#include "tests/unit/storage/storage_testing.h"

namespace winnow::storage {
namespace {

using std::chrono::milliseconds;

// Both engines, io_uring only where the kernel lets us have it.
std::unique_ptr<IoEngine> MakeEngine(IoEngineKind kind, uint32_t depth = 32) {
  if (kind == IoEngineKind::kThreads) return MakeThreadsEngine(depth, 4);
  auto engine = MakeUringEngine(depth);
  return engine.ok() ? *std::move(engine) : nullptr;
}

// What a word of the test file holds: a function of where it is.
uint64_t WordAt(uint64_t offset) { return offset * 0x9e3779b97f4a7c15 + 1; }

void Fill(std::span<std::byte> data, uint64_t offset) {
  for (size_t i = 0; i < data.size(); i += 8) {
    const uint64_t word = WordAt(offset + i);
    std::memcpy(data.data() + i, &word, 8);
  }
}

bool Holds(std::span<const std::byte> data, uint64_t offset) {
  for (size_t i = 0; i < data.size(); i += 8) {
    uint64_t word;
    std::memcpy(&word, data.data() + i, 8);
    if (word != WordAt(offset + i)) return false;
  }
  return true;
}

class RingTest : public testing::TestWithParam<IoEngineKind> {
 protected:
  void SetUp() override {
    auto engine = MakeEngine(GetParam());
    if (engine == nullptr) GTEST_SKIP() << "io_uring is refused here";
    plan_ = std::make_shared<FaultPlan>(TestSeed(11));
    ring_ = std::make_unique<Ring>(std::make_unique<FaultyRing>(std::move(engine), plan_), &clock_);
    ring_->engine().RegisterBuffer(memory_.bytes());
    auto file = files_.Open(dir_.path() + "/file", {.create = true, .direct = true});
    if (!file.ok()) file = files_.Open(dir_.path() + "/file", {.create = true});
    ASSERT_TRUE(file.ok()) << file.status();
    file_ = *std::move(file);
    ring_->engine().RegisterFile(file_.fd());
  }

  // Runs until nothing is in flight.
  std::map<uint64_t, IoResult> RunAll() {
    std::map<uint64_t, IoResult> by_tag;
    std::vector<IoResult> results;
    for (int i = 0; ring_->in_flight() > 0 && i < 10000; ++i) {
      results.clear();
      ring_->Poll(milliseconds(100), &results);
      for (const IoResult& result : results) {
        EXPECT_EQ(by_tag.count(result.tag), 0u) << "one result per operation";
        by_tag[result.tag] = result;
      }
    }
    EXPECT_EQ(ring_->in_flight(), 0u);
    return by_tag;
  }

  IoOp Op(IoKind kind, uint64_t page, size_t pages, size_t memory_page, uint64_t tag) {
    return {.kind = kind,
            .fd = file_.fd(),
            .offset = page * kPageBytes,
            .data = memory_.bytes().subspan(memory_page * kPageBytes, pages * kPageBytes),
            .tag = tag};
  }

  // Writes `pages` pages at once and syncs them.
  void WriteFile(size_t pages) {
    Fill(memory_.bytes().first(pages * kPageBytes), 0);
    ring_->Submit(Op(IoKind::kWrite, 0, pages, 0, 1));
    ASSERT_EQ(RunAll()[1].error, 0);
    ring_->Submit({.kind = IoKind::kDatasync, .fd = file_.fd(), .tag = 2});
    ASSERT_EQ(RunAll()[2].error, 0);
    std::memset(memory_.bytes().data(), 0, memory_.bytes().size());
  }

  TempDir dir_;
  FakeClock clock_;
  FileSystem files_;
  std::shared_ptr<FaultPlan> plan_;
  PageMemory memory_{256 * kPageBytes};
  File file_;
  std::unique_ptr<Ring> ring_;
};

TEST_P(RingTest, ReadsWhatWasWrittenForAllSizesAndCounts) {
  std::mt19937 random(TestSeed(5));
  for (size_t pages : {1, 3, 16}) {
    for (size_t count : {1, 7, 200}) {  // more than the depth of 32 waits in line
      const size_t room = memory_.bytes().size() / kPageBytes / pages;
      std::vector<size_t> order(count);
      for (size_t i = 0; i < count; ++i) order[i] = i;
      for (size_t begin = 0; begin < count; begin += room) {
        const size_t end = std::min(count, begin + room);
        for (size_t i = begin; i < end; ++i) {
          IoOp op = Op(IoKind::kWrite, i * pages, pages, (i - begin) * pages, i);
          Fill(op.data, op.offset);
          ring_->Submit(op);
        }
        for (const auto& [tag, result] : RunAll()) EXPECT_EQ(result.error, 0);
      }
      std::shuffle(order.begin(), order.end(), random);
      for (size_t begin = 0; begin < count; begin += room) {
        const size_t end = std::min(count, begin + room);
        std::memset(memory_.bytes().data(), 0, memory_.bytes().size());
        for (size_t i = begin; i < end; ++i) {
          ring_->Submit(Op(IoKind::kRead, order[i] * pages, pages, (i - begin) * pages, i));
        }
        const auto results = RunAll();
        ASSERT_EQ(results.size(), end - begin);
        for (size_t i = begin; i < end; ++i) {
          EXPECT_EQ(results.at(i).error, 0);
          EXPECT_TRUE(
              Holds(memory_.bytes().subspan((i - begin) * pages * kPageBytes, pages * kPageBytes),
                    order[i] * pages * kPageBytes));
        }
      }
    }
  }
}

TEST_P(RingTest, ShortTransfersAndRepeatsAreFinishedInAnyOrder) {
  plan_->short_share = 0.6;
  plan_->repeat_share = 0.2;
  plan_->reorder = true;
  for (size_t i = 0; i < 16; ++i) {
    IoOp op = Op(IoKind::kWrite, i * 16, 16, i * 16, i);
    Fill(op.data, op.offset);
    ring_->Submit(op);
  }
  for (const auto& [tag, result] : RunAll()) EXPECT_EQ(result.error, 0) << tag;
  std::memset(memory_.bytes().data(), 0, memory_.bytes().size());
  for (size_t i = 0; i < 16; ++i) ring_->Submit(Op(IoKind::kRead, i * 16, 16, i * 16, i));
  for (const auto& [tag, result] : RunAll()) EXPECT_EQ(result.error, 0) << tag;
  EXPECT_TRUE(Holds(memory_.bytes(), 0));
  EXPECT_GT(ring_->counters().short_transfers, 0u);
  EXPECT_GT(ring_->counters().repeats, 0u);
}

TEST_P(RingTest, ReadPastTheEndIsAnError) {
  WriteFile(4);
  ring_->Submit(Op(IoKind::kRead, 2, 4, 0, 9));
  EXPECT_EQ(RunAll()[9].error, EIO);
}

TEST_P(RingTest, EveryKindOfErrorIsReported) {
  WriteFile(4);
  plan_->FailAll(Call::kRead, EIO);
  plan_->FailAll(Call::kWrite, ENOSPC);
  plan_->FailAll(Call::kDatasync, EIO);
  plan_->FailAll(Call::kAllocate, ENOSPC);
  ring_->Submit(Op(IoKind::kRead, 0, 1, 0, 1));
  ring_->Submit(Op(IoKind::kWrite, 0, 1, 1, 2));
  ring_->Submit({.kind = IoKind::kDatasync, .fd = file_.fd(), .tag = 3});
  ring_->Submit({.kind = IoKind::kAllocate, .fd = file_.fd(), .bytes = 1 << 20, .tag = 4});
  auto results = RunAll();
  EXPECT_EQ(results[1].error, EIO);
  EXPECT_EQ(results[2].error, ENOSPC);
  EXPECT_EQ(results[3].error, EIO);
  EXPECT_EQ(results[4].error, ENOSPC);
  plan_->Heal();
  ring_->Submit({.kind = IoKind::kRead, .fd = -1, .data = memory_.bytes().first(4096), .tag = 5});
  EXPECT_EQ(RunAll()[5].error, EBADF) << "the kernel's own error";
}

TEST_P(RingTest, DeviceThatNeverStopsSayingTryAgainFails) {
  WriteFile(1);
  plan_->repeat_share = 1.0;
  ring_->Submit(Op(IoKind::kRead, 0, 1, 0, 1));
  EXPECT_EQ(RunAll()[1].error, EIO);
}

TEST_P(RingTest, AllocateGivesTheFileItsLength) {
  ring_->Submit({.kind = IoKind::kAllocate, .fd = file_.fd(), .bytes = 1 << 20, .tag = 1});
  EXPECT_EQ(RunAll()[1].error, 0);
  EXPECT_EQ(*files_.FileBytes(dir_.path() + "/file"), 1u << 20);
}

TEST_P(RingTest, LateReadIsReportedOnceAndItsBufferReturnedLater) {
  WriteFile(2);
  plan_->hold_reads = true;
  IoOp op = Op(IoKind::kRead, 0, 1, 0, 1);
  op.deadline_ns = clock_.now_ns + 1'000'000;
  ring_->Submit(op);
  ring_->Submit(Op(IoKind::kDatasync, 0, 0, 0, 2));  // others go on
  std::vector<IoResult> results;
  for (int i = 0; i < 60'000 && results.empty(); ++i) ring_->Poll(milliseconds(1), &results);
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].tag, 2u);
  clock_.now_ns += 2'000'000;
  results.clear();
  ring_->Poll(milliseconds(0), &results);
  ASSERT_EQ(results.size(), 1u);
  EXPECT_TRUE(results[0].late);
  EXPECT_FALSE(results[0].returned);
  results.clear();
  ring_->Poll(milliseconds(0), &results);
  EXPECT_TRUE(results.empty());
  EXPECT_EQ(ring_->in_flight(), 1u);
  plan_->hold_reads = false;
  for (int i = 0; i < 60'000 && results.empty(); ++i) ring_->Poll(milliseconds(1), &results);
  ASSERT_EQ(results.size(), 1u);
  EXPECT_TRUE(results[0].returned);
  EXPECT_EQ(ring_->in_flight(), 0u);
  EXPECT_EQ(ring_->counters().late, 1u);
}

TEST_P(RingTest, DeadlineAlsoEndsWhatStillWaitsInLine) {
  WriteFile(2);
  plan_->hold_reads = true;
  for (uint64_t i = 0; i < 40; ++i) {  // the depth is 32
    IoOp op = Op(IoKind::kRead, 0, 1, i, i);
    op.deadline_ns = clock_.now_ns + 1000;
    ring_->Submit(op);
  }
  std::vector<IoResult> results;
  ring_->Poll(milliseconds(0), &results);
  clock_.now_ns += 2000;
  ring_->Poll(milliseconds(0), &results);
  EXPECT_EQ(std::count_if(results.begin(), results.end(), [](auto& r) { return r.late; }), 40);
  EXPECT_EQ(std::count_if(results.begin(), results.end(), [](auto& r) { return r.returned; }), 8);
  plan_->hold_reads = false;
}

// Has done everything that was flushed as soon as it is asked, so many bytes of it at once.
class InstantEngine final : public IoEngine {
 public:
  explicit InstantEngine(uint64_t bytes_at_once = 1 << 30) : bytes_at_once_(bytes_at_once) {}
  std::string name() const override { return "instant"; }
  std::string Describe() const override { return "instant"; }
  uint32_t depth() const override { return 4; }
  void Push(const IoRequest& request) override {
    const uint64_t bytes = std::min(request.bytes, bytes_at_once_);
    pushed_.push_back({request.slot, static_cast<int64_t>(bytes)});
  }
  int Flush() override {
    done_.insert(done_.end(), pushed_.begin(), pushed_.end());
    pushed_.clear();
    return 0;
  }
  void Reap(std::chrono::nanoseconds /*wait*/, std::vector<IoEvent>* events) override {
    events->insert(events->end(), done_.begin(), done_.end());
    done_.clear();
  }

 private:
  const uint64_t bytes_at_once_;
  std::vector<IoEvent> pushed_;
  std::vector<IoEvent> done_;
};

// A caller that computes while a disk reads may look late: that is no fault of the disk's.
TEST(Ring, WhatCameInTimeIsNotLateBecauseNobodyLooked) {
  FakeClock clock;
  Ring ring(std::make_unique<InstantEngine>(), &clock);
  PageMemory memory(kPageBytes);
  ring.Submit({.kind = IoKind::kRead,
               .data = memory.bytes(),
               .deadline_ns = clock.now_ns + 1000,
               .tag = 1});
  clock.now_ns += 2000;
  std::vector<IoResult> results;
  ring.Poll(milliseconds(0), &results);
  ASSERT_EQ(results.size(), 1u);
  EXPECT_FALSE(results[0].late);
  EXPECT_EQ(results[0].error, 0);
  EXPECT_EQ(ring.counters().late, 0u);
  EXPECT_EQ(ring.in_flight(), 0u);
}

// An engine does nothing about what lies in its queue: the wait would be for nothing, and as long as it may be.
TEST(Ring, TheRestOfAShortTransferIsBegunBeforeItIsWaitedFor) {
  FakeClock clock;
  Ring ring(std::make_unique<InstantEngine>(/*bytes_at_once=*/kPageBytes), &clock);
  PageMemory memory(2 * kPageBytes);
  ring.Submit({.kind = IoKind::kRead,
               .data = memory.bytes(),
               .deadline_ns = clock.now_ns + 1'000'000'000,
               .tag = 1});
  std::vector<IoResult> results;
  ring.Poll(milliseconds(1), &results);
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].error, 0);
  EXPECT_EQ(ring.counters().short_transfers, 1u);
}

// Every place is taken by a call that was given up: whoever comes later still has a deadline.
TEST_P(RingTest, WhatWaitsBehindCallsThatAreLateAlreadyIsLateInItsTurn) {
  WriteFile(2);
  plan_->hold_reads = true;
  std::vector<IoResult> results;
  for (uint64_t i = 0; i < 32; ++i) {  // the depth
    IoOp op = Op(IoKind::kRead, 0, 1, i, i);
    op.deadline_ns = clock_.now_ns + 1000;
    ring_->Submit(op);
  }
  ring_->Poll(milliseconds(0), &results);
  clock_.now_ns += 2000;
  ring_->Poll(milliseconds(0), &results);
  ASSERT_EQ(results.size(), 32u);
  IoOp later = Op(IoKind::kRead, 0, 1, 40, 100);
  later.deadline_ns = clock_.now_ns + 1000;
  ring_->Submit(later);
  results.clear();
  ring_->Poll(milliseconds(0), &results);
  EXPECT_TRUE(results.empty());
  clock_.now_ns += 2000;
  ring_->Poll(milliseconds(0), &results);
  ASSERT_EQ(results.size(), 2u);
  EXPECT_TRUE(results[0].late);
  EXPECT_TRUE(results[1].returned) << "it never began";
  EXPECT_EQ(ring_->in_flight(), 32u);
  plan_->hold_reads = false;
  results.clear();
  for (int i = 0; i < 60'000 && ring_->in_flight() > 0; ++i) ring_->Poll(milliseconds(1), &results);
  EXPECT_EQ(results.size(), 32u);
}

TEST_P(RingTest, MovesToAnotherThreadWhileNothingIsInFlight) {
  WriteFile(8);
  std::thread([&] {
    ring_->Submit(Op(IoKind::kRead, 0, 8, 0, 1));
    EXPECT_EQ(RunAll()[1].error, 0);
  }).join();
  EXPECT_TRUE(Holds(memory_.bytes().first(8 * kPageBytes), 0));
  ring_->Submit(Op(IoKind::kRead, 4, 1, 0, 1));
  EXPECT_EQ(RunAll()[1].error, 0);
}

TEST(UringEngine, WhatAnotherThreadLeftInFlightIsNeverAnswered) {
  std::unique_ptr<IoEngine> engine = MakeEngine(IoEngineKind::kUring);
  if (engine == nullptr) GTEST_SKIP() << "io_uring is refused here";
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  PageMemory memory(kPageBytes);
  static IoEngine* const left = engine.release();  // the kernel may have it for ever
  std::thread([&] {
    left->Push({0, IoKind::kRead, ends[0], 0, memory.bytes().data(), kPageBytes});
    EXPECT_EQ(left->Flush(), 0);
    std::vector<IoEvent> events;
    left->Reap(milliseconds(0), &events);
    EXPECT_TRUE(events.empty());
  }).join();
  std::vector<IoEvent> events;
  left->Reap(milliseconds(1), &events);
  left->Push({1, IoKind::kRead, ends[0], 0, memory.bytes().data(), kPageBytes});
  EXPECT_EQ(left->Flush(), 0);
  left->Reap(milliseconds(1), &events);
  EXPECT_TRUE(events.empty());
}

INSTANTIATE_TEST_SUITE_P(Engines, RingTest,
                         testing::Values(IoEngineKind::kUring, IoEngineKind::kThreads),
                         [](const auto& info) {
                           return info.param == IoEngineKind::kUring ? "Uring" : "Threads";
                         });

TEST(ChooseIoEngine, SaysWhichOneRunsAndLeavesNothingBehind) {
  TempDir dir;
  const auto threads = ChooseIoEngine({.kind = IoEngineKind::kThreads}, dir.path());
  ASSERT_TRUE(threads.ok()) << threads.status();
  EXPECT_EQ(threads->engine->name(), "threads");
  const auto any = ChooseIoEngine({}, dir.path());
  ASSERT_TRUE(any.ok()) << any.status();
  EXPECT_EQ(any->engine->name() == "threads", !any->fallback_reason.empty());
  EXPECT_TRUE(FileSystem().List(dir.path())->empty());
}

TEST(ChooseIoEngine, DirectoryThatCannotBeWrittenIsAnError) {
  EXPECT_FALSE(ChooseIoEngine({}, "/nonexistent/directory").ok());
}

}  // namespace
}  // namespace winnow::storage
