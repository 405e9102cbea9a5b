#include "server/http/openai_answer.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "server/http/openai_request.h"
#include "server/http/tools_request.h"
#include "server/strings.h"
#include "server/version.h"

namespace winnow::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

// JSON has no infinity. OpenAI's servers give this for what is as good as impossible.
constexpr float kLeastLogprob = -9999;
constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

OrderedJson Logprob(float value) { return std::max(value, kLeastLogprob); }

// A token's bytes; null for half a character, whose text does not give them.
OrderedJson BytesOf(std::string_view text) {
  if (text.find(kReplacement) != text.npos) return nullptr;
  OrderedJson bytes = OrderedJson::array();
  for (const char c : text) bytes.push_back(static_cast<unsigned char>(c));
  return bytes;
}

const char* FinishName(v1::FinishReason reason) {
  return reason == v1::FINISH_REASON_MAX_TOKENS ? "length" : "stop";
}

// The stop string, or the token of stop_token_ids, that ended a choice; null for the model's own end.
OrderedJson StopReason(const v1::Finish& finish, const std::vector<int32_t>& eos_token_ids) {
  if (!finish.stop_string().empty()) return finish.stop_string();
  if (!finish.has_stop_token_id() || std::find(eos_token_ids.begin(), eos_token_ids.end(),
                                               finish.stop_token_id()) != eos_token_ids.end()) {
    return nullptr;
  }
  return finish.stop_token_id();
}

size_t Characters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

class OpenAiFormat final : public AnswerFormat {
 public:
  OpenAiFormat(OpenAiAnswerOptions options, const engine::Tokenizer& tokenizer)
      : options_(std::move(options)),
        tokenizer_(tokenizer),
        choices_(size_t(options_.prompts) * options_.n),
        prompts_(options_.prompts) {
    for (Choice& choice : choices_) choice.parser = MakeAnswerParser(options_.parser);
  }

  bool streamed() const override { return options_.stream; }

  void Begin(const std::string& name, int64_t created) override {
    id_ = Concat(options_.chat ? "chatcmpl-" : "cmpl-", name);
    created_ = created;
  }

  void Add(const v1::GenerateResponse& message, int32_t prompt_tokens, std::string& out) override {
    Choice& choice = choices_[message.choice()];
    Prompt& prompt = prompts_[PromptOf(message.choice())];
    prompt.tokens = prompt_tokens;
    if (!options_.drops_answer) live_tokens_ += message.tokens_size();
    for (const v1::PromptToken& token : message.prompt_tokens()) AddScored(token, prompt);
    std::vector<AnswerPiece> pieces;
    choice.parser->Add(message.text(), pieces);
    if (message.has_finish()) {
      prompt.usage.Add(message.finish().usage());
      choice.finish = message.finish();
      choice.parser->Finish(pieces);
    }
    if (options_.drops_answer) pieces.clear();
    CountReasoning(message, pieces, choice);
    if (options_.stream) {
      AddEvents(message, pieces, choice, out);
      return;
    }
    for (const AnswerPiece& piece : pieces) AddPiece(piece, choice);
    if (options_.logprobs && !options_.drops_answer) {
      AppendLogprobs(message, choice, choice.logprobs);
    }
  }

  void End(std::string& out) override {
    if (!options_.stream) {
      out = WholeAnswer();
      return;
    }
    if (options_.include_usage) {
      OrderedJson chunk = Envelope();
      chunk["choices"] = OrderedJson::array();
      chunk["usage"] = Usage();
      Event(chunk, out);
    }
    out += "data: [DONE]\n\n";
  }

  void Break(const HttpError& error, std::string& out) override {
    Append(out, "data: ", OpenAiErrorBody(error), "\n\n");
  }

  std::string Field(std::string_view field) const override {
    // The one that asked for more; a field that is absent asks for less than one that is 0.
    if (field == "prompt_logprobs" && options_.echo_logprobs > options_.prompt_logprobs) {
      return "logprobs";
    }
    return OpenAiField(field, options_.chat, options_.structured_field);
  }

