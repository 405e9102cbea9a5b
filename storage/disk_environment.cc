#include "storage/disk_environment.h"

#include <utility>

namespace winnow::storage {

DiskEnvironment::DiskEnvironment(DiskStoreOptions options, const Clock* clock,
                                 std::shared_ptr<Opening> opening)
    : health(options.health),
      options_(std::move(options)),
      clock_(clock),
      opening_(std::move(opening)) {
  stats.capacity_bytes = options_.capacity_bytes;
}

void DiskEnvironment::SetRing(std::unique_ptr<IoEngine> engine, bool direct) {
  ring_ = std::make_unique<Ring>(std::move(engine), clock_);
  direct_ = direct;
}

uint64_t DiskEnvironment::StoreSeconds() const {
  return base_s_ + static_cast<uint64_t>((clock_->NowNs() - base_ns_) / 1'000'000'000);
}

void DiskEnvironment::SetStoreSeconds(uint64_t store_s) {
  base_s_ = store_s;
  base_ns_ = clock_->NowNs();
}

void DiskEnvironment::Log(const std::string& line) const {
  const MutexLock lock(opening_->mutex);
  if (options_.log && !opening_->abandoned) options_.log(line);
}

void DiskEnvironment::Warn(const std::string& line) const {
  if (!options_.warn) return Log(line);
  const MutexLock lock(opening_->mutex);
  if (!opening_->abandoned) options_.warn(line);
}

}  // namespace winnow::storage
