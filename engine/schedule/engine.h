// The engine: requests in, tokens out. One thread calls Run (or, in tests, Step) and owns all
// state; any thread may Submit, Cancel, BeginDrain, Wake and read stats.
//
// Life of a request: Submit puts it into the bounded queue; a Step takes it over to the waiting;
// the scheduler admits it when a slot and KV blocks are there; its prompt is computed in chunks
// beside other sequences' decoding; tokens are sampled and pushed to its OutputQueue; it ends with
// exactly one event that has `finish` set, and its blocks are free when that event is visible. When
// blocks run out, the sequence admitted last loses its blocks and is computed again later, from its
// prompt and the tokens it has: the client sees a pause and the same tokens.
#ifndef WINNOW_ENGINE_SCHEDULE_ENGINE_H_
#define WINNOW_ENGINE_SCHEDULE_ENGINE_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "engine/base/mutex.h"
#include "engine/kv/block_pool.h"
#include "engine/kv/kv_event_log.h"
#include "engine/model.h"
#include "engine/schedule/engine_mailbox.h"
#include "engine/schedule/engine_stats.h"
#include "engine/schedule/output_queue.h"
#include "engine/schedule/prefix_table.h"
#include "engine/schedule/request.h"
#include "engine/schedule/request_queue.h"
#include "engine/schedule/sampler.h"
#include "engine/schedule/scheduler.h"
#include "engine/schedule/sequence.h"
#include "engine/schedule/tenant_shares.h"
#include "engine/text/tokenizer.h"
#include "kernels/sample.h"

namespace winnow::engine {

struct EngineOptions {
  int32_t max_running = 64;   // sequences; at most the model's max_batch_logits and step_tokens
  int32_t step_tokens = 512;  // tokens of one step; at most the model's max_batch_tokens
  // The same where nobody decodes, so that nobody waits for a token: from step_tokens to the model's max_batch_tokens. 0:
  // step_tokens.
  int32_t prompt_step_tokens = 0;
  int32_t queue_requests = 256;    // requests that wait, at most
  int64_t queue_tokens = 4 << 20;  // prompt tokens of requests that wait, at most
  // A sequence whose OutputQueue is full is paused. After `pause_grace` its blocks may be taken for
  // others that wait; after `slow_reader_timeout` it is cancelled.
  Duration pause_grace = std::chrono::seconds(1);
  Duration slow_reader_timeout = std::chrono::seconds(30);
  // Requests of one tenant whose prompts begin alike share KV; with a store, after a restart too.
  bool prefix_cache = true;
  // A prefix that comes from the store is read at once if its KV takes at most this share of the
  // frames; else when it is attended to, or chosen.
  double eager_share = 0.125;
  // At the end, for saving what is to be found after a restart, and again for what is under way then. Real time,
  // whatever the clock says.
  Duration flush_time = std::chrono::seconds(5);
  // A step that waited longer for the store has slow reads (docs/faults.md). Real time, too.
  Duration slow_wait = std::chrono::milliseconds(50);
  // Is told what the prefix cache has; outlives the engine. Null: nobody. `store_tier`: of the model's store.
  KvEventLog* kv_events = nullptr;
  KvTier store_tier = KvTier::kDisk;
  ChainFunction chain_next = ChainNext;
};

class Engine {
 public:
  // `model`, `tokenizer`, `clock` and `observer` (may be null) must outlive the engine.
  // InvalidArgument: options that are out of range or that the model cannot honour, by name.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options, Model& model,
                                                        const Tokenizer& tokenizer,
                                                        const Clock& clock,
                                                        EngineObserver* observer = nullptr);
  // REQUIRES: no thread is in Run. Requests left end with kCancelled.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Takes the request into the queue. On OK the end will be told through `output`, exactly once; on
  // an error nothing is ever pushed. The request was validated by the service; what could break the
  // engine's memory or never fit is checked again here.
  //   InvalidArgument     a policy that the model cannot honour; no tokens, ids past the vocabulary;
  //                       can never fit: prompt and max_tokens exceed the context or the KV pool
  //                       (with the numbers)
  //   ResourceExhausted   the queue is full, by requests or by tokens: retry after RetryAfter()
  //   Unavailable         draining, stopped, or the model failed
  absl::Status Submit(Request request, std::shared_ptr<OutputQueue> output);
  // The same for several that belong together: all are taken, or none.
  absl::Status Submit(std::vector<Submission> group);

  // Whether Submit would refuse a group of the tenant's now because the queue is full, however few its tokens:
  // OK or ResourceExhausted. So that a request that would be refused need not be tokenised first.
  absl::Status CheckRoom(const std::string& tenant, int32_t requests) {
    return queue_.CheckRoom(tenant, requests);
  }

