#include "tests/unit/engine/tokenizer_testing.h"
#include "tests/unit/test_seed.h"

namespace winnow::engine {
namespace {

using nlohmann::json;

class DetokenizerOfKind : public testing::TestWithParam<std::string> {};

// Random ids, as a model might emit them: also bytes that are no character, and control tokens.
TEST_P(DetokenizerOfKind, PiecesJoinToTheWholeAndAreWholeCharacters) {
  const json golden = ReadJson(SourcePath("tests/golden/tokenizer/" + GetParam() + ".json"));
  const auto tokenizer = MakeTokenizer(golden["tokenizer"]);
  ASSERT_NE(tokenizer, nullptr);
  TestRandom random;
  for (int round = 0; round < 400; ++round) {
    std::vector<int32_t> ids;
    if (round % 2 == 0) {
      for (size_t n = random() % 20; n > 0; --n) {
        ids.push_back(
            static_cast<int32_t>(random() % static_cast<uint64_t>(tokenizer->vocab_size() + 2)));
      }
    } else {
      ids = Ids(tokenizer->Encode(RandomText(random, 12), true, true));
    }
    const bool skip = random() % 2 == 0;
    Detokenizer detokenizer(*tokenizer, skip);
    std::string joined;
    for (int32_t id : ids) {
      const std::string piece = detokenizer.Add(id);
      ASSERT_EQ(FindInvalidUtf8(piece), std::string::npos) << "half a character";
      joined += piece;
    }
    joined += detokenizer.Flush();
    ASSERT_EQ(joined, tokenizer->Decode(ids, skip));
  }
}

INSTANTIATE_TEST_SUITE_P(AllKinds, DetokenizerOfKind, testing::ValuesIn(GoldenKinds()),
                         [](const auto& info) { return info.param; });

TEST(Detokenizer, HoldsBackOnlyTheBytesOfAnUnfinishedCharacter) {
  const auto tokenizer = MakeTokenizer(ByteLevelJson());
  Detokenizer detokenizer(*tokenizer, false);
  EXPECT_EQ(detokenizer.Add('a'), "a");
  EXPECT_EQ(detokenizer.Add(0xF0), "");
  EXPECT_EQ(detokenizer.Add(0x9F), "");
  EXPECT_EQ(detokenizer.Add(0x99), "");
  EXPECT_EQ(detokenizer.Add(0x82), "\xF0\x9F\x99\x82");
  EXPECT_EQ(detokenizer.Add(0xE2), "");
  EXPECT_EQ(detokenizer.Add('b'),
            "\xEF\xBF\xBD"
            "b");  // it will never be finished
  EXPECT_EQ(detokenizer.Add(0xC3), "");
  EXPECT_EQ(detokenizer.Flush(), "\xEF\xBF\xBD");
}

json SentencePieceJson() {
  json vocab = {{"<unk>", 0}, {"\u2581", 257}, {"\u2581Hi", 258}, {"there", 259}};
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", byte);
    vocab[name] = byte + 1;
  }
  return {{"version", "1.0"},
          {"added_tokens", json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", nullptr},
          {"post_processor", nullptr},
          {"decoder",
           {{"type", "Sequence"},
            {"decoders",
             {{{"type", "Replace"}, {"pattern", {{"String", "\u2581"}}}, {"content", " "}},
              {{"type", "ByteFallback"}},
              {{"type", "Fuse"}},
              {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}},
          {"model",
           {{"type", "BPE"},
            {"unk_token", "<unk>"},
            {"byte_fallback", true},
            {"vocab", vocab},
            {"merges", json::array()}}}};
}

TEST(Detokenizer, StripsOneSpaceAtTheBeginningOnly) {
  const auto tokenizer = MakeTokenizer(SentencePieceJson());
  Detokenizer detokenizer(*tokenizer, false);
  EXPECT_EQ(detokenizer.Add(258), "Hi");
  EXPECT_EQ(detokenizer.Add(258), " Hi");
  EXPECT_EQ(detokenizer.Add(257), " ");
  EXPECT_EQ(detokenizer.Flush(), "");
  Detokenizer spaces(*tokenizer, false);
  EXPECT_EQ(spaces.Add(257), "");
  EXPECT_EQ(spaces.Add(257), " ");
}

TEST(Detokenizer, ARunOfByteTokensIsJudgedAsAWhole) {
  const auto tokenizer = MakeTokenizer(SentencePieceJson());
  Detokenizer good(*tokenizer, false);
  EXPECT_EQ(good.Add(0xE4 + 1), "");
  EXPECT_EQ(good.Add(0xBD + 1), "");
  EXPECT_EQ(good.Add(0xA0 + 1), "");
  EXPECT_EQ(good.Add(259), "\xE4\xBD\xA0there");
  // One bad byte at the end spoils all of the run, as in the reference.
  const std::vector<int32_t> bad = {0xE4 + 1, 0xBD + 1, 0xA0 + 1, 0xFF + 1};
  std::string replaced;
  for (int i = 0; i < 4; ++i) replaced += kReplacementCharacter;
  EXPECT_EQ(tokenizer->Decode(bad, false), replaced);
}

TEST(Detokenizer, MetaspaceIsDroppedInTheFirstTokenOnly) {
  json config = SentencePieceJson();
  config["decoder"] = {
      {"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "first"}};
  const std::vector<int32_t> ids = {258, 258, 257, 259};
  const auto tokenizer = MakeTokenizer(config);
  EXPECT_EQ(tokenizer->Decode(ids, false), "Hi Hi there");
  Detokenizer detokenizer(*tokenizer, false);
  EXPECT_EQ(detokenizer.Add(258), "Hi");
  EXPECT_EQ(detokenizer.Add(258), " Hi");
  config["decoder"]["prepend_scheme"] = "never";
  EXPECT_EQ(MakeTokenizer(config)->Decode(ids, false), " Hi Hi there");
}

TEST(Detokenizer, WithoutADecoderTokensAreJoinedBySpaces) {
  json config = SentencePieceJson();
  config["decoder"] = nullptr;
  EXPECT_EQ(MakeTokenizer(config)->Decode(std::vector<int32_t>{259, 259}, false), "there there");
}

}  // namespace
}  // namespace winnow::engine
