// A GGUF file's weights, by what a decoder computes from them.
#include "engine/model/gguf_weights.h"
#include "engine/kv_planning.h"

#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "engine/decoder.h"
#include "engine/model/model_family.h"
#include "engine/model/model_fingerprint.h"
#include "engine/model/random_model.h"
#include "engine/model/weight_storage.h"
#include "engine/model_loader.h"
#include "engine/model_retrieval.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/host_matrix.h"
#include "tests/unit/engine/gguf_files.h"
#include "tests/unit/engine/model_files.h"
#include "tests/unit/engine/model_logits.h"
#include "tests/unit/engine/sequence_runner.h"

namespace winnow::engine {
namespace {

using kernels::DType;
using kernels::WeightType;
using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

uint32_t GgufNumber(WeightType type) {
  for (uint32_t number = 0; number < 64; ++number) {
    if (WeightTypeOfGguf(number) == type) return number;
  }
  ADD_FAILURE();
  return 0;
}

// A small configuration; hidden and intermediate sizes fit blocks of 32 values.
json SmallConfig(const std::string& model_type) {
  json config = TinyConfig();
  config["intermediate_size"] = 64;
  config["torch_dtype"] = "float32";
  config["model_type"] = model_type;
  for (const ModelFamily& family : ModelFamilies()) {
    if (family.model_type == model_type) config["architectures"] = {family.architecture};
  }
  if (model_type == "smollm3") config["num_hidden_layers"] = 5;
  if (model_type.starts_with("granite")) {
    config.update({{"embedding_multiplier", 12.0},
                   {"attention_multiplier", 0.25},
                   {"residual_multiplier", 0.25},
                   {"logits_scaling", 8.0}});
  }
  if (model_type == "mixtral" || model_type.find("moe") != std::string::npos) {
    config.update({{"num_local_experts", 5}, {"num_experts_per_tok", 2}});
  }
  if (model_type == "qwen3_moe") {
    config.update({{"moe_intermediate_size", 32}, {"norm_topk_prob", true}});
  }
  if (model_type == "qwen2_moe") {
    config.update({{"moe_intermediate_size", 32}, {"shared_expert_intermediate_size", 64}});
  }
  if (model_type == "ernie4_5_moe") {
    config.erase("num_local_experts");
    config.erase("num_experts_per_tok");
    config.update({{"moe_intermediate_size", 32}, {"moe_num_experts", 5}, {"moe_k", 2}});
  }
  if (model_type == "glm4_moe" || model_type == "dots1") {
    config.erase("num_local_experts");
    config.update({{"moe_intermediate_size", 32},
                   {"n_routed_experts", 5},
                   {"num_experts_per_tok", 2},
                   {"n_shared_experts", 2},
                   {"first_k_dense_replace", 1},
                   {"routed_scaling_factor", 2.5}});
  }
  if (model_type == "minimax_m2") {
    config.update({{"num_local_experts", 5}, {"num_experts_per_tok", 2}, {"rotary_dim", 32}});
  }
  if (model_type == "ministral3") {
    config["rope_scaling"] = {
        {"rope_type", "yarn"}, {"factor", 4.0},         {"original_max_position_embeddings", 16},
        {"mscale", 1.0},       {"mscale_all_dim", 0.5}, {"llama_4_scaling_beta", 0.25}};
  }
  if (model_type == "phi3") {
    std::vector<double> factors;
    for (int i = 0; i < 24; ++i) factors.push_back(1 + 0.125 * i);
    config.update({{"partial_rotary_factor", 0.75},
                   {"original_max_position_embeddings", 128},
                   {"rope_scaling",
                    {{"type", "longrope"},
                     {"attention_factor", 1.25},
                     {"short_factor", std::vector<double>(24, 1.0)},
                     {"long_factor", factors}}}});
  }
  return config;
}

// The keys that say what `config` says.
GgufBuilder KeysOf(const ModelConfig& config) {
  const std::string name(FamilyOf(config.family).gguf_name);
  GgufBuilder file;
  const auto set = [&](const std::string& key, auto value) { file.Set(name + "." + key, value); };
  file.Set("general.architecture", name);
  set("embedding_length", static_cast<uint32_t>(config.hidden_size));
  set("feed_forward_length", static_cast<uint32_t>(config.intermediate_size));
  set("block_count", static_cast<uint32_t>(config.num_layers()));
  set("attention.head_count", static_cast<uint32_t>(config.num_heads));
  set("attention.head_count_kv", static_cast<uint32_t>(config.num_kv_heads));
  set("attention.key_length", static_cast<uint32_t>(config.head_dim));
  set("attention.value_length", static_cast<uint32_t>(config.head_dim));
  set("context_length", static_cast<uint32_t>(config.max_position_embeddings));
  set("attention.layer_norm_rms_epsilon", config.rms_norm_eps);
  set("rope.freq_base", static_cast<float>(config.ropes[0].theta));
  if (name.starts_with("granite")) {
    set("embedding_scale", static_cast<float>(config.embedding_multiplier));
    set("attention.scale", config.AttentionScale());
    set("residual_scale", static_cast<float>(config.residual_multiplier));
    set("logit_scale", static_cast<float>(config.logits_scaling));
  }
  if (name == "mistral3") {
    const RopeSet& rope = config.ropes[0];
    set("rope.scaling.type", "yarn");
    set("rope.scaling.factor", static_cast<float>(rope.scaling.factor));
    set("rope.scaling.original_context_length",
        static_cast<uint32_t>(rope.scaling.original_max_position_embeddings));
    set("rope.scaling.yarn_log_multiplier", static_cast<float>(*rope.scaling.mscale_all_dim));
    set("attention.temperature_scale", static_cast<float>(rope.query_scaling.beta));
  }
  if (config.experts.count != 0) {
    set("expert_count", static_cast<uint32_t>(config.experts.count));
    set("expert_used_count", static_cast<uint32_t>(config.experts.per_token));
  }
  if (name == "qwen3moe" || config.experts.shared_intermediate_size != 0) {
    set("expert_feed_forward_length", static_cast<uint32_t>(config.experts.intermediate_size));
  }
  const ExpertKeys* experts = FamilyOf(config.family).experts;
  const auto dense = static_cast<uint32_t>(config.NumLayersOf(LayerSpec::Mlp::kGatedSilu));
  if (experts != nullptr && experts->scores == ExpertKeys::Scores::kSigmoid) {
    set("expert_gating_func", uint32_t{2});
  }
  if (name == "qwen2moe" || name == "ernie4_5-moe") {
    set("expert_shared_feed_forward_length",
        static_cast<uint32_t>(config.experts.shared_intermediate_size));
  }
  if (name == "ernie4_5-moe") {
    set("leading_dense_block_count", dense);
    set("interleave_moe_layer_step", uint32_t{1});
  }
  if (name == "glm4moe" || name == "dots1") {
    set("leading_dense_block_count", dense);
    set("expert_shared_count", uint32_t{2});
    set("expert_weights_scale", static_cast<float>(config.experts.scale));
    set("expert_weights_norm", config.experts.normalized);
  }
  if (config.rotary_dim != 0 && name != "phi3") {
    set("rope.dimension_count", static_cast<uint32_t>(config.rotary_dim));
  }
  if (name == "phi3") {
    const RopeScaling& scaling = config.ropes[0].scaling;
    set("rope.dimension_count", static_cast<uint32_t>(config.RotaryDim()));
    set("rope.scaling.original_context_length",
        static_cast<uint32_t>(scaling.original_max_position_embeddings));
    set("rope.scaling.attn_factor", static_cast<float>(*scaling.attention_factor));
    for (const auto& [tensor, factors] :
         {std::pair("rope_factors_short.weight", &scaling.short_factors),
          std::pair("rope_factors_long.weight", &scaling.long_factors)}) {
      file.Tensor(tensor, {factors->size()}, kGgufF32,
                  std::string(reinterpret_cast<const char*>(factors->data()), 4 * factors->size()));
    }
  }
  return file;
}

// The row of a directory's tensor that a GGUF file of "llama" has in row `row` of its own: written from the other
// side than the reader, as a writer has it. Those of families that rotate neighbours stay as they are.
int64_t SourceRow(const TensorSpec& spec, const ModelConfig& config, int64_t row) {
  const ModelFamily& family = FamilyOf(config.family);
  if (spec.rotary_heads == 0 || !family.gguf_interleaves || family.interleaves) return row;
  const int64_t d = config.head_dim, head = row / d, at = row % d;
  return head * d + at / 2 + (at % 2 == 0 ? 0 : d / 2);
}

// A directory with random weights of `config`, and GGUF files of the same.
class RandomModel {
 public:
  explicit RandomModel(const json& config) {
    WriteText(dir_.File("config.json"), config.dump());
    RandomModelOptions options;
    options.config_path = dir_.File("config.json");
    options.out_dir = directory();
    options.seed = kSeed;
    const auto report = WriteRandomModel(options);
    EXPECT_TRUE(report.ok()) << report.status();
    config_ = *LoadModelConfig(directory());
  }
  std::string directory() const { return dir_.File("model"); }
  const ModelConfig& config() const { return config_; }

