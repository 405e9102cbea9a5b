#include "server/vllm/vllm_generate.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <string_view>
#include <vector>

#include "server/grpc_call.h"
#include "server/status.h"
#include "server/strings.h"
#include "vllm_engine.pb.h"

namespace winnow::server {
namespace {

namespace pb = vllm::grpc::engine;

constexpr size_t kMaxRequestIdBytes = 256;
// Log-probabilities of a prompt, which one message holds: 12 bytes for a token's own and 8 for each beside it, where
// clients of gRPC take 4 MB.
constexpr int64_t kMaxPromptLogprobs = 1 << 18;

// The validator's names of fields, and those of this API, longest first.
constexpr std::array<std::pair<std::string_view, std::string_view>, 14> kFieldNames = {{
    {"stopping.stop_token_ids", "sampling_params.stop_token_ids"},
    {"stopping.stop_strings", "sampling_params.stop"},
    {"stopping.include_stop", "sampling_params.include_stop_str_in_output"},
    {"stopping.max_tokens", "sampling_params.max_tokens"},
    {"stopping.min_tokens", "sampling_params.min_tokens"},
    {"stopping.ignore_eos", "sampling_params.ignore_eos"},
    {"structured_output", "sampling_params"},
    {"prompt_logprobs", "sampling_params.prompt_logprobs"},
    {"top_logprobs", "sampling_params.logprobs"},
    {"tokens.ids", "tokenized.input_ids"},
    {"text.text", "text"},
    {"sampling", "sampling_params"},
    {"prompt", "input"},
    {"n", "sampling_params.n"},
}};

std::string FieldName(std::string_view field) {
  for (const auto& [own, theirs] : kFieldNames) {
    if (!field.starts_with(own)) continue;
    const std::string_view rest = field.substr(own.size());
    if (rest.empty() || rest[0] == '.' || rest[0] == '[') return Concat(theirs, rest);
  }
  return std::string(field);
}

int32_t Clamped(uint32_t value) {
  return static_cast<int32_t>(
      std::min<uint32_t>(value, static_cast<uint32_t>(std::numeric_limits<int32_t>::max())));
}

void RefuseWhatCannotBeDone(const pb::GenerateRequest& in, Violations& violations) {
  const auto refuse = [&](bool is_there, std::string_view field, std::string_view why) {
    if (is_there) violations.Add(field, Concat("cannot be done by winnow: ", why));
  };
  const pb::SamplingParams& sampling = in.sampling_params();
  refuse(sampling.has_prompt_logprobs() && in.stream(), "sampling_params.prompt_logprobs",
         "they come with the whole answer, not in a stream");
  refuse(sampling.has_truncate_prompt_tokens(), "sampling_params.truncate_prompt_tokens",
         "prompts are taken whole or not at all");
  refuse(in.has_kv_transfer_params(), "kv_transfer_params", "KV is not moved between servers");
  refuse(in.has_kv_transfer_params_json(), "kv_transfer_params_json",
         "KV is not moved between servers");
  refuse(in.has_mm_inputs(), "mm_inputs", "it reads text only");
  refuse(in.extra_mm_inputs_size() > 0, "extra_mm_inputs", "it reads text only");
  refuse(in.has_media_refs(), "media_refs", "it reads text only");
  refuse(in.has_data_parallel_rank() && in.data_parallel_rank() != 0, "data_parallel_rank",
         "there is rank 0 only");
}

// A grammar holds from the first token on, whatever `grammar_from_first_token` says: winnow keeps none back for thoughts.
void ReadConstraint(const pb::SamplingParams& in, v1::GenerateRequest& out) {
  switch (in.constraint_case()) {
    case pb::SamplingParams::kJsonSchema:
      return out.mutable_structured_output()->set_json_schema(in.json_schema());
    case pb::SamplingParams::kRegex:
      return out.mutable_structured_output()->set_regex(in.regex());
    case pb::SamplingParams::kGrammar:
      return out.mutable_structured_output()->set_grammar(in.grammar());
    case pb::SamplingParams::kStructuralTag:
      return out.mutable_structured_output()->set_structural_tag(in.structural_tag());
    case pb::SamplingParams::kJsonObject:
      if (in.json_object()) out.mutable_structured_output()->set_json_object(true);
      return;
    case pb::SamplingParams::kChoice:
      *out.mutable_structured_output()->mutable_choice()->mutable_texts() = in.choice().choices();
      return;
    case pb::SamplingParams::CONSTRAINT_NOT_SET:
      return;
  }
}

void ReadSampling(const pb::SamplingParams& in, Violations& violations, v1::GenerateRequest& out) {
  v1::SamplingOptions& sampling = *out.mutable_sampling();
  if (in.has_temperature()) sampling.set_temperature(in.temperature());
  if (in.top_p() != 0) sampling.set_top_p(in.top_p());
  if (in.top_k() != 0) sampling.set_top_k(Clamped(in.top_k()));
  if (in.min_p() != 0) sampling.set_min_p(in.min_p());
  if (in.frequency_penalty() != 0) sampling.set_frequency_penalty(in.frequency_penalty());
  if (in.presence_penalty() != 0) sampling.set_presence_penalty(in.presence_penalty());
  if (in.repetition_penalty() != 0) sampling.set_repetition_penalty(in.repetition_penalty());
  *sampling.mutable_logit_bias() = in.logit_bias();
  if (in.has_seed()) sampling.set_seed(static_cast<uint64_t>(int64_t{in.seed()}));

  v1::StoppingOptions& stopping = *out.mutable_stopping();
  if (in.has_max_tokens()) stopping.set_max_tokens(Clamped(in.max_tokens()));
  if (in.min_tokens() != 0) stopping.set_min_tokens(Clamped(in.min_tokens()));
  *stopping.mutable_stop_strings() = in.stop();
  for (const uint32_t id : in.stop_token_ids()) stopping.add_stop_token_ids(Clamped(id));
  stopping.set_ignore_eos(in.ignore_eos());
  stopping.set_include_stop(in.include_stop_str_in_output());

  if (in.n() != 0) out.set_n(Clamped(in.n()));
  constexpr std::string_view kOfAll = "the whole vocabulary's cannot be had";
  if (in.has_logprobs()) {
    if (in.logprobs() < 0) violations.Add("sampling_params.logprobs", kOfAll);
    out.set_top_logprobs(in.logprobs());
  }
  if (in.has_prompt_logprobs()) {
    if (in.prompt_logprobs() < 0) violations.Add("sampling_params.prompt_logprobs", kOfAll);
    out.set_prompt_logprobs(in.prompt_logprobs());
  }
  // Ids go out, not text; what shows in the text decides only where stop strings match.
  out.set_show_special_tokens(!in.skip_special_tokens());
}

// A token of the answer, or of the prompt.
void AddLogprobs(const auto& token, auto& out) {
  out.add_token_ids(static_cast<uint32_t>(token.id()));
  pb::TopLogProbs& top = *out.add_top_logprobs();
  for (const v1::TokenLogprob& likely : token.top()) {
    top.add_values(likely.logprob());
    top.add_token_ids(static_cast<uint32_t>(likely.id()));
  }
}

void AddOutput(const v1::Token& token, pb::OutputLogProbs& out) {
  out.add_token_logprobs(token.logprob());
  AddLogprobs(token, out);
}

void AddInput(const v1::PromptToken& token, pb::InputLogProbs& out) {
  pb::InputTokenLogProb& logprob = *out.add_token_logprobs();
  if (token.has_logprob()) logprob.set_value(token.logprob());
  AddLogprobs(token, out);
}

class Codec final : public GenerateCodec {
 public:
  Codec(OpenRequests& open, const std::vector<int32_t>& end_tokens)
      : open_(open), end_tokens_(end_tokens) {}
  ~Codec() override {
    if (!name_.empty()) open_.Remove(tenant_, name_, generation_);
  }

