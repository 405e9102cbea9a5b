// /metrics: the engine's counters, pulled at each scrape, and histograms of what it reports.
//
// Names have the prefix winnow_, base units, and few labels with values that are known at the
// start, so that every series is there at zero before the first request. The gen_ai_server_*
// histograms are the OpenTelemetry conventions' names for the same observations.
//
// Life: made before the engine, which reports to it as its observer; Attach when there is an
// engine, Detach before it is destroyed. Threads: any.
#ifndef WINNOW_SERVER_METRICS_H_
#define WINNOW_SERVER_METRICS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "engine/schedule/engine.h"
#include "engine/schedule/engine_stats.h"
#include "server/connection_guard.h"

namespace winnow::server {

struct MetricsInfo {
  std::string version, model, dtype, kv_dtype, backend;
  int64_t kv_block_bytes = 0;
  // Of each index beside the KV pool, by name ("lsh:128", "int4").
  std::vector<std::pair<std::string, int64_t>> index_bytes = {};
  int64_t retrieval_from = 0;  // tokens; past the context: retrieval never wins
  int32_t block_tokens = 0;    // of a KV block
  int64_t kv_row_bytes = 0;    // of a KV entry
};

// The HTTP port's connections (http_server.h has its own words for the same).
struct HttpCounts {
  int64_t connections = 0;
  uint64_t accepted = 0, refused = 0, evicted = 0, timed_out = 0, accept_errors = 0;
};

// Kinds of structured_output, as the API names them.
enum class Constraint : uint8_t {
  kJsonSchema,
  kJsonObject,
  kRegex,
  kChoice,
  kGrammar,
  kStructuralTag,  // calls of functions, too
};
inline constexpr int kNumConstraints = 6;

class Metrics : public engine::EngineObserver {
 public:
  // `clock` must outlive the metrics.
  Metrics(const MetricsInfo& info, const engine::Clock& clock);
  ~Metrics() override;

  void Attach(const engine::Engine& engine);
  void Detach();
  // The same for the HTTP port; an empty function detaches.
  void SetHttp(std::function<HttpCounts()> counts);
  // The same for batches of KV events that were not published.
  void SetMissedKvEvents(std::function<uint64_t()> missed);

  // The same for connections to the gRPC port (connection_guard.h).
  void SetGuard(std::function<GuardStats()> stats);

  // A generation ended with this, whichever entry point it came through.
  void CountRequest(const absl::Status& status);
  // The constraint of a valid request was compiled, or could not be, in this time.
  void CountConstraint(Constraint kind, engine::Duration compiled_in);
  // Where the number of lines that the log dropped comes from; before Listen.
  void SetDroppedLines(std::function<uint64_t()> dropped_lines);
  // When the first of the server's certificates expires, in Unix seconds; before Listen. Called at scrapes,
  // on any thread; without it the series is 0.
  void SetCertificateExpiry(std::function<int64_t()> unix_seconds);
  // What the health service says.
  void SetServing(bool serving);

  void OnFirstToken(const engine::Request& request, engine::Duration since_arrival) override;
  void OnNextToken(const engine::Request& request, engine::Duration since_previous_token) override;
  void OnFinished(const engine::Request& request, engine::FinishReason reason,
                  const engine::Usage& usage) override;
  void OnStep(const engine::StepObservation& step) override;

  // Serves /metrics on HOST:PORT until destruction; returns the port. Unavailable: cannot listen.
  absl::StatusOr<int> Listen(const std::string& address);

  // What /metrics answers, in Prometheus' text format.
  std::string Text() const;
  // The same, made for routers that ask twenty times a second: gauges and the engine's counters are of now,
  // histograms and outcomes of requests at most `kPageSeconds` old.
  std::string Page() const;
  static constexpr double kPageSeconds = 1;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_METRICS_H_
