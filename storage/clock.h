// Time as storage sees it: passed in, so that tests own it, and never the wall clock, which jumps.
#ifndef WINNOW_STORAGE_CLOCK_H_
#define WINNOW_STORAGE_CLOCK_H_

#include <cstdint>
#include <string>

namespace winnow::storage {

class Clock {
 public:
  virtual ~Clock() = default;
  // Nanoseconds since the machine booted, sleep included; never goes back.
  virtual int64_t NowNs() const = 0;
  // Which boot that is: times of two boots cannot be compared.
  virtual std::string BootId() const = 0;
};

// CLOCK_BOOTTIME and the kernel's boot id.
class SystemClock final : public Clock {
 public:
  int64_t NowNs() const override;
  std::string BootId() const override;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_CLOCK_H_
