#include "bench/exact.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <random>
#include <utility>

#include "engine/base/status_macros.h"
#include "engine/schedule/engine.h"
#include "engine/schedule/output_queue.h"
#include "fmt/format.h"

namespace winnow::bench {
namespace {

using engine::FinishReason;
using engine::OutputEvent;
using engine::OutputToken;
using engine::Request;

struct Told {
  std::string text;
  std::vector<OutputToken> tokens;
  OutputEvent last;
};

class Requests {
 public:
  Requests(const ExactOptions& options, std::span<const int32_t> text, int32_t vocab_size)
      : options_(options), text_(text), vocab_size_(vocab_size), random_(options.seed) {}

  Request Next() {
    Request request;
    request.prompt = Prompt();
    if (options_.plain) {
      request.stopping.max_tokens = options_.max_tokens;
      return request;
    }
    request.stopping.max_tokens = Pick(1, options_.max_tokens);
    engine::SamplingOptions& sampling = request.sampling;
    if (Pick(0, 1) == 1) {
      sampling.temperature = 0.1f * static_cast<float>(Pick(1, 15));
      sampling.seed = random_();
      if (Pick(0, 2) == 0) sampling.top_p = 0.9f;
      if (Pick(0, 3) == 0) sampling.top_k = Pick(1, 50);
      if (Pick(0, 3) == 0) sampling.min_p = 0.05f;
    }
    if (Pick(0, 3) == 0) sampling.repetition_penalty = 1.1f;
    if (Pick(0, 3) == 0) sampling.presence_penalty = 0.4f;
    if (Pick(0, 3) == 0) sampling.frequency_penalty = 0.2f;
    if (Pick(0, 5) == 0) sampling.logit_bias = {{Pick(0, vocab_size_ - 1), 4.0f}};
    if (Pick(0, 1) == 1) request.top_logprobs = Pick(0, 5);
    if (Pick(0, 3) == 0) request.stopping.stop_strings = {". ", "\n\n", " the"};
    if (Pick(0, 3) == 0) {
      request.stopping.min_tokens = Pick(1, request.stopping.max_tokens);
      request.stopping.stop_token_ids = {text_.empty() ? Pick(0, vocab_size_ - 1)
                                                       : text_[Pick(0, LastOfText())]};
    }
    return request;
  }
  // The same request again, as another choice.
  bool Again() { return !options_.plain && Pick(0, 4) == 0; }

 private:
  int32_t Pick(int32_t low, int32_t high) {
    return low + static_cast<int32_t>(random_() % (static_cast<uint64_t>(high - low) + 1));
  }
  int32_t LastOfText() const { return static_cast<int32_t>(text_.size()) - 1; }
  std::vector<int32_t> Prompt() {
    int32_t size = Pick(options_.min_prompt, options_.max_prompt);
    std::vector<int32_t> prompt;
    if (text_.empty()) {
      for (int32_t i = 0; i < size; ++i) prompt.push_back(Pick(0, vocab_size_ - 1));
      return prompt;
    }
    size = std::min(size, LastOfText() + 1);
    const int32_t begin = Pick(0, LastOfText() + 1 - size);
    prompt.assign(text_.begin() + begin, text_.begin() + begin + size);
    return prompt;
  }

