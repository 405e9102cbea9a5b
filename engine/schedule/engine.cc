#include "engine/schedule/engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "engine/base/status_macros.h"
#include "engine/kv/kv_cache.h"
#include "engine/kv/kv_memory.h"
#include "kernels/check.h"

namespace winnow::engine {
namespace {

// An idle engine looks around and beats this often.
constexpr Duration kIdleWait = std::chrono::milliseconds(100);
constexpr size_t kMailboxTasks = 256;
// Blocks of named prefixes that are looked at in a step, and by an engine that has nothing else to do.
constexpr size_t kSweptBlocks = 32, kSweptBlocksIdle = 512;
// Times that a sequence is computed again for its next token before it is given up.
constexpr int32_t kLossesMax = 24;
// Losses of a sequence that what it shares may cost it. A store with many damaged blocks gives them
// away one by one, each after a prompt that was computed in vain.
constexpr int32_t kLossesShared = 2;
// For one sequence's grammar to say which tokens may come next.
constexpr Duration kGrammarStepMax = std::chrono::milliseconds(500);
// A fetch that takes longer has slow reads, and so has a step that waits longer than EngineOptions::slow_wait. Then every
// sequence that needs some is left out of the steps until they have come, for so long. Else only those are that have taken
// over a prefix: of the others few blocks are missing, and one step for all of them costs less than one each.
constexpr Duration kSlowReads = std::chrono::milliseconds(50);
constexpr Duration kSlowTime = std::chrono::seconds(10);
// A fetch may take a read's time, and what its bytes take at a pace that computing them beats anywhere. Then the sequence
// computes them: a disk that hangs gives memory that it reads into back when it likes, and later fetches wait for that.
constexpr Duration kFetchPatience = std::chrono::seconds(2);
constexpr int64_t kLeastFetchBytesPerSecond = 4 << 20;
// While nothing can run until reads have come, the engine looks for new requests this often.
constexpr Duration kFetchWait = std::chrono::milliseconds(1);
// A request that fast memory is too small for waits so long for a store that takes nothing. It tries
// again by itself, first after seconds.
constexpr Duration kStarvedMax = std::chrono::seconds(30);

absl::Status CheckOption(bool good, const char* name, auto value, const std::string& rule) {
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " is ", value, ": ", rule));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options, Model& model,
                                                       const Tokenizer& tokenizer,
                                                       const Clock& clock,
                                                       EngineObserver* observer) {
  WINNOW_RETURN_IF_ERROR(CheckOption(
      options.step_tokens >= 1 && options.step_tokens <= model.max_batch_tokens(), "step_tokens",
      options.step_tokens,
      absl::StrCat("must be 1 to ", model.max_batch_tokens(), ", the largest batch of the model")));
  WINNOW_RETURN_IF_ERROR(CheckOption(
      options.prompt_step_tokens == 0 || (options.prompt_step_tokens >= options.step_tokens &&
                                          options.prompt_step_tokens <= model.max_batch_tokens()),
      "prompt_step_tokens", options.prompt_step_tokens,
      absl::StrCat("must be 0, or ", options.step_tokens, " (step_tokens) to ",
                   model.max_batch_tokens(), ", the largest batch of the model")));
  WINNOW_RETURN_IF_ERROR(CheckOption(
      options.max_running >= 1 &&
          options.max_running <= std::min(model.max_batch_logits(), options.step_tokens),
      "max_running", options.max_running,
      absl::StrCat("must be 1 to ", std::min(model.max_batch_logits(), options.step_tokens),
                   ", the smaller of the model's rows of logits and step_tokens")));
  WINNOW_RETURN_IF_ERROR(CheckOption(options.queue_requests >= 1, "queue_requests",
                                     options.queue_requests, "must be at least 1"));
  WINNOW_RETURN_IF_ERROR(CheckOption(options.queue_tokens >= 1, "queue_tokens",
                                     options.queue_tokens, "must be at least 1"));
  WINNOW_RETURN_IF_ERROR(CheckOption(options.pause_grace >= Duration::zero(), "pause_grace",
                                     absl::FormatDuration(absl::FromChrono(options.pause_grace)),
                                     "must not be negative"));
  WINNOW_RETURN_IF_ERROR(CheckOption(
      options.slow_reader_timeout > Duration::zero(), "slow_reader_timeout",
      absl::FormatDuration(absl::FromChrono(options.slow_reader_timeout)), "must be positive"));
  return std::unique_ptr<Engine>(new Engine(options, model, tokenizer, clock, observer));
}

Engine::Engine(const EngineOptions& options, Model& model, const Tokenizer& tokenizer,
               const Clock& clock, EngineObserver* observer)
    : options_(options),
      model_(model),
      tokenizer_(tokenizer),
      clock_(clock),
      observer_(observer != nullptr ? *observer : silent_),
      queue_(options.queue_requests, options.queue_tokens),
      mailbox_(kMailboxTasks),
      heartbeat_(clock.Now().time_since_epoch().count()),
      memory_(model.kv_memory()),
      pool_(model.num_blocks(), memory_, options.kv_events),
      prefixes_(options.prefix_cache ? memory_ : nullptr, pool_, model.block_tokens(), clock),
      sampled_(model.max_batch_tokens()) {
  for (Pass& pass : passes_) {
    pass.batch.chunks.reserve(options.max_running);
    pass.sequences.reserve(options.max_running);
  }
  passes_.front().batch.drafts = true;
  sample_rows_.reserve(model.max_batch_tokens());
  if (memory_ != nullptr) {
    memory_->store().SetEvents(options_.kv_events, options_.store_tier);
    memory_->SetQuotas([this](const Digest& tenant) { return StoreQuota(tenant); });
  }
  Publish();
}

