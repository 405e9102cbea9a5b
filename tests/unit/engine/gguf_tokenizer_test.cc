#include "engine/gguf_tokenizer.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/model_text.h"
#include "engine/text/tokenizer_normalizer.h"
#include "engine/text/unicode/unicode_text.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/gguf_files.h"
#include "tests/unit/engine/model_files.h"

namespace winnow::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int32_t kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kByte = 6;

// The bytes' tokens (0 to 255), "he" (256), "hel" (257), a control token (258), "<think>" (259) and an empty one (260).
GgufBuilder ByteLevel() {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) {
    tokens.emplace_back();
    AppendCodePoint(ByteLevelCharacter(static_cast<unsigned char>(byte)), &tokens.back());
  }
  std::vector<int32_t> types(256, kNormal);
  for (const auto& [text, type] :
       {std::pair("he", kNormal), std::pair("hel", kNormal), std::pair("<|end|>", kControl),
        std::pair("<think>", kUserDefined), std::pair("", kNormal)}) {
    tokens.emplace_back(text);
    types.push_back(type);
  }
  GgufBuilder file;
  file.Set("tokenizer.ggml.model", "gpt2");
  file.Set("tokenizer.ggml.pre", "smollm");
  file.Set("tokenizer.ggml.tokens", tokens);
  file.Set("tokenizer.ggml.token_type", types);
  file.Set("tokenizer.ggml.merges", std::vector<std::string>{"h e", "he l"});
  file.Set("tokenizer.ggml.eos_token_id", uint32_t{258});
  return file;
}

// SentencePiece: three special tokens, the bytes (3 to 258), and pieces from 259 on, each with its score.
GgufBuilder SentencePiece() {
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>"};
  std::vector<int32_t> types = {kUnknown, kControl, kControl};
  std::vector<float> scores(259, 0);
  for (int byte = 0; byte < 256; ++byte) {
    char text[8];
    snprintf(text, sizeof(text), "<0x%02X>", byte);
    tokens.emplace_back(text);
    types.push_back(kByte);
  }
  for (const auto& [text, score] :
       {std::pair("\u2581", -10.f), std::pair("a", -11.f), std::pair("b", -12.f),
        std::pair("c", -13.f), std::pair("ab", -2.f), std::pair("bc", -1.f), std::pair("abc", -3.f),
        std::pair("\u2581a", -4.f), std::pair("<", -14.f), std::pair("s>", -15.f),
        std::pair("s", -16.f), std::pair(">", -17.f)}) {
    tokens.emplace_back(text);
    types.push_back(kNormal);
    scores.push_back(score);
  }
  GgufBuilder file;
  file.Set("tokenizer.ggml.model", "llama");
  file.Set("tokenizer.ggml.tokens", tokens);
  file.Set("tokenizer.ggml.scores", scores);
  file.Set("tokenizer.ggml.token_type", types);
  file.Set("tokenizer.ggml.bos_token_id", uint32_t{1});
  file.Set("tokenizer.ggml.eos_token_id", uint32_t{2});
  return file;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const GgufBuilder& file) {
  const TempDir dir;
  WriteText(dir.File("m.gguf"), file.Build());
  return LoadTokenizer(dir.File("m.gguf"));
}

std::vector<int32_t> Encode(const Tokenizer& tokenizer, std::string_view text,
                            bool add_special = false, bool parse_special = false) {
  const auto ids = tokenizer.Encode(text, add_special, parse_special);
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.value_or(std::vector<int32_t>());
}

TEST(GgufTokenizer, ByteLevelVocabulariesEncodeAndDecode) {
  const auto loaded = Load(ByteLevel());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Tokenizer& tokenizer = **loaded;
  EXPECT_EQ(tokenizer.vocab_size(), 260);  // the last token is empty, which is none
  EXPECT_THAT(Encode(tokenizer, "hello"), ElementsAre(257, 'l', 'o'));
  EXPECT_THAT(Encode(tokenizer, "12"), ElementsAre('1', '2'));
  EXPECT_EQ(tokenizer.Decode(Encode(tokenizer, "hé, 漢\n"), false), "hé, 漢\n");
  EXPECT_TRUE(tokenizer.IsSpecial(258));
  EXPECT_FALSE(tokenizer.IsSpecial(259));
}

TEST(GgufTokenizer, ControlTokensAreReadWhereTheyMayBeAndUserDefinedOnesEverywhere) {
  const auto loaded = Load(ByteLevel());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_THAT(Encode(**loaded, "a<|end|>", false, true), ElementsAre('a', 258));
  EXPECT_EQ(Encode(**loaded, "<|end|>").size(), 7u);
  EXPECT_THAT(Encode(**loaded, "<think>a"), ElementsAre(259, 'a'));
}

TEST(GgufTokenizer, NoMergeGivesAControlToken) {
  GgufBuilder file = ByteLevel();
  file.Remove("tokenizer.ggml.token_type");
  std::vector<int32_t> types(261, kNormal);
  types[257] = kControl;  // "hel"
  file.Set("tokenizer.ggml.token_type", types);
  const auto loaded = Load(file);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_THAT(Encode(**loaded, "hel"), ElementsAre(256, 'l'));
  EXPECT_THAT(Encode(**loaded, "hel", false, true), ElementsAre(257));
}

