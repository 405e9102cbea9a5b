// Answers with reasoning and calls, as each API words them.
#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/text/tokenizer.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/http/anthropic.h"
#include "server/http/openai_answer.h"
#include "server/http/responses.h"
#include "tests/unit/test_paths.h"

namespace winnow::server {
namespace {

using Json = nlohmann::json;

AnswerParserOptions Parser() {
  return {.tools = ToolFormat::kHermes, .reasoning = ReasoningFormat::kThink};
}

// "<think>\nHm.\n</think>\n\nSo: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>", in messages of four bytes
// and a token each.
std::vector<v1::GenerateResponse> Messages(v1::FinishReason reason, size_t leave_out = 0) {
  std::string text =
      "<think>\nHm.\n</think>\n\nSo: <tool_call>{\"name\": \"f\", \"arguments\": {\"a\": "
      "1}}</tool_call>";
  text.resize(text.size() - leave_out);
  std::vector<v1::GenerateResponse> messages;
  for (size_t at = 0; at < text.size(); at += 4) {
    messages.emplace_back().set_text(text.substr(at, 4));
    messages.back().add_tokens()->set_id(5);
  }
  messages.back().mutable_finish()->set_reason(reason);
  messages.back().mutable_finish()->mutable_usage()->set_generated_tokens(
      static_cast<int32_t>(messages.size()));
  return messages;
}

std::string Body(AnswerFormat& format, const std::vector<v1::GenerateResponse>& messages) {
  std::string out;
  format.Begin("n-1", 7);
  for (const v1::GenerateResponse& message : messages) format.Add(message, 3, out);
  format.End(out);
  return out;
}

// The data of events; "[DONE]" is left out.
std::vector<Json> Events(const std::string& body) {
  std::vector<Json> events;
  for (size_t at = 0; (at = body.find("data: ", at)) != body.npos;) {
    at += 6;
    const size_t end = body.find("\n\n", at);
    if (body[at] == '{') events.push_back(Json::parse(body.substr(at, end - at)));
    at = end;
  }
  return events;
}

const engine::Tokenizer& AnyTokenizer() {
  static const engine::Tokenizer& tokenizer =
      *engine::Tokenizer::Load(SourcePath("models/needle-5m"))->release();
  return tokenizer;
}

OpenAiAnswerOptions Chat(bool stream) {
  OpenAiAnswerOptions options;
  options.stream = stream;
  options.parser = Parser();
  return options;
}

// Two prompts of three tokens and of one, with scores; `n` answers of two tokens to each.
Json Scored(OpenAiAnswerOptions options, int n = 1) {
  options.prompts = options.chat ? 1 : 2;
  options.n = n;
  if (!options.chat) options.echo = {"ab", "c"};
  options.logprobs = true;
  const auto format = MakeOpenAiFormat(options, AnyTokenizer());
  std::string out;
  format->Begin("n-1", 7);
  for (int32_t prompt = 0; prompt < options.prompts; ++prompt) {
    const int32_t tokens = prompt == 0 ? 3 : 1;
    const auto of_choice = [&](int32_t choice) {
      v1::GenerateResponse message;
      message.set_choice(prompt * n + choice);
      return message;
    };
    // The last choice may be the first to say something.
    for (int32_t choice = n - 1; choice >= 0; --choice) {
      for (int32_t i = 0; choice == 0 && i < tokens; ++i) {  // a message each
        v1::GenerateResponse message = of_choice(0);
        v1::PromptToken& token = *message.add_prompt_tokens();
        token.set_id(40 + i);
        if (i > 0) {
          token.set_logprob(i == 1 ? -0.5f : -std::numeric_limits<float>::infinity());
          token.set_rank(i == 1 ? 2 : 77);
          for (int32_t j = 0; j < 3; ++j) {
            v1::TokenLogprob& top = *token.add_top();
            top.set_id(40 + j);
            top.set_logprob(-0.25f * static_cast<float>(1 + j));
            top.set_text(AnyTokenizer().Decode(std::vector{40 + j}, false));
          }
        }
        format->Add(message, tokens, out);
      }
      v1::GenerateResponse message = of_choice(choice);
      message.set_text("xy");
      for (int32_t i = 0; i < 2; ++i) {
        message.add_tokens()->set_id(50 + i);
        message.mutable_tokens(i)->set_logprob(-1.0f - static_cast<float>(i));
      }
      message.mutable_finish()->set_reason(v1::FINISH_REASON_STOP_TOKEN);
      message.mutable_finish()->mutable_usage()->set_prompt_tokens(tokens);
      message.mutable_finish()->mutable_usage()->set_generated_tokens(2);
      format->Add(message, tokens, out);
    }
  }
  format->End(out);
  return Json::parse(out);
}

OpenAiAnswerOptions Completion() {
  OpenAiAnswerOptions options;
  options.chat = false;
  return options;
}

std::string TextOf(int32_t id) { return AnyTokenizer().Decode({&id, 1}, false); }

TEST(AnswerFormatsTest, ScoresOfPromptsComeBeforeTheirAnswers) {
  OpenAiAnswerOptions options = Completion();
  options.echo_logprobs = 1;
  const Json answer = Scored(options, 2);
  ASSERT_EQ(answer["choices"].size(), 4u);
  for (const int i : {0, 1}) {
    const Json& choice = answer["choices"][i];
    EXPECT_EQ(choice["text"], "abxy");
    const Json& logprobs = choice["logprobs"];
    EXPECT_EQ(logprobs["tokens"],
              Json({TextOf(40), TextOf(41), TextOf(42), TextOf(50), TextOf(51)}));
    EXPECT_EQ(logprobs["token_logprobs"], Json({nullptr, -0.5, -9999, -1.0, -2.0}));
    EXPECT_TRUE(logprobs["top_logprobs"][0].is_null());
    // The likeliest one, and the token itself.
    EXPECT_EQ(logprobs["top_logprobs"][1], Json({{TextOf(40), -0.25}, {TextOf(41), -0.5}}));
    EXPECT_EQ(logprobs["text_offset"], Json({0, 1, 2, 3, 4})) << logprobs["tokens"];
    EXPECT_EQ(choice["finish_reason"], "stop");
    EXPECT_FALSE(choice.contains("prompt_logprobs"));
  }
  EXPECT_EQ(answer["choices"][3]["logprobs"]["token_logprobs"], Json({nullptr, -1.0, -2.0}));
  EXPECT_EQ(answer["usage"]["prompt_tokens"], 4);
  EXPECT_EQ(answer["usage"]["completion_tokens"], 8);

  options.drops_answer = true;
  const Json none = Scored(options);
  EXPECT_EQ(none["choices"][0]["text"], "ab");
  EXPECT_EQ(none["choices"][0]["logprobs"]["token_logprobs"], Json({nullptr, -0.5, -9999}));
  EXPECT_EQ(none["choices"][1]["logprobs"]["token_logprobs"], Json::array({nullptr}));
  EXPECT_EQ(none["choices"][1]["finish_reason"], "length");
  EXPECT_EQ(none["usage"]["completion_tokens"], 0);
  EXPECT_EQ(none["usage"]["total_tokens"], 4);
}

TEST(AnswerFormatsTest, PromptLogprobsAreAsVllmHasThem) {
  const auto score = [](double logprob, int rank, int32_t id) {
    return Json({{"logprob", logprob}, {"rank", rank}, {"decoded_token", TextOf(id)}});
  };
  OpenAiAnswerOptions options = Completion();
  options.prompt_logprobs = 1;
  const Json expected = {
      nullptr,
      {{"41", score(-0.5, 2, 41)}, {"40", score(-0.25, 1, 40)}},
      {{"42", score(-9999, 77, 42)}, {"40", score(-0.25, 1, 40)}},
  };
  const Json answer = Scored(options, 2);
  EXPECT_EQ(answer["choices"][0]["prompt_logprobs"], expected);
  EXPECT_EQ(answer["choices"][1]["prompt_logprobs"], expected);
  EXPECT_EQ(answer["choices"][2]["prompt_logprobs"], Json::array({nullptr}));
  EXPECT_EQ(answer["choices"][0]["logprobs"]["token_logprobs"], Json({-1.0, -2.0}));

  options.prompt_logprobs = 0;
  options.echo_logprobs = 2;
  const Json both = Scored(options);
  EXPECT_EQ(both["choices"][0]["prompt_logprobs"][1].size(), 1u);
  EXPECT_EQ(both["choices"][0]["prompt_logprobs"][1]["41"], score(-0.5, 2, 41));
  EXPECT_EQ(both["choices"][0]["logprobs"]["top_logprobs"][1].size(), 2u);

  OpenAiAnswerOptions chat = Chat(false);
  chat.prompt_logprobs = 3;
  const Json chatted = Scored(chat, 2);
  EXPECT_EQ(chatted["prompt_logprobs"][2].size(), 3u) << "the token itself is one of the three";
  EXPECT_EQ(chatted["prompt_logprobs"][2]["42"]["rank"], 77);
  EXPECT_FALSE(chatted["choices"][0].contains("prompt_logprobs"));
  EXPECT_EQ(chatted["choices"][1]["logprobs"]["content"].size(), 2u);
}

TEST(AnswerFormatsTest, AFieldThatScoresHasTheNameItWasAskedUnder) {
  const auto name = [](std::optional<int32_t> echoed, std::optional<int32_t> own) {
    OpenAiAnswerOptions options = Completion();
    options.echo_logprobs = echoed;
    options.prompt_logprobs = own;
    return MakeOpenAiFormat(options, AnyTokenizer())->Field("prompt_logprobs");
  };
  EXPECT_EQ(name({}, {}), "prompt_logprobs") << "of a request that could not be read";
  EXPECT_EQ(name({}, 0), "prompt_logprobs");
  EXPECT_EQ(name(0, {}), "logprobs");
  EXPECT_EQ(name(3, 2), "logprobs");
  EXPECT_EQ(name(2, 3), "prompt_logprobs");
}

TEST(AnswerFormatsTest, ChatHasReasoningAndCallsApart) {
  const auto whole = MakeOpenAiFormat(Chat(false), AnyTokenizer());
  const Json answer = Json::parse(Body(*whole, Messages(v1::FINISH_REASON_STOP_TOKEN)));
  const Json& choice = answer["choices"][0];
  EXPECT_EQ(choice["message"]["reasoning_content"], "Hm.");
  EXPECT_EQ(choice["message"]["reasoning"], "Hm.");
  EXPECT_EQ(choice["message"]["content"], "So:");
  EXPECT_EQ(choice["message"]["tool_calls"][0]["function"],
            Json({{"name", "f"}, {"arguments", "{\"a\": 1}"}}));
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
  const int reasoning = answer["usage"]["completion_tokens_details"]["reasoning_tokens"];
  EXPECT_GE(reasoning, 1);
  EXPECT_LT(reasoning, 8) << "of more than 20";
  const auto cut = MakeOpenAiFormat(Chat(false), AnyTokenizer());
  const Json shorter = Json::parse(Body(*cut, Messages(v1::FINISH_REASON_MAX_TOKENS, 20)));
  EXPECT_EQ(shorter["choices"][0]["finish_reason"], "length");

  const auto streamed = MakeOpenAiFormat(Chat(true), AnyTokenizer());
  std::string reasoned, content, arguments, id;
  int names = 0;
  for (const Json& event : Events(Body(*streamed, Messages(v1::FINISH_REASON_STOP_TOKEN)))) {
    const Json& delta = event["choices"][0]["delta"];
    reasoned += delta.value("reasoning_content", "");
    content += delta.value("content", "");
    if (!delta.contains("tool_calls")) continue;
    const Json& call = delta["tool_calls"][0];
    EXPECT_EQ(call["index"], 0);
    names += call["function"].contains("name");
    if (call.contains("id")) id = call["id"];
    arguments += call["function"]["arguments"].get<std::string>();
  }
  EXPECT_EQ(reasoned, "Hm.");
  EXPECT_EQ(content, "So:");
  EXPECT_EQ(arguments, "{\"a\": 1}");
  EXPECT_EQ(names, 1);
  EXPECT_EQ(id, choice["message"]["tool_calls"][0]["id"]);
}

// Answers in Harmony, a token each for markers and four bytes of text.
std::vector<v1::GenerateResponse> HarmonyMessages() {
  std::vector<v1::GenerateResponse> messages;
  const std::string text =
      "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
      "So:<|end|>"
      "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": "
      "1}";
  for (size_t at = 0; at < text.size();) {
    const bool marker = text.compare(at, 2, "<|") == 0;
    const size_t size =
        marker ? text.find("|>", at) + 2 - at : std::min<size_t>(4, text.find("<|", at) - at);
    std::string part = text.substr(at, size);
    at += size;
    if (marker) part = kMarkerBegin + part + kMarkerEnd;
    messages.emplace_back().set_text(part);
    messages.back().add_tokens()->set_id(5);
  }
  messages.back().mutable_finish()->set_reason(v1::FINISH_REASON_STOP_TOKEN);
  return messages;
}

TEST(AnswerFormatsTest, HarmonyIsWordedByEveryApi) {
  const AnswerParserOptions parser = {.tools = ToolFormat::kHarmony,
                                      .reasoning = ReasoningFormat::kHarmony};
  for (const bool stream : {false, true}) {
    OpenAiAnswerOptions chat;
    chat.stream = stream;
    chat.parser = parser;
    AnthropicAnswerOptions messages;
    messages.stream = stream;
    messages.parser = parser;
    messages.shows_reasoning = true;
    ResponsesAnswerOptions responses;
    responses.stream = stream;
    responses.parser = parser;
    responses.echoed = Json::object();
    const std::string of_chat = Body(*MakeOpenAiFormat(chat, AnyTokenizer()), HarmonyMessages());
    const std::string of_messages = Body(*MakeAnthropicFormat(messages), HarmonyMessages());
    const std::string of_responses = Body(*MakeResponsesFormat(responses), HarmonyMessages());
    for (const std::string& body : {of_chat, of_messages, of_responses}) {
      for (const char* const mark :
           {"<|", "|>", "analysis", "commentary", "functions", "\xfe", "\xff"}) {
        EXPECT_EQ(body.find(mark), body.npos) << mark << " in " << body;
      }
    }
    if (!stream) {
      const Json choice = Json::parse(of_chat)["choices"][0];
      EXPECT_EQ(choice["message"]["reasoning_content"], "Hm.");
      EXPECT_EQ(choice["message"]["content"], "So:");
      EXPECT_EQ(choice["message"]["tool_calls"][0]["function"],
                Json({{"name", "f"}, {"arguments", "{\"a\": 1}"}}));
      EXPECT_EQ(choice["finish_reason"], "tool_calls");
      const Json answer = Json::parse(of_messages);
      EXPECT_EQ(answer["stop_reason"], "tool_use");
      ASSERT_EQ(answer["content"].size(), 3u);
      EXPECT_EQ(answer["content"][0]["thinking"], "Hm.");
      EXPECT_EQ(answer["content"][2]["input"], Json({{"a", 1}}));
      const Json output = Json::parse(of_responses)["output"];
      ASSERT_EQ(output.size(), 3u);
      EXPECT_EQ(output[0]["type"], "reasoning");
      EXPECT_EQ(output[1]["content"][0]["text"], "So:");
      EXPECT_EQ(output[2]["arguments"], "{\"a\": 1}");
      continue;
    }
    std::vector<std::string> kinds;
    for (const Json& event : Events(of_chat)) {
      for (const auto& [key, value] : event["choices"][0]["delta"].items()) {
        if (kinds.empty() || kinds.back() != key) kinds.push_back(key);
      }
    }
    EXPECT_EQ(kinds, (std::vector<std::string>{"content", "role", "reasoning", "reasoning_content",
                                               "content", "tool_calls"}));
    EXPECT_EQ(Events(of_chat).back()["choices"][0]["finish_reason"], "tool_calls");
    EXPECT_EQ(Events(of_messages).end()[-2]["delta"]["stop_reason"], "tool_use");
    EXPECT_EQ(Events(of_responses).back()["type"], "response.completed");
  }
}

TEST(AnswerFormatsTest, MessagesShowReasoningToThoseWhoAsked) {
  for (const bool shows : {false, true}) {
    AnthropicAnswerOptions options;
    options.parser = Parser();
    options.shows_reasoning = shows;
    const auto whole = MakeAnthropicFormat(options);
    const Json answer = Json::parse(Body(*whole, Messages(v1::FINISH_REASON_STOP_TOKEN)));
    EXPECT_EQ(answer["stop_reason"], "tool_use");
    ASSERT_EQ(answer["content"].size(), shows ? 3u : 2u) << answer;
    if (shows) {
      EXPECT_EQ(answer["content"][0],
                Json({{"type", "thinking"}, {"thinking", "Hm."}, {"signature", ""}}));
    }
    EXPECT_EQ(answer["content"][shows]["text"], "So:");
    EXPECT_EQ(answer["content"][shows + 1]["input"], Json({{"a", 1}}));

    options.stream = true;
    const auto streamed = MakeAnthropicFormat(options);
    std::vector<std::string> blocks;
    std::string input;
    int open = -1;
    for (const Json& event : Events(Body(*streamed, Messages(v1::FINISH_REASON_STOP_TOKEN)))) {
      if (event["type"] == "content_block_start") {
        EXPECT_EQ(open, -1) << "one block at a time";
        open = event["index"];
        EXPECT_EQ(open, static_cast<int>(blocks.size()));
        blocks.push_back(event["content_block"]["type"]);
      } else if (event["type"] == "content_block_delta") {
        EXPECT_EQ(event["index"], open);
        input += event["delta"].value("partial_json", "");
      } else if (event["type"] == "content_block_stop") {
        EXPECT_EQ(event["index"], open);
        open = -1;
      }
    }
    const std::vector<std::string> all = {"thinking", "text", "tool_use"};
    EXPECT_EQ(blocks, std::vector<std::string>(all.begin() + (shows ? 0 : 1), all.end()));
    EXPECT_EQ(Json::parse(input), Json({{"a", 1}}));
    EXPECT_EQ(open, -1);
  }
}

TEST(AnswerFormatsTest, MessagesSayWhetherTheContextWasFull) {
  const auto reason = [](int32_t max_tokens, v1::FinishReason finish) {
    AnthropicAnswerOptions options;
    options.max_tokens = max_tokens;
    const auto format = MakeAnthropicFormat(options);
    return Json::parse(Body(*format, Messages(finish)))["stop_reason"].get<std::string>();
  };
  const auto tokens = static_cast<int32_t>(Messages(v1::FINISH_REASON_MAX_TOKENS).size());
  EXPECT_EQ(reason(tokens, v1::FINISH_REASON_MAX_TOKENS), "max_tokens");
  EXPECT_EQ(reason(tokens + 1, v1::FINISH_REASON_MAX_TOKENS), "model_context_window_exceeded");
  EXPECT_EQ(reason(tokens + 1, v1::FINISH_REASON_STOP_TOKEN), "end_turn");
}

TEST(AnswerFormatsTest, ResponsesTellInTheStreamThatThePromptIsTooLong) {
  ResponsesAnswerOptions options;
  options.stream = true;
  options.echoed = Json::object();
  const auto format = MakeResponsesFormat(options);
  EXPECT_FALSE(format->BreaksAtOnce(ToHttpError(400, "invalid_field", "m")));
  const HttpError error = ToHttpError(400, "context_length_exceeded", "m");
  ASSERT_TRUE(format->BreaksAtOnce(error));
  std::string out;
  format->Begin("n-1", 7);
  format->Break(error, out);
  const std::vector<Json> events = Events(out);
  ASSERT_EQ(events.size(), 2u) << out;
  EXPECT_EQ(events[0]["type"], "response.created");
  EXPECT_EQ(events[1]["type"], "response.failed");
  EXPECT_EQ(events[1]["sequence_number"], 1);
  EXPECT_EQ(events[1]["response"]["error"]["code"], "context_length_exceeded");
  // Not a second time in the middle.
  const auto begun = MakeResponsesFormat(options);
  out.clear();
  begun->Begin("n-1", 7);
  begun->Add(Messages(v1::FINISH_REASON_STOP_TOKEN)[0], 3, out);
  begun->Break(error, out);
  const std::vector<Json> later = Events(out);
  EXPECT_EQ(std::count_if(later.begin(), later.end(),
                          [](const Json& event) { return event["type"] == "response.created"; }),
            1);
}

TEST(AnswerFormatsTest, ResponsesHaveAnItemForEach) {
  ResponsesAnswerOptions options;
  options.parser = Parser();
  options.echoed = Json::object();
  const auto whole = MakeResponsesFormat(options);
  const Json answer = Json::parse(Body(*whole, Messages(v1::FINISH_REASON_STOP_TOKEN)));
  ASSERT_EQ(answer["output"].size(), 3u) << answer;
  EXPECT_EQ(answer["output"][0]["type"], "reasoning");
  EXPECT_EQ(answer["output"][0]["content"][0]["text"], "Hm.");
  EXPECT_EQ(answer["output"][1]["content"][0]["text"], "So:");
  EXPECT_EQ(answer["output"][2]["arguments"], "{\"a\": 1}");
  options.stream = true;
  const auto streamed = MakeResponsesFormat(options);
  const std::vector<Json> events = Events(Body(*streamed, Messages(v1::FINISH_REASON_STOP_TOKEN)));
  std::vector<int> begun, ended;
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i]["sequence_number"], i);
    if (events[i]["type"] == "response.output_item.added")
      begun.push_back(events[i]["output_index"]);
    if (events[i]["type"] == "response.output_item.done") {
      ended.push_back(events[i]["output_index"]);
      EXPECT_EQ(events[i]["item"], answer["output"][static_cast<size_t>(ended.back())]);
    }
  }
  EXPECT_EQ(begun, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(ended, begun);
  EXPECT_EQ(events.back()["response"]["output"], answer["output"]);
  // Cut off in a call: what there is, and that it is not all.
  options.stream = false;
  const auto cut = MakeResponsesFormat(options);
  const Json shorter = Json::parse(Body(*cut, Messages(v1::FINISH_REASON_MAX_TOKENS, 16)));
  EXPECT_EQ(shorter["status"], "incomplete");
  EXPECT_EQ(shorter["output"][2]["status"], "incomplete");
}

}  // namespace
}  // namespace winnow::server
