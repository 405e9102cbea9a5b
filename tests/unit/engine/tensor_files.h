// Model directories of given tensors, for the tests of matrices that lie in several of them.
#ifndef WINNOW_TESTS_UNIT_ENGINE_TENSOR_FILES_H_
#define WINNOW_TESTS_UNIT_ENGINE_TENSOR_FILES_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/weight_storage.h"
#include "engine/model/weights.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/quantized.h"
#include "nlohmann/json.hpp"
#include "tests/unit/engine/model_files.h"
#include "tests/unit/temp_dir.h"

namespace winnow::engine {

struct Tensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using TensorBytes = std::map<std::string, Tensor>;  // by name

template <typename T>
Tensor TensorOf(const char* dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  return {dtype, std::move(shape),
          std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T))};
}

// Writes config.json and model.safetensors.
inline void WriteModel(const TempDir& dir, const nlohmann::json& config,
                       const TensorBytes& tensors) {
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", tensor.dtype},
                    {"shape", tensor.shape},
                    {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data += tensor.bytes;
  }
  WriteText(dir.File("config.json"), config.dump());
  WriteText(dir.File("model.safetensors"), SafetensorsBytes(header.dump(), 0) + data);
}

inline absl::StatusOr<Weights> WriteAndLoad(const TempDir& dir, const nlohmann::json& config,
                                            const TensorBytes& tensors) {
  const auto parsed = ParseModelConfig(config.dump(), "config.json", "", "");
  if (!parsed.ok()) return parsed.status();
  WriteModel(dir, config, tensors);
  return LoadWeights(dir.path(), *parsed);
}

// Adds a tensor that is no quantised matrix, in bfloat16: ones for a vector, for a matrix values about a hundredth.
inline void AddPlainTensor(std::mt19937_64& random, const TensorSpec& spec, TensorBytes& tensors) {
  std::vector<int64_t> shape = {spec.cols};
  if (spec.rows != 0) shape.insert(shape.begin(), spec.rows);
  std::vector<uint16_t> values(std::max<int64_t>(spec.rows, 1) * spec.cols, 0x3f80);
  if (spec.rows != 0) {
    for (uint16_t& value : values) value = static_cast<uint16_t>(0x3c00 | (random() & 0x80ff));
  }
  tensors[spec.name] = TensorOf("BF16", shape, values);
}

// Loads each model that a case spoils, which must be refused by tensor, file and reason. Case has form, tensor, spoil and says.
template <typename Model, typename Case>
void ExpectEachRefusedByName(std::mt19937_64& random, const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    SCOPED_TRACE(c.tensor + ": " + c.says);
    const TempDir dir;
    Model model(random, c.form);
    c.spoil(model);
    const absl::Status status = model.Load(dir).status();
    ASSERT_FALSE(status.ok());
    for (const std::string& part : {c.says, c.tensor, std::string("model.safetensors")}) {
      EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(part));
    }
  }
}

// A layer's matrices, by the names that their tensors have in it.
inline std::vector<std::pair<std::string, const WeightMatrix*>> MatricesOf(
    const LayerWeights& layer) {
  std::vector<std::pair<std::string, const WeightMatrix*>> matrices = {
      {"self_attn.q_proj", &layer.q},
      {"self_attn.k_proj", &layer.k},
      {"self_attn.v_proj", &layer.v},
      {"self_attn.o_proj", &layer.o}};
  const auto add = [&](const std::string& prefix, const auto& mlp) {
    matrices.emplace_back(prefix + "gate_proj", &mlp.gate);
    matrices.emplace_back(prefix + "up_proj", &mlp.up);
    matrices.emplace_back(prefix + "down_proj", &mlp.down);
  };
  if (layer.experts.empty()) add("mlp.", layer);
  for (size_t e = 0; e < layer.experts.size(); ++e) {
    add("mlp.experts." + std::to_string(e) + ".", layer.experts[e]);
  }
  return matrices;
}

// Keys of a small Qwen3 MoE.
inline const nlohmann::json kExpertKeys = {{"architectures", {"Qwen3MoeForCausalLM"}},
                                           {"model_type", "qwen3_moe"},
                                           {"num_experts", 3},
                                           {"num_experts_per_tok", 2},
                                           {"moe_intermediate_size", 128}};

// Keys of a small Phi-3, whose matrices share tensors and of whose heads three quarters rotate.
inline const nlohmann::json kPhi3Keys = {{"architectures", {"Phi3ForCausalLM"}},
                                         {"model_type", "phi3"},
                                         {"partial_rotary_factor", 0.75}};

// Compares each matrix with the rows of its tensor that it is: value(base name, row of the tensor, column), as it is widened and
// as its blocks are stored.
template <typename Value>
void ExpectParts(const nlohmann::json& config_json, Weights* weights, Value value) {
  const auto config = ParseModelConfig(config_json.dump(), "config.json", "", "");
  ASSERT_TRUE(config.ok()) << config.status();
  int64_t parts = 0;
  for (const TensorSpec& spec : ModelTensors(*config, weights)) {
    if (spec.role != TensorSpec::Role::kMatrix) continue;
    SCOPED_TRACE(spec.name + " from row " + std::to_string(spec.first_row));
    const std::string base = spec.name.substr(0, spec.name.rfind('.'));
    const WeightMatrix& matrix = *spec.matrix;
    ASSERT_EQ(matrix.rows, spec.rows);
    parts += spec.first_row != 0 ? 1 : 0;
    const auto stored = StoredPartsOf(WeightStorage::kStored, {{matrix}}, false);
    ASSERT_TRUE(stored.ok()) << stored.status();
    std::vector<float> widened(matrix.cols), of_blocks(matrix.cols);
    std::vector<bool> seen(spec.rows);
    for (int64_t row = 0; row < matrix.rows; ++row) {
      const int64_t in_tensor = matrix.FileRow(row);
      ASSERT_TRUE(in_tensor >= spec.first_row && in_tensor < spec.first_row + spec.rows);
      seen[in_tensor - spec.first_row] = true;
      matrix.WidenRow(row, widened.data());
      kernels::DequantizeRow(stored->parts[0].type, stored->parts[0].rows[row], matrix.cols,
                             of_blocks.data());
      for (int64_t col = 0; col < matrix.cols; ++col) {
        ASSERT_EQ(widened[col], value(base, in_tensor, col)) << row << " " << col;
        ASSERT_EQ(of_blocks[col], widened[col]) << row << " " << col;
      }
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), true), spec.rows);
  }
  EXPECT_EQ(parts, 3 * config->num_layers());  // K, V and up
}

// Compares what read(row, out) makes of each row with `written`, a matrix that has rows, cols and Value(row, col).
template <typename Written, typename Read>
void ExpectValues(const Written& written, Read read) {
  std::vector<float> values(written.cols);
  for (int64_t row = 0; row < written.rows; ++row) {
    read(row, values.data());
    for (int64_t col = 0; col < written.cols; ++col) {
      ASSERT_EQ(values[col], written.Value(row, col)) << row << " " << col;
    }
  }
}

}  // namespace winnow::engine

#endif  // WINNOW_TESTS_UNIT_ENGINE_TENSOR_FILES_H_