  absl::Status Read(const grpc::ByteBuffer& bytes, v1::GenerateRequest& message,
                    CallInfo& info) override {
    info.by_proxy = true;  // routers speak this service
    info.prompt_scores_max = kMaxPromptLogprobs;
    pb::GenerateRequest in;
    if (absl::Status status = ParseBuffer(bytes, in); !status.ok()) return status;
    Violations violations;
    if (in.request_id().size() > kMaxRequestIdBytes ||
        std::any_of(in.request_id().begin(), in.request_id().end(),
                    [](char c) { return c < 0x20 || c > 0x7e; })) {
      violations.Add("request_id",
                     Concat("must be at most ", kMaxRequestIdBytes, " printable ASCII characters"));
    }
    RefuseWhatCannotBeDone(in, violations);
    switch (in.input_case()) {
      case pb::GenerateRequest::kTokenized:
        message.mutable_tokens()->mutable_ids()->Reserve(in.tokenized().input_ids_size());
        for (const uint32_t id : in.tokenized().input_ids()) {
          message.mutable_tokens()->add_ids(Clamped(id));
        }
        break;
      case pb::GenerateRequest::kText:
        message.mutable_text()->set_text(in.text());
        break;
      case pb::GenerateRequest::INPUT_NOT_SET:
        violations.Add("input", "one of tokenized and text must be set");
    }
    ReadSampling(in.sampling_params(), violations, message);
    ReadConstraint(in.sampling_params(), message);
    if (absl::Status status = violations.ToStatus(); !status.ok()) return status;
    stream_ = in.stream();
    name_ = in.request_id();
    info.client_request_id = name_;
    return absl::OkStatus();
  }

