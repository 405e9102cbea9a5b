#include "kernels/thread_pool.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <vector>

namespace winnow::kernels {
namespace {

TEST(ThreadPoolTest, RunsEachItemOnceWithAThreadOfThePool) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (const int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(count);
      std::atomic<int> strangers{0};
      pool.ParallelFor(count, [&](int64_t item, int thread) {
        ++runs[item];
        if (thread < 0 || thread >= threads) ++strangers;
      });
      for (int64_t i = 0; i < count; ++i) ASSERT_EQ(runs[i], 1) << i << " of " << count;
      EXPECT_EQ(strangers, 0);
    }
  }
}

TEST(ThreadPoolTest, AThreadBeginsWithItsOwnItemAndNoneIsLeft) {
  for (const int threads : {1, 2, 5, 8}) {
    ThreadPool pool(threads);
    // Bytes that are nobody's, and lines on either side of a border.
    std::vector<std::byte> some(5000);
    std::vector<ThreadPool::Ahead> ahead(threads, {some.data() + 63, 4001});
    ahead.back() = {reinterpret_cast<const std::byte*>(uintptr_t{8}), size_t{1} << 20};
    for (const int64_t count : {0, 1, 2, 7, 8, 9, 1000}) {
      for (int round = 0; round < 20; ++round) {
        std::vector<std::atomic<int>> runs(count), by(count);
        std::vector<std::atomic<int64_t>> first(threads);
        for (auto& item : first) item = -1;
        const std::span<const ThreadPool::Ahead> given =
            round % 3 == 0 ? std::span<const ThreadPool::Ahead>() : ahead;
        pool.ParallelForOwnFirst(count, given, [&](int64_t item, int thread) {
          ++runs[item];
          by[item] = thread;
          int64_t none = -1;
          first[thread].compare_exchange_strong(none, item);
        });
        for (int64_t i = 0; i < count; ++i) ASSERT_EQ(runs[i], 1) << i << " of " << count;
        for (int t = 0; t < threads && count > 1; ++t) {
          if (first[t] < 0 || t >= count) continue;
          EXPECT_TRUE(first[t] == t || by[t] != t) << "thread " << t << " began with " << first[t];
        }
      }
    }
  }
}

TEST(ThreadPoolTest, ItemsOfAThreadThatDoesNotComeAreTakenByOthers) {
  ThreadPool pool(4);
  for (int round = 0; round < 50; ++round) {
    // The caller's own item ends when all others have been run, whoever runs them.
    std::atomic<int> others{0};
    std::atomic<bool> gave_up{false};
    pool.ParallelForOwnFirst(4, {}, [&](int64_t item, int) {
      if (item != 0) {
        ++others;
        return;
      }
      const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (others < 3 && !gave_up) gave_up = std::chrono::steady_clock::now() > limit;
    });
    EXPECT_EQ(others, 3);
    EXPECT_FALSE(gave_up);
  }
}

TEST(ThreadPoolTest, WritesOfWorkersAreSeenWhenTheLoopReturns) {
  ThreadPool pool(3);
  std::vector<int64_t> values(64);  // plain memory: ThreadSanitizer sees a missing hand-over
  for (int64_t round = 0; round < 2000; ++round) {
    pool.ParallelFor(64, [&](int64_t item, int) { values[item] += item; });
  }
  for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(values[i], 2000 * i);
}

TEST(ThreadPoolTest, OneThreadAtATimeUsesAThreadsScratch) {
  constexpr int kThreads = 4;
  ThreadPool pool(kThreads);
  std::atomic<int> users[kThreads] = {};
  std::atomic<int> clashes{0};
  for (int round = 0; round < 200; ++round) {
    pool.ParallelFor(50, [&](int64_t, int thread) {
      if (users[thread].fetch_add(1) != 0) ++clashes;
      users[thread].fetch_sub(1);
    });
  }
  EXPECT_EQ(clashes, 0);
}

TEST(ThreadPoolTest, StartsAndStopsWithoutALoop) {
  for (int round = 0; round < 50; ++round) ThreadPool pool(4);
}

TEST(ThreadPoolTest, LoopsAfterTheWorkersWentToSleep) {
  ThreadPool pool(3);
  std::atomic<int64_t> sum{0};
  for (int round = 0; round < 5; ++round) {
    // Longer than the workers spin: one of them is inside, the others give up waiting for a loop.
    std::atomic<int64_t> work{0};
    while (work < 200000) ++work;
    pool.ParallelFor(100, [&](int64_t item, int) { sum += item; });
  }
  EXPECT_EQ(sum, 5 * 4950);
}

// A worker that lost its processor gets the caller's.
TEST(ThreadPoolTest, TheCallerSleepsWhileAWorkerIsLate) {
  const std::string stat = "/proc/self/task/" + std::to_string(gettid()) + "/stat";
  const auto sleeps = [&stat] {
    std::ifstream file(stat);
    std::string line;
    std::getline(file, line);
    return line.substr(line.rfind(')') + 2, 1) == "S";
  };
  ThreadPool pool(2);
  bool seen = false;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!seen && std::chrono::steady_clock::now() < end) {
    std::atomic<bool> worker_is_in = false;
    // The caller's item ends when the worker has one, if it joins at all; the worker's when the caller sleeps.
    pool.ParallelFor(2, [&](int64_t, int thread) {
      if (thread == 0) {
        const auto join_by = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
        while (!worker_is_in && std::chrono::steady_clock::now() < join_by) {
        }
        return;
      }
      worker_is_in = true;
      const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(5);
      while (!seen && std::chrono::steady_clock::now() < late) seen = sleeps();
    });
  }
  EXPECT_TRUE(seen);
}

TEST(ThreadPoolTest, AtLeastOneProcessorIsUsable) { EXPECT_GE(UsableProcessors(), 1); }

}  // namespace
}  // namespace winnow::kernels
