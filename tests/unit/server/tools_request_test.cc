#include "server/http/tools_request.h"

#include <memory>

#include "engine/grammar/grammar.h"
#include "engine/grammar/grammar_check.h"
#include "gtest/gtest.h"
#include "kernels/sample.h"
#include "server/http/anthropic.h"
#include "server/http/openai_request.h"
#include "server/http/responses.h"
#include "server/ordered_json.h"
#include "server/strings.h"

namespace winnow::server {
namespace {

using Kind = AnswerPiece::Kind;

constexpr int32_t kCallsToken = 256, kArgumentsToken = 257, kEnd = 258;

constexpr char kTools[] = R"([{"type":"function","function":{"name":"f","parameters":
    {"type":"object","properties":{"z":{"enum":["a}","b"]},"a":{"type":"integer"}},"required":["z"]}}},
    {"type":"function","function":{"name":"g"}}])";

absl::StatusOr<OpenAiRequest> Chat(const std::string& fields, const ModelHabits& habits) {
  return ParseChatRequest(R"({"messages":[{"role":"user","content":"x"}],"tools":)" +
                              std::string(kTools) + (fields.empty() ? "" : "," + fields) + "}",
                          habits);
}

ModelHabits Habits(ToolFormat format) {
  ModelHabits habits;
  habits.tools = format;
  if (format == ToolFormat::kMistral) habits.calls_token = kCallsToken;
  return habits;
}

TEST(OrderedJsonTest, MembersAreFoundWhereverTheyAreAndKeepTheirOrder) {
  constexpr std::string_view kBody =
      " {\"a\" : \"}\\\"{\", \"b\":[1,{\"tools\":2}] ,\"too\\u006cs\":{\"z\":1,\"a\":[]}, "
      "\"n\":-1.5e3,\"tools\" : {\"z\":2, \"a\":3} }";
  EXPECT_EQ(TextOfMember(kBody, "tools"), "{\"z\":2, \"a\":3}") << "of several the last";
  EXPECT_EQ(TextOfMember(kBody, "n"), "-1.5e3");
  EXPECT_EQ(TextOfMember(kBody, "b"), "[1,{\"tools\":2}]");
  EXPECT_EQ(TextOfMember(kBody, "a"), "\"}\\\"{\"");
  EXPECT_EQ(TextOfMember(kBody, "c"), "");
  EXPECT_EQ(TextOfMember("{}", "c"), "");
  EXPECT_EQ(TextOfMember("{\"c\":true}", "c"), "true");
  EXPECT_EQ(ParseOrdered("{\"z\":1,\"a\":2}")->dump(), "{\"z\":1,\"a\":2}");
  std::string many = "{\"k\":{", other = "[";
  for (int i = 0; i <= kMaxOrderedMembers; ++i)
    many += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\":0";
  EXPECT_FALSE(ParseOrdered(many + "}}").ok());
  // So many are of one object, not of all.
  for (int i = 0; i <= kMaxOrderedMembers; ++i) other += (i > 0 ? ",{\"a\":0}" : "{\"a\":0}");
  EXPECT_TRUE(ParseOrdered(other + "]").ok());
  EXPECT_FALSE(ParseOrdered(std::string(100, '[') + std::string(100, ']')).ok());
  EXPECT_FALSE(ParseOrdered("{\"a\":").ok());
}

