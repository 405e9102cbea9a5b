// Soaks the engine with a real model: many streams at once, random prompts, sampling settings and
// attention policies, random cancels, deadlines and slow readers, a KV pool that is too small for
// them, for a while. Then every answer that ended by itself must be the one that its request has
// alone, and every block must be back. Meant for builds with sanitizers; exits with 1 if anything
// is wrong.
//
// Requests come from a fixed set, so that each is run alone only once, before the soak, in an
// engine of its own over the same model.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/base/thread_annotations.h"
#include "engine/base/mutex.h"
#include "engine/model_loader.h"
#include "engine/schedule/engine.h"

namespace winnow {
namespace {

using engine::FinishReason;
using engine::Request;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

struct Options {
  std::string model_dir = "models/needle-5m";
  int seconds = 300;
  int streams = 64;
  int distinct = 48;
  int kv_blocks = 96;
  int block_tokens = 16;
  int max_prompt = 300;
  int max_tokens = 24;
  uint32_t seed = 1;
};

class Dice {
 public:
  explicit Dice(uint32_t seed) : random_(seed) {}
  int Pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  bool OneIn(int n) { return Pick(1, n) == 1; }
  // Evenly over orders of magnitude.
  int PickLog(int low, int high) {
    const double exponent =
        std::uniform_real_distribution<double>(std::log(low), std::log(high + 1))(random_);
    return std::clamp(static_cast<int>(std::exp(exponent)), low, high);
  }

 private:
  std::mt19937 random_;
};

// Those that the model can run, with windows and budgets so small that prompts of a few dozen
// tokens retrieve.
std::vector<engine::AttentionPolicy> Policies(const engine::Decoder& decoder) {
  std::vector<engine::AttentionPolicy> policies;
  for (const char* text :
       {"window:sink=2,window=9", "oracle:k=5,window=9", "quest:k=16,window=9",
        "lsh:k=5,window=9,suffix=30", "lsh:k=4,p=0.9,window=9,floor=0.5", "hata:k=6,window=9",
        "spotlight:k=5%,window=9,completion=on,suffix=50", "window:window=9,completion=on"}) {
    const auto policy = engine::ParseAttentionPolicy(text);
    if (policy.ok() && decoder.CheckPolicy(*policy).ok()) policies.push_back(*policy);
  }
  return policies;
}

Request RandomRequest(Dice& dice, const Options& options, int32_t vocab_size,
                      const std::vector<engine::AttentionPolicy>& policies) {
  Request request;
  request.tenant = std::string(dice.Pick(0, 3), 't');
  request.prompt.resize(dice.PickLog(1, options.max_prompt));
  for (int32_t& token : request.prompt) token = dice.Pick(0, vocab_size - 1);
  auto& sampling = request.sampling;
  if (!dice.OneIn(3)) {
    sampling.temperature = static_cast<float>(dice.Pick(2, 20)) / 10;
    sampling.seed = dice.Pick(0, 1 << 30);
    if (dice.OneIn(3)) sampling.top_k = dice.Pick(1, 100);
    if (dice.OneIn(3)) sampling.top_p = static_cast<float>(dice.Pick(10, 99)) / 100;
    if (dice.OneIn(3)) sampling.min_p = static_cast<float>(dice.Pick(1, 30)) / 100;
  }
  if (dice.OneIn(4)) sampling.repetition_penalty = 1.2f;
  if (dice.OneIn(4)) sampling.presence_penalty = 0.5f;
  if (dice.OneIn(4)) sampling.frequency_penalty = 0.3f;
  if (dice.OneIn(5)) sampling.logit_bias = {{dice.Pick(0, vocab_size - 1), 4.0f}};
  if (dice.OneIn(4)) request.top_logprobs = dice.Pick(0, 5);
  auto& stopping = request.stopping;
  stopping.max_tokens = dice.Pick(1, options.max_tokens);
  if (dice.OneIn(2)) stopping.stop_strings = {" the", "e"};
  if (dice.OneIn(2)) stopping.stop_token_ids = {1, dice.Pick(0, vocab_size - 1)};
  if (dice.OneIn(3)) stopping.min_tokens = dice.Pick(0, stopping.max_tokens);
  stopping.include_stop = dice.OneIn(2);
  if (!policies.empty() && dice.OneIn(2)) {
    request.policy = policies[dice.Pick(0, static_cast<int>(policies.size()) - 1)];
  }
  return request;
}

struct Answer {
  std::vector<int32_t> tokens;
  std::string text;
  engine::OutputEvent last;
};

// One stream's end of an OutputQueue. Shared with its callback, which may run after the last event
// was read.
class Reader {
 public:
  void Ring() {
    const engine::MutexLock lock(mutex_);
    rung_ = true;
    ringing_.NotifyOne();
  }
  void Await() {
    const engine::MutexLock lock(mutex_);
    while (!rung_) ringing_.Wait(mutex_);
    rung_ = false;
  }

