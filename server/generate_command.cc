// `winnow generate`: one request to a running server, for people and scripts.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <sstream>
#include <system_error>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "engine/base/status_macros.h"
#include "nlohmann/json.hpp"
#include "server/client.h"
#include "server/commands.h"
#include "server/strings.h"
#include "server/validate.h"

namespace winnow::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

// CLI11 sets what was given; the rest stays unset in the request, so that the server's defaults
// hold.
struct Flags {
  ClientOptions client;
  std::optional<std::string> prompt, prompt_file, chat_file, tokens;
  bool raw = false;
  std::optional<float> temperature, top_p, min_p, repetition_penalty, presence_penalty,
      frequency_penalty;
  std::optional<int32_t> top_k, max_tokens, min_tokens, n, top_logprobs, prompt_logprobs;
  std::optional<uint64_t> seed;
  std::vector<std::string> logit_bias, stop;
  std::vector<int32_t> stop_ids;
  bool ignore_eos = false, include_stop = false, show_special = false, json = false;
  std::string policy, exactness;
  CacheFlags cache;
};

// Far more than the longest prompt: a file that does not end must not take all memory.
constexpr size_t kInputBytesMax = size_t{256} << 20;

absl::StatusOr<std::string> ReadStream(std::istream& in, const std::string& name) {
  std::string text;
  std::vector<char> chunk(1 << 20);
  while (in.read(chunk.data(), static_cast<std::streamsize>(chunk.size())) || in.gcount() > 0) {
    text.append(chunk.data(), static_cast<size_t>(in.gcount()));
    if (text.size() > kInputBytesMax) {
      return absl::InvalidArgumentError(
          Concat(name, ": more than ", kInputBytesMax, " bytes, which no prompt has"));
    }
  }
  if (in.bad()) return absl::NotFoundError(Concat(name, ": cannot be read"));
  return text;
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  if (path == "-") return ReadStream(std::cin, "standard input");
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {  // which opens, and reads as empty
    return absl::InvalidArgumentError(Concat(path, ": is a directory"));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(Concat(path, ": cannot be read"));
  return ReadStream(file, path);
}

absl::Status ReadChat(const std::string& path, v1::ChatPrompt& chat) {
  WINNOW_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  const OrderedJson json = OrderedJson::parse(text, nullptr, /*allow_exceptions=*/false);
  const OrderedJson& messages =
      json.is_object() && json.contains("messages") ? json.at("messages") : json;
  absl::Status bad = absl::InvalidArgumentError(Concat(
      path,
      ": must be JSON: a list of {\"role\": ..., \"content\": ...}, or an object with such a "
      "list as \"messages\""));
  if (!messages.is_array()) return bad;
  for (const OrderedJson& message : messages) {
    if (!message.is_object()) return bad;
    for (const auto& [key, value] : message.items()) {
      if ((key != "role" && key != "content") || !value.is_string()) return bad;
    }
    if (!message.contains("role") || !message.contains("content")) return bad;
    v1::ChatMessage& out = *chat.add_messages();
    out.set_role(message.at("role").get<std::string>());
    out.set_content(message.at("content").get<std::string>());
  }
  return absl::OkStatus();
}

absl::Status ReadTokens(const std::string& text, v1::TokenPrompt& tokens) {
  std::istringstream in(text);
  std::string word;
  while (std::getline(in, word, ',')) {
    size_t end = 0;
    try {
      tokens.add_ids(std::stoi(word, &end));
    } catch (const std::exception&) {
      end = 0;
    }
    if (end == 0 || end != word.size()) {
      return absl::InvalidArgumentError("--tokens: must be token ids with commas between");
    }
  }
  return absl::OkStatus();
}

absl::Status ReadLogitBias(const std::string& text, v1::SamplingOptions& sampling) {
  const size_t colon = text.find(':');
  try {
    if (colon != text.npos) {
      size_t id_end = 0, bias_end = 0;
      const std::string id = text.substr(0, colon), bias = text.substr(colon + 1);
      const int32_t key = std::stoi(id, &id_end);
      const float value = std::stof(bias, &bias_end);
      if (id_end == id.size() && bias_end == bias.size()) {
        (*sampling.mutable_logit_bias())[key] = value;
        return absl::OkStatus();
      }
    }
  } catch (const std::exception&) {
  }
  return absl::InvalidArgumentError(Concat("--logit-bias ", text, ": must be ID:BIAS"));
}

absl::StatusOr<v1::GenerateRequest> MakeRequest(const Flags& flags) {
  v1::GenerateRequest request;
  if (flags.prompt.has_value()) {
    request.mutable_text()->set_text(*flags.prompt);
  } else if (flags.prompt_file.has_value()) {
    WINNOW_ASSIGN_OR_RETURN(*request.mutable_text()->mutable_text(), ReadFile(*flags.prompt_file));
  } else if (flags.chat_file.has_value()) {
    WINNOW_RETURN_IF_ERROR(ReadChat(*flags.chat_file, *request.mutable_chat()));
  } else {
    WINNOW_RETURN_IF_ERROR(ReadTokens(flags.tokens.value_or(""), *request.mutable_tokens()));
  }
  if (flags.raw) {
    if (!request.has_text()) {
      return absl::InvalidArgumentError("--raw is for --prompt and --prompt-file");
    }
    request.mutable_text()->set_add_special_tokens(false);
  }
  if (flags.top_logprobs && !flags.json) {
    return absl::InvalidArgumentError("--top-logprobs: only --json prints them");
  }
  if (flags.prompt_logprobs && !flags.json) {
    return absl::InvalidArgumentError("--prompt-logprobs: only --json prints them");
  }
  v1::SamplingOptions& sampling = *request.mutable_sampling();
  if (flags.temperature) sampling.set_temperature(*flags.temperature);
  if (flags.top_k) sampling.set_top_k(*flags.top_k);
  if (flags.top_p) sampling.set_top_p(*flags.top_p);
  if (flags.min_p) sampling.set_min_p(*flags.min_p);
  if (flags.repetition_penalty) sampling.set_repetition_penalty(*flags.repetition_penalty);
  if (flags.presence_penalty) sampling.set_presence_penalty(*flags.presence_penalty);
  if (flags.frequency_penalty) sampling.set_frequency_penalty(*flags.frequency_penalty);
  if (flags.seed) sampling.set_seed(*flags.seed);
  for (const std::string& bias : flags.logit_bias) {
    WINNOW_RETURN_IF_ERROR(ReadLogitBias(bias, sampling));
  }
  v1::StoppingOptions& stopping = *request.mutable_stopping();
  if (flags.max_tokens) stopping.set_max_tokens(*flags.max_tokens);
  if (flags.min_tokens) stopping.set_min_tokens(*flags.min_tokens);
  for (const std::string& stop : flags.stop) stopping.add_stop_strings(stop);
  stopping.mutable_stop_token_ids()->Assign(flags.stop_ids.begin(), flags.stop_ids.end());
  stopping.set_ignore_eos(flags.ignore_eos);
  stopping.set_include_stop(flags.include_stop);
  if (flags.n) request.set_n(*flags.n);
  if (flags.top_logprobs) request.set_top_logprobs(*flags.top_logprobs);
  if (flags.prompt_logprobs) request.set_prompt_logprobs(*flags.prompt_logprobs);
  request.set_policy(flags.policy);
  request.set_exactness(flags.exactness);
  request.set_show_special_tokens(flags.show_special);
  *request.mutable_cache() = ToProto(flags.cache);
  return request;
}

OrderedJson RetrievalJson(const v1::RetrievalUsage& usage) {
  const auto optional = [](bool there, double value) {
    return there ? OrderedJson(value) : OrderedJson();
  };
  return {{"candidate_rows", usage.candidate_rows()},
          {"selected_rows", usage.selected_rows()},
          {"kept", optional(usage.has_kept(), usage.kept())},
          {"probes", usage.probes()},
          {"coverage", optional(usage.has_coverage(), usage.coverage())},
          {"iou", optional(usage.has_iou(), usage.iou())},
          {"tail_estimates", usage.tail_estimates()},
          {"tail_mass", optional(usage.has_tail_mass(), usage.tail_mass())},
          {"widened_tokens", usage.widened_tokens()},
          {"floor_dense_tokens", usage.floor_dense_tokens()}};
}

OrderedJson ReadsJson(const v1::KvReadBytes& reads) {
  return {{"fast", reads.fast()}, {"host", reads.host()}, {"disk", reads.disk()}};
}

OrderedJson DraftsJson(const v1::DraftUsage& usage) {
  return {{"drafted_tokens", usage.drafted_tokens()},
          {"verified_tokens", usage.verified_tokens()},
          {"accepted_tokens", usage.accepted_tokens()},
          {"verifications", usage.verifications()},
          {"verified_at", OrderedJson(usage.verified_at())},
          {"accepted_at", OrderedJson(usage.accepted_at())},
          {"draft_read_bytes", ReadsJson(usage.draft_read_bytes())},
          {"verify_read_bytes", ReadsJson(usage.verify_read_bytes())}};
}

OrderedJson UsageJson(const v1::Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens()},
          {"cached_tokens", usage.cached_tokens()},
          {"generated_tokens", usage.generated_tokens()},
          {"preemptions", usage.preemptions()},
          {"kv_read_bytes", ReadsJson(usage.kv_read_bytes())},
          {"kv_dense_bytes", usage.kv_dense_bytes()},
          {"attended_rows", usage.attended_rows()},
          {"dense_rows", usage.dense_rows()},
          {"retrieval", RetrievalJson(usage.retrieval())},
          {"drafts", usage.has_drafts() ? DraftsJson(usage.drafts()) : OrderedJson()},
          {"policy", usage.policy()},
          {"exactness", usage.exactness()},
          {"queue_seconds", usage.queue_seconds()},
          {"time_to_first_token_seconds", usage.time_to_first_token_seconds()},
          {"total_seconds", usage.total_seconds()}};
}

