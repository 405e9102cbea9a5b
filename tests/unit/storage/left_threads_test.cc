// The end of a process that left threads to a disk that hangs.
#include "storage/left_threads.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <thread>

#include "storage/index.h"

namespace winnow::storage {
namespace {

using std::chrono::milliseconds;

constexpr int kAsked = 5, kReturned = 6, kDestructors = 7;

// Never answers, as a disk that hangs.
void Hang() { std::promise<void>().get_future().wait_for(std::chrono::hours(1)); }

class HangingIndex final : public IndexDb {
 public:
  ~HangingIndex() override { Hang(); }
  absl::Status Load(const std::function<void(const BlockKey&, std::string_view)>&,
                    std::string*) override {
    return absl::OkStatus();
  }
  absl::Status Write(const IndexBatch&) override { return absl::OkStatus(); }
};

class LeftThreadsDeathTest : public testing::Test {
 protected:
  void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

[[noreturn]] void End() {
  std::atexit([] { _Exit(kDestructors); });
  ExitNowIfThreadsLeft(kAsked);
  _Exit(kReturned);
}

TEST_F(LeftThreadsDeathTest, AProcessWithoutThemEndsAsEver) {
  EXPECT_EXIT(End(), testing::ExitedWithCode(kReturned), "");
}

TEST_F(LeftThreadsDeathTest, AProcessWithThemRunsNothingAtItsEnd) {
  EXPECT_EXIT(
      {
        LeaveThread(std::thread(Hang));
        End();
      },
      testing::ExitedWithCode(kAsked), "");
}

TEST_F(LeftThreadsDeathTest, AnIndexThatCannotBeClosedInTimeIsLeft) {
  EXPECT_EXIT(
      {
        const auto writer =
            std::make_unique<IndexWriter>(std::make_unique<HangingIndex>(), nullptr);
        if (!writer->Close(milliseconds(10))) End();
      },
      testing::ExitedWithCode(kAsked), "");
}

TEST_F(LeftThreadsDeathTest, AnIndexThatIsClosedInTimeIsNot) {
  class Index final : public IndexDb {
    absl::Status Load(const std::function<void(const BlockKey&, std::string_view)>&,
                      std::string*) override {
      return absl::OkStatus();
    }
    absl::Status Write(const IndexBatch&) override { return absl::OkStatus(); }
  };
  EXPECT_EXIT(
      {
        IndexWriter writer(std::make_unique<Index>(), nullptr);
        if (writer.Close(std::chrono::seconds(60))) End();
      },
      testing::ExitedWithCode(kReturned), "");
}

}  // namespace
}  // namespace winnow::storage