 private:
  engine::Mutex mutex_;
  engine::CondVar ringing_;
  bool rung_ ABSL_GUARDED_BY(mutex_) = false;
};

// Appends the event; true if it was the last.
bool Append(engine::OutputEvent event, Answer* answer) {
  answer->text += event.text;
  for (const engine::OutputToken& token : event.tokens) answer->tokens.push_back(token.token);
  answer->last = std::move(event);
  return answer->last.finish != FinishReason::kNone;
}

class Soak {
 public:
  Soak(const Options& options, engine::LoadedModel& model) : options_(options), model_(model) {}

  bool Run() {
    Dice dice(options_.seed);
    const std::vector<engine::AttentionPolicy> policies = Policies(*model_.decoder);
    for (int i = 0; i < options_.distinct; ++i) {
      requests_.push_back(RandomRequest(dice, options_, model_.config.vocab_size, policies));
    }
    for (Request& request : requests_) {
      alone_.push_back(RunAlone(request));
      // Ends that random stop tokens would hardly ever meet.
      if (!dice.OneIn(3) || alone_.back().tokens.empty()) continue;
      request.stopping.stop_token_ids.push_back(
          alone_.back().tokens[dice.Pick(0, static_cast<int>(alone_.back().tokens.size()) - 1)]);
      alone_.back() = RunAlone(request);
    }
    std::printf("%d distinct requests ran alone, under %zu policies and dense attention\n",
                options_.distinct, policies.size());

    engine::EngineOptions engine_options;
    engine_options.max_running = std::max(1, options_.streams / 2);
    engine_options.step_tokens = 128;
    engine_options.queue_requests = std::max(1, options_.streams / 2);
    engine_options.pause_grace = milliseconds(20);
    engine_options.slow_reader_timeout = milliseconds(5000);
    auto created =
        engine::Engine::Create(engine_options, *model_.decoder, *model_.tokenizer, clock_);
    if (!created.ok()) return Wrong(std::string(created.status().message()));
    engine_ = std::move(created).value();
    {
      std::jthread runner([this](std::stop_token stop) { engine_->Run(stop); });
      std::vector<std::jthread> streams;
      end_ = steady_clock::now() + std::chrono::seconds(options_.seconds);
      for (int i = 0; i < options_.streams; ++i) {
        streams.emplace_back([this, i] { Stream(i); });
      }
      Report();
      streams.clear();  // joins
      engine_->BeginDrain();
      runner.join();
    }
    const engine::EngineStats stats = engine_->stats();
    if (stats.blocks_used != 0)
      Wrong("blocks in use at the end: " + std::to_string(stats.blocks_used));
    if (stats.running != 0 || stats.waiting != 0) Wrong("requests left at the end");
    uint64_t finished = 0;
    for (const uint64_t count : stats.finished) finished += count;
    if (finished != stats.accepted) Wrong("accepted requests that did not end");
    Print(stats);
    return wrong_ == 0;
  }

