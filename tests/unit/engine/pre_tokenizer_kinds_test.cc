// The table of pre-tokenizers that GGUF files name: each entry works, and splits as its family does.
#include "engine/text/pre_tokenizer_kinds.h"

#include <set>

#include "tests/unit/engine/tokenizer_testing.h"
#include "tests/unit/test_seed.h"

namespace winnow::engine {
namespace {

using nlohmann::json;

// A tokenizer of this kind with single bytes, a few merges and one control token.
json BytesOf(const PreTokenizerKind& kind) {
  json config = ByteLevelTokenizerJson(kind);
  config["added_tokens"] = json::array({AddedTokenJson(259, "<|end|>")});
  config["model"] = ByteLevelJson()["model"];
  return config;
}

TEST(PreTokenizerKinds, EveryKindLoadsAndEveryTextComesBack) {
  TestRandom random;
  std::set<std::string> names;
  for (const PreTokenizerKind& kind : PreTokenizerKinds()) {
    SCOPED_TRACE(kind.name);
    EXPECT_TRUE(names.insert(std::string(kind.name)).second);
    EXPECT_EQ(FindPreTokenizerKind(kind.name), &kind);
    EXPECT_NE(PreTokenizerKindNames().find(kind.name), std::string::npos);
    const auto tokenizer = MakeTokenizer(BytesOf(kind));
    ASSERT_NE(tokenizer, nullptr);
    const UnicodeForm nfc = UnicodeForm::kNfc;
    for (int i = 0; i < 100; ++i) {
      std::string text = RandomText(random, 40) + "<|end|>";
      const std::vector<int32_t> ids = Ids(tokenizer->Encode(text, false, false));
      // A control token in a user's text stays text, whatever the words are.
      EXPECT_EQ(std::count(ids.begin(), ids.end(), 259), 0);
      if (kind.normalizer != "null") text = NormalizeUnicode(text, nfc);
      EXPECT_EQ(tokenizer->Decode(ids, false), text);
    }
  }
  EXPECT_TRUE(std::is_sorted(
      PreTokenizerKinds().begin(), PreTokenizerKinds().end(),
      [](const PreTokenizerKind& a, const PreTokenizerKind& b) { return a.name < b.name; }));
}

// The goldens' tokenizers were made by other code, from the families' published patterns.
TEST(PreTokenizerKinds, EntriesAreWhatTheGoldensHave) {
  for (const auto& [kind_name, golden_name] :
       {std::pair("smollm", "smollm"), std::pair("starcoder", "smollm"),
        std::pair("refact", "smollm"), std::pair("tekken", "tekken"), std::pair("gpt-4o", "gpt4o"),
        std::pair("llama4", "gpt4o"), std::pair("deepseek-v3", "deepseek_v3"),
        std::pair("deepseek-coder", "deepseek_coder"), std::pair("command-r", "command_r"),
        std::pair("gpt-2", "gpt2_fused_unk"), std::pair("llama-bpe", "llama3"),
        std::pair("dbrx", "llama3"), std::pair("qwen2", "qwen2"),
        std::pair("exaone4", "gpt2_fused_unk"), std::pair("glm4", "llama3")}) {
    SCOPED_TRACE(kind_name);
    const PreTokenizerKind* kind = FindPreTokenizerKind(kind_name);
    ASSERT_NE(kind, nullptr);
    const json golden = ReadJson(
        SourcePath("tests/golden/tokenizer/" + std::string(golden_name) + ".json"))["tokenizer"];
    // trim_offsets concerns offsets only.
    const auto steps = [](json value) {
      if (value.contains("pretokenizers")) {
        for (json& step : value["pretokenizers"]) step.erase("trim_offsets");
      }
      value.erase("trim_offsets");
      return value;
    };
    EXPECT_EQ(steps(json::parse(kind->pre_tokenizer)), steps(golden["pre_tokenizer"]));
    EXPECT_EQ(json::parse(kind->normalizer), golden["normalizer"]);
  }
}

TEST(PreTokenizerKinds, AnUnknownNameHasNoDefault) {
  EXPECT_EQ(FindPreTokenizerKind("default"), nullptr);
  EXPECT_EQ(FindPreTokenizerKind(""), nullptr);
  EXPECT_EQ(FindPreTokenizerKind("llama"), nullptr);
}

// The words of `text`: with a vocabulary that has every part of it and ignores merges, each word
// becomes one token.
std::vector<std::string> Words(std::string_view name, const std::string& text) {
  const PreTokenizerKind* kind = FindPreTokenizerKind(name);
  EXPECT_NE(kind, nullptr) << name;
  json config = BytesOf(*kind);
  config["added_tokens"] = json::array();
  json vocab = json::object();
  int next = 0;
  for (int byte = 0; byte < 256; ++byte) {
    std::string character;
    AppendCodePoint(ByteLevelCharacter(static_cast<unsigned char>(byte)), &character);
    vocab[character] = next++;
  }
  for (size_t begin = 0; begin < text.size(); ++begin) {
    std::string word;
    for (size_t at = begin; at < text.size(); ++at) {
      AppendCodePoint(ByteLevelCharacter(static_cast<unsigned char>(text[at])), &word);
      if (!vocab.contains(word)) vocab[word] = next++;
    }
  }
  config["model"] = {
      {"type", "BPE"}, {"vocab", vocab}, {"merges", json::array()}, {"ignore_merges", true}};
  const auto tokenizer = MakeTokenizer(config);
  std::vector<std::string> words;
  for (int32_t id : Ids(tokenizer->Encode(text, false, false))) {
    words.push_back(tokenizer->Decode(std::vector<int32_t>{id}, false));
  }
  return words;
}

TEST(PreTokenizerKinds, FamiliesSplitNumbersWordsAndSpacesTheirOwnWay) {
  using W = std::vector<std::string>;
  const std::string text = "I'LL pay 12345  McDonald's";
  EXPECT_EQ(Words("gpt-2", text), (W{"I", "'", "LL", " pay", " 12345", " ", " McDonald", "'s"}));
  EXPECT_EQ(Words("smollm", text),
            (W{"I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", " ", " McDonald", "'s"}));
  EXPECT_EQ(Words("llama-bpe", text),
            (W{"I", "'LL", " pay", " ", "123", "45", " ", " McDonald", "'s"}));
  EXPECT_EQ(Words("qwen2", text),
            (W{"I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " ", " McDonald", "'s"}));
  EXPECT_EQ(Words("tekken", text),
            (W{"I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " ", " Mc", "Donald", "'s"}));
  EXPECT_EQ(Words("gpt-4o", text), (W{"I'LL", " pay", " ", "123", "45", " ", " Mc", "Donald's"}));
  EXPECT_EQ(Words("deepseek-v3", text),
            (W{"I", "'LL", " pay", " ", "123", "45", " ", " McDonald", "'s"}));
  // A space alone before a digit, a space before letters with them; punctuation apart.
  EXPECT_EQ(Words("deepseek-llm", "a, b 12\n"), (W{"a", ",", " b", " ", "1", "2", "\n"}));
  EXPECT_EQ(Words("deepseek-coder", "a, b 12\n"), (W{"a", ",", " b", " ", "1", "2", "\n"}));
}

TEST(PreTokenizerKinds, SentencePieceTextComesBackWithAndWithoutTheFirstSpace) {
  for (const bool prefix : {false, true}) {
    SCOPED_TRACE(prefix);
    json config = SentencePieceTokenizerJson(prefix);
    json vocab = {{"<unk>", 0},
                  {"\xE2\x96\x81", 1},
                  {"a", 2},
                  {"\xE2\x96\x81"
                   "a",
                   3}};
    for (int byte = 0; byte < 256; ++byte) {
      char name[8];
      std::snprintf(name, sizeof(name), "<0x%02X>", byte);
      vocab[name] = 4 + byte;
    }
    config["model"] = {{"type", "BPE"},
                       {"vocab", vocab},
                       {"merges", json::array({json::array({"\xE2\x96\x81", "a"})})},
                       {"unk_token", "<unk>"},
                       {"byte_fallback", true},
                       {"fuse_unk", true}};
    const auto tokenizer = MakeTokenizer(config);
    ASSERT_NE(tokenizer, nullptr);
    const std::vector<int32_t> ids = Ids(tokenizer->Encode("a a", false, false));
    EXPECT_EQ(ids, prefix ? (std::vector<int32_t>{3, 3}) : (std::vector<int32_t>{2, 3}));
    EXPECT_EQ(tokenizer->Decode(ids, false), "a a");
    const std::string text = "w\xC3\xB6rld  a";
    EXPECT_EQ(tokenizer->Decode(Ids(tokenizer->Encode(text, false, false)), false), text);
  }
}

}  // namespace
}  // namespace winnow::engine
