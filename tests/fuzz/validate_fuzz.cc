// Bytes of the messages that gRPC clients send, parsed as the service does it, through the validator and the tokenizer.
// The first byte chooses the message. A request that passes keeps within every limit that the engine relies on; one
// that is refused is the client's fault and says so in UTF-8.
//
// Protos: winnow/v1/inference.proto google/rpc/status.proto google/rpc/error_details.proto
// Sources: server/validate.cc server/wire.cc server/status.cc server/utf8.cc server/ordered_json.cc engine/grammar/grammar_check.cc
// Sources: engine/retrieval/attention_policy.cc engine/retrieval/exactness.cc engine/base/json_file.cc engine/base/did_you_mean.cc engine/base/plain_number.cc
// Sources: engine/text/chat_template.cc engine/text/jinja/attributes.cc engine/text/jinja/case_tables.cc
// Sources: engine/text/jinja/expressions.cc engine/text/jinja/filters.cc engine/text/jinja/format.cc
// Sources: engine/text/jinja/globals.cc engine/text/jinja/interpreter.cc engine/text/jinja/lexer.cc
// Sources: engine/text/jinja/marked_text.cc engine/text/jinja/methods.cc engine/text/jinja/operators.cc
// Sources: engine/text/jinja/parser.cc engine/text/jinja/resolver.cc engine/text/jinja/strings.cc
// Sources: engine/text/jinja/template.cc engine/text/jinja/unicode.cc engine/text/jinja/value.cc
// Sources: engine/text/added_tokens.cc engine/text/bpe.cc engine/text/bpe_load.cc engine/text/detokenizer.cc
// Sources: engine/text/post_processor.cc engine/text/pre_tokenizer.cc engine/text/token_decoder.cc
// Sources: engine/text/tokenizer.cc engine/text/tokenizer_encode.cc engine/text/tokenizer_json.cc
// Sources: engine/text/tokenizer_normalizer.cc engine/text/tokenizer_regex.cc engine/text/tokenizer_regex_syntax.cc
// Sources: engine/text/unicode_normalize.cc engine/text/unicode/unicode_tables.cc engine/text/unicode/unicode_text.cc kernels/check.cc
#include "server/validate.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/text/unicode/unicode_text.h"
#include "kernels/check.h"
#include "server/wire.h"
#include "winnow/v1/inference.pb.h"

using namespace winnow;  // NOLINT(google-build-using-namespace): a main file

namespace {

constexpr int32_t kVocab = 7, kContext = 64;

constexpr std::string_view kTokenizer =
    R"({"version":"1.0","added_tokens":[{"id":6,"content":"<s>","single_word":false,
"lstrip":false,"rstrip":false,"normalized":false,"special":true}],"normalizer":{"type":"NFC"},"pre_tokenizer":
{"type":"Metaspace","replacement":"_","prepend_scheme":"first"},"post_processor":null,"decoder":{"type":"Fuse"},
"model":{"type":"BPE","unk_token":"?","vocab":{"?":0,"_":1,"a":2,"b":3,"ab":4,"_a":5},"merges":[["a","b"],["_","a"]]}})";

