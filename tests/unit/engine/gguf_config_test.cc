#include "engine/model/gguf_config.h"

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "engine/model/model_family.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/gguf_files.h"
#include "tests/unit/engine/model_files.h"

namespace winnow::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The keys of Llama 3.2 1B, and the tensors that say something by being there.
GgufBuilder Llama() {
  GgufBuilder file;
  file.Set("general.architecture", "llama");
  file.Set("general.type", "model");
  file.Set("llama.block_count", uint32_t{16});
  file.Set("llama.context_length", uint32_t{131072});
  file.Set("llama.embedding_length", uint32_t{2048});
  file.Set("llama.feed_forward_length", uint32_t{8192});
  file.Set("llama.attention.head_count", uint32_t{32});
  file.Set("llama.attention.head_count_kv", uint32_t{8});
  file.Set("llama.rope.freq_base", 500000.0f);
  file.Set("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  file.Set("llama.attention.key_length", uint32_t{64});
  file.Set("llama.attention.value_length", uint32_t{64});
  file.Set("llama.vocab_size", uint32_t{8});
  file.Set("llama.rope.dimension_count", uint32_t{64});
  file.Set("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b", "<|begin|>", "<|eot_id|>",
                                                             "<|eom_id|>", "<|end|>", "x", "y"});
  file.Set("tokenizer.ggml.token_type", std::vector<int32_t>{1, 1, 3, 3, 3, 1, 1, 1});
  file.Set("tokenizer.ggml.bos_token_id", uint32_t{2});
  file.Set("tokenizer.ggml.eos_token_id", uint32_t{6});
  file.Tensor("token_embd.weight", {2048, 8}, kGgufF16, std::string(2048 * 8 * 2, '\0'));
  return file;
}

absl::StatusOr<ModelConfig> Read(const GgufBuilder& file) {
  const std::string bytes = file.Build();
  const auto contents = GgufContents::Parse(AsBytes(bytes));
  if (!contents.ok()) return contents.status();
  return GgufModelConfig(*contents, "m.gguf");
}

TEST(GgufConfig, ReadsWhatConfigJsonWouldSay) {
  const auto config = Read(Llama());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, ModelConfig::Family::kLlama);
  EXPECT_EQ(config->architecture, "LlamaForCausalLM");
  EXPECT_EQ(config->hidden_size, 2048);
  EXPECT_EQ(config->intermediate_size, 8192);
  EXPECT_EQ(config->num_layers(), 16);
  EXPECT_EQ(config->num_heads, 32);
  EXPECT_EQ(config->num_kv_heads, 8);
  EXPECT_EQ(config->head_dim, 64);
  EXPECT_EQ(config->vocab_size, 8);
  EXPECT_EQ(config->max_position_embeddings, 131072);
  EXPECT_EQ(config->rms_norm_eps, 1e-5f);
  EXPECT_EQ(config->ropes[0].theta, 500000.0);
  EXPECT_EQ(config->ropes[0].scaling, RopeScaling());
  EXPECT_FALSE(config->layers[0].qkv_bias || config->layers[0].o_bias ||
               config->layers[0].mlp_bias || config->layers[0].qk_norm);
  EXPECT_TRUE(config->tie_word_embeddings);
  EXPECT_EQ(config->dtype, kernels::DType::kF16);
  EXPECT_EQ(config->bos_token_id, 2);
  // The key's, and the two control tokens that are known by their text; "<|end|>" is an ordinary one here.
  EXPECT_THAT(config->eos_token_ids, ElementsAre(3, 4, 6));
}

TEST(GgufConfig, AnEndOfAMessageEndsNoTurnThatHasSeveral) {
  for (const bool named : {false, true}) {
    GgufBuilder file = Llama();
    file.Remove("tokenizer.ggml.tokens");
    file.Remove("tokenizer.ggml.token_type");
    file.Set("tokenizer.ggml.tokens",
             std::vector<std::string>{"a", "<|end|>", "<|begin|>", "<|call|>", "<|return|>",
                                      "<|endoftext|>", "x", "y"});
    file.Set("tokenizer.ggml.token_type", std::vector<int32_t>{1, 3, 3, 3, 3, 3, 1, 1});
    if (named) file.Set("tokenizer.ggml.eot_token_id", uint32_t{1});
    const auto config = Read(file);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_THAT(config->eos_token_ids, ElementsAre(3, 4, 5, 6)) << named;
  }
}

