#include "server/line_queue.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <string>
#include <thread>

namespace winnow::server {
namespace {

class LineQueueTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // As the program does: a writer that is left behind writes when its reader goes.
    signal(SIGPIPE, SIG_IGN);
    ASSERT_EQ(pipe2(fds_, O_CLOEXEC), 0);
    fcntl(fds_[1], F_SETPIPE_SZ, 4096);
  }
  // The writing end stays open: the queue's thread may still have it.
  ~LineQueueTest() override { close(fds_[0]); }

  std::string ReadUntil(const std::string& what) {
    std::string text;
    char buffer[4096];
    while (text.find(what) == text.npos) {
      const ssize_t count = read(fds_[0], buffer, sizeof buffer);
      if (count <= 0) break;
      text.append(buffer, static_cast<size_t>(count));
    }
    return text;
  }
  static std::string Dropped(uint64_t lines) { return "dropped " + std::to_string(lines); }

  int fds_[2] = {-1, -1};
};

TEST_F(LineQueueTest, LinesComeOutInOrderAndWhole) {
  LineQueue queue(fds_[1], 1 << 20, Dropped);
  std::string all;
  for (int i = 0; i < 500; ++i) {
    const std::string line = std::to_string(i) + std::string(i, 'x') + "\n";  // 125 KB
    all += line;
    queue.Push(line);
  }
  queue.Push("end\n");
  EXPECT_EQ(ReadUntil("end\n"), all + "end\n");
  EXPECT_EQ(queue.dropped(), 0u);
}

TEST_F(LineQueueTest, WithoutAReaderLinesAreDroppedAndCountedAndNobodyWaits) {
  const auto start = std::chrono::steady_clock::now();
  LineQueue queue(fds_[1], 10'000, Dropped);
  const std::string line(99, 'x');
  for (int i = 0; i < 1000; ++i) queue.Push(line + "\n");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  const uint64_t dropped = queue.dropped();
  // 4096 bytes of the pipe, one line on its way and 10,000 queued: 142 lines.
  EXPECT_GE(dropped, 1000u - 142);
  EXPECT_LE(dropped, 1000u - 100);
  // Whoever reads again learns how many are missing.
  const std::string told = "\ndropped " + std::to_string(dropped) + "\n";
  const std::string text = ReadUntil(told);
  EXPECT_TRUE(text.ends_with(told)) << text;
  queue.Push("after\n");
  EXPECT_EQ(ReadUntil("after\n"), "after\n");
}

TEST_F(LineQueueTest, ItsEndDoesNotWaitForAReader) {
  const auto start = std::chrono::steady_clock::now();
  {
    LineQueue queue(fds_[1], 1 << 20, Dropped);
    for (int i = 0; i < 1000; ++i) queue.Push(std::string(99, 'x') + "\n");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST_F(LineQueueTest, AReaderThatIsGoneCostsLinesOnly) {
  close(fds_[0]);
  LineQueue queue(fds_[1], 1 << 20, Dropped);
  for (int i = 0; i < 10; ++i) queue.Push("line\n");
  queue.Flush(std::chrono::seconds(60));
  EXPECT_EQ(queue.dropped(), 10u);
}

}  // namespace
}  // namespace winnow::server
