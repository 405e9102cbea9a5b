// Any bytes as an artifact: refused, or all that it says it has can be read. The model is the
// smallest there can be, so that whole files are short.
//
// Sources: engine/retrieval/artifact.cc engine/retrieval/artifact_header.cc engine/retrieval/attention_policy.cc
// Sources: engine/kv/block_name.cc engine/base/did_you_mean.cc engine/base/json_file.cc engine/base/json_keys.cc engine/base/plain_number.cc
// Sources: engine/model/safetensors.cc engine/model/safetensors_header.cc kernels/check.cc
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "engine/retrieval/artifact.h"
#include "kernels/check.h"

using winnow::engine::Artifact;
using winnow::engine::AttentionPolicy;
using winnow::engine::ModelConfig;
using winnow::kernels::AffineStage;

namespace {

void CheckStage(const AffineStage& stage) {
  WINNOW_CHECK(stage.in >= 1 && stage.out >= 1);
  WINNOW_CHECK(stage.weight.size() == static_cast<size_t>(stage.in) * stage.out);
  WINNOW_CHECK(stage.bias.size() == static_cast<size_t>(stage.out));
  for (const uint16_t bits : stage.weight) WINNOW_CHECK((bits & 0x7f80) != 0x7f80);
  for (const float value : stage.bias) WINNOW_CHECK(std::isfinite(value));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ModelConfig config;
  config.layers.resize(1);
  config.num_heads = config.num_kv_heads = config.head_dim = 1;
  const auto artifact =
      Artifact::Parse(std::as_bytes(std::span(data, size)), "file", config, std::string(64, '0'));
  if (!artifact.ok()) {
    WINNOW_CHECK(artifact.status().message().substr(0, 6) == "file: ");
    return 0;
  }
  for (const Artifact::Side side : {Artifact::Side::kKey, Artifact::Side::kQuery}) {
    for (const auto& [kind, functions] : (*artifact)->header().kinds) {
      if (!(*artifact)->HasLayer(kind, 0)) continue;
      const auto encoder = (*artifact)->Encoder(kind, 0, side);
      WINNOW_CHECK(encoder.stages.size() == static_cast<size_t>(functions.stages));
      WINNOW_CHECK(encoder.stages.back().out == functions.bits);
      for (const AffineStage& stage : encoder.stages) CheckStage(stage);
    }
    if (!(*artifact)->HasFeatures(0)) continue;
    const auto map = (*artifact)->FeatureMap(0, side);
    for (const AffineStage& stage : {map.stem, map.gate, map.up, map.down, map.out})
      CheckStage(stage);
  }
  WINNOW_CHECK(!(*artifact)->Description().empty());
  return 0;
}