 private:
  bool Wrong(const std::string& what) {
    std::fprintf(stderr, "WRONG: %s\n", what.c_str());
    ++wrong_;
    return false;
  }

  Answer RunAlone(const Request& request) {
    auto engine = engine::Engine::Create({.max_running = 1, .step_tokens = 128}, *model_.decoder,
                                         *model_.tokenizer, clock_);
    Answer answer;
    auto output = std::make_shared<engine::OutputQueue>(10'000, nullptr, nullptr);
    if (!engine.ok() || !(*engine)->Submit(request, output).ok()) {
      Wrong("a request cannot run alone");
      return answer;
    }
    while ((*engine)->Step()) {
    }
    while (std::optional<engine::OutputEvent> event = output->Pop()) {
      Append(*std::move(event), &answer);
    }
    return answer;
  }

  void Report() {
    while (steady_clock::now() < end_) {
      std::this_thread::sleep_for(
          std::min<steady_clock::duration>(std::chrono::seconds(30), end_ - steady_clock::now()));
      Print(engine_->stats());
    }
  }

  void Print(const engine::EngineStats& stats) const {
    const auto count = [&stats](FinishReason reason) {
      return static_cast<unsigned long long>(stats.finished[static_cast<int>(reason)]);
    };
    std::printf(
        "accepted %llu refused %llu | stop token %llu string %llu max %llu cancelled %llu deadline "
        "%llu error %llu | equal to alone %lld, cut short and equal so far %lld | tokens %llu "
        "preemptions %llu | running %d paused %d waiting %d blocks %d/%d\n",
        static_cast<unsigned long long>(stats.accepted),
        static_cast<unsigned long long>(stats.rejected), count(FinishReason::kStopToken),
        count(FinishReason::kStopString), count(FinishReason::kMaxTokens),
        count(FinishReason::kCancelled), count(FinishReason::kDeadline),
        count(FinishReason::kError), static_cast<long long>(equal_), static_cast<long long>(cut_),
        static_cast<unsigned long long>(stats.generated_tokens),
        static_cast<unsigned long long>(stats.preemptions), stats.running, stats.paused,
        stats.waiting, stats.blocks_used, stats.blocks_total);
    std::fflush(stdout);
  }

  // One client after another, until the time is over.
  void Stream(int index) {
    Dice dice(options_.seed * 1000 + index);
    while (steady_clock::now() < end_) {
      const int which = dice.Pick(0, options_.distinct - 1);
      Request request = requests_[which];
      request.id = next_id_++;
      request.arrival = clock_.Now();
      if (dice.OneIn(5)) request.deadline = clock_.Now() + milliseconds(dice.PickLog(1, 20'000));
      const int cancel_after = dice.OneIn(5) ? dice.Pick(0, options_.max_tokens) : -1;  // events
      const bool slow = dice.OneIn(6);
      const auto reader = std::make_shared<Reader>();
      const auto output = std::make_shared<engine::OutputQueue>(
          slow ? 2 : 1000, [reader] { reader->Ring(); }, [this] { engine_->Wake(); });
      const engine::RequestId id = request.id;
      if (const absl::Status status = engine_->Submit(std::move(request), output); !status.ok()) {
        if (!absl::IsResourceExhausted(status)) Wrong(std::string(status.message()));
        std::this_thread::sleep_for(
            std::min<engine::Duration>(engine_->RetryAfter(), milliseconds(200)));
        continue;
      }
      if (cancel_after == 0) engine_->Cancel(id);
      Answer answer;
      bool ended = false;
      for (int events = 0; !ended;) {
        reader->Await();
        while (!ended) {
          std::optional<engine::OutputEvent> event = output->Pop();
          if (!event.has_value()) break;
          ended = Append(*std::move(event), &answer);
          if (++events == cancel_after) engine_->Cancel(id);
          if (slow) std::this_thread::sleep_for(milliseconds(dice.PickLog(1, 300)));
        }
      }
      Check(answer, alone_[which], which);
    }
  }

  void Check(const Answer& answer, const Answer& alone, int which) {
    const bool by_itself = answer.last.finish == FinishReason::kStopToken ||
                           answer.last.finish == FinishReason::kStopString ||
                           answer.last.finish == FinishReason::kMaxTokens;
    if (by_itself) {
      if (answer.tokens != alone.tokens || answer.text != alone.text ||
          answer.last.finish != alone.last.finish) {
        Wrong("request " + std::to_string(which) + " differs from its run alone");
      } else {
        ++equal_;
      }
      return;
    }
    const bool prefix =
        answer.tokens.size() <= alone.tokens.size() &&
        std::equal(answer.tokens.begin(), answer.tokens.end(), alone.tokens.begin());
    if (answer.last.finish == FinishReason::kError) {
      Wrong("request " + std::to_string(which) + " failed: " + answer.last.error);
    } else if (!prefix) {
      Wrong("request " + std::to_string(which) + ", cut short, differs from its run alone");
    } else {
      ++cut_;
    }
  }

  const Options options_;
  engine::LoadedModel& model_;
  const engine::SteadyClock clock_;
  std::unique_ptr<engine::Engine> engine_;
  std::vector<Request> requests_;
  std::vector<Answer> alone_;
  steady_clock::time_point end_;
  std::atomic<engine::RequestId> next_id_ = 1;
  std::atomic<int64_t> equal_ = 0;
  std::atomic<int64_t> cut_ = 0;
  std::atomic<int64_t> wrong_ = 0;
};

int Main(const Options& options) {
  const absl::StatusOr<engine::ModelConfig> config = engine::LoadModelConfig(options.model_dir);
  if (!config.ok()) {
    std::fprintf(stderr, "%s\n", config.status().ToString().c_str());
    return 2;
  }
  engine::ModelOptions model_options;
  model_options.kv_dtype = "bf16";
  model_options.block_tokens = options.block_tokens;
  model_options.max_batch_tokens = 128;
  model_options.max_batch_logits = std::max(1, options.streams);
  model_options.retrieval.probe_interval = 3;
  model_options.retrieval.summaries = model_options.max_batch_logits;
  // Two values of two bytes for each dimension of each row.
  model_options.kv_bytes = int64_t{4} * config->head_dim * config->num_kv_heads *
                           config->num_layers() * options.block_tokens * options.kv_blocks;
  auto model = engine::LoadModel(options.model_dir, model_options);
  if (!model.ok()) {
    std::fprintf(stderr, "%s\n", model.status().ToString().c_str());
    return 2;
  }
  std::printf("%s: %d KV blocks of %d tokens, %d streams, %d s\n", options.model_dir.c_str(),
              (*model)->decoder->num_blocks(), options.block_tokens, options.streams,
              options.seconds);
  Soak soak(options, **model);
  const bool good = soak.Run();
  std::printf("%s\n", good ? "soak passed" : "soak FAILED");
  return good ? 0 : 1;
}

}  // namespace
}  // namespace winnow

int main(int argc, char** argv) {
  winnow::Options options;
  CLI::App app("Soaks the engine and compares every answer with that of a run alone");
  app.add_option("--model", options.model_dir, "model directory")->capture_default_str();
  app.add_option("--seconds", options.seconds)->capture_default_str()->check(CLI::PositiveNumber);
  app.add_option("--streams", options.streams)->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_option("--distinct", options.distinct, "different requests")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--kv-blocks", options.kv_blocks,
                 "of the pool; few, so that requests are preempted")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--block-tokens", options.block_tokens)->capture_default_str();
  app.add_option("--max-prompt", options.max_prompt)
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--max-tokens", options.max_tokens)
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--seed", options.seed)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return winnow::Main(options);
}