TEST(ToolsRequestTest, ToolsAreShownAsTheyCameUnlessNoneMayBeCalled) {
  const auto chat = Chat("", Habits(ToolFormat::kHermes));
  ASSERT_TRUE(chat.ok()) << chat.status();
  ASSERT_EQ(chat->generate.chat().tools_size(), 2);
  EXPECT_LT(chat->generate.chat().tools(0).find("\"z\""),
            chat->generate.chat().tools(0).find("\"a\":{"));
  EXPECT_EQ(chat->parser.names, (std::vector<std::string>{"f", "g"}));
  EXPECT_FALSE(chat->generate.has_structured_output());
  EXPECT_FALSE(chat->generate.show_special_tokens());
  EXPECT_TRUE(Chat("", Habits(ToolFormat::kMistral))->generate.show_special_tokens())
      << "its marks are control tokens";
  EXPECT_EQ(
      Chat(R"("tool_choice":"none")", Habits(ToolFormat::kHermes))->generate.chat().tools_size(),
      0);
  for (const auto& [fields, habits] : std::vector<std::pair<std::string, ModelHabits>>{
           {"", {}},
           {R"("tool_choice":"sometimes")", Habits(ToolFormat::kHermes)},
           {R"("tool_choice":{"type":"function","function":{"name":"h"}})",
            Habits(ToolFormat::kHermes)},
           {R"("tool_choice":"required","guided_regex":"a")", Habits(ToolFormat::kHermes)}}) {
    EXPECT_FALSE(Chat(fields, habits).ok()) << fields;
  }
  ModelHabits no_token = Habits(ToolFormat::kMistral);
  no_token.calls_token.reset();
  EXPECT_FALSE(Chat(R"("tool_choice":"required")", no_token).ok());
}

#ifdef WINNOW_HAS_XGRAMMAR

// Bytes, the control tokens of calls, and an end.
const engine::GrammarLibrary& ByteLibrary() {
  static const engine::GrammarLibrary& library = *[] {
    engine::GrammarVocabulary vocabulary;
    for (int byte = 0; byte < 256; ++byte)
      vocabulary.tokens.emplace_back(1, static_cast<char>(byte));
    vocabulary.tokens.insert(vocabulary.tokens.end(), {"\xff[TOOL_CALLS]", "\xff[ARGS]", ""});
    vocabulary.end_tokens = {kEnd};
    return engine::GrammarLibrary::Make(vocabulary)->release();
  }();
  return library;
}

// Whether the request's grammar takes an answer as a whole; [TOOL_CALLS] and [ARGS] stand for their tokens.
bool Takes(const OpenAiRequest& request, const std::string& answer) {
  const engine::GrammarSource source{engine::GrammarKind::kStructuralTag,
                                     request.generate.structured_output().structural_tag()};
  EXPECT_TRUE(engine::CheckGrammarSource(source).ok());
  const auto compiled = ByteLibrary().Compile(source);
  EXPECT_TRUE(compiled.ok()) << compiled.status();
  const auto state = (*ByteLibrary().Load(*compiled))->NewState();
  for (size_t at = 0; at < answer.size();) {
    int32_t token = static_cast<unsigned char>(answer[at]);
    size_t size = 1;
    for (const auto& [text, id] : {std::pair{std::string("[TOOL_CALLS]"), kCallsToken},
                                   {std::string("[ARGS]"), kArgumentsToken}}) {
      if (answer.compare(at, text.size(), text) == 0) token = id, size = text.size();
    }
    if (!kernels::IsAllowed(state->AllowedTokens(), token) || !state->Accept(token)) return false;
    at += size;
  }
  return kernels::IsAllowed(state->AllowedTokens(), kEnd);
}

// The names that an answer calls, as its parser reads it.
std::vector<std::string> Called(const OpenAiRequest& request, const std::string& answer) {
  const auto parser = MakeAnswerParser(request.parser);
  std::vector<AnswerPiece> pieces;
  parser->Add(answer, pieces);
  parser->Finish(pieces);
  std::vector<std::string> names;
  for (const AnswerPiece& piece : pieces) {
    if (piece.kind == Kind::kCallBegin) names.push_back(piece.text);
    EXPECT_NE(piece.kind, Kind::kContent) << piece.text;
  }
  return names;
}

