#include "server/health_monitor.h"

#include <algorithm>
#include <optional>

#include "absl/time/time.h"

namespace winnow::server {

bool IsServing(const engine::EngineStats& stats, engine::TimePoint now, engine::Duration timeout) {
  if (stats.failed || stats.draining) return false;
  return stats.heartbeat != engine::TimePoint{} && now - stats.heartbeat <= timeout;
}

HealthMonitor::HealthMonitor(std::function<engine::EngineStats()> stats, const engine::Clock& clock,
                             engine::Duration timeout, std::function<void(bool)> set_serving)
    : stats_(std::move(stats)),
      clock_(clock),
      timeout_(timeout),
      set_serving_(std::move(set_serving)),
      thread_([this] { Watch(); }) {}

HealthMonitor::~HealthMonitor() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void HealthMonitor::Watch() {
  const absl::Duration pause = std::min(absl::Milliseconds(100), absl::FromChrono(timeout_) / 4);
  std::optional<bool> said;
  absl::MutexLock lock(&mutex_);
  while (!stopping_) {
    const bool serving = IsServing(stats_(), clock_.Now(), timeout_);
    if (serving != said) set_serving_(serving);
    said = serving;
    mutex_.AwaitWithTimeout(absl::Condition(&stopping_), pause);
  }
}

}  // namespace winnow::server
