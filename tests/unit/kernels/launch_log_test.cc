// LaunchLog over a device that writes down what it is asked for: whatever programs run, and however they
// change, the device does all of it, once, in its order, and what repeats itself goes as graphs.
#include "kernels/cuda/launch_log.h"

#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels::cuda {
namespace {

using Numbers = std::vector<int32_t>;

LaunchBytes BytesOf(const int32_t& number) { return std::as_bytes(std::span(&number, 1)); }
int32_t NumberOf(LaunchBytes launch) {
  int32_t number;
  EXPECT_EQ(launch.size(), sizeof number);
  std::memcpy(&number, launch.data(), sizeof number);
  return number;
}

class Device final : public LaunchDevice {
 public:
  class Graph final : public LaunchGraph {
   public:
    Graph(Device& device, Numbers numbers) : device_(device), numbers_(std::move(numbers)) {
      ++device_.graphs_;
    }
    ~Graph() override {
      EXPECT_FALSE(runs_) << "is dropped while it may run";
      --device_.graphs_;
    }
    bool Launch() override {
      runs_ = true;
      device_.running_.push_back(this);
      device_.done.insert(device_.done.end(), numbers_.begin(), numbers_.end());
      ++device_.graph_launches;
      return !device_.fails;
    }
    void Wait() { runs_ = false; }

   private:
    Device& device_;
    Numbers numbers_;
    bool runs_ = false;
  };

  bool Launch(LaunchBytes launch) override {
    done.push_back(NumberOf(launch));
    return !fails;
  }
  std::unique_ptr<LaunchGraph> MakeGraph(std::span<const LaunchBytes> launches) override {
    ++graphs_asked;
    if (has_no_graphs) return nullptr;
    Numbers numbers;
    for (const LaunchBytes launch : launches) numbers.push_back(NumberOf(launch));
    return std::make_unique<Graph>(*this, std::move(numbers));
  }
  void Wait() {
    for (Graph* graph : running_) graph->Wait();
    running_.clear();
  }

  Numbers done;
  int graph_launches = 0, graphs_asked = 0;
  bool has_no_graphs = false, fails = false;
  int graphs() const { return graphs_; }

 private:
  int graphs_ = 0;
  std::vector<Graph*> running_;
};

class LaunchLogTest : public testing::Test {
 protected:
  void Launch(const Numbers& numbers) {
    for (const int32_t number : numbers) {
      EXPECT_TRUE(log_.Launch(BytesOf(number)));
      expected_.push_back(number);
    }
  }
  // Something that is no launch.
  void EndRun() {
    EXPECT_TRUE(log_.EndRun());
    EXPECT_EQ(device_.done, expected_);
  }
  void Wait() {
    EndRun();
    log_.EndPass();
    device_.Wait();
    log_.Waited();
  }
  void Pass(const Numbers& numbers) {
    Launch(numbers);
    Wait();
  }
  void Passes(const Numbers& numbers, int times) {
    for (int i = 0; i < times; ++i) Pass(numbers);
  }
  // A number for each launch, the first from `first` on.
  static Numbers Run(int32_t first, size_t count) {
    Numbers numbers(count);
    std::iota(numbers.begin(), numbers.end(), first);
    return numbers;
  }