TEST(ToolsRequestTest, WhatMustBeCalledIsCalledInTheModelsOwnWay) {
  ModelHabits named = Habits(ToolFormat::kMistral);
  named.arguments_token = kArgumentsToken;
  struct Case {
    ModelHabits habits;
    std::string one, two;
  };
  for (
      const Case& c :
      {Case{
           Habits(ToolFormat::kHermes),
           "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"z\": \"a}\"}}\n</tool_call>",
           "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>\n"
           "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"z\": \"b\", \"a\": 3}}\n</tool_call>"},
       Case{Habits(ToolFormat::kLlama3), R"({"name": "f", "parameters": {"z": "a}"}})", ""},
       Case{
           Habits(ToolFormat::kMistral), R"([TOOL_CALLS][{"name": "f", "arguments": {"z": "a}"}}])",
           R"([TOOL_CALLS][{"name": "g", "arguments": {}}, {"name": "f", "arguments": {"z": "b"}}])"},
       Case{named, R"([TOOL_CALLS]f[ARGS]{"z": "a}"})",
            R"([TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]f[ARGS]{"z": "b"})"}}) {
    const auto required = Chat(R"("tool_choice":"required")", c.habits);
    ASSERT_TRUE(required.ok()) << required.status();
    EXPECT_TRUE(Takes(*required, c.one)) << c.one;
    EXPECT_EQ(Called(*required, c.one), (std::vector<std::string>{"f"}));
    EXPECT_FALSE(Takes(*required, "Well, " + c.one));
    EXPECT_FALSE(Takes(*required, ""));
    EXPECT_EQ(Takes(*required, c.two), !c.two.empty()) << c.two;
    const auto alone = Chat(R"("tool_choice":"required","parallel_tool_calls":false)", c.habits);
    EXPECT_TRUE(Takes(*alone, c.one));
    EXPECT_FALSE(Takes(*alone, c.two));
    if (!c.two.empty()) {
      EXPECT_EQ(Called(*required, c.two), (std::vector<std::string>{"g", "f"}));
      EXPECT_EQ(Called(*alone, c.two), (std::vector<std::string>{"g"}));
    }
    const auto one = Chat(R"("tool_choice":{"type":"function","function":{"name":"g"}})", c.habits);
    EXPECT_FALSE(Takes(*one, c.one));
  }
}

TEST(ToolsRequestTest, StrictArgumentsAreKeptWhereTheModelMayCallOrNot) {
  const std::string body =
      R"({"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f",
      "strict":true,"parameters":{"type":"object","properties":{"z":{"type":"boolean"}},"required":["z"]}}},
      {"type":"function","function":{"name":"g","parameters":{"type":"object"}}}]})";
  const auto chat = ParseChatRequest(body, Habits(ToolFormat::kHermes));
  ASSERT_TRUE(chat.ok()) << chat.status();
  EXPECT_TRUE(Takes(*chat, "I need no tool."));
  EXPECT_TRUE(
      Takes(*chat, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"z\": true}}\n</tool_call>"));
  EXPECT_FALSE(
      Takes(*chat, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"z\": 1}}\n</tool_call>"));
  EXPECT_TRUE(Takes(
      *chat, "Look: <tool_call>\n{\"name\": \"g\", \"arguments\": {\"any\": [1]}}\n</tool_call>"));
  const auto llama = ParseChatRequest(body, Habits(ToolFormat::kLlama3));
  EXPECT_NE(std::string(llama.status().message()).find("strict"), std::string::npos)
      << llama.status();
}

// Bytes, and Harmony's control tokens by their texts. Tokens without bytes are never drawn, or end an answer.
struct HarmonyVocabulary {
  static constexpr int32_t kFirst = 256;
  std::vector<std::string> control = {"<|start|>",  "<|channel|>",   "<|message|>",
                                      "<|end|>",    "<|constrain|>", "<|call|>",
                                      "<|return|>", "<|endoftext|>", "<|reserved|>"};
  std::vector<int32_t> ends = {261, 262, 263};

  HarmonyTokens tokens() const { return {256, 257, 258, 259, 260, {262, 261}}; }
  std::unique_ptr<engine::GrammarLibrary> Library() const {
    engine::GrammarVocabulary vocabulary;
    for (int byte = 0; byte < 256; ++byte)
      vocabulary.tokens.emplace_back(1, static_cast<char>(byte));
    for (const std::string& text : control) vocabulary.tokens.push_back("\xff" + text);
    for (const int32_t id : ends) vocabulary.tokens[static_cast<size_t>(id)].clear();
    vocabulary.end_tokens = ends;
    return std::move(*engine::GrammarLibrary::Make(vocabulary));
  }
};

