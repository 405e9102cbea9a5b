#include "server/health_monitor.h"

#include <algorithm>
#include <chrono>

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
      said_(IsServing(stats_(), clock_.Now(), timeout_)) {
  set_serving_(said_);
  thread_ = std::thread([this] { Watch(); });
}

HealthMonitor::~HealthMonitor() {
  {
    const engine::MutexLock lock(mutex_);
    stopping_ = true;
  }
  stop_.NotifyAll();
  thread_.join();
}

void HealthMonitor::Watch() {
  const engine::Duration pause =
      std::min<engine::Duration>(std::chrono::milliseconds(100), timeout_ / 4);
  const engine::MutexLock lock(mutex_);
  // The last round comes after `stopping_` is set, and tells of changes since the round before.
  for (bool last = false; !last;) {
    last = stopping_;
    const bool serving = IsServing(stats_(), clock_.Now(), timeout_);
    if (serving != said_) set_serving_(serving);
    said_ = serving;
    // Not absl's waits: they end by the wall clock, and sleep for a day where that is set back a day.
    const auto until = std::chrono::steady_clock::now() + pause;
    while (!stopping_ && stop_.WaitUntil(mutex_, until)) {
    }
  }
}

}  // namespace winnow::server
