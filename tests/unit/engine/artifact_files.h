// Artifacts made on the spot (docs/artifact-format.md), whole or broken in one place.
#ifndef WINNOW_TESTS_UNIT_ENGINE_ARTIFACT_FILES_H_
#define WINNOW_TESTS_UNIT_ENGINE_ARTIFACT_FILES_H_

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/model_config.h"
#include "nlohmann/json.hpp"
#include "tests/unit/engine/model_files.h"

namespace winnow::engine::testing {

inline const std::string kFingerprint =
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

// Of no size that is a power of two, so that no shape fits by chance.
inline ModelConfig ArtifactModel() {
  ModelConfig config;
  config.layers.resize(5);
  config.num_heads = 9;
  config.num_kv_heads = 3;
  config.head_dim = 6;
  return config;
}

struct TestTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

// What a file holds; Bytes() is the file. Tests change single fields in between.
struct TestArtifact {
  nlohmann::json header;                               // the JSON text
  std::string text;                                    // stands for header.dump() if not empty
  nlohmann::json metadata = nlohmann::json::object();  // entries beside it
  std::vector<TestTensor> tensors;
  size_t header_padding = 0;  // blanks that move the data

  TestTensor& Tensor(const std::string& name) {
    for (TestTensor& tensor : tensors)
      if (tensor.name == name) return tensor;
    ADD_FAILURE() << "no tensor " << name;
    return tensors.front();
  }
  void Erase(const std::string& name) {
    const TestTensor* tensor = &Tensor(name);
    tensors.erase(tensors.begin() + (tensor - tensors.data()));
  }

  std::string Bytes() const {
    nlohmann::json all;
    all["__metadata__"] = metadata;
    if (!header.is_null())
      all["__metadata__"]["winnow_artifact"] = text.empty() ? header.dump() : text;
    std::string data;
    for (const TestTensor& tensor : tensors) {
      all[tensor.name] = {{"dtype", tensor.dtype},
                          {"shape", tensor.shape},
                          {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
      data += tensor.bytes;
    }
    return SafetensorsBytes(all.dump() + std::string(header_padding, ' '), 0) + data;
  }
};

// Adds PREFIX.weight and PREFIX.bias with random values, some of them the largest finite ones.
inline void AddAffine(TestArtifact& artifact, const std::string& prefix, int64_t heads, int64_t out,
                      int64_t in, std::mt19937_64& random) {
  std::string weight, bias;
  for (int64_t i = 0; i < heads * out * in; ++i) {
    auto bits = static_cast<uint16_t>(random());
    if ((bits & 0x7f80) == 0x7f80) bits = 0x7f7f | (bits & 0x8000);
    weight.append(reinterpret_cast<const char*>(&bits), sizeof(bits));
  }
  for (int64_t i = 0; i < heads * out; ++i) {
    auto bits = static_cast<uint32_t>(random());
    if ((bits & 0x7f800000) == 0x7f800000) bits = 0x7f7fffff | (bits & 0x80000000);
    bias.append(reinterpret_cast<const char*>(&bits), sizeof(bits));
  }
  artifact.tensors.push_back({prefix + ".weight", "BF16", {heads, out, in}, std::move(weight)});
  artifact.tensors.push_back({prefix + ".bias", "F32", {heads, out}, std::move(bias)});
}

inline int64_t RandomWidth(std::mt19937_64& random) {
  return 1 + static_cast<int64_t>(random() % 9);
}

inline void AddKind(TestArtifact& artifact, const ModelConfig& config, const std::string& kind,
                    int32_t stages, int32_t bits, const std::string& query,
                    const std::vector<int32_t>& layers, std::mt19937_64& random) {
  artifact.header["kinds"][kind] = {{"bits", bits},
                                    {"query", query},
                                    {"stages", stages},
                                    {"layers", layers},
                                    {"training", {{"recipe", "winnow"}, {"steps", 1500}}},
                                    {"measured", {{"2%", {{"recall", {0.71, 0.5}}}}}}};
  for (const int32_t layer : layers) {
    for (const std::string side : {"key", "query"}) {
      const int64_t times =
          side == "query" && query == "group" ? config.num_heads / config.num_kv_heads : 1;
      int64_t in = times * config.head_dim;
      for (int32_t i = 0; i < stages; ++i) {
        const int64_t out = i + 1 == stages ? times * bits : RandomWidth(random);
        AddAffine(
            artifact,
            "layers." + std::to_string(layer) + "." + kind + "." + side + "." + std::to_string(i),
            config.num_kv_heads, out, in, random);
        in = out;
      }
    }
  }
}

inline void AddFeatures(TestArtifact& artifact, const ModelConfig& config, int32_t features,
                        const std::vector<int32_t>& layers, std::mt19937_64& random) {
  artifact.header["features"] = {
      {"features", features},
      {"layers", layers},
      {"training", {{"recipe", "paper"}}},
      {"helps", std::vector<bool>(layers.size() * config.num_kv_heads, true)}};
  for (const int32_t layer : layers) {
    for (const std::string side : {"key", "query"}) {
      const std::string prefix = "layers." + std::to_string(layer) + ".features." + side + ".";
      const int64_t heads = config.num_kv_heads, w = RandomWidth(random), u = RandomWidth(random);
      AddAffine(artifact, prefix + "stem", heads, w, config.head_dim, random);
      AddAffine(artifact, prefix + "gate", heads, u, w, random);
      AddAffine(artifact, prefix + "up", heads, u, w, random);
      AddAffine(artifact, prefix + "down", heads, w, u, random);
      AddAffine(artifact, prefix + "out", heads, features, w, random);
    }
  }
}

// All kinds, both sorts of queries and feature maps, in other layers each.
inline TestArtifact GoodArtifact(const ModelConfig& config, std::mt19937_64& random) {
  TestArtifact artifact;
  artifact.header = {{"format", 1},
                     {"model",
                      {{"fingerprint", kFingerprint},
                       {"layers", config.num_layers()},
                       {"query_heads", config.num_heads},
                       {"kv_heads", config.num_kv_heads},
                       {"head_dim", config.head_dim}}},
                     {"dense_layers", 2},
                     {"kinds", nlohmann::json::object()},
                     {"provenance", {{"tool", "a test"}}}};
  AddKind(artifact, config, "hata", 1, 32, "head", {1, 2, 4}, random);
  AddKind(artifact, config, "spotlight", 2, 64, "group", {2}, random);
  AddKind(artifact, config, "hashattention", 3, 32, "head", {0, 4}, random);
  AddFeatures(artifact, config, 5, {2, 3}, random);
  return artifact;
}

}  // namespace winnow::engine::testing

#endif  // WINNOW_TESTS_UNIT_ENGINE_ARTIFACT_FILES_H_
