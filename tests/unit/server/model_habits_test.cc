#include "server/http/model_habits.h"

#include <string>

#include "gtest/gtest.h"

namespace winnow::server {
namespace {

const engine::Tokenizer& AnyTokenizer() {
  static const engine::Tokenizer& tokenizer =
      *engine::Tokenizer::Load(std::string(WINNOW_SOURCE_DIR) + "/models/needle-5m")->release();
  return tokenizer;
}

absl::StatusOr<ModelHabits> Find(const std::string& text, std::string_view tools = "auto",
                                 std::string_view reasoning = "auto") {
  return FindModelHabits(engine::ChatTemplate::FromText(text, "<s>", "</s>"), AnyTokenizer(), tools,
                         reasoning);
}

constexpr char kMessages[] = "{% for m in messages %}{{ m.content }}{% endfor %}";
constexpr char kTools[] = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}";

TEST(ModelHabitsTest, TheTemplateSaysHowToolsAreCalled) {
  const auto with = [](const std::string& mark) { return Find(kTools + mark + kMessages); };
  EXPECT_EQ(with("<tool_call>")->tools, ToolFormat::kHermes);
  EXPECT_EQ(with("<|python_tag|>")->tools, ToolFormat::kLlama3);
  EXPECT_EQ(with("[TOOL_CALLS]")->tools, ToolFormat::kMistral);
  EXPECT_EQ(with("")->tools, ToolFormat::kNone) << "shown, but who knows how they are called";
  // A mark alone does not show a tool to the model.
  EXPECT_EQ(Find(std::string("<tool_call>") + kMessages)->tools, ToolFormat::kNone);
  EXPECT_EQ(Find("{{ broken")->tools, ToolFormat::kNone);
  // The operator may know better.
  EXPECT_EQ(Find(kMessages, "llama3_json")->tools, ToolFormat::kLlama3);
  EXPECT_EQ(Find(std::string(kTools) + "<tool_call>" + kMessages, "none")->tools,
            ToolFormat::kNone);
  EXPECT_FALSE(Find(kMessages, "pythonic").ok());
}

TEST(ModelHabitsTest, TheVocabularySaysWhetherThereIsReasoning) {
  EXPECT_FALSE(Find(kMessages)->reasoning) << "this one has no <think>";
  EXPECT_TRUE(Find(kMessages, "auto", "think")->reasoning);
  EXPECT_FALSE(Find(kMessages, "auto", "none")->reasoning);
  EXPECT_FALSE(Find(kMessages, "auto", "deepseek").ok());
}

}  // namespace
}  // namespace winnow::server
