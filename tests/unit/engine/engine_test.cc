#include "engine/schedule/engine.h"

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/engine_testing.h"

namespace winnow::engine {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

class EngineTest : public testing::Test {
 protected:
  void Make(const EngineOptions& options = {}, const FakeModelShape& shape = {},
            EngineObserver* observer = nullptr) {
    engine_.reset();  // before its model
    model_ = std::make_unique<FakeModel>(shape);
    engine_ = MakeEngine(options, *model_, clock_, observer);
  }
  // Submits, and must be accepted.
  void Submit(Request request, Client& client) {
    request.arrival = clock_.Now();
    const absl::Status status = engine_->Submit(std::move(request), client.output);
    ASSERT_TRUE(status.ok()) << status;
  }
  void Steps(int count) {
    for (int i = 0; i < count; ++i) engine_->Step();
  }

  FakeClock clock_;
  std::unique_ptr<FakeModel> model_;
  std::unique_ptr<Engine> engine_;
};

// ---- what is computed ----

TEST_F(EngineTest, TokensEqualAPlainLoopOverTheModel) {
  const std::vector<int32_t> prompt = Prompt(37);
  FakeModel plain;
  std::vector<int32_t> all = prompt;
  std::vector<int32_t> table(plain.num_blocks());
  for (int32_t i = 0; i < plain.num_blocks(); ++i) table[i] = i;
  std::vector<float> logits(plain.vocab_size());
  for (int i = 0; i < 20; ++i) {
    Batch batch;
    batch.chunks.push_back({.tokens = all, .position = 0, .block_table = table, .num_logits = 1});
    ASSERT_TRUE(plain.Forward(batch, logits).ok());
    all.push_back(
        static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
  }
  const Reply reply = RunAlone(MakeRequest(1, prompt, 20));
  EXPECT_EQ(reply.tokens, std::vector<int32_t>(all.begin() + 37, all.end()));
  EXPECT_EQ(reply.last.finish, FinishReason::kMaxTokens);
  EXPECT_EQ(reply.text, TestTokenizer().Decode(reply.tokens, true));
}

// A client that has its first token finds its request among those that run, and at its end no longer.
TEST_F(EngineTest, StatisticsComeBeforeEvents) {
  Make();
  std::vector<int64_t> running;
  const auto output = std::make_shared<OutputQueue>(
      100, [&] { running.push_back(engine_->stats().running); }, nullptr);
  Request request = MakeRequest(1, Prompt(5), 3);
  request.arrival = clock_.Now();
  ASSERT_TRUE(engine_->Submit(std::move(request), output).ok());
  StepUntilIdle(*engine_);
  EXPECT_EQ(running, (std::vector<int64_t>{1, 1, 0}));
}

TEST_F(EngineTest, TheSizeOfChunksDoesNotMatter) {
  const Request request = MakeRequest(1, Prompt(50), 12);
  const Reply alone = RunAlone(request);
  for (const int32_t budget : {1, 2, 3, 7, 16, 49, 50, 51}) {
    EngineOptions options;
    options.max_running = 1;
    options.step_tokens = budget;
    Make(options);
    Client client;
    Submit(request, client);
    StepUntilIdle(*engine_);
    EXPECT_EQ(client.Read().tokens, alone.tokens) << budget;
    EXPECT_EQ(model_->num_forwards, (50 + budget - 1) / budget + 11);
  }
}

// A long prompt goes in large steps while nobody decodes, and in small ones beside a sequence that does.
TEST_F(EngineTest, ALargeStepIsForPromptsThatNobodyWaitsBehind) {
  const Request request = MakeRequest(1, Prompt(50), 12);
  const Reply alone = RunAlone(request);
  EngineOptions options;
  options.max_running = 2;
  options.step_tokens = 8;
  options.prompt_step_tokens = 20;
  Make(options);
  Client client;
  Submit(request, client);
  StepUntilIdle(*engine_);
  EXPECT_EQ(client.Read().tokens, alone.tokens);
  EXPECT_EQ(model_->num_forwards, 3 + 11);
  // The first decodes from its first step on, and takes one of the eight.
  Make(options);
  Client first, second;
  Submit(MakeRequest(2, Prompt(4, 1), 30), first);
  ASSERT_TRUE(engine_->Step());
  Submit(request, second);
  Steps(7);  // with seven tokens of the prompt each
  EXPECT_EQ(engine_->stats().computed_tokens, 4u + 7 * 8);
  StepUntilIdle(*engine_);
  EXPECT_EQ(first.Read().tokens.size(), 30u);
  EXPECT_EQ(second.Read().tokens, alone.tokens);
  EXPECT_EQ(model_->num_forwards, 30);
}

TEST_F(EngineTest, APreemptedRequestHasTheSameTokens) {
  FakeModelShape shape;
  shape.num_blocks = 20;  // 80 tokens for two that need 70 each
  Make({}, shape);
  Request first = MakeRequest(1, Prompt(30), 40);
  Request second = MakeRequest(2, Prompt(30, 1), 40);
  second.sampling.temperature = 1;
  second.sampling.seed = 5;
  second.sampling.frequency_penalty = 0.5f;
  second.top_logprobs = 1;
  Client a, b;
  Submit(first, a);
  Submit(second, b);
  StepUntilIdle(*engine_);
  const Reply alone = RunAlone(second);
  EXPECT_EQ(a.Read().tokens, RunAlone(first).tokens);
  EXPECT_EQ(b.Read().tokens, alone.tokens);
  EXPECT_EQ(b.reply.text, alone.text);
  EXPECT_EQ(a.reply.last.usage.preemptions, 0) << "the older one is never preempted";
  EXPECT_GE(b.reply.last.usage.preemptions, 1);
  EXPECT_EQ(b.reply.last.usage.kv_dense_bytes, alone.last.usage.kv_dense_bytes);
  EXPECT_EQ(engine_->stats().blocks_used, 0);
}

// Two that need more than the pool while a third one's blocks are taken away and given back.
TEST_F(EngineTest, WhoWasAdmittedLastIsPreemptedNotWhoCameLast) {
  EngineOptions options;
  options.max_running = 2;
  options.step_tokens = 64;
  FakeModelShape shape;
  shape.num_blocks = 20;
  Make(options, shape);
  // Tenant "a" is served first, so that "b", which comes last, is admitted before a's second.
  Client a0, a1, b;
  Request request = MakeRequest(1, Prompt(30), 3);
  request.tenant = "a";
  Submit(request, a0);
  request = MakeRequest(2, Prompt(30, 1), 40);
  request.tenant = "a";
  Submit(request, a1);
  request = MakeRequest(3, Prompt(30, 2), 40);
  request.tenant = "b";
  Submit(request, b);
  StepUntilIdle(*engine_);
  EXPECT_EQ(b.Read().last.usage.queue_time, Duration::zero());
  EXPECT_EQ(b.reply.last.usage.preemptions, 0);
  EXPECT_GE(a1.Read().last.usage.preemptions, 1);
}

TEST_F(EngineTest, AnOlderOneThatComesBackIsStillTheOlder) {
  FakeModelShape shape;
  shape.num_blocks = 20;
  EngineOptions options;
  options.pause_grace = seconds(1);
  options.max_running = 2;
  options.step_tokens = 64;
  Make(options, shape);
  Client older(4), younger, third;
  Submit(MakeRequest(1, Prompt(30), 45), older);
  Submit(MakeRequest(2, Prompt(20, 1), 55), younger);
  Submit(MakeRequest(3, Prompt(4, 2), 2), third);
  Steps(5);
  clock_.Advance(seconds(2));
  engine_->Step();  // the third takes the slot of the older, which is not read
  EXPECT_EQ(engine_->stats().preempted, 1);
  while (!older.Read().ended()) engine_->Step();
  StepUntilIdle(*engine_);
  EXPECT_EQ(older.reply.last.usage.preemptions, 1);
  EXPECT_GE(younger.Read().last.usage.preemptions, 1);
}

TEST_F(EngineTest, PenaltiesSeeWhatWasGenerated) {
  Request request = MakeRequest(1, Prompt(10), 60);
  std::vector<int32_t> tokens = RunAlone(request).tokens;
  std::sort(tokens.begin(), tokens.end());
  EXPECT_NE(std::adjacent_find(tokens.begin(), tokens.end()), tokens.end());
  request.sampling.presence_penalty = 100;
  tokens = RunAlone(request).tokens;
  std::sort(tokens.begin(), tokens.end());
  EXPECT_EQ(std::adjacent_find(tokens.begin(), tokens.end()), tokens.end());
}

TEST_F(EngineTest, ASeedRepeatsWhateverElseRuns) {
  Request request = MakeRequest(1, Prompt(10), 25);
  request.sampling.temperature = 1.5f;
  request.sampling.seed = 1234;
  const Reply alone = RunAlone(request);
  Make();
  Client client;
  std::vector<std::unique_ptr<Client>> others;
  for (int i = 0; i < 10; ++i) {
    others.push_back(std::make_unique<Client>());
    Request other = MakeRequest(10 + i, Prompt(5 + i, i), 3 + 3 * i);
    other.sampling = request.sampling;
    Submit(other, *others.back());
  }
  Submit(request, client);
  StepUntilIdle(*engine_);
  EXPECT_EQ(client.Read().tokens, alone.tokens);
  request.sampling.seed = 1235;
  EXPECT_NE(RunAlone(request).tokens, alone.tokens);
}

// ---- how requests end ----

TEST_F(EngineTest, AStopTokenEndsAndIsTold) {
  Request request = MakeRequest(1, Prompt(10), 30);
  const Reply whole = RunAlone(request);
  const int32_t stop = whole.tokens[6];
  const auto first = std::find(whole.tokens.begin(), whole.tokens.end(), stop);
  request.stopping.stop_token_ids = {stop};
  const Reply reply = RunAlone(request);
  EXPECT_EQ(reply.last.finish, FinishReason::kStopToken);
  EXPECT_EQ(reply.tokens, std::vector<int32_t>(whole.tokens.begin(), first + 1));
  EXPECT_EQ(reply.last.usage.generated_tokens, first + 1 - whole.tokens.begin());
}

TEST_F(EngineTest, MinTokensHoldsStopTokensOff) {
  Request request = MakeRequest(1, Prompt(10), 30);
  request.stopping.stop_token_ids = {RunAlone(request).tokens[0]};
  EXPECT_EQ(RunAlone(request).tokens.size(), 1u);
  request.stopping.min_tokens = 8;
  const Reply reply = RunAlone(request);
  EXPECT_GE(reply.tokens.size(), 8u);
  for (int i = 0; i < 8; ++i) EXPECT_NE(reply.tokens[i], request.stopping.stop_token_ids[0]);
}

TEST_F(EngineTest, UsageCountsWhatDenseDecodingReads) {
  const Reply reply = RunAlone(MakeRequest(1, Prompt(10), 4));
  // Tokens 2, 3 and 4 attend to 11, 12 and 13 tokens; the model has 6 rows of 256 bytes for each.
  const uint64_t rows = (11 + 12 + 13) * 6;
  EXPECT_EQ(reply.last.usage.attended_rows, rows);
  EXPECT_EQ(reply.last.usage.kv_read_bytes_fast, rows * 256);
  EXPECT_EQ(reply.last.usage.kv_dense_bytes, rows * 256);
  EXPECT_EQ(reply.last.usage.prompt_tokens, 10);
  EXPECT_EQ(reply.last.usage.generated_tokens, 4);
  EXPECT_EQ(reply.last.usage.cached_tokens, 0);
}

TEST_F(EngineTest, TimesAreTheClocks) {
  EngineOptions options;
  options.max_running = 1;
  options.step_tokens = 5;
  Make(options);
  Client first, second;
  Submit(MakeRequest(1, Prompt(5), 2), first);
  Submit(MakeRequest(2, Prompt(10), 2), second);
  for (int i = 0; i < 5; ++i) {
    engine_->Step();
    clock_.Advance(milliseconds(10));
  }
  const Usage& usage = second.Read().last.usage;
  EXPECT_EQ(usage.queue_time, milliseconds(20));  // the first took two steps
  EXPECT_EQ(usage.time_to_first_token, milliseconds(30));
  EXPECT_EQ(usage.total_time, milliseconds(40));
}

// ---- cancellation and deadlines ----

TEST_F(EngineTest, ACancelledRequestLosesItsBlocksInTheNextStep) {
  Make();
  Client client;
  Submit(MakeRequest(1, Prompt(20), 50), client);
  Steps(3);
  EXPECT_GT(engine_->stats().blocks_used, 0);
  engine_->Cancel(1);
  engine_->Step();
  EXPECT_EQ(engine_->stats().blocks_used, 0);
  EXPECT_EQ(client.Read().last.finish, FinishReason::kCancelled);
  EXPECT_EQ(client.reply.tokens.size(), 3u);
  EXPECT_EQ(client.reply.last.usage.generated_tokens, 3);
}

TEST_F(EngineTest, ARequestCancelledInTheQueueIsNeverComputed) {
  Make();
  Client client;
  Submit(MakeRequest(1, Prompt(20), 50), client);
  engine_->Cancel(1);
  EXPECT_FALSE(engine_->Step());
  EXPECT_EQ(model_->num_forwards, 0);
  EXPECT_EQ(client.Read().last.finish, FinishReason::kCancelled);
  EXPECT_EQ(engine_->stats().waiting, 0);
}

TEST_F(EngineTest, CancellingWhatIsUnknownOrOverChangesNothing) {
  Make();
  Client client;
  Submit(MakeRequest(1, Prompt(5), 2), client);
  engine_->Cancel(77);
  StepUntilIdle(*engine_);
  engine_->Cancel(1);
  engine_->Step();
  EXPECT_EQ(client.Read().last.finish, FinishReason::kMaxTokens);
}

TEST_F(EngineTest, ADeadlineThatPassedInTheQueueCostsNothing) {
  Make();
  Client past, at_once;
  Request request = MakeRequest(1, Prompt(20), 5);
  request.deadline = clock_.Now() + milliseconds(50);
  Submit(request, past);
  request.id = 2;
  request.deadline = clock_.Now() - seconds(5);
  Submit(request, at_once);
  clock_.Advance(milliseconds(50));
  EXPECT_FALSE(engine_->Step());
  EXPECT_EQ(model_->num_forwards, 0);
  EXPECT_EQ(past.Read().last.finish, FinishReason::kDeadline);
  EXPECT_EQ(at_once.Read().last.finish, FinishReason::kDeadline);
}

TEST_F(EngineTest, ADeadlineInsideThePromptFreesItsBlocks) {
  EngineOptions options;
  options.max_running = 1;
  options.step_tokens = 4;
  Make(options);
  Client client;
  Request request = MakeRequest(1, Prompt(40), 5);
  request.deadline = clock_.Now() + milliseconds(30);
  Submit(request, client);
  Steps(3);
  EXPECT_EQ(engine_->stats().blocks_used, 3);
  clock_.Advance(milliseconds(30));
  engine_->Step();
  EXPECT_EQ(engine_->stats().blocks_used, 0);
  EXPECT_EQ(client.Read().last.finish, FinishReason::kDeadline);
  EXPECT_TRUE(client.reply.tokens.empty());
}

TEST_F(EngineTest, ADeadlineWhileDecodingKeepsWhatWasToldAndDisturbsNobody) {
  Make();
  Client hurried, other;
  Request request = MakeRequest(1, Prompt(10), 50);
  const Reply alone = RunAlone(request);
  request.deadline = clock_.Now() + milliseconds(45);
  Submit(request, hurried);
  Submit(MakeRequest(2, Prompt(11), 20), other);
  while (!other.Read().ended()) {
    engine_->Step();
    clock_.Advance(milliseconds(10));
  }
  EXPECT_EQ(hurried.Read().last.finish, FinishReason::kDeadline);
  EXPECT_EQ(hurried.reply.tokens,
            std::vector<int32_t>(alone.tokens.begin(), alone.tokens.begin() + 5));
  EXPECT_EQ(other.reply.tokens, RunAlone(MakeRequest(2, Prompt(11), 20)).tokens);
}

// ---- slow readers ----

TEST_F(EngineTest, ASlowReaderIsPausedAndOthersGoOn) {
  Make();
  Client slow(3), fast;
  const Request request = MakeRequest(1, Prompt(10), 20);
  Submit(request, slow);
  Submit(MakeRequest(2, Prompt(10, 1), 20), fast);
  StepUntilIdle(*engine_);
  EXPECT_TRUE(fast.Read().ended());
  EXPECT_FALSE(slow.reply.ended());
  EXPECT_EQ(engine_->stats().paused, 1);
  EXPECT_EQ(engine_->stats().running, 1);
  while (!slow.Read().ended()) engine_->Step();
  EXPECT_EQ(slow.reply.tokens, RunAlone(request).tokens);
}

TEST_F(EngineTest, AReaderThatStaysSlowIsCancelled) {
  EngineOptions options;
  options.slow_reader_timeout = seconds(10);
  Make(options);
  Client slow(2);
  Submit(MakeRequest(1, Prompt(10), 20), slow);
  StepUntilIdle(*engine_);
  clock_.Advance(seconds(9));
  engine_->Step();
  EXPECT_GT(engine_->stats().blocks_used, 0);
  clock_.Advance(seconds(1));
  engine_->Step();
  EXPECT_EQ(engine_->stats().blocks_used, 0);
  EXPECT_EQ(slow.Read().last.finish, FinishReason::kCancelled);
  EXPECT_EQ(slow.reply.last.error, "the output was not read for 10s");
  EXPECT_EQ(slow.reply.last.error_code, absl::StatusCode::kCancelled);
}

TEST_F(EngineTest, ReadersThatStallInAllSlotsDoNotStopOthers) {
  EngineOptions options;
  options.max_running = 2;
  options.step_tokens = 16;
  Make(options);
  Client stalled_a(1), stalled_b(1), other;
  const Request request = MakeRequest(1, Prompt(10), 20);
  Submit(request, stalled_a);
  Submit(MakeRequest(2, Prompt(10, 1), 20), stalled_b);
  Steps(3);
  Submit(MakeRequest(3, Prompt(10, 2), 20), other);
  StepUntilIdle(*engine_);
  EXPECT_TRUE(other.Read().ended());
  EXPECT_EQ(engine_->stats().preempted, 1);
  while (!stalled_a.Read().ended() || !stalled_b.Read().ended()) engine_->Step();
  EXPECT_EQ(stalled_a.reply.tokens, RunAlone(request).tokens);
}

// ---- faults ----

TEST_F(EngineTest, NanLogitsEndOneRequestAndNoOther) {
  const Request broken = MakeRequest(1, Prompt(10), 30);
  const Request whole = MakeRequest(2, Prompt(12, 1), 30);
  const Reply broken_alone = RunAlone(broken);
  const Reply whole_alone = RunAlone(whole);
  // A token that only the first one generates.
  const auto only =
      std::find_if(broken_alone.tokens.begin(), broken_alone.tokens.end(), [&](int32_t token) {
        return std::count(whole_alone.tokens.begin(), whole_alone.tokens.end(), token) == 0 &&
               token != whole.prompt.back();
      });
  ASSERT_NE(only, broken_alone.tokens.end());
  Make();
  model_->nan_after_token = *only;
  Client a, b;
  Submit(broken, a);
  Submit(whole, b);
  StepUntilIdle(*engine_);
  EXPECT_EQ(a.Read().last.finish, FinishReason::kError);
  EXPECT_EQ(a.reply.last.error_code, absl::StatusCode::kInternal);
  EXPECT_THAT(a.reply.last.error, HasSubstr("NaN"));
  EXPECT_EQ(a.reply.tokens, std::vector<int32_t>(broken_alone.tokens.begin(), only + 1));
  EXPECT_EQ(b.Read().tokens, whole_alone.tokens);
  EXPECT_FALSE(engine_->stats().failed);
  EXPECT_EQ(engine_->stats().blocks_used, 0);
}

class FailureObserver : public EngineObserver {
 public:
  void OnFailure(const absl::Status& status) override {
    failures.push_back(status);
    if (engine != nullptr) failed_in_stats = engine->stats().failed;
  }
  std::vector<absl::Status> failures;
  const Engine* engine = nullptr;
  bool failed_in_stats = false;
};

TEST_F(EngineTest, AFailedModelEndsEverythingAndTheEngineSaysSo) {
  EngineOptions options;
  options.max_running = 1;
  options.step_tokens = 16;
  FailureObserver observer;
  Make(options, {}, &observer);
  observer.engine = engine_.get();
  model_->fail_at_forward = 3;
  Client runs, waits, late;
  Submit(MakeRequest(1, Prompt(10), 30), runs);
  Submit(MakeRequest(2, Prompt(10), 30), waits);
  Steps(3);
  for (Client* client : {&runs, &waits}) {
    EXPECT_EQ(client->Read().last.finish, FinishReason::kError);
    EXPECT_EQ(client->reply.last.error_code, absl::StatusCode::kUnavailable);
    EXPECT_EQ(client->reply.last.error, "the model failed");
  }
  EXPECT_EQ(runs.reply.tokens.size(), 2u);
  EXPECT_TRUE(engine_->stats().failed);
  EXPECT_EQ(engine_->stats().blocks_used, 0);
  EXPECT_EQ(engine_->Submit(MakeRequest(3, Prompt(10), 30), late.output).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_FALSE(engine_->Step());
  ASSERT_EQ(observer.failures.size(), 1u);
  EXPECT_THAT(observer.failures[0].message(), HasSubstr("fell off the bus"));
  // A thread that is woken by it and finds no failure goes back to sleep, and nobody wakes it again.
  EXPECT_TRUE(observer.failed_in_stats);
}

// ---- what is refused ----

TEST_F(EngineTest, WhatCanNeverFitIsRefusedWithTheNumbers) {
  FakeModelShape shape;
  shape.num_blocks = 10;
  shape.max_context = 60;
  Make({}, shape);
  Client client;
  absl::Status status = engine_->Submit(MakeRequest(1, Prompt(50), 11), client.output);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "can never fit: a prompt of 50 tokens and max_tokens 11 make 61, the context holds 60");
  status = engine_->Submit(MakeRequest(1, Prompt(30), 12), client.output);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "can never fit: a prompt of 30 tokens and max_tokens 12 need 11 KV blocks of 4 tokens, "
            "the pool holds 10");
  status = engine_->Submit(MakeRequest(1, Prompt(30), 2147483647), client.output);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  // The KV of the last token is not needed: this fits exactly.
  Submit(MakeRequest(1, Prompt(30), 11), client);
  StepUntilIdle(*engine_);
  EXPECT_EQ(client.Read().tokens.size(), 11u);
}

TEST_F(EngineTest, IdsPastTheVocabularyAreRefusedWhereverTheyStand) {
  Make();
  for (const int32_t bad : {-1, 300, 1 << 30}) {
    std::vector<Request> requests(3, MakeRequest(1, Prompt(5), 5));
    requests[0].prompt[2] = bad;
    requests[1].sampling.logit_bias = {{3, 1.0f}, {bad, 1.0f}};
    requests[2].stopping.stop_token_ids = {bad};
    for (const Request& request : requests) {
      EXPECT_EQ(engine_->Submit(request, Client().output).code(),
                absl::StatusCode::kInvalidArgument);
    }
  }
  EXPECT_FALSE(engine_->Submit(MakeRequest(1, {}, 5), Client().output).ok());
  EXPECT_FALSE(engine_->Submit(MakeRequest(1, Prompt(5), 0), Client().output).ok());
  EXPECT_EQ(engine_->stats().accepted, 0u);
}

TEST_F(EngineTest, AFullQueueRefusesAndSaysWhenToComeBack) {
  EngineOptions options;
  options.max_running = 1;
  options.queue_requests = 3;
  Make(options);
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(std::make_unique<Client>());
    Submit(MakeRequest(i, Prompt(10), 10), *clients.back());
  }
  Client refused;
  EXPECT_EQ(engine_->Submit(MakeRequest(9, Prompt(10), 10), refused.output).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->RetryAfter(), seconds(1));  // nothing is known yet
  EXPECT_EQ(engine_->stats().rejected, 1u);
  engine_->Step();  // one is admitted and waits no more
  Submit(MakeRequest(10, Prompt(10), 10), refused);
}

