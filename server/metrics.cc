#include "server/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <array>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/metrics_families.h"
#include "server/status.h"
#include "server/strings.h"

namespace winnow::server {
namespace {

using prometheus::Histogram;
using prometheus::MetricFamily;
using prometheus::MetricType;

// Small models decode in fractions of a millisecond, so the buckets begin there; above, they keep
// OpenTelemetry's bounds so that its dashboards' quantiles agree.
const Histogram::BucketBoundaries kInterTokenBuckets = {
    .0001, .00025, .0005, .001, .002, .003, .004, .006, .008, .01, .015, .025,
    .05,   .075,   .1,    .15,  .2,   .3,   .4,   .5,   .75,  1,   2.5,  5};
const Histogram::BucketBoundaries kFirstTokenBuckets = {.001, .002, .005, .01, .02, .04, .06,
                                                        .08,  .1,   .25,  .5,  .75, 1,   2.5,
                                                        5,    7.5,  10,   20,  40,  80,  160};
const Histogram::BucketBoundaries kRequestBuckets = {.005,  .01,   .02,   .04,    .08,   .16,
                                                     .32,   .64,   1.28,  2.56,   5.12,  10.24,
                                                     20.48, 40.96, 81.92, 163.84, 327.68};
const Histogram::BucketBoundaries kQueueBuckets = {
    .0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60};
// Over all layers and heads: from one short sequence of a small model to many long ones of a large.
const Histogram::BucketBoundaries kStepRowBuckets = {1e3, 4e3, 1.6e4, 6.4e4, 2.5e5,
                                                     1e6, 4e6, 1.6e7, 6.4e7, 2.5e8};
const Histogram::BucketBoundaries kShareBuckets = {.005, .01, .02, .03, .05, .075, .1,
                                                   .15,  .2,  .3,  .5,  .75, 1};
const Histogram::BucketBoundaries kStepTokenBuckets = {1,   2,   4,   8,    16,   32,  64,
                                                       128, 256, 512, 1024, 2048, 4096};

// The outcomes of requests: what an operator treats alike.
constexpr std::array<const char*, 8> kOutcomes = {
    "ok", "invalid", "rejected", "cancelled", "deadline", "unavailable", "slow_reader", "error"};

// By Constraint.
constexpr std::array<const char*, kNumConstraints> kConstraintNames = {
    "json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"};

size_t OutcomeOf(const absl::Status& status) {
  if (ReasonOf(status) == "SLOW_READER") return 6;
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return 0;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kUnimplemented:
      return 1;
    case absl::StatusCode::kResourceExhausted:
      return 2;
    case absl::StatusCode::kCancelled:
      return 3;
    case absl::StatusCode::kDeadlineExceeded:
      return 4;
    case absl::StatusCode::kUnavailable:
      return 5;
    default:
      return 7;
  }
}

// A scrape that is sent half keeps a thread until its time is over, so there are more threads than
// anything that scrapes has connections; idle ones cost an address range.
constexpr char kScrapeThreads[] = "48";
constexpr char kScrapeTimeoutMs[] = "1000";

}  // namespace