// "KV read: 2.3 % (1234 of 56789 bytes)"; nothing if no token was decoded.
std::string ReadLine(uint64_t read, uint64_t dense) {
  if (dense == 0) return "";
  return absl::StrFormat("KV read: %.1f %% (%d of %d bytes)\n",
                         100 * static_cast<double>(read) / static_cast<double>(dense), read, dense);
}

std::string_view ReasonName(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_STOP_TOKEN:
      return "stop_token";
    case v1::FINISH_REASON_STOP_STRING:
      return "stop_string";
    case v1::FINISH_REASON_MAX_TOKENS:
      return "max_tokens";
    default:
      return "unknown";
  }
}

OrderedJson TopJson(const google::protobuf::RepeatedPtrField<v1::TokenLogprob>& top) {
  OrderedJson out = OrderedJson::array();
  for (const v1::TokenLogprob& likely : top) {
    out.push_back({{"id", likely.id()}, {"logprob", likely.logprob()}, {"text", likely.text()}});
  }
  return out;
}

// One choice as --json prints it, put together from its messages.
class ChoiceJson {
 public:
  void Add(const v1::GenerateResponse& message, bool logprobs) {
    text_ += message.text();
    for (const v1::PromptToken& token : message.prompt_tokens()) {
      OrderedJson out = {{"id", token.id()}};
      if (token.has_logprob()) {
        out.update({{"logprob", token.logprob()}, {"rank", token.rank()}});
        out["top"] = TopJson(token.top());
      }
      prompt_.push_back(std::move(out));
    }
    for (const v1::Token& token : message.tokens()) {
      ids_.push_back(token.id());
      if (!logprobs) continue;
      logprobs_.push_back(
          {{"id", token.id()}, {"logprob", token.logprob()}, {"top", TopJson(token.top())}});
    }
    if (message.has_finish()) finish_ = message.finish();
  }

