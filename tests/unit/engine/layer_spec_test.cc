// Layers are data: the entry of a family gives the layers of its models and the names of their tensors, and what the
// forward pass does not compute is refused by name.
#include "engine/model/layer_spec.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "engine/model/model_config.h"
#include "engine/model/model_family.h"
#include "engine/model/weights.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/model_files.h"

namespace winnow::engine {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// config.json of the family with these keys. All layers have experts, or none has.
absl::StatusOr<ModelConfig> Parse(const ModelFamily& family, const nlohmann::json& keys) {
  nlohmann::json config = TinyConfig();
  config["architectures"] = {family.architecture};
  config["model_type"] = family.model_type;
  config["sliding_window"] = nullptr;
  if (const ExpertKeys* experts = family.experts; experts != nullptr) {
    using DenseLayers = ExpertKeys::DenseLayers;
    if (!experts->count_key.empty()) config[std::string(experts->count_key)] = 8;
    config[std::string(experts->per_token_key)] = 2;
    if (experts->dense == DenseLayers::kFirst) config["first_k_dense_replace"] = 0;
    if (experts->dense == DenseLayers::kOutside) config["moe_layer_start_index"] = 0;
  }
  config.update(keys);
  return ParseModelConfig(config.dump(), "config.json", "", "");
}

TEST(ModelFamilyTest, EntryGivesTheLayersOfItsModels) {
  for (const ModelFamily& family : ModelFamilies()) {
    EXPECT_EQ(&FamilyOf(family.family), &family);
    const auto config = Parse(family, {{"num_hidden_layers", 5}});
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->family, family.family);
    EXPECT_THAT(config->layers, SizeIs(5));
    for (int32_t i = 0; i < 5; ++i) {
      LayerSpec expected = family.layer;
      if (family.no_rope_interval == i + 1) expected.rope = LayerSpec::kNoRope;
      if (family.has_rope_by_type && (i + 1) % family.windows.but != 0) expected.rope = 1;
      EXPECT_EQ(config->layers[i], expected) << family.name << ", layer " << i;
    }
    EXPECT_TRUE(CheckLayers(config->layers, static_cast<int32_t>(config->ropes.size())).ok());
  }
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kLlama).layer, LayerSpec());
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kMistral).layer, LayerSpec());
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kQwen2).layer, LayerSpec{.qkv_bias = true});
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kQwen3).layer, LayerSpec{.qk_norm = true});
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kSmolLM3).layer, LayerSpec());
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kSmolLM3).no_rope_interval, 4);
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kSeedOss).layer, LayerSpec{.qkv_bias = true});
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kGranite).layer, LayerSpec());
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kPhi3).layer, LayerSpec());
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kGlm).layer, LayerSpec{.qkv_bias = true});
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kGlm4).layer,
            (LayerSpec{.norms = LayerSpec::Norms::kAround, .qkv_bias = true}));
  for (const auto family : {ModelConfig::Family::kOlmo2, ModelConfig::Family::kOlmo3}) {
    EXPECT_EQ(
        FamilyOf(family).layer,
        (LayerSpec{.norms = LayerSpec::Norms::kAfter, .qk_norm = true, .qk_norm_whole = true}));
  }
  EXPECT_EQ(
      FamilyOf(ModelConfig::Family::kGemma3).layer,
      (LayerSpec{
          .norms = LayerSpec::Norms::kAround, .mlp = LayerSpec::Mlp::kGatedGelu, .qk_norm = true}));
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kExaone4).layer,
            (LayerSpec{.norms = LayerSpec::Norms::kAfter, .qk_norm = true}));
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kErnie).layer, LayerSpec());
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kMixtral).layer,
            LayerSpec{.mlp = LayerSpec::Mlp::kExperts});
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kQwen2Moe).layer,
            (LayerSpec{.mlp = LayerSpec::Mlp::kExperts, .qkv_bias = true}));
  for (const auto family : {ModelConfig::Family::kGlm4Moe, ModelConfig::Family::kErnieMoe}) {
    EXPECT_EQ(FamilyOf(family).layer, LayerSpec{.mlp = LayerSpec::Mlp::kExperts});
  }
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kMiniMaxM2).layer,
            (LayerSpec{.mlp = LayerSpec::Mlp::kExperts, .qk_norm = true, .qk_norm_whole = true}));
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kDots1).layer,
            (LayerSpec{.mlp = LayerSpec::Mlp::kExperts, .qk_norm = true}));
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kQwen3Moe).layer,
            (LayerSpec{.mlp = LayerSpec::Mlp::kExperts, .qk_norm = true}));
  EXPECT_EQ(FamilyOf(ModelConfig::Family::kGptOss).layer,
            (LayerSpec{.mlp = LayerSpec::Mlp::kExperts,
                       .qkv_bias = true,
                       .o_bias = true,
                       .mlp_bias = true,
                       .sinks = true}));
}

