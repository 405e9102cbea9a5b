#include "server/serve_parts.h"

#include <chrono>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "kernels/check.h"
#include "server/strings.h"
#include "server/version.h"
#include "winnow/v1/admin.pb.h"

namespace winnow::server {
namespace {

HttpServerOptions HttpOptionsOf(const ServeConfig& config, int64_t max_message_bytes) {
  HttpServerOptions options;
  const absl::StatusOr<HostPort> address = ParseHostPort(config.http);  // CheckConfig has, too
  WINNOW_CHECK(address.ok());
  options.host = address->host;
  options.port = address->port;
  options.threads = static_cast<int>(config.http_threads);
  options.max_connections = static_cast<size_t>(config.http_connections);
  options.max_head_bytes = static_cast<size_t>(config.max_metadata_bytes);
  options.max_body_bytes = static_cast<size_t>(max_message_bytes);
  // As much as gRPC lets requests in transit take.
  options.max_receiving_bytes = static_cast<size_t>(max_message_bytes) * 16 + (size_t{256} << 20);
  options.idle_timeout = absl::ToChronoNanoseconds(config.http_idle_timeout);
  options.read_timeout = absl::ToChronoNanoseconds(config.http_read_timeout);
  options.write_timeout = absl::ToChronoNanoseconds(config.slow_reader_timeout);
  options.ping_interval = absl::ToChronoNanoseconds(config.http_ping_interval);
  options.tls_cert = config.tls_cert;
  options.tls_key = config.tls_key;
  options.tls_client_ca = config.tls_client_ca;
  return options;
}

HttpCounts CountsOf(const HttpServerStats& stats) {
  return {.connections = stats.connections,
          .accepted = stats.accepted,
          .refused = stats.refused,
          .evicted = stats.evicted,
          .timed_out = stats.timed_out,
          .accept_errors = stats.accept_errors};
}

// The answer of AdminService.GetState.
void DescribeState(const engine::EngineStats& stats, engine::TimePoint now,
                   v1::GetStateResponse& out) {
  out.set_draining(stats.draining);
  out.set_failed(stats.failed);
  out.set_heartbeat_age_seconds(std::chrono::duration<double>(now - stats.heartbeat).count());
  out.set_running(stats.running);
  out.set_paused(stats.paused);
  out.set_waiting(stats.waiting);
  out.set_waiting_tokens(stats.waiting_tokens);
  out.set_kv_blocks(stats.blocks_total);
  out.set_kv_blocks_used(stats.blocks_used);
  out.set_kv_blocks_idle(stats.blocks_idle);
  out.set_named_prefixes(stats.named_prefixes);
  out.set_pinned_prefixes(stats.pinned_prefixes);
  if (!stats.tiered) return;
  v1::StoreState& store = *out.mutable_store();
  store.set_state(std::string(storage::TierStateName(stats.store.state)));
  store.set_blocks(stats.store.blocks);
  store.set_used_bytes(stats.store.used_bytes);
  store.set_capacity_bytes(stats.store.capacity_bytes);
  store.set_pinned_bytes(stats.store.pinned_bytes);
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> StartHttp(
    const ServeConfig& config, int64_t max_message_bytes, HttpApi& api, Log& log,
    const engine::Clock& clock, Metrics& metrics,
    std::function<void(const absl::Status&)> on_listener_failure) {
  if (config.http == "off") return nullptr;
  auto http = HttpServer::Start(HttpOptionsOf(config, max_message_bytes), api, log, clock,
                                std::move(on_listener_failure));
  if (http.ok()) {
    metrics.SetHttp([server = http->get()] { return CountsOf(server->stats()); });
  }
  return http;
}

absl::StatusOr<std::unique_ptr<KvEventPublisher>> StartKvEvents(const ServeConfig& config,
                                                                const std::string& model_name,
                                                                int http_port,
                                                                const engine::KvEventLog* events) {
  if (config.kv_events_zmq == "off") return nullptr;
  WINNOW_CHECK(events != nullptr);  // CheckConfig
  KvEventPublisher::Options options;
  options.address = config.kv_events_zmq;
  if (config.kv_events_replay != "off") options.replay = config.kv_events_replay;
  options.topic = config.kv_events_topic;
  if (options.topic.empty()) {
    const std::string host = config.http.substr(0, config.http.rfind(':'));
    options.topic = Concat("kv@", host, ":", http_port, "@", model_name);
  }
  return KvEventPublisher::Start(options, *events);
}

absl::StatusOr<std::unique_ptr<AdminServer>> StartAdmin(const ServeConfig& config,
                                                        const AdminSubjects& subjects,
                                                        const std::shared_ptr<ApiKeys>& keys,
                                                        Log& log) {
  if (config.admin_listen == "off") return nullptr;
  const AdminHooks hooks = {
      .drain =
          [subjects] {
            subjects.drain_asked = true;
            subjects.signals.Notify();
            return static_cast<int64_t>(subjects.generator.calls());
          },
      .describe =
          [subjects](v1::GetStateResponse& out) {
            const engine::TimePoint now = subjects.clock.Now();
            out.set_version(kVersion);
            out.set_model(subjects.model_name);
            out.set_uptime_seconds(std::chrono::duration<double>(now - subjects.start).count());
            out.set_calls(static_cast<int64_t>(subjects.generator.calls()));
            DescribeState(subjects.engine.stats(), now, out);
          }};
  return AdminServer::Start(config.admin_listen, hooks, keys, log);
}

std::optional<PrefixFile> RestorePrefixes(const ServeConfig& config, engine::Engine& engine,
                                          Log& log) {
  const std::optional<engine::Digest> model = engine.prefix_model();
  if (!model.has_value() || config.disk_bytes == 0) return std::nullopt;
  PrefixFile file((std::filesystem::path(config.store_dir) / "prefixes").string(), *model);
  std::string problem;
  std::vector<engine::SavedPrefix> saved = file.Load(&problem);
  if (!problem.empty()) {
    log.Event(LogLevel::kWarn, "prefixes",
              {{"text", "named prefixes are forgotten, and their file is put aside"},
               {"message", problem}});
  }
  const auto names = static_cast<uint64_t>(saved.size());
  engine.RestorePrefixes(std::move(saved));
  if (names > 0) log.Event(LogLevel::kInfo, "prefixes", {{"named", names}});
  return file;
}

}  // namespace winnow::server
