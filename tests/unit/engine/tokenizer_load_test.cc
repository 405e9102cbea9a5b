// tokenizer.json is not trusted: what is malformed is named with its place, what is not supported
// by its name.
#include "tests/unit/engine/tokenizer_testing.h"
#include "tests/unit/test_seed.h"

namespace winnow::engine {
namespace {

using nlohmann::json;

struct Damage {
  const char* name;
  const char* pointer;  // JSON pointer into the tokenizer
  json value;           // what to put there; discarded: remove
  absl::StatusCode code;
  const char* expected;  // part of the error
};

json Remove() { return json(json::value_t::discarded); }

// The byte "A" has no token, and the unknown token, which it would become, has none either.
json UnknownOutsideTheVocabulary() {
  json config = ByteLevelJson();
  config["model"]["vocab"].erase("A");
  config["model"]["unk_token"] = "[UNK]";
  return config;
}

std::vector<Damage> Damages() {
  using enum absl::StatusCode;
  const json token = AddedTokenJson(259, "<|x|>");
  json other_id = token;
  other_id["id"] = 300;
  json negative = token;
  negative["id"] = -1;
  json no_flag = token;
  no_flag.erase("special");
  return {
      {"NoModel", "/model", Remove(), kInvalidArgument, "\"model\" is missing"},
      {"ModelIsAList", "/model", json::array(), kInvalidArgument, "$.model"},
      {"OtherModel", "/model/type", "Unigram", kUnimplemented, "Unigram"},
      {"Dropout", "/model/dropout", 0.1, kUnimplemented, "$.model.dropout"},
      {"MergeWithoutThePrefix", "/model/continuing_subword_prefix", "##", kInvalidArgument,
       "$.model.merges[0]: \"e\" does not begin with"},
      {"PrefixIsANumber", "/model/continuing_subword_prefix", 2, kInvalidArgument,
       "$.model.continuing_subword_prefix"},
      {"LongSuffix", "/model/end_of_word_suffix", std::string(65, '_'), kInvalidArgument,
       "$.model.end_of_word_suffix"},
      {"UnkNotInVocabulary", "", UnknownOutsideTheVocabulary(), kInvalidArgument,
       "$.model.unk_token"},
      {"UnkIsANumber", "/model/unk_token", 7, kInvalidArgument, "$.model.unk_token"},
      {"FlagIsAString", "/model/fuse_unk", "yes", kInvalidArgument, "$.model.fuse_unk"},
      {"EmptyVocabulary", "/model/vocab", json::object(), kInvalidArgument, "$.model.vocab"},
      {"DuplicateId", "/model/vocab/hell", 257, kInvalidArgument, "has the id 257"},
      {"NegativeId", "/model/vocab/hell", -1, kInvalidArgument, "$.model.vocab"},
      {"FractionalId", "/model/vocab/hell", 1.5, kInvalidArgument, "must be an integer"},
      {"HugeId", "/model/vocab/hell", 4000000000, kInvalidArgument, "$.model.vocab"},
      {"IdFarAway", "/model/vocab/hell", 4000000, kInvalidArgument, "4000000"},
      {"MergesMissing", "/model/merges", Remove(), kInvalidArgument, "\"merges\" is missing"},
      {"MergeOfOne", "/model/merges/1", {"l"}, kInvalidArgument, "$.model.merges[1]"},
      {"MergeOfNumbers", "/model/merges/1", {1, 2}, kInvalidArgument, "$.model.merges[1]"},
      {"MixedMerges", "/model/merges/1", "l l", kInvalidArgument, "$.model.merges[1]"},
      {"MergePartUnknown",
       "/model/merges/1",
       {"l", "zz"},
       kInvalidArgument,
       "\"zz\" is not in the vocabulary"},
      {"MergeProductUnknown",
       "/model/merges/1",
       {"l", "z"},
       kInvalidArgument,
       "\"lz\" is not in the vocabulary"},
      {"StringMergeOfThree", "/model/merges", {"h e l"}, kInvalidArgument, "$.model.merges[0]"},
      {"AddedTokensIsAMap", "/added_tokens", json::object(), kInvalidArgument, "$.added_tokens"},
      {"AddedTokenWithOtherId", "/added_tokens", json::array({other_id}), kInvalidArgument,
       "$.added_tokens[0]"},
      {"AddedTokenWithNegativeId", "/added_tokens", json::array({negative}), kInvalidArgument,
       "$.added_tokens[0].id"},
      {"AddedTokenWithoutFlag", "/added_tokens", json::array({no_flag}), kInvalidArgument,
       "\"special\" is missing"},
      {"OtherVersion", "/version", "2.0", kUnimplemented, "$.version"},
      {"OtherNormalizer", "/normalizer", {{"type", "Precompiled"}}, kUnimplemented, "Precompiled"},
      {"NormalizerWithoutType", "/normalizer", json::object(), kInvalidArgument, "$.normalizer"},
      {"OtherPreTokenizer",
       "/pre_tokenizer",
       {{"type", "UnicodeScripts"}},
       kUnimplemented,
       "UnicodeScripts"},
      {"BadRegex",
       "/pre_tokenizer",
       {{"type", "Split"},
        {"pattern", {{"Regex", "(a"}}},
        {"behavior", "Isolated"},
        {"invert", false}},
       kInvalidArgument,
       "$.pre_tokenizer.pattern.Regex"},
      {"UntranslatableRegex",
       "/pre_tokenizer",
       {{"type", "Split"},
        {"pattern", {{"Regex", "\\w+"}}},
        {"behavior", "Isolated"},
        {"invert", false}},
       kUnimplemented,
       "\\w"},
      {"BadBehavior",
       "/pre_tokenizer",
       {{"type", "Split"},
        {"pattern", {{"String", "a"}}},
        {"behavior", "Sideways"},
        {"invert", false}},
       kInvalidArgument,
       "$.pre_tokenizer.behavior"},
      {"MetaspaceOfTwo",
       "/pre_tokenizer",
       {{"type", "Metaspace"}, {"replacement", "ab"}},
       kInvalidArgument,
       "one character"},
      {"OtherDecoder", "/decoder", {{"type", "WordPiece"}}, kUnimplemented, "WordPiece"},
      {"OtherPostProcessor",
       "/post_processor",
       {{"type", "BertProcessing"}},
       kUnimplemented,
       "BertProcessing"},
      {"TemplateWithoutItsToken",
       "/post_processor",
       {{"type", "TemplateProcessing"},
        {"single", json::array({{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}}})},
        {"special_tokens", json::object()}},
       kInvalidArgument,
       "special_tokens"},
      {"TemplateWithIdPastTheVocabulary",
       "/post_processor",
       {{"type", "TemplateProcessing"},
        {"single", json::array({{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}}})},
        {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {100000}}, {"tokens", {"<s>"}}}}}}},
       kInvalidArgument,
       "ids[0]"},
  };
}

