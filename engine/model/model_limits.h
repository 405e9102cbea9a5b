// Bounds on the numbers of a model's configuration, whatever file they come from.
#ifndef WINNOW_ENGINE_MODEL_MODEL_LIMITS_H_
#define WINNOW_ENGINE_MODEL_MODEL_LIMITS_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/experts.h"

namespace winnow::engine {

// Far above any model of these families, low enough that products of two stay below 2^63.
inline constexpr int64_t kHiddenMax = 1 << 17, kIntermediateMax = 1 << 20, kLayersMax = 1024,
                         kHeadsMax = 1024, kVocabMax = 1 << 22, kPositionsMax = 1 << 28;
using kernels::kExpertsMax;
inline constexpr size_t kEosTokensMax = 64;
inline constexpr double kRopeThetaMin = 1.0 + 1e-6, kRopeThetaMax = 1e15, kRopeFactorMax = 1e6;
inline constexpr double kMultiplierMin = 1e-4, kMultiplierMax = 1e4;  // Granite's
inline constexpr std::array<int64_t, 5> kHeadDims = {64, 80, 96, 128, 256};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_MODEL_LIMITS_H_