TEST_F(EngineTest, TheTimeToComeBackIsWhatTheWaitingTakeAtTheRecentPace) {
  EngineOptions options;
  options.max_running = 1;
  options.step_tokens = 50;
  Make(options);
  model_->on_forward = [this] { clock_.Advance(milliseconds(500)); };  // 100 tokens per second
  Client runs, waits;
  Submit(MakeRequest(1, Prompt(50), 300), runs);
  engine_->Step();
  Submit(MakeRequest(2, Prompt(200), 1), waits);
  EXPECT_EQ(engine_->RetryAfter(), seconds(2));
  engine_->Cancel(2);
  engine_->Step();
  EXPECT_EQ(engine_->RetryAfter(), milliseconds(100));  // never less
}

TEST_F(EngineTest, ADeadlineThatPassesDuringAStepEndsTheRequestInTheNext) {
  Make();
  model_->on_forward = [this] { clock_.Advance(milliseconds(10)); };
  Client client;
  Request request = MakeRequest(1, Prompt(5), 50);
  request.deadline = clock_.Now() + milliseconds(15);
  Submit(request, client);
  Steps(2);
  EXPECT_FALSE(client.Read().ended());
  EXPECT_FALSE(engine_->Step());
  EXPECT_EQ(client.Read().last.finish, FinishReason::kDeadline);
  EXPECT_EQ(engine_->stats().blocks_used, 0);
}