TEST(GgufConfig, WhatTensorsThereAreIsPartOfIt) {
  GgufBuilder file = Llama();
  file.Tensor("output.weight", {2048, 8}, kGgufQ8_0, std::string(2048 * 8 / 32 * 34, '\0'));
  file.Tensor("blk.0.attn_q.bias", {2048}, kGgufF32, std::string(8192, '\0'));
  const auto config = Read(file);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_FALSE(config->tie_word_embeddings);
  EXPECT_TRUE(config->layers[0].qkv_bias);
  EXPECT_FALSE(config->layers[0].o_bias);
  EXPECT_EQ(config->dtype, kernels::DType::kBF16);  // of two types
}

TEST(GgufConfig, FamiliesDifferInWhatTheyHave) {
  for (const auto& [name, family] : {std::pair("qwen2", ModelConfig::Family::kQwen2),
                                     std::pair("qwen3", ModelConfig::Family::kQwen3)}) {
    GgufBuilder file;
    file.Set("general.architecture", name);
    const std::string prefix = std::string(name) + ".";
    file.Set(prefix + "block_count", uint32_t{2});
    file.Set(prefix + "context_length", uint32_t{4096});
    file.Set(prefix + "embedding_length", uint32_t{256});
    file.Set(prefix + "feed_forward_length", uint32_t{512});
    file.Set(prefix + "attention.head_count", uint32_t{4});
    file.Set(prefix + "attention.layer_norm_rms_epsilon", 1e-6f);
    file.Tensor("token_embd.weight", {256, 4}, kGgufF32, std::string(4096, '\0'));
    const auto config = Read(file);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->family, family);
    EXPECT_EQ(config->num_kv_heads, 4);  // as many as query heads where the key is not there
    EXPECT_EQ(config->head_dim, 64);
    EXPECT_EQ(config->ropes[0].theta, 10000.0);
    EXPECT_EQ(config->layers[0].qkv_bias, family == ModelConfig::Family::kQwen2);
    EXPECT_EQ(config->layers[0].qk_norm, family == ModelConfig::Family::kQwen3);
    EXPECT_EQ(config->bos_token_id, std::nullopt);
    EXPECT_THAT(config->eos_token_ids, IsEmpty());
  }
}

TEST(GgufConfig, NumbersForEachLayerMustBeTheSame) {
  GgufBuilder file = Llama();
  file.Remove("llama.attention.head_count_kv");
  file.Set("llama.attention.head_count_kv", std::vector<int32_t>(16, 8));
  ASSERT_TRUE(Read(file).ok()) << Read(file).status();
  EXPECT_EQ(Read(file)->num_kv_heads, 8);
  std::vector<int32_t> some(16, 8);
  some[7] = 4;
  file.Remove("llama.attention.head_count_kv");
  file.Set("llama.attention.head_count_kv", some);
  EXPECT_EQ(Read(file).status().code(), absl::StatusCode::kUnimplemented);
}

TEST(GgufConfig, RopeScalingIsThatOfTheKeys) {
  GgufBuilder linear = Llama();
  linear.Set("llama.rope.scaling.type", "linear");
  linear.Set("llama.rope.scaling.factor", 4.0f);
  EXPECT_EQ(Read(linear)->ropes[0].scaling.kind, RopeScaling::Kind::kLinear);
  EXPECT_EQ(Read(linear)->ropes[0].scaling.factor, 4.0);

  GgufBuilder older = Llama();
  older.Set("llama.rope.scale_linear", 2.0f);
  EXPECT_EQ(Read(older)->ropes[0].scaling.kind, RopeScaling::Kind::kLinear);
  EXPECT_EQ(Read(older)->ropes[0].scaling.factor, 2.0);

  GgufBuilder yarn = Llama();
  yarn.Set("llama.rope.scaling.type", "yarn");
  yarn.Set("llama.rope.scaling.factor", 4.0f);
  yarn.Set("llama.rope.scaling.original_context_length", uint32_t{32768});
  const auto config = Read(yarn);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->ropes[0].scaling.kind, RopeScaling::Kind::kYarn);
  EXPECT_EQ(config->ropes[0].scaling.original_max_position_embeddings, 32768);
  EXPECT_EQ(config->ropes[0].scaling.attention_factor, std::nullopt);
  EXPECT_NEAR(ComputeRope(*config).attention_factor, 0.1 * std::log(4.0) + 1, 1e-6);
  yarn.Set("llama.rope.scaling.attn_factor", 2.0f);
  EXPECT_NEAR(ComputeRope(*Read(yarn)).attention_factor, 2 * (0.1 * std::log(4.0) + 1), 1e-6);
}

