// Logits of a model's files, for the tests of the ways in which weights are stored and kept.
#ifndef WINNOW_TESTS_UNIT_ENGINE_MODEL_LOGITS_H_
#define WINNOW_TESTS_UNIT_ENGINE_MODEL_LOGITS_H_

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/decoder.h"
#include "engine/model/weight_storage.h"
#include "engine/model_loader.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/sequence_runner.h"

namespace winnow::engine {

// The logits after each of 30 tokens.
inline std::vector<float> Logits(const std::string& path, kernels::DType compute,
                                 WeightStorage storage = WeightStorage::kWide) {
  const auto config = LoadModelConfig(path);
  EXPECT_TRUE(config.ok()) << config.status();
  if (!config.ok()) return {};
  const auto weights = LoadWeights(path, *config);
  EXPECT_TRUE(weights.ok()) << weights.status();
  if (!weights.ok()) return {};
  const auto backend = kernels::MakeCpuBackend("auto", 2);
  const auto decoder = Decoder::Create(*config, *weights, *backend,
                                       {.compute = compute,
                                        .weights = storage,
                                        .kv_dtype = kernels::DType::kF32,
                                        .block_tokens = 16,
                                        .kv_bytes = 1 << 20,
                                        .max_batch_tokens = 16,
                                        .max_batch_logits = 16});
  EXPECT_TRUE(decoder.ok()) << decoder.status();
  if (!decoder.ok()) return {};
  weights->ReleasePages();  // what was not copied must come back by itself
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 30; ++i) ids.push_back(i * 7 % config->vocab_size);
  const std::vector<int32_t> blocks = {1, 0};
  return testing::Run(**decoder, ids, 0, blocks, 30, 16);
}

// Root of the mean square of the differences, as a share of that of the values.
inline double RelativeError(const std::vector<float>& values, const std::vector<float>& exact) {
  double difference = 0, total = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    difference += (double{values[i]} - exact[i]) * (double{values[i]} - exact[i]);
    total += double{exact[i]} * exact[i];
  }
  return std::sqrt(difference / total);
}

}  // namespace winnow::engine

#endif  // WINNOW_TESTS_UNIT_ENGINE_MODEL_LOGITS_H_
