#include "server/trace_context.h"

#include <gtest/gtest.h>

#include <string>

namespace winnow::server {
namespace {

const std::string kTrace = "4bf92f3577b34da6a3ce929d0e0e4736";
const std::string kParent = "00f067aa0ba902b7";
const std::string kGood = "00-" + kTrace + "-" + kParent + "-01";

TEST(TraceContext, IdsOfAGoodHeader) {
  const TraceContext context = ParseTraceParent(kGood);
  ASSERT_TRUE(context.valid());
  EXPECT_EQ(context.trace_id, kTrace);
  EXPECT_EQ(context.parent_id, kParent);
}

TEST(TraceContext, LaterVersionsMayHaveMore) {
  EXPECT_TRUE(ParseTraceParent("01-" + kTrace + "-" + kParent + "-01").valid());
  EXPECT_TRUE(ParseTraceParent("cc-" + kTrace + "-" + kParent + "-01-more").valid());
  EXPECT_FALSE(ParseTraceParent("cc-" + kTrace + "-" + kParent + "-01more").valid());
}

TEST(TraceContext, WhatTheSpecificationForbidsIsNotValid) {
  const std::string zero_trace(32, '0'), zero_parent(16, '0');
  std::string upper = kGood;
  upper[4] = 'B';
  for (const std::string& header :
       {std::string(), kGood + "-", kGood + "-x", kGood.substr(0, kGood.size() - 1),
        "ff" + kGood.substr(2), "0g" + kGood.substr(2), upper,
        "00-" + zero_trace + "-" + kParent + "-01", "00-" + kTrace + "-" + zero_parent + "-01",
        "00-" + kTrace + "-" + kParent + "-0x", "00_" + kGood.substr(3),
        "00-" + kTrace + "_" + kParent + "-01", "00-" + kTrace + "-" + kParent + "_01"}) {
    EXPECT_FALSE(ParseTraceParent(header).valid()) << header;
  }
}

// Each position but those of digits that may be others.
TEST(TraceContext, AWrongByteAnywhereIsNotValid) {
  for (size_t i = 0; i < kGood.size(); ++i) {
    std::string header = kGood;
    header[i] = '?';
    EXPECT_FALSE(ParseTraceParent(header).valid()) << header;
  }
}

}  // namespace
}  // namespace winnow::server
