#include "server/vllm/load_meter.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace winnow::server {
namespace {

// Shorter intervals would say more of single steps than of the load.
constexpr engine::Duration kInterval = std::chrono::seconds(1);

double Ratio(double part, double whole) { return whole > 0 ? part / whole : 0; }

}  // namespace

LoadMeter::LoadMeter(std::function<engine::EngineStats()> stats, const engine::Clock& clock,
                     int32_t block_tokens, int32_t max_running)
    : stats_(std::move(stats)),
      clock_(clock),
      block_tokens_(block_tokens),
      max_running_(max_running),
      since_(clock.Now()) {}

Load LoadMeter::Now() {
  const engine::EngineStats stats = stats_();
  const engine::TimePoint now = clock_.Now();
  Load load;
  load.running = stats.running;
  load.waiting = stats.waiting;
  load.max_running = max_running_;
  load.waiting_tokens = stats.waiting_tokens;
  load.used_tokens = int64_t{stats.blocks_used} * block_tokens_;
  load.total_tokens = int64_t{stats.blocks_total} * block_tokens_;
  load.usage = Ratio(stats.blocks_used, stats.blocks_total);
  load.utilization = Ratio(stats.running, max_running_);
  load.hit_rate =
      Ratio(static_cast<double>(stats.cached_tokens), static_cast<double>(stats.prompt_tokens));
  if (stats.running + stats.waiting > 0) {
    load.silence = std::max(engine::Duration::zero(), now - stats.heartbeat);
  }
  absl::MutexLock lock(&mutex_);
  if (now - since_ >= kInterval) {
    tokens_per_second_ = static_cast<double>(stats.generated_tokens - generated_) /
                         std::chrono::duration<double>(now - since_).count();
    generated_ = stats.generated_tokens;
    since_ = now;
  }
  load.tokens_per_second = tokens_per_second_;
  return load;
}

}  // namespace winnow::server