  // Ends the request with kCancelled at the next Step, wherever it is. Unknown ids are ignored: the
  // request may have ended meanwhile.
  void Cancel(RequestId id);

  // Calls the task on the engine thread, between steps, with the named prefixes; with null if the engine has stopped
  // before. Then its answer, when stats() shows what it did. False: too many wait, or it has stopped; the task is not called.
  [[nodiscard]] bool Post(EngineMailbox::Task task);

  // What an earlier process had named. Before Run. REQUIRES: a prefix cache.
  void RestorePrefixes(std::vector<SavedPrefix> saved) { prefixes_.Restore(std::move(saved)); }
  // Model and settings whose KV names are of; nullopt: nothing can be named, because there is no prefix cache.
  std::optional<Digest> prefix_model() const {
    return prefixes_.has_memory() ? std::optional(prefixes_.model()) : std::nullopt;
  }

  // From now on Submit refuses; what was accepted is finished. Run returns when nothing is left.
  void BeginDrain();

  // Makes an idle engine look again: an OutputQueue got room. Queues whose on_room calls this must
  // not be popped any more when the engine goes.
  void Wake();

  // How long a refused client should wait: the time that the waiting prompts take at the recent
  // pace, between 100 ms and 60 s.
  Duration RetryAfter() const;

  EngineStats stats() const;

  // Engine thread: steps until `stop` is requested, or until draining and nothing is left. Then
  // refuses new requests and ends those left with kCancelled.
  void Run(const std::stop_token& stop);

  // Engine thread: one step. True if it computed anything, or has waited a moment for KV that is on its way; false if
  // there was nothing that could run, so that the caller may wait.
  bool Step();

 private:
  // Chunks of a step that are computed with one set of weights.
  struct Pass {
    Batch batch;
    std::vector<Sequence*> sequences;  // of batch.chunks
  };

  Engine(const EngineOptions& options, Model& model, const Tokenizer& tokenizer, const Clock& clock,
         EngineObserver* observer);

  // The parts of Step, in its order.
  void TakeOver();                 // requests and cancellations out of the queue
  void EndOverdue(TimePoint now);  // deadlines and slow readers
  void TakeInFetched(TimePoint now);
  bool AwaitsFetches(bool planned);
  const StepPlan& Plan(TimePoint now);
  PlanInput View(TimePoint now);
  int32_t MostStepTokens() const {
    return std::max(options_.step_tokens, options_.prompt_step_tokens);
  }
  void Apply(const StepPlan& plan, TimePoint now);  // sequences change phase; passes_ are filled
  void Run(Pass& pass);
  void PlanSampling(const Pass& pass);  // how its rows become tokens
  // Tokens that may follow `state`, which is the sequence's or its draft's.
  std::span<const uint32_t> AllowedTokens(Sequence& sequence, GrammarState& state);
  void Advance(const Pass& pass, TimePoint now);  // sequences by what was computed and sampled
  void ClearPasses();
  void Fail(const absl::Status& status);
  void Emit();
  void Observe(Duration duration);

