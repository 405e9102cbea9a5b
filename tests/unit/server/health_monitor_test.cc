#include "server/health_monitor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"

namespace winnow::server {
namespace {

using std::chrono::seconds;

const engine::TimePoint kNow = engine::TimePoint{} + seconds(1000);

engine::EngineStats Beating(seconds age) {
  engine::EngineStats stats;
  stats.heartbeat = kNow - age;
  return stats;
}

TEST(HealthMonitor, ServesWhileTheHeartbeatIsYoung) {
  EXPECT_TRUE(IsServing(Beating(seconds(0)), kNow, seconds(5)));
  EXPECT_TRUE(IsServing(Beating(seconds(5)), kNow, seconds(5)));
  EXPECT_FALSE(IsServing(Beating(seconds(6)), kNow, seconds(5)));
}

TEST(HealthMonitor, AnEngineThatNeverBeatDoesNotServe) {
  EXPECT_FALSE(IsServing(engine::EngineStats{}, kNow, seconds(100000)));
}

TEST(HealthMonitor, FailedOrDrainingDoesNotServe) {
  engine::EngineStats stats = Beating(seconds(0));
  stats.failed = true;
  EXPECT_FALSE(IsServing(stats, kNow, seconds(5)));
  stats.failed = false;
  stats.draining = true;
  EXPECT_FALSE(IsServing(stats, kNow, seconds(5)));
}

// A clock that the test moves.
class FakeClock final : public engine::Clock {
 public:
  engine::TimePoint Now() const override { return engine::TimePoint{} + seconds(now.load()); }
  std::atomic<int64_t> now = 1000;
};

// A server is announced right after: its first caller must not be told 503.
TEST(HealthMonitor, HasSaidItsFirstAnswerOnceItIsThere) {
  FakeClock clock;
  for (const bool beats : {true, false}) {
    std::vector<std::pair<bool, std::thread::id>> said;
    const HealthMonitor monitor(
        [beats] {
          engine::EngineStats stats;
          if (beats) stats.heartbeat = engine::TimePoint{} + seconds(1000);
          return stats;
        },
        clock, seconds(30),
        [&](bool serving) { said.emplace_back(serving, std::this_thread::get_id()); });
    ASSERT_EQ(said.size(), 1U);
    EXPECT_EQ(said.front(), std::make_pair(beats, std::this_thread::get_id()));
  }
}

// A server that fails and goes at once has told its watchers why.
TEST(HealthMonitor, TellsOfTheLastChangeBeforeItGoes) {
  FakeClock clock;
  absl::Mutex mutex;
  int looks = 0;
  bool failed = false;
  std::vector<bool> said;
  {
    const HealthMonitor monitor(
        [&] {
          const absl::MutexLock lock(&mutex);
          ++looks;
          engine::EngineStats stats = Beating(seconds(0));
          stats.failed = failed;
          return stats;
        },
        clock, seconds(30), [&](bool serving) { said.push_back(serving); });
    // The constructor has looked, and its thread: the next look is a while away.
    const absl::MutexLock lock(&mutex);
    const auto has_looked = [&looks] { return looks >= 2; };
    mutex.Await(absl::Condition(&has_looked));
    failed = true;
  }
  EXPECT_EQ(said, (std::vector<bool>{true, false}));
}

TEST(HealthMonitor, SaysSoWhenAnEngineStallsAndWhenItComesBack) {
  FakeClock clock;
  std::atomic<int64_t> heartbeat = 1000;
  absl::Mutex mutex;
  std::vector<bool> said;
  HealthMonitor monitor(
      [&] {
        engine::EngineStats stats;
        stats.heartbeat = engine::TimePoint{} + seconds(heartbeat.load());
        return stats;
      },
      clock, seconds(30),
      [&](bool serving) {
        absl::MutexLock lock(&mutex);
        said.push_back(serving);
      });
  const auto wait_for = [&](size_t count) {
    absl::MutexLock lock(&mutex);
    const auto enough = [&] { return said.size() >= count; };
    return mutex.AwaitWithTimeout(absl::Condition(&enough), absl::Seconds(120));
  };
  ASSERT_TRUE(wait_for(1));
  clock.now = 1031;
  ASSERT_TRUE(wait_for(2));
  heartbeat = 1031;
  ASSERT_TRUE(wait_for(3));
  absl::MutexLock lock(&mutex);
  EXPECT_EQ(said, (std::vector<bool>{true, false, true}));
}

}  // namespace
}  // namespace winnow::server
