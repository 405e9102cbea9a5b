// Randomness of tests: each from one seed, which a failing test prints, and which repeats it.
#ifndef WINNOW_TESTS_UNIT_TEST_SEED_H_
#define WINNOW_TESTS_UNIT_TEST_SEED_H_

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>

#include "gtest/gtest.h"

namespace winnow {

// From WINNOW_TEST_SEED, or fresh.
inline uint64_t TestSeed() {
  if (const char* text = std::getenv("WINNOW_TEST_SEED")) return std::strtoull(text, nullptr, 10);
  return std::random_device()();
}

// As long as it lives, failures name its seed. A local variable of the test's thread.
class TestRandom : public std::mt19937_64 {
 public:
  TestRandom() : TestRandom(TestSeed()) {}

 private:
  explicit TestRandom(uint64_t seed)
      : std::mt19937_64(seed),
        trace_(__FILE__, __LINE__, "WINNOW_TEST_SEED=" + std::to_string(seed)) {}

  const ::testing::ScopedTrace trace_;
};

}  // namespace winnow

#endif  // WINNOW_TESTS_UNIT_TEST_SEED_H_
