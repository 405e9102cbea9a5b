#include "server/http2_meter.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace winnow::server {
namespace {

constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
enum : uint8_t {
  kData,
  kHeaders,
  kPriority,
  kReset,
  kSettings,
  kPush,
  kPing,
  kGoAway,
  kWindow,
  kContinuation
};
constexpr uint8_t kEndStream = 1, kEndHeaders = 4;

std::string Frame(uint8_t type, uint8_t flags, size_t length) {
  std::string frame(9, '\0');
  frame[0] = static_cast<char>(length >> 16);
  frame[1] = static_cast<char>(length >> 8);
  frame[2] = static_cast<char>(length);
  frame[3] = static_cast<char>(type);
  frame[4] = static_cast<char>(flags);
  frame[8] = 1;
  return frame + std::string(length, 'x');
}

std::string Times(int count, const std::string& text) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

Http2Meter Begun(const Http2Limits& limits = {}) {
  Http2Meter meter(limits);
  Http2Credit none;
  EXPECT_EQ(meter.Pass(kPreface, none).bytes, 24u);
  EXPECT_TRUE(meter.begun());
  return meter;
}

absl::Status StatusOf(const std::string& frames, const Http2Limits& limits = {}) {
  Http2Meter meter = Begun(limits);
  Http2Credit credit{1000, 100000};
  return meter.Pass(frames, credit).status;
}

TEST(Http2MeterTest, OnlyThePrefaceBeginsAConnection) {
  for (const std::string& other : {std::string("GET / HTTP/1.1\r\n"), std::string("\x16\x03\x01"),
                                   std::string(kPreface, 23) + "x"}) {
    Http2Meter meter({});
    Http2Credit credit{1, 1};
    EXPECT_FALSE(meter.Pass(other, credit).status.ok()) << other;
    EXPECT_FALSE(meter.begun());
  }
  Http2Meter meter({});
  Http2Credit credit{1, 1};
  for (size_t i = 0; i < 24; ++i) {
    EXPECT_FALSE(meter.begun());
    const Http2Meter::Passed passed = meter.Pass(std::string_view(kPreface + i, 1), credit);
    EXPECT_TRUE(passed.status.ok() && passed.bytes == 1);
  }
  EXPECT_TRUE(meter.begun());
}

TEST(Http2MeterTest, ResetsWaitForCredit) {
  Http2Meter meter = Begun();
  const std::string call = Frame(kHeaders, kEndHeaders, 20) + Frame(kReset, 0, 4);
  const std::string bytes = Times(10, call);
  Http2Credit credit{3, 0};
  Http2Meter::Passed passed = meter.Pass(bytes, credit);
  EXPECT_TRUE(passed.status.ok());
  EXPECT_TRUE(passed.lacks_resets);
  EXPECT_EQ(credit.resets, 0);
  // The fourth reset's header lacks its last byte.
  EXPECT_EQ(passed.bytes, 4 * call.size() - 4 - 1);
  const std::string_view rest = std::string_view(bytes).substr(passed.bytes);
  EXPECT_EQ(meter.Pass(rest, credit).bytes, 0u)
      << "nothing without credit, however often it is asked";
  EXPECT_EQ(meter.Pass(rest, credit).bytes, 0u);
  credit.resets = 100;
  passed = meter.Pass(rest, credit);
  EXPECT_EQ(passed.bytes, rest.size());
  EXPECT_EQ(credit.resets, 100 - 7);
}

TEST(Http2MeterTest, WhatCallsNeedIsFree) {
  Http2Meter meter = Begun();
  Http2Credit none;
  const std::string call = Frame(kHeaders, kEndHeaders, 300) + Frame(kData, 0, 16384) +
                           Frame(kData, 0, 100) + Frame(kData, kEndStream, 0);
  const std::string bytes = Times(100, call);
  EXPECT_EQ(meter.Pass(bytes, none).bytes, bytes.size());
}

TEST(Http2MeterTest, SmallFramesWaitForCredit) {
  for (const std::string& frame :
       {Frame(kPing, 0, 8), Frame(kSettings, 0, 0), Frame(kPriority, 0, 5), Frame(kWindow, 0, 4),
        Frame(kData, 0, 0), Frame(kData, 0, 1), Frame(200, 0, 0), Frame(kGoAway, 0, 8)}) {
    Http2Meter meter = Begun();
    Http2Credit credit{1000, 5};
    const Http2Meter::Passed passed = meter.Pass(Times(8, frame), credit);
    EXPECT_EQ(passed.bytes, 6 * frame.size() - (frame.size() - 9) - 1) << int{frame[3]};
    EXPECT_FALSE(passed.lacks_resets);
    EXPECT_EQ(credit.control, 0);
  }
}

TEST(Http2MeterTest, ABlockOfHeadersHasABound) {
  const std::string begin = Frame(kHeaders, 0, 1000);
  EXPECT_TRUE(StatusOf(begin + Frame(kContinuation, kEndHeaders, 1000)).ok());
  EXPECT_TRUE(StatusOf(Times(500, Frame(kHeaders, kEndHeaders, 1000))).ok()) << "of one block";
  EXPECT_FALSE(StatusOf(begin + Times(5, Frame(kContinuation, 0, 16384))).ok());
  EXPECT_FALSE(StatusOf(begin + Times(64, Frame(kContinuation, 0, 0))).ok()) << "empty ones";
  EXPECT_FALSE(StatusOf(Frame(kHeaders, kEndHeaders, 70000)).ok());
  EXPECT_TRUE(StatusOf(Frame(kHeaders, kEndHeaders, 70000), {.header_block_bytes = 80000}).ok());
}

TEST(Http2MeterTest, FramesOutOfPlaceAreErrors) {
  EXPECT_FALSE(StatusOf(Frame(kContinuation, kEndHeaders, 1)).ok());
  EXPECT_FALSE(StatusOf(Frame(kHeaders, 0, 10) + Frame(kData, 0, 10)).ok());
  EXPECT_FALSE(StatusOf(Frame(kHeaders, 0, 10) + Frame(kHeaders, kEndHeaders, 10)).ok());
  EXPECT_FALSE(StatusOf(Frame(kHeaders, kEndHeaders, 10) + Frame(kContinuation, 0, 10)).ok());
  EXPECT_FALSE(StatusOf(Frame(kPush, 0, 10)).ok());
  EXPECT_FALSE(StatusOf(Frame(kSettings, 0, 16385)).ok());
  EXPECT_TRUE(StatusOf(Frame(kData, 0, 1 << 20)).ok());
}

// In pieces of any size, and with however little credit at a time, the same bytes pass
// for the same cost.
TEST(Http2MeterTest, PiecesMakeNoDifference) {
  std::mt19937 random(20261124);
  std::string bytes;
  for (int i = 0; i < 300; ++i) {
    switch (random() % 5) {
      case 0:
        bytes += Frame(kHeaders, kEndHeaders, random() % 3000);
        break;
      case 1:
        bytes += Frame(kHeaders, 0, 50) + Frame(kContinuation, kEndHeaders, random() % 3000);
        break;
      case 2:
        bytes += Frame(kReset, 0, 4);
        break;
      case 3:
        bytes += Frame(kPing, 0, 8);
        break;
      default:
        bytes += Frame(kData, 0, random() % 2000);
        break;
    }
  }
  Http2Meter whole = Begun();
  Http2Credit credit{100000, 100000};
  EXPECT_EQ(whole.Pass(bytes, credit).bytes, bytes.size());
  Http2Meter meter = Begun();
  Http2Credit spent, left;
  for (size_t at = 0; at < bytes.size();) {
    const Http2Credit before = left;
    const auto passed = meter.Pass(std::string_view(bytes).substr(at, 1 + random() % 40), left);
    ASSERT_TRUE(passed.status.ok());
    at += passed.bytes;
    spent.resets += before.resets - left.resets;
    spent.control += before.control - left.control;
    if (passed.bytes == 0) (passed.lacks_resets ? left.resets : left.control) += 1;
  }
  EXPECT_EQ(spent.resets, 100000 - credit.resets);
  EXPECT_EQ(spent.control, 100000 - credit.control);
}

TEST(Http2ResetCounterTest, CountsStreamsThatTheServerResets) {
  std::string refused = Frame(kReset, 0, 4);
  refused.replace(9, 4, std::string("\0\0\0\7", 4));
  std::string done = Frame(kReset, 0, 4);
  done.replace(9, 4, std::string(4, '\0'));  // answered: the rest of the request is of no interest
  const std::string bytes = Frame(kSettings, 0, 12) + refused + Frame(kData, 0, 500) + done +
                            Frame(kHeaders, kEndHeaders, 40) + refused + Frame(kPing, 0, 8) +
                            refused;
  EXPECT_EQ(Http2ResetCounter().Count(bytes), 3);
  Http2ResetCounter in_pieces;
  int64_t count = 0;
  for (const char byte : bytes) count += in_pieces.Count(std::string_view(&byte, 1));
  EXPECT_EQ(count, 3);
}

}  // namespace
}  // namespace winnow::server