// A writer has the outcome of Llama 3's scaling in a tensor: what each frequency is divided by.
TEST(GgufConfig, RopeFactorsAreLlama3sScaling) {
  ModelConfig llama3 = *Read(Llama());
  llama3.ropes[0].scaling.kind = RopeScaling::Kind::kLlama3;
  llama3.ropes[0].scaling.factor = 32;
  llama3.ropes[0].scaling.original_max_position_embeddings = 8192;
  const std::vector<float> scaled = ComputeRope(llama3).inv_freq;
  const std::vector<float> plain = ComputeRope(*Read(Llama())).inv_freq;
  std::string factors;
  for (size_t j = 0; j < plain.size(); ++j) factors += GgufBuilder::Bytes(plain[j] / scaled[j]);
  GgufBuilder file = Llama();
  file.Tensor("rope_freqs.weight", {32}, kGgufF32, factors);
  const auto config = Read(file);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->ropes[0].scaling.kind, RopeScaling::Kind::kFactors);
  const std::vector<float> computed = ComputeRope(*config).inv_freq;
  ASSERT_EQ(computed.size(), scaled.size());
  EXPECT_NE(computed, plain);
  for (size_t j = 0; j < computed.size(); ++j) EXPECT_NEAR(computed[j] / scaled[j], 1, 2e-7) << j;
}

struct Refusal {
  std::string what;
  std::function<void(GgufBuilder&)> change;
  std::string error;
  absl::StatusCode code = absl::StatusCode::kUnimplemented;
};

