#include "server/line_sampler.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace winnow::server {

LineSampler::LineSampler(double at_once, double per_second, const engine::Clock& clock)
    : at_once_(at_once),
      per_second_(per_second),
      clock_(clock),
      left_(at_once),
      counted_at_(clock.Now()) {}

std::optional<uint64_t> LineSampler::Take() {
  const engine::MutexLock lock(mutex_);
  const engine::TimePoint now = clock_.Now();
  const double seconds = std::chrono::duration<double>(now - counted_at_).count();
  left_ = std::min(at_once_, left_ + seconds * per_second_);
  counted_at_ = now;
  if (left_ < 1) {
    ++not_logged_;
    return std::nullopt;
  }
  left_ -= 1;
  return std::exchange(not_logged_, 0);
}

}  // namespace winnow::server