Engine::~Engine() {
  Shutdown();
  if (memory_ == nullptr) return;
  memory_->store().SetEvents(nullptr, options_.store_tier);
  memory_->SetQuotas(nullptr);
}

// ---- any thread ----

absl::Status Engine::Submit(Request request, std::shared_ptr<OutputQueue> output) {
  WINNOW_RETURN_IF_ERROR(CheckRequest(request));
  return queue_.Push({.request = std::move(request), .output = std::move(output)});
}

absl::Status Engine::Submit(std::vector<Submission> group) {
  for (const Submission& submission : group) {
    WINNOW_RETURN_IF_ERROR(CheckRequest(submission.request));
  }
  return queue_.Push(std::move(group));
}

absl::Status Engine::CheckRequest(const Request& request) const {
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t most = request.stopping.max_tokens;
  if (prompt < 1) return absl::InvalidArgumentError("the prompt holds no tokens");
  if (most < 1) return absl::InvalidArgumentError(absl::StrCat("max_tokens is ", most));
  if (prompt + most > model_.max_context()) {
    return absl::InvalidArgumentError(
        absl::StrCat("can never fit: a prompt of ", prompt, " tokens and max_tokens ", most,
                     " make ", prompt + most, ", the context holds ", model_.max_context()));
  }
  // The KV of the last token is never needed.
  const int32_t blocks = BlocksFor(prompt + most - 1, model_.block_tokens());
  if (blocks > model_.num_blocks()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "can never fit: a prompt of ", prompt, " tokens and max_tokens ", most, " need ", blocks,
        " KV blocks of ", model_.block_tokens(), " tokens, the pool holds ", model_.num_blocks()));
  }
  WINNOW_RETURN_IF_ERROR(model_.CheckPolicy(request.policy));
  if (const int32_t rows = std::min(options_.step_tokens, model_.max_batch_logits());
      request.policy.IsVerified() && rows <= options_.max_running) {
    return absl::InvalidArgumentError(absl::StrCat(
        "policy option 'verify' needs more rows in a step than max_running, ", options_.max_running,
        ": step_tokens and the model's rows of logits leave ", rows));
  }
  // Ids index the model's tables and the row of logits: never past its width.
  const auto known = [this](int32_t id) { return id >= 0 && id < model_.vocab_size(); };
  for (const int32_t id : request.prompt) {
    if (!known(id)) return absl::InvalidArgumentError(absl::StrCat("prompt: no token ", id));
  }
  for (const auto& [id, bias] : request.sampling.logit_bias) {
    if (!known(id)) return absl::InvalidArgumentError(absl::StrCat("logit_bias: no token ", id));
  }
  for (const int32_t id : request.stopping.stop_token_ids) {
    if (!known(id))
      return absl::InvalidArgumentError(absl::StrCat("stop_token_ids: no token ", id));
  }
  for (const auto& [name, count] : {std::pair("top_logprobs", request.top_logprobs),
                                    std::pair("prompt_logprobs", request.prompt_logprobs)}) {
    if (count <= kernels::kMaxTopLogprobs) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", count, ", at most ", kernels::kMaxTopLogprobs));
  }
  for (const std::string& text : request.stopping.stop_strings) {
    if (text.empty()) return absl::InvalidArgumentError("stop_strings: an empty string");
  }
  return absl::OkStatus();
}

void Engine::Cancel(RequestId id) { queue_.Cancel(id); }

void Engine::BeginDrain() {
  queue_.Close("the server is draining");
  draining_ = true;  // after the queue is closed, because health is told of it
}

void Engine::Wake() { queue_.Wake(); }

bool Engine::Post(EngineMailbox::Task task) {
  if (!mailbox_.Post(std::move(task))) return false;
  queue_.Wake();
  return true;
}

