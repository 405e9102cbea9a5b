// Generation without a transport: what gRPC's Generate and the HTTP endpoint have in common.
//
// Life of a generation:
//   1. Start checks the message (cheap, on the caller's thread) and posts the tokenising.
//   2. A tokenising thread turns the prompt into ids and submits one engine request for each
//   choice, all of them or none. What the answer must be is compiled in between, on a thread of its own.
//   3. The engine pushes events to each choice's OutputQueue. The delivering thread calls
//   `on_ready`.
//   4. The transport calls Take until there is nothing: messages, and once the end. What came since
//      the last Take is one message: a slow reader gets fewer, longer ones.
//   5. A transport that stops taking fills the queues; the engine pauses those sequences and in the
//      end cancels them. That is all the back-pressure there is.
//   6. The transport calls Close when the client has everything, or is gone. A drain waits for it.
//
// Whatever goes wrong comes out of Take as the end, exactly once. Cancel makes it come soon.
#ifndef WINNOW_SERVER_GENERATOR_H_
#define WINNOW_SERVER_GENERATOR_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "engine/base/clock.h"
#include "engine/base/mutex.h"
#include "engine/grammar/grammar_compiler.h"
#include "engine/schedule/engine.h"
#include "engine/schedule/output_queue.h"
#include "engine/text/tokenizer.h"
#include "server/executor.h"
#include "server/line_sampler.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/tenant_limits.h"
#include "server/validate.h"
#include "winnow/v1/inference.pb.h"

namespace winnow::server {

// What a transport knows about a call beside its message.
struct CallInfo {
  std::string_view transport;  // "grpc" or "http", for the log
  std::string tenant;
  std::optional<engine::TimePoint> deadline;
  // What the client calls the request, for the log alone; checked by the transport.
  std::string client_request_id;
  std::string traceparent;  // the caller's trace context (trace_context.h); "" without a valid one
  bool by_proxy =
      false;  // the client is behind a proxy or a router, which may have dropped its name
  bool max_tokens_yields = false;  // as for Validator::CheckGenerate
  // How the transport wants the answer's text marked (engine::Request); null: not at all.
  std::shared_ptr<const engine::MessageFormat> message_format;
  // Not 0: the transport holds the answer whole, and of the prompt's log-probabilities so many at most.
  int64_t prompt_scores_max = 0;
  // The transport's own verdict: not OK ends the generation before it starts, but counted and
  // logged like every other.
  absl::Status refused;
};

// With whom callers without a name (no key, certificate or x-winnow-tenant) share KV: with each other, or with nobody.
enum class AnonymousPrefixes {
  kShared,
  kSharedDirectly,  // those that no proxy stands before
  kNone,
};

class Generator;

class Generation : public std::enable_shared_from_this<Generation> {
 public:
  struct Nothing {};
  struct End {
    absl::Status status;
  };
  using Item = std::variant<Nothing, v1::GenerateResponse, End>;

  // One thread at a time. After End it must not be called again.
  Item Take();

  // Any thread, any time. The engine forgets the choices; Take gives the end.
  void Cancel();
  // The same, because the transport could not get rid of a message for too long.
  void GiveUpOnReader();

  // Once, by the transport.
  void Close();

  // For the client and the log.
  const std::string& name() const { return name_; }

  // Tokens of the prompt; 0 until it is tokenised. Any thread.
  int32_t prompt_tokens() const { return prompt_tokens_; }

 private:
  friend class Generator;
  struct Choice {
    engine::RequestId id = 0;
    std::shared_ptr<engine::OutputQueue> events;
    bool ended = false;
    // An event whose scores are not all told yet, and how many of them are.
    std::optional<engine::OutputEvent> event;
    size_t told_scores = 0;
  };

  Generation(Generator& owner, CallInfo info, std::function<void()> on_ready);