  // The same values in a GGUF file, as `of_matrices`; routers are float32.
  GgufBuilder Gguf(DType of_matrices) const {
    GgufBuilder file = KeysOf(config_);
    std::map<std::string, std::string> of_experts;  // the matrices of all, one behind the other
    for (const TensorSpec& spec : FileTensors(config_)) {
      const int64_t rows = spec.rows == 0 ? spec.cols : spec.rows,
                    cols = spec.rows == 0 ? 1 : spec.cols;
      const DType dtype = spec.role == TensorSpec::Role::kRouter ? DType::kF32 : of_matrices;
      if (spec.stack.has_value()) {
        AddStack(spec, dtype, &file);
        continue;
      }
      const auto value_bytes = static_cast<int64_t>(kernels::DTypeBytes(dtype));
      std::vector<std::byte> values(rows * cols * value_bytes);
      FillRandomTensor(spec, config_, kSeed, dtype, 0, values);
      std::string data;
      for (int64_t row = 0; row < rows; ++row) {
        const auto* from = reinterpret_cast<const char*>(values.data()) +
                           SourceRow(spec, config_, row) * cols * value_bytes;
        data.append(from, cols * value_bytes);
      }
      if (spec.num_experts != 0) {
        data = of_experts[spec.gguf_name] += data;
        if (spec.expert + 1 < spec.num_experts) continue;
      }
      Add(spec, kernels::WeightTypeOf(dtype), data, &file);
    }
    return file;
  }
  // The matrices of a directory's tensor that all experts share, each kind of them in a tensor of its own.
  void AddStack(const TensorSpec& stack, DType dtype, GgufBuilder* file) const {
    ASSERT_FALSE(stack.stack->transposed);
    const int64_t outputs = stack.stack->outputs;
    const auto row_bytes = stack.cols * static_cast<int64_t>(kernels::DTypeBytes(dtype));
    std::vector<std::byte> values(stack.num_experts * outputs * row_bytes);
    FillRandomTensor(stack, config_, kSeed, dtype, 0, values);
    std::map<std::string, std::string> of_experts;
    for (const TensorSpec& spec : ModelTensors(config_, nullptr)) {
      if (spec.name != stack.name) continue;
      std::string& data = of_experts[spec.gguf_name];
      const int64_t first = spec.expert * outputs + spec.stack->first;
      data.append(reinterpret_cast<const char*>(values.data()) + first * row_bytes,
                  spec.rows * row_bytes);
      if (spec.expert + 1 == spec.num_experts) {
        Add(spec, kernels::WeightTypeOf(dtype), data, file);
      }
    }
  }
  static void Add(const TensorSpec& spec, WeightType type, const std::string& data,
                  GgufBuilder* file) {
    std::vector<uint64_t> dims = {static_cast<uint64_t>(spec.cols)};
    if (spec.rows != 0) dims.push_back(spec.rows);
    if (spec.num_experts != 0) dims.push_back(spec.num_experts);
    file->Tensor(spec.gguf_name, dims, GgufNumber(type), data);
  }
  std::string Write(const GgufBuilder& file, const std::string& name) const {
    WriteText(dir_.File(name), file.Build());
    return dir_.File(name);
  }