ModelHabits HarmonyHabits() {
  ModelHabits habits;
  habits.tools = ToolFormat::kHarmony;
  habits.reasoning = ReasoningFormat::kHarmony;
  habits.has_effort = true;
  habits.harmony = HarmonyVocabulary().tokens();
  return habits;
}

// Whether the request's grammar takes an answer as a whole.
bool TakesHarmony(const v1::GenerateRequest& request, const std::string& answer) {
  const HarmonyVocabulary vocabulary;
  static const engine::GrammarLibrary& library = *vocabulary.Library().release();
  const engine::GrammarSource source{engine::GrammarKind::kStructuralTag,
                                     request.structured_output().structural_tag()};
  EXPECT_TRUE(engine::CheckGrammarSource(source).ok());
  const auto compiled = library.Compile(source);
  EXPECT_TRUE(compiled.ok()) << compiled.status();
  if (!compiled.ok()) return false;
  const auto grammar = *library.Load(*compiled);
  const auto state = grammar->NewState();
  for (size_t at = 0; at < answer.size();) {
    int32_t token = static_cast<unsigned char>(answer[at]);
    size_t size = 1;
    for (size_t i = 0; i < vocabulary.control.size(); ++i) {
      const std::string& text = vocabulary.control[i];
      if (answer.compare(at, text.size(), text) != 0) continue;
      token = HarmonyVocabulary::kFirst + static_cast<int32_t>(i);
      size = text.size();
    }
    if (!kernels::IsAllowed(state->AllowedTokens(), token) || !state->Accept(token)) return false;
    at += size;
  }
  return kernels::IsAllowed(state->AllowedTokens(), 261) &&
         kernels::IsAllowed(state->AllowedTokens(), 263);
}

constexpr char kThought[] = "<|channel|>analysis<|message|>Hm {<|end|><|start|>assistant";
constexpr char kPreamble[] = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant";

TEST(HarmonyRequestTest, WhatMustBeCalledIsCalledAfterAnyThoughts) {
  const auto required = Chat(R"("tool_choice":"required")", HarmonyHabits());
  ASSERT_TRUE(required.ok()) << required.status();
  const std::string arguments = R"(<|message|>{"z": "a}", "a": 3})";
  for (const std::string& before :
       {std::string(), std::string(kThought), std::string(kThought) + kPreamble + kThought}) {
    for (const char* const header :
         {"<|channel|>commentary to=functions.f <|constrain|>json",
          "<|channel|>commentary to=functions.f json", " to=functions.f<|channel|>commentary json",
          " to=functions.f<|channel|>commentary <|constrain|>json"}) {
      EXPECT_TRUE(TakesHarmony(required->generate, before + header + arguments))
          << before << header;
    }
    EXPECT_TRUE(TakesHarmony(required->generate,
                             before + "<|channel|>commentary to=functions.g json<|message|>{}"));
    EXPECT_FALSE(TakesHarmony(required->generate, before + "<|channel|>final<|message|>No."));
    EXPECT_FALSE(TakesHarmony(required->generate,
                              before + "<|channel|>commentary to=functions.h json<|message|>{}"));
    EXPECT_FALSE(TakesHarmony(required->generate,
                              before + "<|channel|>commentary to=functions.f json<|message|>{}"));
    EXPECT_FALSE(TakesHarmony(required->generate, before));
  }
  // A turn ends with its call, and a text of a message has no marker and no end in it.
  EXPECT_FALSE(TakesHarmony(required->generate,
                            "<|channel|>commentary to=functions.g json<|message|>{}<|end|>"));
  for (const char* const marker :
       {"<|call|>", "<|return|>", "<|endoftext|>", "<|channel|>", "<|message|>", "<|constrain|>"}) {
    EXPECT_FALSE(TakesHarmony(
        required->generate,
        Concat("<|channel|>analysis<|message|>a", marker,
               "<|end|><|start|>assistant<|channel|>commentary to=functions.g json<|message|>{}")))
        << marker;
  }
  const auto named =
      Chat(R"("tool_choice":{"type":"function","function":{"name":"g"}})", HarmonyHabits());
  EXPECT_TRUE(TakesHarmony(
      named->generate,
      std::string(kThought) + "<|channel|>commentary to=functions.g json<|message|>{}"));
  EXPECT_FALSE(
      TakesHarmony(named->generate, "<|channel|>commentary to=functions.f json" + arguments));
  EXPECT_FALSE(Chat(R"("tool_choice":"required","guided_regex":"a")", HarmonyHabits()).ok());
}