TEST_F(EngineTest, OptionsThatTheModelCannotHonourAreRefused) {
  FakeModel model;  // 64 rows of logits, 512 tokens
  const auto message = [&](auto change) {
    EngineOptions options;
    change(options);
    return std::string(Engine::Create(options, model, TestTokenizer(), clock_).status().message());
  };
  EXPECT_THAT(message([](auto& o) { o.max_running = 65; }), HasSubstr("max_running is 65"));
  EXPECT_THAT(message([](auto& o) { o.step_tokens = 513; }), HasSubstr("step_tokens is 513"));
  EXPECT_THAT(message([](auto& o) { o.step_tokens = 63; }), HasSubstr("max_running is 64"));
  EXPECT_THAT(message([](auto& o) { o.prompt_step_tokens = 511; }),
              HasSubstr("prompt_step_tokens is 511: must be 0, or 512 (step_tokens) to 512"));
  EXPECT_THAT(message([](auto& o) { o.prompt_step_tokens = 513; }),
              HasSubstr("prompt_step_tokens is 513"));
  EXPECT_THAT(message([](auto& o) { o.max_running = 0; }), HasSubstr("max_running is 0"));
  EXPECT_THAT(message([](auto& o) { o.queue_requests = 0; }), HasSubstr("queue_requests is 0"));
  EXPECT_THAT(message([](auto& o) { o.queue_tokens = 0; }), HasSubstr("queue_tokens is 0"));
  EXPECT_THAT(message([](auto& o) { o.pause_grace = -seconds(1); }), HasSubstr("pause_grace"));
  EXPECT_THAT(message([](auto& o) { o.slow_reader_timeout = seconds(0); }),
              HasSubstr("slow_reader_timeout is 0"));
}