TEST(GgufTokenizer, WhatBeginsAndEndsATextIsAddedWhereTheFileSaysSo) {
  GgufBuilder file = ByteLevel();
  EXPECT_THAT(Encode(**Load(file), "a", true), ElementsAre('a'));
  file.Set("tokenizer.ggml.add_eos_token", true);
  EXPECT_THAT(Encode(**Load(file), "a", true), ElementsAre('a', 258));
  file.Set("tokenizer.ggml.bos_token_id", uint32_t{258});
  file.Set("tokenizer.ggml.add_bos_token", true);
  EXPECT_THAT(Encode(**Load(file), "a", true), ElementsAre(258, 'a', 258));
  // Llama 3's names mean a BOS where nothing is said.
  GgufBuilder llama3 = ByteLevel();
  llama3.Remove("tokenizer.ggml.pre");
  llama3.Set("tokenizer.ggml.pre", "llama-bpe");
  llama3.Set("tokenizer.ggml.bos_token_id", uint32_t{258});
  EXPECT_THAT(Encode(**Load(llama3), "a", true), ElementsAre(258, 'a'));
  llama3.Set("tokenizer.ggml.add_bos_token", false);
  EXPECT_THAT(Encode(**Load(llama3), "a", true), ElementsAre('a'));
}

TEST(GgufTokenizer, WordsAreCutAsTheNameSays) {
  for (const auto& [name, expected] : {std::pair("smollm", 2), std::pair("gpt-2", 1)}) {
    GgufBuilder file = ByteLevel();
    file.Remove("tokenizer.ggml.pre");
    file.Set("tokenizer.ggml.pre", name);
    file.Remove("tokenizer.ggml.tokens");
    file.Remove("tokenizer.ggml.token_type");
    file.Remove("tokenizer.ggml.merges");
    file.Remove("tokenizer.ggml.eos_token_id");
    file.Set("tokenizer.ggml.tokens", std::vector<std::string>{"1", "2", "12"});
    file.Set("tokenizer.ggml.merges", std::vector<std::string>{"1 2"});
    const auto loaded = Load(file);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(Encode(**loaded, "12").size(), static_cast<size_t>(expected)) << name;
  }
}

TEST(GgufTokenizer, SentencePieceMergesTheBestScoreFirst) {
  const auto loaded = Load(SentencePiece());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Tokenizer& tokenizer = **loaded;
  // "bc" has the best score, so that "ab" and "abc" from "ab" are not made; "a" and "bc" then give "abc".
  EXPECT_THAT(Encode(tokenizer, "abc", true), ElementsAre(1, 259, 265));
  EXPECT_THAT(Encode(tokenizer, "a"), ElementsAre(266));
  EXPECT_THAT(Encode(tokenizer, " a"),
              ElementsAre(259, 266));  // the text's own space, and one before it
  EXPECT_EQ(tokenizer.Decode(Encode(tokenizer, " a abc"), true), " a abc");
}

TEST(GgufTokenizer, SentencePieceFallsBackToBytes) {
  const auto loaded = Load(SentencePiece());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_THAT(Encode(**loaded, "aé"), ElementsAre(266, 3 + 0xC3, 3 + 0xA9));
  EXPECT_EQ((*loaded)->Decode(Encode(**loaded, "aé\n"), true), "aé\n");
}

TEST(GgufTokenizer, SentencePieceNeverSpellsAControlToken) {
  // "<" and "s>" are tokens, and what they make together is one, too.
  const auto loaded = Load(SentencePiece());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_THAT(Encode(**loaded, "<s>"), ElementsAre(259, 267, 268));
  EXPECT_THAT(Encode(**loaded, "<s>", false, true), ElementsAre(1));
}

TEST(GgufTokenizer, SentencePieceWithoutAPrefix) {
  GgufBuilder file = SentencePiece();
  file.Set("tokenizer.ggml.add_space_prefix", false);
  file.Set("tokenizer.ggml.add_bos_token", false);
  const auto loaded = Load(file);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_THAT(Encode(**loaded, "a", true), ElementsAre(260));
  EXPECT_EQ((*loaded)->Decode(Encode(**loaded, " a"), true), " a");
}