TEST(GgufConfig, WhatWouldChangeTheAnswerIsRefusedByName) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const auto set = [](const char* key, auto value) {
    return [=](GgufBuilder& file) {
      file.Remove(key);
      file.Set(key, value);
    };
  };
  const auto remove = [](const char* key) { return [=](GgufBuilder& file) { file.Remove(key); }; };
  const std::vector<Refusal> refusals = {
      {"architecture", set("general.architecture", "gemma4"),
       "\"gemma4\" is not supported; winnow runs llama, mistral3, qwen2, qwen3, qwen3vl, smollm3, "
       "seed_oss, granite, phi3, glm4, olmo2, gemma3, exaone4, ernie4_5, ernie4_5-moe, "
       "minimax-m2, qwen2moe, qwen3moe, qwen3vlmoe, olmoe, granitemoe, glm4moe, dots1, gpt-oss"},
      {"no architecture", remove("general.architecture"), "\"general.architecture\": missing",
       kInvalid},
      {"an adapter", set("general.type", "adapter"), "\"adapter\" is not supported"},
      {"a part", set("split.count", uint32_t{3}), "one of several"},
      {"experts that nobody is sent to", set("llama.expert_count", uint32_t{8}),
       "\"llama.expert_used_count\": missing", kInvalid},
      {"experts of a family without any",
       [](GgufBuilder& f) {
         GgufBuilder qwen2;
         qwen2.Set("general.architecture", "qwen2");
         for (const char* key : {"block_count", "context_length", "embedding_length",
                                 "feed_forward_length", "attention.head_count"}) {
           qwen2.Set(std::string("qwen2.") + key, uint32_t{64});
         }
         qwen2.Set("qwen2.attention.layer_norm_rms_epsilon", 1e-5f);
         qwen2.Set("qwen2.attention.key_length", uint32_t{64});
         qwen2.Set("qwen2.expert_count", uint32_t{8});
         f = qwen2;
       },
       "\"qwen2.expert_count\""},
      {"a key that nobody knows", set("llama.attention.sharpness", 2.0f),
       "winnow does not know this key"},
      {"a window", set("llama.attention.sliding_window", uint32_t{4096}),
       "4096: no windows of Llama models are read from GGUF files"},
      {"a scale", set("llama.attention.scale", 0.25f), "winnow scales by 0.125"},
      {"not causal", set("llama.attention.causal", false), "only causal attention"},
      {"a part of each head", set("llama.rope.dimension_count", uint32_t{32}),
       "it must be the head dimension, 64"},
      {"values of another width", set("llama.attention.value_length", uint32_t{128}),
       "it must be the head dimension"},
      {"a head dimension",
       [](GgufBuilder& f) {
         for (const char* key : {"llama.attention.key_length", "llama.attention.value_length",
                                 "llama.rope.dimension_count"}) {
           f.Remove(key);
           f.Set(key, uint32_t{72});
         }
       },
       "a head dimension of 72 is not supported; winnow has 64, 80, 96, 128, 256"},
      {"rope", set("llama.rope.scaling.type", "dynamic"),
       "winnow has none, linear, yarn, longrope"},
      {"longrope's tensors", set("llama.rope.scaling.type", "longrope"),
       "tensor \"rope_factors_short.weight\" is missing", absl::StatusCode::kNotFound},
      {"one of longrope's tensors",
       [](GgufBuilder& f) {
         std::string ones;
         for (int i = 0; i < 32; ++i) ones += GgufBuilder::Bytes(1.0f);
         f.Tensor("rope_factors_long.weight", {32}, kGgufF32, ones);
       },
       "tensor \"rope_factors_short.weight\" is missing", absl::StatusCode::kNotFound},
      {"longrope's tensors beside another kind",
       [](GgufBuilder& f) {
         f.Set("llama.rope.scaling.type", "yarn");
         f.Tensor("rope_factors_short.weight", {32}, kGgufF32, std::string(128, '\1'));
       },
       "comes together with another rope.scaling.type", kInvalid},
      {"a factor of attention without a kind that has one",
       set("llama.rope.scaling.attn_factor", 1.5f), "only yarn and longrope have it"},
      {"Granite's factors", set("llama.logit_scale", 8.0f), "\"llama.logit_scale\""},
      {"yarn's own", [](GgufBuilder& f) { f.Set("llama.rope.scaling.yarn_log_multiplier", 0.1f); },
       "winnow does not know this key"},
      {"no layers", remove("llama.block_count"), "\"llama.block_count\": missing", kInvalid},
      {"a negative number", set("llama.block_count", uint32_t{0}),
       "must be an integer from 1 to 1024, is 0", kInvalid},
      {"a number that is text", set("llama.context_length", "long"), "is of type string", kInvalid},
      {"a float for an integer", set("llama.embedding_length", 2048.0f), "is of type float32",
       kInvalid},
      {"no number", set("llama.attention.layer_norm_rms_epsilon", NAN),
       "must be a number from 0 to 1", kInvalid},
      {"heads", set("llama.attention.head_count_kv", uint32_t{7}), "does not divide", kInvalid},
      {"a vocabulary", set("llama.vocab_size", uint32_t{9}), "\"token_embd.weight\" has 8 rows",
       kInvalid},
      {"an end", set("tokenizer.ggml.eos_token_id", uint32_t{8}),
       "must be an integer from 0 to 7, is 8", kInvalid},
      {"a factor of 0",
       [](GgufBuilder& f) {
         f.Tensor("rope_freqs.weight", {32}, kGgufF32, std::string(128, '\0'));
       },
       "tensor \"rope_freqs.weight\" at byte", kInvalid},
      {"factors of another head",
       [](GgufBuilder& f) { f.Tensor("rope_freqs.weight", {16}, kGgufF32, std::string(64, '\0')); },
       "must be 32 values of type F32", kInvalid},
      {"no embedding", [](GgufBuilder& f) { f.tensors()[0].name = "other"; },
       "\"token_embd.weight\" is missing", absl::StatusCode::kNotFound},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.what);
    GgufBuilder file = Llama();
    refusal.change(file);
    const auto config = Read(file);
    ASSERT_FALSE(config.ok());
    EXPECT_EQ(config.status().code(), refusal.code) << config.status();
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(refusal.error));
  }
}

// Keys of a small model of another architecture.
GgufBuilder Of(const std::string& name) {
  GgufBuilder file;
  file.Set("general.architecture", name);
  const auto set = [&](const std::string& key, auto value) { file.Set(name + "." + key, value); };
  set("block_count", uint32_t{5});
  set("context_length", uint32_t{8192});
  set("embedding_length", uint32_t{512});
  set("feed_forward_length", uint32_t{512});
  set("attention.head_count", uint32_t{4});
  set("attention.layer_norm_rms_epsilon", 1e-6f);
  if (name == "granite") set("logit_scale", 8.0f);
  file.Tensor("token_embd.weight", {512, 4}, kGgufF32, std::string(512 * 16, '\0'));
  return file;
}

