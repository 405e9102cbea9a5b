// Parts of `winnow serve` that are started from its configuration, each once, by RunServer.
#ifndef WINNOW_SERVER_SERVE_PARTS_H_
#define WINNOW_SERVER_SERVE_PARTS_H_

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "engine/kv/kv_event_log.h"
#include "engine/schedule/engine.h"
#include "server/admin_server.h"
#include "server/api_keys.h"
#include "server/config.h"
#include "server/generator.h"
#include "server/http/api.h"
#include "server/http/http_server.h"
#include "server/kv_event_publisher.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/prefix_file.h"
#include "server/signals.h"

namespace winnow::server {

// Null where --http is off.
absl::StatusOr<std::unique_ptr<HttpServer>> StartHttp(
    const ServeConfig& config, int64_t max_message_bytes, HttpApi& api, Log& log,
    const engine::Clock& clock, Metrics& metrics,
    std::function<void(const absl::Status&)> on_listener_failure);

// Null where they go to no ZMQ socket.
absl::StatusOr<std::unique_ptr<KvEventPublisher>> StartKvEvents(const ServeConfig& config,
                                                                const std::string& model_name,
                                                                int http_port,
                                                                const engine::KvEventLog* events);

// The answers and acts of AdminService. All outlive the server that it gives; null where --admin-listen is off.
struct AdminSubjects {
  const std::string& model_name;
  const engine::Engine& engine;
  const Generator& generator;
  const engine::Clock& clock;
  engine::TimePoint start;
  std::atomic<bool>& drain_asked;  // set by Drain, and then `signals` are notified
  Signals& signals;
};
absl::StatusOr<std::unique_ptr<AdminServer>> StartAdmin(const ServeConfig& config,
                                                        const AdminSubjects& subjects,
                                                        const std::shared_ptr<ApiKeys>& keys,
                                                        Log& log);

// Prefixes that an earlier process has named, from beside the store; nullopt: there is no file for them.
std::optional<PrefixFile> RestorePrefixes(const ServeConfig& config, engine::Engine& engine,
                                          Log& log);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_SERVE_PARTS_H_
