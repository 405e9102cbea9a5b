#include "engine/text/unicode/unicode_text.h"

#include "tests/unit/engine/tokenizer_testing.h"

namespace winnow::engine {
namespace {

std::string Text(std::initializer_list<char32_t> characters) {
  std::string text;
  for (char32_t c : characters) AppendCodePoint(c, &text);
  return text;
}

TEST(UnicodeText, EveryCodePointComesBack) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    const std::string text = Text({c});
    int length = 0;
    ASSERT_EQ(DecodeCodePoint(text, 0, &length), c);
    ASSERT_EQ(static_cast<size_t>(length), text.size());
    ASSERT_EQ(FindInvalidUtf8(text), std::string::npos);
  }
}

// Surrogates, overlong forms, what lies above U+10FFFF, and bytes that begin nothing.
TEST(UnicodeText, IllFormedTextIsFoundWhereItBegins) {
  for (const char* bad :
       {"\x80", "\xC0\xAF", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xED\xBF\xBF",
        "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xC3", "\xE2\x82",
        "\xF0\x9F\x99", "\xC3(", "\xE2\x82("}) {
    EXPECT_EQ(FindInvalidUtf8(std::string("ok\xC3\xA9") + bad), 4u);
  }
}

// The Unicode standard's example (table 3-8): one replacement for each maximal part.
TEST(UnicodeText, EachIllFormedPartBecomesOneReplacement) {
  std::string out;
  AppendLossyUtf8("\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64", false, &out);
  EXPECT_EQ(out, Text({'a', 0xFFFD, 0xFFFD, 0xFFFD, 'b', 0xFFFD, 'c', 0xFFFD, 0xFFFD, 'd'}));
}

TEST(UnicodeText, AnUnfinishedCharacterWaitsIfMoreMayFollow) {
  std::string out;
  EXPECT_EQ(AppendLossyUtf8("a\xE2\x82", true, &out), 1u);
  EXPECT_EQ(out, "a");
  EXPECT_EQ(AppendLossyUtf8("\xE2\x28", true, &out), 2u);  // it can no longer be finished
}

TEST(UnicodeText, ClassesHaveTheReferencesSizes) {
  size_t white_space = 0;
  size_t numeric = 0;
  size_t word = 0;
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    white_space += IsWhiteSpace(c) ? 1 : 0;
    numeric += IsNumeric(c) ? 1 : 0;
    word += IsWord(c) ? 1 : 0;
  }
  EXPECT_EQ(white_space, 25u);
  EXPECT_EQ(numeric, 1924u);
  EXPECT_EQ(word, 144667u);
}

TEST(UnicodeText, NormalFormsAreTheReferences) {
  const auto nfc = [](const std::string& text) {
    return NormalizeUnicode(text, UnicodeForm::kNfc);
  };
  EXPECT_EQ(nfc(Text({'e', 0x301})), Text({0xE9}));
  EXPECT_EQ(nfc(Text({'a', 0x345, 0x301, 0x323})), Text({0x1EA1, 0x301, 0x345}));
  EXPECT_EQ(nfc(Text({0x1100, 0x1161, 0x11A8})), Text({0xAC01}));
  EXPECT_EQ(nfc(Text({0xAC00, 0x11A7})), Text({0xAC00, 0x11A7}));  // U+11A7 is no final consonant
  // Known to later versions of Unicode only: they stand still.
  EXPECT_EQ(nfc(Text({0x11935, 0x11930})), Text({0x11935, 0x11930}));
  EXPECT_EQ(nfc(Text({'a', 0x301, 0x1DF6})), Text({0xE1, 0x1DF6}));
  EXPECT_EQ(NormalizeUnicode(Text({0x11938}), UnicodeForm::kNfd), Text({0x11938}));
  EXPECT_EQ(NormalizeUnicode(Text({0x32FF}), UnicodeForm::kNfkc), Text({0x32FF}));
  EXPECT_EQ(NormalizeUnicode(Text({0xFB01, 0xFF21, 0xA0}), UnicodeForm::kNfkc), "fiA ");
  EXPECT_EQ(NormalizeUnicode(Text({0xC5}), UnicodeForm::kNfkd), Text({'A', 0x30A}));
}

}  // namespace
}  // namespace winnow::engine
