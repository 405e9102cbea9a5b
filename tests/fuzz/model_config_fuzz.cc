// Any bytes as config.json, and after a NUL as generation_config.json: refused, or a configuration
// that keeps the header's promises and whose frequencies and tensors can be listed.
//
// Sources: engine/base/json_file.cc engine/base/json_keys.cc engine/model/model_config.cc engine/model/model_family.cc engine/model/rope.cc
// Sources: engine/model/safetensors.cc engine/model/safetensors_header.cc engine/model/weights.cc engine/model/gguf.cc engine/model/gguf_keys.cc engine/model/gguf_config.cc
// Sources: engine/model/gguf_weights.cc engine/model/grouped_integers.cc engine/model/grouped_integers_tensors.cc engine/model/weight_scheme.cc kernels/check.cc kernels/quantized.cc
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "engine/model/model_config.h"
#include "engine/model/weights.h"
#include "kernels/check.h"

using winnow::engine::ModelTensors;
using winnow::engine::ParseModelConfig;
using winnow::engine::RopeParameters;
using winnow::engine::TensorSpec;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t nul = text.find('\0');
  const auto config =
      ParseModelConfig(text.substr(0, nul), "config.json",
                       nul == text.npos ? "" : text.substr(nul + 1), "generation_config.json");
  if (!config.ok()) {
    WINNOW_CHECK(!config.status().message().empty());
    return 0;
  }
  WINNOW_CHECK(config->num_kv_heads > 0 && config->num_heads % config->num_kv_heads == 0);
  WINNOW_CHECK(config->hidden_size > 0 && config->vocab_size > 0 &&
               config->max_position_embeddings > 0);
  for (const int32_t id : config->eos_token_ids) WINNOW_CHECK(id >= 0 && id < config->vocab_size);
  const RopeParameters rope = ComputeRope(*config);
  WINNOW_CHECK(rope.inv_freq.size() == static_cast<size_t>(config->head_dim) / 2);
  for (const float frequency : rope.inv_freq) WINNOW_CHECK(std::isfinite(frequency));
  WINNOW_CHECK(std::isfinite(rope.attention_factor));
  if (config->num_layers() <= 8) {
    for (const TensorSpec& spec : ModelTensors(*config, nullptr))
      WINNOW_CHECK(spec.rows >= 0 && spec.cols > 0);
  }
  return 0;
}
