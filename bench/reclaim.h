// `winnow bench reclaim`: how long a full store keeps its caller, while it makes room.
#ifndef WINNOW_BENCH_RECLAIM_H_
#define WINNOW_BENCH_RECLAIM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace winnow::bench {

struct ReclaimBenchOptions {
  std::string directory;  // of a store that is made for this, and deleted
  uint64_t entries = 1'000'000;
  uint64_t segment_bytes = uint64_t{64} << 20;
  uint32_t segments = 8;    // reclaimed while it is measured
  uint32_t in_flight = 64;  // operations at a time
};

// The calls of one kind. Times are of the calling thread's processor, because a call that never waits
// may still lose the processor to others; `wall_us_max` has that, too.
struct CallTimes {
  std::string call;  // "Put", "Poll", …
  uint64_t calls = 0;
  double cpu_us_mean = 0;
  double cpu_us_p999 = 0;
  double cpu_us_max = 0;
  double wall_us_max = 0;
};

struct ReclaimBenchReport {
  uint64_t entries = 0;  // when the store was full
  uint64_t evicted = 0;  // while it was measured
  uint64_t moved = 0;
  std::vector<CallTimes> fill;     // until the store was full
  std::vector<CallTimes> reclaim;  // afterwards
};

// Fills a store with blocks of one page until it has `entries`, then puts more, and uses and reads old
// ones. Syncs are answered at once and the index keeps nothing, because both happen on other threads and
// would only make the run longer. Statuses of DiskStore::Open; DeadlineExceeded: the disk did not keep up for a minute.
absl::StatusOr<ReclaimBenchReport> RunReclaimBench(const ReclaimBenchOptions& options);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_RECLAIM_H_