 private:
  static constexpr uint64_t kSeed = 5;
  TempDir dir_;
  ModelConfig config_;
};

TEST(GgufWeights, AFileAndADirectoryOfTheSameModelGiveTheSameLogits) {
  for (const char* model_type :
       {"llama", "qwen2", "qwen3", "smollm3", "seed_oss", "granite", "phi3", "ernie4_5",
        "ministral3", "mixtral", "qwen3_moe", "olmoe", "granitemoe", "qwen2_moe", "ernie4_5_moe",
        "minimax_m2", "glm4_moe", "dots1"}) {
    for (const bool tied : {false, true}) {
      SCOPED_TRACE(std::string(model_type) + (tied ? ", tied" : ""));
      json json_config = SmallConfig(model_type);
      json_config["tie_word_embeddings"] = tied;
      if (std::string(model_type) == "llama" || std::string(model_type) == "granite")
        json_config["attention_bias"] = json_config["mlp_bias"] = tied;
      if (std::string(model_type) == "ernie4_5") json_config["use_bias"] = tied;
      if (std::string(model_type) == "glm4_moe") {
        json_config["attention_bias"] = json_config["use_qk_norm"] = tied;
        json_config["norm_topk_prob"] = !tied;
      }
      if (std::string(model_type) == "dots1") json_config["norm_topk_prob"] = tied;
      const RandomModel model(json_config);
      const std::string path = model.Write(model.Gguf(DType::kF32), "f32.gguf");
      const std::vector<float> expected = Logits(model.directory(), DType::kF32);
      ASSERT_EQ(expected.size(), size_t{30} * 40);
      EXPECT_EQ(Logits(path, DType::kF32), expected);
      EXPECT_EQ(Logits(path, DType::kBF16), Logits(model.directory(), DType::kBF16));
      EXPECT_EQ(LoadModelConfig(path)->tie_word_embeddings, tied);
    }
  }
}

TEST(GgufWeights, LayersThatPredictFurtherTokensArePassedOver) {
  const RandomModel model(SmallConfig("glm4_moe"));
  const std::vector<float> expected = Logits(model.directory(), DType::kF32);
  GgufBuilder file = model.Gguf(DType::kF32);
  file.Remove("glm4moe.block_count");
  file.Set("glm4moe.block_count", uint32_t{3});
  file.Set("glm4moe.nextn_predict_layers", uint32_t{1});
  for (const char* name : {"blk.2.nextn.enorm.weight", "blk.2.attn_q.weight"}) {
    file.Tensor(name, {2}, kGgufF32, std::string(8, '\0'));
  }
  const std::string path = model.Write(file, "further.gguf");
  EXPECT_EQ(LoadModelConfig(path)->num_layers(), 2);
  EXPECT_EQ(Logits(path, DType::kF32), expected);
  file.Tensor("blk.3.attn_q.weight", {2}, kGgufF32, std::string(8, '\0'));
  const std::string beyond = model.Write(file, "beyond.gguf");
  EXPECT_THAT(std::string(LoadWeights(beyond, *LoadModelConfig(beyond)).status().message()),
              HasSubstr("\"blk.3.attn_q.weight\""));
}

TEST(GgufWeights, AnOldFileOfErnieHasNoCorrection) {
  const RandomModel model(SmallConfig("ernie4_5_moe"));
  GgufBuilder file = model.Gguf(DType::kF32);
  std::erase_if(file.tensors(),
                [](const auto& tensor) { return tensor.name == "blk.1.exp_probs_b.bias"; });
  const std::string path = model.Write(file, "old.gguf");
  EXPECT_FALSE(LoadModelConfig(path)->experts.corrected);
  EXPECT_NE(Logits(path, DType::kF32), Logits(model.directory(), DType::kF32));
}

TEST(GgufWeights, ExpertsOfAFileAreFoundAndWhatIsNotComputedIsNamed) {
  const RandomModel model(SmallConfig("qwen3_moe"));
  const auto error = [&](const std::function<void(GgufBuilder&)>& change) {
    GgufBuilder file = model.Gguf(DType::kF32);
    change(file);
    const std::string path = model.Write(file, "bad.gguf");
    const auto config = LoadModelConfig(path);
    if (!config.ok()) return config.status();
    return LoadWeights(path, *config).status();
  };
  const auto set = [](const char* key, auto value) {
    return [=](GgufBuilder& file) {
      file.Remove(key);
      file.Set(key, value);
    };
  };
  const auto named = [](GgufBuilder& file, std::string_view name) -> GgufBuilder::TensorInfo& {
    for (auto& tensor : file.tensors()) {
      if (tensor.name == name) return tensor;
    }
    std::abort();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  const struct {
    std::function<void(GgufBuilder&)> change;
    absl::StatusCode code;
    std::string says;
  } kCases[] = {
      {[](GgufBuilder&) {}, absl::StatusCode::kOk, ""},
      {set("qwen3moe.expert_weights_norm", true), absl::StatusCode::kOk, ""},
      {set("qwen3moe.expert_shared_count", uint32_t{0}), absl::StatusCode::kOk, ""},
      {set("qwen3moe.expert_used_count", uint32_t{6}), kInvalid, "6 of 5 experts"},
      {set("qwen3moe.expert_used_count", uint32_t{0}), kInvalid, "from 1 to 1024, is 0"},
      {set("qwen3moe.expert_count", uint32_t{0}), kInvalid, "from 1 to 1024, is 0"},
      {set("qwen3moe.expert_count", uint32_t{4}), kInvalid, "dimensions [32, 5], expected [32, 4]"},
      {set("qwen3moe.expert_feed_forward_length", uint32_t{64}), kInvalid,
       "\"blk.0.ffn_gate_exps.weight\" at byte"},
      {[](GgufBuilder& f) { f.Remove("qwen3moe.expert_feed_forward_length"); }, kInvalid,
       "\"qwen3moe.expert_feed_forward_length\": missing"},
      {set("qwen3moe.expert_weights_scale", 2.5f), kUnimplemented, "2.5 is not supported"},
      {set("qwen3moe.expert_gating_func", uint32_t{2}), kUnimplemented, "1, the softmax"},
      {set("qwen3moe.expert_shared_count", uint32_t{1}), kUnimplemented,
       "\"qwen3moe.expert_shared_count\""},
      {set("qwen3moe.leading_dense_block_count", uint32_t{1}), kUnimplemented,
       "leading_dense_block_count"},
      {set("qwen3moe.expert_group_count", uint32_t{4}), absl::StatusCode::kOk, ""},
      {[&](GgufBuilder& f) {
         f.Set("qwen3moe.expert_group_count", uint32_t{4});
         f.Set("qwen3moe.expert_group_used_count", uint32_t{2});
       },
       kUnimplemented, "2 of 4 groups"},
      {[&](GgufBuilder& f) { named(f, "blk.1.ffn_up_exps.weight").name = "blk.1.other"; },
       absl::StatusCode::kNotFound, "tensor \"blk.1.ffn_up_exps.weight\" is missing"},
      {[&](GgufBuilder& f) { named(f, "blk.1.ffn_up_exps.weight").name = "blk.1.ffn_up.0.weight"; },
       kUnimplemented, "experts in tensors of their own are not supported"},
      {[&](GgufBuilder& f) {
         f.Tensor("blk.0.ffn_up_shexp.weight", {32, 2}, kGgufF32, std::string(256, 'a'));
       },
       kInvalid, "\"blk.0.ffn_up_shexp.weight\" at byte"},
      {[&](GgufBuilder& f) {
         f.Tensor("blk.0.exp_probs_b.bias", {5}, kGgufF32, std::string(20, 'a'));
       },
       kInvalid, "\"blk.0.exp_probs_b.bias\" at byte"},
  };
  for (const auto& refused : kCases) {
    const absl::Status status = error(refused.change);
    EXPECT_EQ(status.code(), refused.code) << status << " for " << refused.says;
    EXPECT_THAT(std::string(status.message()), HasSubstr(refused.says));
  }
  // Routers are float32 in files of any type.
  const std::string half = model.Write(model.Gguf(DType::kF16), "f16.gguf");
  EXPECT_EQ(LoadModelConfig(half)->dtype, DType::kF16);
  EXPECT_EQ(LoadWeights(half, *LoadModelConfig(half))->layers[0].router.type, WeightType::kF32);
}

// Expert 3's rows are the fourth part of a tensor, whose rows are counted together.
TEST(GgufWeights, AWeightThatIsNoNumberIsNamedAsTheFileHasIt) {
  const RandomModel model(SmallConfig("mixtral"));
  const std::string path = model.Write(model.Gguf(DType::kF32), "nan.gguf");
  const auto config = LoadModelConfig(path);
  const auto weights = LoadWeights(path, *config);
  ASSERT_TRUE(weights.ok()) << weights.status();
  const WeightMatrix& down = weights->layers[1].experts[3].down;
  ASSERT_EQ(down.first_row, 3 * 32);
  std::string bytes = ReadText(path);
  const GgufTensor* tensor = weights->gguf->contents().FindTensor("blk.1.ffn_down_exps.weight");
  const size_t offset = tensor->begin + (down.first_row + 7) * down.cols * sizeof(float);
  const float nan = NAN;
  std::memcpy(&bytes[offset + 4 * sizeof(float)], &nan, sizeof(nan));
  WriteText(path, bytes);
  const auto broken = LoadWeights(path, *config);
  const auto backend = kernels::MakeCpuBackend("auto", 1);
  const absl::Status status =
      Decoder::Create(*config, *broken, *backend,
                      {.compute = DType::kF32, .kv_dtype = DType::kF32, .kv_bytes = 1 << 20})
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("nan.gguf: tensor \"blk.1.ffn_down_exps.weight\" has NaN at [103, 4]"));
}

TEST(GgufWeights, HalfPrecisionIsPackedAsItIs) {
  const RandomModel model(SmallConfig("llama"));
  const std::string path = model.Write(model.Gguf(DType::kF16), "f16.gguf");
  EXPECT_EQ(LoadModelConfig(path)->dtype, DType::kF16);
  EXPECT_EQ(Logits(path, DType::kF16).size(), size_t{30} * 40);
  const std::string bf16 = model.Write(model.Gguf(DType::kBF16), "bf16.gguf");
  EXPECT_EQ(LoadModelConfig(bf16)->dtype, DType::kBF16);
  EXPECT_EQ(LoadModelConfig(model.Write(model.Gguf(DType::kF32), "f32.gguf"))->dtype, DType::kF32);
}

class QuantisedGguf : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Families, QuantisedGguf, ::testing::Values("llama", "granite", "phi3"),
                         [](const auto& info) { return info.param; });

// Random blocks of every type in turn, and the values that they stand for.
TEST_P(QuantisedGguf, TensorsComputeWhatTheirValuesCompute) {
  const RandomModel model(SmallConfig(GetParam()));
  std::mt19937 random(3);
  GgufBuilder quantised = KeysOf(model.config()), widened = KeysOf(model.config());
  const WeightType types[] = {WeightType::kQ8_0, WeightType::kQ4_0, WeightType::kQ4_1,
                              WeightType::kQ5_0, WeightType::kQ5_1, WeightType::kF16};
  size_t turn = 0;
  for (const TensorSpec& spec : FileTensors(model.config())) {
    const WeightType type = spec.rows == 0 ? WeightType::kF32 : types[turn++ % std::size(types)];
    const int64_t rows = std::max<int64_t>(spec.rows, 1),
                  row_bytes = kernels::WeightRowBytes(type, spec.cols);
    std::string data(rows * row_bytes, '\0');
    const kernels::BlockSize block = kernels::BlockSizeOf(type);
    for (size_t at = 0; at < data.size(); at += block.bytes) {
      for (int64_t i = 0; i < block.bytes; ++i) data[at + i] = static_cast<char>(random());
      // Scales and offsets of about 2^-8, of either sign.
      const int halves = type == WeightType::kQ4_1 || type == WeightType::kQ5_1 ? 2 : 1;
      for (int half = 0; half < halves; ++half) {
        const uint16_t bits = static_cast<uint16_t>(0x1C00 + (random() & 0x83FF));
        std::memcpy(&data[at + 2 * half], &bits, 2);
      }
      if (type == WeightType::kF32) {
        const float value = 1 + static_cast<float>(random() % 64) / 256;
        std::memcpy(&data[at], &value, 4);
      }
    }
    std::vector<float> values(rows * spec.cols);
    for (int64_t row = 0; row < rows; ++row) {
      kernels::DequantizeRow(type,
                             reinterpret_cast<const std::byte*>(data.data()) + row * row_bytes,
                             spec.cols, values.data() + row * spec.cols);
    }
    RandomModel::Add(spec, type, data, &quantised);
    RandomModel::Add(spec, WeightType::kF32,
                     std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4),
                     &widened);
  }
  const std::string path = model.Write(quantised, "quantised.gguf");
  const std::string same = model.Write(widened, "widened.gguf");
  EXPECT_EQ(LoadModelConfig(path)->dtype, DType::kBF16);
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const std::vector<float> logits = Logits(path, compute);
    ASSERT_EQ(logits.size(), size_t{30} * 40);
    EXPECT_EQ(logits, Logits(same, compute));
  }

  // As they are stored, what rounding the activations to 8 bits costs is all that differs.
  const std::vector<float> wide = Logits(path, DType::kF32);
  const std::vector<float> stored = Logits(path, DType::kF32, WeightStorage::kStored);
  const double error = RelativeError(stored, wide);
  EXPECT_GT(error, 0);
  EXPECT_LT(error, 0.02);
}

