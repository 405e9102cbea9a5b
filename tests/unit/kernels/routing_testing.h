// Ways to route rows to experts, for tests on the CPU and on a GPU.
#ifndef WINNOW_TESTS_UNIT_KERNELS_ROUTING_TESTING_H_
#define WINNOW_TESTS_UNIT_KERNELS_ROUTING_TESTING_H_

#include <cstdint>
#include <vector>

#include "kernels/experts.h"
#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {

// Every kind of scores, normalized or not, with a correction of some experts or without: [experts] in `correction`, which must
// outlive them.
inline std::vector<ExpertRouting> AnyRoutings(Random& random, int64_t experts,
                                              std::vector<float>& correction) {
  correction.resize(experts);
  for (float& value : correction) value = random.Int(0, 2) == 0 ? 0 : random.Normal(0.3f);
  std::vector<ExpertRouting> routings;
  for (const auto scores : {ExpertRouting::Scores::kSoftmax, ExpertRouting::Scores::kSigmoid}) {
    for (const bool normalized : {false, true}) {
      for (const bool corrected : {false, true}) {
        const float scale = random.Int(0, 1) == 0 ? 1.0f : 2.5f;
        routings.push_back({scores, normalized, scale, corrected ? correction.data() : nullptr});
      }
    }
  }
  return routings;
}

}  // namespace winnow::kernels

#endif  // WINNOW_TESTS_UNIT_KERNELS_ROUTING_TESTING_H_