// Keys that an entry does not honour leave its layers alone or are refused: never half of each.
TEST(ModelFamilyTest, EntrySaysWhichBiasesKeysGive) {
  for (const ModelFamily& family : ModelFamilies()) {
    for (const auto& [key, rule] :
         {std::pair("attention_bias", family.attention_bias),
          {"mlp_bias", family.mlp_bias},
          {"attention_out_bias", family.out_bias == ModelFamily::OutBias::kOwnKey
                                     ? ModelFamily::Key::kHonoured
                                     : ModelFamily::Key::kRefused}}) {
      const auto config = Parse(family, {{key, true}});
      LayerSpec expected = family.layer;
      switch (rule) {
        case ModelFamily::Key::kRefused:
          EXPECT_EQ(config.status().code(), absl::StatusCode::kUnimplemented) << family.name;
          EXPECT_THAT(std::string(config.status().message()), HasSubstr(key));
          continue;
        case ModelFamily::Key::kHonoured:
          if (key == std::string("mlp_bias")) {
            expected.mlp_bias = true;
          } else if (key == std::string("attention_out_bias")) {
            expected.o_bias = true;
          } else {
            expected.qkv_bias = true;
            expected.o_bias = family.out_bias == ModelFamily::OutBias::kAttentionBias;
          }
          break;
        case ModelFamily::Key::kIgnored:
          break;
      }
      if (family.has_rope_by_type) expected.rope = 1;
      ASSERT_TRUE(config.ok()) << family.name << ": " << config.status();
      EXPECT_THAT(config->layers, Each(expected)) << family.name << ", " << key;
    }
  }
}

// Layers that are not alike: each has the tensors of its own description.
TEST(ModelFamilyTest, TensorsFollowEachLayersDescription) {
  auto config = Parse(FamilyOf(ModelConfig::Family::kLlama), {{"num_hidden_layers", 3}});
  ASSERT_TRUE(config.ok());
  config->layers[1] = {.qk_norm = true, .qkv_bias = true};
  config->layers[2] = {.o_bias = true, .mlp_bias = true};
  std::set<std::string> optional;
  for (const TensorSpec& spec : ModelTensors(*config, nullptr)) {
    if (spec.name.ends_with(".bias") || spec.name.ends_with("_norm.weight")) {
      optional.insert(spec.name);
      EXPECT_TRUE(spec.gguf_name.starts_with("blk.")) << spec.gguf_name;
    }
  }
  const std::set<std::string> expected = {
      "model.layers.1.self_attn.q_proj.bias",   "model.layers.1.self_attn.k_proj.bias",
      "model.layers.1.self_attn.v_proj.bias",   "model.layers.1.self_attn.q_norm.weight",
      "model.layers.1.self_attn.k_norm.weight", "model.layers.2.self_attn.o_proj.bias",
      "model.layers.2.mlp.gate_proj.bias",      "model.layers.2.mlp.up_proj.bias",
      "model.layers.2.mlp.down_proj.bias"};
  EXPECT_EQ(optional, expected);
}

TEST(LayerSpecTest, RowsSeenAreThoseOfWindows) {
  const std::vector<LayerSpec> layers = {{}, {.window = 10}, {.window = 100}};
  EXPECT_EQ(KvRowsSeen(layers, 2, 0), 2 * (1 + 1 + 1));
  EXPECT_EQ(KvRowsSeen(layers, 2, 9), 2 * (10 + 10 + 10));
  EXPECT_EQ(KvRowsSeen(layers, 2, 10), 2 * (11 + 10 + 11));
  EXPECT_EQ(KvRowsSeen(layers, 1, 500, 4), 504 + 13 + 103);
  EXPECT_EQ(KvRowsSeen(layers, 1, 8, 4), 12 + 12 + 12);
}

TEST(LayerSpecTest, WhatIsNotComputedIsRefusedByLayerAndName) {
  const struct {
    LayerSpec layer;
    absl::StatusCode code;
    const char* property;
  } kCases[] = {
      {{.mlp = LayerSpec::Mlp::kGatedGelu},
       absl::StatusCode::kUnimplemented,
       "gelu without a norm after the MLP"},
      {{.norms = LayerSpec::Norms::kAround, .mlp = LayerSpec::Mlp::kExperts},
       absl::StatusCode::kUnimplemented,
       "norms after attention and experts"},
      {{.rope = 2}, absl::StatusCode::kInvalidArgument, "no RoPE set 2; the model has 2"},
      {{.rope = -2}, absl::StatusCode::kInvalidArgument, "no RoPE set -2; the model has 2"},
  };
  const LayerSpec all_that_is_computed = {.window = 4096,
                                          .rope = 1,
                                          .norms = LayerSpec::Norms::kAround,
                                          .qk_norm = true,
                                          .qk_norm_whole = true,
                                          .qkv_bias = true,
                                          .o_bias = true,
                                          .mlp_bias = true,
                                          .sinks = true};
  EXPECT_TRUE(CheckLayers(std::vector<LayerSpec>(4, all_that_is_computed), 2).ok());
  EXPECT_TRUE(CheckLayers(std::vector<LayerSpec>(4, {.rope = LayerSpec::kNoRope}), 2).ok());
  EXPECT_TRUE(CheckLayers(std::vector<LayerSpec>(4, {.mlp = LayerSpec::Mlp::kExperts}), 2).ok());
  EXPECT_TRUE(
      CheckLayers(std::vector<LayerSpec>(4, {.mlp = LayerSpec::Mlp::kExperts, .mlp_bias = true}), 2)
          .ok());
  for (const auto& refused : kCases) {
    std::vector<LayerSpec> layers(4, all_that_is_computed);
    layers[2] = refused.layer;
    const absl::Status status = CheckLayers(layers, 2);
    EXPECT_EQ(status.code(), refused.code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("layer 2: "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(refused.property));
  }
}

}  // namespace
}  // namespace winnow::engine