TEST(GgufWeights, RoundedWhileLoadingWeightsComputeWhatTheirBlocksCompute) {
  const RandomModel model(SmallConfig("qwen2"));
  const std::vector<float> exact = Logits(model.directory(), DType::kF32);
  const std::vector<float> int8 = Logits(model.directory(), DType::kF32, WeightStorage::kInt8);
  const std::vector<float> int4 = Logits(model.directory(), DType::kF32, WeightStorage::kInt4);
  const std::vector<float> float8 = Logits(model.directory(), DType::kF32, WeightStorage::kFloat8);
  const std::vector<float> w8a8 = Logits(model.directory(), DType::kF32, WeightStorage::kW8A8);
  EXPECT_LT(RelativeError(int8, exact), 0.03);
  EXPECT_LT(RelativeError(w8a8, exact), 0.05);
  EXPECT_GT(RelativeError(w8a8, exact), RelativeError(int8, exact));
  EXPECT_LT(RelativeError(float8, exact), 0.1);
  EXPECT_GT(RelativeError(float8, exact), RelativeError(int8, exact));
  EXPECT_LT(RelativeError(int4, exact), 0.3);
  EXPECT_GT(RelativeError(int4, exact), RelativeError(int8, exact));
  const std::vector<float> w4a8 = Logits(model.directory(), DType::kF32, WeightStorage::kW4A8);
  EXPECT_LT(RelativeError(w4a8, exact), 0.4);
  EXPECT_GT(RelativeError(w4a8, exact), RelativeError(w8a8, exact));
  // A plain file has nothing to compute as stored: its products stay as they are.
  EXPECT_EQ(Logits(model.directory(), DType::kF32, WeightStorage::kStored), exact);
}

