#include "engine/base/did_you_mean.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace winnow::engine {
namespace {

const std::vector<std::string_view> kKnown = {"sink", "window", "completion", "k"};

TEST(NearestName, IsAtMostAThirdOfTheWordAway) {
  EXPECT_EQ(NearestName("window", kKnown), "window");
  EXPECT_EQ(NearestName("widnow", kKnown), "window");         // two substitutions of six
  EXPECT_EQ(NearestName("widnwo", kKnown), "");               // three differ
  EXPECT_EQ(NearestName("copletoin", kKnown), "completion");  // three of nine
  EXPECT_EQ(NearestName("sin", kKnown), "sink");              // one, which is always allowed
  EXPECT_EQ(NearestName("sn", kKnown), "");
}

TEST(NearestName, OfEqualsIsTheFirst) {
  const std::vector<std::string_view> known = {"cat", "bat"};
  EXPECT_EQ(NearestName("hat", known), "cat");
}

TEST(NearestName, ComparesNoLongWords) {
  const std::string longest(64, 'x');
  const std::string longer = longest + "x";
  const std::vector<std::string_view> known = {longest, longer};
  EXPECT_EQ(NearestName(longest, known), longest);
  EXPECT_EQ(NearestName(longer, known), "");
  EXPECT_EQ(NearestName("x", {}), "");
}

}  // namespace
}  // namespace winnow::engine