class Metrics::Impl final : public prometheus::Collectable {
 public:
  Impl(const MetricsInfo& info, const engine::Clock& clock) : info_(info), clock_(clock) {
    auto& index_bytes =
        prometheus::BuildGauge()
            .Name("winnow_index_bytes")
            .Help("Bytes of an index beside the KV pool; --index says which are kept.")
            .Register(registry_);
    for (const auto& [index, bytes] : info.index_bytes) {
      index_bytes.Add({{"index", index}}).Set(static_cast<double>(bytes));
    }
    prometheus::BuildGauge()
        .Name("winnow_retrieval_from_tokens")
        .Help(
            "Shortest context that retrieves, for policies that do not say: measured at the "
            "first start, or --retrieval-from.")
        .Register(registry_)
        .Add({})
        .Set(static_cast<double>(info.retrieval_from));
    prometheus::BuildGauge()
        .Name("winnow_build_info")
        .Help("What runs; the value is 1. Join it to other series to tell versions apart.")
        .Register(registry_)
        .Add({{"version", info.version},
              {"model", info.model},
              {"dtype", info.dtype},
              {"kv_dtype", info.kv_dtype},
              {"backend", info.backend}})
        .Set(1);
    auto& requests =
        prometheus::BuildCounter()
            .Name("winnow_requests_total")
            .Help(
                "Requests to generate that ended, by outcome. error and unavailable are the "
                "server's fault, rejected is load, the others are the clients'.")
            .Register(registry_);
    for (size_t i = 0; i < kOutcomes.size(); ++i) {
      requests_[i] = &requests.Add({{"outcome", kOutcomes[i]}});
    }
    auto& constraints =
        prometheus::BuildCounter()
            .Name("winnow_structured_requests_total")
            .Help(
                "Valid requests whose answer must keep a form, by how they say it; structural_tag "
                "has calls of functions, too. Those that could not be compiled are also "
                "winnow_requests_total{outcome=\"invalid\"}.")
            .Register(registry_);
    for (size_t i = 0; i < kConstraintNames.size(); ++i) {
      constraints_[i] = &constraints.Add({{"kind", kConstraintNames[i]}});
    }
    compile_ = Add("winnow_structured_compile_seconds",
                   "Time to compile the form of an answer, before the request queues; near zero "
                   "where it was kept from an earlier one. Long: clients send large or ever new "
                   "schemas.",
                   kQueueBuckets);
    serving_ = &prometheus::BuildGauge()
                    .Name("winnow_serving")
                    .Help("1 while the health service says SERVING; 0 for long: the log says why.")
                    .Register(registry_)
                    .Add({});
    first_token_ =
        Add("winnow_time_to_first_token_seconds",
            "From arrival to the first token. Long beside a short winnow_queue_seconds: prompts "
            "are long and not cached.",
            kFirstTokenBuckets);
    inter_token_ = Add(
        "winnow_inter_token_seconds",
        "Between tokens of a sequence: how fluent an answer is. Long tails: long prompts beside "
        "it (--step-tokens), or waits for a disk.",
        kInterTokenBuckets);
    request_ = Add("winnow_request_duration_seconds",
                   "From arrival to the end of sequences that were finished.", kRequestBuckets);
    queue_ =
        Add("winnow_queue_seconds",
            "From arrival until the engine first worked on it. Long: add replicas.", kQueueBuckets);
    step_ = Add("winnow_step_seconds",
                "Duration of an engine step: bounds the time between tokens from below.",
                kInterTokenBuckets);
    step_tokens_ = Add("winnow_step_tokens",
                       "Tokens that one step computed. Near 1 under load: batches do not form.",
                       kStepTokenBuckets);
    step_rows_ = Add("winnow_step_attended_rows",
                     "KV rows attended in one engine step that decoded.", kStepRowBuckets);
    kept_ = Add("winnow_retrieval_kept_ratio",
                "Share of the rows to choose from that a policy chose; mean of a sequence.",
                kShareBuckets);
    const prometheus::Labels vllm = {{"model_name", info.model}};
    vllm_first_token_ = Add("vllm:time_to_first_token_seconds",
                            "As winnow_time_to_first_token_seconds.", kFirstTokenBuckets, vllm);
    vllm_inter_token_ = Add("vllm:inter_token_latency_seconds", "As winnow_inter_token_seconds.",
                            kInterTokenBuckets, vllm);
    vllm_queue_ =
        Add("vllm:request_queue_time_seconds", "As winnow_queue_seconds.", kQueueBuckets, vllm);
    vllm_request_ = Add("vllm:e2e_request_latency_seconds", "As winnow_request_duration_seconds.",
                        kRequestBuckets, vllm);
    const prometheus::Labels gen_ai = {{"gen_ai_operation_name", "text_completion"},
                                       {"gen_ai_provider_name", "winnow"},
                                       {"gen_ai_request_model", info.model}};
    gen_ai_first_token_ = Add("gen_ai_server_time_to_first_token_seconds",
                              "From arrival to the first token.", kFirstTokenBuckets, gen_ai);
    gen_ai_per_token_ =
        Add("gen_ai_server_time_per_output_token_seconds",
            "Time of each token after the first, mean of a sequence.", kInterTokenBuckets, gen_ai);
    gen_ai_request_ =
        Add("gen_ai_server_request_duration_seconds",
            "From arrival to the end of sequences that were finished.", kRequestBuckets, gen_ai);
  }

  std::vector<MetricFamily> Collect() const override {
    std::vector<MetricFamily> out = CollectState();
    Append(out, CollectSlow());
    return out;
  }

