#include "server/generator.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "kernels/check.h"
#include "server/end_status.h"
#include "server/status.h"
#include "server/strings.h"
#include "server/trace_context.h"

namespace winnow::server {
namespace {

// A cancellation this shortly before the deadline is the deadline's, for the log and the metrics.
constexpr engine::Duration kDeadlineSlack = std::chrono::milliseconds(50);
// Lines about requests that came to nothing: so many at once, and in a second.
constexpr double kRefusalLines = 200;
constexpr double kRefusalLinesPerSecond = 20;

// Log-probabilities of a prompt in one message: some hundred kilobytes, where clients of gRPC take 4 MB.
constexpr int64_t kMessageLogprobs = 8192;

double Seconds(engine::Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

v1::FinishReason ToProto(engine::FinishReason reason) {
  switch (reason) {
    case engine::FinishReason::kStopToken:
      return v1::FINISH_REASON_STOP_TOKEN;
    case engine::FinishReason::kStopString:
      return v1::FINISH_REASON_STOP_STRING;
    case engine::FinishReason::kMaxTokens:
      return v1::FINISH_REASON_MAX_TOKENS;
    default:
      return v1::FINISH_REASON_UNSPECIFIED;
  }
}

void ToProto(const engine::RetrievalCounts& counts, v1::RetrievalUsage& out) {
  out.set_candidate_rows(counts.candidate_rows);
  out.set_selected_rows(counts.selected_rows);
  out.set_probes(counts.probes);
  out.set_tail_estimates(counts.tail_estimates);
  out.set_widened_tokens(counts.widened_tokens);
  out.set_floor_dense_tokens(counts.floor_dense_tokens);
  if (counts.candidate_rows > 0) {
    out.set_kept(static_cast<double>(counts.selected_rows) /
                 static_cast<double>(counts.candidate_rows));
  }
  if (counts.probes > 0) {
    out.set_coverage(counts.coverage / static_cast<double>(counts.probes));
    out.set_iou(counts.iou / static_cast<double>(counts.probes));
  }
  if (counts.tail_estimates > 0) {
    out.set_tail_mass(counts.tail_mass / static_cast<double>(counts.tail_estimates));
  }
}

void ToProto(const engine::KvReads& reads, v1::KvReadBytes& out) {
  out.set_fast(reads.fast);
  out.set_host(reads.host);
  out.set_disk(reads.disk);
}

void ToProto(const engine::DraftCounts& counts, v1::DraftUsage& out) {
  out.set_drafted_tokens(counts.drafted);
  out.set_verified_tokens(counts.verified);
  out.set_accepted_tokens(counts.accepted);
  out.set_verifications(counts.verifications);
  for (size_t i = 0; i < counts.verified_at.size() && counts.verified_at[i] > 0; ++i) {
    out.add_verified_at(counts.verified_at[i]);
    out.add_accepted_at(counts.accepted_at[i]);
  }
  ToProto(counts.draft_reads, *out.mutable_draft_read_bytes());
  ToProto(counts.verify_reads, *out.mutable_verify_read_bytes());
}

void ToProto(const engine::Usage& usage, v1::Usage& out) {
  out.set_prompt_tokens(usage.prompt_tokens);
  out.set_cached_tokens(usage.cached_tokens);
  out.set_generated_tokens(usage.generated_tokens);
  out.set_preemptions(usage.preemptions);
  out.mutable_kv_read_bytes()->set_fast(usage.kv_read_bytes_fast);
  out.mutable_kv_read_bytes()->set_host(usage.kv_read_bytes_host);
  out.mutable_kv_read_bytes()->set_disk(usage.kv_read_bytes_disk);
  out.set_kv_dense_bytes(usage.kv_dense_bytes);
  out.set_attended_rows(usage.attended_rows);
  out.set_dense_rows(usage.retrieval.rows_dense);
  ToProto(usage.retrieval, *out.mutable_retrieval());
  if (usage.drafts.drafted > 0) ToProto(usage.drafts, *out.mutable_drafts());
  out.set_queue_seconds(Seconds(usage.queue_time));
  out.set_time_to_first_token_seconds(Seconds(usage.time_to_first_token));
  out.set_total_seconds(Seconds(usage.total_time));
}

// What Report says of it.
void AddUsage(const engine::Usage& usage, engine::Usage& sum) {
  sum.prompt_tokens += usage.prompt_tokens;
  sum.cached_tokens += usage.cached_tokens;
  sum.generated_tokens += usage.generated_tokens;
  sum.preemptions += usage.preemptions;
  sum.kv_read_bytes_fast += usage.kv_read_bytes_fast;
  sum.kv_read_bytes_host += usage.kv_read_bytes_host;
  sum.kv_read_bytes_disk += usage.kv_read_bytes_disk;
  sum.kv_dense_bytes += usage.kv_dense_bytes;
  sum.queue_time = std::max(sum.queue_time, usage.queue_time);
  sum.time_to_first_token = std::max(sum.time_to_first_token, usage.time_to_first_token);
}

// `out`: a token of an answer or of a prompt.
void AddLogprobs(const engine::OutputToken& token, const engine::Tokenizer& tokenizer, auto& out) {
  out.set_logprob(token.logprob);
  for (const engine::TokenLogprob& likely : token.top) {
    v1::TokenLogprob& top = *out.add_top();
    top.set_id(likely.token);
    top.set_logprob(likely.logprob);
    top.set_text(tokenizer.Decode({&likely.token, 1}, /*skip_special_tokens=*/false));
  }
}

std::string RandomPrefix() {
  std::random_device random;
  return absl::StrFormat("%08x", random());
}

// REQUIRES: one is set.
Constraint ConstraintOf(const v1::StructuredOutput& output) {
  switch (output.kind_case()) {
    case v1::StructuredOutput::kJsonSchema:
      return Constraint::kJsonSchema;
    case v1::StructuredOutput::kJsonObject:
      return Constraint::kJsonObject;
    case v1::StructuredOutput::kRegex:
      return Constraint::kRegex;
    case v1::StructuredOutput::kChoice:
      return Constraint::kChoice;
    case v1::StructuredOutput::kGrammar:
      return Constraint::kGrammar;
    default:
      return Constraint::kStructuralTag;
  }
}

}  // namespace

Generation::Generation(Generator& owner, CallInfo info, std::function<void()> on_ready)
    : owner_(owner),
      info_(std::move(info)),
      limits_(owner.options_.tenants == nullptr ? TenantLimits()
                                                : owner.options_.tenants->Of(info_.tenant)),
      arrival_(owner.clock_.Now()),
      name_(Concat(owner.name_prefix_, "-", owner.next_name_.fetch_add(1))),
      on_ready_(std::move(on_ready)) {}

void Generation::Schedule() {
  if (scheduled_.exchange(true)) return;
  const bool posted = owner_.deliver_.Post([self = shared_from_this()] {
    // Before the call: an event that comes while on_ready takes the last one schedules anew.
    self->scheduled_.store(false);
    self->on_ready_();
  });
  // Each open generation is posted at most once, and their number is bounded.
  WINNOW_CHECK(posted);
}

void Generation::Tokenize(const v1::GenerateRequest& message, CheckedGenerate checked) {
  {
    absl::MutexLock lock(&mutex_);
    if (!failure_.ok()) return;  // cancelled while it waited for this thread
  }
  absl::Status status;
  if (info_.deadline.has_value() && *info_.deadline <= owner_.clock_.Now()) {
    status = ErrorWithReason(absl::StatusCode::kDeadlineExceeded, "DEADLINE",
                             "the call's deadline passed");
  } else {
    status = owner_.validator_.TokenizePrompt(message, checked);
  }
  if (status.ok() && checked.grammar.has_value()) {
    // std::function must be copyable, so the request travels behind a pointer.
    auto work = std::make_shared<CheckedGenerate>(std::move(checked));
    const Constraint kind = ConstraintOf(message.structured_output());
    if (owner_.compile_.Post([self = shared_from_this(), work, kind] {
          const engine::TimePoint begin = self->owner_.clock_.Now();
          auto grammar = self->owner_.grammars_->Compile(*work->grammar);
          self->owner_.metrics_.CountConstraint(kind, self->owner_.clock_.Now() - begin);
          absl::Status compiled = grammar.status();
          if (compiled.ok()) work->request.grammar = *std::move(grammar);
          if (absl::IsInvalidArgument(compiled)) {
            compiled = InvalidField("structured_output", ToStd(compiled.message()));
          }
          self->Submit(std::move(compiled), std::move(*work));
        })) {
      return;
    }
    status = owner_.Busy();
  }
  Submit(std::move(status), std::move(checked));
}

void Generation::Submit(absl::Status status, CheckedGenerate checked) {
  absl::MutexLock lock(&mutex_);
  if (!failure_.ok()) return;
  // Under the lock, so that Cancel sees either no choice or all of them. The engine never calls
  // back from inside Submit.
  if (status.ok()) status = SubmitChoices(std::move(checked));
  if (!status.ok()) Fail(std::move(status));
}

absl::Status Generation::CheckScores(const engine::Request& request) const {
  const int64_t logprobs = int64_t{prompt_tokens_} * (1 + int64_t{request.prompt_logprobs});
  if (info_.prompt_scores_max == 0 || logprobs <= info_.prompt_scores_max) return absl::OkStatus();
  return InvalidField("prompt_logprobs",
                      Concat("asks for ", logprobs, " log-probabilities of a prompt, at most ",
                             info_.prompt_scores_max, " of each are given in one answer"));
}

absl::Status Generation::SubmitChoices(CheckedGenerate checked) {
  n_ = checked.n;
  with_logprobs_ = checked.request.top_logprobs >= 0;
  policy_ = engine::ToString(checked.request.policy);
  exactness_ = engine::ToString(engine::ExactnessOf(checked.request.policy));
  prompt_tokens_ = static_cast<int32_t>(checked.request.prompt.size());
  if (limits_.running_tokens > 0) {
    const int64_t tokens =
        (prompt_tokens_ + int64_t{checked.request.stopping.max_tokens}) * checked.n;
    if (absl::Status status = owner_.ReserveTokens(*this, tokens, limits_.running_tokens);
        !status.ok()) {
      return status;
    }
  }
  if (checked.request.prompt_logprobs >= 0) {
    if (absl::Status status = CheckScores(checked.request); !status.ok()) return status;
    scored_first_ = checked.request.prompt.front();
  }
  const bool shares = owner_.SharesPrefixes(info_);
  const engine::Digest salt = shares ? owner_.SaltOf(info_.tenant)
                                     : engine::CallSalt(owner_.next_private_call_.fetch_add(1));
  std::vector<engine::Submission> group;
  std::vector<Choice> choices;
  for (int32_t i = 0; i < checked.n; ++i) {
    engine::Request request = i + 1 == checked.n ? std::move(checked.request) : checked.request;
    const uint64_t seed = request.sampling.seed;
    request.id = owner_.next_request_.fetch_add(1);
    request.tenant = info_.tenant;
    request.tenant_weight = limits_.weight;
    request.tenant_waiting_tokens = limits_.waiting_tokens;
    request.tenant_store_bytes = limits_.store_bytes;
    request.salt = salt;
    request.keeps_prefix = shares;
    request.message_format = info_.message_format;
    request.arrival = arrival_;
    request.deadline = info_.deadline;
    request.sampling.seed = SeedOfChoice(seed, i);
    if (i > 0) request.prompt_logprobs = -1;  // the prompt is the same
    Choice choice;
    choice.id = request.id;
    choice.events = std::make_shared<engine::OutputQueue>(
        owner_.options_.queue_events, [self = shared_from_this()] { self->Schedule(); },
        [&engine = owner_.engine_] { engine.Wake(); });
    group.push_back({.request = std::move(request), .output = choice.events});
    choices.push_back(std::move(choice));
  }
  if (absl::Status status = owner_.engine_.Submit(std::move(group)); !status.ok()) {
    return owner_.FromEngine(status);
  }
  choices_ = std::move(choices);
  open_choices_ = choices_.size();
  submitted_ = true;
  return absl::OkStatus();
}

void Generation::Refuse(absl::Status status) {
  absl::MutexLock lock(&mutex_);
  failure_ = std::move(status);
  owner_.ReleaseQuota(*this);
}

void Generation::Fail(absl::Status status) {
  if (!failure_.ok()) return;
  failure_ = std::move(status);
  // Quota is free before the engine counts the request as ended, so that a client that sees it ended can ask again.
  owner_.ReleaseQuota(*this);
  for (const Choice& choice : choices_) {
    if (!choice.ended) owner_.engine_.Cancel(choice.id);
  }
  Schedule();
}

void Generation::Cancel() {
  absl::MutexLock lock(&mutex_);
  if (reported_) return;
  // A call whose deadline passes is cancelled before the engine gets to say so: by gRPC here, or by
  // the client, whose timer began before its request was on the wire.
  if (info_.deadline.has_value() && *info_.deadline <= owner_.clock_.Now() + kDeadlineSlack) {
    Fail(ErrorWithReason(absl::StatusCode::kDeadlineExceeded, "DEADLINE",
                         "the call's deadline passed"));
  } else {
    Fail(ErrorWithReason(absl::StatusCode::kCancelled, "CANCELLED", "cancelled by the client"));
  }
}

void Generation::GiveUpOnReader() {
  absl::MutexLock lock(&mutex_);
  if (reported_) return;
  Fail(ErrorWithReason(absl::StatusCode::kCancelled, "SLOW_READER", "the stream was not read"));
}

Generation::Item Generation::Take() {
  absl::MutexLock lock(&mutex_);
  if (reported_) return Nothing{};
  // In turns, so that no choice starves the others of a slow reader.
  for (size_t i = 0; failure_.ok() && i < choices_.size(); ++i) {
    const size_t index = (next_choice_ + i) % choices_.size();
    std::optional<v1::GenerateResponse> response = TakeFrom(static_cast<int32_t>(index));
    if (!failure_.ok() || !response.has_value()) continue;
    next_choice_ = index + 1;
    return *std::move(response);
  }
  if (!failure_.ok()) {
    Report(failure_);
    return End{failure_};
  }
  if (submitted_ && open_choices_ == 0) {
    Report(absl::OkStatus());
    return End{absl::OkStatus()};
  }
  return Nothing{};
}

std::optional<v1::GenerateResponse> Generation::TakeFrom(int32_t index) {
  Choice& choice = choices_[index];
  if (choice.ended) return std::nullopt;
  std::optional<v1::GenerateResponse> response;
  while (choice.event.has_value() || (choice.event = choice.events->Pop()).has_value()) {
    if (!response.has_value()) {
      response.emplace();
      response->set_choice(index);
    }
    if (!AddScores(choice, *response)) break;
    const std::optional<engine::OutputEvent> event = std::exchange(choice.event, std::nullopt);
    if (event->finish != engine::FinishReason::kNone) {
      choice.ended = true;
      // Quota is free before the client has the answer, so that its next request is not refused for this one.
      if (--open_choices_ == 0) owner_.ReleaseQuota(*this);
      AddUsage(event->usage, usage_);
      const v1::FinishReason reason = ToProto(event->finish);
      Append(finish_, finish_.empty() ? "" : ",", v1::FinishReason_Name(reason).substr(14));
      if (reason == v1::FINISH_REASON_UNSPECIFIED) {
        Fail(StatusOfEnd(*event, owner_.engine_.stats().failed));
        return std::nullopt;
      }
    }
    AddEvent(*event, *response);
    if (choice.ended) break;
  }
  return response;
}

// Scores of the choice's event, as many as a message may have; false if some are left.
bool Generation::AddScores(Choice& choice, v1::GenerateResponse& response) {
  const std::vector<engine::ScoredToken>& scores = choice.event->scores;
  if (scored_first_.has_value() && response.choice() == 0) {
    response.add_prompt_tokens()->set_id(*std::exchange(scored_first_, std::nullopt));
  }
  int64_t logprobs = 0;
  for (const v1::PromptToken& token : response.prompt_tokens()) logprobs += 1 + token.top_size();
  for (; choice.told_scores < scores.size(); ++choice.told_scores) {
    if (logprobs >= kMessageLogprobs) return false;
    const engine::ScoredToken& score = scores[choice.told_scores];
    v1::PromptToken& out = *response.add_prompt_tokens();
    out.set_id(score.token.token);
    out.set_rank(score.rank);
    AddLogprobs(score.token, owner_.tokenizer_, out);
    logprobs += 1 + out.top_size();
  }
  choice.told_scores = 0;
  return true;
}

void Generation::AddEvent(const engine::OutputEvent& event, v1::GenerateResponse& response) {
  response.mutable_text()->append(event.text);
  for (const engine::OutputToken& token : event.tokens) {
    v1::Token& out = *response.add_tokens();
    out.set_id(token.token);
    if (with_logprobs_) AddLogprobs(token, owner_.tokenizer_, out);
  }
  if (event.finish == engine::FinishReason::kNone) return;
  v1::Finish& finish = *response.mutable_finish();
  finish.set_reason(ToProto(event.finish));
  finish.set_stop_string(event.stop_match);
  if (event.finish == engine::FinishReason::kStopToken && !event.tokens.empty()) {
    finish.set_stop_token_id(event.tokens.back().token);
  }
  v1::Usage& usage = *finish.mutable_usage();
  ToProto(event.usage, usage);
  usage.set_policy(policy_);
  usage.set_exactness(exactness_);
}

void Generation::Report(const absl::Status& status) {
  reported_ = true;
  owner_.metrics_.CountRequest(status);
  std::optional<uint64_t> not_logged = 0;
  if (!status.ok() && usage_.generated_tokens == 0) not_logged = owner_.refusal_lines_.Take();
  if (!not_logged.has_value()) return;
  const LogLevel level =
      status.code() == absl::StatusCode::kInternal ? LogLevel::kError : LogLevel::kInfo;
  const TraceContext trace = ParseTraceParent(info_.traceparent);
  // Not the status's message: it may quote what the client sent.
  owner_.log_.Event(level, "request",
                    {{"id", name_},
                     {"client_id", info_.client_request_id},
                     {"trace_id", trace.trace_id},
                     {"parent_span_id", trace.parent_id},
                     {"transport", info_.transport},
                     {"tenant", info_.tenant},
                     {"status", StatusCodeName(status.code())},
                     {"reason", ReasonOf(status)},
                     {"n", int64_t{n_}},
                     {"finish", finish_},
                     {"prompt_tokens", int64_t{usage_.prompt_tokens}},
                     {"cached_tokens", int64_t{usage_.cached_tokens}},
                     {"generated_tokens", int64_t{usage_.generated_tokens}},
                     {"preemptions", int64_t{usage_.preemptions}},
                     {"policy", policy_},
                     {"kv_read_bytes", usage_.kv_read_bytes_fast},
                     {"kv_read_host_bytes", usage_.kv_read_bytes_host},
                     {"kv_read_disk_bytes", usage_.kv_read_bytes_disk},
                     {"kv_dense_bytes", usage_.kv_dense_bytes},
                     {"queue_seconds", Seconds(usage_.queue_time)},
                     {"first_token_seconds", Seconds(usage_.time_to_first_token)},
                     {"total_seconds", Seconds(owner_.clock_.Now() - arrival_)},
                     {"not_logged", *not_logged}});
}

void Generation::Close() {
  {
    absl::MutexLock lock(&mutex_);
    if (!reported_) {
      // The transport gave up without taking the end: nobody reads any more.
      if (failure_.ok()) {
        Fail(ErrorWithReason(absl::StatusCode::kCancelled, "CANCELLED", "the client went away"));
      }
      Report(failure_);
    }
  }
  const engine::MutexLock lock(owner_.mutex_);
  if (counted_) {
    const auto own = owner_.tenants_.find(info_.tenant);
    if (--own->second.calls == 0) owner_.tenants_.erase(own);
    --owner_.counted_calls_;
  }
  if (--owner_.calls_ == 0) owner_.idle_.NotifyAll();
}

Generator::Generator(const Options& options, engine::Engine& engine, const Validator& validator,
                     const engine::Tokenizer& tokenizer, Metrics& metrics, Log& log,
                     const engine::Clock& clock, engine::GrammarCompiler* grammars)
    : options_(options),
      engine_(engine),
      validator_(validator),
      tokenizer_(tokenizer),
      metrics_(metrics),
      log_(log),
      clock_(clock),
      grammars_(grammars),
      name_prefix_(RandomPrefix()),
      refusal_lines_(kRefusalLines, kRefusalLinesPerSecond, clock),
      // A closed generation may be posted once more while the engine ends its choices, so twice the
      // calls would do; what is refused at the door is posted too.
      deliver_(1, size_t{1} << 24),
      compile_(1, options.max_compiling),
      tokenize_(options.tokenize_threads, 2 * options.max_tokenizing) {
  WINNOW_CHECK(grammars != nullptr || !validator.limits().structured_output);
}

Generator::~Generator() = default;

std::shared_ptr<Generation> Generator::Start(v1::GenerateRequest message, CallInfo info,
                                             std::function<void()> on_ready) {
  std::shared_ptr<Generation> generation(
      new Generation(*this, std::move(info), std::move(on_ready)));
  const int64_t quota = generation->limits_.requests;
  int64_t open = 0;  // of the tenant's
  bool too_many = false;
  {
    const engine::MutexLock lock(mutex_);
    ++calls_;
    // As the engine's queue does: half as much again for tenants that have little. Calls that are refused
    // here do not count, or a tenant that floods would refuse itself.
    TenantLoad& own = tenants_[generation->info_.tenant];
    open = own.requests;
    const size_t share = options_.max_calls / (2 * tenants_.size());
    too_many = counted_calls_ >= options_.max_calls &&
               ((own.calls > 0 && own.calls >= share) ||
                counted_calls_ >= options_.max_calls + options_.max_calls / 2);
    too_many |= quota > 0 && open >= quota;
    generation->counted_ = generation->in_quota_ = !too_many;
    if (!too_many) {
      ++own.calls;
      ++own.requests;
      ++counted_calls_;
    } else if (own.calls == 0) {
      tenants_.erase(generation->info_.tenant);
    }
  }
  absl::Status status = generation->info_.refused;
  // Before the message is looked at: there is no room for it, whatever is in it.
  if (status.ok() && quota > 0 && open >= quota) status = OverQuota("requests", open, 1, quota);
  if (status.ok() && too_many) status = Busy();
  if (status.ok()) status = CheckRoom(generation->info_.tenant);
  if (status.ok()) {
    absl::StatusOr<CheckedGenerate> checked =
        validator_.CheckGenerate(message, generation->info_.max_tokens_yields);
    status = checked.status();
    if (status.ok() && checked->n > 1) {
      status = FromEngine(engine_.CheckRoom(generation->info_.tenant, checked->n));
    }
    if (status.ok()) {
      if (checked->seed_unset) {
        std::random_device random;
        checked->request.sampling.seed = (uint64_t{random()} << 32) | random();
      }
      const size_t bytes = message.ByteSizeLong();
      // std::function must be copyable, so the message travels behind a pointer.
      auto work = std::make_shared<std::pair<v1::GenerateRequest, CheckedGenerate>>(
          std::move(message), *std::move(checked));
      if (!PostTokenizing(
              bytes,
              [generation, work] { generation->Tokenize(work->first, std::move(work->second)); },
              generation->info_.tenant)) {
        status = Busy();
      }
    }
  }
  if (!status.ok()) generation->Refuse(std::move(status));
  return generation;
}

engine::Digest Generator::SaltOf(const std::string& tenant) const {
  if (options_.tenants != nullptr) {
    const TenantLimits limits = options_.tenants->Of(tenant);
    if (!limits.trust_domain.empty()) return engine::DomainSalt(limits.trust_domain);
  }
  return engine::TenantSalt(tenant);
}

bool Generator::SharesPrefixes(const CallInfo& info) const {
  if (!info.tenant.empty()) return true;
  switch (options_.anonymous_prefixes) {
    case AnonymousPrefixes::kShared:
      return true;
    case AnonymousPrefixes::kSharedDirectly:
      return !info.by_proxy;
    case AnonymousPrefixes::kNone:
      return false;
  }
  return false;
}

absl::Status Generator::CheckRoom(const std::string& tenant) const {
  return FromEngine(engine_.CheckRoom(tenant, 1));
}

absl::Status Generator::OverQuota(std::string_view quota, int64_t have, int64_t more,
                                  int64_t most) const {
  return WithRetryAfter(ErrorWithReason(absl::StatusCode::kResourceExhausted, "QUOTA_EXCEEDED",
                                        Concat("the tenant's quota of ", quota, ": it has ", have,
                                               ", ", more, " more would exceed ", most)),
                        absl::FromChrono(engine_.RetryAfter()));
}

absl::Status Generator::ReserveTokens(Generation& generation, int64_t tokens, int64_t most) {
  const engine::MutexLock lock(mutex_);
  int64_t& own = tenants_.find(generation.info_.tenant)->second.running_tokens;
  if (own + tokens > most) return OverQuota("running_tokens", own, tokens, most);
  own += tokens;
  generation.reserved_tokens_ = tokens;
  return absl::OkStatus();
}

void Generator::ReleaseQuota(Generation& generation) {
  const engine::MutexLock lock(mutex_);
  if (!std::exchange(generation.in_quota_, false)) return;
  TenantLoad& own = tenants_.find(generation.info_.tenant)->second;
  --own.requests;
  own.running_tokens -= generation.reserved_tokens_;
}

void Generator::CountUnstarted(std::string_view transport, const absl::Status& status) {
  metrics_.CountRequest(status);
  const std::optional<uint64_t> not_logged = refusal_lines_.Take();
  if (!not_logged.has_value()) return;
  log_.Event(LogLevel::kInfo, "request",
             {{"transport", transport},
              {"status", StatusCodeName(status.code())},
              {"reason", ReasonOf(status)},
              {"not_logged", *not_logged}});
}

absl::Status Generator::FromEngine(const absl::Status& status) const {
  if (status.ok()) return status;
  if (absl::IsResourceExhausted(status)) {
    const bool quota = ToStd(status.message()).starts_with("the tenant's quota");
    return WithRetryAfter(ErrorWithReason(status.code(), quota ? "QUOTA_EXCEEDED" : "QUEUE_FULL",
                                          ToStd(status.message())),
                          absl::FromChrono(engine_.RetryAfter()));
  }
  if (absl::IsUnavailable(status)) {
    return ErrorWithReason(status.code(), engine_.stats().failed ? "ENGINE_FAILED" : "DRAINING",
                           ToStd(status.message()));
  }
  if (absl::IsInvalidArgument(status)) return InvalidField("prompt", ToStd(status.message()));
  return status;
}

absl::Status Generator::Busy() const {
  return WithRetryAfter(ErrorWithReason(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                                        "too many calls are waiting"),
                        absl::FromChrono(engine_.RetryAfter()));
}

size_t Generator::calls() const {
  const engine::MutexLock lock(mutex_);
  return calls_;
}

bool Generator::WaitIdle(absl::Duration timeout) {
  const auto until = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(timeout);
  const engine::MutexLock lock(mutex_);
  while (calls_ > 0 && idle_.WaitUntil(mutex_, until)) {
  }
  return calls_ == 0;
}

bool Generator::PostTokenizing(size_t bytes, std::function<void()> task,
                               const std::string& tenant) {
  {
    const engine::MutexLock lock(mutex_);
    const auto own = tenant_tokenizing_.find(tenant);
    const bool is_new = own == tenant_tokenizing_.end();
    const size_t share = options_.max_tokenizing / (2 * (tenant_tokenizing_.size() + is_new));
    const size_t threads = static_cast<size_t>(options_.tokenize_threads);  // they work, none waits
    if (tokenizing_ >= options_.max_tokenizing + threads &&
        ((!is_new && own->second >= share) ||
         tokenizing_ >= options_.max_tokenizing + options_.max_tokenizing / 2 + threads)) {
      return false;
    }
    if (tokenizing_bytes_ > 0 && tokenizing_bytes_ + bytes > options_.max_tokenizing_bytes) {
      return false;
    }
    tokenizing_bytes_ += bytes;
    ++tokenizing_;
    ++tenant_tokenizing_[tenant];
  }
  const auto done = [this, bytes, tenant] {
    const engine::MutexLock lock(mutex_);
    tokenizing_bytes_ -= bytes;
    --tokenizing_;
    const auto own = tenant_tokenizing_.find(tenant);
    if (--own->second == 0) tenant_tokenizing_.erase(own);
  };
  if (tokenize_.Post([task = std::move(task), done] {
        task();
        done();
      })) {
    return true;
  }
  done();
  return false;
}

}  // namespace winnow::server