// A file of the model's shape whose matrices are Q8_0: its path.
std::string WriteBlocks(const RandomModel& model) {
  GgufBuilder file = KeysOf(model.config());
  for (const TensorSpec& spec : FileTensors(model.config())) {
    const WeightType type = spec.rows == 0 ? WeightType::kF32 : WeightType::kQ8_0;
    const int64_t bytes =
        std::max<int64_t>(spec.rows, 1) * kernels::WeightRowBytes(type, spec.cols);
    RandomModel::Add(spec, type, std::string(bytes, '\0'), &file);
  }
  return model.Write(file, "q8_0.gguf");
}

TEST(GgufWeights, AStorageThatTheFileDoesNotFitIsRefused) {
  const RandomModel model(SmallConfig("llama"));
  const auto plain = LoadWeights(model.directory(), model.config());
  ASSERT_TRUE(plain.ok());
  EXPECT_TRUE(CheckWeightStorage(WeightStorage::kWide, *plain).ok());
  EXPECT_TRUE(CheckWeightStorage(WeightStorage::kInt8, *plain).ok());
  EXPECT_TRUE(CheckWeightStorage(WeightStorage::kInt4, *plain).ok());
  EXPECT_TRUE(CheckWeightStorage(WeightStorage::kFloat8, *plain).ok());
  EXPECT_TRUE(CheckWeightStorage(WeightStorage::kW8A8, *plain).ok());
  EXPECT_TRUE(CheckWeightStorage(WeightStorage::kW4A8, *plain).ok());
  EXPECT_THAT(
      std::string(CheckWeightStorage(WeightStorage::kStored, *plain).message()),
      ::testing::StartsWith("weights is stored: this model's file has no quantised weights"));
  const auto blocks = LoadWeights(WriteBlocks(model), model.config());
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  EXPECT_TRUE(CheckWeightStorage(WeightStorage::kStored, *blocks).ok());
  for (const WeightStorage storage :
       {WeightStorage::kInt8, WeightStorage::kInt4, WeightStorage::kFloat8, WeightStorage::kW8A8,
        WeightStorage::kW4A8}) {
    EXPECT_THAT(std::string(CheckWeightStorage(storage, *blocks).message()),
                ::testing::HasSubstr("this model's file is quantised (Q8_0): say stored or wide"));
  }
  EXPECT_EQ(ParseWeightStorage("int4").value(), WeightStorage::kInt4);
  EXPECT_EQ(ParseWeightStorage("fp8").value(), WeightStorage::kFloat8);
  EXPECT_EQ(ParseWeightStorage("w8a8").value(), WeightStorage::kW8A8);
  EXPECT_EQ(ParseWeightStorage("int3").status().message(),
            "weights: 'int3' is not one of wide, stored, int8, int4, fp8, w8a8, w4a8");
}