  // A refusal that Take tells when Start has returned.
  void Refuse(absl::Status status);
  void Tokenize(const v1::GenerateRequest& message, CheckedGenerate checked);
  void Submit(absl::Status status, CheckedGenerate checked);
  absl::Status SubmitChoices(CheckedGenerate checked) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckScores(const engine::Request& request) const;
  void Fail(absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<v1::GenerateResponse> TakeFrom(int32_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AddScores(Choice& choice, v1::GenerateResponse& response)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddEvent(const engine::OutputEvent& event, v1::GenerateResponse& response)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Report(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Schedule();

  Generator& owner_;
  const CallInfo info_;
  const TenantLimits limits_;
  // Under the owner's mutex: whether it is one of its counted calls, one of the requests of its tenant, and what it takes
  // of the tenant's running_tokens.
  bool counted_ = false;
  bool in_quota_ = false;
  int64_t reserved_tokens_ = 0;
  const engine::TimePoint arrival_;
  const std::string name_;
  const std::function<void()> on_ready_;
  std::atomic<bool> scheduled_ = false;  // on_ready is posted and has not begun
  std::atomic<int32_t> prompt_tokens_ = 0;

  absl::Mutex mutex_;
  std::vector<Choice> choices_ ABSL_GUARDED_BY(mutex_);
  size_t next_choice_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t open_choices_ ABSL_GUARDED_BY(mutex_) = 0;
  bool with_logprobs_ ABSL_GUARDED_BY(mutex_) = false;
  // The first token of a prompt that is scored, which has no score; until it is told.
  std::optional<int32_t> scored_first_ ABSL_GUARDED_BY(mutex_);
  bool submitted_ ABSL_GUARDED_BY(mutex_) = false;
  bool reported_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::string policy_ ABSL_GUARDED_BY(mutex_);  // in its canonical text
  std::string exactness_ ABSL_GUARDED_BY(mutex_);
  engine::Usage usage_ ABSL_GUARDED_BY(mutex_);  // sums over choices; times of the slowest
  int32_t n_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string finish_ ABSL_GUARDED_BY(mutex_);  // reasons, for the log
};

class Generator {
 public:
  struct Options {
    int tokenize_threads = 2;
    size_t max_tokenizing = 256;  // calls that wait for a tokenising thread
    // And their messages together: prompts of a long context are megabytes each. One that is larger
    // alone is taken when no other waits.
    size_t max_tokenizing_bytes = size_t{256} << 20;
    size_t max_calls = 1024;    // generations that are not closed yet
    size_t queue_events = 256;  // of one choice, before the engine pauses it
    size_t max_compiling = 32;  // grammars that wait for their thread
    // A transport whose client does not take a message for this long gives up. The engine's own
    // timeout does not cover it: it has nothing to do any more with a sequence that is finished.
    engine::Duration slow_reader_timeout = std::chrono::seconds(30);
    AnonymousPrefixes anonymous_prefixes = AnonymousPrefixes::kShared;
    std::shared_ptr<TenantTable> tenants;  // null: no tenant has a quota, all weigh the same
  };

  // `grammars`: null where the validator refuses structured output. All references must outlive the generator. It must outlive every generation: destroy it after
  // the transports, and after the engine ended what it had.
  Generator(const Options& options, engine::Engine& engine, const Validator& validator,
            const engine::Tokenizer& tokenizer, Metrics& metrics, Log& log,
            const engine::Clock& clock, engine::GrammarCompiler* grammars = nullptr);
  ~Generator();

  // `on_ready` is called on the delivering thread whenever Take may have something, and never on
  // the caller's stack. A request that is refused at once has its end in Take when Start returns, and
  // `on_ready` is not called: overload must not wait for other threads. It should keep the transport's side alive by what it captured; it is kept
  // until the engine has ended every choice.
  std::shared_ptr<Generation> Start(v1::GenerateRequest message, CallInfo info,
                                    std::function<void()> on_ready);

  // Whether Start would refuse whatever the tenant asks now, because the queue is full: for transports, before they read a
  // message, as most of what comes in an overload comes to nothing.
  absl::Status CheckRoom(const std::string& tenant) const;

  // With whom a tenant's requests share KV: its trust domain's, or its own.
  engine::Digest SaltOf(const std::string& tenant) const;
  // False: the KV of the call is found by nobody else, not by the same caller either.
  bool SharesPrefixes(const CallInfo& info) const;

  // A call that ended before there was a generation: counted, and logged as refusals are.
  void CountUnstarted(std::string_view transport, const absl::Status& status);

  // Generations that are not closed.
  size_t calls() const;
  // Waits until there is none, or until `timeout` has passed; true if there is none.
  bool WaitIdle(absl::Duration timeout);  // by the steady clock

  // Work for the tokenising threads, on a message of `bytes`; false when they are too busy.
  // `tenant`: whose share of what may wait it takes; half as much again is for tenants that have little.
  [[nodiscard]] bool PostTokenizing(size_t bytes, std::function<void()> task,
                                    const std::string& tenant = {});
  absl::Status Busy() const;  // what to answer then

  const Options& options() const { return options_; }
  const Validator& validator() const { return validator_; }
  const engine::Tokenizer& tokenizer() const { return tokenizer_; }
  const engine::Clock& clock() const { return clock_; }

 private:
  friend class Generation;
  absl::Status FromEngine(const absl::Status& status) const;
  // ResourceExhausted that names the quota and has RetryInfo.
  absl::Status OverQuota(std::string_view quota, int64_t have, int64_t more, int64_t most) const;
  // Takes tokens of the tenant's quota for a generation that is counted, until ReleaseQuota.
  absl::Status ReserveTokens(Generation& generation, int64_t tokens, int64_t most);
  // Gives back a generation's request and tokens to its tenant: with its last message, or when it fails. Does nothing the
  // second time.
  void ReleaseQuota(Generation& generation);

  const Options options_;
  engine::Engine& engine_;
  const Validator& validator_;
  const engine::Tokenizer& tokenizer_;
  Metrics& metrics_;
  Log& log_;
  const engine::Clock& clock_;
  engine::GrammarCompiler* const grammars_;
  const std::string name_prefix_;  // tells processes apart in logs
  LineSampler refusal_lines_;      // requests that came to nothing
  std::atomic<uint64_t> next_name_ = 1;
  std::atomic<engine::RequestId> next_request_ = 1;
  std::atomic<uint64_t> next_private_call_ = 1;

  mutable engine::Mutex mutex_;
  engine::CondVar idle_;
  size_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t counted_calls_ ABSL_GUARDED_BY(mutex_) = 0;  // of them: not refused for their number
  // Load of a tenant that has counted calls.
  struct TenantLoad {
    size_t calls = 0;            // counted and not closed, of max_calls
    int64_t requests = 0;        // of them those that have not ended, of the tenant's quota
    int64_t running_tokens = 0;  // prompts and max_tokens of these, of the tenant's quota
  };
  absl::flat_hash_map<std::string, TenantLoad> tenants_ ABSL_GUARDED_BY(mutex_);
  size_t tokenizing_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t tokenizing_ ABSL_GUARDED_BY(mutex_) = 0;  // calls
  absl::flat_hash_map<std::string, size_t> tenant_tokenizing_ ABSL_GUARDED_BY(mutex_);

  // Last: joined first, while everything that tasks use is there.
  Executor deliver_;
  Executor compile_;
  Executor tokenize_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_GENERATOR_H_