  void Take(Sequence& sequence, const kernels::SampledToken& sampled, TimePoint now);
  void TakeScore(Sequence& sequence, const kernels::SampledToken& rated);
  static int32_t ScoresOf(const Sequence& sequence, const SequenceChunk& chunk);
  static bool OnlyDecodes(const Pass& pass);
  // engine_draft.cc
  void PlanDrafts(int32_t free_blocks, TimePoint now);
  void BeginDraft(Sequence& sequence, int32_t verifying);
  void HoldVerifications(TimePoint now);
  void AdvanceDraft(Sequence& sequence, std::span<const kernels::SampledToken> drawn,
                    TimePoint now);
  void DropDraft(Sequence& sequence);
  void CutToGrammar(Sequence& sequence);
  void AllowNextDrafted(Sequence& sequence);
  void CountDrafted(Sequence& sequence, int32_t tokens);
  void CountDraftReads(Sequence& sequence, int32_t rows, const KvReads& reads);
  bool IsFetching(const Sequence& sequence) const;
  bool AwaitsKv(const Sequence& sequence, TimePoint now) const;
  bool FetchesFirst(Sequence& sequence, int32_t tokens, TimePoint now);
  uint64_t BeginFetch(Sequence& sequence, int32_t tokens, TimePoint now);
  TierBytes EndFetch(Sequence& sequence);
  Duration StoreWaitTime() const;  // since the start
  void RestReaders(const Pass& pass, TimePoint now, Duration waited);
  void SortSequences();
  void Preempt(Sequence& sequence);
  void EndStarved(bool progress, TimePoint now);
  void Recompute(Sequence& sequence);
  void ComputeAlone(Sequence& sequence);
  void StartRetrieval(Sequence& sequence);
  void CountTiers(const Pass& pass, int32_t chunk, const TierBytes& fetched);
  void CountDenseDecode(Sequence& sequence);
  void CountRetrieval(Sequence& sequence);
  void Count(Sequence& sequence, const RetrievalCounts& counts);
  // engine_prefix.cc
  BlockName NameOf(Sequence& sequence, int32_t i, bool alone, bool* shareable);
  Retention RetentionFor(const Sequence& sequence) const;
  void Keep(const BlockName& name, const Retention& retention);
  void DropExpired(TimePoint now, size_t blocks);
  // The name of a full block that the sequence has. REQUIRES: i < named_blocks.
  const BlockName& BlockNameOf(const Sequence& sequence, int32_t i) const;
  int64_t StoreQuota(const Digest& salt) const;
  bool MayKeep(const Sequence& sequence);
  void NameBlocks(Sequence& sequence);
  bool AdoptPrefix(Sequence& sequence);
  uint64_t StoreBytesRead() const;
  bool IsTold(const Sequence& sequence) const;
  void TellStored(const Sequence& sequence, int32_t i);
  void TellEvictions();
  void ChangeWaiting(int32_t requests, const Sequence& sequence);
  void Publish();
  void TellQueue();
  void End(Sequence& sequence, FinishReason reason, std::string error = {},
           absl::StatusCode code = absl::StatusCode::kOk);
  void EndAll(FinishReason reason, const std::string& error, absl::StatusCode code);
  void Shutdown();
  absl::Status CheckRequest(const Request& request) const;

  const EngineOptions options_;
  Model& model_;
  const Tokenizer& tokenizer_;
  const Clock& clock_;
  EngineObserver silent_;
  EngineObserver& observer_;

  // Shared with other threads. The queue's lock is where they meet; the lock of the snapshot is
  // held for a copy of it.
  RequestQueue queue_;
  EngineMailbox mailbox_;
  std::atomic<bool> draining_ = false;
  std::atomic<Duration::rep> heartbeat_;
  std::atomic<double> tokens_per_second_ = 0;  // computed; recent
  mutable Mutex stats_mutex_;
  EngineStats published_ ABSL_GUARDED_BY(stats_mutex_);

  // Engine thread only.
  KvMemory* const memory_;  // the model's; null: KV never moves
  BlockPool pool_;
  PrefixTable prefixes_;
  Scheduler scheduler_;
  TenantShares tenants_;
  DraftCostTable draft_costs_;
  std::vector<std::unique_ptr<Sequence>> sequences_;  // by phase, then order
  absl::flat_hash_map<RequestId, Sequence*> by_id_;
  uint64_t next_order_ = 0;
  uint64_t told_evictions_ = 0;  // of the store's, when TellEvictions last began to look
  int32_t next_expiring_ = 0;    // block, that DropExpired looks at next
  size_t copies_to_check_ = 0;   // of the store's blocks, that it has not looked at since
  bool failed_ = false;
  bool stopped_ = false;  // Shutdown was here
  absl::Status failure_;  // not yet told to the observer
  EngineStats stats_;
  uint64_t observed_rows_ = 0;  // of stats_.attended_rows
  // Requests that began or ceased to wait, not yet told to the queue: of all, and by tenant with their
  // prompt tokens.
  int32_t waiting_change_ = 0;
  absl::flat_hash_map<std::string, std::pair<int32_t, int64_t>> waiting_changes_;

  // Scratch of a step; kept, so that steps do not allocate it again.
  std::vector<Submission> submissions_;
  std::vector<RequestId> cancellations_;
  std::string how_;  // how a block's tokens attended; set by NameOf
  std::vector<BlockName> adopted_names_;
  bool adopted_ = false;    // a prefix, in this step
  TimePoint slow_until_{};  // the store's reads were slow
  std::optional<TimePoint> starved_since_;
  // Seconds of the latest pass, if every row of it was decoded or verified: what a draft's length depends on.
  std::optional<double> decode_seconds_;
  std::vector<SequenceView> views_;
  // Drafts that have weights of their own, and then all others.
  std::array<Pass, 2> passes_;
  std::vector<kernels::SampleRow> sample_rows_;  // of a pass's num_logits()
  std::vector<kernels::SampledToken> sampled_;   // the same; room for a row of each token
  std::vector<std::pair<std::shared_ptr<OutputQueue>, OutputEvent>>
      events_;  // of the step, to be told
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_ENGINE_H_
