#ifndef WINNOW_TESTS_UNIT_SERVER_MOVABLE_CLOCK_H_
#define WINNOW_TESTS_UNIT_SERVER_MOVABLE_CLOCK_H_

#include <atomic>
#include <chrono>
#include <optional>

#include "engine/base/clock.h"

namespace winnow::server {

// The machine's, and what the test adds: a time-out is over when the test says so, however slow the
// machine is.
class MovableClock final : public engine::Clock {
 public:
  engine::TimePoint Now() const override {
    return stands_at_.value_or(std::chrono::steady_clock::now()) + engine::Duration(added_.load());
  }
  void Advance(engine::Duration by) { added_ += by.count(); }
  // Stops it: it moves by Advance alone then. Called before other threads read it.
  void Stand() { stands_at_ = std::chrono::steady_clock::now(); }

 private:
  std::atomic<engine::Duration::rep> added_ = 0;
  std::optional<engine::TimePoint> stands_at_;
};

}  // namespace winnow::server

#endif  // WINNOW_TESTS_UNIT_SERVER_MOVABLE_CLOCK_H_
