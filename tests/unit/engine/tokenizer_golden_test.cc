// Tokenisation equals the reference's, on its recorded answers.
#include <filesystem>

#include "fmt/ranges.h"
#include "tests/unit/engine/tokenizer_testing.h"

namespace winnow::engine {
namespace {

using nlohmann::json;

TEST(TokenizerGolden, NeedleEqualsTheReferenceOnSharedStrings) {
  const std::string path = SharedPath("golden/tokenizer_golden.json");
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no shared data";
  const json golden = ReadJson(path);
  auto tokenizer = Tokenizer::Load(SourcePath("models/needle-5m"));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  ASSERT_FALSE(golden["strings"].empty());
  for (const json& item : golden["strings"]) {
    const std::string text = item["text"];
    EXPECT_EQ(Ids((*tokenizer)->Encode(text, true, true)), item["ids"].get<std::vector<int32_t>>())
        << text;
    const std::vector<int32_t> ids = Ids((*tokenizer)->Encode(text, false, true));
    EXPECT_EQ(ids, item["ids_no_special"].get<std::vector<int32_t>>()) << text;
    EXPECT_EQ((*tokenizer)->Decode(ids, false), item["decoded"].get<std::string>());
  }
}

class TokenizerGoldenKind : public ::testing::TestWithParam<std::string> {};

TEST_P(TokenizerGoldenKind, CasesEqualTheReference) {
  const json golden = ReadJson(SourcePath("tests/golden/tokenizer/" + GetParam() + ".json"));
  const auto tokenizer = MakeTokenizer(golden["tokenizer"]);
  ASSERT_NE(tokenizer, nullptr);
  ASSERT_GE(golden["cases"].size(), 10u);
  for (const json& item : golden["cases"]) {
    const std::string text = item["text"];
    const std::vector<int32_t> ids = Ids(tokenizer->Encode(text, true, true));
    EXPECT_EQ(ids, item["ids"].get<std::vector<int32_t>>()) << text;
    EXPECT_EQ(Ids(tokenizer->Encode(text, false, false)),
              item["ids_plain"].get<std::vector<int32_t>>())
        << text;
    EXPECT_EQ(tokenizer->Decode(ids, true), item["decoded"].get<std::string>());
    EXPECT_EQ(tokenizer->Decode(item["random_ids"].get<std::vector<int32_t>>(), false),
              item["random_decoded"].get<std::string>())
        << item["random_ids"];
  }
}

// The strings are made here as in make_tokenizer_goldens.py; the golden holds a digest for each
// ten.
TEST_P(TokenizerGoldenKind, ThousandsOfStringsEqualTheReference) {
  const json golden = ReadJson(SourcePath("tests/golden/tokenizer/" + GetParam() + ".json"));
  const auto pieces =
      ReadJson(SourcePath("tests/golden/tokenizer/pieces.json")).get<std::vector<std::string>>();
  const auto specials = golden["specials"].get<std::vector<std::string>>();
  const auto tokenizer = MakeTokenizer(golden["tokenizer"]);
  ASSERT_NE(tokenizer, nullptr);
  Lcg lcg(golden["seed"].get<uint64_t>());
  const size_t chunk = golden["chunk"];
  ASSERT_GE(golden["digests"].size() * chunk, 1000u);
  for (const json& digest : golden["digests"]) {
    std::string record;
    std::string texts;
    for (size_t i = 0; i < chunk; ++i) {
      std::string text;
      for (uint64_t n = 1 + lcg.Below(8); n > 0; --n) {
        const uint64_t kind = lcg.Below(8);
        if (kind == 0) {
          const uint64_t c = lcg.Below(0x110000 - 0x800);
          AppendCodePoint(static_cast<char32_t>(c < 0xD800 ? c : c + 0x800), &text);
        } else if (kind == 1) {
          text += specials[lcg.Below(specials.size())];
        } else if (kind == 2) {
          text += std::string(1 + lcg.Below(3), ' ');
        } else {
          text += pieces[lcg.Below(pieces.size())];
        }
      }
      texts += text + "\n---\n";
      const std::vector<int32_t> ids = Ids(tokenizer->Encode(text, true, true));
      record += fmt::format("{}|{}|{}\n", fmt::join(ids, ","), tokenizer->Decode(ids, false),
                            tokenizer->Decode(ids, true));
    }
    char hex[17];
    std::snprintf(hex, sizeof(hex), "%016llx", static_cast<unsigned long long>(Fnv1a(record)));
    ASSERT_EQ(hex, digest.get<std::string>()) << "one of:\n" << texts;
  }
}

INSTANTIATE_TEST_SUITE_P(AllKinds, TokenizerGoldenKind, ::testing::ValuesIn(GoldenKinds()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace winnow::engine
