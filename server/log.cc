#include "server/log.h"

#include <grpc/support/log.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "google/protobuf/stubs/logging.h"
#include "kernels/check.h"
#include "server/line_queue.h"
#include "server/line_sampler.h"
#include "server/strings.h"
#include "server/utf8.h"

namespace winnow::server {
namespace {

constexpr size_t kMaxValueBytes = 2048;
// Some 2,000 lines: what a reader that comes back after a pause still gets.
constexpr size_t kQueueBytes = size_t{1} << 20;
// Lines of gRPC's above debug: so many at once, and in a second.
constexpr double kGrpcLines = 50;
constexpr double kGrpcLinesPerSecond = 5;

spdlog::level::level_enum SpdlogLevel(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

std::string_view LevelName(LogLevel level) {
  static constexpr std::string_view kNames[] = {"debug", "info", "warn", "error"};
  return kNames[static_cast<int>(level)];
}

// A quoted string that is valid both as JSON and for readers of key=value: control characters are
// escaped, also those past ASCII that terminals obey (C1) or that end lines for some readers.
std::string Quote(std::string_view text) {
  std::string out = "\"";
  const std::string clean = CleanUtf8(text, kMaxValueBytes);
  for (size_t i = 0; i < clean.size(); ++i) {
    const auto byte = static_cast<unsigned char>(clean[i]);
    const auto next = [&](size_t k) {
      return i + k < clean.size() ? static_cast<unsigned char>(clean[i + k]) : 0;
    };
    if (byte == '"' || byte == '\\') {
      out += '\\';
      out += clean[i];
    } else if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppendFormat(&out, "\\u%04x", byte);
    } else if (byte == 0xc2 && next(1) >= 0x80 && next(1) <= 0x9f) {
      absl::StrAppendFormat(&out, "\\u%04x", next(1));
      ++i;
    } else if (byte == 0xe2 && next(1) == 0x80 && (next(2) == 0xa8 || next(2) == 0xa9)) {
      absl::StrAppendFormat(&out, "\\u20%02x", next(2) - 0x80);
      i += 2;
    } else {
      out += clean[i];
    }
  }
  return out + "\"";
}

bool IsPlain(std::string_view text) {
  return !text.empty() && text.size() <= kMaxValueBytes &&
         text.find_first_not_of(
             "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
             "_-./:,[]@+%") == text.npos;
}

std::string FormatValue(const LogField& field, bool json) {
  struct Visitor {
    bool json;
    std::string operator()(std::string_view text) const {
      return !json && IsPlain(text) ? std::string(text) : Quote(text);
    }
    std::string operator()(int64_t value) const { return Concat(value); }
    std::string operator()(uint64_t value) const { return Concat(value); }
    std::string operator()(bool value) const { return value ? "true" : "false"; }
    std::string operator()(double value) const {
      if (!std::isfinite(value)) return json ? "null" : Concat(value);
      return absl::StrFormat("%.6g", value);
    }
  };
  return std::visit(Visitor{json}, field.value);
}

std::string FormatLine(bool json, LogLevel level, std::string_view event,
                       std::initializer_list<LogField> fields) {
  const std::string time =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", absl::Now(), absl::UTCTimeZone());
  std::string line;
  if (json) {
    line = Concat("{\"time\":\"", time, "\",\"level\":\"", LevelName(level),
                  "\",\"event\":", Quote(event));
    for (const LogField& field : fields) {
      Append(line, ",\"", field.key, "\":", FormatValue(field, true));
    }
    line += "}";
  } else {
    line = Concat("time=", time, " level=", LevelName(level), " event=", event);
    for (const LogField& field : fields) {
      Append(line, " ", field.key, "=", FormatValue(field, false));
    }
  }
  return line;
}

// What spdlog's default logger is given by libraries that use it becomes an event.
class ForwardingSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit ForwardingSink(Log& log) : log_(log) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    const LogLevel level = message.level >= spdlog::level::err    ? LogLevel::kError
                           : message.level == spdlog::level::warn ? LogLevel::kWarn
                           : message.level == spdlog::level::info ? LogLevel::kInfo
                                                                  : LogLevel::kDebug;
    log_.Event(level, "message",
               {{"text", std::string_view(message.payload.data(), message.payload.size())}});
  }
  void flush_() override {}