// As llama.cpp's converter writes it.
TEST(GgufConfig, GptOssHasItsGateWindowsAndYarnWithoutKeys) {
  GgufBuilder file = Of("gpt-oss");
  const auto set = [&file](const std::string& key, auto value) {
    file.Set("gpt-oss." + key, value);
  };
  set("expert_count", uint32_t{32});
  set("expert_used_count", uint32_t{4});
  set("expert_feed_forward_length", uint32_t{512});
  set("attention.sliding_window", uint32_t{128});
  set("rope.freq_base", 150000.0f);
  set("rope.scaling.type", "yarn");
  set("rope.scaling.factor", 32.0f);
  set("rope.scaling.original_context_length", uint32_t{4096});
  // "<|end|>" ends a message here, and no turn.
  file.Set("tokenizer.ggml.tokens",
           std::vector<std::string>{"<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"});
  file.Set("tokenizer.ggml.token_type", std::vector<int32_t>{3, 3, 3, 3});
  file.Set("tokenizer.ggml.eos_token_id", uint32_t{0});
  // A bias of experts has two dimensions, and says nothing of the type of matrices.
  file.Tensor("blk.0.attn_q.bias", {512}, kGgufF32, std::string(512 * 4, '\0'));
  file.Tensor("blk.0.attn_output.bias", {512}, kGgufF32, std::string(512 * 4, '\0'));
  const auto config = Read(file);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, ModelConfig::Family::kGptOss);
  EXPECT_EQ(config->experts, (ExpertsConfig{.count = 32,
                                            .per_token = 4,
                                            .intermediate_size = 512,
                                            .normalized = true,
                                            .clamped = kernels::ClampedSwiglu()}));
  for (int32_t i = 0; i < config->num_layers(); ++i) {
    LayerSpec expected = FamilyOf(config->family).layer;
    expected.window = i % 2 == 0 ? 128 : 0;
    EXPECT_EQ(config->layers[i], expected) << i;
  }
  EXPECT_THAT(config->eos_token_ids, ElementsAre(0, 2, 3));
  EXPECT_EQ(config->ropes[0].theta, 150000.0);
  EXPECT_EQ(config->ropes[0].scaling, (RopeScaling{.kind = RopeScaling::Kind::kYarn,
                                                   .factor = 32,
                                                   .original_max_position_embeddings = 4096,
                                                   .truncate = false}));
  // The softmax of the chosen logits by another name, and a gate that there is none for.
  set("expert_gating_func", uint32_t{3});
  EXPECT_TRUE(Read(file).ok()) << Read(file).status();
  file.Remove("gpt-oss.expert_gating_func");
  set("expert_gating_func", uint32_t{2});
  EXPECT_THAT(std::string(Read(file).status().message()), HasSubstr("expert_gating_func"));
}