TEST(HarmonyRequestTest, StrictArgumentsAreKeptWhereTheModelMayCallOrNot) {
  const auto chat = ParseChatRequest(
      R"({"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f",
      "strict":true,"parameters":{"type":"object","properties":{"z":{"type":"boolean"}},"required":["z"]}}},
      {"type":"function","function":{"name":"g","parameters":{"type":"object"}}}]})",
      HarmonyHabits());
  ASSERT_TRUE(chat.ok()) << chat.status();
  const auto takes = [&](const std::string& answer) {
    return TakesHarmony(chat->generate, kThought + answer);
  };
  EXPECT_TRUE(takes("<|channel|>final<|message|>I need no tool: {}"));
  EXPECT_TRUE(takes(R"(<|channel|>commentary to=functions.f json<|message|>{"z": true})"));
  EXPECT_FALSE(takes(R"(<|channel|>commentary to=functions.f json<|message|>{"z": 1})"));
  EXPECT_TRUE(takes(R"(<|channel|>commentary to=functions.g json<|message|>{"any": [1]})"));
}

TEST(HarmonyRequestTest, AFormIsOfTheFinalMessage) {
  const auto chat = [](const std::string& fields) {
    return ParseChatRequest(R"({"messages":[{"role":"user","content":"x"}],)" + fields + "}",
                            HarmonyHabits());
  };
  struct Case {
    std::string fields, good, bad;
  };
  for (
      const Case& c : {
          Case{R"("response_format":{"type":"json_schema","json_schema":{"name":"n","schema":
                   {"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}}})",
               R"({"a": 1})", R"({"a": 1, "b": 2})"},
          Case{
              R"("response_format":{"type":"json_schema","json_schema":{"name":"n","strict":false,"schema":
                   {"type":"object","properties":{"a":{"type":"object","properties":{}}},"required":["a"]}}})",
              R"({"a": {"c": 1}, "b": 2})", R"({"b": 2})"},
          Case{R"("response_format":{"type":"json_object"})", R"({"x": [1, {"y": null}]})", "[]"},
          Case{R"("guided_regex":"[ab]{2}")", "ab", "abc"},
          Case{R"("guided_choice":["left","right"])", "left", "up"},
          Case{R"("guided_grammar":"root ::= \"x\" | \"y\"")", "y", "z"},
          Case{
              R"("response_format":{"type":"structural_tag","format":{"type":"const_string","value":"it"}})",
              "it", "no"},
      }) {
    const auto request = chat(c.fields);
    ASSERT_TRUE(request.ok()) << request.status();
    const std::string final = "<|channel|>final<|message|>";
    EXPECT_TRUE(TakesHarmony(request->generate, final + c.good)) << c.fields;
    EXPECT_TRUE(TakesHarmony(request->generate, kThought + final + c.good)) << c.fields;
    EXPECT_FALSE(TakesHarmony(request->generate, kPreamble + final + c.good))
        << "it would be content";
    EXPECT_FALSE(TakesHarmony(request->generate, final + c.bad)) << c.fields;
    EXPECT_FALSE(TakesHarmony(request->generate, c.good)) << c.fields;
    EXPECT_NE(request->structured_field, "tools");
  }
  for (const char* const bad :
       {R"("response_format":{"type":"structural_tag","structures":[],"triggers":[]})",
        R"("guided_choice":[""])", R"("structured_outputs":{"json":"[1"})",
        R"("structured_outputs":{"json":"[1]"})"}) {
    EXPECT_FALSE(chat(bad).ok()) << bad;
  }
}

#endif  // WINNOW_HAS_XGRAMMAR

}  // namespace
}  // namespace winnow::server