  // Families that are cheap to ask.
  std::vector<MetricFamily> CollectState() const {
    engine::EngineStats stats;
    HttpCounts http;
    GuardStats guard;
    uint64_t missed_kv_events = 0;
    {
      absl::MutexLock lock(&mutex_);
      if (engine_ != nullptr) stats = engine_->stats();
      if (http_) http = http_();
      if (guard_) guard = guard_();
      if (missed_kv_events_) missed_kv_events = missed_kv_events_();
    }
    std::vector<MetricFamily> out = EngineFamilies(stats, clock_, info_.kv_block_bytes);
    Append(out, ReadFamilies(stats, info_.kv_row_bytes));
    Append(out, StoreFamilies(stats));
    Append(out, VllmFamilies(stats, info_));
    Append(out, HttpFamilies(http));
    Append(out, GuardFamilies(guard));
    out.push_back(Single(MetricType::Counter, "winnow_log_dropped_lines_total",
                         "Lines of the log that nobody read in time. Rising: whatever reads "
                         "standard error is too slow.",
                         dropped_lines_ ? static_cast<double>(dropped_lines_()) : 0));
    out.push_back(Single(MetricType::Counter, "winnow_kv_event_batches_missed_total",
                         "KV event batches that were not published on ZMQ, because they were made "
                         "faster than sent: readers see a gap, and ask again.",
                         static_cast<double>(missed_kv_events)));
    return out;
  }

  // Families that ask the system.
  std::vector<MetricFamily> CollectSlow() const {
    std::vector<MetricFamily> out = ProcessFamilies();
    out.push_back(Single(
        MetricType::Gauge, "winnow_tls_certificate_expiry_timestamp_seconds",
        "When the first certificate of --tls-cert expires, in Unix seconds; 0 without TLS, and "
        "while the file cannot be read. Renew it before: the file is read again every minute.",
        certificate_expiry_ ? static_cast<double>(certificate_expiry_()) : 0));
    return out;
  }

  static void Append(std::vector<MetricFamily>& out, std::vector<MetricFamily> more) {
    for (MetricFamily& family : more) out.push_back(std::move(family));
  }

  Histogram* Add(const char* name, const char* help, const Histogram::BucketBoundaries& buckets,
                 const prometheus::Labels& labels = {}) {
    return &prometheus::BuildHistogram().Name(name).Help(help).Register(registry_).Add(labels,
                                                                                       buckets);
  }

  // The registry's series and the process's as text, made again when they are older than
  // `kPageSeconds`: with thousands of connections, counting descriptors takes milliseconds.
  std::string SlowText() {
    absl::MutexLock lock(&mutex_);
    const engine::TimePoint now = clock_.Now();
    if (slow_text_.empty() || Seconds(now - slow_text_of_) >= Metrics::kPageSeconds) {
      slow_text_ = prometheus::TextSerializer().Serialize(registry_.Collect()) +
                   prometheus::TextSerializer().Serialize(CollectSlow());
      slow_text_of_ = now;
    }
    return slow_text_;
  }

  const MetricsInfo info_;
  const engine::Clock& clock_;
  prometheus::Registry registry_;
  std::array<prometheus::Counter*, kOutcomes.size()> requests_ = {};
  std::array<prometheus::Counter*, kNumConstraints> constraints_ = {};
  prometheus::Gauge* serving_ = nullptr;
  Histogram *first_token_ = nullptr, *inter_token_ = nullptr, *request_ = nullptr,
            *queue_ = nullptr, *step_ = nullptr, *step_tokens_ = nullptr, *step_rows_ = nullptr,
            *kept_ = nullptr, *compile_ = nullptr;
  Histogram *gen_ai_first_token_ = nullptr, *gen_ai_per_token_ = nullptr,
            *gen_ai_request_ = nullptr;
  Histogram *vllm_first_token_ = nullptr, *vllm_inter_token_ = nullptr, *vllm_request_ = nullptr,
            *vllm_queue_ = nullptr;

  std::function<uint64_t()> dropped_lines_;
  std::function<int64_t()> certificate_expiry_;

  mutable absl::Mutex mutex_;
  const engine::Engine* engine_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::function<HttpCounts()> http_ ABSL_GUARDED_BY(mutex_);
  std::function<GuardStats()> guard_ ABSL_GUARDED_BY(mutex_);
  std::function<uint64_t()> missed_kv_events_ ABSL_GUARDED_BY(mutex_);
  std::string slow_text_ ABSL_GUARDED_BY(mutex_);
  engine::TimePoint slow_text_of_ ABSL_GUARDED_BY(mutex_);

  // Last: destroyed first, so that no scrape sees the rest half gone. The exposer holds weak
  // pointers; these point into the Impl without owning it, and live as long as the token.
  std::shared_ptr<char> token_ = std::make_shared<char>();
  std::shared_ptr<prometheus::Collectable> registry_view_{token_, &registry_};
  std::shared_ptr<prometheus::Collectable> engine_view_{token_, this};
  std::unique_ptr<prometheus::Exposer> exposer_;
};

Metrics::Metrics(const MetricsInfo& info, const engine::Clock& clock)
    : impl_(std::make_unique<Impl>(info, clock)) {}
Metrics::~Metrics() = default;

void Metrics::Attach(const engine::Engine& engine) {
  absl::MutexLock lock(&impl_->mutex_);
  impl_->engine_ = &engine;
}