TEST(GgufConfig, AFileWithAWindowIsOfTheLaterFamily) {
  const auto plain = Read(Of("olmo2"));
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->family, ModelConfig::Family::kOlmo2);
  EXPECT_EQ(plain->NumFullLayers(), 5);
  GgufBuilder file = Of("olmo2");
  file.Set("olmo2.attention.sliding_window", uint32_t{4096});
  file.Set("olmo2.rope.scaling.type", "yarn");
  file.Set("olmo2.rope.scaling.factor", 8.0f);
  const auto windows_of = [](const ModelConfig& config) {
    std::vector<int32_t> windows;
    for (const LayerSpec& layer : config.layers) {
      windows.push_back(layer.window);
      EXPECT_EQ(layer.rope, layer.window > 0 ? 1 : 0);
    }
    return windows;
  };
  const auto config = Read(file);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, ModelConfig::Family::kOlmo3);
  EXPECT_THAT(windows_of(*config), ElementsAre(4096, 4096, 4096, 0, 4096));
  EXPECT_EQ(config->ropes[0].scaling.kind, RopeScaling::Kind::kYarn);
  EXPECT_EQ(config->ropes[1].scaling.kind, RopeScaling::Kind::kNone);
  const auto set_pattern = [&file](std::string_view truths) {
    file.Remove("olmo2.attention.sliding_window_pattern");
    file.Array("olmo2.attention.sliding_window_pattern", GgufValueType::kBool, truths.size(),
               truths);
  };
  set_pattern(std::string_view("\1\0\1\1\0", 5));
  EXPECT_THAT(windows_of(*Read(file)), ElementsAre(4096, 0, 4096, 4096, 0));
  set_pattern(std::string_view("\1\0", 2));
  EXPECT_THAT(std::string(Read(file).status().message()), HasSubstr("5 times true or false"));
  file.Remove("olmo2.attention.sliding_window_pattern");
  file.Set("olmo2.attention.sliding_window_pattern", uint32_t{2});
  EXPECT_THAT(windows_of(*Read(file)), ElementsAre(4096, 0, 4096, 0, 4096));

  GgufBuilder exaone = Of("exaone4");
  EXPECT_EQ(Read(exaone)->layers, std::vector<LayerSpec>(5, Read(exaone)->layers[0]));
  EXPECT_EQ(Read(exaone)->layers[0].rope, 0);
  exaone.Set("exaone4.attention.sliding_window", uint32_t{4096});
  const auto hybrid = Read(exaone);
  ASSERT_TRUE(hybrid.ok()) << hybrid.status();
  for (int32_t i = 0; i < 5; ++i) {
    EXPECT_EQ(hybrid->layers[i].window, i == 3 ? 0 : 4096);
    EXPECT_EQ(hybrid->layers[i].rope, i == 3 ? LayerSpec::kNoRope : 0);
  }

  GgufBuilder gemma = Of("gemma3");
  gemma.Set("gemma3.attention.sliding_window", uint32_t{1024});
  gemma.Set("gemma3.rope.freq_base", 1000000.0f);
  const auto third = Read(gemma);
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_THAT(windows_of(*third), ElementsAre(1024, 1024, 1024, 1024, 1024));
  EXPECT_FALSE(third->norms_add_one);  // their writer has added it
  EXPECT_DOUBLE_EQ(third->embedding_multiplier, std::sqrt(512.0));
  EXPECT_EQ(third->ropes[0].theta, 1000000.0);
  EXPECT_EQ(third->ropes[1].theta, 10000.0);
}

TEST(GgufConfig, SmolLM3sEveryFourthLayerDoesNotRotate) {
  const auto config = Read(Of("smollm3"));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, ModelConfig::Family::kSmolLM3);
  for (int32_t i = 0; i < 5; ++i) {
    EXPECT_EQ(config->layers[i].rope, i == 3 ? LayerSpec::kNoRope : 0) << i;
  }
}

TEST(GgufConfig, PositionsOfImagesSayNothingAboutText) {
  GgufBuilder file = Of("qwen3vl");
  file.Set("qwen3vl.rope.dimension_sections", std::vector<int32_t>{24, 20, 20, 0});
  file.Set("qwen3vl.n_deepstack_layers", uint32_t{3});
  const auto config = Read(file);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, ModelConfig::Family::kQwen3Vl);
  EXPECT_TRUE(config->layers[0].qk_norm);
  EXPECT_THAT(config->unknown_keys, IsEmpty());
  GgufBuilder of_experts = Of("qwen3vlmoe");
  of_experts.Set("qwen3vlmoe.rope.dimension_sections", std::vector<int32_t>{24, 20, 20, 0});
  of_experts.Set("qwen3vlmoe.expert_count", uint32_t{8});
  of_experts.Set("qwen3vlmoe.expert_used_count", uint32_t{2});
  of_experts.Set("qwen3vlmoe.expert_feed_forward_length", uint32_t{64});
  const auto with_experts = Read(of_experts);
  ASSERT_TRUE(with_experts.ok()) << with_experts.status();
  EXPECT_EQ(with_experts->family, ModelConfig::Family::kQwen3VlMoe);
  EXPECT_EQ(with_experts->experts.per_token, 2);
  EXPECT_TRUE(with_experts->experts.normalized);
  GgufBuilder other = Of("qwen3");
  other.Set("qwen3.n_deepstack_layers", uint32_t{3});
  EXPECT_THAT(std::string(Read(other).status().message()), HasSubstr("qwen3.n_deepstack_layers"));
}