// ---- fairness ----

TEST_F(EngineTest, ATenantWithManyRequestsDoesNotHoldUpAnother) {
  EngineOptions options;
  options.max_running = 2;
  Make(options);
  std::vector<std::unique_ptr<Client>> many;
  for (int i = 0; i < 20; ++i) {
    Request request = MakeRequest(i, Prompt(20, i), 10);
    request.tenant = "many";
    many.push_back(std::make_unique<Client>());
    Submit(request, *many.back());
  }
  Steps(1);
  Request request = MakeRequest(100, Prompt(20), 10);
  request.tenant = "few";
  Client few;
  Submit(request, few);
  while (!few.Read().ended()) engine_->Step();
  int ended = 0;
  for (const auto& client : many) ended += client->Read().ended();
  // The two that ran, and those beside the newcomer; not the twenty.
  EXPECT_LE(ended, 4);
}

TEST_F(EngineTest, TenantsShareByTokensNotByRequests) {
  EngineOptions options;
  options.max_running = 1;
  Make(options);
  std::vector<std::unique_ptr<Client>> large, small;
  for (int i = 0; i < 30; ++i) {
    Request request = MakeRequest(i, Prompt(i % 2 == 0 ? 100 : 10, i), 2);
    request.tenant = i % 2 == 0 ? "large" : "small";
    auto& clients = i % 2 == 0 ? large : small;
    clients.push_back(std::make_unique<Client>());
    Submit(request, *clients.back());
  }
  const auto ended = [](const auto& clients) {
    return std::count_if(clients.begin(), clients.end(),
                         [](const auto& client) { return client->Read().ended(); });
  };
  while (ended(large) < 2) engine_->Step();
  EXPECT_GE(ended(small), 7);
  StepUntilIdle(*engine_);
  EXPECT_EQ(ended(large) + ended(small), 30);
}