 private:
  struct Call {
    std::string name, arguments;
  };
  struct Choice {
    std::unique_ptr<AnswerParser> parser;
    bool begun = false;
    bool reasons = false;  // the last of what came was reasoning
    std::string text, reasoning;
    std::vector<Call> calls;  // streamed: names alone
    OrderedJson logprobs;
    size_t characters = 0;  // of all tokens' texts so far
    v1::Finish finish;
  };

  struct Prompt {
    int32_t tokens = 0;
    UsageSum usage;
    OrderedJson logprobs;  // before those of each of its choices
    size_t characters = 0;
    // Elements of prompt_logprobs, as text: values of JSON take several times the memory, and there may be a million.
    std::string scores;
  };

  size_t PromptOf(size_t choice) const { return choice / options_.n; }

  static void Event(const OrderedJson& json, std::string& out) {
    Append(out, "data: ", Dump(json), "\n\n");
  }

  OrderedJson Envelope() const {
    OrderedJson json;
    json["id"] = id_;
    json["object"] = options_.chat ? (options_.stream ? "chat.completion.chunk" : "chat.completion")
                                   : "text_completion";
    json["created"] = created_;
    json["model"] = options_.model;
    json["system_fingerprint"] = Concat("winnow-", kVersion);
    return json;
  }

  // A chunk with one choice. `delta`: chat's delta, or the text.
  void Chunk(int32_t index, OrderedJson delta, OrderedJson logprobs, OrderedJson finish,
             OrderedJson stop, std::string& out) {
    OrderedJson choice;
    choice["index"] = index;
    choice[options_.chat ? "delta" : "text"] = std::move(delta);
    choice["logprobs"] = std::move(logprobs);
    choice["finish_reason"] = std::move(finish);
    if (!choice["finish_reason"].is_null()) choice["stop_reason"] = std::move(stop);
    OrderedJson chunk = Envelope();
    chunk["choices"].push_back(std::move(choice));
    if (options_.continuous_usage) {
      chunk["usage"] = LiveUsage();
    } else if (options_.include_usage) {
      chunk["usage"] = nullptr;
    }
    Event(chunk, out);
  }

  // Tokens of a message that was reasoning to its end, or ended it.
  void CountReasoning(const v1::GenerateResponse& message, const std::vector<AnswerPiece>& pieces,
                      Choice& choice) {
    const bool begins = !pieces.empty() && pieces.front().kind == AnswerPiece::Kind::kReasoning;
    if (begins || (pieces.empty() && choice.reasons)) reasoning_tokens_ += message.tokens_size();
    if (!pieces.empty()) choice.reasons = pieces.back().kind == AnswerPiece::Kind::kReasoning;
  }

  static void AddPiece(const AnswerPiece& piece, Choice& choice) {
    switch (piece.kind) {
      case AnswerPiece::Kind::kContent:
        choice.text += piece.text;
        break;
      case AnswerPiece::Kind::kReasoning:
        choice.reasoning += piece.text;
        break;
      case AnswerPiece::Kind::kCallBegin:
        choice.calls.push_back({piece.text, ""});
        break;
      case AnswerPiece::Kind::kCallArguments:
        choice.calls.back().arguments += piece.text;
        break;
      case AnswerPiece::Kind::kCallEnd:
        break;
    }
  }

  OrderedJson CallJson(int32_t choice, size_t index, const std::string& name,
                       const std::string& arguments) const {
    return {{"id", CallId(id_, choice, index)},
            {"type", "function"},
            {"function", {{"name", name}, {"arguments", arguments}}}};
  }

  // Null: nothing to say. A call's name comes once, in its first delta: some clients join names as they do arguments.
  OrderedJson DeltaOf(const AnswerPiece& piece, int32_t index, Choice& choice) {
    switch (piece.kind) {
      case AnswerPiece::Kind::kContent:
        return {{"content", piece.text}};
      case AnswerPiece::Kind::kReasoning:
        return {{"reasoning_content", piece.text}, {"reasoning", piece.text}};
      case AnswerPiece::Kind::kCallBegin: {
        OrderedJson call = {{"index", choice.calls.size()}};
        call.update(CallJson(index, choice.calls.size(), piece.text, ""));
        choice.calls.push_back({piece.text, ""});
        return {{"tool_calls", OrderedJson::array({std::move(call)})}};
      }
      case AnswerPiece::Kind::kCallArguments: {
        OrderedJson call = {{"index", choice.calls.size() - 1},
                            {"function", {{"arguments", piece.text}}}};
        return {{"tool_calls", OrderedJson::array({std::move(call)})}};
      }
      case AnswerPiece::Kind::kCallEnd:
        break;
    }
    return nullptr;
  }