// A GPU's products of quantised weights are in bfloat16, whatever the plain ones of the same model are in.
TEST(GgufWeights, QuantisedWeightsOnAGpuAreComputedInBfloat16) {
  const RandomModel model(SmallConfig("llama"));
  ModelOptions options;
  options.device = "cuda";
  for (const char* storage : {"stored", "int8", "int4", "fp8", "w8a8", "w4a8"}) {
    options.weights = storage;
    for (const char* dtype : {"auto", "bf16"}) {
      options.dtype = dtype;
      const auto resolved = ResolveDecoderOptions(model.config(), options);
      ASSERT_TRUE(resolved.ok()) << resolved.status();
      EXPECT_EQ(resolved->compute, DType::kBF16) << storage << " " << dtype;
      EXPECT_EQ(resolved->kv_dtype, DType::kBF16);
    }
    options.dtype = "f32";
    EXPECT_EQ(ResolveDecoderOptions(model.config(), options).status().message(),
              "dtype: with --device cuda products with quantised weights (weights is " +
                  std::string(storage) +
                  ") are in bfloat16: say auto or bf16; --device cpu has f32");
  }
  // A model of this size is computed exactly otherwise.
  options.weights = "wide";
  options.dtype = "auto";
  options.kv_dtype = "bf16";
  const auto wide = ResolveDecoderOptions(model.config(), options);
  ASSERT_TRUE(wide.ok()) << wide.status();
  EXPECT_EQ(wide->compute, DType::kF32);
}