struct Refusal {
  std::string what;
  GgufBuilder file;
  std::string error;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

TEST(GgufTokenizer, WhatIsLackingOrWrongIsNamed) {
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  const auto with = [](GgufBuilder file, const char* key, auto value) {
    file.Remove(key);
    file.Set(key, value);
    return file;
  };
  const auto without = [](GgufBuilder file, const char* key) {
    file.Remove(key);
    return file;
  };
  GgufBuilder twice = ByteLevel();
  twice.Remove("tokenizer.ggml.tokens");
  twice.Remove("tokenizer.ggml.token_type");
  twice.Remove("tokenizer.ggml.eos_token_id");
  twice.Set("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b", "a"});
  GgufBuilder text = twice;
  text.Remove("tokenizer.ggml.tokens");
  text.Set("tokenizer.ggml.tokens", std::vector<std::string>{"a", "\xFF"});
  GgufBuilder cut = twice;
  cut.Remove("tokenizer.ggml.tokens");
  cut.Remove("tokenizer.ggml.merges");
  cut.Set("tokenizer.ggml.model", "llama");
  cut.Remove("tokenizer.ggml.model");
  cut.Set("tokenizer.ggml.model", "llama");
  std::vector<std::string> runs;  // every way to cut a run of one letter in two is two tokens
  for (size_t i = 1; i <= 1024; ++i) runs.emplace_back(i, 'a');
  cut.Set("tokenizer.ggml.tokens", runs);
  cut.Set("tokenizer.ggml.scores", std::vector<float>(1024, -1));
  const std::vector<Refusal> refusals = {
      {"model", with(ByteLevel(), "tokenizer.ggml.model", "bert"),
       "\"bert\" is not supported; winnow has gpt2, llama", kUnimplemented},
      {"no model", without(ByteLevel(), "tokenizer.ggml.model"),
       "\"tokenizer.ggml.model\": missing"},
      {"words", with(ByteLevel(), "tokenizer.ggml.pre", "default"),
       "\"default\" is not supported; winnow has", kUnimplemented},
      {"no words", without(ByteLevel(), "tokenizer.ggml.pre"), "\"tokenizer.ggml.pre\": missing"},
      {"no tokens", without(ByteLevel(), "tokenizer.ggml.tokens"),
       "\"tokenizer.ggml.tokens\": missing"},
      {"tokens", with(ByteLevel(), "tokenizer.ggml.tokens", uint32_t{4}),
       "must be an array of strings"},
      {"types", with(ByteLevel(), "tokenizer.ggml.token_type", std::vector<int32_t>{1}),
       "must be an array of 261 integers"},
      {"a type", with(ByteLevel(), "tokenizer.ggml.token_type", std::vector<int32_t>(261, 9)),
       "has no type from 0 to 6"},
      {"no merges", without(ByteLevel(), "tokenizer.ggml.merges"),
       "\"tokenizer.ggml.merges\": missing"},
      {"a merge", with(ByteLevel(), "tokenizer.ggml.merges", std::vector<std::string>{"he"}),
       "\"he\" is not two tokens"},
      {"a merge of what is no token",
       with(ByteLevel(), "tokenizer.ggml.merges", std::vector<std::string>{"he y"}),
       "m.gguf: as tokenizer.json: $.model.merges[0]: \"hey\" is not in the vocabulary"},
      {"a token twice", twice, "token 2, \"a\", is there twice: as 0, too"},
      {"a token that is no text", text, "token 1, \"\\ufffd\", is not valid UTF-8"},
      {"an end", with(ByteLevel(), "tokenizer.ggml.eos_token_id", uint32_t{261}),
       "must be an integer from 0 to 260, is 261"},
      {"no beginning", with(ByteLevel(), "tokenizer.ggml.add_bos_token", true),
       "there is no tokenizer.ggml.bos_token_id to add"},
      {"no scores", without(SentencePiece(), "tokenizer.ggml.scores"),
       "\"tokenizer.ggml.scores\": missing"},
      {"scores", with(SentencePiece(), "tokenizer.ggml.scores", std::vector<float>{1}),
       "must be an array of 271 float32"},
      {"no score", with(SentencePiece(), "tokenizer.ggml.scores", std::vector<float>(271, NAN)),
       "has no number as its score"},
      {"white space", with(SentencePiece(), "tokenizer.ggml.remove_extra_whitespaces", true),
       "true is not supported", kUnimplemented},
      {"too many ways", cut, "ways, too many"},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.what);
    const auto loaded = Load(refusal.file);
    ASSERT_FALSE(loaded.ok());
    EXPECT_EQ(loaded.status().code(), refusal.code) << loaded.status();
    EXPECT_THAT(std::string(loaded.status().message()), HasSubstr(refusal.error));
    EXPECT_THAT(std::string(loaded.status().message()), HasSubstr("m.gguf: "));
  }
}

TEST(GgufTokenizer, TheChatTemplateIsTheFiles) {
  GgufBuilder file = ByteLevel();
  const auto read = [](const GgufBuilder& builder) {
    const std::string bytes = builder.Build();
    return ReadGgufChatTemplate(*GgufContents::Parse(AsBytes(bytes)), "m.gguf");
  };
  ASSERT_TRUE(read(file).ok());
  EXPECT_FALSE(read(file)->has_value());
  file.Set("tokenizer.chat_template", "{{ messages }}");
  const auto chat = read(file);
  ASSERT_TRUE(chat.ok()) << chat.status();
  ASSERT_TRUE(chat->has_value());
  EXPECT_EQ((*chat)->text, "{{ messages }}");
  EXPECT_EQ((*chat)->bos_token, "");
  EXPECT_EQ((*chat)->eos_token, "<|end|>");
  file.Remove("tokenizer.chat_template");
  file.Set("tokenizer.chat_template", uint32_t{1});
  EXPECT_EQ(read(file).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace winnow::engine