  const ExactOptions& options_;
  const std::span<const int32_t> text_;
  const int32_t vocab_size_;
  std::mt19937_64 random_;
};

absl::StatusOr<std::vector<Told>> Answers(engine::Engine& engine, std::span<const Request> requests,
                                          const engine::AttentionPolicy& policy,
                                          engine::RequestId* next_id) {
  std::vector<std::shared_ptr<engine::OutputQueue>> outputs;
  for (Request request : requests) {
    request.id = (*next_id)++;
    request.policy = policy;
    request.arrival = std::chrono::steady_clock::now();
    outputs.push_back(std::make_shared<engine::OutputQueue>(size_t{1} << 20, nullptr, nullptr));
    WINNOW_RETURN_IF_ERROR(engine.Submit(std::move(request), outputs.back()));
  }
  std::vector<Told> told(outputs.size());
  size_t ended = 0;
  while (ended < outputs.size()) {
    engine.Step();
    for (size_t i = 0; i < outputs.size(); ++i) {
      while (std::optional<OutputEvent> event = outputs[i]->Pop()) {
        told[i].text += event->text;
        for (OutputToken& token : event->tokens) told[i].tokens.push_back(std::move(token));
        ended += event->finish != FinishReason::kNone;
        told[i].last = *std::move(event);
      }
    }
  }
  return told;
}

// Empty: there is none.
std::string Difference(const Told& dense, const Told& verified) {
  if (verified.last.finish != dense.last.finish) {
    return fmt::format("ended for reason {} and not {}: {}", static_cast<int>(verified.last.finish),
                       static_cast<int>(dense.last.finish), verified.last.error);
  }
  if (verified.tokens.size() != dense.tokens.size()) {
    return fmt::format("{} tokens and not {}", verified.tokens.size(), dense.tokens.size());
  }
  for (size_t i = 0; i < dense.tokens.size(); ++i) {
    const OutputToken& a = dense.tokens[i];
    const OutputToken& b = verified.tokens[i];
    if (a.token != b.token) return fmt::format("token {} is {} and not {}", i, b.token, a.token);
    const bool same = a.logprob == b.logprob &&
                      std::equal(a.top.begin(), a.top.end(), b.top.begin(), b.top.end(),
                                 [](const engine::TokenLogprob& x, const engine::TokenLogprob& y) {
                                   return x.token == y.token && x.logprob == y.logprob;
                                 });
    if (!same) return fmt::format("log-probabilities of token {} differ", i);
  }
  if (verified.text != dense.text) return "the text differs";
  if (verified.last.stop_match != dense.last.stop_match) return "another stop string";
  return "";
}

void Add(const std::vector<Told>& dense, const std::vector<Told>& told, int64_t done,
         ExactResult* result) {
  for (size_t i = 0; i < told.size(); ++i) {
    const engine::Usage& usage = told[i].last.usage;
    ++result->requests;
    result->tokens += usage.generated_tokens - 1;
    result->decode_seconds +=
        std::chrono::duration<double>(usage.total_time - usage.time_to_first_token).count();
    result->drafts += usage.drafts;
    const std::string difference = Difference(dense[i], told[i]);
    result->equal += difference.empty();
    if (!difference.empty() && result->difference.empty()) {
      result->difference =
          fmt::format("request {}: {}", done + static_cast<int64_t>(i), difference);
    }
  }
}

}  // namespace

absl::StatusOr<std::vector<ExactResult>> RunExact(engine::LoadedModel& model,
                                                  std::span<const int32_t> text,
                                                  std::span<const engine::AttentionPolicy> policies,
                                                  const ExactOptions& options,
                                                  const std::function<void(int64_t)>& progress) {
  const engine::SteadyClock clock;
  engine::EngineOptions engine_options;
  engine_options.max_running = options.concurrent;
  engine_options.step_tokens = model.decoder->max_batch_tokens();
  WINNOW_ASSIGN_OR_RETURN(
      const std::unique_ptr<engine::Engine> engine,
      engine::Engine::Create(engine_options, *model.decoder, *model.tokenizer, clock));
  std::vector<ExactResult> results(1 + policies.size());
  results[0].policy = "dense";
  for (size_t i = 0; i < policies.size(); ++i) results[1 + i].policy = ToString(policies[i]);
  Requests drawn(options, text, model.decoder->vocab_size());
  engine::RequestId next_id = 1;
  for (int64_t done = 0; done < options.requests;) {
    std::vector<Request> group;
    while (static_cast<int32_t>(group.size()) < options.concurrent &&
           done + static_cast<int64_t>(group.size()) < options.requests) {
      if (!group.empty() && drawn.Again()) {
        group.push_back(group.back());
        ++group.back().sampling.seed;
      } else {
        group.push_back(drawn.Next());
      }
    }
    WINNOW_ASSIGN_OR_RETURN(const std::vector<Told> dense, Answers(*engine, group, {}, &next_id));
    Add(dense, dense, done, &results[0]);
    for (size_t i = 0; i < policies.size(); ++i) {
      WINNOW_ASSIGN_OR_RETURN(const std::vector<Told> told,
                              Answers(*engine, group, policies[i], &next_id));
      Add(dense, told, done, &results[1 + i]);
    }
    done += static_cast<int64_t>(group.size());
    progress(done);
  }
  return results;
}

}  // namespace winnow::bench