TEST_F(EngineTest, ATenantIsNotOwedForTheTimeItWasAway) {
  EngineOptions options;
  options.max_running = 1;
  Make(options);
  RequestId id = 0;
  std::vector<std::unique_ptr<Client>> busy, returning;
  const auto submit = [&](const char* tenant, auto& clients) {
    Request request = MakeRequest(++id, Prompt(20), 2);
    request.tenant = tenant;
    clients.push_back(std::make_unique<Client>());
    Submit(request, *clients.back());
  };
  const auto ended = [](const auto& clients) {
    return std::count_if(clients.begin(), clients.end(),
                         [](const auto& client) { return client->Read().ended(); });
  };
  for (int i = 0; i < 20; ++i) submit("busy", busy);
  submit("returning", returning);
  while (ended(busy) < 10) engine_->Step();
  ASSERT_EQ(ended(returning), 1);
  for (int i = 0; i < 10; ++i) submit("returning", returning);
  while (ended(busy) < 14) engine_->Step();
  // Turn by turn; owed for ten requests, it would have had all of its own first.
  EXPECT_LE(ended(returning), 6);
  EXPECT_GE(ended(returning), 4);
}

TEST_F(EngineTest, ALongPromptEndsUnderAStreamOfShortOnes) {
  EngineOptions options;
  options.max_running = 8;
  options.step_tokens = 16;
  Make(options);
  Client patient;
  Submit(MakeRequest(1, Prompt(200), 1), patient);
  std::vector<std::unique_ptr<Client>> shorts;
  int steps = 0;
  for (RequestId id = 2; !patient.Read().ended(); ++id, ++steps) {
    shorts.push_back(std::make_unique<Client>());
    Submit(MakeRequest(id, Prompt(16, static_cast<int32_t>(id)), 2), *shorts.back());
    engine_->Step();
    ASSERT_LT(steps, 60);
  }
}

