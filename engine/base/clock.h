// Time as the engine sees it: monotonic, passed in, so that tests own it.
#ifndef WINNOW_ENGINE_BASE_CLOCK_H_
#define WINNOW_ENGINE_BASE_CLOCK_H_

#include <chrono>

namespace winnow::engine {

using TimePoint = std::chrono::steady_clock::time_point;
using Duration = std::chrono::steady_clock::duration;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint Now() const = 0;
};

class SteadyClock final : public Clock {
 public:
  TimePoint Now() const override { return std::chrono::steady_clock::now(); }
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_BASE_CLOCK_H_
