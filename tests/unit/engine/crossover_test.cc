#include "engine/crossover.h"

#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>

#include "engine/timed_backend.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/test_seed.h"

namespace winnow::engine {
namespace {

using ::testing::HasSubstr;
using Kind = AttentionPolicy::Kind;

class ManualClock final : public Clock {
 public:
  TimePoint Now() const override { return now_; }
  void Advance(Duration duration) { now_ += duration; }

 private:
  TimePoint now_{};
};

// Dense costs a nanosecond a token; retrieval costs `fixed` tokens more than a tenth of that. Each
// measurement takes `duration` of the clock.
class LinearTimer final : public AttentionTimer {
 public:
  LinearTimer(double fixed, ManualClock& clock, Duration duration = {})
      : fixed_(fixed), clock_(clock), duration_(duration) {}

  CrossoverSample Time(int32_t tokens) override {
    clock_.Advance(duration_);
    ++calls;
    return {tokens, 1e-9 * tokens, 1e-9 * (fixed_ + 0.1 * tokens)};
  }
  double crossover() const { return fixed_ / 0.9; }

  int calls = 0;

 private:
  const double fixed_;
  ManualClock& clock_;
  const Duration duration_;
};

constexpr Duration kLong = std::chrono::hours(1);

TEST(FindCrossover, FindsTheFirstMeasuredLengthThatIsNotBelowTheTrueOne) {
  TestRandom random;
  for (int i = 0; i < 200; ++i) {
    const double fixed = std::uniform_real_distribution<>(600, 28000)(random);
    SCOPED_TRACE(fixed);
    ManualClock clock;
    LinearTimer timer(fixed, clock);
    const Crossover found = FindCrossover(timer, 1 << 20, clock, kLong);
    // Two halvings of the gap between a power of two and the next: a quarter of the lower one.
    EXPECT_GT(found.from, timer.crossover());
    EXPECT_LE(found.from, timer.crossover() * 1.25 + 1);
    for (const CrossoverSample& sample : found.samples) {
      EXPECT_EQ(sample.retrieval_seconds < sample.dense_seconds, sample.tokens >= found.from);
    }
  }
}

TEST(FindCrossover, MeasuresNothingLongerThanItMust) {
  ManualClock clock;
  LinearTimer timer(2000, clock);  // wins from 2223
  const Crossover found = FindCrossover(timer, 1 << 20, clock, kLong);
  std::vector<int32_t> lengths;
  for (const CrossoverSample& sample : found.samples) lengths.push_back(sample.tokens);
  EXPECT_EQ(lengths, (std::vector<int32_t>{512, 1024, 2048, 4096, 3072, 2560}));
  EXPECT_EQ(found.from, 2560);
}

TEST(FindCrossover, WinningAtOnceIsTheShortestLengthMeasured) {
  ManualClock clock;
  LinearTimer timer(1, clock);
  const Crossover found = FindCrossover(timer, 1 << 20, clock, kLong);
  EXPECT_EQ(found.from, kCrossoverFirst);
  EXPECT_EQ(timer.calls, 1);
}

TEST(FindCrossover, WhatNeverWinsNeverRetrieves) {
  ManualClock clock;
  LinearTimer timer(1e9, clock);
  EXPECT_EQ(FindCrossover(timer, 1 << 20, clock, kLong).from, kNeverRetrieve);
  EXPECT_EQ(timer.calls, 7);  // 512 to 32768
  // Nor what would win beyond the model's context.
  LinearTimer later(8000, clock);
  const Crossover found = FindCrossover(later, 8192, clock, kLong);
  EXPECT_EQ(found.from, kNeverRetrieve);
  EXPECT_EQ(found.samples.back().tokens, 8192);
  // A context shorter than the shortest measurement has nothing to measure.
  LinearTimer none(1, clock);
  EXPECT_EQ(FindCrossover(none, 511, clock, kLong).from, kNeverRetrieve);
  EXPECT_EQ(none.calls, 0);
}

TEST(FindCrossover, KeepsToItsBudget) {
  ManualClock clock;
  LinearTimer slow(20000, clock, std::chrono::seconds(1));
  EXPECT_EQ(FindCrossover(slow, 1 << 20, clock, std::chrono::milliseconds(2500)).from,
            kNeverRetrieve);
  EXPECT_EQ(slow.calls, 3);
  // What is found before it ends holds, if coarsely.
  LinearTimer early(2000, clock, std::chrono::seconds(1));
  EXPECT_EQ(FindCrossover(early, 1 << 20, clock, std::chrono::milliseconds(3500)).from, 4096);
  EXPECT_EQ(early.calls, 4);
}

TEST(CheapestIndex, HasTheFewestBytesForEachKey) {
  EXPECT_EQ(CheapestIndex({}), std::nullopt);
  EXPECT_EQ(CheapestIndex({{Kind::kQuest, 0}}), (IndexSpec{Kind::kQuest, 0}));
  EXPECT_EQ(CheapestIndex({{Kind::kQuest, 0}, {Kind::kLsh, 1024}}), (IndexSpec{Kind::kLsh, 1024}));
  EXPECT_EQ(CheapestIndex({{Kind::kLsh, 128}, {Kind::kHata, 128}, {Kind::kHashAttention, 32}}),
            (IndexSpec{Kind::kHashAttention, 32}));
  EXPECT_EQ(CheapestIndex({{Kind::kLsh, 128}, {Kind::kHata, 128}}), (IndexSpec{Kind::kLsh, 128}));
}

class CrossoverCacheTest : public ::testing::Test {
 protected:
  CrossoverCacheTest() : directory_(::testing::TempDir() + "winnow-crossover-XXXXXX") {
    EXPECT_NE(mkdtemp(directory_.data()), nullptr);
    path_ = directory_ + "/a/b/crossover.json";  // directories that are not there yet
  }
  ~CrossoverCacheTest() override { std::filesystem::remove_all(directory_); }