  const char* FinishOf(const Choice& choice) const {
    if (options_.drops_answer) return "length";
    const v1::FinishReason reason = choice.finish.reason();
    if (!choice.calls.empty() && reason != v1::FINISH_REASON_MAX_TOKENS) return "tool_calls";
    return FinishName(reason);
  }

  void AddScored(const v1::PromptToken& token, Prompt& prompt) const {
    if (options_.echo_logprobs.has_value()) {
      if (prompt.logprobs.is_null()) BeginLogprobs(prompt.logprobs);
      AppendLogprob(token, *options_.echo_logprobs, prompt.characters, prompt.logprobs);
    }
    if (options_.prompt_logprobs.has_value()) {
      Append(prompt.scores, prompt.scores.empty() ? "" : ",", Dump(ScoreOf(token)));
    }
  }

  // By token id: the prompt's own token, then the likeliest ones. Null for the first, as at vLLM.
  OrderedJson ScoreOf(const v1::PromptToken& token) const {
    if (!token.has_logprob()) return nullptr;
    OrderedJson out;
    const auto add = [&](const auto& rated, int32_t rank, const std::string& text) {
      out[Concat(rated.id())] = {
          {"logprob", Logprob(rated.logprob())}, {"rank", rank}, {"decoded_token", text}};
    };
    add(token, token.rank(), TextOf(token.id()));
    for (int i = 0; i < std::min(token.top_size(), *options_.prompt_logprobs); ++i) {
      const v1::TokenLogprob& likely = token.top(i);
      if (likely.id() != token.id()) add(likely, i + 1, likely.text());
    }
    return out;
  }

  void AddEvents(const v1::GenerateResponse& message, const std::vector<AnswerPiece>& pieces,
                 Choice& choice, std::string& out) {
    const int32_t index = message.choice();
    if (options_.chat && !std::exchange(choice.begun, true)) {
      Chunk(index, {{"role", "assistant"}, {"content", ""}}, nullptr, nullptr, nullptr, out);
    }
    if (!options_.echo.empty() && !std::exchange(choice.begun, true)) {
      Chunk(index, options_.echo[PromptOf(index)], nullptr, nullptr, nullptr, out);
    }
    OrderedJson logprobs;
    if (options_.logprobs) AppendLogprobs(message, choice, logprobs);
    for (const AnswerPiece& piece : pieces) {
      OrderedJson delta = piece.text;
      if (options_.chat) delta = DeltaOf(piece, index, choice);
      if (delta.is_null()) continue;
      Chunk(index, std::move(delta), std::exchange(logprobs, nullptr), nullptr, nullptr, out);
    }
    if (!logprobs.is_null() && message.tokens_size() > 0) {
      OrderedJson delta = "";
      if (options_.chat) delta = {{"content", ""}};
      Chunk(index, std::move(delta), std::move(logprobs), nullptr, nullptr, out);
    }
    // In a chunk of its own: some clients drop the text of the chunk that has the reason.
    if (message.has_finish()) {
      Chunk(index, options_.chat ? OrderedJson::object() : OrderedJson(""), nullptr,
            FinishOf(choice), StopReason(message.finish(), options_.eos_token_ids), out);
    }
  }

  std::string TextOf(int32_t id) const { return tokenizer_.Decode({&id, 1}, false); }

  void AppendLogprobs(const v1::GenerateResponse& message, Choice& choice, OrderedJson& out) {
    if (options_.chat) {
      if (out.is_null()) out = {{"content", OrderedJson::array()}, {"refusal", nullptr}};
      for (const v1::Token& token : message.tokens()) out["content"].push_back(ChatLogprob(token));
      return;
    }
    if (out.is_null()) BeginLogprobs(out);
    for (const v1::Token& token : message.tokens()) {
      AppendLogprob(token, token.top_size(), choice.characters, out);
    }
  }

