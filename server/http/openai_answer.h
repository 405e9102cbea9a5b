// Answers as OpenAI words them: chat.completion, chat.completion.chunk, text_completion.
#ifndef WINNOW_SERVER_HTTP_OPENAI_ANSWER_H_
#define WINNOW_SERVER_HTTP_OPENAI_ANSWER_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/text/tokenizer.h"
#include "nlohmann/json.hpp"
#include "server/http/answer_format.h"
#include "server/parse/answer_parser.h"

namespace winnow::server {

struct OpenAiAnswerOptions {
  bool chat = true;  // else the older /v1/completions
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
  bool logprobs = false;
  // How many prompts it answers; each has n choices.
  int32_t prompts = 1;
  // The prompts' texts, to come before their answers; or empty.
  std::vector<std::string> echo;
  // Those of OpenAiRequest. REQUIRES: not stream.
  std::optional<int32_t> echo_logprobs, prompt_logprobs;
  bool drops_answer = false;  // what follows the prompt is not told
  int32_t n = 1;
  std::string model;
  std::vector<int32_t> eos_token_ids;
  AnswerParserOptions parser;
  std::string structured_field;  // as OpenAiField takes it
};

// `tokenizer` must outlive the format.
std::unique_ptr<AnswerFormat> MakeOpenAiFormat(OpenAiAnswerOptions options,
                                               const engine::Tokenizer& tokenizer);

// Sums over choices. The prompt counts once, as for every choice it is the same.
struct UsageSum {
  int32_t prompt_tokens = 0;
  int32_t generated_tokens = 0;
  std::optional<int32_t> cached_tokens;  // of the choice that had fewest
  v1::Usage winnow;                      // reads summed, times of the slowest

  void Add(const v1::Usage& usage);
  // Adds the sum of another prompt's choices.
  void AddPrompt(const UsageSum& other);
};
// `usage.winnow`: what a request read, as winnow counts it.
nlohmann::ordered_json WinnowUsage(const UsageSum& sum);

// JSON as text; bytes that are not UTF-8 come out as U+FFFD.
std::string Dump(const nlohmann::ordered_json& json);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_OPENAI_ANSWER_H_
