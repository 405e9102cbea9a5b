// How busy the engine is, in the numbers that routers choose by: EngineStats as levels, and what it
// generates in a second, which is measured between calls.
#ifndef WINNOW_SERVER_VLLM_LOAD_METER_H_
#define WINNOW_SERVER_VLLM_LOAD_METER_H_

#include <cstdint>
#include <functional>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "engine/base/clock.h"
#include "engine/schedule/engine_stats.h"

namespace winnow::server {

struct Load {
  int32_t running = 0, waiting = 0, max_running = 0;
  // Prompt tokens of those that wait. What a cache will have of them shows when they are admitted,
  // so all count.
  int64_t waiting_tokens = 0;
  // The KV pool's; idle blocks, which anyone may take, count as free.
  int64_t used_tokens = 0, total_tokens = 0;
  double usage = 0;        // used / total
  double utilization = 0;  // running / max_running
  double hit_rate = 0;     // of prompt tokens since the start, those not computed again
  double tokens_per_second = 0;
  // Since the engine began its last step; absent while it has nothing to do.
  std::optional<engine::Duration> silence;
};

// Any thread.
class LoadMeter {
 public:
  // `clock` must outlive the meter.
  LoadMeter(std::function<engine::EngineStats()> stats, const engine::Clock& clock,
            int32_t block_tokens, int32_t max_running);

  Load Now();

 private:
  const std::function<engine::EngineStats()> stats_;
  const engine::Clock& clock_;
  const int32_t block_tokens_, max_running_;

  absl::Mutex mutex_;
  // The beginning of the interval that the rate is of, and the rate of the one before it.
  engine::TimePoint since_ ABSL_GUARDED_BY(mutex_);
  uint64_t generated_ ABSL_GUARDED_BY(mutex_) = 0;
  double tokens_per_second_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_VLLM_LOAD_METER_H_