  Device device_;
  LaunchLog log_{device_};
  Numbers expected_;
};

constexpr auto kAtOnce = static_cast<int32_t>(LaunchLog::kAtOnce);
constexpr auto kLong = static_cast<int32_t>(LaunchLog::kLeastLaunches + 10);
constexpr int kTimes = LaunchLog::kTimesBeforeGraph;

TEST_F(LaunchLogTest, ARunThatCameOftenIsAGraph) {
  const Numbers run = Run(0, kLong);
  Passes(run, kTimes - 1);
  EXPECT_EQ(device_.graphs(), 0);
  Pass(run);
  EXPECT_EQ(device_.graph_launches, 0);
  EXPECT_EQ(device_.graphs(), 1);
  Launch(run);
  EXPECT_EQ(device_.graph_launches, 1) << "with its last launch, not later";
  Wait();
  EXPECT_EQ(log_.counts().alone, kTimes * kLong + kAtOnce);
  EXPECT_EQ(log_.counts().in_graphs, kLong - kAtOnce);
}

TEST_F(LaunchLogTest, ItsFirstLaunchesGoAtOnce) {
  const Numbers run = Run(0, kLong);
  Passes(run, kTimes);
  for (int32_t i = 0; i < kAtOnce; ++i) {
    Launch({run[i]});
    EXPECT_EQ(device_.done, expected_);
  }
  Launch({run[kAtOnce]});
  EXPECT_EQ(device_.done.size() + 1, expected_.size());
  EndRun();
}

TEST_F(LaunchLogTest, NothingIsHeldBackWithoutAGraph) {
  Launch(Run(0, kLong));
  EXPECT_EQ(device_.done, expected_);
}

TEST_F(LaunchLogTest, ShortRunsGoAlone) {
  const Numbers run = Run(0, LaunchLog::kLeastLaunches - 1);
  Passes(run, kTimes + 2);
  EXPECT_EQ(device_.graphs_asked, 0);
  const Numbers longer = Run(1000, LaunchLog::kLeastLaunches);
  Passes(longer, kTimes + 2);
  EXPECT_EQ(device_.graph_launches, 2);
}

TEST_F(LaunchLogTest, RunsThatAreTooLongGoAlone) {
  const Numbers run = Run(0, LaunchLog::kMostLaunches + 1);
  Passes(run, kTimes + 2);
  EXPECT_EQ(device_.graphs_asked, 0);
  EXPECT_EQ(log_.counts().alone, static_cast<int64_t>((kTimes + 2) * run.size()));
}

TEST_F(LaunchLogTest, WhatDiffersIsLaunchedAndRemembered) {
  for (const int32_t at : {0, 3, kAtOnce, kLong - 1}) {
    const int launched = device_.graph_launches;
    Numbers run = Run(1000 * (at + 1), kLong);
    Passes(run, kTimes + 1);
    EXPECT_EQ(device_.graph_launches, launched + 1);
    run[at] = -1 - at;
    Pass(run);
    EXPECT_EQ(device_.graph_launches, launched + 1);
    Passes(run, kTimes + 1);
    EXPECT_EQ(device_.graph_launches, launched + 3);
  }
}

TEST_F(LaunchLogTest, ARunThatEndsEarlyIsLaunched) {
  Passes(Run(0, kLong + 10), kTimes + 1);
  Pass(Run(0, kLong));
  EXPECT_EQ(device_.graph_launches, 1);
  Passes(Run(0, kLong), kTimes);
  EXPECT_EQ(device_.graph_launches, 2);
}

TEST_F(LaunchLogTest, ARunThatGoesOnIsLaunched) {
  const Numbers run = Run(0, kLong);
  Passes(run, kTimes + 1);
  Launch(run);
  Launch({1000});
  EXPECT_EQ(device_.done, expected_);
  Wait();
  EXPECT_EQ(device_.graph_launches, 2);
}

TEST_F(LaunchLogTest, RunsOfSeveralBatchesHaveEachTheirGraph) {
  for (int round = 0; round < kTimes + 2; ++round) {
    for (int32_t batch = 0; batch < 8; ++batch) {
      Launch(Run(1000 * batch, kLong));
      EndRun();
      Launch(Run(1000 * batch + 500, kLong + 10));
      Wait();
    }
  }
  EXPECT_EQ(device_.graphs(), 16);
  EXPECT_EQ(device_.graph_launches, 2 * 16);
}

TEST_F(LaunchLogTest, RunsOfAPassThatBeginAlikeHaveEachTheirGraph) {
  for (int round = 0; round < kTimes + 1; ++round) {
    for (const int32_t more : {0, 5, 3}) {
      Launch(Run(0, kLong + more));
      EndRun();
    }
    Wait();
  }
  EXPECT_EQ(device_.graphs(), 3);
  EXPECT_EQ(device_.graph_launches, 3);
}

// Dense steps and drafts of one row: the same embedding, norm and products up to attention.
TEST_F(LaunchLogTest, RunsThatTakeTurnsHaveEachTheirGraph) {
  for (const int32_t at : {1, kAtOnce - 1}) {
    const Numbers dense = Run(1000 * at, kLong);
    Numbers draft = dense;
    for (int32_t i = at; i < kLong; ++i) draft[i] = 500 + 1000 * at + i;
    const int launched = device_.graph_launches, asked = device_.graphs_asked;
    for (int i = 0; i < kTimes + 1; ++i) {
      Pass(dense);
      Pass(draft);
    }
    EXPECT_EQ(device_.graphs_asked, asked + 2);
    EXPECT_EQ(device_.graph_launches, launched + 2) << "runs differ from " << at << " on";
  }
}

// Chunks of a prompt, which begin alike and come once.
TEST_F(LaunchLogTest, RunsThatBeginAlikeTakeOneAnothersPlace) {
  const Numbers batch = Run(0, kLong);
  Passes(batch, kTimes);
  Numbers chunk = Run(1000, kLong);
  for (size_t i = 0; i < 2 * LaunchLog::kMostRuns; ++i) {
    ++chunk[1];
    Pass(chunk);
  }
  Pass(batch);
  EXPECT_EQ(device_.graph_launches, 1);
  const auto last = static_cast<int32_t>(LaunchLog::kMostAlike);
  for (int32_t back = 0; back < last; ++back) {
    Passes(chunk, kTimes - 1);
    --chunk[1];
  }
  EXPECT_EQ(device_.graphs_asked, 1 + last) << "those that came last are remembered";
}

TEST_F(LaunchLogTest, WhatWasUsedLastStays) {
  const auto run_of = [](size_t i) { return Run(static_cast<int32_t>(1000 * i), kLong); };
  for (size_t i = 0; i <= LaunchLog::kMostRuns; ++i) {
    Passes(run_of(i), kTimes);
  }
  EXPECT_EQ(device_.graphs(), static_cast<int>(LaunchLog::kMostRuns));
  Pass(run_of(1));
  EXPECT_EQ(device_.graph_launches, 1);
  Pass(run_of(0));
  EXPECT_EQ(device_.graph_launches, 1);
}

// Of prompts, say, between a step and the next.
TEST_F(LaunchLogTest, ShortRunsTakeNobodysPlace) {
  const Numbers run = Run(0, kLong);
  Passes(run, kTimes);
  for (size_t i = 0; i < 2 * LaunchLog::kMostRuns; ++i) {
    Pass(Run(static_cast<int32_t>(1000 * (i + 1)), 5));
  }
  Pass(run);
  EXPECT_EQ(device_.graph_launches, 1);
}

TEST_F(LaunchLogTest, AGraphThatCannotBeMadeIsNotAskedForAgain) {
  device_.has_no_graphs = true;
  const Numbers run = Run(0, kLong);
  Passes(run, kTimes + 3);
  EXPECT_EQ(device_.graphs_asked, 1);
  EXPECT_EQ(log_.counts().alone, (kTimes + 3) * kLong);
}

TEST_F(LaunchLogTest, WhatGoesForOthersMayStillRun) {
  const auto run_of = [](size_t i) { return Run(static_cast<int32_t>(1000 * i), kLong); };
  Passes(run_of(0), kTimes);
  for (size_t i = 0; i <= LaunchLog::kMostRuns; ++i) {
    Launch(run_of(i));
    EndRun();
  }
  EXPECT_EQ(device_.graph_launches, 1);
  EXPECT_EQ(device_.graphs(), 1);
  Wait();
  EXPECT_EQ(device_.graphs(), 0);
}

TEST_F(LaunchLogTest, ADeviceThatFailsSaysSo) {
  device_.fails = true;
  EXPECT_FALSE(log_.Launch(BytesOf(1)));
}

TEST_F(LaunchLogTest, ADeviceThatFailsAtAGraphSaysSo) {
  const Numbers run = Run(0, kLong);
  Passes(run, kTimes);
  Launch(Numbers(run.begin(), run.end() - 1));
  device_.fails = true;
  EXPECT_FALSE(log_.Launch(BytesOf(run.back())));
  device_.Wait();
}

// Programs of runs that change here and there, with waits between.
TEST_F(LaunchLogTest, RandomProgramsRunInOrder) {
  Random random;
  SCOPED_TRACE(random.seed());
  const auto below = [&random](int32_t end) {
    return static_cast<int32_t>(random.Int(0, end - 1));
  };
  std::vector<Numbers> runs;
  for (int i = 0; i < 6; ++i) {
    runs.push_back(Run(below(4) * 100, static_cast<size_t>(kAtOnce + below(60))));
  }
  for (int step = 0; step < 1500; ++step) {
    Numbers& run = runs[below(static_cast<int32_t>(runs.size()))];
    if (below(10) == 0) {
      const int32_t at = below(static_cast<int32_t>(run.size()) + 1);
      switch (below(4)) {
        case 0:
          run.resize(at);
          break;
        case 1:
          run.insert(run.begin() + at, below(1000));
          break;
        case 2:
          if (at < static_cast<int32_t>(run.size())) run[at] = below(1000);
          break;
        default:
          run = Run(below(4) * 100, static_cast<size_t>(kAtOnce + below(40)));
      }
    }
    Launch(run);
    below(2) == 0 ? EndRun() : Wait();
  }
  Wait();
  EXPECT_GT(log_.counts().in_graphs, 0);
  EXPECT_EQ(log_.counts().alone + log_.counts().in_graphs, static_cast<int64_t>(expected_.size()));
}

}  // namespace
}  // namespace winnow::kernels::cuda
