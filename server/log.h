// Structured logs: one line for each event, to standard error, as key=value or as JSON. Every value
// is escaped, so that nothing a client sends can begin a line of its own. Prompts and generated
// text are never logged, at any level: callers pass ids, counts and times.
//
// Threads: Event may be called from any thread and never waits: lines for standard error are queued, and
// dropped and counted where nobody reads them.
#ifndef WINNOW_SERVER_LOG_H_
#define WINNOW_SERVER_LOG_H_

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "engine/base/clock.h"

namespace spdlog {
class logger;
namespace sinks {
class sink;
}
}  // namespace spdlog

namespace winnow::server {

class LineQueue;
class LineSampler;

enum class LogLevel { kDebug, kInfo, kWarn, kError };

struct LogField {
  std::string_view key;  // a literal: [a-z0-9_]+
  std::variant<std::string_view, int64_t, uint64_t, double, bool> value;
};

class Log {
 public:
  // `level` and `format` as --log-level and --log-format take them. `sink`: where lines go; null is
  // standard error.
  Log(std::string_view level, std::string_view format,
      std::shared_ptr<spdlog::sinks::sink> sink = nullptr);
  ~Log();
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  // `event` is a literal that names the kind of line.
  void Event(LogLevel level, std::string_view event, std::initializer_list<LogField> fields = {});

  // Logs a line of gRPC's, which has one for each compressed message that it refuses: a flood of them is sampled.
  void GrpcEvent(LogLevel level, std::string_view text);

  // As --log-level takes it; any thread. The level that it was; nothing: there is no such level, and it stays.
  std::optional<std::string> SetLevel(std::string_view level);
  std::string level() const;

  // Lines that nobody read in time, since the start.
  uint64_t dropped_lines() const;
  // Until what was logged is written, at most this long. For a process that ends without destructors.
  void Flush(std::chrono::nanoseconds limit);

  // From now on what libraries say (spdlog's default logger, gRPC, Protobuf) comes out as events of
  // this log. For the process's one log; it must live until the process ends or the call is undone
  // by its destructor.
  void TakeOverLibraries();

 private:
  const engine::SteadyClock clock_;
  const std::unique_ptr<LineSampler> grpc_lines_;
  std::shared_ptr<LineQueue> queue_;  // null where another sink was given
  std::shared_ptr<spdlog::logger> logger_;
  const bool json_;
  bool took_over_ = false;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_LOG_H_
