#include "server/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <sstream>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/status.h"
#include "server/strings.h"

namespace winnow::server {
namespace {

using prometheus::ClientMetric;
using prometheus::Histogram;
using prometheus::MetricFamily;
using prometheus::MetricType;

double Seconds(engine::Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

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

constexpr std::array<const char*, engine::kNumFinishReasons> kFinishNames = {
    "none", "stop_token", "stop_string", "max_tokens", "cancelled", "deadline", "error"};

// The outcomes of requests: what an operator treats alike.
constexpr std::array<const char*, 8> kOutcomes = {
    "ok", "invalid", "rejected", "cancelled", "deadline", "unavailable", "slow_reader", "error"};

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

ClientMetric Value(MetricType type, double value, std::vector<ClientMetric::Label> labels = {}) {
  ClientMetric metric;
  metric.label = std::move(labels);
  if (type == MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  return metric;
}

MetricFamily Single(MetricType type, std::string name, std::string help, double value) {
  MetricFamily family;
  family.name = std::move(name);
  family.help = std::move(help);
  family.type = type;
  family.metric.push_back(Value(type, value));
  return family;
}

// A sum and how many there were, without quantiles.
MetricFamily Mean(std::string name, std::string help, double sum, uint64_t count) {
  MetricFamily family;
  family.name = std::move(name);
  family.help = std::move(help);
  family.type = MetricType::Summary;
  family.metric.emplace_back();
  family.metric.back().summary.sample_sum = sum;
  family.metric.back().summary.sample_count = count;
  return family;
}

double ResidentBytes() {
  long total = 0, resident = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "re");
  if (file == nullptr) return 0;
  if (std::fscanf(file, "%ld %ld", &total, &resident) != 2) resident = 0;
  std::fclose(file);
  return static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

double OpenFds() {
  std::error_code error;
  std::filesystem::directory_iterator entries("/proc/self/fd", error);
  if (error) return 0;
  return static_cast<double>(std::distance(begin(entries), end(entries)) - 1);  // less this one
}

// Maps one snapshot of the engine's stats to families, so that all of a scrape's numbers belong
// to one moment.
// What routers of vLLM's servers read, by vLLM's names. Blocks that are kept for prompts to come count
// as free, as there.
std::vector<MetricFamily> RouterFamilies(const engine::EngineStats& stats,
                                         const MetricsInfo& info) {
  const ClientMetric::Label model = {"model_name", info.model};
  std::vector<MetricFamily> out;
  const auto add = [&](const char* name, const char* help, double value,
                       std::vector<ClientMetric::Label> labels) {
    MetricFamily family{name, help, MetricType::Gauge, {}};
    family.metric.push_back(Value(MetricType::Gauge, value, std::move(labels)));
    out.push_back(std::move(family));
  };
  add("vllm:num_requests_waiting", "As winnow_requests_waiting.", stats.waiting, {model});
  add("vllm:num_requests_running", "As winnow_requests_running.", stats.running, {model});
  add("vllm:kv_cache_usage_perc", "Share of the KV blocks that sequences use, 0 to 1.",
      stats.blocks_total == 0 ? 0 : static_cast<double>(stats.blocks_used) / stats.blocks_total,
      {model});
  add("vllm:cache_config_info", "The KV pool; the value is 1.", 1,
      {{"block_size", std::to_string(info.block_tokens)},
       {"num_gpu_blocks", std::to_string(stats.blocks_total)}});
  add("vllm:lora_requests_info", "There are no adapters; the value is when that last changed.", 0,
      {{"max_lora", "0"}, {"running_lora_adapters", ""}, {"waiting_lora_adapters", ""}});
  return out;
}

std::vector<MetricFamily> HttpFamilies(const HttpCounts& counts) {
  constexpr MetricType kC = MetricType::Counter;
  std::vector<MetricFamily> out;
  const auto add = [&](const char* name, const char* help, uint64_t value) {
    out.push_back(Single(kC, name, help, static_cast<double>(value)));
  };
  out.push_back(Single(MetricType::Gauge, "winnow_http_connections", "Open HTTP connections.",
                       static_cast<double>(counts.connections)));
  add("winnow_http_connections_accepted_total", "HTTP connections that were opened.",
      counts.accepted);
  add("winnow_http_connections_refused_total",
      "HTTP connections that got 503 because all others were busy.", counts.refused);
  add("winnow_http_connections_evicted_total",
      "HTTP connections without a request that made room for others.", counts.evicted);
  add("winnow_http_timeouts_total",
      "HTTP requests that did not arrive, and responses that were not read, in time.",
      counts.timed_out);
  add("winnow_http_accept_errors_total", "Failures to take a new HTTP connection.",
      counts.accept_errors);
  return out;
}

std::vector<MetricFamily> GuardFamilies(const GuardStats& stats) {
  std::vector<MetricFamily> out;
  const auto add = [&](const char* name, const char* help, uint64_t value) {
    out.push_back(Single(MetricType::Counter, name, help, static_cast<double>(value)));
  };
  out.push_back(Single(MetricType::Gauge, "winnow_grpc_connections", "Open gRPC connections.",
                       static_cast<double>(stats.connections)));
  add("winnow_grpc_connections_accepted_total", "gRPC connections that were opened.",
      stats.accepted);
  add("winnow_grpc_connections_broken_total",
      "gRPC connections closed because of what they sent: no HTTP/2, or headers without an end.",
      stats.broken);
  add("winnow_grpc_delays_total",
      "Times that a gRPC connection had to wait because of resets or small frames.", stats.delayed);
  return out;
}

std::vector<MetricFamily> EngineFamilies(const engine::EngineStats& stats,
                                         const engine::Clock& clock, int64_t kv_block_bytes) {
  constexpr MetricType kC = MetricType::Counter, kG = MetricType::Gauge;
  std::vector<MetricFamily> out;
  const auto add = [&](MetricType type, const char* name, const char* help, auto value) {
    out.push_back(Single(type, name, help, static_cast<double>(value)));
  };
  add(kG, "winnow_requests_running", "Sequences that hold KV blocks, paused ones included.",
      stats.running);
  add(kG, "winnow_requests_paused", "Running sequences whose reader is slow.", stats.paused);
  add(kG, "winnow_requests_waiting", "Accepted sequences that do not run.", stats.waiting);
  add(kG, "winnow_requests_preempted", "Waiting sequences that ran before.", stats.preempted);
  add(kG, "winnow_waiting_tokens", "Prompt tokens of waiting sequences.", stats.waiting_tokens);
  add(kG, "winnow_kv_blocks_used", "KV blocks in use.", stats.blocks_used);
  add(kG, "winnow_kv_blocks_capacity", "KV blocks of the pool.", stats.blocks_total);
  add(kG, "winnow_kv_block_bytes", "Bytes of a KV block, all layers.", kv_block_bytes);
  add(kG, "winnow_engine_draining", "1 while the server accepts nothing any more.",
      stats.draining ? 1 : 0);
  add(kG, "winnow_engine_failed", "1 after the model failed.", stats.failed ? 1 : 0);
  const double age =
      stats.heartbeat == engine::TimePoint{} ? 0 : Seconds(clock.Now() - stats.heartbeat);
  add(kG, "winnow_engine_heartbeat_age_seconds", "Since the engine last began a step.", age);
  add(kC, "winnow_engine_steps_total", "Steps.", stats.steps);
  add(kC, "winnow_sequences_accepted_total", "Sequences accepted; a request has n.",
      stats.accepted);
  add(kC, "winnow_sequences_rejected_total", "Sequences that the queue refused.", stats.rejected);
  add(kC, "winnow_prompt_tokens_total", "Prompt tokens of accepted sequences.",
      stats.prompt_tokens);
  add(kC, "winnow_cached_tokens_total", "Prompt tokens taken from a cache.", stats.cached_tokens);
  add(kC, "winnow_generated_tokens_total", "Tokens generated.", stats.generated_tokens);
  add(kC, "winnow_computed_tokens_total",
      "Tokens that went through the model: prompts, decoding, and again after preemption.",
      stats.computed_tokens);
  add(kC, "winnow_preemptions_total", "Sequences that lost their KV blocks to others.",
      stats.preemptions);
  add(kC, "winnow_kv_losses_total",
      "Times that a slower tier lost KV of a sequence, which was computed again.", stats.kv_losses);
  add(kC, "winnow_kv_dense_bytes_total",
      "KV bytes that dense attention would have read while decoding.", stats.kv_dense_bytes);
  add(kC, "winnow_kv_selected_rows_total", "KV rows attended while decoding.", stats.selected_rows);

  const engine::RetrievalCounts& retrieval = stats.retrieval;
  add(kC, "winnow_retrieval_mid_rows_total",
      "KV rows that retrieving policies could choose from, while decoding.", retrieval.mid_rows);
  add(kC, "winnow_retrieval_chosen_rows_total", "Of these, the rows that they chose.",
      retrieval.chosen_rows);
  add(kC, "winnow_retrieval_widened_tokens_total",
      "Tokens that chose more rows because a measure fell below their policy's floor.",
      retrieval.widened_tokens);
  add(kC, "winnow_retrieval_floor_dense_tokens_total",
      "Tokens that attended densely because a measure fell below their policy's floor.",
      retrieval.floor_dense_tokens);
  out.push_back(Mean("winnow_retrieval_coverage_ratio",
                     "Share of the attention's mass on what was read; sampled choices.",
                     retrieval.coverage, retrieval.probes));
  out.push_back(Mean("winnow_retrieval_iou_ratio",
                     "Of the chosen set with the best one of its size; sampled choices.",
                     retrieval.iou, retrieval.probes));
  out.push_back(Mean("winnow_retrieval_completed_ratio",
                     "Share of the attention's mass that completion stood for.",
                     retrieval.completed, retrieval.completions));

  add(kG, "winnow_kv_blocks_idle",
      "KV blocks of no sequence, kept for prompts that begin with them.", stats.blocks_idle);
  add(kC, "winnow_row_cache_hits_total", "Rows from slower tiers that were still at hand.",
      retrieval.rows_cached);
  add(kC, "winnow_row_cache_misses_total", "Rows that had to be brought from a slower tier.",
      retrieval.rows_stored);
  if (stats.tiered) {
    const storage::StoreStats& store = stats.store;
    add(kC, "winnow_kv_pieces_saved_total", "Blocks of a layer that moved to a slower tier.",
        stats.kv.saved_pieces);
    add(kC, "winnow_kv_pieces_loaded_total", "Blocks of a layer that came back whole.",
        stats.kv.loaded_pieces);
    add(kC, "winnow_kv_save_failures_total", "Blocks of a layer that no slower tier took.",
        stats.kv.save_failures);
    add(kC, "winnow_kv_tier_wait_seconds_total", "Time that steps waited for slower tiers.",
        static_cast<double>(stats.kv.wait_ns) * 1e-9);
    add(kG, "winnow_store_state", "Of the slower tiers: 0 ok, 1 reads only, 2 off.",
        static_cast<int>(store.state));
    add(kG, "winnow_store_blocks", "Entries of the store.", store.blocks);
    add(kG, "winnow_store_used_bytes", "Bytes that the store takes; of files, their lengths.",
        store.used_bytes);
    add(kG, "winnow_store_capacity_bytes", "Bytes that the store may take.", store.capacity_bytes);
    add(kC, "winnow_store_device_read_bytes_total", "Bytes read from the medium.",
        store.device_bytes_read);
    add(kC, "winnow_store_device_written_bytes_total", "Bytes written to the medium.",
        store.device_bytes_written);
    add(kC, "winnow_store_evicted_blocks_total", "Entries that made room for others.",
        store.evicted_blocks);
    add(kC, "winnow_store_corrupt_blocks_total", "Entries whose checksum did not hold.",
        store.corrupt_blocks);
    add(kC, "winnow_store_io_errors_total", "Reads and writes that failed.", store.io_errors);
  }

  MetricFamily read{"winnow_kv_read_bytes_total", "KV bytes read while decoding, by tier.", kC, {}};
  read.metric = {Value(kC, static_cast<double>(stats.kv_read_bytes_fast), {{"tier", "fast"}}),
                 Value(kC, static_cast<double>(stats.kv_read_bytes_host), {{"tier", "host"}}),
                 Value(kC, static_cast<double>(stats.kv_read_bytes_disk), {{"tier", "disk"}})};
  out.push_back(std::move(read));

  MetricFamily finished{
      "winnow_sequences_finished_total", "Sequences that ended, by reason.", kC, {}};
  for (int i = 1; i < engine::kNumFinishReasons; ++i) {
    finished.metric.push_back(
        Value(kC, static_cast<double>(stats.finished[i]), {{"reason", kFinishNames[i]}}));
  }
  out.push_back(std::move(finished));
  return out;
}

// A scrape that is sent half keeps a thread until its time is over, so there are more threads than
// anything that scrapes has connections; idle ones cost an address range.
constexpr char kScrapeThreads[] = "48";
constexpr char kScrapeTimeoutMs[] = "1000";

}  // namespace

class Metrics::Impl final : public prometheus::Collectable {
 public:
  Impl(const MetricsInfo& info, const engine::Clock& clock) : info_(info), clock_(clock) {
    auto& index_bytes = prometheus::BuildGauge()
                            .Name("winnow_index_bytes")
                            .Help("Bytes of an index beside the KV pool.")
                            .Register(registry_);
    for (const auto& [index, bytes] : info.index_bytes) {
      index_bytes.Add({{"index", index}}).Set(static_cast<double>(bytes));
    }
    prometheus::BuildGauge()
        .Name("winnow_retrieval_from_tokens")
        .Help("Shortest context that retrieves, for policies that do not say.")
        .Register(registry_)
        .Add({})
        .Set(static_cast<double>(info.retrieval_from));
    prometheus::BuildGauge()
        .Name("winnow_build_info")
        .Help("What runs; the value is 1.")
        .Register(registry_)
        .Add({{"version", info.version},
              {"model", info.model},
              {"dtype", info.dtype},
              {"kv_dtype", info.kv_dtype},
              {"backend", info.backend}})
        .Set(1);
    auto& requests = prometheus::BuildCounter()
                         .Name("winnow_requests_total")
                         .Help("Generate calls that ended, by outcome.")
                         .Register(registry_);
    for (size_t i = 0; i < kOutcomes.size(); ++i) {
      requests_[i] = &requests.Add({{"outcome", kOutcomes[i]}});
    }
    serving_ = &prometheus::BuildGauge()
                    .Name("winnow_serving")
                    .Help("1 while the health service says SERVING.")
                    .Register(registry_)
                    .Add({});
    first_token_ = Add("winnow_time_to_first_token_seconds", "From arrival to the first token.",
                       kFirstTokenBuckets);
    inter_token_ =
        Add("winnow_inter_token_seconds", "Between tokens of a sequence.", kInterTokenBuckets);
    request_ = Add("winnow_request_duration_seconds",
                   "From arrival to the end of sequences that were finished.", kRequestBuckets);
    queue_ = Add("winnow_queue_seconds", "From arrival until the engine first worked on it.",
                 kQueueBuckets);
    step_ = Add("winnow_step_seconds", "Of one engine step.", kInterTokenBuckets);
    step_tokens_ = Add("winnow_step_tokens", "Tokens that one step computed.", kStepTokenBuckets);
    step_rows_ = Add("winnow_step_selected_rows",
                     "KV rows attended in one engine step that decoded.", kStepRowBuckets);
    kept_ = Add("winnow_retrieval_kept_ratio",
                "Share of the rows to choose from that a policy chose; mean of a sequence.",
                kShareBuckets);
    const prometheus::Labels gen_ai = {{"gen_ai_operation_name", "text_completion"},
                                       {"gen_ai_provider_name", "winnow"},
                                       {"gen_ai_request_model", info.model}};
    gen_ai_first_token_ = Add("gen_ai_server_time_to_first_token_seconds",
                              "From arrival to the first token.", kFirstTokenBuckets, gen_ai);
    gen_ai_per_token_ =
        Add("gen_ai_server_time_per_output_token_seconds",
            "Of each token after the first, mean of a sequence.", kInterTokenBuckets, gen_ai);
    gen_ai_request_ =
        Add("gen_ai_server_request_duration_seconds",
            "From arrival to the end of sequences that were finished.", kRequestBuckets, gen_ai);
  }

  std::vector<MetricFamily> Collect() const override {
    std::vector<MetricFamily> out = CollectState();
    for (MetricFamily& family : CollectProcess()) out.push_back(std::move(family));
    return out;
  }

  // What is cheap to ask.
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
    for (MetricFamily& family : RouterFamilies(stats, info_)) out.push_back(std::move(family));
    for (MetricFamily& family : HttpFamilies(http)) out.push_back(std::move(family));
    for (MetricFamily& family : GuardFamilies(guard)) out.push_back(std::move(family));
    out.push_back(Single(MetricType::Counter, "winnow_log_dropped_lines_total",
                         "Lines of the log that nobody read in time.",
                         dropped_lines_ ? static_cast<double>(dropped_lines_()) : 0));
    out.push_back(Single(MetricType::Counter, "winnow_kv_event_batches_missed_total",
                         "KV event batches that were not published on ZMQ, because they were made "
                         "faster than sent: readers see a gap, and ask again.",
                         static_cast<double>(missed_kv_events)));
    return out;
  }

  static std::vector<MetricFamily> CollectProcess() {
    return {Single(MetricType::Gauge, "process_resident_memory_bytes",
                   "Resident memory size in bytes.", ResidentBytes()),
            Single(MetricType::Gauge, "process_open_fds", "Number of open file descriptors.",
                   OpenFds())};
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
                   prometheus::TextSerializer().Serialize(CollectProcess());
      slow_text_of_ = now;
    }
    return slow_text_;
  }

