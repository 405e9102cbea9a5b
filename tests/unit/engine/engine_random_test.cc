// Random workloads on tiny pools: every request that ends by itself has exactly what it has alone,
// whatever else ran, was cancelled, expired, was preempted or was not read; and no block is left
// over.
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "engine/base/mutex.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/dice.h"
#include "tests/unit/engine/engine_testing.h"

namespace winnow::engine {
namespace {

using std::chrono::milliseconds;

Request RandomRequest(Dice& dice, RequestId id, int32_t most_tokens) {
  const int32_t max_tokens = dice.Pick(1, std::min(30, most_tokens - 1));
  std::vector<int32_t> prompt(dice.Pick(1, std::min(60, most_tokens - max_tokens)));
  for (int32_t& token : prompt) token = dice.Pick(0, 299);
  Request request = MakeRequest(id, std::move(prompt), max_tokens);
  request.tenant = std::string(dice.Pick(0, 2), 't');
  SamplingOptions& sampling = request.sampling;
  if (!dice.OneIn(3)) {
    sampling.temperature = static_cast<float>(dice.Pick(1, 20)) / 10;
    sampling.seed = dice.Pick(0, 1 << 30);
    if (dice.OneIn(3)) sampling.top_k = dice.Pick(1, 50);
    if (dice.OneIn(3)) sampling.top_p = static_cast<float>(dice.Pick(1, 99)) / 100;
    if (dice.OneIn(3)) sampling.min_p = static_cast<float>(dice.Pick(0, 50)) / 100;
  }
  if (dice.OneIn(3)) sampling.repetition_penalty = 1.3f;
  if (dice.OneIn(3)) sampling.presence_penalty = 0.5f;
  if (dice.OneIn(3)) sampling.frequency_penalty = 0.25f;
  if (dice.OneIn(4)) sampling.logit_bias = {{dice.Pick(0, 299), 5.0f}};
  if (dice.OneIn(3)) request.top_logprobs = dice.Pick(0, 3);
  if (dice.OneIn(3)) request.prompt_logprobs = dice.Pick(0, 2);
  StoppingOptions& stopping = request.stopping;
  if (dice.OneIn(3)) stopping.stop_token_ids = {dice.Pick(8, 24), dice.Pick(0, 299)};
  if (dice.OneIn(3)) stopping.min_tokens = dice.Pick(0, max_tokens);
  for (int32_t i = dice.Pick(0, 2); i > 0; --i) {
    std::string text;
    for (int32_t n = dice.Pick(1, 3); n > 0; --n) text += static_cast<char>('!' + dice.Pick(0, 15));
    stopping.stop_strings.push_back(text);
  }
  stopping.include_stop = dice.OneIn(2);
  request.skip_special_tokens = dice.OneIn(2);
  return request;
}

bool EndedByItself(FinishReason reason) {
  return reason == FinishReason::kStopToken || reason == FinishReason::kStopString ||
         reason == FinishReason::kMaxTokens;
}

// Under any verified policy, every token and probability is that of dense attention.
Reply RunAloneDensely(Request request) {
  request.policy = {};
  return RunAlone(std::move(request));
}

void ExpectSame(const Reply& got, const Reply& alone, bool verified) {
  EXPECT_EQ(got.tokens, alone.tokens);
  EXPECT_EQ(got.text, alone.text);
  EXPECT_EQ(got.last.finish, alone.last.finish);
  EXPECT_EQ(got.last.stop_match, alone.last.stop_match);
  // A draft reads for itself; what dense attention would have read stays the same.
  EXPECT_EQ(got.last.usage.kv_dense_bytes, alone.last.usage.kv_dense_bytes);
  if (!verified) {
    EXPECT_EQ(got.last.usage.kv_read_bytes_fast, alone.last.usage.kv_read_bytes_fast);
  }
  ASSERT_EQ(got.scores.size(), alone.scores.size());
  for (size_t i = 0; i < got.scores.size(); ++i) {
    EXPECT_EQ(got.scores[i].token.token, alone.scores[i].token.token);
    EXPECT_EQ(got.scores[i].token.logprob, alone.scores[i].token.logprob);
    EXPECT_EQ(got.scores[i].rank, alone.scores[i].rank);
    EXPECT_EQ(got.scores[i].token.top.size(), alone.scores[i].token.top.size());
  }
  ASSERT_EQ(got.details.size(), alone.details.size());
  for (size_t i = 0; i < got.details.size(); ++i) {
    EXPECT_EQ(got.details[i].logprob, alone.details[i].logprob);
    ASSERT_EQ(got.details[i].top.size(), alone.details[i].top.size());
    for (size_t j = 0; j < got.details[i].top.size(); ++j) {
      EXPECT_EQ(got.details[i].top[j].token, alone.details[i].top[j].token);
    }
  }
}

struct Totals {
  std::map<FinishReason, int> finished;
  int64_t preemptions = 0;
  int64_t steps_with_paused = 0;
  uint64_t drafted = 0, accepted = 0, verifications = 0;
  int64_t draft_passes = 0;  // with weights of their own
};

void RunWorkload(uint32_t seed, Totals& totals) {
  Dice dice(seed);
  FakeModelShape shape;
  shape.num_blocks = dice.OneIn(4) ? 200 : dice.Pick(6, 40);
  shape.max_batch_tokens = dice.Pick(8, 40);
  FakeModel model(shape);
  model.draft_weights = dice.OneIn(3);
  EngineOptions options;
  options.max_running = dice.Pick(1, 8);
  options.step_tokens = dice.Pick(options.max_running, shape.max_batch_tokens);
  if (dice.OneIn(2)) {
    options.prompt_step_tokens = dice.Pick(options.step_tokens, shape.max_batch_tokens);
  }
  options.pause_grace = milliseconds(dice.Pick(0, 60));
  options.slow_reader_timeout = milliseconds(dice.Pick(200, 2000));
  FakeClock clock;
  const std::unique_ptr<Engine> engine = MakeEngine(options, model, clock);

  struct Entry {
    Request request;
    std::unique_ptr<Client> client;
    int32_t arrives_at_step;
    int32_t cancelled_at_step;  // -1: never
    int32_t read_one_in;
  };
  std::vector<Entry> entries;
  const int32_t most_tokens = std::min(90, shape.num_blocks * shape.block_tokens);
  for (int32_t i = dice.Pick(1, 12); i > 0; --i) {
    Entry entry;
    entry.request = RandomRequest(dice, i, most_tokens);
    if (options.step_tokens > options.max_running && dice.OneIn(2)) {
      entry.request.policy = {.kind = AttentionPolicy::Kind::kWindow,
                              .sink = 1,
                              .window = dice.Pick(1, 20),
                              .verify = dice.OneIn(3) ? 64 : dice.Pick(1, 9),
                              .lookup = dice.OneIn(3)};
      if (dice.OneIn(5)) entry.request.policy.verify = AttentionPolicy::kVerifyAuto;
      if ((model.draft_weights || entry.request.policy.lookup) && dice.OneIn(2)) {
        entry.request.policy.kind = AttentionPolicy::Kind::kDense;
      }
    }
    entry.arrives_at_step = dice.OneIn(3) ? 0 : dice.Pick(0, 60);
    entry.cancelled_at_step = dice.OneIn(6) ? entry.arrives_at_step + dice.Pick(0, 40) : -1;
    const bool slow = dice.OneIn(4);
    entry.client = std::make_unique<Client>(slow ? dice.Pick(1, 3) : 1000);
    entry.read_one_in = slow ? dice.Pick(2, 40) : 1;
    entries.push_back(std::move(entry));
  }

  size_t ended = 0;
  for (int32_t step = 0; ended < entries.size(); ++step) {
    ASSERT_LT(step, 20'000) << "the workload does not end";
    for (Entry& entry : entries) {
      if (step == entry.arrives_at_step) {
        entry.request.arrival = clock.Now();
        if (dice.OneIn(6)) entry.request.deadline = clock.Now() + milliseconds(dice.Pick(0, 400));
        ASSERT_TRUE(engine->Submit(entry.request, entry.client->output).ok());
      }
      if (step == entry.cancelled_at_step) engine->Cancel(entry.request.id);
    }
    engine->Step();
    totals.steps_with_paused += engine->stats().paused > 0;
    clock.Advance(milliseconds(dice.Pick(1, 20)));
    ended = 0;
    for (Entry& entry : entries) {
      if (dice.OneIn(entry.read_one_in)) entry.client->Read();
      ended += entry.client->reply.ended();
    }
  }

  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.blocks_used, 0);
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
  EXPECT_EQ(stats.waiting_tokens, 0);
  EXPECT_EQ(stats.preempted, 0);
  totals.preemptions += static_cast<int64_t>(stats.preemptions);
  totals.drafted += stats.drafts.drafted;
  totals.accepted += stats.drafts.accepted;
  totals.verifications += stats.drafts.verifications;
  totals.draft_passes += model.draft_passes;
  for (const Entry& entry : entries) {
    SCOPED_TRACE(testing::Message() << "request " << entry.request.id);
    const Reply& reply = entry.client->reply;
    ++totals.finished[reply.last.finish];
    EXPECT_EQ(static_cast<int32_t>(reply.tokens.size()), reply.last.usage.generated_tokens);
    const Reply alone = RunAloneDensely(entry.request);
    if (EndedByItself(reply.last.finish)) {
      ExpectSame(reply, alone, entry.request.policy.IsVerified());
    } else {
      // What came is the beginning of what would have come.
      ASSERT_LE(reply.tokens.size(), alone.tokens.size());
      EXPECT_TRUE(std::equal(reply.tokens.begin(), reply.tokens.end(), alone.tokens.begin()));
    }
  }
}

TEST(EngineRandomTest, EveryRequestHasTheTokensThatItHasAlone) {
  Totals totals;
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    RunWorkload(seed, totals);
    if (HasFailure()) return;
  }
  // The workloads are only worth something if they meet everything.
  EXPECT_GT(totals.preemptions, 1000);
  EXPECT_GT(totals.steps_with_paused, 1000);
  EXPECT_GT(totals.verifications, 5000u);
  EXPECT_GT(totals.accepted, 5000u);
  EXPECT_GT(totals.drafted, totals.accepted + 5000u);
  EXPECT_GT(totals.draft_passes, 5000);
  for (const FinishReason reason :
       {FinishReason::kStopToken, FinishReason::kStopString, FinishReason::kMaxTokens,
        FinishReason::kCancelled, FinishReason::kDeadline}) {
    EXPECT_GT(totals.finished[reason], 100) << static_cast<int>(reason);
  }
  EXPECT_EQ(totals.finished[FinishReason::kError], 0);
}

TEST(EngineRandomTest, TenThousandCancelsAndDeadlinesLeakNothing) {
  constexpr int kEnds = 10'000;
  Dice dice(1);
  FakeModelShape shape;
  shape.num_blocks = 26;
  FakeModel model(shape);
  FakeClock clock;
  EngineOptions options;
  options.max_running = 12;
  options.step_tokens = 48;
  const std::unique_ptr<Engine> engine = MakeEngine(options, model, clock);
  struct Open {
    RequestId id;
    std::unique_ptr<Client> client;
  };
  std::vector<Open> open;
  RequestId next_id = 0;
  int cut_short = 0;
  std::array<uint64_t, kNumFinishReasons> seen = {};
  while (cut_short < kEnds || !open.empty()) {
    while (cut_short < kEnds && open.size() < 24) {
      Request request =
          MakeRequest(++next_id, Prompt(dice.Pick(1, 60), dice.Pick(0, 50)), dice.Pick(1, 40));
      request.arrival = clock.Now();
      request.tenant = std::string(dice.Pick(0, 4), 't');
      if (dice.OneIn(2)) request.deadline = clock.Now() + milliseconds(dice.Pick(0, 200));
      open.push_back({request.id, std::make_unique<Client>(dice.OneIn(5) ? 2 : 100)});
      ASSERT_TRUE(engine->Submit(request, open.back().client->output).ok());
    }
    for (const Open& each : open) {
      if (dice.OneIn(40)) engine->Cancel(each.id);  // some twice, some after the end
    }
    engine->Step();
    clock.Advance(milliseconds(dice.Pick(0, 5)));
    std::erase_if(open, [&](const Open& each) {
      if (dice.OneIn(3) || !each.client->Read().ended()) return false;
      const FinishReason reason = each.client->reply.last.finish;
      ++seen[static_cast<int>(reason)];
      cut_short += !EndedByItself(reason);
      return true;
    });
  }
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.blocks_used, 0);
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
  EXPECT_EQ(stats.waiting_tokens, 0);
  EXPECT_EQ(stats.finished, seen);
  EXPECT_EQ(stats.accepted, next_id);
  EXPECT_GT(stats.preemptions, 100u);
}