  OrderedJson Print(bool logprobs) const {
    OrderedJson out = {{"text", text_}, {"finish_reason", ReasonName(finish_.reason())}};
    if (!finish_.stop_string().empty()) out["stop_string"] = finish_.stop_string();
    if (finish_.has_stop_token_id()) out["stop_token_id"] = finish_.stop_token_id();
    out["token_ids"] = ids_;
    if (logprobs) out["logprobs"] = logprobs_;
    if (!prompt_.empty()) out["prompt_logprobs"] = prompt_;
    out["usage"] = UsageJson(finish_.usage());
    return out;
  }

 private:
  std::string text_;
  std::vector<int32_t> ids_;
  OrderedJson logprobs_ = OrderedJson::array(), prompt_ = OrderedJson::array();
  v1::Finish finish_;
};

int Generate(const Flags& flags) {
  const auto usage_error = [](const absl::Status& status) {
    std::cerr << "winnow generate: " << status.message() << std::endl;
    return kExitUsage;
  };
  const auto request = MakeRequest(flags);
  if (!request.ok()) return usage_error(request.status());
  const auto client = Client::Create(flags.client);
  if (!client.ok()) return usage_error(client.status());

  const bool logprobs = request->has_top_logprobs();
  // What is out of range is the server's to refuse.
  const auto n =
      static_cast<size_t>(request->has_n() ? std::clamp(request->n(), 1, kMaxChoices) : 1);
  std::vector<ChoiceJson> choices(n);
  bool output_broken = false;
  uint64_t read_bytes = 0, dense_bytes = 0;  // of all choices
  const CallResult result = (*client)->Generate(*request, [&](const v1::GenerateResponse& message) {
    const auto choice = static_cast<size_t>(message.choice());
    if (message.has_finish()) {
      const v1::Usage& usage = message.finish().usage();
      read_bytes += usage.kv_read_bytes().fast();
      dense_bytes += usage.kv_dense_bytes();
    }
    if (flags.json || n > 1) {
      if (choice < choices.size()) choices[choice].Add(message, logprobs);
    } else {
      std::cout << message.text() << std::flush;
      output_broken = !std::cout;  // nobody reads: stop the server's work, too
    }
    return !output_broken;
  });
  if (!result.ok() && !output_broken) {
    if (!flags.json && n == 1) std::cout << std::endl;
    std::cerr << "winnow generate: " << result.description << std::endl;
    return result.exit_code();
  }
  if (flags.json) {
    // One choice is printed flat; more are a list, with what they all share written in each.
    if (n == 1) {
      std::cout << choices[0].Print(logprobs).dump() << std::endl;
    } else {
      OrderedJson all = OrderedJson::array();
      for (const ChoiceJson& choice : choices) all.push_back(choice.Print(logprobs));
      std::cout << OrderedJson({{"choices", all}}).dump() << std::endl;
    }
  } else if (n > 1) {
    for (size_t i = 0; i < n; ++i) {
      std::cout << "[" << i << "] " << choices[i].Print(false).at("text").get<std::string>()
                << "\n";
    }
    std::cout << std::flush;
  } else {
    std::cout << std::endl;
  }
  // Beside the answer, not in it.
  if (!flags.json) std::cerr << ReadLine(read_bytes, dense_bytes) << std::flush;
  if (std::cout) return kExitOk;
  std::cerr << "winnow generate: standard output took no more" << std::endl;
  return kExitFailure;
}

}  // namespace

