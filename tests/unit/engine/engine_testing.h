// What tests of the engine share: a clock that they own, a client that reads, and requests.
#ifndef WINNOW_TESTS_UNIT_ENGINE_ENGINE_TESTING_H_
#define WINNOW_TESTS_UNIT_ENGINE_ENGINE_TESTING_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/clock.h"
#include "engine/schedule/engine.h"
#include "engine/text/tokenizer.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/fake_model.h"
#include "tests/unit/test_paths.h"

namespace winnow::engine {

class FakeClock final : public Clock {
 public:
  TimePoint Now() const override { return now_; }
  void Advance(Duration by) { now_ += by; }

 private:
  TimePoint now_ = TimePoint(std::chrono::hours(1));
};

// The tokenizer of the model in the project; made once, it never changes.
inline const Tokenizer& TestTokenizer() {
  static const Tokenizer& tokenizer = *[] {
    auto loaded = Tokenizer::Load(SourcePath("models/needle-5m"));
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return std::move(loaded).value().release();
  }();
  return tokenizer;
}

// What a client has read of one answer.
struct Reply {
  std::string text;
  std::vector<int32_t> tokens;
  std::vector<OutputToken> details;
  std::vector<ScoredToken> scores;
  OutputEvent last;
  int events = 0;
  bool ended() const { return last.finish != FinishReason::kNone; }
};

class Client {
 public:
  explicit Client(size_t capacity_events = 1000)
      : output(std::make_shared<OutputQueue>(capacity_events, nullptr, nullptr)) {}

  // Reads at most `events`, or all there are.
  const Reply& Read(int events = -1) {
    while (events-- != 0) {
      std::optional<OutputEvent> event = output->Pop();
      if (!event.has_value()) break;
      EXPECT_FALSE(reply.ended()) << "an event after the last";
      EXPECT_TRUE(event->scores.empty() || reply.tokens.empty()) << "scores after tokens";
      for (const ScoredToken& score : event->scores) reply.scores.push_back(score);
      reply.text += event->text;
      for (const OutputToken& token : event->tokens) {
        reply.tokens.push_back(token.token);
        reply.details.push_back(token);
      }
      ++reply.events;
      reply.last = *std::move(event);
    }
    return reply;
  }

  const std::shared_ptr<OutputQueue> output;
  Reply reply;
};

inline Request MakeRequest(RequestId id, std::vector<int32_t> prompt, int32_t max_tokens) {
  Request request;
  request.id = id;
  request.prompt = std::move(prompt);
  request.stopping.max_tokens = max_tokens;
  return request;
}

inline std::vector<int32_t> Prompt(int32_t length, int32_t salt = 0) {
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < length; ++i) prompt.push_back(8 + (i * 7 + salt * 13) % 90);
  return prompt;
}

inline std::unique_ptr<Engine> MakeEngine(const EngineOptions& options, Model& model,
                                          const Clock& clock, EngineObserver* observer = nullptr) {
  auto engine = Engine::Create(options, model, TestTokenizer(), clock, observer);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return std::move(engine).value();
}

// Steps until nothing computes any more.
inline void StepUntilIdle(Engine& engine) {
  for (int i = 0; engine.Step(); ++i) ASSERT_LT(i, 100'000) << "the engine does not end";
}

// The request in an engine of its own, with room for everything and nothing to hurry it.
inline Reply RunAlone(Request request) {
  FakeClock clock;
  FakeModel model;
  const std::unique_ptr<Engine> engine = MakeEngine({}, model, clock);
  request.deadline.reset();
  Client client;
  EXPECT_TRUE(engine->Submit(std::move(request), client.output).ok());
  StepUntilIdle(*engine);
  EXPECT_TRUE(client.Read().ended());
  EXPECT_EQ(engine->stats().blocks_used, 0);
  return client.reply;
}

}  // namespace winnow::engine

#endif  // WINNOW_TESTS_UNIT_ENGINE_ENGINE_TESTING_H_