class Bell {
 public:
  void Ring() {
    const MutexLock lock(mutex_);
    rung_ = true;
    ringing_.NotifyOne();
  }
  void Await() {
    const MutexLock lock(mutex_);
    while (!rung_) ringing_.Wait(mutex_);
    rung_ = false;
  }

 private:
  Mutex mutex_;
  CondVar ringing_;
  bool rung_ ABSL_GUARDED_BY(mutex_) = false;
};

TEST(EngineRandomTest, ThreadsSubmitCancelAndReadWhileTheEngineRuns) {
  constexpr int kThreads = 4;
  constexpr int kEach = 40;
  FakeModelShape shape;
  shape.num_blocks = 60;
  FakeModel model(shape);
  const SteadyClock clock;
  EngineOptions options;
  options.max_running = 8;
  options.step_tokens = 32;
  options.queue_requests = 16;
  const std::unique_ptr<Engine> engine = MakeEngine(options, model, clock);
  std::jthread runner([&engine](std::stop_token stop) { engine->Run(stop); });

  std::vector<std::jthread> clients;
  for (int t = 0; t < kThreads; ++t) {
    clients.emplace_back([&engine, t] {
      Dice dice(t);
      for (int i = 0; i < kEach; ++i) {
        const Request request = RandomRequest(dice, t * kEach + i, 90);
        // Shared: the callback may run after the reader has seen the last event.
        const auto bell = std::make_shared<Bell>();
        const auto output = std::make_shared<OutputQueue>(
            2, [bell] { bell->Ring(); }, [&engine] { engine->Wake(); });
        absl::Status status;
        do {
          status = engine->Submit(request, output);
          if (!status.ok()) std::this_thread::yield();
        } while (status.code() == absl::StatusCode::kResourceExhausted);
        ASSERT_TRUE(status.ok()) << status;
        const bool cancel = dice.OneIn(5);
        if (cancel) engine->Cancel(request.id);
        std::vector<int32_t> tokens;
        OutputEvent last;
        while (last.finish == FinishReason::kNone) {
          bell->Await();
          while (std::optional<OutputEvent> event = output->Pop()) {
            for (const OutputToken& token : event->tokens) tokens.push_back(token.token);
            last = *std::move(event);
          }
        }
        if (EndedByItself(last.finish)) {
          EXPECT_EQ(tokens, RunAlone(request).tokens);
        } else {
          EXPECT_TRUE(cancel);
        }
      }
    });
  }
  clients.clear();  // joins
  engine->BeginDrain();
  runner.join();
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.blocks_used, 0);
  EXPECT_EQ(stats.waiting, 0);
  EXPECT_EQ(stats.accepted, static_cast<uint64_t>(kThreads * kEach));
}

}  // namespace
}  // namespace winnow::engine