Duration Engine::RetryAfter() const {
  const double pace = tokens_per_second_.load(std::memory_order_relaxed);
  const auto tokens = static_cast<double>(queue_.counts().waiting_tokens);
  const double seconds = std::clamp(pace > 0 ? tokens / pace : 1.0, 0.1, 60.0);
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

EngineStats Engine::stats() const {
  // The queue first: who leaves it was published as running before, so nobody is ever missing.
  const RequestQueue::Counts counts = queue_.counts();
  EngineStats stats;
  {
    const MutexLock lock(stats_mutex_);
    stats = published_;
  }
  stats.waiting = counts.waiting_requests;
  stats.waiting_tokens = counts.waiting_tokens;
  stats.accepted = counts.accepted;
  stats.prompt_tokens = counts.accepted_tokens;
  stats.rejected = counts.rejected;
  stats.draining = draining_;
  stats.heartbeat = TimePoint(Duration(heartbeat_.load(std::memory_order_relaxed)));
  return stats;
}

// ---- engine thread ----

void Engine::Run(const std::stop_token& stop) {
  const std::stop_callback wake(stop, [this] { queue_.Wake(); });
  while (!stop.stop_requested()) {
    if (Step()) continue;
    if (draining_ && sequences_.empty() && queue_.counts().waiting_requests == 0) break;
    queue_.Wait(kIdleWait);
  }
  Shutdown();
}

bool Engine::Step() {
  const TimePoint now = clock_.Now();
  heartbeat_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  if (memory_ != nullptr) memory_->store().SetNow(now);
  TakeOver();
  if (const auto answers = mailbox_.Run(prefixes_); !answers.empty()) {
    Publish();
    for (const EngineMailbox::Answer& answer : answers) answer();
  }
  EndOverdue(now);
  TakeInFetched(now);
  const StepPlan* plan = &Plan(now);
  // What nobody holds must not take frames from those who need them.
  if (memory_ != nullptr && memory_->residency().scarce() &&
      plan->chunks.size() < sequences_.size() && pool_.ForgetUnsaved()) {
    plan = &Plan(now);
  }
  Apply(*plan, now);
  const bool computes = std::any_of(passes_.begin(), passes_.end(),
                                    [](const Pass& pass) { return !pass.batch.chunks.empty(); });
  const bool adopted = std::exchange(adopted_, false);
  stats_.steps += computes ? 1 : 0;
  for (Pass& pass : passes_) {
    if (!pass.batch.chunks.empty() && !failed_) Run(pass);
  }
  const bool awaits = AwaitsFetches(!plan->chunks.empty());
  EndStarved(computes || adopted || awaits, now);
  prefixes_.Sweep(computes ? kSweptBlocks : kSweptBlocksIdle);
  DropExpired(now, computes ? kSweptBlocks : kSweptBlocksIdle);
  Emit();
  if (options_.kv_events != nullptr) {
    TellEvictions();
    options_.kv_events->Commit();
  }
  // Only now: who hears of it looks at the statistics, and these show it since Emit.
  if (!failure_.ok()) observer_.OnFailure(std::exchange(failure_, absl::OkStatus()));
  if (computes) Observe(clock_.Now() - now);
  // A store that takes nothing has to be asked whether it does again.
  // And erases of deleted prefixes want to be moved along.
  if (!computes && memory_ != nullptr &&
      (memory_->residency().has_work() || memory_->residency().scarce() ||
       memory_->store().in_flight() > 0)) {
    memory_->Idle();
  }
  if (awaits && !computes && !adopted) memory_->fetcher().Wait(kFetchWait);
  return computes || adopted || awaits;
}

void Engine::Run(Pass& pass) {
  PlanSampling(pass);
  const TimePoint begun = clock_.Now();
  const Duration waited = StoreWaitTime();
  const absl::Status status = model_.Sample(pass.batch, sample_rows_, sampled_);
  const TimePoint done = clock_.Now();
  RestReaders(pass, done, StoreWaitTime() - waited);
  decode_seconds_.reset();
  if (OnlyDecodes(pass)) decode_seconds_ = std::chrono::duration<double>(done - begun).count();
  if (status.ok()) {
    Advance(pass, done);
  } else {
    Fail(status);
  }
}

void Engine::TakeOver() {
  queue_.Drain(&submissions_, &cancellations_);
  for (Submission& submission : submissions_) {
    auto sequence =
        std::make_unique<Sequence>(std::move(submission), tokenizer_, pool_, model_.block_tokens());
    sequence->order = next_order_++;
    sequence->tenant = tenants_.Join(sequence->request.tenant, sequence->request.tenant_weight);
    const bool is_new = by_id_.emplace(sequence->request.id, sequence.get()).second;
    WINNOW_CHECK(is_new);
    sequences_.push_back(std::move(sequence));
  }
  for (const RequestId id : cancellations_) {
    if (const auto found = by_id_.find(id); found != by_id_.end()) {
      End(*found->second, FinishReason::kCancelled);
    }
  }
  submissions_.clear();
  cancellations_.clear();
  if (failed_) EndAll(FinishReason::kError, "the model failed", absl::StatusCode::kUnavailable);
}

void Engine::EndOverdue(TimePoint now) {
  for (const std::unique_ptr<Sequence>& sequence : sequences_) {
    if (sequence->ended) continue;
    if (sequence->request.deadline.has_value() && *sequence->request.deadline <= now) {
      End(*sequence, FinishReason::kDeadline);
    } else if (sequence->output->HasRoom()) {
      sequence->paused_since.reset();
    } else if (!sequence->paused_since.has_value()) {
      sequence->paused_since = now;
    } else if (now - *sequence->paused_since >= options_.slow_reader_timeout) {
      End(*sequence, FinishReason::kCancelled,
          absl::StrCat("the output was not read for ",
                       absl::FormatDuration(absl::FromChrono(options_.slow_reader_timeout))),
          absl::StatusCode::kCancelled);
    }
  }
  std::erase_if(sequences_, [](const auto& sequence) { return sequence->ended; });
}

// ---- KV on its way ----

bool Engine::IsFetching(const Sequence& sequence) const {
  return sequence.fetch != BlockFetcher::kNone && !memory_->fetcher().done(sequence.fetch);
}

// Steps leave it out, because its KV, or room for it, is yet to come.
bool Engine::AwaitsKv(const Sequence& sequence, TimePoint now) const {
  return IsFetching(sequence) || sequence.awaits_room || sequence.rests_until > now;
}

void Engine::TakeInFetched(TimePoint now) {
  if (memory_ == nullptr) return;
  memory_->fetcher().Pump();
  bool given_up = false;
  for (const std::unique_ptr<Sequence>& sequence : sequences_) {
    if (!IsFetching(*sequence)) continue;
    const auto bytes = static_cast<int64_t>(memory_->places().block_bytes()) *
                       sequence->cache.num_blocks() * memory_->blocks().num_layers();
    const Duration fetched_for = now - sequence->fetch_begun;
    if (fetched_for > kSlowReads) slow_until_ = now + kSlowTime;
    if (fetched_for >
        kFetchPatience + std::chrono::milliseconds(1000 * bytes / kLeastFetchBytesPerSecond)) {
      ++stats_.kv_losses;
      ++stats_.fetches.given_up;
      ComputeAlone(*sequence);
      given_up = true;
    }
  }
  if (given_up) SortSequences();
}

// Whether some wait for their KV, or for room for it. `planned`: this step's plan had somebody to step.
bool Engine::AwaitsFetches(bool planned) {
  bool fetching = false, awaits_room = false;
  for (const std::unique_ptr<Sequence>& sequence : sequences_) {
    if (sequence->ended) continue;
    fetching |= IsFetching(*sequence);
    awaits_room |= sequence->awaits_room;
  }
  // Those whose KV has come cannot step either, for want of blocks that the others have: they read it once more.
  if (awaits_room && !fetching && !planned) {
    for (const std::unique_ptr<Sequence>& sequence : sequences_) EndFetch(*sequence);
  }
  return fetching || awaits_room;
}

// From here on it takes over nothing, and shares nothing.
void Engine::ComputeAlone(Sequence& sequence) {
  sequence.alone = true;
  sequence.known_names.clear();  // it goes on under others
  Preempt(sequence);
}

// Whether the sequence has to wait for whole blocks that its next `tokens` read. After each fetch it steps, whatever is
// missing then, so that sequences that take each other's frames go on all the same.
bool Engine::FetchesFirst(Sequence& sequence, int32_t tokens, TimePoint now) {
  if (memory_ == nullptr || !memory_->store().exists()) return false;
  if (sequence.fetch == BlockFetcher::kNone) {
    sequence.fetch = BeginFetch(sequence, tokens, now);
    if (sequence.fetch == BlockFetcher::kNone) return false;
    if (sequence.fetch == BlockFetcher::kLater) {
      sequence.fetch = BlockFetcher::kNone;
      // Plans leave it out from here on. Those whose KV has come need the tokens to step, and so to give room.
      sequence.awaits_room = true;
      ++stats_.fetches.room_waits;
      return true;
    }
    ++stats_.fetches.begun;
    memory_->fetcher().Pump();
  }
  if (IsFetching(sequence)) return true;
  if (sequence.eager) stats_.resume_time += clock_.Now() - sequence.fetch_begun;
  return false;
}

// As BlockFetcher::Begin.
uint64_t Engine::BeginFetch(Sequence& sequence, int32_t tokens, TimePoint now) {
  if (!sequence.takes_over && now >= slow_until_) return BlockFetcher::kNone;
  const int32_t position = sequence.planned_computed_tokens();
  const AttentionPolicy& policy = sequence.request.policy;
  // The first of the tokens is the last to become one that retrieves.
  const bool dense =
      sequence.eager || sequence.retrieval == nullptr ||
      (sequence.draft.active() ? sequence.draft.verifies() : position < sequence.retrieve_from()) ||
      !model_.Retrieves(policy, position);
  const std::span<const int32_t> blocks = sequence.cache.block_table();
  const int32_t last = BlocksFor(int64_t{position} + tokens, model_.block_tokens());
  sequence.fetch_begun = now;
  return memory_->fetcher().Begin(blocks.first(std::min(blocks.size(), static_cast<size_t>(last))),
                                  [&](int32_t layer) -> size_t {
                                    if (!dense && sequence.retrieval->RetrievesIn(layer))
                                      return blocks.size();
                                    return model_.FirstRead(layer, position) /
                                           model_.block_tokens();
                                  });
}

// Its bytes for usage; those of a prefix that came whole are a resume's instead.
TierBytes Engine::EndFetch(Sequence& sequence) {
  if (memory_ == nullptr) return {};
  sequence.takes_over = false;
  const bool eager = std::exchange(sequence.eager, false);
  if (sequence.fetch == BlockFetcher::kNone) return {};
  const TierBytes bytes =
      memory_->fetcher().End(std::exchange(sequence.fetch, BlockFetcher::kNone));
  for (const std::unique_ptr<Sequence>& other : sequences_) other->awaits_room = false;
  if (!eager) return bytes;
  stats_.resume_bytes += bytes.host + bytes.disk;
  return {};
}

Duration Engine::StoreWaitTime() const {
  return memory_ == nullptr ? Duration() : memory_->store().wait_time();
}

// Those that made a step wait for reads rest for as long as it waited: half of the time is for who reads nothing.
void Engine::RestReaders(const Pass& pass, TimePoint now, Duration waited) {
  if (waited <= options_.slow_wait) return;
  slow_until_ = now + kSlowTime;
  for (size_t i = 0; i < pass.sequences.size(); ++i) {
    const TierBytes& bytes = memory_->chunk_bytes(static_cast<int32_t>(i));
    if (bytes.host + bytes.disk == 0) continue;
    pass.sequences[i]->rests_until = now + waited;
    ++stats_.fetches.rests;
  }
}

const StepPlan& Engine::Plan(TimePoint now) {
  const StepPlan& plan = scheduler_.Plan(View(now));
  const auto rests = [now](const auto& sequence) { return sequence->rests_until > now; };
  if (!plan.chunks.empty() || std::none_of(sequences_.begin(), sequences_.end(), rests))
    return plan;
  // Nobody else has anything to do.
  for (const std::unique_ptr<Sequence>& sequence : sequences_) sequence->rests_until = now;
  return scheduler_.Plan(View(now));
}

PlanInput Engine::View(TimePoint now) {
  views_.clear();
  const int32_t free_blocks =
      memory_ == nullptr ? pool_.num_free()
                         : std::min(pool_.num_free(), memory_->residency().RoomForBlocks());
  PlanDrafts(free_blocks, now);
  for (const std::unique_ptr<Sequence>& sequence : sequences_) {
    const std::optional<TimePoint>& paused = sequence->paused_since;
    views_.push_back({.phase = sequence->phase,
                      .known_tokens = sequence->planned_known_tokens(),
                      .computed_tokens = sequence->planned_computed_tokens(),
                      .blocks = sequence->cache.num_blocks(),
                      .tenant = sequence->tenant,
                      .verifies = sequence->draft.verifies(),
                      .paused = paused.has_value(),
                      .yields = paused.has_value() && now - *paused >= options_.pause_grace,
                      .waits = AwaitsKv(*sequence, now) || sequence->holds_verification});
  }
  return {.step_tokens = options_.step_tokens,
          .prompt_step_tokens = MostStepTokens(),
          .step_logits = model_.max_batch_logits(),
          .max_running = options_.max_running,
          .block_tokens = model_.block_tokens(),
          .free_blocks = free_blocks,
          .scarce = memory_ != nullptr && memory_->residency().scarce(),
          .sequences = views_,
          .served = tenants_.served(),
          .weights = tenants_.weights()};
}

void Engine::Apply(const StepPlan& plan, TimePoint now) {
  for (const int32_t index : plan.preempt) {
    Preempt(*sequences_[index]);
  }
  for (const int32_t index : plan.admit) {
    Sequence& sequence = *sequences_[index];
    if (!sequence.first_planned.has_value()) {
      sequence.first_planned = now;
      sequence.order = next_order_++;
      tenants_.SetLevel(sequence.tenant);
      tenants_.Charge(sequence.tenant, sequence.num_known_tokens());
    }
    sequence.phase = Phase::kRunning;
    ChangeWaiting(-1, sequence);
    StartRetrieval(sequence);
    if (!sequence.ended) adopted_ |= AdoptPrefix(sequence);
  }
  ClearPasses();
  for (const PlannedChunk& chunk : plan.chunks) {
    Sequence& sequence = *sequences_[chunk.sequence];
    if (sequence.ended) continue;
    // It adopted a prefix after the plan was made: the next plan knows where it goes on.
    if (sequence.planned_computed_tokens() != views_[chunk.sequence].computed_tokens) continue;
    if (FetchesFirst(sequence, chunk.tokens, now)) continue;
    sequence.cache.Grow(chunk.new_blocks);
    const bool drafts = sequence.draft.drafting() && model_.has_draft_weights();
    Pass& pass = drafts ? passes_.front() : passes_.back();
    pass.sequences.push_back(&sequence);
    if (sequence.draft.active()) {
      pass.batch.chunks.push_back(sequence.draft.Chunk(chunk.tokens, sequence.cache.block_table(),
                                                       sequence.retrieval.get()));
      continue;
    }
    const int32_t position = sequence.cache.num_tokens();
    const int32_t first_with_logits = sequence.first_with_logits();
    WINNOW_CHECK(position <= first_with_logits);
    pass.batch.chunks.push_back(
        {.tokens = std::span(sequence.tokens).subspan(position, chunk.tokens),
         .position = position,
         .block_table = sequence.cache.block_table(),
         .num_logits = std::max(0, position + chunk.tokens - first_with_logits),
         .retrieval = sequence.retrieval.get(),
         .retrieve_from = sequence.retrieve_from()});
  }
  if (!plan.preempt.empty() || !plan.admit.empty()) SortSequences();
}

void Engine::ClearPasses() {
  for (Pass& pass : passes_) {
    pass.batch.chunks.clear();
    pass.sequences.clear();
  }
}

// Nothing can go on because the store takes nothing: the first in line is told so after a while.
void Engine::EndStarved(bool progress, TimePoint now) {
  const auto first = std::find_if(sequences_.begin(), sequences_.end(), [](const auto& sequence) {
    return !sequence->ended && !sequence->paused_since.has_value();
  });
  if (progress || memory_ == nullptr || !memory_->residency().scarce() ||
      first == sequences_.end()) {
    starved_since_.reset();
  } else if (!starved_since_.has_value()) {
    starved_since_ = now;
  } else if (now - *starved_since_ >= kStarvedMax) {
    End(**first, FinishReason::kError,
        "fast memory is too small for this request alone, and its store takes nothing",
        absl::StatusCode::kUnavailable);
  }
}

void Engine::SortSequences() {
  std::sort(sequences_.begin(), sequences_.end(), [](const auto& a, const auto& b) {
    return a->phase != b->phase ? a->phase < b->phase : a->order < b->order;
  });
}

// Its blocks go back; its tokens, its answer and what was counted stay.
void Engine::Preempt(Sequence& sequence) {
  if (memory_ != nullptr) {
    for (const int32_t block : sequence.cache.block_table()) {
      if (sequence.alone) memory_->blocks().Distrust(block);
      if (sequence.alone || memory_->blocks().AnyLost(block)) pool_.Withdraw(block);
    }
  }
  DropDraft(sequence);
  EndFetch(sequence);
  sequence.cache.Release();
  sequence.named_blocks = 0;
  if (sequence.retrieval != nullptr) sequence.retrieval->Suspend();
  sequence.phase = Phase::kPreempted;
  ++sequence.usage.preemptions;
  ++stats_.preemptions;
  ChangeWaiting(+1, sequence);
}

// The sequence's KV was lost in a slower tier. It is computed again, like one that was preempted;
// a store that loses it time and again must not keep it here for ever.
void Engine::Recompute(Sequence& sequence) {
  ++stats_.kv_losses;
  if (++sequence.losses > kLossesMax) {
    End(sequence, FinishReason::kError, "the KV of this request was lost by its store repeatedly",
        absl::StatusCode::kUnavailable);
    return;
  }
  if (++sequence.losses_in_all >= kLossesShared) return ComputeAlone(sequence);
  Preempt(sequence);
}

void Engine::StartRetrieval(Sequence& sequence) {
  const AttentionPolicy& policy = sequence.request.policy;
  if (policy.IsDense()) return;
  absl::Status status;
  if (sequence.retrieval != nullptr) {
    status = model_.ResumeRetrieval(*sequence.retrieval);
  } else if (auto state = model_.NewRetrievalState(policy); state.ok()) {
    sequence.retrieval = *std::move(state);
  } else {
    status = state.status();
  }
  if (!status.ok()) {
    End(sequence, FinishReason::kError, std::string(status.message()), status.code());
  }
}

// Whether every row of the pass is decoded or verified: none is a prompt's but the last of one.
bool Engine::OnlyDecodes(const Pass& pass) {
  for (size_t i = 0; i < pass.batch.chunks.size(); ++i) {
    const SequenceChunk& chunk = pass.batch.chunks[i];
    const int32_t last = pass.sequences[i]->num_prompt_tokens() - 1;
    if (chunk.num_logits < static_cast<int32_t>(chunk.tokens.size()) || chunk.position < last) {
      return false;
    }
  }
  return true;
}

// Rows of the chunk's logits that rate tokens of the prompt: all but one that the next token comes from.
int32_t Engine::ScoresOf(const Sequence& sequence, const SequenceChunk& chunk) {
  const int32_t end = chunk.position + static_cast<int32_t>(chunk.tokens.size());
  return chunk.num_logits - (end == sequence.num_known_tokens() ? 1 : 0);
}

void Engine::PlanSampling(const Pass& pass) {
  sample_rows_.clear();
  for (size_t i = 0; i < pass.batch.chunks.size(); ++i) {
    const int32_t rows = pass.batch.chunks[i].num_logits;
    if (rows == 0) continue;
    Sequence& sequence = *pass.sequences[i];
    if (sequence.draft.active()) {
      AllowNextDrafted(sequence);
      sequence.draft.AppendSampleRows(sequence.request, sequence.history,
                                      sequence.answer.num_tokens(), rows, &sample_rows_);
      continue;
    }
    const int32_t scores = ScoresOf(sequence, pass.batch.chunks[i]);
    for (const int32_t token :
         std::span(sequence.request.prompt).subspan(sequence.num_scored + 1, scores)) {
      kernels::SampleRow& row = sample_rows_.emplace_back();
      row.top_logprobs = sequence.request.prompt_logprobs;
      row.given = token;
    }
    if (rows == scores) continue;
    std::span<const uint32_t> allowed;
    if (sequence.grammar != nullptr) allowed = AllowedTokens(sequence, *sequence.grammar);
    sample_rows_.push_back(
        MakeSampleRow(sequence.request, sequence.history, sequence.answer.num_tokens(), allowed));
  }
}

// How many rules a grammar is in at once is a matter of the text so far, and everybody waits for its answer: one that
// takes its time does so once.
std::span<const uint32_t> Engine::AllowedTokens(Sequence& sequence, GrammarState& state) {
  const TimePoint begun = clock_.Now();
  const std::span<const uint32_t> allowed = state.AllowedTokens();
  if (const Duration taken = clock_.Now() - begun; taken > kGrammarStepMax) {
    sequence.grammar_fault =
        absl::StrCat("the grammar took ", absl::FormatDuration(absl::FromChrono(taken)),
                     " to say what may come next, at most ",
                     absl::FormatDuration(absl::FromChrono(kGrammarStepMax)), " are given");
  }
  return allowed;
}

void Engine::Advance(const Pass& pass, TimePoint now) {
  size_t row = 0;
  bool lost = false;
  for (size_t i = 0; i < pass.batch.chunks.size(); ++i) {
    const SequenceChunk& chunk = pass.batch.chunks[i];
    Sequence& sequence = *pass.sequences[i];
    stats_.computed_tokens += chunk.tokens.size();
    const TierBytes fetched = EndFetch(sequence);
    const std::span<const kernels::SampledToken> rows =
        std::span(sampled_).subspan(std::exchange(row, row + chunk.num_logits), chunk.num_logits);
    if (memory_ != nullptr && memory_->chunk_lost(static_cast<int32_t>(i))) {
      if (sequence.retrieval != nullptr) CountRetrieval(sequence);
      Recompute(sequence);
      lost = true;
      continue;
    }
    CountTiers(pass, static_cast<int32_t>(i), fetched);
    if (sequence.draft.active()) {
      AdvanceDraft(sequence, rows, now);
      continue;
    }
    sequence.cache.Append(static_cast<int32_t>(chunk.tokens.size()));
    if (memory_ != nullptr) NameBlocks(sequence);
    if (sequence.retrieval != nullptr) CountRetrieval(sequence);
    const auto scores = static_cast<size_t>(ScoresOf(sequence, chunk));
    for (const kernels::SampledToken& rated : rows.first(scores)) TakeScore(sequence, rated);
    if (rows.size() == scores || sequence.ended) continue;
    if (decode_seconds_.has_value()) sequence.draft_length.OnDense(*decode_seconds_);
    Take(sequence, rows.back(), now);
  }
  if (lost) SortSequences();
}

void Engine::TakeScore(Sequence& sequence, const kernels::SampledToken& rated) {
  absl::StatusOr<OutputToken> token = ToOutputToken(rated);
  if (!token.ok()) {
    End(sequence, FinishReason::kError, std::string(token.status().message()),
        absl::StatusCode::kInternal);
    return;
  }
  ++sequence.num_scored;
  sequence.scores.push_back({.token = *std::move(token), .rank = rated.rank});
}

void Engine::Take(Sequence& sequence, const kernels::SampledToken& sampled, TimePoint now) {
  const Request& request = sequence.request;
  absl::StatusOr<OutputToken> token = ToOutputToken(sampled);
  if (sequence.grammar != nullptr) {
    if (sampled.status == kernels::SampleStatus::kNothing) {
      sequence.grammar_fault = "the grammar allows no token that the model has";
    } else if (token.ok() && !sequence.grammar->Accept(token->token)) {
      token = absl::InternalError("a token was drawn that the grammar does not allow");
    }
    if (!sequence.grammar_fault.empty()) {
      End(sequence, FinishReason::kError, sequence.grammar_fault,
          absl::StatusCode::kInvalidArgument);
      return;
    }
  }
  if (!token.ok()) {
    End(sequence, FinishReason::kError, std::string(token.status().message()),
        absl::StatusCode::kInternal);
    return;
  }
  if (sequence.answer.num_tokens() == 0) {
    sequence.usage.time_to_first_token = now - request.arrival;
    observer_.OnFirstToken(request, sequence.usage.time_to_first_token);
  } else {
    observer_.OnNextToken(request, now - *sequence.last_token);
    const bool dense = sequence.retrieval == nullptr || sequence.request.policy.IsVerified();
    if (dense && !sequence.draft.active()) CountDenseDecode(sequence);
  }
  sequence.last_token = now;
  sequence.losses = 0;
  sequence.tokens.push_back(token->token);
  sequence.history.AddGenerated(token->token);
  tenants_.Charge(sequence.tenant, 1);
  ++stats_.generated_tokens;
  if (const FinishReason reason = sequence.answer.Add(*std::move(token));
      reason != FinishReason::kNone) {
    End(sequence, reason);
  }
}

// Bytes brought from slower tiers for a chunk that decodes.
void Engine::CountTiers(const Pass& pass, int32_t chunk, const TierBytes& fetched) {
  Sequence& sequence = *pass.sequences[chunk];
  if (memory_ == nullptr || pass.batch.chunks[chunk].position < sequence.decode_from()) return;
  TierBytes bytes = memory_->chunk_bytes(chunk);
  bytes.host += fetched.host;
  bytes.disk += fetched.disk;
  sequence.usage.kv_read_bytes_host += bytes.host;
  sequence.usage.kv_read_bytes_disk += bytes.disk;
  stats_.kv_read_bytes_host += bytes.host;
  stats_.kv_read_bytes_disk += bytes.disk;
  CountDraftReads(sequence, static_cast<int32_t>(pass.batch.chunks[chunk].tokens.size()),
                  {.host = bytes.host, .disk = bytes.disk});
}

void Engine::CountDenseDecode(Sequence& sequence) {
  // The step's one token reads every row up to its own.
  RetrievalCounts counts;
  counts.rows_read = counts.rows_dense = model_.KvRowsSeen(sequence.num_known_tokens() - 1, 1);
  Count(sequence, counts);
}

void Engine::CountRetrieval(Sequence& sequence) {
  Count(sequence, sequence.retrieval->TakeCounts());
}

void Engine::Count(Sequence& sequence, const RetrievalCounts& counts) {
  const uint64_t row_bytes = model_.kv_row_bytes();
  sequence.usage.attended_rows += counts.rows_read;
  sequence.usage.kv_read_bytes_fast += counts.rows_read * row_bytes;
  sequence.usage.kv_dense_bytes += counts.rows_dense * row_bytes;
  sequence.usage.retrieval += counts;
  stats_.attended_rows += counts.rows_read;
  stats_.kv_read_bytes_fast += counts.rows_read * row_bytes;
  stats_.kv_dense_bytes += counts.rows_dense * row_bytes;
  stats_.retrieval += counts;
}

void Engine::Fail(const absl::Status& status) {
  // Nothing of the batch can be trusted, nor can the device: it would fail those that wait, too.
  failed_ = true;
  stats_.failed = true;
  queue_.Close("the model failed");
  EndAll(FinishReason::kError, "the model failed", absl::StatusCode::kUnavailable);
  if (options_.kv_events != nullptr) options_.kv_events->Cleared();
  failure_ = status;
}

void Engine::End(Sequence& sequence, FinishReason reason, std::string error,
                 absl::StatusCode code) {
  if (sequence.ended) return;
  sequence.ended = true;  // removed in this Step, and its blocks with it
  EndFetch(sequence);
  tenants_.Leave(sequence.tenant);
  by_id_.erase(sequence.request.id);
  if (sequence.phase != Phase::kRunning) ChangeWaiting(-1, sequence);

  const TimePoint now = clock_.Now();
  sequence.answer.Cut();
  Usage& usage = sequence.usage;
  usage.generated_tokens = sequence.answer.num_tokens();
  usage.queue_time = sequence.first_planned.value_or(now) - sequence.request.arrival;
  usage.total_time = now - sequence.request.arrival;
  OutputEvent event;
  event.scores = std::exchange(sequence.scores, {});
  sequence.answer.TakeInto(&event);
  event.finish = reason;
  event.error = std::move(error);
  event.error_code = code;
  event.usage = usage;
  ++stats_.finished[static_cast<int>(reason)];
  observer_.OnFinished(sequence.request, reason, usage);
  events_.emplace_back(sequence.output, std::move(event));
}

void Engine::EndAll(FinishReason reason, const std::string& error, absl::StatusCode code) {
  for (const std::unique_ptr<Sequence>& sequence : sequences_) End(*sequence, reason, error, code);
}

void Engine::Emit() {
  for (const Pass& pass : passes_) {
    for (Sequence* sequence : pass.sequences) {
      if (sequence->ended || (sequence->scores.empty() && !sequence->answer.has_news())) continue;
      OutputEvent event;
      event.scores = std::exchange(sequence->scores, {});
      sequence->answer.TakeInto(&event);
      events_.emplace_back(sequence->output, std::move(event));
    }
  }
  std::erase_if(sequences_, [](const auto& sequence) { return sequence->ended; });
  // Statistics come before events: a request counts as running at its first one, and its blocks as free at its last one.
  Publish();
  for (auto& [output, event] : events_) output->Push(std::move(event));
  events_.clear();
}

void Engine::Publish() {
  stats_.running = 0;
  stats_.paused = 0;
  stats_.preempted = 0;
  for (const std::unique_ptr<Sequence>& sequence : sequences_) {
    stats_.running += sequence->phase == Phase::kRunning;
    stats_.paused += sequence->paused_since.has_value();
    stats_.preempted += sequence->phase == Phase::kPreempted;
  }
  stats_.blocks_used = pool_.num_used();
  stats_.blocks_total = pool_.num_blocks();
  stats_.blocks_idle = pool_.num_idle();
  stats_.named_prefixes = static_cast<int32_t>(prefixes_.size());
  stats_.pinned_prefixes = static_cast<int32_t>(prefixes_.pinned());
  if (memory_ != nullptr && memory_->store().exists()) {
    stats_.tiered = true;
    stats_.kv = memory_->stats();
    stats_.fetches.open = static_cast<int32_t>(memory_->fetcher().num_open());
    stats_.store = memory_->store().stats();
  }
  stats_.prefetch = model_.prefetch_counts();
  stats_.launches = model_.launches();
  // In this order, so that a reader never misses a request that moves between both counts.
  if (waiting_change_ > 0) TellQueue();
  {
    const MutexLock lock(stats_mutex_);
    published_ = stats_;
  }
  TellQueue();
}

void Engine::TellQueue() {
  for (const auto& [tenant, change] : waiting_changes_) {
    queue_.AdjustWaiting(tenant, change.first, change.second);
  }
  waiting_changes_.clear();
  waiting_change_ = 0;
}

void Engine::ChangeWaiting(int32_t requests, const Sequence& sequence) {
  waiting_change_ += requests;
  auto& [tenant_requests, tenant_tokens] = waiting_changes_[sequence.request.tenant];
  tenant_requests += requests;
  tenant_tokens += int64_t{requests} * sequence.num_prompt_tokens();
}

void Engine::Observe(Duration duration) {
  int64_t tokens = 0;
  size_t chunks = 0;
  for (const Pass& pass : passes_) {
    tokens += pass.batch.num_tokens();
    chunks += pass.batch.chunks.size();
  }
  const uint64_t rows = stats_.attended_rows - observed_rows_;
  observed_rows_ = stats_.attended_rows;
  observer_.OnStep({.sequences = static_cast<int32_t>(chunks),
                    .tokens = static_cast<int32_t>(tokens),
                    .attended_rows = rows,
                    .duration = duration});
  const double seconds = std::chrono::duration<double>(duration).count();
  if (seconds <= 0) return;
  constexpr double kRecent = 0.1;  // weight of the newest step
  const double pace = tokens_per_second_.load(std::memory_order_relaxed);
  const double now = static_cast<double>(tokens) / seconds;
  tokens_per_second_.store(pace == 0 ? now : pace + kRecent * (now - pace),
                           std::memory_order_relaxed);
}

void Engine::Shutdown() {
  queue_.Close("the server has stopped");
  TakeOver();
  EndAll(FinishReason::kCancelled, "the server is stopping", absl::StatusCode::kUnavailable);
  mailbox_.Close();
  ClearPasses();
  Emit();
  // Nobody can be served from here any more.
  if (options_.kv_events != nullptr && !stopped_) {
    options_.kv_events->Cleared();
    options_.kv_events->Commit();
  }
  stopped_ = true;
  if (memory_ != nullptr) memory_->Flush(options_.flush_time);
}

}  // namespace winnow::engine
