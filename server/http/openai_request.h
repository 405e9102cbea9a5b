// OpenAI's request bodies to winnow's: types, names and what is not served. Ranges and everything
// else are the validator's (server/validate.h), so that HTTP has no rules of its own.
//
// A field that other servers know and that would change the answer is refused by name if it asks for
// something that winnow does not do; a field that is not known is ignored. docs/http.md lists them.
#ifndef WINNOW_SERVER_HTTP_OPENAI_REQUEST_H_
#define WINNOW_SERVER_HTTP_OPENAI_REQUEST_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "server/http/json_fields.h"
#include "server/http/model_habits.h"
#include "server/parse/answer_parser.h"
#include "winnow/v1/inference.pb.h"

namespace winnow::server {

struct OpenAiRequest {
  v1::GenerateRequest generate;
  std::vector<v1::GenerateRequest>
      more_prompts;   // the same of other prompts, whose answers come behind its own
  std::string model;  // "": the server's
  bool stream = false;
  bool include_usage = false;     // stream_options
  bool continuous_usage = false;  // stream_options.continuous_usage_stats
  bool echo = false;              // the prompt comes before the answer
  // And with its log-probabilities, beside so many of the likeliest tokens.
  std::optional<int32_t> echo_logprobs;
  // vLLM's field: the prompt's log-probabilities in a list of their own. generate.prompt_logprobs is the larger of both.
  std::optional<int32_t> prompt_logprobs;
  bool drops_answer = false;     // max_tokens 0, which is 1 in `generate`
  AnswerParserOptions parser;    // of the answer; in_reasoning is not known here
  std::string structured_field;  // the client's name of what became structured_output
};

// InvalidArgument, with the paths of the fields as the client knows them.
// `habits`: the model's; where it has none, tools are refused.
absl::StatusOr<OpenAiRequest> ParseChatRequest(std::string_view body,
                                               const ModelHabits& habits = {});
absl::StatusOr<OpenAiRequest> ParseCompletionRequest(std::string_view body);

// /tokenize: `prompt` or `messages`.
struct TokenizeBody {
  v1::GenerateRequest prompt;  // the prompt alone
  std::string model;
  bool token_strs = false;
};
absl::StatusOr<TokenizeBody> ParseTokenizeBody(std::string_view body,
                                               const ModelHabits& habits = {});
// /detokenize: `tokens`.
struct DetokenizeBody {
  v1::DetokenizeRequest request;
  std::string model;
};
absl::StatusOr<DetokenizeBody> ParseDetokenizeBody(std::string_view body);
// /v1/completions/render, which takes several prompts.
struct RenderBody {
  std::vector<v1::GenerateRequest> prompts;
  std::string model;
};
absl::StatusOr<RenderBody> ParseRenderBody(std::string_view body);

// Parts that other APIs have in common with these.
// A message's content: a string, or a list of text parts, which are joined by line feeds.
std::string TakeContent(nlohmann::json& content, const std::string& path, Violations& violations);
// `chat_template_kwargs`, and `reasoning_effort` as SetEffort has it.
void TakeTemplateOptions(JsonFields& fields, const ModelHabits& habits, v1::ChatPrompt& chat);
// How much a model is to think: a variable of the chat template, where that has it. "none" is {"enable_thinking": false},
// too, unless the client has set variables of the template itself. Other words are ignored for a model whose template
// knows none. `field`: the client's name for it, of what is refused: a word that a Harmony model was not trained with,
// and another one than in chat_template_kwargs.
void SetEffort(JsonFields& fields, std::string_view field, const std::string& effort,
               const ModelHabits& habits, v1::ChatPrompt& chat);
// `winnow`, `cache_salt` and `vllm_xargs`.
void TakeWinnowOptions(JsonFields& fields, v1::GenerateRequest& out);
void TakeSampling(JsonFields& fields, v1::SamplingOptions& out);
// A prompt alone: `messages` with what belongs to them, or `prompt`. `body`: what `fields` are of.
void TakeTextOrChat(std::string_view body, JsonFields& fields, const ModelHabits& habits,
                    v1::GenerateRequest& out);

// The client's name for a field of v1::GenerateRequest that the validator names: "sampling.top_p" is
// "top_p" to it.
// `structured_field`: of OpenAiRequest.
std::string OpenAiField(std::string_view field, bool chat, std::string_view structured_field = {});

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_OPENAI_REQUEST_H_
