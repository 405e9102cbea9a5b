// Work on the rows of a matrix while a model loads, by several threads.
#ifndef WINNOW_ENGINE_MODEL_ROW_RANGES_H_
#define WINNOW_ENGINE_MODEL_ROW_RANGES_H_

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace winnow::engine {

// Calls work(first, last) for ranges that together are [0, rows), side by side where there are enough values; returns when
// all have returned.
template <typename Work>
void ForEachRowRange(int64_t rows, int64_t cols, const Work& work) {
  // A core widens some 500 million values a second.
  constexpr int64_t kValuesPerThread = 1 << 19, kThreadsMax = 16;
  const int64_t threads = std::clamp<int64_t>(
      rows * cols / kValuesPerThread, 1,
      std::min<int64_t>(kThreadsMax, std::max(std::thread::hardware_concurrency(), 1u)));
  std::vector<std::jthread> workers;
  for (int64_t i = 1; i < threads; ++i) {
    workers.emplace_back(work, rows * i / threads, rows * (i + 1) / threads);
  }
  work(int64_t{0}, rows / threads);
}

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_ROW_RANGES_H_
