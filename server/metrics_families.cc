#include "server/metrics_families.h"

#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace winnow::server {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

constexpr MetricType kCounter = MetricType::Counter, kGauge = MetricType::Gauge;

constexpr std::array<const char*, engine::kNumFinishReasons> kFinishNames = {
    "none", "stop_token", "stop_string", "max_tokens", "cancelled", "deadline", "error"};

ClientMetric Value(MetricType type, double value, Labels labels = {}) {
  ClientMetric metric;
  metric.label = std::move(labels);
  if (type == kCounter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  return metric;
}

// Families, one line each.
class Families {
 public:
  template <typename Number>
  void Counter(const char* name, const char* help, Number value) {
    out_.push_back(Single(kCounter, name, help, static_cast<double>(value)));
  }
  template <typename Number>
  void Gauge(const char* name, const char* help, Number value) {
    out_.push_back(Single(kGauge, name, help, static_cast<double>(value)));
  }
  template <typename Number>
  void Labelled(MetricType type, const char* name, const char* help, Number value, Labels labels) {
    MetricFamily family{name, help, type, {}};
    family.metric.push_back(Value(type, static_cast<double>(value), std::move(labels)));
    out_.push_back(std::move(family));
  }
  // A sum and how many there were, without quantiles.
  void Mean(const char* name, const char* help, double sum, uint64_t count) {
    MetricFamily family{name, help, MetricType::Summary, {}};
    family.metric.emplace_back();
    family.metric.back().summary.sample_sum = sum;
    family.metric.back().summary.sample_count = count;
    out_.push_back(std::move(family));
  }
  // One series for each value of a label.
  void By(const char* label, MetricType type, const char* name, const char* help,
          const std::vector<std::pair<std::string, uint64_t>>& values) {
    MetricFamily family{name, help, type, {}};
    for (const auto& [value, count] : values) {
      family.metric.push_back(Value(type, static_cast<double>(count), {{label, value}}));
    }
    out_.push_back(std::move(family));
  }
  void Add(MetricFamily family) { out_.push_back(std::move(family)); }

  MetricFamilies Take() { return std::move(out_); }

 private:
  MetricFamilies out_;
};

MetricFamily DiskLatency(const storage::StoreStats& store) {
  MetricFamily family{
      "winnow_kv_read_seconds",
      "Reads of KV from a slower tier, from asking until the bytes are checked. Slow "
      "reads are slow tokens: look at winnow_store_queue_depth and at the device.",
      MetricType::Histogram,
      {}};
  ClientMetric metric;
  metric.label = {{"tier", "disk"}};
  uint64_t count = 0;
  for (size_t i = 0; i < store.read_latency.size(); ++i) {
    count += store.read_latency[i];
    const bool last = i == storage::kReadLatencyBoundsSeconds.size();
    metric.histogram.bucket.push_back({count, last ? std::numeric_limits<double>::infinity()
                                                   : storage::kReadLatencyBoundsSeconds[i]});
  }
  metric.histogram.sample_count = count;
  metric.histogram.sample_sum = static_cast<double>(store.read_latency_ns) * 1e-9;
  family.metric.push_back(std::move(metric));
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

double ProcessorSeconds() {
  rusage usage = {};
  if (getrusage(RUSAGE_SELF, &usage) != 0) return 0;
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void AddRequests(const engine::EngineStats& stats, Families& out) {
  out.Gauge("winnow_requests_running",
            "Sequences that hold KV blocks, paused ones included. At --max-running for long: add "
            "replicas, or raise it if KV blocks are left.",
            stats.running);
  out.Gauge("winnow_requests_paused",
            "Running sequences whose reader is slow. They keep their KV for --pause-grace; many: "
            "look at the clients or at a proxy that does not read.",
            stats.paused);
  out.Gauge("winnow_requests_waiting",
            "Accepted sequences that do not run. More than zero for long: more comes in than is "
            "computed. The number to scale replicas by.",
            stats.waiting);
  out.Gauge("winnow_requests_preempted",
            "Waiting sequences that ran before and lost their KV blocks, which are computed again.",
            stats.preempted);
  out.Gauge("winnow_waiting_tokens",
            "Prompt tokens of waiting sequences: over the tokens computed a second it is how long "
            "the queue takes. --queue-tokens bounds it.",
            stats.waiting_tokens);
  out.Counter("winnow_sequences_accepted_total", "Sequences accepted; a request has n.",
              stats.accepted);
  out.Counter("winnow_sequences_rejected_total",
              "Sequences that the queue refused because it was full: add replicas, or let clients "
              "wait longer (--queue-requests, --queue-tokens).",
              stats.rejected);
  std::vector<std::pair<std::string, uint64_t>> finished;
  for (int i = 1; i < engine::kNumFinishReasons; ++i) {
    finished.emplace_back(kFinishNames[i], stats.finished[i]);
  }
  out.By("reason", kCounter, "winnow_sequences_finished_total",
         "Sequences that ended, by reason. error: the log says which and why.", finished);
}

void AddTokens(const engine::EngineStats& stats, Families& out) {
  out.Counter("winnow_prompt_tokens_total", "Prompt tokens of accepted sequences.",
              stats.prompt_tokens);
  out.Counter("winnow_cached_tokens_total",
              "Prompt tokens taken over from a cache. Its share of winnow_prompt_tokens_total is "
              "the hit rate: low beside similar prompts, look at what changes at their head.",
              stats.cached_tokens);
  out.By("from", kCounter, "winnow_prefix_hit_tokens_total",
         "Prompt tokens whose KV was found, by where: in the pool, whichever tier it has moved to, "
         "or in the store, where an earlier process or a full pool left it (--disk-bytes).",
         {{"pool", stats.prefix_tokens_pool}, {"store", stats.prefix_tokens_store}});
  out.Counter("winnow_generated_tokens_total", "Tokens generated: the throughput that clients see.",
              stats.generated_tokens);
  out.Counter("winnow_computed_tokens_total",
              "Tokens that went through the model: prompts, decoding, and again after preemption.",
              stats.computed_tokens);
  out.Counter("winnow_preemptions_total",
              "Sequences that lost their KV blocks to others. A steady rate is work done twice: "
              "lower --max-running, or give KV more memory.",
              stats.preemptions);
  out.Counter("winnow_kv_losses_total",
              "Times that a slower tier lost KV of a sequence, which was computed again. Rising: "
              "look at winnow_store_io_errors_total and winnow_store_corrupt_blocks_total.",
              stats.kv_losses);
  out.Counter("winnow_store_quota_refused_blocks_total",
              "Blocks that the store did not keep because their tenant has its store_bytes of "
              "--tenants. Rising: its prompts are computed again once fast memory forgets them.",
              stats.blocks_over_store_quota);
}

}  // namespace

double Seconds(engine::Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

MetricFamily Single(MetricType type, std::string name, std::string help, double value) {
  MetricFamily family;
  family.name = std::move(name);
  family.help = std::move(help);
  family.type = type;
  family.metric.push_back(Value(type, value));
  return family;
}

MetricFamilies EngineFamilies(const engine::EngineStats& stats, const engine::Clock& clock,
                              int64_t kv_block_bytes) {
  Families out;
  AddRequests(stats, out);
  AddTokens(stats, out);
  out.Gauge("winnow_kv_blocks_used",
            "KV blocks that sequences use. Near winnow_kv_blocks_capacity: the next step is "
            "preemption.",
            stats.blocks_used);
  out.Gauge("winnow_kv_blocks_idle",
            "KV blocks of no sequence, kept for prompts that begin with them. They are free for "
            "whoever needs them.",
            stats.blocks_idle);
  out.Gauge("winnow_kv_blocks_capacity", "KV blocks of the pool.", stats.blocks_total);
  out.Gauge("winnow_kv_block_bytes", "Bytes of a KV block, all layers.", kv_block_bytes);
  out.Gauge("winnow_engine_draining",
            "1 while the server accepts nothing any more. Longer than --drain-grace: it is stuck, "
            "and a second SIGTERM ends it.",
            stats.draining ? 1 : 0);
  out.Gauge("winnow_engine_failed",
            "1 after the model failed. The process ends with code 70 and should be started anew.",
            stats.failed ? 1 : 0);
  out.Gauge("winnow_engine_heartbeat_age_seconds",
            "Since the engine last began a step; idle engines beat, too. Above "
            "--heartbeat-timeout the health service says NOT_SERVING.",
            stats.heartbeat == engine::TimePoint{} ? 0 : Seconds(clock.Now() - stats.heartbeat));
  out.Counter("winnow_engine_steps_total", "Steps of the engine.", stats.steps);
  out.By(
      "how", kCounter, "winnow_device_launches_total",
      "Kernels that a GPU was asked for, one by one (alone) or as part of a CUDA graph (graph); 0 "
      "on a CPU. Many alone while only decoding: steps differ too much to repeat a graph, and "
      "pay for launches.",
      {{"alone", static_cast<uint64_t>(stats.launches.alone)},
       {"graph", static_cast<uint64_t>(stats.launches.in_graphs)}});
  return out.Take();
}

MetricFamilies ReadFamilies(const engine::EngineStats& stats, int64_t row_bytes) {
  Families out;
  const engine::RetrievalCounts& retrieval = stats.retrieval;
  out.By("tier", kCounter, "winnow_kv_read_bytes_total",
         "KV bytes that attention read while decoding (fast), and bytes that were brought from "
         "slower tiers for it (host, disk).",
         {{"fast", stats.kv_read_bytes_fast},
          {"host", stats.kv_read_bytes_host},
          {"disk", stats.kv_read_bytes_disk}});
  const auto rows = [row_bytes](uint64_t bytes) {
    return row_bytes == 0 ? 0 : bytes / static_cast<uint64_t>(row_bytes);
  };
  out.By(
      "tier", kCounter, "winnow_kv_read_rows_total",
      "KV entries that attention read while decoding (fast), and that were brought from slower "
      "tiers for it (host, disk), those of whole blocks included. host and disk over fast is the "
      "share of reads that memory has no room for: a larger --row-cache-bytes or --kv-bytes.",
      {{"fast", stats.attended_rows},
       {"host", rows(stats.kv_read_bytes_host)},
       {"disk", rows(stats.kv_read_bytes_disk)}});
  out.Counter("winnow_kv_dense_bytes_total",
              "KV bytes that dense attention would have read while decoding: "
              "winnow_kv_read_bytes_total{tier=\"fast\"} over this is what retrieval costs.",
              stats.kv_dense_bytes);
  out.Counter("winnow_kv_attended_rows_total", "KV entries attended while decoding.",
              stats.attended_rows);
  out.Counter("winnow_retrieval_candidate_rows_total",
              "KV entries that retrieving policies could choose from, while decoding.",
              retrieval.candidate_rows);
  out.Counter("winnow_retrieval_selected_rows_total", "Candidates that they chose.",
              retrieval.selected_rows);
  out.Counter("winnow_retrieval_widened_tokens_total",
              "Tokens that chose more KV entries because a measure fell below their policy's "
              "floor. Many: raise k, or take a better index.",
              retrieval.widened_tokens);
  out.Counter("winnow_retrieval_floor_dense_tokens_total",
              "Tokens that attended densely because a measure fell below their policy's floor. "
              "Many: the policy does not fit this text.",
              retrieval.floor_dense_tokens);
  out.Mean("winnow_retrieval_coverage_ratio",
           "Share of the attention's mass on what was read, of sampled choices "
           "(--probe-interval). Below 0.9 answers begin to differ from dense ones: raise k or p.",
           retrieval.coverage, retrieval.probes);
  out.Mean("winnow_retrieval_iou_ratio",
           "Overlap of the chosen set with the best one of its size, of sampled choices. Low "
           "beside a good coverage is no harm.",
           retrieval.iou, retrieval.probes);
  out.Mean("winnow_retrieval_tail_mass_ratio",
           "Share of the attention's mass that the tail estimate stood for: of all of "
           "completion=on, of tail=on in sampled choices "
           "(--probe-interval). What was read has the rest.",
           retrieval.tail_mass, retrieval.tail_estimates);
  const engine::DraftCounts& drafts = stats.drafts;
  out.Counter("winnow_draft_tokens_total", "Tokens drafted under policies with verify.",
              drafts.drafted);
  out.Counter("winnow_draft_verified_tokens_total",
              "Drafted tokens that a pass of dense attention verified.", drafts.verified);
  out.Counter("winnow_draft_accepted_tokens_total",
              "Of those, tokens that became part of an answer. Few: raise k, or take verify=auto, "
              "which stops drafting where it does not pay.",
              drafts.accepted);
  out.Counter("winnow_draft_verifications_total", "Passes that verified a draft.",
              drafts.verifications);
  std::vector<std::pair<std::string, uint64_t>> verified_at;
  std::vector<std::pair<std::string, uint64_t>> accepted_at;
  for (size_t i = 0; i == 0 || (i < drafts.verified_at.size() && drafts.verified_at[i] > 0); ++i) {
    verified_at.emplace_back(std::to_string(i + 1), drafts.verified_at[i]);
    accepted_at.emplace_back(std::to_string(i + 1), drafts.accepted_at[i]);
  }
  out.By("place", kCounter, "winnow_draft_verified_at_total",
         "Drafted tokens that were verified, by place in their draft.", verified_at);
  out.By("place", kCounter, "winnow_draft_accepted_at_total",
         "Of them, accepted: over winnow_draft_verified_at_total it falls with the place.",
         accepted_at);
  const auto by_tier = [](const engine::KvReads& reads) {
    return std::vector<std::pair<std::string, uint64_t>>{
        {"fast", reads.fast}, {"host", reads.host}, {"disk", reads.disk}};
  };
  out.By("tier", kCounter, "winnow_draft_read_bytes_total",
         "KV bytes that drafting read, of winnow_kv_read_bytes_total. Beside "
         "winnow_verify_read_bytes_total: how much cheaper a drafted token is than a pass.",
         by_tier(drafts.draft_reads));
  out.By("tier", kCounter, "winnow_verify_read_bytes_total",
         "KV bytes that passes of dense attention read to verify drafts, of "
         "winnow_kv_read_bytes_total.",
         by_tier(drafts.verify_reads));
  out.Counter("winnow_kv_row_cache_hits_total",
              "KV entries of slower tiers that were still in the row cache.",
              retrieval.rows_cached);
  out.Counter("winnow_kv_row_cache_misses_total",
              "KV entries that had to be read from a slower tier. Many beside hits: raise "
              "--row-cache-bytes.",
              retrieval.rows_stored);
  out.Counter("winnow_kv_prefetch_rows_total",
              "KV entries that were read before a policy chose them (--prefetch on).",
              stats.prefetch.asked);
  out.Counter("winnow_kv_prefetch_hits_total",
              "Prefetched entries that were chosen then; the rest was read in vain. Less than half "
              "on a busy disk: --prefetch off.",
              stats.prefetch.hits);
  return out.Take();
}

MetricFamilies StoreFamilies(const engine::EngineStats& stats) {
  Families out;
  const storage::StoreStats& store = stats.store;
  out.Counter("winnow_kv_layer_blocks_saved_total",
              "Layer blocks that were written to a slower tier.", stats.kv.saved_pieces);
  out.Counter("winnow_kv_layer_blocks_loaded_total",
              "Layer blocks that were read back whole: dense attention, and eager resume.",
              stats.kv.loaded_pieces);
  out.Counter("winnow_kv_loaded_bytes_total",
              "Bytes of layer blocks that were read back whole. Large beside "
              "winnow_kv_read_bytes_total{tier=\"disk\"}: requests are dense, or --resume eager.",
              stats.kv.loaded_bytes);
  out.Counter("winnow_kv_save_failures_total",
              "Layer blocks that no slower tier took. Rising: the tier is full, slow or off.",
              stats.kv.save_failures);
  out.Counter("winnow_kv_tier_wait_seconds_total",
              "Time that steps waited for slower tiers. Its rate is the share of time that a "
              "faster disk, a larger --row-cache-bytes or a smaller k would save.",
              static_cast<double>(stats.kv.wait_ns) * 1e-9);
  const engine::FetchCounts& fetches = stats.fetches;
  out.Gauge("winnow_kv_fetches_open",
            "Fetches of whole layer blocks under way, each of a sequence that waits for it beside "
            "the steps of others.",
            fetches.open);
  out.Counter(
      "winnow_kv_fetches_total",
      "Fetches of whole layer blocks between steps: of prefixes that were found, and of all "
      "sequences while reads of the store are slow.",
      fetches.begun);
  out.Counter("winnow_kv_fetches_given_up_total",
              "Of those, fetches that took so long that the sequence computed its KV. Rising: the "
              "disk hangs, and winnow_kv_read_seconds says for how long.",
              fetches.given_up);
  out.Counter(
      "winnow_kv_fetch_room_waits_total",
      "Times that a sequence had to wait until another fetch ends, as frames were few. Many "
      "beside winnow_kv_fetches_total: give KV more memory.",
      fetches.room_waits);
  out.Counter(
      "winnow_kv_fetch_rests_total",
      "Times that a sequence was left out of steps for having made one wait for reads. "
      "Rising: the disk is slow, and those that read from it share the time with the others.",
      fetches.rests);
  out.Mean("winnow_resume_seconds",
           "Time that it took to take over found prefixes: their indexes and summaries, "
           "and, resumed eagerly, their KV. Long beside short answers: --resume lazy, or a faster "
           "disk.",
           Seconds(stats.resume_time), stats.resumes);
  out.Counter(
      "winnow_resume_bytes_total",
      "Bytes read from slower tiers in that time. Over winnow_prefix_hit_tokens_total it is "
      "what a token of a prefix costs to come back.",
      stats.resume_bytes);
  out.Gauge("winnow_store_state",
            "0 the slower tiers work (or there are none), 1 reads only, 2 off. Not 0: the log has "
            "the reason; requests go on, and compute what they do not find.",
            static_cast<int>(store.state));
  out.Labelled(kGauge, "winnow_store_info",
               "How the store's files are read: io is uring, threads, or none without a disk. The "
               "value is 1. threads where uring was expected: the container forbids io_uring.",
               1, {{"io", store.io_backend.empty() ? "none" : std::string(store.io_backend)}});
  out.Gauge("winnow_store_blocks", "Entries of the store.", store.blocks);
  out.Gauge("winnow_store_used_bytes", "Bytes that the store takes; of files, their lengths.",
            store.used_bytes);
  out.Gauge("winnow_store_capacity_bytes",
            "Bytes that the store may take. A full store is its normal state: it evicts.",
            store.capacity_bytes);
  out.Gauge("winnow_store_queue_depth",
            "Reads and writes that the disk has not answered. High for long: the disk is the "
            "bottleneck.",
            store.in_flight);
  out.Add(DiskLatency(store));
  out.Counter("winnow_store_payload_read_bytes_total", "Bytes that readers of the store got.",
              store.payload_bytes_read);
  out.Counter("winnow_store_device_read_bytes_total",
              "Bytes read from the medium. Over winnow_store_payload_read_bytes_total it is the "
              "read amplification inside the store.",
              store.device_bytes_read);
  out.Counter("winnow_store_device_written_bytes_total",
              "Bytes written to the medium: what wears an SSD.", store.device_bytes_written);
  out.Counter("winnow_store_evicted_blocks_total",
              "Entries that made room for others. A high rate with a low hit rate: the store is "
              "too small for the traffic (--disk-bytes).",
              store.evicted_blocks);
  out.Counter("winnow_store_corrupt_blocks_total",
              "Entries whose checksum did not hold; they are dropped and computed again. More than "
              "zero: the disk, its cable or memory is failing.",
              store.corrupt_blocks);
  out.Counter("winnow_store_io_errors_total",
              "Reads and writes that failed or came too late. Rising: look at the kernel's log.",
              store.io_errors);
  return out.Take();
}

// Blocks that are kept for prompts to come count as free, as in vLLM.
MetricFamilies VllmFamilies(const engine::EngineStats& stats, const MetricsInfo& info) {
  const ClientMetric::Label model = {"model_name", info.model};
  Families out;
  out.Labelled(kGauge, "vllm:num_requests_waiting", "As winnow_requests_waiting.", stats.waiting,
               {model});
  out.Labelled(kGauge, "vllm:num_requests_running", "As winnow_requests_running.", stats.running,
               {model});
  out.Labelled(
      kGauge, "vllm:kv_cache_usage_perc", "Share of the KV blocks that sequences use, 0 to 1.",
      stats.blocks_total == 0 ? 0 : static_cast<double>(stats.blocks_used) / stats.blocks_total,
      {model});
  out.Labelled(kGauge, "vllm:cache_config_info", "The KV pool; the value is 1.", 1,
               {{"block_size", std::to_string(info.block_tokens)},
                {"num_gpu_blocks", std::to_string(stats.blocks_total)}});
  out.Labelled(kGauge, "vllm:lora_requests_info",
               "There are no adapters; the value is when that last changed.", 0,
               {{"max_lora", "0"}, {"running_lora_adapters", ""}, {"waiting_lora_adapters", ""}});
  out.Labelled(kCounter, "vllm:prompt_tokens_total", "As winnow_prompt_tokens_total.",
               stats.prompt_tokens, {model});
  out.Labelled(kCounter, "vllm:generation_tokens_total", "As winnow_generated_tokens_total.",
               stats.generated_tokens, {model});
  out.Labelled(kCounter, "vllm:num_preemptions_total", "As winnow_preemptions_total.",
               stats.preemptions, {model});
  out.Labelled(kCounter, "vllm:prefix_cache_queries_total", "As winnow_prompt_tokens_total.",
               stats.prompt_tokens, {model});
  out.Labelled(kCounter, "vllm:prefix_cache_hits_total", "As winnow_cached_tokens_total.",
               stats.cached_tokens, {model});
  const auto finished = [&stats](auto... reasons) {
    return static_cast<double>((stats.finished[static_cast<size_t>(reasons)] + ...));
  };
  using engine::FinishReason;
  MetricFamily success{"vllm:request_success_total",
                       "As winnow_sequences_finished_total, in vLLM's words: abort has cancelled "
                       "sequences and those whose deadline passed.",
                       kCounter,
                       {}};
  for (const auto& [reason, count] :
       {std::pair("stop", finished(FinishReason::kStopToken, FinishReason::kStopString)),
        std::pair("length", finished(FinishReason::kMaxTokens)),
        std::pair("abort", finished(FinishReason::kCancelled, FinishReason::kDeadline)),
        std::pair("error", finished(FinishReason::kError))}) {
    success.metric.push_back(Value(kCounter, count, {{"finished_reason", reason}, model}));
  }
  out.Add(std::move(success));
  return out.Take();
}

MetricFamilies HttpFamilies(const HttpCounts& counts) {
  Families out;
  out.Gauge("winnow_http_connections",
            "Open HTTP connections. Near --http-connections: idle ones are closed for new ones.",
            counts.connections);
  out.Counter("winnow_http_connections_accepted_total", "HTTP connections that were opened.",
              counts.accepted);
  out.Counter("winnow_http_connections_refused_total",
              "HTTP connections that got 503 because all others were busy: raise "
              "--http-connections and the limit of descriptors.",
              counts.refused);
  out.Counter("winnow_http_connections_evicted_total",
              "HTTP connections without a request that made room for others.", counts.evicted);
  out.Counter("winnow_http_timeouts_total",
              "HTTP requests that did not arrive, and responses that were not read, in time. Many: "
              "slow or hostile clients, or a proxy with shorter limits.",
              counts.timed_out);
  out.Counter("winnow_http_accept_errors_total",
              "Failures to take a new HTTP connection, most often for want of descriptors.",
              counts.accept_errors);
  return out.Take();
}

MetricFamilies GuardFamilies(const GuardStats& stats) {
  Families out;
  out.Gauge("winnow_grpc_connections", "Open gRPC connections.", stats.connections);
  out.Counter("winnow_grpc_connections_accepted_total", "gRPC connections that were opened.",
              stats.accepted);
  out.Counter("winnow_grpc_connections_broken_total",
              "gRPC connections closed because of what they sent: no HTTP/2, or headers without an "
              "end. Many: an attack, or HTTP/1 clients on the gRPC port.",
              stats.broken);
  out.Counter("winnow_grpc_delays_total",
              "Times that a gRPC connection had to wait because of resets or small frames. Rising "
              "fast: an attack; look at the peers in the log.",
              stats.delayed);
  return out.Take();
}

MetricFamilies ProcessFamilies() {
  Families out;
  out.Gauge("process_resident_memory_bytes", "Resident memory size in bytes.", ResidentBytes());
  out.Gauge("process_open_fds", "Number of open file descriptors.", OpenFds());
  out.Counter("process_cpu_seconds_total", "Total user and system CPU time spent in seconds.",
              ProcessorSeconds());
  return out.Take();
}

}  // namespace winnow::server
