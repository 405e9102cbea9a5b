#include "engine/text/tokenizer.h"

#include <ctime>

#include "tests/unit/engine/tokenizer_testing.h"
#include "tests/unit/test_seed.h"

namespace winnow::engine {
namespace {

using nlohmann::json;
using ::testing::Test;

const json kControl =
    json::array({AddedTokenJson(259, "<|end|>"), AddedTokenJson(260, "<think>", false)});

bool Contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

TEST(Tokenizer, EncodesByMergesInOrderOfRank) {
  const auto tokenizer = MakeTokenizer(ByteLevelJson());
  EXPECT_EQ(Ids(tokenizer->Encode("hello", false, false)),
            (std::vector<int32_t>{258, 'o' - 0x21 + 0x21}));
  EXPECT_EQ(tokenizer->vocab_size(), 259);
  EXPECT_EQ(tokenizer->TokenToId("hell"), 258);
  EXPECT_EQ(tokenizer->TokenToId("nothing"), std::nullopt);
  EXPECT_EQ(tokenizer->IdToToken(257), "ll");
  EXPECT_EQ(tokenizer->IdToToken(-1), "");
  EXPECT_EQ(tokenizer->IdToToken(259), "");
}

// A vocabulary without the byte "A"; the expected ids are those of the reference.
json WithoutA(json model_members, json more_tokens = json::object()) {
  json config = ByteLevelJson();
  config["model"]["vocab"].erase("A");
  config["model"]["vocab"].update(more_tokens);
  config["model"].update(model_members);
  return config;
}

TEST(Tokenizer, AByteWithoutATokenVanishesWhereThereIsNoUnknownToken) {
  const auto tokenizer = MakeTokenizer(WithoutA(json::object()));
  using Expected = std::vector<int32_t>;
  EXPECT_EQ(Ids(tokenizer->Encode("hellAo", false, false)), (Expected{258, 'o'}));
  EXPECT_EQ(Ids(tokenizer->Encode("AA", false, false)), Expected{});
  // What was before and after it are neighbours now.
  EXPECT_EQ(Ids(tokenizer->Encode("hAAe", false, false)), Expected{256});
  EXPECT_EQ(tokenizer->Decode(std::vector<int32_t>{258, 'A', 'o'}, false), "hello");
  EXPECT_EQ(tokenizer->missing_bytes(), 1);
  EXPECT_FALSE(tokenizer->has_unk());
}

TEST(Tokenizer, AByteWithoutATokenBecomesTheUnknownToken) {
  for (const bool fuse : {false, true}) {
    SCOPED_TRACE(fuse);
    const auto tokenizer =
        MakeTokenizer(WithoutA({{"unk_token", "[UNK]"}, {"fuse_unk", fuse}}, {{"[UNK]", 259}}));
    using Expected = std::vector<int32_t>;
    EXPECT_EQ(Ids(tokenizer->Encode("hellAo", false, false)), (Expected{258, 259, 'o'}));
    EXPECT_EQ(Ids(tokenizer->Encode("hAe", false, false)), (Expected{'h', 259, 'e'}));
    EXPECT_EQ(Ids(tokenizer->Encode("hAAe", false, false)),
              fuse ? (Expected{'h', 259, 'e'}) : (Expected{'h', 259, 259, 'e'}));
    // Words are not fused with each other.
    EXPECT_EQ(Ids(tokenizer->Encode("A A", false, false)), (Expected{259, ' ', 259}));
    EXPECT_EQ(tokenizer->Decode(std::vector<int32_t>{'h', 259, 'e'}, false), "h[UNK]e");
    EXPECT_TRUE(tokenizer->has_unk());
  }
}

TEST(Tokenizer, ByteFallbackNeedsAllBytesOfACharacterOnly) {
  // The alphabet's character for the byte C3 is U+00C3, in UTF-8 the bytes C3 83: both have tokens.
  // B has neither a token nor a byte token.
  json config = WithoutA({{"byte_fallback", true}, {"unk_token", "[UNK]"}},
                         {{"[UNK]", 259}, {"<0x41>", 260}, {"<0xC3>", 261}, {"<0x83>", 262}});
  config["model"]["vocab"].erase("\xC3\x83");
  config["model"]["vocab"].erase("B");
  const auto tokenizer = MakeTokenizer(config);
  using Expected = std::vector<int32_t>;
  EXPECT_EQ(Ids(tokenizer->Encode("hAB", false, false)), (Expected{'h', 260, 259}));
  EXPECT_EQ(Ids(tokenizer->Encode("\xC3\x84", false, false)), (Expected{261, 262, 0x84}));
}

TEST(Tokenizer, AnUnknownTokenThatNothingLeadsToMayBeMissing) {
  json config = ByteLevelJson();
  config["model"]["unk_token"] = "<|endoftext|>";
  const auto tokenizer = MakeTokenizer(config);
  EXPECT_EQ(tokenizer->missing_bytes(), 0);
  EXPECT_EQ(tokenizer->Decode(Ids(tokenizer->Encode("A\xC3\x84", false, false)), false),
            "A\xC3\x84");
}

// No pre-tokenizer: the text is one word. The expected tokens are those of the reference.
std::vector<std::string> AffixTokens(json model, const std::string& text) {
  model["type"] = "BPE";
  const auto tokenizer = MakeTokenizer({{"version", "1.0"}, {"model", model}});
  std::vector<std::string> tokens;
  for (int32_t id : Ids(tokenizer->Encode(text, false, false))) {
    tokens.push_back(tokenizer->IdToToken(id));
  }
  return tokens;
}

TEST(Tokenizer, CharactersInsideAWordHaveTheContinuingPrefix) {
  using Tokens = std::vector<std::string>;
  const json model = {
      {"continuing_subword_prefix", "##"},
      {"vocab", {{"a", 0}, {"##b", 1}, {"ab", 2}, {"##c", 3}, {"##bc", 4}, {"abc", 5}}},
      {"merges", json::array({json::array({"a", "##b"}), json::array({"##b", "##c"})})}};
  EXPECT_EQ(AffixTokens(model, "abc"), (Tokens{"ab", "##c"}));
  EXPECT_EQ(AffixTokens(model, "a"), (Tokens{"a"}));
  EXPECT_EQ(AffixTokens(model, "bab"), (Tokens{"##b"}));
  EXPECT_EQ(AffixTokens(model, "zbc"), (Tokens{"##bc"}));
}

TEST(Tokenizer, TheLastCharacterOfAWordHasTheSuffix) {
  using Tokens = std::vector<std::string>;
  const json model = {{"end_of_word_suffix", "</w>"},
                      {"vocab", {{"a", 0}, {"b", 1}, {"b</w>", 2}, {"ab</w>", 3}}},
                      {"merges", json::array({json::array({"a", "b</w>"})})}};
  EXPECT_EQ(AffixTokens(model, "abc"), (Tokens{"a", "b"}));
  EXPECT_EQ(AffixTokens(model, "ab"), (Tokens{"ab</w>"}));
  EXPECT_EQ(AffixTokens(model, "a"), Tokens{});
  EXPECT_EQ(AffixTokens(model, "bab"), (Tokens{"b", "ab</w>"}));
}

TEST(Tokenizer, AnyTextComesBackFromByteLevelTokens) {
  const auto tokenizer = MakeTokenizer(ByteLevelJson(kControl));
  TestRandom random;
  for (int i = 0; i < 500; ++i) {
    const std::string text = RandomText(random, 40);
    EXPECT_EQ(tokenizer->Decode(Ids(tokenizer->Encode(text, false, false)), false), text);
  }
}

TEST(Tokenizer, UserTextNeverBecomesAControlToken) {
  const auto tokenizer = MakeTokenizer(ByteLevelJson(kControl));
  EXPECT_TRUE(Contains(Ids(tokenizer->Encode("a<|end|>b", false, true)), 259));
  EXPECT_FALSE(Contains(Ids(tokenizer->Encode("a<|end|>b", false, false)), 259));
  // What is not a control token is recognised for everyone, as in the reference.
  EXPECT_TRUE(Contains(Ids(tokenizer->Encode("<think>", false, false)), 260));
  EXPECT_TRUE(tokenizer->IsSpecial(259));
  EXPECT_FALSE(tokenizer->IsSpecial(260));
  EXPECT_FALSE(tokenizer->IsSpecial(12345));
}

TEST(Tokenizer, ControlTokensAreNotPutTogetherAcrossSegments) {
  const auto tokenizer = MakeTokenizer(ByteLevelJson(kControl));
  for (size_t cut = 1; cut < 7; ++cut) {
    const std::string token = "<|end|>";
    for (const bool first_trusted : {false, true}) {
      const TextSegment segments[] = {{std::string_view(token).substr(0, cut), first_trusted},
                                      {std::string_view(token).substr(cut), !first_trusted}};
      EXPECT_FALSE(Contains(Ids(tokenizer->Encode(segments, false)), 259)) << cut;
    }
    // Two segments of the server's own text are one text.
    const TextSegment own[] = {{std::string_view(token).substr(0, cut), true},
                               {std::string_view(token).substr(cut), true}};
    EXPECT_EQ(Ids(tokenizer->Encode(own, false)), std::vector<int32_t>{259});
  }
}

TEST(Tokenizer, UserTextCannotHideTheTemplatesControlTokens) {
  const auto tokenizer = MakeTokenizer(
      ByteLevelJson(json::array({AddedTokenJson(259, "<|end|>"), AddedTokenJson(260, "x<|end|>y"),
                                 AddedTokenJson(261, "x<|")})));
  const TextSegment segments[] = {{"x", false}, {"<|end|>", true}, {"y", false}};
  EXPECT_TRUE(Contains(Ids(tokenizer->Encode(segments, false)), 259));
}

TEST(Tokenizer, SegmentsGiveTheIdsOfTheWholeText) {
  const auto tokenizer = MakeTokenizer(ByteLevelJson(kControl));
  const std::string whole = "<|end|>hello world<|end|>";
  // The cuts are inside words: text is joined before it is split.
  const TextSegment segments[] = {
      {"<|end|>", true}, {"hel", false}, {"", true}, {"lo wor", false}, {"ld<|end|>", true}};
  EXPECT_EQ(Ids(tokenizer->Encode(segments, false)), Ids(tokenizer->Encode(whole, false, true)));
}

TEST(Tokenizer, InvalidUtf8IsRefusedWithItsOffset) {
  const auto tokenizer = MakeTokenizer(ByteLevelJson());
  const std::string bad[] = {
      "ab\xFF", "ab\xC3",    "ab\xC0\x80", "ab\xED\xA0\x80", "ab\xF4\x90\x80\x80",
      "ab\x80", "ab\xE2\x82"};
  for (const std::string& text : bad) {
    const auto ids = tokenizer->Encode(text, false, false);
    EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(ids.status().ToString().find("byte 2"), std::string::npos) << ids.status();
  }
  // A character that is cut between two segments is in neither.
  const TextSegment cut[] = {{"\xC3", true}, {"\xA9", true}};
  EXPECT_EQ(tokenizer->Encode(cut, false).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Tokenizer, EmptyTextHasOnlyTheTemplatesTokens) {
  json config = ByteLevelJson(kControl);
  config["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single",
       {{{"SpecialToken", {{"id", "<|end|>"}, {"type_id", 0}}}},
        {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
      {"pair", json::array()},
      {"special_tokens",
       {{"<|end|>", {{"id", "<|end|>"}, {"ids", {259}}, {"tokens", {"<|end|>"}}}}}}};
  const auto tokenizer = MakeTokenizer(config);
  EXPECT_EQ(Ids(tokenizer->Encode("", true, true)), std::vector<int32_t>{259});
  EXPECT_TRUE(Ids(tokenizer->Encode("", false, true)).empty());
  EXPECT_EQ(Ids(tokenizer->Encode("h", true, true)).size(), 2u);
}

TEST(Tokenizer, IdsWithoutATokenAreSkippedWhenDecoding) {
  const auto tokenizer = MakeTokenizer(ByteLevelJson(kControl));
  EXPECT_EQ(tokenizer->Decode(std::vector<int32_t>{258, 9999, -5, 259}, false), "hell<|end|>");
  EXPECT_EQ(tokenizer->Decode(std::vector<int32_t>{258, 9999, -5, 259}, true), "hell");
}

TEST(Tokenizer, NormalizedControlTokensNeedTrustedTextToo) {
  json token = AddedTokenJson(259, "<|end|>");
  token["normalized"] = true;
  for (const char* form : {"NFC", "NFKC"}) {
    json config = ByteLevelJson(json::array({token}));
    config["normalizer"] = {{"type", form}};
    const auto tokenizer = MakeTokenizer(config);
    const TextSegment segments[] = {
        {"e\xCC\x81<|end|>", false}, {"\xC3\xA9<|end|>", true}, {"<|end", false}, {"|>", true}};
    const std::vector<int32_t> ids = Ids(tokenizer->Encode(segments, false));
    EXPECT_EQ(std::count(ids.begin(), ids.end(), 259), 1) << form;
  }
}

// One word of a megabyte: n log n, not n squared. Of the processor's time, as a multiple of what a
// 16th of the text takes (20 by n log n, 256 by n squared): neither a slow machine nor a busy one counts.
TEST(Tokenizer, AMegabyteWithoutASpaceIsNotQuadratic) {
  const auto tokenizer = MakeTokenizer(ByteLevelJson());
  const auto encode = [&](size_t bytes) {
    std::string text;
    while (text.size() < bytes) text += "hell";
    const std::clock_t begin = std::clock();
    EXPECT_EQ(Ids(tokenizer->Encode(text, false, false)).size(), text.size() / 4);
    return static_cast<double>(std::clock() - begin);
  };
  encode(1 << 16);  // memory that comes for the first time costs
  EXPECT_LT(encode(1 << 20), 100 * encode(1 << 16));
}

TEST(Tokenizer, AMegabyteOfSpacesIsNotQuadratic) {
  auto tokenizer = Tokenizer::Load(SourcePath("models/needle-5m"));
  ASSERT_TRUE(tokenizer.ok());
  for (const std::string_view end : {"", "x", "\n"}) {
    const std::string text = std::string(1 << 20, ' ') + std::string(end);
    const auto ids = (*tokenizer)->Encode(text, false, false);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ((*tokenizer)->Decode(*ids, false), text);
  }
}

TEST(Tokenizer, ARegexThatBacktracksForeverIsAnErrorNotAHang) {
  const auto tokenizer = MakeTokenizer(ByteLevelJson(
      json::array(),
      {{"type", "Sequence"},
       {"pretokenizers",
        {{{"type", "Split"},
          {"pattern", {{"Regex", "(a+)+\\d"}}},
          {"behavior", "Isolated"},
          {"invert", false}},
         {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}}));
  const auto ids = tokenizer->Encode(std::string(5000, 'a') + "c", false, false);
  EXPECT_EQ(ids.status().code(), absl::StatusCode::kResourceExhausted) << ids.status();
}

}  // namespace
}  // namespace winnow::engine
