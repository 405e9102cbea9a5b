#include "engine/text/tokenizer_regex.h"

#include "engine/text/tokenizer_regex_syntax.h"
#include "tests/unit/engine/tokenizer_testing.h"
#include "tests/unit/test_seed.h"

namespace winnow::engine {
namespace {

std::vector<std::string> Matches(std::string_view pattern, const std::string& text) {
  const auto compiled = SplitPattern::Regex(pattern);
  EXPECT_TRUE(compiled.ok()) << pattern << " " << compiled.status();
  if (!compiled.ok()) return {};
  RegexScratch scratch;
  std::vector<TextPart> parts;
  EXPECT_TRUE(compiled->FindParts(text, &scratch, &parts).ok());
  std::vector<std::string> matches;
  uint32_t end = 0;
  for (const TextPart& part : parts) {
    EXPECT_EQ(part.begin, end) << "parts must cover the text";
    end = part.end;
    if (part.is_match) matches.push_back(text.substr(part.begin, part.end - part.begin));
  }
  EXPECT_EQ(end, text.size());
  return matches;
}

// How many code points each class has. The counts are the reference's, of all
// 0x110000.
TEST(TokenizerRegex, ClassesAreTheReferencesForEveryCodePoint) {
  const struct {
    const char* pattern;
    size_t count;
  } kClasses[] = {{"\\p{L}", 141028}, {"\\p{N}", 1911},    {"\\p{M}", 2501},
                  {"\\p{P}", 855},    {"\\p{S}", 8514},    {"\\p{Lu}", 1858},
                  {"\\p{Ll}", 2258},  {"\\p{Lo}", 136477}, {"\\p{Nd}", 760},
                  {"\\d", 760},       {"\\s", 25},         {"[^\\s\\p{L}\\p{N}]", 969100}};
  for (const auto& item : kClasses) {
    const auto compiled = SplitPattern::Regex(item.pattern);
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    RegexScratch scratch;
    std::vector<TextPart> parts;
    size_t count = 0;
    for (char32_t c = 0; c < 0x110000; ++c) {
      if (c >= 0xD800 && c < 0xE000) continue;
      std::string text;
      AppendCodePoint(c, &text);
      ASSERT_TRUE(compiled->FindParts(text, &scratch, &parts).ok());
      count += parts[0].is_match ? 1 : 0;
    }
    EXPECT_EQ(count, item.count) << item.pattern;
  }
}

TEST(TokenizerRegex, SpaceIsWhiteSpaceAndNotTheMongolianVowelSeparator) {
  EXPECT_TRUE(Matches("\\s", "\xE1\xA0\x8E").empty());    // U+180E
  EXPECT_EQ(Matches("\\s", "\xC2\x85").size(), 1u);       // U+0085
  EXPECT_TRUE(Matches("[\\S]", "\xE3\x80\x80").empty());  // U+3000
  EXPECT_EQ(Matches("[^\\S]", "\xE3\x80\x80").size(), 1u);
}

TEST(TokenizerRegex, LettersOfLaterUnicodeAreLetters) {
  EXPECT_EQ(Matches("\\p{L}+", "\xF0\x90\xB5\x90").size(), 1u);  // U+10D50, of Unicode 16
  EXPECT_TRUE(Matches("\\P{L}", "\xF0\x90\xB5\x90").empty());
}

TEST(TokenizerRegex, MeansWhatRubySyntaxMeans) {
  EXPECT_EQ(Matches("^a", "a\na").size(), 2u);  // lines, always
  EXPECT_EQ(Matches("a$", "a\na").size(), 2u);
  EXPECT_EQ(Matches(".", "a\nb").size(), 2u);
  EXPECT_EQ(Matches("\\v", "\n").size(), 0u);  // one character, U+000B
  EXPECT_EQ(Matches("a{,2}", "aaa"), (std::vector<std::string>{"aa", "a"}));
  EXPECT_EQ(Matches("x{", "x{"), (std::vector<std::string>{"x{"}));
  EXPECT_EQ(Matches("(?i:'s)", "'S'\xC5\xBF").size(), 2u);  // U+017F folds to s
  EXPECT_EQ(Matches("[a-c\\-x]+", "b-xd"), (std::vector<std::string>{"b-x"}));
}

TEST(TokenizerRegex, AnEmptyMatchRightAfterAMatchDoesNotCount) {
  EXPECT_EQ(Matches("a*", "aab"), (std::vector<std::string>{"aa", ""}));
  EXPECT_EQ(Matches("", "ab").size(), 3u);
}

TEST(TokenizerRegex, WhatCannotBeTranslatedIsRefusedByName) {
  const struct {
    const char* pattern;
    const char* expected;
  } kRefused[] = {{"\\w", "\\w"},
                  {"\\b", "\\b"},
                  {"\\h", "\\h"},
                  {"\\p{Han}", "Han"},
                  {"\\p{Mn}", "Mn"},
                  {"(?x)a", "(?"},
                  {"(?<n>a)", "(?"},
                  {"[a[b]]", "inside a class"},
                  {"[a&&b]", "intersection"},
                  {"a{2}+", "interval"},
                  {"(?i:ss)", "fold"},
                  {"(?i:\xC3\xA4)", "ASCII"},
                  {"(a)\\1", "\\1"},
                  {"[]a]", "empty class"},
                  {"a**", "upon"}};
  for (const auto& item : kRefused) {
    const auto translated = TranslateRegex(item.pattern);
    EXPECT_EQ(translated.status().code(), absl::StatusCode::kUnimplemented) << item.pattern;
    EXPECT_NE(translated.status().ToString().find(item.expected), std::string::npos)
        << translated.status();
  }
  for (const char* pattern : {"(", ")", "[a", "*a", "\\", "[z-a]", "\\x{110000}", "\\x{}"}) {
    EXPECT_EQ(TranslateRegex(pattern).status().code(), absl::StatusCode::kInvalidArgument)
        << pattern;
  }
}

TEST(TokenizerRegex, RandomPatternsNeverBreakTheTranslator) {
  TestRandom random;
  constexpr std::string_view kParts[] = {"(", ")", "[",    "]",   "\\", "p{L}",
                                         "^", "-", "*",    "+",   "?",  "{1,2}",
                                         "a", "|", "(?i:", "(?!", "s",  "\xC3\xA9"};
  for (int i = 0; i < 20000; ++i) {
    std::string pattern;
    for (size_t n = random() % 10; n > 0; --n) pattern += kParts[random() % std::size(kParts)];
    const auto compiled = SplitPattern::Regex(pattern);
    if (!compiled.ok()) continue;
    RegexScratch scratch;
    std::vector<TextPart> parts;
    (void)compiled->FindParts("aa s\xC3\xA9(]", &scratch, &parts);
  }
}

}  // namespace
}  // namespace winnow::engine
