#include "engine/text/stop_matcher.h"

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace winnow::engine {
namespace {

struct Outcome {
  std::string text;
  std::string match;
  bool operator==(const Outcome&) const = default;
};

Outcome Feed(StopMatcher& matcher, const std::vector<std::string>& pieces) {
  Outcome outcome;
  for (const std::string& piece : pieces) {
    outcome.text += matcher.Add(piece);
    if (matcher.matched()) return {outcome.text, matcher.match()};
  }
  outcome.text += matcher.Flush();
  return outcome;
}

TEST(StopMatcherTest, WithoutStringsEverythingPassesAtOnce) {
  StopMatcher matcher({}, false);
  EXPECT_EQ(matcher.Add("any text"), "any text");
  EXPECT_EQ(matcher.Flush(), "");
}

TEST(StopMatcherTest, FindsAStringAcrossPieces) {
  StopMatcher matcher({"STOP"}, false);
  EXPECT_EQ(matcher.Add("one S"), "one ");
  EXPECT_EQ(matcher.Add("TO"), "");
  EXPECT_EQ(matcher.Add("P two"), "");
  ASSERT_TRUE(matcher.matched());
  EXPECT_EQ(matcher.match(), "STOP");
}

TEST(StopMatcherTest, IncludeStopKeepsTheMatchAndNothingAfterIt) {
  StopMatcher matcher({"STOP"}, true);
  EXPECT_EQ(Feed(matcher, {"one S", "TOP two"}), (Outcome{"one STOP", "STOP"}));
}

TEST(StopMatcherTest, LetsGoOfWhatTurnsOutNotToMatch) {
  StopMatcher matcher({"STOP"}, false);
  EXPECT_EQ(matcher.Add("ST"), "");
  EXPECT_EQ(matcher.Add("ST"), "ST");
  EXPECT_EQ(matcher.Add("A"), "STA");
}

TEST(StopMatcherTest, HoldsBackTheLongestPartialMatchAndNoMore) {
  StopMatcher matcher({"ababac", "bab"}, false);
  EXPECT_EQ(matcher.Add("xaba"), "x");  // "aba" of the first, "ba" of the second
}

TEST(StopMatcherTest, TheMatchThatEndsFirstWins) {
  StopMatcher matcher({"abcd", "bc"}, false);
  EXPECT_EQ(Feed(matcher, {"abcd"}), (Outcome{"a", "bc"}));
}

TEST(StopMatcherTest, OfTwoThatEndTogetherTheLongerWins) {
  StopMatcher matcher({"c", "abc", "bc"}, false);
  EXPECT_EQ(Feed(matcher, {"xabc"}), (Outcome{"x", "abc"}));
}

TEST(StopMatcherTest, HoldsBackWholeCharacters) {
  StopMatcher matcher({"é!"}, false);
  EXPECT_EQ(matcher.Add("caf\u00e9"), "caf");
  EXPECT_EQ(matcher.Add("\u00ea"), "\u00e9\u00ea");  // shares its first byte with é
}

TEST(StopMatcherTest, FlushGivesWhatWasHeldBack) {
  StopMatcher matcher({"STOP"}, false);
  EXPECT_EQ(Feed(matcher, {"end STO"}), (Outcome{"end STO", ""}));
}

// The definition, by searching the whole text: the earliest end, then the longest.
Outcome SearchWhole(const std::string& text, const std::vector<std::string>& strings,
                    bool include_stop) {
  for (size_t end = 1; end <= text.size(); ++end) {
    std::string best;
    for (const std::string& s : strings) {
      if (s.size() <= end && text.compare(end - s.size(), s.size(), s) == 0 &&
          s.size() > best.size()) {
        best = s;
      }
    }
    if (!best.empty()) return {text.substr(0, include_stop ? end : end - best.size()), best};
  }
  return {text, ""};
}

TEST(StopMatcherTest, HowTheTextIsCutDoesNotMatter) {
  for (uint32_t seed = 0; seed < 5000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto pick = [&random](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(random);
    };
    const auto letters = [&](int length) {
      std::string text;
      for (int i = 0; i < length; ++i) text += static_cast<char>('a' + pick(0, 2));
      return text;
    };
    std::vector<std::string> strings;
    for (int i = pick(0, 4); i > 0; --i) strings.push_back(letters(pick(1, 6)));
    const std::string text = letters(pick(0, 40));
    const bool include_stop = pick(0, 1) == 1;
    std::vector<std::string> pieces;
    for (size_t at = 0; at < text.size();) {
      pieces.push_back(text.substr(at, pick(1, 5)));
      at += pieces.back().size();
    }
    StopMatcher matcher(strings, include_stop);
    EXPECT_EQ(Feed(matcher, pieces), SearchWhole(text, strings, include_stop));
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace winnow::engine
