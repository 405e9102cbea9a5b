// `winnow serve`. RunServer is the wiring diagram: each part is built once, in the order in which
// it is needed, and handed to those that use it; they are taken down in reverse.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>

#include "CLI/CLI.hpp"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/base/status_macros.h"
#include "engine/kv/kv_event_log.h"
#include "engine/kv/kv_plan.h"
#include "engine/model_loader.h"
#include "server/acceptor.h"
#include "server/admin_server.h"
#include "server/commands.h"
#include "server/config.h"
#include "server/credentials.h"
#include "server/drain.h"
#include "server/generation_defaults.h"
#include "server/generator.h"
#include "server/grpc_server.h"
#include "server/health_monitor.h"
#include "server/http/api.h"
#include "server/http/http_server.h"
#include "server/inference_service.h"
#include "server/kv_event_publisher.h"
#include "server/loading_log.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/model_options.h"
#include "server/prefix_calls.h"
#include "server/prefix_service.h"
#include "server/serve_parts.h"
#include "server/signals.h"
#include "server/status.h"
#include "server/strings.h"
#include "server/version.h"
#include "server/vllm/vllm_service.h"

namespace winnow::server {
namespace {

// Metrics, and the end of the process when the model fails: nothing can be served any more, and a
// supervisor should start a new one.
class Observer final : public Metrics {
 public:
  Observer(const MetricsInfo& info, const engine::Clock& clock, Log& log, Signals& signals)
      : Metrics(info, clock), log_(log), signals_(signals) {}

  void OnFailure(const absl::Status& status) override {
    log_.Event(LogLevel::kError, "engine_failed",
               {{"status", StatusCodeName(status.code())}, {"message", ToStd(status.message())}});
    signals_.Notify();
  }

 private:
  Log& log_;
  Signals& signals_;
};

// Loading a model takes minutes, and while it lasts there is nothing to drain: SIGTERM and SIGINT end
// the process at once.
class WhileLoading {
 public:
  WhileLoading(Log& log, Signals& signals)
      : signals_(signals), thread_([this, &log] {
          for (;;) {
            const Signals::Event event = signals_.Wait();
            if (event.signal == SIGTERM || event.signal == SIGINT) {
              log.Event(LogLevel::kWarn, "exits_at_once", {{"signal", int64_t{event.signal}}});
              log.Flush(std::chrono::milliseconds(200));
              _exit(128 + event.signal);
            }
            if (event.signal == SIGHUP) {
              log.Event(LogLevel::kInfo, "reload",
                        {{"text",
                          "nothing is served yet: files that change while the model is "
                          "loaded are read when it is there"}});
            }
            if (is_over_) return;
          }
        }) {}
  ~WhileLoading() {
    is_over_ = true;
    signals_.Notify();
    thread_.join();
  }