  static void BeginLogprobs(OrderedJson& out) {
    for (const char* const key : {"tokens", "token_logprobs", "top_logprobs", "text_offset"}) {
      out[key] = OrderedJson::array();
    }
  }

  // A token of a prompt or of an answer, with `most` of the likeliest ones. `characters`: before it.
  void AppendLogprob(const auto& token, int most, size_t& characters, OrderedJson& out) const {
    const std::string text = TextOf(token.id());
    out["text_offset"].push_back(characters);
    characters += Characters(text);
    out["tokens"].push_back(text);
    if (!token.has_logprob()) {
      out["token_logprobs"].push_back(nullptr);
      out["top_logprobs"].push_back(nullptr);
      return;
    }
    out["token_logprobs"].push_back(Logprob(token.logprob()));
    OrderedJson top = OrderedJson::object();
    for (int i = 0; i < std::min(most, token.top_size()); ++i) {
      const v1::TokenLogprob& likely = token.top(i);
      // Two tokens may have the same text; the likelier one is first.
      if (!top.contains(likely.text())) top[likely.text()] = Logprob(likely.logprob());
    }
    // The token itself is among them in any case, as at OpenAI.
    if (!top.empty() && !top.contains(text)) top[text] = Logprob(token.logprob());
    out["top_logprobs"].push_back(std::move(top));
  }

  // The choice's, behind those of its prompt where that is echoed with them.
  OrderedJson LogprobsOf(size_t i) {
    OrderedJson own = std::move(choices_[i].logprobs);
    if (!options_.echo_logprobs.has_value()) return own;
    const Prompt& prompt = prompts_[PromptOf(i)];
    OrderedJson all = prompt.logprobs;
    for (const auto& [key, values] : own.items()) {
      for (OrderedJson& value : values) {
        if (key == "text_offset") value = value.get<size_t>() + prompt.characters;
        all[key].push_back(std::move(value));
      }
    }
    return all;
  }

  OrderedJson ChatLogprob(const v1::Token& token) const {
    OrderedJson out;
    const std::string text = TextOf(token.id());
    out["token"] = text;
    out["logprob"] = Logprob(token.logprob());
    out["bytes"] = BytesOf(text);
    OrderedJson top = OrderedJson::array();
    for (const v1::TokenLogprob& likely : token.top()) {
      top.push_back({{"token", likely.text()},
                     {"logprob", Logprob(likely.logprob())},
                     {"bytes", BytesOf(likely.text())}});
    }
    out["top_logprobs"] = std::move(top);
    return out;
  }

  OrderedJson Message(int32_t index, Choice& choice) const {
    OrderedJson message = {
        {"role", "assistant"}, {"content", std::move(choice.text)}, {"refusal", nullptr}};
    if (!choice.reasoning.empty()) {
      message["reasoning_content"] = choice.reasoning;
      message["reasoning"] = std::move(choice.reasoning);
    }
    if (choice.calls.empty()) return message;
    if (message["content"] == "") message["content"] = nullptr;
    for (size_t i = 0; i < choice.calls.size(); ++i) {
      message["tool_calls"].push_back(
          CallJson(index, i, choice.calls[i].name, choice.calls[i].arguments));
    }
    return message;
  }

  // Adds prompt_logprobs to an object whose last brace is still to come, where they are asked for.
  void AppendScores(const Prompt& prompt, std::string& object) const {
    if (!options_.prompt_logprobs.has_value()) return;
    object += R"(,"prompt_logprobs":[)";
    object += prompt.scores;
    object += ']';
  }