TEST(GgufWeights, MemoryOfWeightsIsCountedAsTheyAreKept) {
  const RandomModel model(SmallConfig("llama"));
  const auto weights = LoadWeights(model.directory(), model.config());
  ASSERT_TRUE(weights.ok());
  for (const WeightStorage storage :
       {WeightStorage::kWide, WeightStorage::kInt8, WeightStorage::kInt4, WeightStorage::kFloat8,
        WeightStorage::kW8A8, WeightStorage::kW4A8}) {
    const auto backend = kernels::MakeCpuBackend("auto", 1);
    DecoderOptions options;
    options.compute = DType::kBF16;
    options.weights = storage;
    options.kv_bytes = 1 << 20;
    const auto decoder = Decoder::Create(model.config(), *weights, *backend, options);
    ASSERT_TRUE(decoder.ok()) << decoder.status();
    // Panels are filled up to 16 outputs and to pages.
    const auto counted = static_cast<double>(StorageBytes(storage, *weights, DType::kBF16, false));
    EXPECT_GE(static_cast<double>((*decoder)->weight_bytes()), counted);
    EXPECT_LE(static_cast<double>((*decoder)->weight_bytes()), 1.3 * counted + 65536);
  }
}

TEST(GgufWeights, EveryNormAndBiasIsCountedAsFloat32) {
  for (const char* model_type : {"llama", "qwen2", "qwen3"}) {
    for (const bool tied : {false, true}) {
      SCOPED_TRACE(std::string(model_type) + (tied ? ", tied" : ""));
      json config = SmallConfig(model_type);
      config["tie_word_embeddings"] = tied;
      if (std::string(model_type) == "llama") {
        config["attention_bias"] = config["mlp_bias"] = true;
      }
      const RandomModel model(config);
      const auto weights = LoadWeights(model.directory(), model.config());
      ASSERT_TRUE(weights.ok()) << weights.status();
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const auto value_bytes = static_cast<int64_t>(kernels::DTypeBytes(dtype));
        int64_t vectors = 0, matrices = 0;
        for (const TensorSpec& spec : ModelTensors(model.config(), nullptr)) {
          (spec.rows == 0 ? vectors : matrices) += std::max<int64_t>(spec.rows, 1) * spec.cols;
        }
        EXPECT_GT(vectors, 0);
        EXPECT_EQ(WeightBytes(model.config(), dtype), 4 * vectors + value_bytes * matrices);
        // Rows of the embedding are looked up in the file where the output has a matrix of its own.
        const int64_t looked_up = tied ? 0 : weights->embedding.rows * weights->embedding.cols;
        EXPECT_EQ(StorageBytes(WeightStorage::kWide, *weights, dtype, false),
                  4 * vectors + value_bytes * (matrices - looked_up));
      }
    }
  }
}

TEST(GgufWeights, TheBlocksStayWithinReachAndCopiesAreOfOneProduct) {
  const RandomModel model(SmallConfig("llama"));
  GgufBuilder file = model.Gguf(DType::kF32);
  std::string data(34 * 40, '\0');
  for (size_t at = 0; at < data.size(); at += 34) data[at + 1] = 0x1C;  // zeros with a scale
  std::erase_if(file.tensors(), [](const auto& tensor) { return tensor.name == "output.weight"; });
  file.Tensor("output.weight", {32, 40}, kGgufQ8_0, data);
  const std::string path = model.Write(file, "q8.gguf");
  const auto config = LoadModelConfig(path);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto weights = LoadWeights(path, *config);
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->lm_head.type, WeightType::kQ8_0);
  EXPECT_FALSE(weights->lm_head.IsPlain());
  EXPECT_EQ(weights->lm_head.rows, 40);
  EXPECT_EQ(weights->lm_head.RowInFile(3),
            static_cast<const std::byte*>(weights->lm_head.data) + 3 * 34);
  // Q and K of a layer, whose rows are put in order, are more than the output embedding.
  EXPECT_EQ(PackingCopyBytes(*weights, DType::kBF16), (2 + 1) * 64 * 32 * 4);
  EXPECT_TRUE(weights->layers[0].v.IsPlain());
}

