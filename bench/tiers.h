// `winnow bench tiers` measures this: decode steps whose chosen rows lie partly in fast memory and
// partly on disk, beside the rate at which the disk gives random pages at all.
//
// "Share in memory": of the document's blocks in layers under the policy, this share, drawn at random
// for each layer, has frames; the others are on disk alone. Anchors, the dense layers and what the
// steps write always have frames. The row cache has 0 bytes unless asked for, so that a row is in
// memory because its block is. The share that comes out is counted, row by row.
#ifndef WINNOW_BENCH_TIERS_H_
#define WINNOW_BENCH_TIERS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/store_bench.h"
#include "engine/retrieval/attention_policy.h"

namespace winnow::bench {

struct TiersFlags {
  StoreBenchFlags store;
  engine::AttentionPolicy policy;
  std::vector<int64_t> contexts = {32768, 131072};
  std::vector<double> shares = {0, 50, 90, 100};  // per cent
  int32_t steps = 16;
  double device_seconds = 1;  // of each measurement of the device
};

// Means over the steps, unless it says otherwise.
struct TiersResult {
  int64_t context = 0;  // tokens that the last step sees
  double share_asked = 0;
  double share_measured = 0;  // of chosen rows: in a frame or in the row cache
  double seconds_median = 0, seconds_min = 0, seconds_mean = 0;  // of a step
  double wait_seconds = 0;  // in it, with nothing to do but wait for reads
  // In it, attention over chosen rows and anchors: the most that attending to rows that have come,
  // while others are on their way, could save. NaN: not measured, on a device.
  double attend_seconds = 0;
  double selected_rows = 0;
  double stored_rows = 0;    // of them: came from disk
  double cached_rows = 0;    // of them: from the row cache
  double payload_bytes = 0;  // of rows that were read, also in vain
  double page_bytes = 0;     // of the pages that they are on
  double device_bytes = 0;   // read from the device, whatever for
  double pages = 0, reads = 0;
  double asked_rows = 0, used_rows = 0;  // ahead of time, by prediction; and chosen then
  double ReadsPerSecond() const { return reads / seconds_mean; }
  double ReadsPerWaitingSecond() const { return wait_seconds > 0 ? reads / wait_seconds : 0; }
  double device_before = 0, device_after = 0;  // random reads of 4 KiB a second
  double DeviceRate() const { return std::max(device_before, device_after); }
};

struct OverlapResult {
  int64_t context = 0;
  int32_t layer = 0;
  double rows = 0;      // chosen by a head in a step
  double overlap = 0;   // share of them that the step before had chosen
  double distinct = 0;  // rows that a head chose in all steps together, over `rows`
  double pages = 0;     // of 4 KiB that a head's rows of one step lie on
};

struct TiersRun {
  std::vector<TiersResult> results;
  std::vector<OverlapResult> overlaps;
  DeviceRate device;  // engine and depth
  std::string backend, store, kv_dtype;
  uint64_t kv_bytes = 0;      // of the document of the longest context
  uint64_t stored_bytes = 0;  // of files
  uint64_t frame_bytes = 0;   // of fast memory
  uint64_t row_cache_bytes = 0;
};

// `on_result` is called as soon as there is one. Errors: StoreBench's.
absl::StatusOr<TiersRun> RunTiers(const TiersFlags& flags,
                                  const std::function<void(const TiersResult&)>& on_result);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_TIERS_H_