 private:
  Signals& signals_;
  std::atomic<bool> is_over_ = false;
  std::thread thread_;
};

// The configuration's options, and where the store and a long fit report to.
engine::ModelOptions LoggedModelOptions(const ServeConfig& config, Log& log) {
  engine::ModelOptions options = ModelOptionsOf(config);
  options.tiers.log = [&log](const std::string& line) {
    log.Event(LogLevel::kInfo, "store", {{"message", line}});
  };
  options.tiers.warn = [&log](const std::string& line) {
    log.Event(LogLevel::kWarn, "store", {{"message", line}});
  };
  options.retrieval.progress = [&log, tenth = 0](double share) mutable {
    if (static_cast<int>(share * 10) == tenth) return;
    tenth = static_cast<int>(share * 10);
    log.Event(LogLevel::kInfo, "transform_fit_progress", {{"percent", int64_t{10} * tenth}});
  };
  return options;
}

engine::EngineOptions EngineOptionsOf(const ServeConfig& config, engine::KvEventLog* kv_events) {
  engine::EngineOptions options;
  options.kv_events = kv_events;
  options.store_tier = config.disk_bytes > 0 ? engine::KvTier::kDisk : engine::KvTier::kHost;
  options.max_running = static_cast<int32_t>(config.max_running);
  options.step_tokens = static_cast<int32_t>(config.step_tokens);
  options.prompt_step_tokens = static_cast<int32_t>(PromptStepTokens(config));
  options.prefix_cache = config.prefix_cache == "on";
  options.eager_share = config.resume == "eager" ? 1.0 : config.resume == "lazy" ? 0.0 : 0.125;
  options.queue_requests = static_cast<int32_t>(config.queue_requests);
  options.queue_tokens = config.queue_tokens;
  options.pause_grace = absl::ToChronoNanoseconds(config.pause_grace);
  options.slow_reader_timeout = absl::ToChronoNanoseconds(config.slow_reader_timeout);
  return options;
}

std::string DescribeTiers(const engine::LoadedModel& model) {
  if (model.store.store != nullptr) return model.store.description;
  const size_t pinned = model.decoder->shared_kv_bytes();
  return pinned == 0 ? "none" : Concat("pinned host memory, ", std::to_string(pinned), " bytes");
}

std::string ModelName(const ServeConfig& config) {
  if (!config.model_name.empty()) return config.model_name;
  const std::filesystem::path path = std::filesystem::absolute(config.model).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

absl::StatusOr<RequestLimits> LimitsOf(const ServeConfig& config,
                                       const engine::LoadedModel& model) {
  RequestLimits limits;
  limits.vocab_size = model.decoder->vocab_size();
  // A pool smaller than the context bounds a sequence, too.
  limits.max_context = static_cast<int32_t>(
      std::min<int64_t>(model.decoder->max_context(),
                        int64_t{model.decoder->num_blocks()} * model.decoder->block_tokens()));
  if (limits.max_context < 2) {
    return absl::InvalidArgumentError(Concat("config.json: a context of ", limits.max_context,
                                             " tokens has no room for an answer"));
  }
  limits.max_prompt_bytes = config.max_prompt_bytes > 0 ? config.max_prompt_bytes
                                                        : DefaultMaxPromptBytes(limits.max_context);
  limits.default_max_tokens = static_cast<int32_t>(config.default_max_tokens);
  limits.eos_token_ids = model.config.eos_token_ids;
  limits.structured_output = engine::HasGrammars();
  WINNOW_ASSIGN_OR_RETURN(limits.default_policy, engine::ParseAttentionPolicy(config.policy));
  limits.check_policy = [&decoder = *model.decoder](const engine::AttentionPolicy& policy) {
    return decoder.CheckPolicy(policy);
  };
  if (!config.exactness.empty()) {
    WINNOW_ASSIGN_OR_RETURN(limits.default_exactness, engine::ParseExactness(config.exactness));
  }
  const absl::StatusOr<engine::AttentionPolicy> policy = DefaultPolicy(limits);
  if (!policy.ok()) {
    return absl::Status(policy.status().code(),
                        Concat("--exactness, --policy: ", ToStd(policy.status().message())));
  }
  if (absl::Status status = limits.check_policy(*policy); !status.ok()) {
    return absl::Status(status.code(), Concat("--policy: ", ToStd(status.message())));
  }
  if (policy->IsVerified() && config.step_tokens <= config.max_running) {
    return absl::InvalidArgumentError(
        Concat("--policy: verify needs --step-tokens above --max-running, ", config.max_running));
  }
  WINNOW_ASSIGN_OR_RETURN(limits.default_sampling, LoadGenerationDefaults(config.model));
  return limits;
}

// The policies that can be honoured, with the bits of an index that is here.
std::vector<std::string> AvailablePolicies(const engine::Decoder& decoder) {
  using Kind = engine::AttentionPolicy::Kind;
  std::vector<engine::IndexSpec> specs = {
      {Kind::kDense, 0}, {Kind::kWindow, 0}, {Kind::kOracle, 0}};
  const std::vector<engine::IndexSpec>& indexes = decoder.options().retrieval.indexes;
  specs.insert(specs.end(), indexes.begin(), indexes.end());
  std::vector<std::string> names;
  for (const engine::IndexSpec& spec : specs) {
    engine::AttentionPolicy policy;
    policy.kind = spec.kind;
    policy.bits = spec.bits == engine::AttentionPolicy::kLshBits ? 0 : spec.bits;
    const std::string name(engine::KindName(spec.kind));
    if (decoder.CheckPolicy(policy).ok() &&
        std::find(names.begin(), names.end(), name) == names.end()) {
      names.push_back(name);
    }
  }
  return names;
}

// Whether completion can be honoured, by a policy that needs nothing else.
bool CanComplete(const engine::Decoder& decoder) {
  engine::AttentionPolicy policy;
  policy.kind = engine::AttentionPolicy::Kind::kWindow;
  policy.completion = true;
  return decoder.CheckPolicy(policy).ok();
}

// Whether answers can be exact under a policy that needs nothing else.
bool CanVerify(const engine::Decoder& decoder) {
  engine::AttentionPolicy policy;
  policy.kind = engine::AttentionPolicy::Kind::kWindow;
  policy.verify = engine::AttentionPolicy::kVerifyAuto;
  return decoder.max_batch_logits() > decoder.options().max_sequences &&
         decoder.CheckPolicy(policy).ok();
}

void DescribeRetrieval(const engine::LoadedModel& model, v1::RetrievalInfo& out) {
  const engine::RetrievalOptions& options = model.decoder_options.retrieval;
  for (const engine::IndexKvPlan& planned : model.decoder->kv_plan().indexes) {
    v1::RetrievalIndex& index = *out.add_indexes();
    index.set_name(planned.name);
    index.set_bits(planned.bits);
    index.set_learned(planned.learned);
    index.set_pool_bytes(planned.bytes);
  }
  out.set_completion(CanComplete(*model.decoder));
  out.set_exact(CanVerify(*model.decoder));
  out.set_artifact(options.artifact == nullptr ? "" : options.artifact->Description());
  out.set_retrieve_from(options.from);
  out.set_retrieve_from_measured(!model.crossover.index.empty());
  out.set_probe_interval(options.probe_interval);
}

v1::GetModelResponse DescribeModel(const std::string& name, const engine::LoadedModel& model,
                                   const RequestLimits& limits) {
  v1::GetModelResponse out;
  out.set_name(name);
  out.set_architecture(model.config.architecture);
  out.set_vocab_size(limits.vocab_size);
  out.set_max_context(limits.max_context);
  out.set_dtype(kernels::DTypeName(model.decoder_options.compute));
  out.set_kv_dtype(kernels::DTypeName(model.decoder_options.kv_dtype));
  out.mutable_eos_token_ids()->Assign(limits.eos_token_ids.begin(), limits.eos_token_ids.end());
  out.set_chat_template(std::string(model.chat_template.name()));
  for (const std::string& policy : AvailablePolicies(*model.decoder)) out.add_policies(policy);
  const engine::AttentionPolicy policy = *DefaultPolicy(limits);  // checked at start
  out.set_default_policy(engine::ToString(policy));
  out.set_default_exactness(engine::ToString(engine::ExactnessOf(policy)));
  v1::SamplingOptions& sampling = *out.mutable_default_sampling();
  sampling.set_temperature(limits.default_sampling.temperature);
  sampling.set_top_k(limits.default_sampling.top_k);
  sampling.set_top_p(limits.default_sampling.top_p);
  sampling.set_min_p(limits.default_sampling.min_p);
  sampling.set_repetition_penalty(limits.default_sampling.repetition_penalty);
  sampling.set_presence_penalty(limits.default_sampling.presence_penalty);
  sampling.set_frequency_penalty(limits.default_sampling.frequency_penalty);
  out.set_default_max_tokens(limits.default_max_tokens);
  out.set_max_prompt_bytes(limits.max_prompt_bytes);
  out.set_version(kVersion);
  DescribeRetrieval(model, *out.mutable_retrieval());
  out.set_structured_output(limits.structured_output);
  return out;
}

double UnixSeconds() { return absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()); }

VllmModel VllmModelOf(const ServeConfig& config, const engine::LoadedModel& model,
                      const v1::GetModelResponse& description) {
  VllmModel out;
  out.description = description;
  out.path = config.model;
  out.bos_token_id = model.config.bos_token_id.value_or(-1);
  out.block_tokens = model.decoder->block_tokens();
  out.max_running = static_cast<int32_t>(config.max_running);
  return out;
}

// Written whole and then put in place, so that who waits for the file never reads half of it.
absl::Status WritePortFile(const std::string& path, int port) {
  const std::string temporary = Concat(path, ".", getpid());
  {
    std::ofstream file(temporary);
    file << port << "\n";
    if (!file.flush()) return absl::UnavailableError(Concat("--port-file: cannot write ", path));
  }
  std::error_code error;
  std::filesystem::rename(temporary, path, error);
  if (error) return absl::UnavailableError(Concat("--port-file: ", path, ": ", error.message()));
  return absl::OkStatus();
}

MetricsInfo MetricsInfoOf(const std::string& name, const engine::LoadedModel& model) {
  const engine::Decoder& decoder = *model.decoder;
  MetricsInfo info;
  info.version = kVersion;
  info.model = name;
  info.dtype = kernels::DTypeName(model.decoder_options.compute);
  info.kv_dtype = kernels::DTypeName(model.decoder_options.kv_dtype);
  info.backend = model.backend->name();
  info.kv_block_bytes =
      static_cast<int64_t>(decoder.kv_layout().BlockBytes()) * decoder.config().num_layers();
  for (const engine::IndexKvPlan& index : decoder.kv_plan().indexes) {
    info.index_bytes.emplace_back(index.title, index.bytes);
  }
  info.retrieval_from = model.decoder_options.retrieval.from;
  info.block_tokens = decoder.block_tokens();
  info.kv_row_bytes = decoder.kv_row_bytes();
  return info;
}

// What retrieval there is, with the bytes of every index, and where it begins.
void LogRetrieval(Log& log, const engine::LoadedModel& model) {
  const engine::RetrievalOptions& options = model.decoder_options.retrieval;
  std::string indexes;
  for (const engine::IndexKvPlan& index : model.decoder->kv_plan().indexes) {
    Append(indexes, indexes.empty() ? "" : ", ", index.title, " ", index.bytes);
  }
  const std::string artifact = options.artifact == nullptr ? "" : options.artifact->Description();
  log.Event(LogLevel::kInfo, "retrieval",
            {{"artifact", artifact.empty() ? "none" : artifact},
             {"indexes", indexes.empty() ? "none" : indexes},
             {"index_bytes", uint64_t{model.decoder->index_bytes()}},
             {"summary_bytes", uint64_t{model.decoder->summary_bytes()}},
             {"probe_interval", int64_t{options.probe_interval}}});
  const engine::TransformReport& transform = model.transform;
  if (transform.bits != 0) {
    log.Event(LogLevel::kInfo, "transform_fit",
              {{"bits", int64_t{transform.bits}},
               {"source", transform.cached ? "fitted by an earlier start" : "fitted now"},
               {"seconds", transform.seconds},
               {"sample_tokens", int64_t{transform.sample_tokens}},
               {"heads", int64_t{transform.heads}},
               {"heads_with_tail", int64_t{transform.heads_with_tail}}});
  }
  if (!transform.problem.empty()) {
    log.Event(LogLevel::kWarn, "transform_fit", {{"message", transform.problem}});
  }
  const engine::CrossoverReport& report = model.crossover;
  std::string samples;
  for (const engine::CrossoverSample& sample : report.crossover.samples) {
    Append(
        samples, samples.empty() ? "" : ", ", sample.tokens, ": ",
        absl::StrFormat("%.1f/%.1f", sample.dense_seconds * 1e6, sample.retrieval_seconds * 1e6));
  }
  const char* const source = report.index.empty() ? "configured"
                             : report.cached      ? "measured by an earlier start"
                                                  : "measured now";
  log.Event(LogLevel::kInfo, "retrieval_from",
            {{"tokens", int64_t{options.from}},
             {"wins", options.from != engine::kNeverRetrieve},
             {"source", source},
             {"index", report.index},
             {"dense_and_retrieval_us", samples}});
  if (!report.problem.empty()) {
    log.Event(LogLevel::kWarn, "crossover_cache", {{"message", report.problem}});
  }
}

// Null where nobody is asked for a key.
absl::StatusOr<std::shared_ptr<ApiKeys>> LoadKeys(const ServeConfig& config, Log& log,
                                                  const engine::Clock& clock) {
  if (config.api_keys.empty()) return nullptr;
  return ApiKeys::Load(config.api_keys, log, clock);
}

absl::StatusOr<std::shared_ptr<TenantTable>> LoadTenants(const ServeConfig& config, Log& log,
                                                         const engine::Clock& clock) {
  if (config.tenants.empty()) return nullptr;
  return TenantTable::Load(config.tenants, log, clock);
}

AnonymousPrefixes AnonymousPrefixesOf(const ServeConfig& config) {
  if (config.anonymous_prefixes == "shared") return AnonymousPrefixes::kShared;
  if (config.anonymous_prefixes == "none" || MayHaveSeveralCallers(config)) {
    return AnonymousPrefixes::kNone;
  }
  return AnonymousPrefixes::kSharedDirectly;
}

// Resolves the configuration anew, from the file as it is now.
using Reread = std::function<absl::StatusOr<ResolvedConfig>()>;

// The log level of the configuration file. One that AdminService set holds until the file says another.
class LevelOfFile {
 public:
  // `reread`: null where there is no file.
  LevelOfFile(std::string level, Reread reread)
      : level_(std::move(level)), reread_(std::move(reread)) {}

