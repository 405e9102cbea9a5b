// When a tier stops being used, and when it is tried again. Pure: time is an argument.
//
//   ok --(write errors past the budget, or no space)--> degraded: reads only
//   ok or degraded --(read errors past the budget)--> off
//   degraded or off --(after a pause)--> ok, on probation: the next error sends it back, for a
//   pause twice as long (to a limit); enough successes end the probation
#ifndef WINNOW_STORAGE_TIER_HEALTH_H_
#define WINNOW_STORAGE_TIER_HEALTH_H_

#include <cstdint>
#include <deque>

#include "storage/block_store.h"

namespace winnow::storage {

struct TierHealthOptions {
  uint32_t errors_max = 8;  // in the window; one more changes the state
  int64_t window_ns = int64_t{60} * 1'000'000'000;
  int64_t pause_ns = int64_t{5} * 1'000'000'000;
  int64_t pause_ns_max = int64_t{300} * 1'000'000'000;
  uint32_t probation_successes = 8;
};

class TierHealth {
 public:
  explicit TierHealth(const TierHealthOptions& options)
      : options_(options), pause_ns_(options.pause_ns) {}

  // The state at this time; ends a pause that is over.
  TierState Update(int64_t now_ns);
  TierState state() const { return state_; }

  void ReadError(int64_t now_ns) { Error(now_ns, &read_errors_, TierState::kOff); }
  void WriteError(int64_t now_ns) { Error(now_ns, &write_errors_, TierState::kDegraded); }
  void NoSpace(int64_t now_ns) { Trip(now_ns, TierState::kDegraded); }
  void Success();

 private:
  void Error(int64_t now_ns, std::deque<int64_t>* errors, TierState next);
  void Trip(int64_t now_ns, TierState next);

  const TierHealthOptions options_;
  TierState state_ = TierState::kOk;
  std::deque<int64_t> read_errors_;
  std::deque<int64_t> write_errors_;
  int64_t pause_ns_;
  int64_t resume_at_ns_ = 0;
  uint32_t probation_left_ = 0;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_TIER_HEALTH_H_