  void Started(const std::shared_ptr<Generation>& generation, const std::string& tenant) override {
    generation_ = generation;
    tenant_ = tenant;
    if (!name_.empty()) open_.Add(tenant_, name_, generation);
  }

  std::vector<grpc::ByteBuffer> Write(v1::GenerateResponse message) override {
    std::vector<grpc::ByteBuffer> out;
    pb::GenerateComplete& whole = answers_[message.choice()];
    const bool is_first = whole.output_ids_size() == 0;
    pb::GenerateResponse response;
    pb::GenerateStreamChunk& chunk = *response.mutable_chunk();
    for (const v1::PromptToken& token : message.prompt_tokens()) {
      AddInput(token, *whole.mutable_input_logprobs());
    }
    for (const v1::Token& token : message.tokens()) {
      whole.add_output_ids(static_cast<uint32_t>(token.id()));
      chunk.add_token_ids(static_cast<uint32_t>(token.id()));
      if (!token.has_logprob()) continue;
      if (stream_) {
        AddOutput(token, *chunk.mutable_output_logprobs());
      } else {
        AddOutput(token, *whole.mutable_output_logprobs());
      }
    }
    if (stream_ && (message.tokens_size() > 0 || (is_first && !message.has_finish()))) {
      chunk.set_index(static_cast<uint32_t>(message.choice()));
      chunk.set_completion_tokens(static_cast<uint32_t>(message.tokens_size()));  // of this chunk
      if (const auto generation = generation_.lock()) {
        chunk.set_prompt_tokens(static_cast<uint32_t>(generation->prompt_tokens()));
      }
      out.push_back(SerializeBuffer(response));
    }
    if (message.has_finish()) {
      Complete(message, whole);
      *response.mutable_complete() = std::move(whole);
      answers_.erase(message.choice());
      out.push_back(SerializeBuffer(response));
    }
    return out;
  }

  absl::Status End(absl::Status status) override {
    const auto fields = ViolationsOf(status);
    if (fields.empty()) return status;
    Violations renamed;
    for (const auto& [field, description] : fields) renamed.Add(FieldName(field), description);
    return renamed.ToStatus();
  }

 private:
  void Complete(const v1::GenerateResponse& message, pb::GenerateComplete& out) const {
    const v1::Finish& finish = message.finish();
    out.set_index(static_cast<uint32_t>(message.choice()));
    out.set_finish_reason(finish.reason() == v1::FINISH_REASON_MAX_TOKENS ? "length" : "stop");
    out.set_prompt_tokens(static_cast<uint32_t>(finish.usage().prompt_tokens()));
    out.set_completion_tokens(static_cast<uint32_t>(finish.usage().generated_tokens()));
    out.set_cached_tokens(static_cast<uint32_t>(finish.usage().cached_tokens()));
    const bool is_end = std::find(end_tokens_.begin(), end_tokens_.end(), finish.stop_token_id()) !=
                        end_tokens_.end();
    if (finish.has_stop_token_id() && !is_end) {
      out.set_matched_token_id(static_cast<uint32_t>(finish.stop_token_id()));
    } else if (!finish.stop_string().empty()) {
      out.set_matched_stop_str(finish.stop_string());
    }
  }

  OpenRequests& open_;
  const std::vector<int32_t>& end_tokens_;
  bool stream_ = false;
  std::string name_, tenant_;
  std::weak_ptr<Generation> generation_;
  std::map<int32_t, pb::GenerateComplete> answers_;  // of choices that have not ended
};

}  // namespace

void OpenRequests::Add(const std::string& tenant, const std::string& name,
                       const std::shared_ptr<Generation>& generation) {
  absl::MutexLock lock(&mutex_);
  open_.emplace(Key(tenant, name), generation);
}

void OpenRequests::Remove(const std::string& tenant, const std::string& name,
                          const std::weak_ptr<Generation>& generation) {
  absl::MutexLock lock(&mutex_);
  const auto [begin, end] = open_.equal_range(Key(tenant, name));
  const auto own = std::find_if(begin, end, [&](const auto& entry) {
    return !entry.second.owner_before(generation) && !generation.owner_before(entry.second);
  });
  if (own != end) open_.erase(own);
}

int OpenRequests::Abort(const std::string& tenant, const std::string& name) {
  std::vector<std::shared_ptr<Generation>> found;
  {
    absl::MutexLock lock(&mutex_);
    const auto [begin, end] = open_.equal_range(Key(tenant, name));
    for (auto it = begin; it != end; ++it) {
      if (auto generation = it->second.lock()) found.push_back(std::move(generation));
    }
  }
  for (const auto& generation : found) generation->Cancel();
  return static_cast<int>(found.size());
}

std::unique_ptr<GenerateCodec> MakeVllmGenerateCodec(OpenRequests& open,
                                                     const std::vector<int32_t>& end_tokens) {
  return std::make_unique<Codec>(open, end_tokens);
}

}  // namespace winnow::server