class DamagedTokenizer : public ::testing::TestWithParam<Damage> {};

TEST_P(DamagedTokenizer, IsRefusedByName) {
  const Damage& damage = GetParam();
  json config = ByteLevelJson();
  const json::json_pointer pointer(damage.pointer);
  if (pointer.empty()) {
    config = damage.value;
  } else if (damage.value.is_discarded()) {
    config.at(pointer.parent_pointer()).erase(pointer.back());
  } else {
    config[pointer] = damage.value;
  }
  const auto tokenizer = Tokenizer::Parse(config.dump(), "dir/tokenizer.json");
  ASSERT_FALSE(tokenizer.ok());
  EXPECT_EQ(tokenizer.status().code(), damage.code) << tokenizer.status();
  const std::string message(tokenizer.status().message());
  EXPECT_NE(message.find(damage.expected), std::string::npos) << message;
  EXPECT_TRUE(message.starts_with("dir/tokenizer.json: $")) << message;
}

INSTANTIATE_TEST_SUITE_P(Damages, DamagedTokenizer, ::testing::ValuesIn(Damages()),
                         [](const auto& info) { return info.param.name; });

TEST(TokenizerLoad, TextThatIsNoJsonIsRefused) {
  for (const std::string& text :
       {std::string(""), std::string("{"), std::string("[1,2"),
        std::string("{\"version\":\"\xFF\"}"), std::string("nul"), std::string("{} trailing")}) {
    EXPECT_EQ(Tokenizer::Parse(text, "x").status().code(), absl::StatusCode::kInvalidArgument)
        << text;
  }
}

TEST(TokenizerLoad, DeepJsonIsRefused) {
  const std::string deep =
      "{\"model\":" + std::string(100000, '[') + std::string(100000, ']') + "}";
  const absl::Status status = Tokenizer::Parse(deep, "x").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.ToString().find("deeper"), std::string::npos) << status;
}

TEST(TokenizerLoad, AMissingFileIsNotFound) {
  EXPECT_EQ(Tokenizer::Load("/nonexistent").status().code(), absl::StatusCode::kNotFound);
}

TEST(TokenizerLoad, TruncatedFilesAreRefusedAtEveryLength) {
  const std::string text = ByteLevelJson().dump();
  for (size_t size = 0; size < text.size(); size += 37) {
    EXPECT_FALSE(Tokenizer::Parse(text.substr(0, size), "x").ok()) << size;
  }
}

// Any single value replaced by any other must give a tokenizer or a status, and never anything
// else.
TEST(TokenizerLoad, RandomDamageNeverBreaksTheLoader) {
  TestRandom random;
  const json original = ReadJson(SourcePath("tests/golden/tokenizer/llama3.json"))["tokenizer"];
  const json flat = original.flatten();
  std::vector<std::string> pointers;
  for (const auto& [pointer, value] : flat.items()) pointers.push_back(pointer);
  const json values[] = {
      nullptr,       true,           -1,    0, 1e300, 4294967296, "", "x", "\xEF\xBF\xBD",
      json::array(), json::object(), {1, 2}};
  for (int i = 0; i < 150; ++i) {
    json damaged = original;
    damaged[json::json_pointer(pointers[random() % pointers.size()])] =
        values[random() % std::size(values)];
    const auto tokenizer = Tokenizer::Parse(damaged.dump(), "x");
    if (!tokenizer.ok()) continue;
    const auto ids = (*tokenizer)->Encode("Hello <|eot_id|> w\xC3\xB6rld 123", true, true);
    if (ids.ok()) (*tokenizer)->Decode(*ids, false);
  }
}

}  // namespace
}  // namespace winnow::engine