TEST(GgufWeights, TensorsThatDoNotFitAreNamed) {
  const RandomModel model(SmallConfig("llama"));
  const GgufBuilder whole = model.Gguf(DType::kF32);
  const auto refusal = [&](const std::function<void(GgufBuilder&)>& change) {
    GgufBuilder file = whole;
    change(file);
    const std::string path = model.Write(file, "bad.gguf");
    const auto config = LoadModelConfig(path);
    if (!config.ok()) return config.status();
    return LoadWeights(path, *config).status();
  };
  const auto named = [](GgufBuilder& file, std::string_view name) -> GgufBuilder::TensorInfo& {
    for (auto& tensor : file.tensors()) {
      if (tensor.name == name) return tensor;
    }
    std::abort();
  };
  absl::Status status =
      refusal([&](GgufBuilder& f) { named(f, "blk.1.ffn_up.weight").name = "blk.1.other"; });
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("bad.gguf: tensor \"blk.1.ffn_up.weight\" is missing"));
  status = refusal([&](GgufBuilder& f) { named(f, "blk.1.ffn_up.weight").dims = {64, 32}; });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("dimensions [64, 32], expected [32, 64]"));
  status = refusal([&](GgufBuilder& f) { named(f, "blk.0.attn_v.weight").type = 20; });
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("tensor \"blk.0.attn_v.weight\" at byte"));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("type IQ4_NL is not supported; winnow reads F32, F16, BF16, Q4_0"));
  status = refusal([&](GgufBuilder& f) {
    f.Tensor("blk.0.attn_q_norm.weight", {64}, kGgufF32, std::string(256, 'a'));
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("\"blk.0.attn_q_norm.weight\" at byte"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("no part of a LlamaForCausalLM"));
}

TEST(GgufWeights, FingerprintsAreOfTheFilesBytes) {
  const RandomModel model(SmallConfig("qwen3"));
  const auto fingerprints = [&](const GgufBuilder& file, const std::string& name) {
    const std::string path = model.Write(file, name);
    const auto config = LoadModelConfig(path);
    EXPECT_TRUE(config.ok()) << config.status();
    const auto weights = LoadWeights(path, *config);
    EXPECT_TRUE(weights.ok()) << weights.status();
    return std::pair(ModelFingerprint(*config, *weights).value(),
                     KvFingerprint(*config, *weights).value());
  };
  const auto same = fingerprints(model.Gguf(DType::kF32), "a.gguf");
  EXPECT_EQ(fingerprints(model.Gguf(DType::kF32), "b.gguf"), same);
  const auto other = fingerprints(model.Gguf(DType::kBF16), "c.gguf");
  EXPECT_NE(other.first, same.first);
  EXPECT_NE(other.second, same.second);
}

TEST(GgufWeights, TheArtifactIsTheOneBesideTheFileOfTheSameName) {
  const TempDir dir;
  const RandomModel model(SmallConfig("llama"));
  const std::string path = dir.File("name.Q8_0.gguf");
  WriteText(path, model.Gguf(DType::kF32).Build());
  const auto config = LoadModelConfig(path);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto weights = LoadWeights(path, *config);
  ASSERT_TRUE(weights.ok()) << weights.status();
  WriteText(dir.File(kArtifactFile), "of another model in this folder");
  EXPECT_TRUE(ResolveRetrieval(path, *config, *weights, {}).ok());
  WriteText(dir.File("name.Q8_0.winnow-artifact.safetensors"), "no artifact");
  const absl::Status status = ResolveRetrieval(path, *config, *weights, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("name.Q8_0.winnow-artifact.safetensors"));
}

TEST(GgufWeights, CopiesThatFindNoMemoryAreRefusedBeforeTheyAreMade) {
  const RandomModel model(SmallConfig("llama"));
  const auto options = ResolveDecoderOptions(model.config(), {});
  ASSERT_TRUE(options.ok()) << options.status();
  const auto backend = kernels::MakeCpuBackend("auto", 1);
  const auto plan = PlanKv(model.config(), *options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(CheckMemory(model.config(), *options, *plan, *backend, 1 << 20).ok());
  const absl::Status status =
      CheckMemory(model.config(), *options, *plan, *backend, int64_t{1} << 60);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("widening quantised weights takes 1152921504606846976"));
}

// A model that does not fit wide may fit as its file has it, or rounded: the refusal names how.
TEST(GgufWeights, FormsThatFitAreThoseThatFileAndDeviceCanHave) {
  const RandomModel model(SmallConfig("llama"));
  const auto quantised = LoadWeights(WriteBlocks(model), model.config());
  ASSERT_TRUE(quantised.ok()) << quantised.status();
  const auto plain = LoadWeights(model.directory(), model.config());
  ASSERT_TRUE(plain.ok()) << plain.status();
  ModelOptions options;
  options.dtype = "bf16";
  const auto resolved = ResolveDecoderOptions(model.config(), options);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  const int64_t all = KeptWeightBytes(options, *resolved, *plain);
  const auto forms = [&](const Weights& weights, int64_t room) {
    return FormsThatFit(model.config(), options, weights,
                        [&](int64_t bytes) { return bytes <= room; });
  };
  EXPECT_THAT(forms(*quantised, all - 1), ElementsAre("stored"));
  // Rows of so small a model are half a group of w8a8 and w4a8, which keep whole ones.
  EXPECT_THAT(forms(*plain, all - 1), ElementsAre("int8", "int4", "fp8", "w4a8"));
  EXPECT_THAT(forms(*plain, all / 2), ElementsAre("int4"));
  EXPECT_THAT(forms(*plain, all / 10), IsEmpty());
  options.weights = "int8";
  EXPECT_THAT(forms(*plain, 2 * all), ElementsAre("wide", "int4", "fp8", "w8a8", "w4a8"));
  // Every form but wide is bfloat16's on a GPU.
  options.weights = "wide";
  options.device = "cuda";
  options.dtype = "f32";
  EXPECT_THAT(forms(*plain, 8 * all), IsEmpty());
}

}  // namespace
}  // namespace winnow::engine