  void WriteFile(const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(path_).parent_path());
    std::ofstream(path_) << text;
  }
  std::string FileText() const {
    std::stringstream text;
    text << std::ifstream(path_).rdbuf();
    return text.str();
  }
  CrossoverReport Resolve(const std::string& key, LinearTimer& timer) {
    const auto report = ResolveCrossover(path_, key, 1 << 20, clock_, [&] {
      return absl::StatusOr<std::unique_ptr<AttentionTimer>>(std::make_unique<Borrowed>(timer));
    });
    EXPECT_TRUE(report.ok()) << report.status();
    return report.value_or(CrossoverReport());
  }

  class Borrowed final : public AttentionTimer {
   public:
    explicit Borrowed(LinearTimer& timer) : timer_(timer) {}
    CrossoverSample Time(int32_t tokens) override { return timer_.Time(tokens); }

   private:
    LinearTimer& timer_;
  };

  ManualClock clock_;
  std::string directory_, path_;
};

TEST_F(CrossoverCacheTest, WhatWasMeasuredOnceIsNotMeasuredAgain) {
  LinearTimer first(2000, clock_);
  const CrossoverReport measured = Resolve("a machine", first);
  EXPECT_FALSE(measured.cached);
  EXPECT_EQ(measured.problem, "");
  EXPECT_EQ(measured.crossover.from, 2560);

  LinearTimer second(20000, clock_);  // would give another result
  const CrossoverReport cached = Resolve("a machine", second);
  EXPECT_TRUE(cached.cached);
  EXPECT_EQ(second.calls, 0);
  EXPECT_EQ(cached.crossover, measured.crossover);
}

TEST_F(CrossoverCacheTest, EachKeyHasItsEntryAndNeverIsRemembered) {
  LinearTimer quick(2000, clock_), never(1e9, clock_), unused(1, clock_);
  Resolve("a", quick);
  Resolve("b \"quoted\" | ä", never);
  EXPECT_EQ(Resolve("a", unused).crossover.from, 2560);
  EXPECT_EQ(Resolve("b \"quoted\" | ä", unused).crossover.from, kNeverRetrieve);
  EXPECT_EQ(unused.calls, 0);
}

TEST_F(CrossoverCacheTest, ADamagedFileIsToldAndMeasuredOverAndWrittenAnew) {
  for (const char* text :
       {"", "nonsense", "[]", "{}", R"({"format": 2, "entries": {}})", R"({"format": 1})",
        R"({"format": 1, "entries": []})", R"({"format": 1, "entries": {"key": 3}})",
        R"({"format": 1, "entries": {"key": {"from": -1, "samples": []}}})",
        R"({"format": 1, "entries": {"key": {"from": 1e12, "samples": []}}})",
        R"({"format": 1, "entries": {"key": {"from": 99999999999, "samples": []}}})",
        R"({"format": 1, "entries": {"key": {"from": 512, "samples": [[1, 2]]}}})",
        R"({"format": 1, "entries": {"key": {"from": 512}}})",
        R"({"format": 1, "entries": {"key": {"from": 512, "samples": [)"}) {
    SCOPED_TRACE(text);
    WriteFile(text);
    LinearTimer timer(2000, clock_);
    const CrossoverReport report = Resolve("key", timer);
    EXPECT_FALSE(report.cached);
    EXPECT_GT(timer.calls, 0);
    EXPECT_EQ(report.crossover.from, 2560);
    EXPECT_THAT(report.problem, HasSubstr(path_));
    LinearTimer again(2000, clock_);
    const CrossoverReport repaired = Resolve("key", again);
    EXPECT_TRUE(repaired.cached);
    EXPECT_EQ(repaired.problem, "");
    EXPECT_EQ(again.calls, 0);
  }
}

TEST_F(CrossoverCacheTest, ACacheThatCannotBeWrittenKeepsNobodyFromStarting) {
  path_ = directory_ + "/file/crossover.json";
  std::ofstream(directory_ + "/file") << "in the way";
  LinearTimer timer(2000, clock_);
  const CrossoverReport report = Resolve("key", timer);
  EXPECT_EQ(report.crossover.from, 2560);
  EXPECT_THAT(report.problem, HasSubstr(directory_ + "/file"));
}

TEST_F(CrossoverCacheTest, NothingIsLeftBesideTheFile) {
  LinearTimer timer(2000, clock_);
  Resolve("key", timer);
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory_)) {
    files += entry.is_regular_file() ? 1 : 0;
  }
  EXPECT_EQ(files, 1);
  EXPECT_THAT(FileText(), HasSubstr("\"format\": 1"));
}

