#include "storage/clock.h"

#include <ctime>
#include <fstream>

namespace winnow::storage {

int64_t SystemClock::NowNs() const {
  timespec now = {};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

std::string SystemClock::BootId() const {
  // Unreadable (no /proc): an empty id, which the store takes for "another boot".
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

}  // namespace winnow::storage
