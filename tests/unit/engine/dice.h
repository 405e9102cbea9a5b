// Choices of random workloads, all of one seed.
#ifndef WINNOW_TESTS_UNIT_ENGINE_DICE_H_
#define WINNOW_TESTS_UNIT_ENGINE_DICE_H_

#include <cstdint>
#include <random>

namespace winnow::engine {

class Dice {
 public:
  explicit Dice(uint32_t seed) : random_(seed) {}
  int32_t Pick(int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random_);
  }
  bool OneIn(int32_t n) { return Pick(1, n) == 1; }
  template <typename T, size_t n>
  const T& Of(const T (&all)[n]) {
    return all[Pick(0, static_cast<int32_t>(n) - 1)];
  }

 private:
  std::mt19937 random_;
};

}  // namespace winnow::engine

#endif  // WINNOW_TESTS_UNIT_ENGINE_DICE_H_
