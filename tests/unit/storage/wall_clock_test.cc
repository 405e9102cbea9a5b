// Waits end by the steady clock: the wall clock may be set at any time, and a wait that ends by it
// then takes as long as it was set back.
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <functional>
#include <future>
#include <memory>
#include <thread>

#include "storage/index.h"
#include "storage/ring.h"
#include "tests/fault/memory_index.h"
#include "tests/unit/storage/disk_store_testing.h"

namespace {
std::atomic<bool> wall_clock_is_ahead = false;
constexpr time_t kAhead = 24 * 60 * 60;
}  // namespace

// These two stand before the C library's, for libraries as well. While the flag is set, who reads the wall
// clock learns tomorrow's time, and the kernel, when it is to wake him, goes by today's: as if the
// clock were set back by a day between the two.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME && wall_clock_is_ahead) time->tv_sec += kAhead;
  return result;
}
extern "C" int gettimeofday(timeval* time, void* zone) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_gettimeofday, time, zone));
  if (wall_clock_is_ahead) time->tv_sec += kAhead;
  return result;
}

namespace winnow::storage {
namespace {

using std::chrono::milliseconds;

class WallClockTest : public DiskStoreTest {
 protected:
  WallClockTest() { wall_clock_is_ahead = true; }
  ~WallClockTest() override { wall_clock_is_ahead = false; }

  // On a thread of its own: should it wait until tomorrow, it is left to that.
  static void ExpectEnds(std::function<void()> wait) {
    auto promise = std::make_shared<std::promise<void>>();
    std::future<void> ended = promise->get_future();
    std::thread thread([wait = std::move(wait), promise] {
      wait();
      promise->set_value();
    });
    const bool in_time = ended.wait_for(std::chrono::seconds(60)) == std::future_status::ready;
    EXPECT_TRUE(in_time);
    if (in_time) {
      thread.join();
    } else {
      thread.detach();
    }
  }
};

TEST_F(WallClockTest, IsOnlySetForThoseWhoReadIt) {
  const auto wall = std::chrono::system_clock::now();
  timeval of_day;
  ASSERT_EQ(::gettimeofday(&of_day, nullptr), 0);
  wall_clock_is_ahead = false;
  const auto now = std::chrono::system_clock::now();
  EXPECT_GT(wall, now + std::chrono::hours(23));
  EXPECT_GT(of_day.tv_sec, std::chrono::system_clock::to_time_t(now + std::chrono::hours(23)));
}

TEST_F(WallClockTest, TheRingsThreadsAreNotWaitedForLongerThanAsked) {
  const std::shared_ptr<IoEngine> engine = MakeThreadsEngine(/*depth=*/4, /*threads=*/1);
  ExpectEnds([engine] {
    std::vector<IoEvent> events;
    engine->Reap(milliseconds(10), &events);
    EXPECT_TRUE(events.empty());
  });
}

TEST_F(WallClockTest, TheIndexIsNotWaitedForLongerThanAsked) {
  const auto faults = std::make_shared<IndexFaults>();
  faults->hang = true;
  auto memory = std::make_unique<MemoryIndex>(std::make_shared<MemoryIndexData>());
  const auto writer =
      std::make_shared<IndexWriter>(std::make_unique<FaultyIndex>(std::move(memory), faults),
                                    std::make_unique<EraseLog>(&files_, dir_.path()));
  static const std::shared_ptr<IndexWriter> stays =
      writer;  // as one must that is not closed in time
  writer->Submit(IndexBatch());
  ExpectEnds([writer] {
    writer->Wait(milliseconds(10));
    EXPECT_FALSE(writer->Close(milliseconds(10)));
  });
  faults->Release();
  EXPECT_TRUE(writer->Close(std::chrono::seconds(60)));
}

TEST_F(WallClockTest, AHungOpeningIsNotWaitedForLongerThanAsked) {
  const auto clock = std::make_shared<FakeClock>();
  const auto faults = std::make_shared<IndexFaults>();
  faults->hang = true;
  auto [token, gone] = MakeWatched<int>();
  DiskStoreOptions options;
  options.directory = StoreDir();
  options.io.kind = IoEngineKind::kThreads;
  options.open_stall_ns = 100'000'000;
  options.seams.open_index = [clock, faults, token = std::move(token)](
                                 const std::string&) -> absl::StatusOr<std::unique_ptr<IndexDb>> {
    faults->WaitWhileHung();
    return std::make_unique<MemoryIndex>(std::make_shared<MemoryIndexData>());
  };
  ExpectEnds([options = std::move(options), clock] {
    const absl::Status status = DiskStore::Open(options, clock.get()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  });
  faults->Release();
  EXPECT_EQ(gone.wait_for(std::chrono::seconds(60)), std::future_status::ready);
}

}  // namespace
}  // namespace winnow::storage