// Reads every field of a message, as models' templates do.
constexpr std::string_view kChatTemplate =
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<s>{{ m.role }}:{{ "
    "m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% "
    "endfor %}"
    "{{ m.tool_call_id }}{% endfor %}{% if enable_thinking %}<think>{% endif %}";

const server::Validator& TheValidator() {
  static const auto& tokenizer = *engine::Tokenizer::Parse(kTokenizer, "file").value().release();
  static const auto& chat =
      *new engine::ChatTemplate(engine::ChatTemplate::FromText(kChatTemplate, "<s>", "</s>"));
  static const auto& validator = *[] {
    server::RequestLimits limits;
    limits.vocab_size = kVocab;
    limits.max_context = kContext;
    limits.max_prompt_bytes = 2048;
    limits.default_max_tokens = 8;
    limits.check_policy = [](const engine::AttentionPolicy&) { return absl::OkStatus(); };
    limits.structured_output = true;
    limits.eos_token_ids = {6};
    return new server::Validator(limits, tokenizer, chat);
  }();
  return validator;
}

void CheckRefusal(const absl::Status& status) {
  WINNOW_CHECK(absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status));
  WINNOW_CHECK(!status.message().empty());
  WINNOW_CHECK(engine::FindInvalidUtf8({status.message().data(), status.message().size()}) ==
               std::string::npos);
}

void CheckIds(const std::vector<int32_t>& ids) {
  for (const int32_t id : ids) WINNOW_CHECK(id >= 0 && id < kVocab);
}

void CheckRequest(const server::CheckedGenerate& checked) {
  const engine::Request& request = checked.request;
  WINNOW_CHECK(checked.n >= 1 && checked.n <= server::kMaxChoices);
  WINNOW_CHECK(!request.prompt.empty());
  CheckIds(request.prompt);
  WINNOW_CHECK(request.stopping.max_tokens >= 0);
  WINNOW_CHECK(static_cast<int64_t>(request.prompt.size()) + request.stopping.max_tokens <=
               kContext);
  WINNOW_CHECK(request.stopping.min_tokens >= 0 &&
               request.stopping.min_tokens <= request.stopping.max_tokens);
  CheckIds(request.stopping.stop_token_ids);
  const engine::SamplingOptions& sampling = request.sampling;
  WINNOW_CHECK(sampling.temperature >= 0 && sampling.temperature <= server::kMaxTemperature);
  WINNOW_CHECK(sampling.top_p >= 0 && sampling.top_p <= 1);
  WINNOW_CHECK(sampling.min_p >= 0 && sampling.min_p <= 1);
  WINNOW_CHECK(sampling.top_k >= 0 && sampling.top_k <= server::kMaxTopK);
  WINNOW_CHECK(sampling.repetition_penalty >= server::kMinRepetitionPenalty &&
               sampling.repetition_penalty <= server::kMaxRepetitionPenalty);
  WINNOW_CHECK(std::abs(sampling.presence_penalty) <= server::kMaxPenalty);
  WINNOW_CHECK(std::abs(sampling.frequency_penalty) <= server::kMaxPenalty);
  for (const auto& [id, bias] : sampling.logit_bias) {
    CheckIds({id});
    WINNOW_CHECK(std::abs(bias) <= server::kMaxLogitBiasValue);
  }
  WINNOW_CHECK(request.top_logprobs >= -1 && request.top_logprobs <= server::kMaxTopLogprobs);
}

template <typename Message>
bool Parsed(std::string_view bytes, Message& message) {
  const absl::Status status = server::ParseMessage(bytes, message);
  if (!status.ok()) CheckRefusal(status);
  return status.ok();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  const server::Validator& validator = TheValidator();
  if (data[0] % 4 == 2) {
    v1::TokenizeRequest message;
    if (!Parsed(bytes, message)) return 0;
    if (const absl::Status status = validator.CheckTokenize(message); !status.ok()) {
      CheckRefusal(status);
    } else if (const auto ids = validator.TokenizePrompt(message); !ids.ok()) {
      CheckRefusal(ids.status());
    } else {
      CheckIds(*ids);
    }
  } else if (data[0] % 4 == 3) {
    v1::DetokenizeRequest message;
    if (!Parsed(bytes, message)) return 0;
    if (const absl::Status status = validator.CheckDetokenize(message); !status.ok()) {
      CheckRefusal(status);
    } else {
      CheckIds({message.ids().begin(), message.ids().end()});
    }
  } else {
    v1::GenerateRequest message;
    if (!Parsed(bytes, message)) return 0;
    auto checked = validator.CheckGenerate(message);
    absl::Status status = checked.status();
    if (status.ok()) status = validator.TokenizePrompt(message, *checked);
    if (!status.ok()) {
      CheckRefusal(status);
    } else {
      CheckRequest(*checked);
    }
    if (checked.ok() && message.has_chat()) validator.OpensReasoning(message.chat());
  }
  return 0;
}
