#include "server/tokenize_command.h"
#include "tests/unit/test_paths.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace winnow::server {
namespace {

using nlohmann::json;

class TokenizeCommand : public testing::Test {
 protected:
  TokenizeCommand() {
    const std::string dir = SourcePath("models/needle-5m");
    tokenizer_ = engine::Tokenizer::Load(dir).value();
    chat_ = engine::ChatTemplate::Load(dir).value();
  }

  std::vector<json> Answers(const std::string& lines) {
    std::istringstream in(lines);
    std::ostringstream out;
    all_answered_ = TokenizeLines(*tokenizer_, chat_, in, out);
    std::vector<json> answers;
    std::istringstream written(out.str());
    for (std::string line; std::getline(written, line);) answers.push_back(json::parse(line));
    return answers;
  }

  std::unique_ptr<engine::Tokenizer> tokenizer_;
  engine::ChatTemplate chat_;
  bool all_answered_ = false;
};

TEST_F(TokenizeCommand, TextAndIdsGoBothWays) {
  const auto answers = Answers(
      "{\"text\":\"Hello, world!\"}\n"
      "{\"text\":\"Hello, world!\",\"add_special_tokens\":false}\n"
      "{\"ids\":[0,47,442,323,19,294,279,646,8]}\n"
      "{\"ids\":[0,47,442,323,19,294,279,646,8],\"skip_special_tokens\":true}\n");
  ASSERT_EQ(answers.size(), 4u);
  EXPECT_EQ(answers[0], json::parse("{\"ids\":[0,47,442,323,19,294,279,646,8]}"));
  EXPECT_EQ(answers[1], json::parse("{\"ids\":[47,442,323,19,294,279,646,8]}"));
  EXPECT_EQ(answers[2]["text"], "<|begin_of_text|>Hello, world!");
  EXPECT_EQ(answers[3]["text"], "Hello, world!");
  EXPECT_TRUE(all_answered_);
}

TEST_F(TokenizeCommand, ParseSpecialDecidesWhoMayWriteControlTokens) {
  const auto answers = Answers(
      "{\"text\":\"<|end|>\",\"add_special_tokens\":false}\n"
      "{\"text\":\"<|end|>\",\"add_special_tokens\":false,\"parse_special\":false}\n");
  EXPECT_EQ(answers[0]["ids"], json::array({2}));
  EXPECT_GT(answers[1]["ids"].size(), 1u);
}

TEST_F(TokenizeCommand, ChatGivesTheRenderedTextAndItsIds) {
  const auto answers = Answers(
      "{\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}],\"add_generation_prompt\":true}"
      "\n");
  EXPECT_EQ(answers[0]["text"], "<|begin_of_text|><|user|>\nHello<|end|>\n<|assistant|>\n");
  EXPECT_EQ(answers[0]["ids"][0], 0);  // one BOS, from the template
  EXPECT_NE(answers[0]["ids"][1], 0);
}

TEST_F(TokenizeCommand, ABadLineGivesAnErrorInItsPlaceAndTheOthersAreAnswered) {
  const auto answers = Answers(
      "{\"text\":\"a\"}\nnot "
      "json\n[]\n{}\n{\"text\":7}\n{\"text\":\"a\",\"typo\":true}\n{\"text\":\"\xFF\"}\n"
      "{\"ids\":[-1]}\n{\"ids\":[99999999999]}\n{\"ids\":\"1\"}\n{\"messages\":[{\"role\":"
      "\"rob ot\",\"content\":\"\"}]}\n"
      "{\"messages\":[]}\n\n{\"text\":\"a\",\"add_special_tokens\":\"yes\"}\n{\"text\":\"a\"}\n");
  ASSERT_EQ(answers.size(), 14u);
  EXPECT_FALSE(all_answered_);
  EXPECT_EQ(answers.front(), answers.back());
  EXPECT_TRUE(answers.front().contains("ids"));
  for (size_t i = 1; i + 1 < answers.size(); ++i) EXPECT_TRUE(answers[i].contains("error")) << i;
}

}  // namespace
}  // namespace winnow::server