// A file without biases is a model without them, though the family's have some by default.
TEST(GgufConfig, SeedOssHasTheBiasesThatAreThere) {
  GgufBuilder file = Of("seed_oss");
  EXPECT_FALSE(Read(file)->layers[0].qkv_bias);
  file.Tensor("blk.0.attn_q.bias", {512}, kGgufF32, std::string(2048, '\0'));
  EXPECT_TRUE(Read(file)->layers[0].qkv_bias);
  EXPECT_FALSE(Read(file)->layers[0].o_bias);
}

TEST(GgufConfig, GranitesFactorsAreRead) {
  GgufBuilder file = Of("granite");
  const auto plain = Read(file);
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->logits_scaling, 8.0);
  EXPECT_EQ(plain->embedding_multiplier, 1.0);
  EXPECT_EQ(plain->residual_multiplier, 1.0);
  EXPECT_EQ(plain->AttentionScale(),
            1 / std::sqrt(128.0f));  // llama.cpp's default, not transformers'
  file.Set("granite.attention.scale", 0.0078125f);
  file.Set("granite.embedding_scale", 12.0f);
  file.Set("granite.residual_scale", 0.25f);
  const auto given = Read(file);
  ASSERT_TRUE(given.ok()) << given.status();
  EXPECT_EQ(given->AttentionScale(), 0.0078125f);
  EXPECT_EQ(given->embedding_multiplier, 12.0);
  EXPECT_EQ(given->residual_multiplier, 0.25);
  for (const auto& [key, value] : {std::pair("granite.attention.scale", -1.0f),
                                   {"granite.embedding_scale", 1e-6f},
                                   {"granite.residual_scale", NAN},
                                   {"granite.logit_scale", 0.0f}}) {
    GgufBuilder bad = file;
    bad.Remove(key);
    bad.Set(key, value);
    const absl::Status status = Read(bad).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(key));
  }
  GgufBuilder lacking = file;
  lacking.Remove("granite.logit_scale");
  EXPECT_THAT(std::string(Read(lacking).status().message()),
              HasSubstr("\"granite.logit_scale\": missing"));
  GgufBuilder still = file;
  still.Set("granite.rope.scaling.finetuned", false);
  EXPECT_EQ(Read(still).status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(Read(still).status().message()), HasSubstr("no layer rotates"));
}

TEST(GgufConfig, Phi3RotatesInPartAndHasLongRope) {
  GgufBuilder file = Of("phi3");
  EXPECT_EQ(Read(file)->RotaryDim(), 128);
  file.Set("phi3.rope.dimension_count", uint32_t{96});
  file.Set("phi3.rope.scaling.original_context_length", uint32_t{4096});
  file.Set("phi3.rope.scaling.attn_factor", 1.25f);
  file.Set("phi3.attention.sliding_window", uint32_t{0});
  std::string ones, twos;
  for (int i = 0; i < 48; ++i) {
    ones += GgufBuilder::Bytes(1.0f);
    twos += GgufBuilder::Bytes(2.0f);
  }
  file.Tensor("rope_factors_long.weight", {48}, kGgufF32, twos);
  GgufBuilder other = file;
  file.Tensor("rope_factors_short.weight", {48}, kGgufF32, ones);
  const auto config = Read(file);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->RotaryDim(), 96);
  const RopeScaling& scaling = config->ropes[0].scaling;
  EXPECT_EQ(scaling.kind, RopeScaling::Kind::kLongRope);
  EXPECT_EQ(scaling.original_max_position_embeddings, 4096);
  EXPECT_EQ(scaling.attention_factor, 1.25);
  EXPECT_EQ(scaling.short_factors, std::vector<float>(48, 1.0f));
  EXPECT_EQ(scaling.long_factors, std::vector<float>(48, 2.0f));
  const RopeParameters rope = ComputeRope(*config);
  EXPECT_EQ(rope.inv_freq.size(), 64u);
  EXPECT_EQ(rope.inv_freq[0], 0.5f);
  EXPECT_EQ(rope.inv_freq[48], 0.0f);

  other.Tensor("rope_factors_short.weight", {64}, kGgufF32, std::string(256, '\0'));
  EXPECT_THAT(std::string(Read(other).status().message()), HasSubstr("must be 48 values"));
  GgufBuilder window = Of("phi3");
  window.Set("phi3.attention.sliding_window", uint32_t{2047});
  const auto windowed = Read(window);
  ASSERT_TRUE(windowed.ok()) << windowed.status();
  for (const LayerSpec& layer : windowed->layers) EXPECT_EQ(layer.window, 2047);
  for (const uint32_t dimensions : {0u, 97u, 130u}) {
    GgufBuilder bad = Of("phi3");
    bad.Set("phi3.rope.dimension_count", dimensions);
    EXPECT_EQ(Read(bad).status().code(), absl::StatusCode::kUnimplemented) << dimensions;
  }
}

