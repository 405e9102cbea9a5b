#include "server/suggest.h"

#include <gtest/gtest.h>

#include <vector>

namespace winnow::server {
namespace {

const std::vector<std::string> kKnown = {"--listen", "--log-level", "--model", "--metrics", "n"};

TEST(Suggest, FindsTheNearestName) {
  EXPECT_EQ(DidYouMean("--listn", kKnown), ": did you mean --listen?");
  EXPECT_EQ(DidYouMean("--loglevel", kKnown), ": did you mean --log-level?");
  EXPECT_EQ(DidYouMean("--modle", kKnown), ": did you mean --model?");
}

TEST(Suggest, SaysNothingWhenNothingIsNear) {
  EXPECT_EQ(DidYouMean("--completely-else", kKnown), "");
  EXPECT_EQ(DidYouMean("x", {}), "");
  EXPECT_EQ(DidYouMean(std::string(1 << 20, 'l'), kKnown), "");
}

}  // namespace
}  // namespace winnow::server
