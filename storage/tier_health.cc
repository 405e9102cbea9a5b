#include "storage/tier_health.h"

#include <algorithm>

namespace winnow::storage {

TierState TierHealth::Update(int64_t now_ns) {
  if (state_ != TierState::kOk && now_ns >= resume_at_ns_) {
    state_ = TierState::kOk;
    probation_left_ = options_.probation_successes;
    read_errors_.clear();
    write_errors_.clear();
  }
  return state_;
}

void TierHealth::Success() {
  if (state_ != TierState::kOk || probation_left_ == 0) return;
  if (--probation_left_ == 0) pause_ns_ = options_.pause_ns;
}

void TierHealth::Error(int64_t now_ns, std::deque<int64_t>* errors, TierState next) {
  errors->push_back(now_ns);
  while (errors->front() + options_.window_ns <= now_ns) errors->pop_front();
  if (probation_left_ > 0 || errors->size() > options_.errors_max) Trip(now_ns, next);
}

void TierHealth::Trip(int64_t now_ns, TierState next) {
  if (state_ == TierState::kOk && probation_left_ > 0) {
    pause_ns_ = std::min(pause_ns_ * 2, options_.pause_ns_max);
  }
  probation_left_ = 0;
  // Errors of operations in flight when the tier was degraded do not make it better.
  if (static_cast<uint8_t>(next) > static_cast<uint8_t>(state_)) state_ = next;
  resume_at_ns_ = now_ns + pause_ns_;
}

}  // namespace winnow::storage
