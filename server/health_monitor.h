// Watches the engine's heartbeat, so that health cannot say SERVING while the engine is stuck or
// dead.
#ifndef WINNOW_SERVER_HEALTH_MONITOR_H_
#define WINNOW_SERVER_HEALTH_MONITOR_H_

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "engine/base/clock.h"
#include "engine/base/mutex.h"
#include "engine/schedule/engine_stats.h"

namespace winnow::server {

// Whether an engine with these stats should be sent work: it has not failed, does not drain, and
// its heartbeat is at most `timeout` old. One that never beat has not started.
bool IsServing(const engine::EngineStats& stats, engine::TimePoint now, engine::Duration timeout);

class HealthMonitor {
 public:
  // Calls `set_serving` before it returns, so that who is told of the server finds it serving, and
  // then on a thread of its own when the answer changes, until it is destroyed. It looks four times
  // in `timeout`, and at least every 100 ms.
  HealthMonitor(std::function<engine::EngineStats()> stats, const engine::Clock& clock,
                engine::Duration timeout, std::function<void(bool serving)> set_serving);
  ~HealthMonitor();

 private:
  void Watch();

  const std::function<engine::EngineStats()> stats_;
  const engine::Clock& clock_;
  const engine::Duration timeout_;
  const std::function<void(bool)> set_serving_;
  bool said_;  // the last answer; the thread's once it runs
  engine::Mutex mutex_;
  engine::CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HEALTH_MONITOR_H_