  const MetricsInfo info_;
  const engine::Clock& clock_;
  prometheus::Registry registry_;
  std::array<prometheus::Counter*, kOutcomes.size()> requests_ = {};
  prometheus::Gauge* serving_ = nullptr;
  Histogram *first_token_ = nullptr, *inter_token_ = nullptr, *request_ = nullptr,
            *queue_ = nullptr, *step_ = nullptr, *step_tokens_ = nullptr, *step_rows_ = nullptr,
            *kept_ = nullptr;
  Histogram *gen_ai_first_token_ = nullptr, *gen_ai_per_token_ = nullptr,
            *gen_ai_request_ = nullptr;

  std::function<uint64_t()> dropped_lines_;

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

void Metrics::SetDroppedLines(std::function<uint64_t()> dropped_lines) {
  impl_->dropped_lines_ = std::move(dropped_lines);
}

void Metrics::SetServing(bool serving) { impl_->serving_->Set(serving ? 1 : 0); }

void Metrics::OnFirstToken(const engine::Request&, engine::Duration since_arrival) {
  impl_->first_token_->Observe(Seconds(since_arrival));
  impl_->gen_ai_first_token_->Observe(Seconds(since_arrival));
}

void Metrics::OnNextToken(const engine::Request&, engine::Duration since_previous_token) {
  impl_->inter_token_->Observe(Seconds(since_previous_token));
}

void Metrics::OnFinished(const engine::Request&, engine::FinishReason reason,
                         const engine::Usage& usage) {
  impl_->queue_->Observe(Seconds(usage.queue_time));
  const engine::RetrievalCounts& retrieval = usage.retrieval;
  if (retrieval.mid_rows > 0) {
    impl_->kept_->Observe(static_cast<double>(retrieval.chosen_rows) /
                          static_cast<double>(retrieval.mid_rows));
  }
  const bool complete = reason == engine::FinishReason::kStopToken ||
                        reason == engine::FinishReason::kStopString ||
                        reason == engine::FinishReason::kMaxTokens;
  // A request that was cut off has no duration worth comparing.
  if (!complete) return;
  const double total = Seconds(usage.total_time);
  impl_->request_->Observe(total);
  impl_->gen_ai_request_->Observe(total);
  if (usage.generated_tokens > 1) {
    impl_->gen_ai_per_token_->Observe((total - Seconds(usage.time_to_first_token)) /
                                      (usage.generated_tokens - 1));
  }
}

void Metrics::OnStep(const engine::StepObservation& step) {
  impl_->step_->Observe(Seconds(step.duration));
  impl_->step_tokens_->Observe(step.tokens);
  // A step of prompts alone selects nothing.
  if (step.selected_rows > 0) {
    impl_->step_rows_->Observe(static_cast<double>(step.selected_rows));
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