TEST(GgufConfig, Ministral3ScalesQueriesByTheLengthThatYarnStartsFrom) {
  GgufBuilder file = Of("mistral3");
  EXPECT_EQ(Read(file)->ropes[0].query_scaling.beta, 0);  // Mistral Small 3
  file.Set("mistral3.attention.temperature_scale", 0.125f);
  EXPECT_EQ(Read(file)->ropes[0].query_scaling, (QueryScaling{.beta = 0.125, .length = 8192}));
  file.Set("mistral3.rope.scaling.type", "yarn");
  file.Set("mistral3.rope.scaling.factor", 16.0f);
  file.Set("mistral3.rope.scaling.original_context_length", uint32_t{512});
  GgufBuilder without = file;
  file.Set("mistral3.rope.scaling.yarn_log_multiplier", 0.5f);
  const auto config = Read(file);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, ModelConfig::Family::kMinistral3);
  EXPECT_EQ(config->ropes[0].query_scaling, (QueryScaling{.beta = 0.125, .length = 512}));
  // llama.cpp divides what a multiplier of 1 gives by what this one gives, and multiplies by the factor of attention.
  const auto magnitude = [](double multiplier) { return 0.1 * multiplier * std::log(16.0) + 1; };
  EXPECT_FLOAT_EQ(ComputeRope(*config).attention_factor, magnitude(1) / magnitude(0.5));
  file.Set("mistral3.rope.scaling.attn_factor", 1.5f);
  EXPECT_FLOAT_EQ(ComputeRope(*Read(file)).attention_factor, 1.5 * magnitude(1) / magnitude(0.5));
  EXPECT_FLOAT_EQ(ComputeRope(*Read(without)).attention_factor, magnitude(1));

  file.Set("mistral3.attention.temperature_length", uint32_t{512});
  EXPECT_TRUE(Read(file).ok());
  GgufBuilder other = without;
  other.Set("mistral3.attention.temperature_length", uint32_t{4096});
  EXPECT_THAT(std::string(Read(other).status().message()),
              HasSubstr("4096 is not supported; it must be the original context length, 512"));
  GgufBuilder llama = Llama();
  llama.Set("llama.attention.temperature_scale", 0.125f);
  EXPECT_THAT(std::string(Read(llama).status().message()), HasSubstr("would have to be 0"));
}

TEST(GgufConfig, WhatIsOffIsNoReasonToRefuse) {
  GgufBuilder file = Llama();
  file.Set("llama.expert_count", uint32_t{0});
  file.Set("llama.use_parallel_residual", false);
  file.Set("llama.attention.clamp_kqv", 0.0f);
  file.Set("llama.attention.sliding_window", uint32_t{131072});
  file.Set("llama.attention.scale", 0.125f);
  file.Set("split.count", uint32_t{1});
  file.Set("another.key", "of somebody else");
  EXPECT_TRUE(Read(file).ok()) << Read(file).status();
}

TEST(GgufConfig, ADirectoryOfGgufFilesIsNoModelButSaysWhatIs) {
  const TempDir dir;
  EXPECT_EQ(LoadModelConfig(dir.path()).status().code(), absl::StatusCode::kNotFound);
  WriteText(dir.File("b.gguf"), "");
  WriteText(dir.File("a.gguf"), Llama().Build());
  const absl::Status status = LoadModelConfig(dir.path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("(to load " + dir.File("a.gguf") + ", name the file)"));
  EXPECT_TRUE(LoadModelConfig(dir.File("a.gguf")).ok());
  EXPECT_THAT(std::string(LoadModelConfig(dir.File("c.gguf")).status().message()),
              HasSubstr(dir.File("c.gguf")));
}

}  // namespace
}  // namespace winnow::engine