TEST(DefaultCrossoverPath, FollowsTheXdgSpecification) {
  const auto path = [](std::map<std::string, std::string> variables) {
    return DefaultCrossoverPath([=](const std::string& name) -> std::optional<std::string> {
      const auto found = variables.find(name);
      return found == variables.end() ? std::nullopt : std::optional(found->second);
    });
  };
  EXPECT_EQ(path({{"XDG_CACHE_HOME", "/c"}, {"HOME", "/h"}}), "/c/winnow/crossover.json");
  EXPECT_EQ(path({{"HOME", "/h"}}), "/h/.cache/winnow/crossover.json");
  EXPECT_EQ(path({{"XDG_CACHE_HOME", "relative"}, {"HOME", "/h"}}),
            "/h/.cache/winnow/crossover.json");
  EXPECT_EQ(path({{"XDG_CACHE_HOME", ""}}), "");
  EXPECT_EQ(path({}), "");
}

TEST(CrossoverKey, TellsApartWhatMatters) {
  ModelConfig config;
  config.num_heads = 8;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  const IndexSpec lsh{Kind::kLsh, 128};
  const std::string key = CrossoverKey("cpu", "backend", config, {}, lsh);
  ModelConfig wider = config;
  wider.num_kv_heads = 4;
  DecoderOptions exact;
  exact.kv_dtype = kernels::DType::kF32;
  EXPECT_NE(CrossoverKey("other", "backend", config, {}, lsh), key);
  EXPECT_NE(CrossoverKey("cpu", "other", config, {}, lsh), key);
  EXPECT_NE(CrossoverKey("cpu", "backend", wider, {}, lsh), key);
  EXPECT_NE(CrossoverKey("cpu", "backend", config, exact, lsh), key);
  EXPECT_NE(CrossoverKey("cpu", "backend", config, {}, {Kind::kLsh, 64}), key);
  EXPECT_EQ(CrossoverKey("cpu", "backend", config, {}, lsh), key);
  DecoderOptions shared;
  shared.shared_kv_bytes = 1;
  DecoderOptions spills = shared;
  spills.residency = ResidencyKind::kPaged;
  EXPECT_NE(CrossoverKey("cpu", "backend", config, shared, lsh), key);
  EXPECT_NE(CrossoverKey("cpu", "backend", config, spills, lsh),
            CrossoverKey("cpu", "backend", config, shared, lsh));
}

// Time that only dense attention takes: a nanosecond for each byte it reads.
class WorkClock final : public Clock {
 public:
  explicit WorkClock(const TimedBackend& backend) : backend_(backend) {}
  TimePoint Now() const override {
    return TimePoint(std::chrono::nanoseconds(static_cast<int64_t>(backend_.attention().bytes)));
  }

 private:
  const TimedBackend& backend_;
};

// The real measurement, on a small shape: what it times must be what it says.
TEST(AttentionTimer, TimesBothWaysOnEveryIndexThatNeedsNoTraining) {
  ModelConfig config;
  config.layers.resize(3);
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  DecoderOptions options;
  options.max_context = 4096;
  const auto backend = kernels::MakeCpuBackend("auto", 1);
  const SteadyClock clock;
  for (const IndexSpec& index : {IndexSpec{Kind::kLsh, 128}, IndexSpec{Kind::kQuest, 0}}) {
    SCOPED_TRACE(ToString(index));
    auto timer = MakeAttentionTimer(config, options, index, *backend, clock);
    ASSERT_TRUE(timer.ok()) << timer.status();
    const CrossoverSample shorter = (*timer)->Time(1024), longer = (*timer)->Time(4096);
    EXPECT_EQ(longer.tokens, 4096);
    for (const CrossoverSample& sample : {shorter, longer}) {
      EXPECT_GT(sample.dense_seconds, 0);
      EXPECT_GT(sample.retrieval_seconds, 0);
    }
    // Back to a shorter context, as the search goes.
    EXPECT_EQ((*timer)->Time(2048).tokens, 2048);
    // By the work done, which no busy machine changes: dense attention reads all of the context and is
    // no part of the other way.
    TimedBackend counted(*backend, kernels::DType::kBF16);
    const WorkClock work(counted);
    auto counting = MakeAttentionTimer(config, options, index, counted, work);
    ASSERT_TRUE(counting.ok()) << counting.status();
    const double of_1024 = (*counting)->Time(1024).dense_seconds;
    const CrossoverSample of_4096 = (*counting)->Time(4096);
    EXPECT_NEAR(of_4096.dense_seconds / of_1024, 4, 0.05);
    EXPECT_EQ(of_4096.retrieval_seconds, 0);
  }
}

}  // namespace
}  // namespace winnow::engine