void Metrics::Detach() {
  absl::MutexLock lock(&impl_->mutex_);
  impl_->engine_ = nullptr;
}

void Metrics::SetHttp(std::function<HttpCounts()> counts) {
  absl::MutexLock lock(&impl_->mutex_);
  impl_->http_ = std::move(counts);
}

void Metrics::SetGuard(std::function<GuardStats()> stats) {
  absl::MutexLock lock(&impl_->mutex_);
  impl_->guard_ = std::move(stats);
}

void Metrics::SetMissedKvEvents(std::function<uint64_t()> missed) {
  absl::MutexLock lock(&impl_->mutex_);
  impl_->missed_kv_events_ = std::move(missed);
}

void Metrics::CountRequest(const absl::Status& status) {
  impl_->requests_[OutcomeOf(status)]->Increment();
}

void Metrics::CountConstraint(Constraint kind, engine::Duration compiled_in) {
  impl_->constraints_[static_cast<size_t>(kind)]->Increment();
  impl_->compile_->Observe(Seconds(compiled_in));
}

void Metrics::SetDroppedLines(std::function<uint64_t()> dropped_lines) {
  impl_->dropped_lines_ = std::move(dropped_lines);
}

void Metrics::SetCertificateExpiry(std::function<int64_t()> unix_seconds) {
  impl_->certificate_expiry_ = std::move(unix_seconds);
}

void Metrics::SetServing(bool serving) { impl_->serving_->Set(serving ? 1 : 0); }

void Metrics::OnFirstToken(const engine::Request&, engine::Duration since_arrival) {
  impl_->first_token_->Observe(Seconds(since_arrival));
  impl_->gen_ai_first_token_->Observe(Seconds(since_arrival));
  impl_->vllm_first_token_->Observe(Seconds(since_arrival));
}

void Metrics::OnNextToken(const engine::Request&, engine::Duration since_previous_token) {
  impl_->inter_token_->Observe(Seconds(since_previous_token));
  impl_->vllm_inter_token_->Observe(Seconds(since_previous_token));
}

void Metrics::OnFinished(const engine::Request&, engine::FinishReason reason,
                         const engine::Usage& usage) {
  impl_->queue_->Observe(Seconds(usage.queue_time));
  impl_->vllm_queue_->Observe(Seconds(usage.queue_time));
  const engine::RetrievalCounts& retrieval = usage.retrieval;
  if (retrieval.candidate_rows > 0) {
    impl_->kept_->Observe(static_cast<double>(retrieval.selected_rows) /
                          static_cast<double>(retrieval.candidate_rows));
  }
  const bool complete = reason == engine::FinishReason::kStopToken ||
                        reason == engine::FinishReason::kStopString ||
                        reason == engine::FinishReason::kMaxTokens;
  // A request that was cut off has no duration worth comparing.
  if (!complete) return;
  const double total = Seconds(usage.total_time);
  impl_->request_->Observe(total);
  impl_->gen_ai_request_->Observe(total);
  impl_->vllm_request_->Observe(total);
  if (usage.generated_tokens > 1) {
    impl_->gen_ai_per_token_->Observe((total - Seconds(usage.time_to_first_token)) /
                                      (usage.generated_tokens - 1));
  }
}

void Metrics::OnStep(const engine::StepObservation& step) {
  impl_->step_->Observe(Seconds(step.duration));
  impl_->step_tokens_->Observe(step.tokens);
  // A step of prompts alone selects nothing.
  if (step.attended_rows > 0) {
    impl_->step_rows_->Observe(static_cast<double>(step.attended_rows));
  }
}

absl::StatusOr<int> Metrics::Listen(const std::string& address) {
  try {
    impl_->exposer_ = std::make_unique<prometheus::Exposer>(std::vector<std::string>{
        "listening_ports", address, "num_threads", kScrapeThreads, "request_timeout_ms",
        kScrapeTimeoutMs, "keep_alive_timeout_ms", kScrapeTimeoutMs});
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        Concat("metrics: cannot listen on ", address, ": ", error.what()));
  }
  impl_->exposer_->RegisterCollectable(impl_->registry_view_);
  impl_->exposer_->RegisterCollectable(impl_->engine_view_);
  return impl_->exposer_->GetListeningPorts().front();
}

std::string Metrics::Text() const {
  std::vector<MetricFamily> families = impl_->registry_.Collect();
  for (MetricFamily& family : impl_->Collect()) families.push_back(std::move(family));
  return prometheus::TextSerializer().Serialize(families);
}

std::string Metrics::Page() const {
  return impl_->SlowText() + prometheus::TextSerializer().Serialize(impl_->CollectState());
}

}  // namespace winnow::server