TEST_F(EngineTest, AShortPromptDoesNotWaitForALongOne) {
  EngineOptions options;
  options.max_running = 4;
  options.step_tokens = 16;
  Make(options);
  Client patient, quick;
  Submit(MakeRequest(1, Prompt(300), 1), patient);
  Steps(1);
  Submit(MakeRequest(2, Prompt(16), 1), quick);
  Steps(3);
  EXPECT_TRUE(quick.Read().ended());
  EXPECT_FALSE(patient.Read().ended());
}

// ---- running, draining, stopping ----

TEST_F(EngineTest, ADrainFinishesWhatWasAcceptedAndRefusesTheRest) {
  Make();
  Client client;
  Submit(MakeRequest(1, Prompt(10), 20), client);
  engine_->BeginDrain();
  EXPECT_EQ(engine_->Submit(MakeRequest(2, Prompt(10), 20), Client().output).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_TRUE(engine_->stats().draining);
  engine_->Run(std::stop_token());  // returns by itself
  EXPECT_EQ(client.Read().last.finish, FinishReason::kMaxTokens);
}

TEST_F(EngineTest, AStopEndsWhatIsLeftAndWakesAnIdleEngine) {
  Make();
  std::jthread runner([this](std::stop_token stop) { engine_->Run(stop); });
  Client stalled(1);
  Submit(MakeRequest(1, Prompt(10), 20), stalled);
  while (engine_->stats().paused == 0) std::this_thread::yield();
  runner.request_stop();
  runner.join();
  EXPECT_EQ(stalled.Read().last.finish, FinishReason::kCancelled);
  EXPECT_EQ(stalled.reply.last.error_code, absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine_->stats().blocks_used, 0);
  EXPECT_FALSE(engine_->Submit(MakeRequest(2, Prompt(10), 20), Client().output).ok());
}

TEST_F(EngineTest, AnEngineThatGoesEndsItsRequests) {
  Make();
  Client runs, queued;
  Submit(MakeRequest(1, Prompt(10), 20), runs);
  Steps(2);
  Submit(MakeRequest(2, Prompt(10), 20), queued);
  engine_.reset();
  EXPECT_EQ(runs.Read().last.finish, FinishReason::kCancelled);
  EXPECT_EQ(queued.Read().last.finish, FinishReason::kCancelled);
}

TEST_F(EngineTest, TheHeartBeatsWithEveryStepAlsoWhenIdle) {
  Make();
  const TimePoint before = engine_->stats().heartbeat;
  clock_.Advance(seconds(3));
  EXPECT_EQ(engine_->stats().heartbeat, before);
  EXPECT_FALSE(engine_->Step());
  EXPECT_EQ(engine_->stats().heartbeat - before, seconds(3));
}

// ---- what is told ----

class CountingObserver : public EngineObserver {
 public:
  void OnFirstToken(const Request& request, Duration since_arrival) override { ++first; }
  void OnNextToken(const Request& request, Duration since_previous) override {
    ++next;
    gaps.push_back(since_previous);
  }
  void OnFinished(const Request& request, FinishReason reason, const Usage& usage) override {
    finished.push_back(reason);
  }
  void OnStep(const StepObservation& step) override {
    ++steps;
    tokens += step.tokens;
  }
  int first = 0, next = 0, steps = 0, tokens = 0;
  std::vector<Duration> gaps;
  std::vector<FinishReason> finished;
};

TEST_F(EngineTest, TheObserverAndTheStatisticsAgree) {
  CountingObserver observer;
  Make({}, {}, &observer);
  Client a, b;
  Submit(MakeRequest(1, Prompt(10), 5), a);
  Submit(MakeRequest(2, Prompt(20), 8), b);
  while (engine_->Step()) clock_.Advance(milliseconds(7));
  const EngineStats stats = engine_->stats();
  EXPECT_EQ(observer.first, 2);
  EXPECT_EQ(observer.next, 4 + 7);
  EXPECT_EQ(observer.gaps, std::vector<Duration>(11, milliseconds(7)));
  EXPECT_EQ(observer.finished, std::vector<FinishReason>(2, FinishReason::kMaxTokens));
  EXPECT_EQ(stats.steps, static_cast<uint64_t>(observer.steps));
  EXPECT_EQ(stats.computed_tokens, static_cast<uint64_t>(observer.tokens));
  EXPECT_EQ(stats.computed_tokens, 30u + 4 + 7);
  EXPECT_EQ(stats.generated_tokens, 13u);
  EXPECT_EQ(stats.prompt_tokens, 30u);
  EXPECT_EQ(stats.accepted, 2u);
  EXPECT_EQ(stats.finished[static_cast<int>(FinishReason::kMaxTokens)], 2u);
  EXPECT_EQ(stats.kv_read_bytes_fast,
            a.Read().last.usage.kv_read_bytes_fast + b.Read().last.usage.kv_read_bytes_fast);
}

TEST_F(EngineTest, WhoSeesTheLastEventFindsTheBlocksFree) {
  Make();
  EngineStats seen;
  Client client;
  const auto output = std::make_shared<OutputQueue>(
      100, [&] { seen = engine_->stats(); }, nullptr);
  ASSERT_TRUE(engine_->Submit(MakeRequest(1, Prompt(10), 3), output).ok());
  Steps(2);
  EXPECT_GT(seen.blocks_used, 0);
  EXPECT_EQ(seen.running, 1);
  Steps(1);
  EXPECT_EQ(seen.blocks_used, 0);
  EXPECT_EQ(seen.running, 0);
}

}  // namespace
}  // namespace winnow::engine