  Log& log_;
};

class QueueSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit QueueSink(std::shared_ptr<LineQueue> queue) : queue_(std::move(queue)) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    queue_->Push(std::string(line.data(), line.size()));
  }
  void flush_() override {}

  const std::shared_ptr<LineQueue> queue_;
};

// gRPC and Protobuf take a plain function, so the log they write to is the process's.
std::atomic<Log*> process_log = nullptr;

void LogGrpc(gpr_log_func_args* args) {
  Log* log = process_log.load();
  if (log == nullptr) return;
  // gRPC calls expected things errors (a client that goes away): what matters to an operator comes
  // back to us as a status.
  const LogLevel level =
      args->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarn : LogLevel::kDebug;
  log->GrpcEvent(level, args->message);
}

void LogProtobuf(google::protobuf::LogLevel, const char*, int, const std::string& message) {
  // Protobuf names the field of a bad string; it never quotes the text.
  if (Log* log = process_log.load()) log->Event(LogLevel::kDebug, "protobuf", {{"text", message}});
}

}  // namespace

Log::Log(std::string_view level, std::string_view format, std::shared_ptr<spdlog::sinks::sink> sink)
    : grpc_lines_(std::make_unique<LineSampler>(kGrpcLines, kGrpcLinesPerSecond, clock_)),
      json_(format == "json") {
  if (sink == nullptr) {
    queue_ =
        std::make_shared<LineQueue>(STDERR_FILENO, kQueueBytes, [json = json_](uint64_t lines) {
          return FormatLine(json, LogLevel::kWarn, "log_dropped_lines", {{"lines", lines}});
        });
    sink = std::make_shared<QueueSink>(queue_);
  }
  sink->set_pattern("%v");
  logger_ = std::make_shared<spdlog::logger>("winnow", std::move(sink));
  logger_->set_level(spdlog::level::from_str(std::string(level)));
  logger_->flush_on(spdlog::level::debug);
}

Log::~Log() {
  if (!took_over_) return;
  gpr_set_log_function(nullptr);
  google::protobuf::SetLogHandler(nullptr);
  process_log.store(nullptr);
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("", std::make_shared<spdlog::sinks::stderr_sink_mt>()));
}

std::optional<std::string> Log::SetLevel(std::string_view level) {
  for (const LogLevel known :
       {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarn, LogLevel::kError}) {
    if (level != LevelName(known)) continue;
    std::string previous = this->level();
    logger_->set_level(SpdlogLevel(known));
    return previous;
  }
  return std::nullopt;
}

std::string Log::level() const {
  switch (logger_->level()) {
    case spdlog::level::debug:
      return "debug";
    case spdlog::level::warn:
      return "warn";
    case spdlog::level::err:
      return "error";
    default:
      return "info";
  }
}

uint64_t Log::dropped_lines() const { return queue_ == nullptr ? 0 : queue_->dropped(); }

void Log::Flush(std::chrono::nanoseconds limit) {
  if (queue_ != nullptr) queue_->Flush(limit);
}

void Log::Event(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) {
  const spdlog::level::level_enum spdlog_level = SpdlogLevel(level);
  if (!logger_->should_log(spdlog_level)) return;
  const std::string line = FormatLine(json_, level, event, fields);
  logger_->log(spdlog_level, spdlog::string_view_t(line.data(), line.size()));
}

void Log::GrpcEvent(LogLevel level, std::string_view text) {
  if (level == LogLevel::kDebug) return Event(level, "grpc", {{"text", text}});
  if (const std::optional<uint64_t> not_logged = grpc_lines_->Take()) {
    Event(level, "grpc", {{"text", text}, {"not_logged", *not_logged}});
  }
}

void Log::TakeOverLibraries() {
  Log* expected = nullptr;
  WINNOW_CHECK(process_log.compare_exchange_strong(expected, this));
  took_over_ = true;
  auto forward = std::make_shared<spdlog::logger>("", std::make_shared<ForwardingSink>(*this));
  forward->set_level(logger_->level());
  spdlog::set_default_logger(std::move(forward));
  gpr_set_log_function(LogGrpc);
  google::protobuf::SetLogHandler(LogProtobuf);
}

}  // namespace winnow::server
