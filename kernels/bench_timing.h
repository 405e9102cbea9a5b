// How bench.cc and bench_baselines.cc take times.
#ifndef WINNOW_KERNELS_BENCH_TIMING_H_
#define WINNOW_KERNELS_BENCH_TIMING_H_

#include <algorithm>
#include <chrono>

#include "kernels/thread_pool.h"

namespace winnow::kernels {

inline double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The best of repetitions over `budget` seconds, three at least; the first, cold one does not
// count.
template <typename Body>
double BestSeconds(double budget, Body body) {
  body();
  double best = 1e9;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 3 || SecondsSince(begin) < budget; ++i) {
    const auto start = std::chrono::steady_clock::now();
    body();
    best = std::min(best, SecondsSince(start));
  }
  return best;
}

// 0: as many as this process may use.
inline int BenchThreads(int num_threads) {
  return num_threads == 0 ? UsableProcessors() : num_threads;
}

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_BENCH_TIMING_H_