void AddGenerateCommand(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("generate", "Ask a running server to continue a prompt");
  auto flags = std::make_shared<Flags>();
  AddClientFlags(*command, &flags->client);
  CLI::Option_group* prompt = command->add_option_group("prompt");
  prompt->add_option("--prompt", flags->prompt, "text to continue");
  prompt->add_option("--prompt-file", flags->prompt_file, "text to continue; - is standard input")
      ->type_name("FILE");
  prompt
      ->add_option("--chat-file", flags->chat_file,
                   "JSON list of {\"role\", \"content\"}; - is standard input")
      ->type_name("FILE");
  prompt->add_option("--tokens", flags->tokens, "token ids to continue, with commas between")
      ->type_name("IDS");
  prompt->require_option(1);
  command->add_flag("--raw", flags->raw, "put no beginning-of-sequence token before the text");

  command->add_option("--temperature", flags->temperature, "0: greedy");
  command->add_option("--top-k", flags->top_k, "0: off");
  command->add_option("--top-p", flags->top_p, "in (0, 1]");
  command->add_option("--min-p", flags->min_p, "in [0, 1]");
  command->add_option("--repetition-penalty", flags->repetition_penalty, "1: off");
  command->add_option("--presence-penalty", flags->presence_penalty, "0: off");
  command->add_option("--frequency-penalty", flags->frequency_penalty, "0: off");
  command
      ->add_option("--logit-bias", flags->logit_bias, "added to a token's logit; may be repeated")
      ->type_name("ID:BIAS");
  command->add_option("--seed", flags->seed, "the same seed repeats the answer");
  command->add_option("--n", flags->n, "how many answers");
  command->add_option("--max-tokens", flags->max_tokens, "tokens of the answer, at most");
  command->add_option("--min-tokens", flags->min_tokens, "no stop counts before this many");
  // One at a time and as it is: a list in brackets would be taken apart, and "[/INST]" is no list.
  command->add_option("--stop", flags->stop, "stop string; may be repeated")
      ->allow_extra_args(false);
  command->add_option("--stop-id", flags->stop_ids, "stop token; may be repeated");
  command->add_flag("--ignore-eos", flags->ignore_eos, "go on after the model's end tokens");
  command->add_flag("--include-stop", flags->include_stop, "print the stop, too");
  command->add_flag("--show-special", flags->show_special, "print control tokens");
  command->add_option("--top-logprobs", flags->top_logprobs,
                      "with --json: log-probabilities, with this many of the likeliest tokens");
  command->add_option("--prompt-logprobs", flags->prompt_logprobs,
                      "with --json: the same of the prompt's tokens, with their ranks");
  command->add_option("--policy", flags->policy,
                      "attention policy, as dense or quest:k=2%; empty: the server's");
  command->add_option(
      "--exactness", flags->exactness,
      "exact, floor:C or fast: how near to dense; empty: as the server and the policy say");
  AddCacheFlags(*command, &flags->cache);
  command->add_flag("--json", flags->json,
                    "print one object: text, finish_reason, token_ids, usage");
  // CLI11 takes an empty value of an optional for none at all: --seed "$SEED" with nothing in SEED
  // would be a random one.
  for (const char* name :
       {"--prompt", "--prompt-file", "--chat-file", "--tokens", "--temperature", "--top-k",
        "--top-p", "--min-p", "--repetition-penalty", "--presence-penalty", "--frequency-penalty",
        "--seed", "--n", "--max-tokens", "--min-tokens", "--top-logprobs", "--prompt-logprobs"}) {
    command->get_option(name)->check([](const std::string& text) {
      return std::string(text.empty() ? "must not be empty" : "");
    });
  }
  command->footer(
      "What is not set has the server's default. Exit codes: 0 answered; 1 the server refused or "
      "failed; 2 flags or files; 3 no server answered; 4 the deadline passed.");
  command->callback([flags, exit_code] { *exit_code = Generate(*flags); });
}

}  // namespace winnow::server