  std::string WholeAnswer() {
    std::string answer = Dump(Envelope());
    answer.back() = ',';
    answer += R"("choices":[)";
    for (size_t i = 0; i < choices_.size(); ++i) {
      Choice& choice = choices_[i];
      OrderedJson out;
      out["index"] = i;
      if (options_.chat) {
        out["message"] = Message(static_cast<int32_t>(i), choice);
      } else {
        out["text"] = options_.echo.empty() ? std::move(choice.text)
                                            : Concat(options_.echo[PromptOf(i)], choice.text);
      }
      out["logprobs"] = LogprobsOf(i);
      out["finish_reason"] = FinishOf(choice);
      out["stop_reason"] = StopReason(choice.finish, options_.eos_token_ids);
      if (i > 0) answer += ',';
      answer += Dump(out);
      answer.pop_back();
      if (!options_.chat) AppendScores(prompts_[PromptOf(i)], answer);
      answer += '}';
    }
    Append(answer, R"(],"usage":)", Dump(Usage()));
    if (options_.chat) AppendScores(prompts_.front(), answer);
    answer += '}';
    return answer;
  }

  static OrderedJson Counts(int32_t prompt, int32_t generated) {
    return {{"prompt_tokens", prompt},
            {"completion_tokens", generated},
            {"total_tokens", int64_t{prompt} + generated}};
  }
  OrderedJson LiveUsage() const {
    int32_t tokens = 0;
    for (const Prompt& prompt : prompts_) tokens += prompt.tokens;
    return Counts(tokens, live_tokens_);
  }
  OrderedJson Usage() const {
    UsageSum sum;
    for (const Prompt& prompt : prompts_) sum.AddPrompt(prompt.usage);
    OrderedJson usage = Counts(sum.prompt_tokens, options_.drops_answer ? 0 : sum.generated_tokens);
    usage["prompt_tokens_details"] = {{"cached_tokens", sum.cached_tokens.value_or(0)}};
    usage["completion_tokens_details"] = {{"reasoning_tokens", reasoning_tokens_}};
    usage["winnow"] = WinnowUsage(sum);
    return usage;
  }

  const OpenAiAnswerOptions options_;
  const engine::Tokenizer& tokenizer_;
  std::vector<Choice> choices_;  // n of each prompt
  std::vector<Prompt> prompts_;
  std::string id_;
  int64_t created_ = 0;
  int32_t live_tokens_ = 0;
  int32_t reasoning_tokens_ = 0;
};

}  // namespace

std::string Dump(const OrderedJson& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/false, OrderedJson::error_handler_t::replace);
}

namespace {

void AddReads(const v1::KvReadBytes& reads, v1::KvReadBytes& sum) {
  sum.set_fast(sum.fast() + reads.fast());
  sum.set_host(sum.host() + reads.host());
  sum.set_disk(sum.disk() + reads.disk());
}

void AddByPlace(const google::protobuf::RepeatedField<uint64_t>& counts,
                google::protobuf::RepeatedField<uint64_t>& sum) {
  if (sum.size() < counts.size()) sum.Resize(counts.size(), 0);
  for (int i = 0; i < counts.size(); ++i) sum.Set(i, sum.Get(i) + counts.Get(i));
}

void AddDrafts(const v1::DraftUsage& drafts, v1::DraftUsage& sum) {
  sum.set_drafted_tokens(sum.drafted_tokens() + drafts.drafted_tokens());
  sum.set_verified_tokens(sum.verified_tokens() + drafts.verified_tokens());
  sum.set_accepted_tokens(sum.accepted_tokens() + drafts.accepted_tokens());
  sum.set_verifications(sum.verifications() + drafts.verifications());
  AddByPlace(drafts.verified_at(), *sum.mutable_verified_at());
  AddByPlace(drafts.accepted_at(), *sum.mutable_accepted_at());
  AddReads(drafts.draft_read_bytes(), *sum.mutable_draft_read_bytes());
  AddReads(drafts.verify_read_bytes(), *sum.mutable_verify_read_bytes());
}

OrderedJson ReadsJson(const v1::KvReadBytes& reads) {
  return {{"fast", reads.fast()}, {"host", reads.host()}, {"disk", reads.disk()}};
}

}  // namespace

