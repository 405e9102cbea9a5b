// Decides which lines of a flood are logged: so many at once, so many a second after that, and each that is logged says how
// many before it were not. A flood must not fill a disk.
//
// Threads: any.
#ifndef WINNOW_SERVER_LINE_SAMPLER_H_
#define WINNOW_SERVER_LINE_SAMPLER_H_

#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "engine/base/clock.h"
#include "engine/base/mutex.h"

namespace winnow::server {

class LineSampler {
 public:
  // `clock` must outlive this.
  LineSampler(double at_once, double per_second, const engine::Clock& clock);
  LineSampler(const LineSampler&) = delete;
  LineSampler& operator=(const LineSampler&) = delete;

  // Nothing: this line is not logged. Otherwise the lines that were not logged since the last one that was.
  std::optional<uint64_t> Take();

 private:
  const double at_once_, per_second_;
  const engine::Clock& clock_;
  engine::Mutex mutex_;
  double left_ ABSL_GUARDED_BY(mutex_);  // lines that may be logged now
  engine::TimePoint counted_at_ ABSL_GUARDED_BY(mutex_);
  uint64_t not_logged_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_LINE_SAMPLER_H_