  bool exists() const { return reread_ != nullptr; }
  // The rest of what the file says now is not looked at, but it must be sound. Nothing: the level is as it was.
  absl::StatusOr<std::optional<std::string>> Changed() {
    const absl::StatusOr<ResolvedConfig> resolved = reread_();
    if (!resolved.ok()) return resolved.status();
    if (resolved->config.log_level == level_) return std::nullopt;
    level_ = resolved->config.log_level;
    return level_;
  }

 private:
  std::string level_;
  const Reread reread_;
};

void ReloadLevel(LevelOfFile& file, Log& log) {
  const auto level = file.Changed();
  if (!level.ok()) {
    log.Event(LogLevel::kWarn, "reload",
              {{"what", "log_level"},
               {"text", "what was read before holds"},
               {"message", ToStd(level.status().message())}});
    return;
  }
  const auto tell = [&log, &level] {
    log.Event(LogLevel::kInfo, "reload",
              {{"what", "log_level"},
               {"text", "read again"},
               {"log_level", level->has_value() ? **level : log.level()}});
  };
  // While lines of this level are written, before or after.
  const bool quiet = log.level() == "warn" || log.level() == "error";
  if (!quiet) tell();
  if (level->has_value()) log.SetLevel(**level);
  if (quiet) tell();
}

// SIGHUP: reads what may change while it is served now, and says of each file whether it holds.
void Reload(const ServeConfig& config, Log& log, FrontEnds& front_ends, ApiKeys* keys,
            TenantTable* tenants, LevelOfFile& level) {
  const auto tell = [&log](const char* what, const absl::Status& status) {
    if (status.ok()) {
      log.Event(LogLevel::kInfo, "reload", {{"what", what}, {"text", "read again"}});
    } else {
      log.Event(LogLevel::kWarn, "reload",
                {{"what", what},
                 {"text", "what was read before holds"},
                 {"message", ToStd(status.message())}});
    }
  };
  if (!config.tls_cert.empty()) {
    tell("certificates of gRPC", front_ends.grpc.ReloadTls());
    if (front_ends.http != nullptr) tell("certificates of HTTP", front_ends.http->ReloadTls());
  }
  if (keys != nullptr) tell("--api-keys", keys->Reload());
  if (tenants != nullptr) tell("--tenants", tenants->Reload());
  if (level.exists()) ReloadLevel(level, log);
  if (config.tls_cert.empty() && keys == nullptr && tenants == nullptr && !level.exists()) {
    log.Event(
        LogLevel::kInfo, "reload",
        {{"text", "nothing to read: there are no --config, --tls-cert, --api-keys and --tenants"}});
  }
}

// Whether an error of loading is an option's fault and not the model's: these begin with the option's
// name, the others with a file's.
bool NamesAnOption(const absl::Status& status) {
  const std::string_view message = ToStd(status.message());
  const std::vector<ServeOption>& options = ServeOptions();
  return absl::IsInvalidArgument(status) &&
         std::any_of(options.begin(), options.end(), [&message](const ServeOption& option) {
           return message.starts_with(Concat(option.yaml(), ": ")) ||
                  message.starts_with(Concat(option.yaml(), " is "));
         });
}

int Fail(Log& log, std::string_view event, const absl::Status& status, int exit_code) {
  log.Event(LogLevel::kError, event,
            {{"status", StatusCodeName(status.code())}, {"message", ToStd(status.message())}});
  return exit_code;
}

int RunServer(const ServeConfig& config, const BackendMaker& make_backend, Reread reread) {
  LevelOfFile level(config.log_level, std::move(reread));
  Signals signals;
  Log log(config.log_level, config.log_format);
  log.TakeOverLibraries();
  RaiseDescriptorLimit();  // before the store opens a file for each of its segments
  const engine::SteadyClock clock;
  const engine::TimePoint start = clock.Now();
  log.Event(LogLevel::kInfo, "starting",
            {{"version", kVersion}, {"model", config.model}, {"pid", int64_t{getpid()}}});

  for (const std::string& text : UnknownEnvironment(environ)) {
    log.Event(LogLevel::kWarn, "unknown_environment", {{"text", text}});
  }

  // A bad certificate should not cost the loading of a model. A port that is taken does: clients
  // must not be let in before there is one.
  if (absl::Status tls = CheckTlsFiles(config); !tls.ok()) {
    return Fail(log, "config_error", tls, kExitUsage);
  }
  auto keys = LoadKeys(config, log, clock);
  if (!keys.ok()) return Fail(log, "config_error", keys.status(), kExitUsage);
  auto tenants = LoadTenants(config, log, clock);
  if (!tenants.ok()) return Fail(log, "config_error", tenants.status(), kExitUsage);
  std::optional<WhileLoading> loading(std::in_place, log, signals);
  engine::ModelOptions options = LoggedModelOptions(config, log);
  options.on_opened = [&log](const engine::ModelConfig& model_config,
                             const engine::Weights& weights, const engine::Tokenizer& tokenizer) {
    LogModel(log, model_config, weights, tokenizer);
  };
  LoadingProgress progress(log, clock, isatty(STDERR_FILENO) != 0);
  options.on_packing = [&progress](size_t done, size_t total) { progress.Update(done, total); };
  auto backend_or = make_backend(options);
  if (!backend_or.ok()) return Fail(log, "device_error", backend_or.status(), kExitUsage);
  auto model_or = engine::LoadModel(config.model, options, *std::move(backend_or));
  loading.reset();
  if (!model_or.ok()) {
    if (NamesAnOption(model_or.status())) {
      return Fail(log, "config_error", model_or.status(), kExitUsage);
    }
    return Fail(log, "model_error", model_or.status(), kExitModel);
  }
  engine::LoadedModel& model = **model_or;
  auto limits = LimitsOf(config, model);
  if (!limits.ok()) return Fail(log, "model_error", limits.status(), kExitModel);
  const auto habits = FindModelHabits(model.chat_template, *model.tokenizer, config.tool_parser,
                                      config.reasoning_parser);
  if (!habits.ok()) return Fail(log, "config_error", habits.status(), kExitUsage);
  AddEndsOfTurn(*habits, limits->eos_token_ids);
  const engine::Decoder& decoder = *model.decoder;
  const std::string name = ModelName(config);
  const MetricsInfo info = MetricsInfoOf(name, model);

  Observer metrics(info, clock, log, signals);
  std::optional<engine::KvEventLog> kv_events;
  if (config.kv_events == "on") {
    kv_events.emplace(engine::KvEventLog::Options{.unix_seconds = UnixSeconds});
  }
  engine::KvEventLog* const events = kv_events.has_value() ? &*kv_events : nullptr;
  auto engine_or = engine::Engine::Create(EngineOptionsOf(config, events), *model.decoder,
                                          *model.tokenizer, clock, &metrics);
  if (!engine_or.ok()) return Fail(log, "config_error", engine_or.status(), kExitUsage);
  engine::Engine& engine = **engine_or;
  metrics.Attach(engine);
  metrics.SetDroppedLines([&log] { return log.dropped_lines(); });
  if (!config.tls_cert.empty()) {
    metrics.SetCertificateExpiry(
        [path = config.tls_cert] { return CertificateExpiry(path).value_or(0); });
  }
  // The engine goes before the metrics do, and a scrape may come in between.
  const absl::Cleanup detach = [&metrics] { metrics.Detach(); };

  const Validator validator(*limits, *model.tokenizer, model.chat_template);
  Generator::Options generator_options;
  generator_options.tokenize_threads = static_cast<int>(config.tokenize_threads);
  generator_options.max_tokenizing = static_cast<size_t>(config.queue_requests);
  generator_options.max_calls = static_cast<size_t>(config.queue_requests + config.max_running) * 2;
  generator_options.slow_reader_timeout = absl::ToChronoNanoseconds(config.slow_reader_timeout);
  generator_options.tenants = *tenants;
  generator_options.anonymous_prefixes = AnonymousPrefixesOf(config);
  std::optional<engine::GrammarCompiler> grammars;
  if (limits->structured_output) {
    grammars.emplace(
        engine::GrammarCompilerOptions(),
        engine::MakeGrammarVocabulary(*model.tokenizer, limits->vocab_size, limits->eos_token_ids));
  } else {
    log.Event(LogLevel::kWarn, "no_structured_output",
              {{"text",
                "built without xgrammar: JSON schemas, grammars and required tools are refused"}});
  }
  Generator generator(generator_options, engine, validator, *model.tokenizer, metrics, log, clock,
                      grammars.has_value() ? &*grammars : nullptr);
  const v1::GetModelResponse description = DescribeModel(name, model, *limits);
  InferenceService inference(generator, description, *keys);
  const std::unique_ptr<VllmService> vllm = MakeVllmService(
      VllmModelOf(config, model, description), inference, generator,
      [&engine] { return engine.stats(); }, events);
  if (vllm == nullptr && events != nullptr && config.kv_events_zmq == "off") {
    return Fail(log, "config_error",
                absl::InvalidArgumentError(
                    "--kv-events: this build has no vllm.grpc.engine.VllmEngine to tell them by"),
                kExitUsage);
  }
  PrefixCalls prefix_calls(generator, engine, RestorePrefixes(config, engine, log));
  PrefixService prefixes(prefix_calls, inference.callers());
  const auto api = std::make_shared<HttpApi>(
      generator, prefix_calls, description, [&metrics] { return metrics.Page(); }, *keys, *habits);
  std::jthread engine_thread([&engine](const std::stop_token& stop) { engine.Run(stop); });

  const int64_t max_message_bytes =
      config.max_message_bytes > 0 ? config.max_message_bytes : DefaultMaxMessageBytes(*limits);
  std::atomic<bool> listener_failed = false;
  const auto on_listener_failure = [&](const absl::Status& status) {
    log.Event(LogLevel::kError, "listener_failed", {{"message", ToStd(status.message())}});
    listener_failed = true;
    signals.Notify();
  };
  std::vector<grpc::Service*> services = {&prefixes.service()};
  if (vllm != nullptr) services.push_back(&vllm->service());
  auto server_or = GrpcServer::Start(
      config, max_message_bytes, inference,
      {.on_refused =
           [&log](uint64_t refused) {
             log.Event(LogLevel::kWarn, "connections_refused",
                       {{"connections", refused}, {"text", "too many descriptors are open"}});
           },
       .on_listener_failure = on_listener_failure,
       .on_tls_problem =
           [&log](const absl::Status& status) {
             log.Event(LogLevel::kWarn, "tls", {{"message", ToStd(status.message())}});
           }},
      services);
  if (!server_or.ok()) {
    return Fail(log, "listen_error", server_or.status(),
                absl::IsInvalidArgument(server_or.status()) ? kExitUsage : kExitFailure);
  }
  GrpcServer& server = **server_or;
  auto http = StartHttp(config, max_message_bytes, *api, log, clock, metrics, on_listener_failure);
  if (!http.ok()) {
    return Fail(log, "listen_error", http.status(),
                absl::IsInvalidArgument(http.status()) ? kExitUsage : kExitFailure);
  }
  metrics.SetGuard([&server] { return server.stats(); });
  const absl::Cleanup detach_http = [&metrics] {
    metrics.SetHttp({});
    metrics.SetGuard({});
  };
  FrontEnds front_ends{server, *api, http->get(), vllm.get()};
  auto publisher = StartKvEvents(config, name, front_ends.http_port(), events);
  if (!publisher.ok()) return Fail(log, "listen_error", publisher.status(), kExitFailure);
  const absl::Cleanup detach_kv_events = [&metrics] { metrics.SetMissedKvEvents({}); };
  if (*publisher != nullptr) {
    metrics.SetMissedKvEvents([of = publisher->get()] { return of->missed(); });
  }
  std::atomic<bool> drain_asked = false;
  const auto admin_or = StartAdmin(config,
                                   {.model_name = name,
                                    .engine = engine,
                                    .generator = generator,
                                    .clock = clock,
                                    .start = start,
                                    .drain_asked = drain_asked,
                                    .signals = signals},
                                   *keys, log);
  if (!admin_or.ok()) return Fail(log, "listen_error", admin_or.status(), kExitFailure);
  const std::unique_ptr<AdminServer>& admin = *admin_or;
  int metrics_port = 0;
  if (config.metrics != "off") {
    auto port = metrics.Listen(config.metrics);
    if (!port.ok()) return Fail(log, "listen_error", port.status(), kExitFailure);
    metrics_port = *port;
  }
  std::atomic<bool> leaving = false;
  HealthMonitor health(
      [&] {
        engine::EngineStats stats = engine.stats();
        stats.draining |= listener_failed || leaving;
        return stats;
      },
      clock, absl::ToChronoNanoseconds(config.heartbeat_timeout),
      [&](bool serving) {
        front_ends.SetServing(serving);
        metrics.SetServing(serving);
        log.Event(serving ? LogLevel::kInfo : LogLevel::kWarn, "health", {{"serving", serving}});
      });

  const kernels::SharedKvSizes shared = decoder.shared_kv_sizes();
  log.Event(
      LogLevel::kInfo, "sizes",
      {{"architecture", model.config.architecture},
       {"dtype", info.dtype},
       {"weights", engine::WeightStorageName(model.decoder_options.weights)},
       {"draft_weights", config.draft_weights},
       {"kv_dtype", info.kv_dtype},
       {"backend", info.backend},
       {"weight_bytes", uint64_t{decoder.weight_bytes()}},
       {"draft_weight_bytes", uint64_t{decoder.draft_weight_bytes()}},
       {"scratch_bytes", uint64_t{decoder.scratch_bytes()}},
       {"kv_pool_bytes", uint64_t{decoder.kv_pool_bytes()}},
       {"kv_blocks", int64_t{decoder.num_blocks()}},
       {"kv_layers", ToString(decoder.kv_plan())},
       {"tiers", DescribeTiers(model)},
       {"row_cache_bytes", uint64_t{decoder.row_fetcher().cache_bytes() + shared.cache_bytes}},
       {"row_table_bytes", uint64_t{shared.table_bytes}},
       {"kv_staging_bytes", uint64_t{shared.staging_bytes}},
       {"kv_host_bytes", uint64_t{decoder.shared_kv_bytes()}},
       {"pin_seconds", decoder.pin_seconds()},
       {"kv_block_bytes", info.kv_block_bytes},
       {"max_context", int64_t{limits->max_context}},
       {"max_running", config.max_running},
       {"step_tokens", config.step_tokens},
       {"prompt_step_tokens", PromptStepTokens(config)},
       {"queue_requests", config.queue_requests},
       {"queue_tokens", config.queue_tokens},
       {"max_prompt_bytes", limits->max_prompt_bytes},
       {"max_message_bytes", max_message_bytes},
       {"chat_template", model.chat_template.name()}});
  LogRetrieval(log, model);
  log.Event(
      LogLevel::kInfo, "listening",
      {{"grpc", config.listen},
       {"port", int64_t{server.port()}},
       {"tls", !config.tls_cert.empty()},
       {"http", config.http},
       {"http_port", int64_t{front_ends.http_port()}},
       {"admin", config.admin_listen},
       {"admin_port", int64_t{admin == nullptr ? 0 : admin->port()}},
       {"anonymous_prefixes",
        generator_options.anonymous_prefixes == AnonymousPrefixes::kNone ? "none" : "shared"},
       {"kv_events", config.kv_events},
       {"kv_events_port", int64_t{*publisher == nullptr ? 0 : (*publisher)->port()}},
       {"kv_events_replay_port", int64_t{*publisher == nullptr ? 0 : (*publisher)->replay_port()}},
       {"vllm_engine", vllm != nullptr ? "on" : "not in this build"},
       {"metrics", config.metrics},
       {"metrics_port", int64_t{metrics_port}},
       {"start_seconds", std::chrono::duration<double>(clock.Now() - start).count()}});
  // Who waits for the file finds that line.
  log.Flush(std::chrono::seconds(1));
  if (!config.port_file.empty()) {
    if (absl::Status written = WritePortFile(config.port_file, server.port()); !written.ok()) {
      return Fail(log, "config_error", written, kExitUsage);
    }
  }
  return WaitAndDrain(config, log, signals, engine, engine_thread, generator, front_ends,
                      listener_failed, drain_asked, leaving,
                      [&] { Reload(config, log, front_ends, keys->get(), tenants->get(), level); });
}

struct Flags {
  std::map<std::string, std::string> values;
  std::string config_file;
  bool check = false;
  bool print = false;
};

int Serve(const Flags& flags, const BackendMaker& make_backend) {
  const auto environment = [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  };
  std::string config_file = flags.config_file;
  if (config_file.empty()) config_file = environment("WINNOW_CONFIG").value_or("");
  const Reread reread = [flags, environment, config_file] {
    return ResolveConfig(flags.values, environment, config_file);
  };
  const auto resolved = reread();
  absl::Status status = resolved.status();
  if (status.ok() && flags.print) std::cout << PrintConfig(*resolved) << std::flush;
  if (status.ok() && (flags.check || !flags.print)) status = CheckConfig(resolved->config);
  if (status.ok() && flags.check) {
    Log log(resolved->config.log_level, resolved->config.log_format);
    const engine::SteadyClock clock;
    status = LoadTenants(resolved->config, log, clock).status();
  }
  if (!status.ok()) {
    std::cerr << "winnow serve: " << status.message() << std::endl;
    return kExitUsage;
  }
  if (flags.check) {
    for (const std::string& text : UnknownEnvironment(environ)) {
      std::cerr << "winnow serve: warning: " << text << std::endl;
    }
    std::cerr << "The configuration is good." << std::endl;
  }
  if (flags.check || flags.print) return kExitOk;
  return RunServer(resolved->config, make_backend, config_file.empty() ? nullptr : reread);
}

}  // namespace

void AddServeCommand(CLI::App& app, int* exit_code) {
  AddServeCommand(app, exit_code, engine::MakeBackend);
}

void AddServeCommand(CLI::App& app, int* exit_code, BackendMaker make_backend) {
  CLI::App* serve = app.add_subcommand("serve", "Serve a model over gRPC and HTTP");
  auto flags = std::make_shared<Flags>();
  serve->add_option("--config", flags->config_file,
                    "YAML file with options, by their names with underscores [WINNOW_CONFIG]");
  serve->add_flag("--check-config", flags->check,
                  "check the configuration, with the file of --tenants, and exit: 0 or 2");
  serve->add_flag("--print-config", flags->print,
                  "print every option with its value and where it came from, and exit");
  const ServeConfig defaults;
  for (const ServeOption& option : ServeOptions()) {
    const auto store = [flags, name = option.name](const std::string& value) {
      flags->values[name] = value;
    };
    std::string help = Concat(option.help, " [", option.env(), "]");
    if (!option.is_switch() && !option.get(defaults).empty()) {
      Append(help, " [default: ", option.get(defaults), "]");
    }
    if (option.is_switch()) {
      serve->add_flag_function(
          "--" + option.name, [store](int64_t count) { store(count > 0 ? "true" : "false"); },
          help);
    } else {
      serve->add_option_function<std::string>("--" + option.name, store, help)
          ->type_name(option.value)
          ->take_last();
    }
  }
  serve->footer(
      "An option is taken from its flag, else from the environment, else from the file, else it "
      "has its default.\nExit codes: 0 drained after SIGTERM or SIGINT; 1 cannot listen, or not "
      "any more; 2 "
      "configuration; 70 the model failed while serving; 78 the model directory cannot be used; "
      "130, 143 a second signal, or one while the model is loaded.");
  serve->callback([flags, exit_code, make_backend = std::move(make_backend)] {
    *exit_code = Serve(*flags, make_backend);
  });
}

}  // namespace winnow::server
