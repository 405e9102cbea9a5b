// The one validator: every entry point (gRPC, HTTP) makes a winnow.v1 message and comes here, so no
// front end can forget a bound.
//
// Two steps, cheap before dear. Check... looks at the message alone, in time linear in its size, on
// whatever thread received it: ranges, counts, ids, UTF-8, and the prompt's bytes. What passes is
// tokenised elsewhere, and Tokenize... checks the prompt's tokens against the context. Errors are
// InvalidArgument with the paths of the fields (server/status.h); Tokenize also returns
// FailedPrecondition when chat is asked of a model without a usable template.
//
// Everything here is immutable after construction and may be called from any thread.
#ifndef WINNOW_SERVER_VALIDATE_H_
#define WINNOW_SERVER_VALIDATE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/retrieval/exactness.h"
#include "engine/schedule/request.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"

namespace winnow::v1 {
class ChatPrompt;
class DetokenizeRequest;
class GenerateRequest;
class TextPrompt;
class TokenizeRequest;
}  // namespace winnow::v1

namespace winnow::server {

// Bounds that are the same for every model; inference.proto states them.
inline constexpr float kMaxTemperature = 100;
inline constexpr int32_t kMaxTopK = 1000000;
inline constexpr float kMinRepetitionPenalty = 0.01f;
inline constexpr float kMaxRepetitionPenalty = 100;
inline constexpr float kMaxPenalty = 100;
inline constexpr int kMaxLogitBias = 1024;
inline constexpr float kMaxLogitBiasValue = 100;
inline constexpr int kMaxStopStrings = 16;
inline constexpr int kMaxStopStringBytes = 256;
inline constexpr int kMaxStopTokenIds = 64;
inline constexpr int kMaxChoices = 16;
inline constexpr int kMaxTopLogprobs = 20;
// Log-probabilities of one answer that is not streamed: it is put together in memory.
inline constexpr int64_t kMaxWholeLogprobs = 1 << 20;
inline constexpr int kMaxMessages = 1024;
inline constexpr int kMaxRoleBytes = 32;
inline constexpr int kMaxPolicyBytes = 256;
inline constexpr int kMaxTools = 128;      // of a chat, and calls of a message
inline constexpr int kMaxNameBytes = 128;  // of tools, and ids of calls
inline constexpr int kMaxTemplateOptionsBytes = 4096;
inline constexpr int kMaxGrammarChoices = 1024;
inline constexpr int kMaxTenantBytes = 64;
inline constexpr int64_t kMaxTtlSeconds = 31536000;  // of cached KV and of named prefixes
inline constexpr int kMaxCacheSaltBytes = 1024;

// Bounds and defaults that follow from the model and the configuration.
struct RequestLimits {
  int32_t vocab_size = 0;   // width of a logits row: ids index it
  int32_t max_context = 0;  // tokens that a sequence may hold, prompt and answer
  int64_t max_prompt_bytes = 0;
  int32_t default_max_tokens = 0;
  engine::AttentionPolicy default_policy;  // as configured: default_exactness is not in it yet
  std::optional<engine::Exactness> default_exactness;  // of requests that name none
  // Whether the model can attend so: Model::CheckPolicy. Any thread. REQUIRES: set.
  std::function<absl::Status(const engine::AttentionPolicy&)> check_policy;
  engine::SamplingOptions default_sampling;
  bool structured_output = false;  // whether there is a compiler of grammars
  std::vector<int32_t> eos_token_ids;
};

// The policy of a request that names neither policy nor exactness. InvalidArgument: they contradict each other.
absl::StatusOr<engine::AttentionPolicy> DefaultPolicy(const RequestLimits& limits);

// The bytes that a prompt may have if the configuration does not say, and the message around it.
int64_t DefaultMaxPromptBytes(int32_t max_context);
int64_t DefaultMaxMessageBytes(const RequestLimits& limits);

// A generation that passed. `request` lacks the prompt's tokens, max_tokens if `max_tokens_unset`,
// the seed if `seed_unset`, and what the service gives it: id, tenant, arrival, deadline.
struct CheckedGenerate {
  engine::Request request;
  int32_t n = 1;
  bool max_tokens_unset = false;
  bool max_tokens_yields = false;
  bool seed_unset = false;
  // To be compiled into request.grammar.
  std::optional<engine::GrammarSource> grammar;
};

class Validator {
 public:
  // `tokenizer` and `chat_template` must outlive the validator.
  Validator(RequestLimits limits, const engine::Tokenizer& tokenizer,
            const engine::ChatTemplate& chat_template);

  const RequestLimits& limits() const { return limits_; }

  // `max_tokens_yields`: it may be more than the context has room for, and is then that room.
  absl::StatusOr<CheckedGenerate> CheckGenerate(const v1::GenerateRequest& message,
                                                bool max_tokens_yields = false) const;
  absl::Status CheckTokenize(const v1::TokenizeRequest& message) const;
  absl::Status CheckDetokenize(const v1::DetokenizeRequest& message) const;

  // REQUIRES: the message passed its check. Fills in prompt and max_tokens, and checks them against
  // the context.
  absl::Status TokenizePrompt(const v1::GenerateRequest& message, CheckedGenerate& checked) const;
  absl::StatusOr<std::vector<int32_t>> TokenizePrompt(const v1::TokenizeRequest& message) const;

  // Whether the prompt of a chat ends inside the model's reasoning: "<think>". Of the template and its
  // options, not of the messages.
  bool OpensReasoning(const v1::ChatPrompt& chat) const;

  // A fairness key as clients send it: 1 to 64 of [A-Za-z0-9._-].
  static absl::Status CheckTenant(std::string_view tenant);

 private:
  absl::StatusOr<std::vector<int32_t>> TokenizeText(const v1::TextPrompt& text) const;
  absl::StatusOr<std::vector<int32_t>> TokenizeChat(const v1::ChatPrompt& chat) const;

  const RequestLimits limits_;
  const engine::Tokenizer& tokenizer_;
  const engine::ChatTemplate& chat_template_;
  const bool writes_harmony_;  // the template
};

// The seed of choice `choice` of a request with `seed`; choice 0 keeps the seed itself.
uint64_t SeedOfChoice(uint64_t seed, int32_t choice);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_VALIDATE_H_