void UsageSum::Add(const v1::Usage& usage) {
  prompt_tokens = usage.prompt_tokens();
  generated_tokens += usage.generated_tokens();
  cached_tokens = std::min(cached_tokens.value_or(usage.cached_tokens()), usage.cached_tokens());
  AddReads(usage.kv_read_bytes(), *winnow.mutable_kv_read_bytes());
  winnow.set_policy(usage.policy());
  winnow.set_exactness(usage.exactness());
  winnow.set_kv_dense_bytes(winnow.kv_dense_bytes() + usage.kv_dense_bytes());
  winnow.set_attended_rows(winnow.attended_rows() + usage.attended_rows());
  winnow.set_dense_rows(winnow.dense_rows() + usage.dense_rows());
  winnow.set_preemptions(winnow.preemptions() + usage.preemptions());
  winnow.set_queue_seconds(std::max(winnow.queue_seconds(), usage.queue_seconds()));
  winnow.set_time_to_first_token_seconds(
      std::max(winnow.time_to_first_token_seconds(), usage.time_to_first_token_seconds()));
  winnow.set_total_seconds(std::max(winnow.total_seconds(), usage.total_seconds()));
  if (usage.has_drafts()) AddDrafts(usage.drafts(), *winnow.mutable_drafts());
  v1::RetrievalUsage& sum = *winnow.mutable_retrieval();
  const v1::RetrievalUsage& own = usage.retrieval();
  // Means over the probes of all choices.
  const auto mean = [&](double before, double after) {
    return (before * static_cast<double>(sum.probes()) +
            after * static_cast<double>(own.probes())) /
           static_cast<double>(sum.probes() + own.probes());
  };
  if (own.probes() > 0) {
    sum.set_coverage(mean(sum.coverage(), own.coverage()));
    sum.set_iou(mean(sum.iou(), own.iou()));
    sum.set_probes(sum.probes() + own.probes());
  }
  sum.set_candidate_rows(sum.candidate_rows() + own.candidate_rows());
  sum.set_selected_rows(sum.selected_rows() + own.selected_rows());
}

void UsageSum::AddPrompt(const UsageSum& other) {
  const int32_t prompts = prompt_tokens + other.prompt_tokens;
  const int32_t cached = cached_tokens.value_or(0) + other.cached_tokens.value_or(0);
  Add(other.winnow);
  prompt_tokens = prompts;
  generated_tokens += other.generated_tokens;
  cached_tokens = cached;
}

OrderedJson WinnowUsage(const UsageSum& sum) {
  const v1::Usage& usage = sum.winnow;
  OrderedJson out = {{"policy", usage.policy()}, {"exactness", usage.exactness()}};
  out["kv_read_bytes"] = ReadsJson(usage.kv_read_bytes());
  out["kv_dense_bytes"] = usage.kv_dense_bytes();
  out["attended_rows"] = usage.attended_rows();
  out["dense_rows"] = usage.dense_rows();
  if (usage.has_drafts()) {
    out["drafted_tokens"] = usage.drafts().drafted_tokens();
    out["verified_draft_tokens"] = usage.drafts().verified_tokens();
    out["accepted_draft_tokens"] = usage.drafts().accepted_tokens();
    out["verifications"] = usage.drafts().verifications();
    out["verified_at"] = OrderedJson(usage.drafts().verified_at());
    out["accepted_at"] = OrderedJson(usage.drafts().accepted_at());
    out["draft_read_bytes"] = ReadsJson(usage.drafts().draft_read_bytes());
    out["verify_read_bytes"] = ReadsJson(usage.drafts().verify_read_bytes());
  }
  const v1::RetrievalUsage& retrieval = usage.retrieval();
  if (retrieval.candidate_rows() > 0) {
    out["kept"] = static_cast<double>(retrieval.selected_rows()) /
                  static_cast<double>(retrieval.candidate_rows());
  }
  if (retrieval.probes() > 0) {
    out["probes"] = retrieval.probes();
    out["coverage"] = retrieval.coverage();
    out["iou"] = retrieval.iou();
  }
  out["preemptions"] = usage.preemptions();
  out["queue_seconds"] = usage.queue_seconds();
  out["time_to_first_token_seconds"] = usage.time_to_first_token_seconds();
  out["total_seconds"] = usage.total_seconds();
  return out;
}

std::unique_ptr<AnswerFormat> MakeOpenAiFormat(OpenAiAnswerOptions options,
                                               const engine::Tokenizer& tokenizer) {
  return std::make_unique<OpenAiFormat>(std::move(options), tokenizer);
}

}  // namespace winnow::server
