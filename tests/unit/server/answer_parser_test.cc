#include "server/parse/answer_parser.h"

#include <random>

#include "gtest/gtest.h"
#include "server/parse/json_call.h"

namespace winnow::server {
namespace {

using Kind = AnswerPiece::Kind;
using Pieces = std::vector<AnswerPiece>;

// Pieces of one kind that follow one another, joined: where text was cut is not the parser's doing.
Pieces Joined(const Pieces& pieces) {
  Pieces joined;
  for (const AnswerPiece& piece : pieces) {
    const bool text = piece.kind == Kind::kContent || piece.kind == Kind::kReasoning ||
                      piece.kind == Kind::kCallArguments;
    EXPECT_FALSE(text && piece.text.empty()) << "a piece without text";
    if (text && !joined.empty() && joined.back().kind == piece.kind) {
      joined.back().text += piece.text;
    } else {
      joined.push_back(piece);
    }
  }
  return joined;
}

Pieces Parsed(const AnswerParserOptions& options, const std::vector<std::string>& parts) {
  const auto parser = MakeAnswerParser(options);
  Pieces all;
  for (const std::string& part : parts) {
    Pieces pieces;
    parser->Add(part, pieces);
    all.insert(all.end(), pieces.begin(), pieces.end());
  }
  Pieces pieces;
  parser->Finish(pieces);
  all.insert(all.end(), pieces.begin(), pieces.end());
  return Joined(all);
}

// The pieces of `text`, and that they are the same however it is cut.
Pieces Parsed(const AnswerParserOptions& options, const std::string& text) {
  const Pieces whole = Parsed(options, std::vector<std::string>{text});
  for (size_t at = 0; at <= text.size(); ++at) {
    EXPECT_EQ(Parsed(options, {text.substr(0, at), text.substr(at)}), whole)
        << text << " cut at " << at;
  }
  std::vector<std::string> bytes;
  for (const char c : text) bytes.emplace_back(1, c);
  EXPECT_EQ(Parsed(options, bytes), whole) << text << " byte by byte";
  return whole;
}

Pieces operator+(Pieces a, const Pieces& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
Pieces Content(const std::string& text) { return {{Kind::kContent, text}}; }
Pieces Reasoning(const std::string& text) { return {{Kind::kReasoning, text}}; }
Pieces Call(const std::string& name, const std::string& arguments) {
  return {{Kind::kCallBegin, name}, {Kind::kCallArguments, arguments}, {Kind::kCallEnd, ""}};
}

const AnswerParserOptions kHermes = {.tools = ToolFormat::kHermes};
const AnswerParserOptions kLlama = {.tools = ToolFormat::kLlama3, .names = {"f", "get_weather"}};
const AnswerParserOptions kMistral = {.tools = ToolFormat::kMistral};
const AnswerParserOptions kThink = {.reasoning = ReasoningFormat::kThink};

TEST(AnswerParserTest, HermesCallsStandBetweenTags) {
  EXPECT_EQ(Parsed(kHermes, R"(<tool_call>
{"name": "get_weather", "arguments": {"city": "Köln", "days": [1, {"a": "}"}]}}
</tool_call>)"),
            Call("get_weather", R"({"city": "Köln", "days": [1, {"a": "}"}]})"));
  EXPECT_EQ(
      Parsed(kHermes,
             "I look.\n\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n"
             "<tool_call>\n{\"arguments\": {\"x\": 1}, \"name\": \"g\"}\n</tool_call>\nDone. "),
      Content("I look.") + Call("f", "{}") + Call("g", "{\"x\": 1}") + Content("Done. "));
  // Without a call, and with what only looks like one.
  EXPECT_EQ(Parsed(kHermes, "a < b, <tool_cal, \n"), Content("a < b, <tool_cal, \n"));
  EXPECT_EQ(Parsed(kHermes, "<tool_call>no JSON</tool_call> x"),
            Content("<tool_call>no JSON</tool_call> x"));
  EXPECT_EQ(Parsed(kHermes, R"(<tool_call>{"name": 3}</tool_call>)"),
            Content(R"(<tool_call>{"name": 3}</tool_call>)"));
  EXPECT_EQ(Parsed(kHermes, R"(<tool_call>{"arguments": {}}x)"),
            Content(R"(<tool_call>{"arguments": {}}x)"));
}

TEST(AnswerParserTest, ArgumentsMayBeAStringOrMissingAndAnEndMayBeToo) {
  EXPECT_EQ(
      Parsed(kHermes, R"(<tool_call>{"name": "f", "arguments": "{\"a\": \"ä\\n\"}"}</tool_call>)"),
      Call("f", R"({"a": "ä\n"})"));
  EXPECT_EQ(Parsed(kHermes, R"(<tool_call>{"name": "f"}</tool_call>)"), Call("f", "{}"));
  EXPECT_EQ(Parsed(kHermes, R"(<tool_call>{"name": "f", "arguments": null, "id": 7}</tool_call>)"),
            Call("f", "{}"));
  // max_tokens came first: what there is.
  EXPECT_EQ(Parsed(kHermes, R"(<tool_call>{"name": "f", "arguments": {"a": "b)"),
            Call("f", R"({"a": "b)"));
  EXPECT_EQ(Parsed(kHermes, R"(x <tool_call>{"nam)"), Content(R"(x <tool_call>{"nam)"));
  // An escape at the end of a key and of a string.
  EXPECT_EQ(
      Parsed(kHermes, R"(<tool_call>{"\u006eame": "f\"g", "arguments": {"\\": "\\"}}</tool_call>)"),
      Call("f\"g", R"({"\\": "\\"})"));
}

TEST(AnswerParserTest, LlamaCallsAreTheWholeAnswer) {
  EXPECT_EQ(Parsed(kLlama, R"({"name": "get_weather", "parameters": {"city": "x"}})"),
            Call("get_weather", R"({"city": "x"})"));
  EXPECT_EQ(
      Parsed(
          kLlama,
          R"( <|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "f", "parameters": {"a": 1}})"),
      Call("f", "{}") + Call("f", R"({"a": 1})"));
  // JSON that calls nothing that is known.
  EXPECT_EQ(Parsed(kLlama, R"({"name": "Zoë", "age": 3})"),
            Content(R"({"name": "Zoë", "age": 3})"));
  EXPECT_EQ(Parsed(kLlama, R"({"answer": [1, 2]} and more)"),
            Content(R"({"answer": [1, 2]} and more)"));
  EXPECT_EQ(Parsed(kLlama, R"(Use {"name": "f", "parameters": {}})"),
            Content(R"(Use {"name": "f", "parameters": {}})"));
  EXPECT_EQ(Parsed(kLlama, "<|python_tag|>print(1)"), Content("<|python_tag|>print(1)"));
  EXPECT_EQ(Parsed(kLlama, " \n"), Content(" \n"));
}

TEST(AnswerParserTest, MistralCallsFollowAMarkerInAListOrByName) {
  EXPECT_EQ(
      Parsed(
          kMistral,
          R"([TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}])"),
      Call("f", R"({"a": [1]})") + Call("g", "{}"));
  EXPECT_EQ(Parsed(kMistral, R"(Let me see. [TOOL_CALLS]f[ARGS]{"a": {"b": "]"}}[TOOL_CALLS]g{})"),
            Content("Let me see.") + Call("f", R"({"a": {"b": "]"}})") + Call("g", "{}"));
  EXPECT_EQ(Parsed(kMistral, "[TOOL_CALLS]{\"name\": \"f\", \"arguments\": {}}"), Call("f", "{}"));
  EXPECT_EQ(Parsed(kMistral, "[TOOL_CALLS][]"), Pieces());
  EXPECT_EQ(Parsed(kMistral, "[TOOL_CALLS]what"), Content("[TOOL_CALLS]what"));
  EXPECT_EQ(Parsed(kMistral, "[1, 2] [TOOL"), Content("[1, 2] [TOOL"));
  EXPECT_EQ(Parsed(kMistral, R"([TOOL_CALLS]f[ARGS]{"a": )"), Call("f", R"({"a": )"));
}

TEST(AnswerParserTest, ReasoningStandsFirst) {
  EXPECT_EQ(Parsed(kThink, "<think>\nLet me <see>.\n\n</think>\n\nYes."),
            Reasoning("Let me <see>.") + Content("Yes."));
  EXPECT_EQ(Parsed(kThink, "\n<think></think>Yes."), Content("Yes."));
  EXPECT_EQ(Parsed(kThink, "Yes. <think>no</think>"), Content("Yes. <think>no</think>"));
  EXPECT_EQ(Parsed(kThink, " <thin"), Content(" <thin"));
  EXPECT_EQ(Parsed(kThink, "<think>and no end </thin"), Reasoning("and no end </thin"));
  AnswerParserOptions opened = kThink;
  opened.in_reasoning = true;
  EXPECT_EQ(Parsed(opened, "\nHm.\n</think>\n\nYes.\n"), Reasoning("Hm.") + Content("Yes.\n"));
  AnswerParserOptions both = kHermes;
  both.reasoning = ReasoningFormat::kThink;
  EXPECT_EQ(
      Parsed(both, "<think>a <tool_call> b</think>\n<tool_call>{\"name\": \"f\"}</tool_call>"),
      Reasoning("a <tool_call> b") + Call("f", "{}"));
}

TEST(AnswerParserTest, OneCallMayBeAllThatIsWanted) {
  AnswerParserOptions one = kHermes;
  one.one_call = true;
  EXPECT_EQ(
      Parsed(
          one,
          "a <tool_call>{\"name\": \"f\"}</tool_call> b <tool_call>{\"name\": \"g\"}</tool_call>"),
      Content("a") + Call("f", "{}"));
}

const AnswerParserOptions kHarmony = {.tools = ToolFormat::kHarmony,
                                      .names = {"f", "get_weather"},
                                      .reasoning = ReasoningFormat::kHarmony};

// A text with its control tokens marked, as the engine does: those are all that stands between "<|" and "|>".
std::string Marked(std::string text) {
  for (size_t at = 0; (at = text.find("<|", at)) != text.npos;) {
    text.insert(at, 1, kMarkerBegin);
    at = text.find("|>", at) + 2;
    text.insert(at, 1, kMarkerEnd);
  }
  return text;
}
Pieces Harmony(const std::string& text, const AnswerParserOptions& options = kHarmony) {
  return Parsed(options, Marked(text));
}

TEST(HarmonyParserTest, ChannelsAreReasoningAndContent) {
  EXPECT_EQ(Harmony("<|channel|>analysis<|message|>Hm, <2 | 3>?<|end|>"
                    "<|start|>assistant<|channel|>final<|message|>Yes.\n<|return|>"),
            Reasoning("Hm, <2 | 3>?") + Content("Yes.\n"));
  // A format of the final answer, and what the prompt ends with where the answer repeats it.
  EXPECT_EQ(Harmony("<|start|>assistant<|channel|>final <|constrain|>json<|message|>{}"),
            Content("{}"));
  // Commentary to nobody is a preamble. Messages of one kind are paragraphs.
  EXPECT_EQ(Harmony("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<"
                    "|message|>I look.<|end|>"
                    "<|start|>assistant<|channel|>analysis<|message|>b<|end|>"
                    "<|start|>assistant<|channel|>final<|message|>Done.<|end|>"
                    "<|start|>assistant<|channel|>final<|message|><|end|>"),
            Reasoning("a") + Content("I look.") + Reasoning("\n\nb") + Content("\n\nDone."));
}

TEST(HarmonyParserTest, ARecipientIsCalledWhereverItStands) {
  const Pieces call = Call("get_weather", R"({"city": "Köln"})");
  for (const char* const header :
       {"<|channel|>commentary to=functions.get_weather <|constrain|>json",
        "<|start|>assistant<|channel|>commentary to=functions.get_weather json",
        " to=functions.get_weather<|channel|>commentary <|constrain|>json",
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json",
        "<|channel|>analysis to=functions.get_weather code",
        "<|channel|>commentaryto=functions.get_weather <|constrain|>json",
        "<|channel|>commentary <|constrain|>json to=functions.get_weather",
        "<|channel|>commentary to=get_weather <|constrain|>json",  // without its namespace
        "<|channel|>commentary<|channel|>commentary to=functions.get_weather"}) {
    EXPECT_EQ(Harmony(std::string(header) + R"(<|message|>{"city": "Köln"}<|call|>)"), call)
        << header;
    EXPECT_EQ(Harmony(std::string(header) + R"(<|message|> {"city": "Köln"})"), call) << header;
  }
  EXPECT_EQ(Harmony("<|channel|>analysis<|message|>I need "
                    "f.<|end|><|start|>assistant<|channel|>commentary<|message|>So:"
                    "<|end|><|start|>assistant<|channel|>commentary to=functions.f "
                    "<|constrain|>json<|message|><|call|>"),
            Reasoning("I need f.") + Content("So:") + Call("f", "{}"));
  EXPECT_EQ(
      Harmony(
          "<|channel|>commentary to=functions.a.b<|message|>{}<|call|>"
          "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{\"x\": 1}<|call|>"),
      Call("a.b", "{}") + Call("f", "{\"x\": 1}"));
  AnswerParserOptions one = kHarmony;
  one.one_call = true;
  EXPECT_EQ(Harmony("<|channel|>commentary to=functions.f<|message|>{}<|call|>"
                    "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>",
                    one),
            Call("f", "{}"));
}

TEST(HarmonyParserTest, WhatTheClientCannotBeToldIsReasoning) {
  const Pieces query = Reasoning(R"({"query": "x"})");
  EXPECT_EQ(
      Harmony(R"(<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>)"),
      query);
  EXPECT_EQ(Harmony(R"(<|channel|>commentary to=python code<|message|>{"query": "x"}<|call|>)"),
            query);
  EXPECT_EQ(Harmony(R"(<|channel|>commentary to=functions. json<|message|>{"query": "x"}<|call|>)"),
            query);
  AnswerParserOptions offered = kHarmony;
  offered.names = {"browser.search"};
  EXPECT_EQ(
      Harmony(R"(<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>)",
              offered),
      Call("browser.search", R"({"query": "x"})"));
  AnswerParserOptions none = kHarmony;
  none.tools = ToolFormat::kNone;
  EXPECT_EQ(Harmony(R"(<|channel|>commentary to=functions.f json<|message|>{"query": "x"}<|call|>)",
                    none),
            query);
  // Turns that the model made up.
  EXPECT_EQ(Harmony("<|start|>functions.f to=assistant<|channel|>commentary<|message|>rain<|end|>"
                    "<|start|>user<|message|>Thanks<|end|>"),
            Reasoning("rain\n\nThanks"));
  // Roles that hear everything are no recipients.
  EXPECT_EQ(Harmony("<|channel|>commentary to=assistant<|channel|>final<|message|>Yes"),
            Content("Yes"));
  EXPECT_EQ(Harmony("<|channel|>final to=user<|message|>Yes"), Content("Yes"));
}

TEST(HarmonyParserTest, BrokenSequencesLoseNoText) {
  EXPECT_EQ(Harmony("Hello"), Content("Hello")) << "no message at all";
  EXPECT_EQ(Harmony("Hello <|end|>there"), Content("Hello \n\nthere"));
  EXPECT_EQ(Harmony("<|message|>Hello"), Content("Hello")) << "no channel";
  EXPECT_EQ(Harmony("<|start|>assistant<|message|>Hello"), Content("Hello"));
  EXPECT_EQ(Harmony("<|channel|>story<|message|>Hello"), Content("Hello")) << "an unknown one";
  // An end is missing, a start, and both.
  EXPECT_EQ(
      Harmony("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b"),
      Reasoning("a") + Content("b"));
  EXPECT_EQ(Harmony("<|channel|>analysis<|message|>a<|end|>assistant<|channel|>final<|message|>b"),
            Reasoning("a") + Content("b"));
  EXPECT_EQ(Harmony("<|channel|>analysis<|message|>a<|channel|>final<|message|>b"),
            Reasoning("a") + Content("b"));
  EXPECT_EQ(Harmony("<|channel|>analysis<|message|>a<|end|>Then b"),
            Reasoning("a") + Content("Then b"));
  // Markers where they mean nothing.
  EXPECT_EQ(Harmony("<|channel|>final<|message|>a<|message|>b<|constrain|>c<|reserved_7|>d<|return|"
                    "><|call|>"),
            Content("abcd"));
  AnswerParserOptions shows = kHarmony;
  shows.shows_control_tokens = true;
  EXPECT_EQ(Harmony("<|channel|>final<|message|>a<|message|>b<|reserved_7|>", shows),
            Content("ab<|reserved_7|>"));
  // Cut off: in a header, and behind the name of what is called.
  for (const char* const cut :
       {"", "<|channel|>", "<|channel|>fin", "<|start|>assistant", " to=functions.f",
        "<|channel|>analysis<|end|>", "<|channel|>analysis<|message|><|end|>\n",
        "<|end|>assistant to=functions.f"}) {
    EXPECT_EQ(Harmony(cut), Pieces()) << cut;
  }
  EXPECT_EQ(Harmony("<|channel|>commentary to=functions.f<|message|>{\"a\": "),
            Call("f", "{\"a\": "));
  EXPECT_EQ(Harmony("<|channel|>commentary to=functions.f<|message|>"),
            (Pieces{{Kind::kCallBegin, "f"}, {Kind::kCallEnd, ""}}));
  // A header is short; a marker, too.
  const std::string longer(600, 'x');
  EXPECT_EQ(Harmony("<|channel|>final" + longer + "<|message|>b"), Content("final" + longer + "b"));
  EXPECT_EQ(Harmony(" to=" + longer), Content(" to=" + longer));
  EXPECT_EQ(Harmony("<|channel|>final<|message|>a<|" + longer + "|>b"), Content("ab"));
  EXPECT_EQ(Parsed(kHarmony, Marked("<|channel|>final<|message|>a") + kMarkerBegin + "<|end"),
            Content("a"));
}

TEST(HarmonyParserTest, TextThatReadsLikeAMarkerIsText) {
  const std::string quoted =
      "It ends with <|end|>, or <|start|>assistant<|channel|>final<|message|>.";
  EXPECT_EQ(Parsed(kHarmony, Marked("<|channel|>final<|message|>") + quoted + Marked("<|return|>")),
            Content(quoted));
}

TEST(HarmonyParserTest, RandomSequencesOfMarkersKeepTheOrderOfCalls) {
  std::mt19937 random(11);
  const std::vector<std::string> parts = {
      "<|start|>",       "<|channel|>", "<|message|>", "<|end|>",  "<|call|>",  "<|constrain|>",
      "<|return|>",      "<|x|>",       "assistant",   "analysis", "final",     "commentary",
      " to=functions.f", " to=python",  " ",           "text",     "{\"a\": 1}"};
  for (int round = 0; round < 1000; ++round) {
    std::string text;
    for (int i = 0; i < 12; ++i) text += parts[random() % parts.size()];
    bool called = false;
    for (const AnswerPiece& piece : Harmony(text)) {
      if (piece.kind == Kind::kCallBegin) {
        EXPECT_FALSE(std::exchange(called, true)) << text;
      } else if (piece.kind == Kind::kCallEnd) {
        EXPECT_TRUE(std::exchange(called, false)) << text;
      } else {
        EXPECT_EQ(called, piece.kind == Kind::kCallArguments) << text;
        EXPECT_EQ(piece.text.find_first_of("\xfe\xff"), piece.text.npos) << text;
      }
    }
    EXPECT_FALSE(called) << text;
  }
}

TEST(HarmonyParserTest, TextGoesOnAsItComes) {
  const auto parser = MakeAnswerParser(kHarmony);
  Pieces pieces;
  parser->Add(Marked("<|channel|>final<|message|>word <"), pieces);
  EXPECT_EQ(pieces, Content("word <"));
  pieces.clear();
  parser->Add(
      Marked("<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{\"a\""),
      pieces);
  EXPECT_EQ(pieces, (Pieces{{Kind::kCallBegin, "f"}, {Kind::kCallArguments, "{\"a\""}}));
}

TEST(AnswerParserTest, NothingIsLostOrHeldForLong) {
  // Content without markers is the text itself, and at most a marker's length is held back.
  std::mt19937 random(7);
  const std::string alphabet = "<>tool_call/{}\":\\ \n[]TOOL_CALLSxn";
  for (const AnswerParserOptions& options : {kHermes, kMistral}) {
    for (int round = 0; round < 500; ++round) {
      std::string text;
      for (int i = 0; i < 40; ++i) text += alphabet[random() % alphabet.size()];
      const Pieces pieces = Parsed(options, text);
      ASSERT_EQ(pieces.size(), 1u) << text;
      EXPECT_EQ(pieces[0].text, text);
    }
  }
  const auto parser = MakeAnswerParser(kHermes);
  Pieces pieces;
  parser->Add("word", pieces);
  EXPECT_EQ(pieces, Content("word"));
  // Arguments go on as they come.
  pieces.clear();
  parser->Add("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"long", pieces);
  EXPECT_EQ(pieces, (Pieces{{Kind::kCallBegin, "f"}, {Kind::kCallArguments, "{\"a\": \"long"}}));
}

TEST(AnswerParserTest, NamesOfFormats) {
  for (const char* const name : {"none", "hermes", "llama3_json", "mistral", "harmony"}) {
    ASSERT_TRUE(ToolFormatOf(name).has_value());
    EXPECT_EQ(ToolFormatName(*ToolFormatOf(name)), name);
  }
  EXPECT_FALSE(ToolFormatOf("openai").has_value());
}

}  // namespace
}  // namespace winnow::server
