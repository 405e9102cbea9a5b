// engine::RetrievalCounts as shares, for the results of eval; 1 where nothing retrieved or nothing was
// measured.
//
// Pure functions; any thread.
#ifndef WINNOW_BENCH_EVAL_SHARES_H_
#define WINNOW_BENCH_EVAL_SHARES_H_

#include "engine/retrieval/retrieval_state.h"

namespace winnow::bench {

inline double KeptShare(const engine::RetrievalCounts& counts) {
  return counts.candidate_rows == 0 ? 1
                                    : static_cast<double>(counts.selected_rows) /
                                          static_cast<double>(counts.candidate_rows);
}

inline double MeanCoverage(const engine::RetrievalCounts& counts) {
  return counts.probes == 0 ? 1 : counts.coverage / static_cast<double>(counts.probes);
}

inline double MeanIou(const engine::RetrievalCounts& counts) {
  return counts.probes == 0 ? 1 : counts.iou / static_cast<double>(counts.probes);
}

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_EVAL_SHARES_H_
