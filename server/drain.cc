#include "server/drain.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <optional>

#include "absl/time/time.h"
#include "server/commands.h"

namespace winnow::server {
namespace {

[[noreturn]] void ExitAtOnce(Log& log, int signal) {
  log.Event(LogLevel::kWarn, "exits_at_once", {{"signal", int64_t{signal}}});
  log.Flush(std::chrono::milliseconds(200));
  _exit(128 + signal);
}

// The time in which routers learn that this server goes: health says NOT_SERVING, and calls that are
// on their way are served as ever. Ends early when the engine fails; a second signal exits.
void ServeWhileLeaving(const ServeConfig& config, Log& log, Signals& signals,
                       const engine::Engine& engine, const std::function<void()>& reload) {
  const auto deadline =
      std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(config.drain_delay);
  while (!engine.stats().failed && std::chrono::steady_clock::now() < deadline) {
    const Signals::Event event = signals.Wait(deadline);
    if (event.signal == SIGHUP) reload();
    if (event.signal == SIGTERM || event.signal == SIGINT) ExitAtOnce(log, event.signal);
  }
}

}  // namespace

int WaitAndDrain(const ServeConfig& config, Log& log, Signals& signals, engine::Engine& engine,
                 std::jthread& engine_thread, Generator& generator, FrontEnds& front_ends,
                 const std::atomic<bool>& listener_failed, const std::atomic<bool>& drain_asked,
                 std::atomic<bool>& leaving, const std::function<void()>& reload) {
  std::optional<int> asked_by;  // the signal, or 0: an administrator
  for (;;) {
    const Signals::Event event = signals.Wait();
    if (event.signal == SIGHUP) {
      reload();
    } else if (event.signal != 0 || (event.notified && drain_asked)) {
      asked_by = event.signal;
      break;
    } else if (event.notified && (engine.stats().failed || listener_failed)) {
      break;
    }
  }
  const auto tell = [&] {
    log.Event(LogLevel::kInfo, "drain_begins",
              {{"by", *asked_by != 0 ? "signal" : "admin"},
               {"signal", int64_t{*asked_by}},
               {"calls", static_cast<uint64_t>(generator.calls())},
               {"delay_seconds", absl::ToDoubleSeconds(config.drain_delay)},
               {"grace_seconds", absl::ToDoubleSeconds(config.drain_grace)}});
  };
  const bool delayed = asked_by.has_value() && config.drain_delay > absl::ZeroDuration();
  if (delayed) {
    leaving = true;
    tell();
    ServeWhileLeaving(config, log, signals, engine, reload);
  }
  // Calls are refused before health and the log say so.
  engine.BeginDrain();
  front_ends.BeginDrain();
  if (asked_by.has_value() && !delayed) tell();
  const bool failed = engine.stats().failed;

  std::atomic<bool> is_idle = false;
  std::thread idle([&] {
    if (!generator.WaitIdle(failed ? absl::Seconds(2) : config.drain_grace)) {
      engine_thread.request_stop();
      engine.Wake();
      generator.WaitIdle(absl::Seconds(2));
    }
    is_idle = true;
    signals.Notify();
  });
  for (;;) {
    const Signals::Event event = signals.Wait();
    if (event.signal == SIGTERM || event.signal == SIGINT) ExitAtOnce(log, event.signal);
    if (is_idle) break;  // an engine that fails meanwhile notifies, too
  }
  idle.join();
  engine_thread.request_stop();
  engine.Wake();
  engine_thread.join();
  front_ends.grpc.Shutdown(absl::Milliseconds(500));
  log.Event(LogLevel::kInfo, "drained", {{"calls_cut", static_cast<uint64_t>(generator.calls())}});
  // It may have failed while it drained, too.
  if (engine.stats().failed) return kExitSoftware;
  return listener_failed ? kExitFailure : kExitOk;
}

}  // namespace winnow::server
