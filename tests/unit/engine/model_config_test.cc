#include "engine/model/model_config.h"

#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/model_files.h"

namespace winnow::engine {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using Family = ModelConfig::Family;

// TinyConfig with some keys replaced; a discarded value removes its key.
json With(const json& changes) {
  json config = TinyConfig();
  config.update(changes);
  return config;
}
json Without(std::string_view key) {
  json config = TinyConfig();
  config.erase(std::string(key));
  return config;
}
json OfFamily(std::string_view architecture, std::string_view model_type) {
  return With({{"architectures", {architecture}}, {"model_type", model_type}});
}

absl::StatusOr<ModelConfig> Parse(const json& config, std::string_view generation = "") {
  return ParseModelConfig(config.dump(), "dir/config.json", generation,
                          "dir/generation_config.json");
}
ModelConfig ParseGood(const json& config, std::string_view generation = "") {
  const auto parsed = Parse(config, generation);
  EXPECT_TRUE(parsed.ok()) << parsed.status() << "\n" << config.dump();
  return parsed.value_or(ModelConfig());
}

TEST(ModelConfigTest, KeysOfATrainedModelAreRead) {
  const auto config = LoadModelConfig(SourcePath("models/needle-5m"));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, Family::kLlama);
  EXPECT_EQ(config->architecture, "LlamaForCausalLM");
  EXPECT_EQ(config->hidden_size, 256);
  EXPECT_EQ(config->intermediate_size, 704);
  EXPECT_EQ(config->num_layers(), 6);
  EXPECT_EQ(config->num_heads, 4);
  EXPECT_EQ(config->num_kv_heads, 2);
  EXPECT_EQ(config->head_dim, 64);
  EXPECT_EQ(config->vocab_size, 4096);
  EXPECT_EQ(config->max_position_embeddings, 32768);
  EXPECT_EQ(config->rms_norm_eps, 1e-5f);
  EXPECT_EQ(config->ropes[0].theta, 500000.0);
  EXPECT_EQ(config->ropes[0].scaling, RopeScaling());
  EXPECT_FALSE(config->layers[0].qkv_bias || config->layers[0].o_bias ||
               config->layers[0].mlp_bias || config->layers[0].qk_norm);
  EXPECT_TRUE(config->tie_word_embeddings);
  EXPECT_EQ(config->dtype, kernels::DType::kBF16);
  EXPECT_THAT(config->eos_token_ids, ElementsAre(1, 2));
  EXPECT_EQ(config->bos_token_id, 0);
}

TEST(ModelConfigTest, ShapesForMeasurementAreSupported) {
  for (const char* name : {"llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b"}) {
    const auto config = ParseModelConfig(
        ReadText(SourcePath(std::string("loadtest/shapes/") + name + ".json")), name, "", "");
    EXPECT_TRUE(config.ok()) << config.status();
  }
}

TEST(ModelConfigTest, FamiliesDifferInBiasesNormsAndDefaults) {
  const ModelConfig llama = ParseGood(With({{"attention_bias", true}, {"mlp_bias", true}}));
  EXPECT_TRUE(llama.layers[0].qkv_bias && llama.layers[0].o_bias && llama.layers[0].mlp_bias &&
              !llama.layers[0].qk_norm);

  json mistral_json = OfFamily("MistralForCausalLM", "mistral");
  mistral_json["sliding_window"] = nullptr;
  const ModelConfig mistral = ParseGood(mistral_json);
  EXPECT_EQ(mistral.family, Family::kMistral);
  EXPECT_FALSE(mistral.layers[0].qkv_bias || mistral.layers[0].o_bias ||
               mistral.layers[0].mlp_bias || mistral.layers[0].qk_norm);

  const ModelConfig qwen2 = ParseGood(OfFamily("Qwen2ForCausalLM", "qwen2"));
  EXPECT_EQ(qwen2.family, Family::kQwen2);
  EXPECT_TRUE(qwen2.layers[0].qkv_bias && !qwen2.layers[0].o_bias && !qwen2.layers[0].mlp_bias &&
              !qwen2.layers[0].qk_norm);

  json qwen3_json = OfFamily("Qwen3ForCausalLM", "qwen3");
  const ModelConfig qwen3 = ParseGood(qwen3_json);
  EXPECT_TRUE(!qwen3.layers[0].qkv_bias && !qwen3.layers[0].o_bias && qwen3.layers[0].qk_norm);
  qwen3_json["attention_bias"] = true;
  const ModelConfig qwen3_bias = ParseGood(qwen3_json);
  EXPECT_TRUE(qwen3_bias.layers[0].qkv_bias && qwen3_bias.layers[0].o_bias &&
              qwen3_bias.layers[0].qk_norm);
  qwen3_json.erase("head_dim");
  EXPECT_EQ(ParseGood(qwen3_json).head_dim, 128);
}

// config.json of the family with nothing but its sizes and these keys.
json Bare(std::string_view architecture, std::string_view model_type, const json& changes = {}) {
  json config = OfFamily(architecture, model_type);
  config["hidden_size"] = 128;
  for (const char* key :
       {"head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"}) {
    config.erase(key);
  }
  if (!changes.is_null()) config.update(changes);
  return config;
}
json SmolLM3(const json& changes) { return Bare("SmolLM3ForCausalLM", "smollm3", changes); }
json SeedOss(const json& changes = {}) { return Bare("SeedOssForCausalLM", "seed_oss", changes); }
json Granite(const json& changes = {}) { return Bare("GraniteForCausalLM", "granite", changes); }
json Phi3(const json& changes = {}) { return Bare("Phi3ForCausalLM", "phi3", changes); }
json Glm(const json& changes = {}) { return Bare("GlmForCausalLM", "glm", changes); }
json Ernie(const json& changes = {}) { return Bare("Ernie4_5ForCausalLM", "ernie4_5", changes); }
// Has 8 query heads, as many as KV heads by default.
json Ministral3(const json& changes = {}) {
  json config = Bare("Ministral3ForCausalLM", "ministral3", changes);
  config["num_attention_heads"] = 8;
  return config;
}

std::vector<int32_t> WindowsOf(const ModelConfig& config) {
  std::vector<int32_t> windows;
  for (const LayerSpec& layer : config.layers) windows.push_back(layer.window);
  return windows;
}

std::vector<int32_t> RopesOf(const ModelConfig& config) {
  std::vector<int32_t> ropes;
  for (const LayerSpec& layer : config.layers) ropes.push_back(layer.rope);
  return ropes;
}

TEST(ModelConfigTest, SmolLM3SaysWhichLayersDoNotRotate) {
  constexpr int32_t kNo = LayerSpec::kNoRope;
  const ModelConfig by_default =
      ParseGood(SmolLM3({{"num_hidden_layers", 9}, {"num_attention_heads", 8}, {"head_dim", 64}}));
  EXPECT_THAT(RopesOf(by_default), ElementsAre(0, 0, 0, kNo, 0, 0, 0, kNo, 0));
  EXPECT_EQ(by_default.num_kv_heads, 4);
  EXPECT_EQ(by_default.ropes[0].theta, 2000000.0);
  EXPECT_TRUE(by_default.tie_word_embeddings);

  json config = SmolLM3({{"num_hidden_layers", 3}, {"num_key_value_heads", 1}});
  config["no_rope_layer_interval"] = 2;
  EXPECT_THAT(RopesOf(ParseGood(config)), ElementsAre(0, kNo, 0));
  config["no_rope_layers"] = {0, 1, 0, 0};  // more than layers, as in the reference; wins
  EXPECT_THAT(RopesOf(ParseGood(config)), ElementsAre(kNo, 0, kNo));
  config["no_rope_layers"] = nullptr;
  EXPECT_THAT(RopesOf(ParseGood(config)), ElementsAre(0, kNo, 0));
  config["no_rope_layer_interval"] = 1;
  EXPECT_THAT(RopesOf(ParseGood(config)), ElementsAre(kNo, kNo, kNo));

  // A window has a switch of its own, and no default.
  config["sliding_window"] = 64;
  ParseGood(config);
  config.update({{"use_sliding_window", true}, {"sliding_window", 256}});  // cannot bite
  ParseGood(config);
  config["sliding_window"] = nullptr;
  ParseGood(config);
}

TEST(ModelConfigTest, SeedOssHasAKeyForTheBiasOfO) {
  const ModelConfig by_default = ParseGood(SeedOss({{"num_attention_heads", 8}}));
  EXPECT_EQ(by_default.num_kv_heads, 8);
  EXPECT_EQ(by_default.head_dim, 128);
  EXPECT_TRUE(by_default.layers[0].qkv_bias);
  EXPECT_FALSE(by_default.layers[0].o_bias || by_default.layers[0].mlp_bias);
  const ModelConfig all = ParseGood(SeedOss({{"num_key_value_heads", 1},
                                             {"attention_bias", false},
                                             {"attention_out_bias", true},
                                             {"mlp_bias", true}}));
  EXPECT_FALSE(all.layers[0].qkv_bias);
  EXPECT_TRUE(all.layers[0].o_bias && all.layers[0].mlp_bias);
}

TEST(ModelConfigTest, GranitesMultipliersAreRead) {
  const ModelConfig absent = ParseGood(Granite());
  EXPECT_EQ(absent.AttentionScale(), 1.0f);  // and not 1/8
  EXPECT_EQ(absent.embedding_multiplier, 1.0);
  EXPECT_EQ(absent.num_kv_heads, 2);
  const ModelConfig given = ParseGood(Granite({{"embedding_multiplier", 12},
                                               {"attention_multiplier", 0.0078125},
                                               {"residual_multiplier", 0.22},
                                               {"logits_scaling", 16.0}}));
  EXPECT_EQ(given.embedding_multiplier, 12.0);
  EXPECT_EQ(given.AttentionScale(), 0.0078125f);
  EXPECT_EQ(given.residual_multiplier, 0.22);
  EXPECT_EQ(given.logits_scaling, 16.0);
  EXPECT_EQ(ParseGood(TinyConfig()).AttentionScale(), 0.125f);
}

TEST(ModelConfigTest, GlmRotatesHalfOfAHeadAndOHasNoBias) {
  const ModelConfig absent = ParseGood(Glm());
  EXPECT_EQ(absent.head_dim, 128);
  EXPECT_EQ(absent.RotaryDim(), 64);
  EXPECT_EQ(absent.num_kv_heads, 2);
  EXPECT_EQ(absent.rms_norm_eps, 1.5625e-7f);
  EXPECT_FALSE(absent.tie_word_embeddings);
  EXPECT_TRUE(absent.layers[0].qkv_bias);
  EXPECT_FALSE(absent.layers[0].o_bias || absent.layers[0].mlp_bias);
  const ModelConfig given =
      ParseGood(Glm({{"attention_bias", false}, {"partial_rotary_factor", 0.75}}));
  EXPECT_EQ(given.RotaryDim(), 96);
  EXPECT_EQ(given.layers[0], LayerSpec());
  EXPECT_EQ(ParseGood(Glm({{"partial_rotary_factor", 1.0}})).RotaryDim(), 128);
  // transformers 5 has the share beside theta.
  EXPECT_EQ(ParseGood(Glm({{"rope_parameters",
                            {{"rope_type", "default"}, {"partial_rotary_factor", 0.25}}}}))
                .RotaryDim(),
            32);
}

TEST(ModelConfigTest, ErnieHasOneKeyForAllBiases) {
  const ModelConfig absent = ParseGood(Ernie());
  EXPECT_EQ(absent.head_dim, 128);
  EXPECT_EQ(absent.RotaryDim(), 128);
  EXPECT_EQ(absent.num_kv_heads, 2);
  EXPECT_EQ(absent.rms_norm_eps, 1e-5f);
  EXPECT_EQ(absent.ropes[0].theta, 500000.0);
  EXPECT_TRUE(absent.tie_word_embeddings);
  EXPECT_EQ(absent.layers[0], LayerSpec());
  const ModelConfig all = ParseGood(Ernie({{"use_bias", true}}));
  EXPECT_EQ(all.layers[0], (LayerSpec{.qkv_bias = true, .o_bias = true, .mlp_bias = true}));
}

TEST(ModelConfigTest, Ministral3ScalesQueries) {
  const ModelConfig absent = ParseGood(Ministral3());
  EXPECT_EQ(absent.family, Family::kMinistral3);
  EXPECT_EQ(absent.head_dim, 128);
  EXPECT_EQ(absent.num_kv_heads, 8);
  EXPECT_EQ(absent.ropes[0].theta, 1000000.0);
  EXPECT_EQ(absent.ropes[0].scaling.kind, RopeScaling::Kind::kYarn);
  EXPECT_EQ(absent.ropes[0].scaling.factor, 16.0);
  EXPECT_EQ(absent.ropes[0].query_scaling, (QueryScaling{.beta = 0.1, .length = 16384}));
  EXPECT_EQ(ComputeRope(absent).attention_factor, 1.0f);

  json rope = {{"rope_type", "yarn"},
               {"type", "yarn"},
               {"rope_theta", 5000.0},
               {"factor", 4.0},
               {"original_max_position_embeddings", 64},
               {"max_position_embeddings", 256},
               {"llama_4_scaling_beta", 0.25}};
  const ModelConfig given = ParseGood(Ministral3({{"rope_parameters", rope}}));
  EXPECT_EQ(given.ropes[0].theta, 5000.0);
  EXPECT_EQ(given.ropes[0].query_scaling, (QueryScaling{.beta = 0.25, .length = 64}));
  EXPECT_THAT(given.unknown_keys, IsEmpty());
  const auto error = [](const json& config) {
    return std::string(Parse(config).status().message());
  };
  EXPECT_THAT(error(With({{"rope_parameters", rope}})),
              HasSubstr("rope_parameters.\"llama_4_scaling_beta\": winnow does not know this key"));
  rope.erase("llama_4_scaling_beta");
  EXPECT_THAT(error(Ministral3({{"rope_parameters", rope}})),
              HasSubstr("rope_parameters.llama_4_scaling_beta: missing"));
}

// A model that reads images: the text part's keys count, but for those that are of the whole.
TEST(ModelConfigTest, TheTextPartOfAWholeIsTheModel) {
  json part = Ministral3();
  part.erase("architectures");
  part["dtype"] = "float32";  // of the class that made it, not of the file
  part["tie_word_embeddings"] = false;
  json whole = {
      {"architectures", {"Mistral3ForConditionalGeneration"}},
      {"model_type", "mistral3"},
      {"dtype", "bfloat16"},
      {"image_token_index", 10},
      {"spatial_merge_size", 2},
      {"tie_word_embeddings", true},  // what the class writes, whatever the part has
      {"vision_config", {{"hidden_size", 8}}},
      {"text_config", part},
      {"quantization_config", {{"quant_method", "fp8"}, {"activation_scheme", "static"}}}};
  const ModelConfig config = ParseGood(whole);
  EXPECT_TRUE(config.is_text_part);
  EXPECT_EQ(config.family, Family::kMinistral3);
  EXPECT_EQ(config.dtype, kernels::DType::kBF16);
  EXPECT_TRUE(config.weight_scheme.has_value());
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_THAT(config.unknown_keys, IsEmpty());
  EXPECT_FALSE(ParseGood(Ministral3()).is_text_part);

  json changed = whole;
  changed.erase("quantization_config");
  changed["dtype"] = "float16";
  EXPECT_EQ(ParseGood(changed).dtype, kernels::DType::kF16);
  changed.erase("dtype");
  EXPECT_EQ(ParseGood(changed).dtype, kernels::DType::kF32);
  changed["text_config"].erase("tie_word_embeddings");
  EXPECT_TRUE(ParseGood(changed).tie_word_embeddings);
  changed["text_config"]["a_key"] = 1;
  changed["another"] = 2;
  EXPECT_THAT(ParseGood(changed).unknown_keys, ElementsAre("a_key", "another"));

  const auto error = [&](const auto& change) {
    json bad = whole;
    change(bad);
    return std::string(Parse(bad).status().message());
  };
  EXPECT_THAT(error([](json& c) { c["text_config"].erase("hidden_size"); }),
              HasSubstr("dir/config.json: text_config.hidden_size: missing"));
  EXPECT_THAT(error([](json& c) { c["text_config"]["model_type"] = "mistral4"; }),
              HasSubstr("text_config.model_type: \"mistral4\" is not supported"));
  EXPECT_THAT(error([](json& c) { c.erase("text_config"); }), HasSubstr("text_config: missing"));
  EXPECT_THAT(error([](json& c) { c["text_config"] = 3; }), HasSubstr("must be an object"));
  EXPECT_THAT(error([](json& c) { c["model_type"] = "llava"; }),
              HasSubstr("does not belong to architecture Mistral3ForConditionalGeneration"));
  EXPECT_THAT(error([](json& c) { c["attention_chunk_size"] = 64; }),
              HasSubstr("attention_chunk_size: 64 is not supported"));
}

TEST(ModelConfigTest, Phi3RotatesInPartAndHasLongRope) {
  const ModelConfig whole = ParseGood(Phi3());
  EXPECT_EQ(whole.rms_norm_eps, 1e-5f);
  EXPECT_EQ(whole.RotaryDim(), 64);
  const json scaling = {{"type", "longrope"},
                        {"short_factor", std::vector<double>(24, 1.0)},
                        {"long_factor", std::vector<double>(24, 3.0)}};
  json config = Phi3({{"partial_rotary_factor", 0.75},
                      {"max_position_embeddings", 8192},
                      {"rope_scaling", scaling}});
  const ModelConfig older = ParseGood(config);
  EXPECT_EQ(older.RotaryDim(), 48);
  EXPECT_EQ(older.ropes[0].scaling.kind, RopeScaling::Kind::kLongRope);
  EXPECT_EQ(older.ropes[0].scaling.original_max_position_embeddings, 4096);  // by default
  EXPECT_EQ(older.ropes[0].scaling.factor, 2.0);
  EXPECT_EQ(older.ropes[0].scaling.short_factors, std::vector<float>(24, 1.0f));
  EXPECT_EQ(older.ropes[0].scaling.long_factors, std::vector<float>(24, 3.0f));
  for (const char* alias : {"su", "yarn"}) {
    config["rope_scaling"]["type"] = alias;
    EXPECT_EQ(ParseGood(config).ropes[0].scaling, older.ropes[0].scaling) << alias;
  }
  json inner = scaling;
  inner["partial_rotary_factor"] = 0.75;
  json newer = Phi3({{"max_position_embeddings", 8192}, {"rope_parameters", inner}});
  EXPECT_EQ(ParseGood(newer).ropes[0].scaling, older.ropes[0].scaling);
  EXPECT_EQ(ParseGood(newer).RotaryDim(), 48);
  // The object's share wins, and the key of the length at the top does.
  newer["partial_rotary_factor"] = 0.5;
  newer["original_max_position_embeddings"] = 2048;
  EXPECT_EQ(ParseGood(newer).RotaryDim(), 48);
  EXPECT_EQ(ParseGood(newer).ropes[0].scaling.factor, 4.0);
  // Phi-4-mini's files say this, too, and nobody reads it.
  newer.update({{"full_attn_mod", 1}, {"interpolate_factor", 1}, {"lm_head_bias", false}});
  EXPECT_THAT(ParseGood(newer).unknown_keys, IsEmpty());
}

TEST(ModelConfigTest, AbsentKeysHaveTheReferencesDefaults) {
  json config = TinyConfig();
  config["hidden_size"] = 128;
  for (const char* key :
       {"head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings",
        "torch_dtype", "bos_token_id", "eos_token_id", "architectures"}) {
    config.erase(key);
  }
  const ModelConfig parsed = ParseGood(config);
  EXPECT_EQ(parsed.architecture, "LlamaForCausalLM");
  EXPECT_EQ(parsed.head_dim, 64);
  EXPECT_EQ(parsed.num_kv_heads, 2);
  EXPECT_EQ(parsed.rms_norm_eps, 1e-6f);
  EXPECT_EQ(parsed.ropes[0].theta, 10000.0);
  EXPECT_FALSE(parsed.tie_word_embeddings);
  EXPECT_EQ(parsed.dtype, kernels::DType::kF32);
  EXPECT_THAT(parsed.eos_token_ids, IsEmpty());
  EXPECT_FALSE(parsed.bos_token_id.has_value());
}

TEST(ModelConfigTest, NullsCountAsAbsentAndKvHeadsAsQueryHeads) {
  json config = OfFamily("Qwen2ForCausalLM", "qwen2");
  config["hidden_size"] = 128;
  config["num_key_value_heads"] = nullptr;
  config["head_dim"] = nullptr;
  config["rope_scaling"] = nullptr;
  config["quantization_config"] = nullptr;
  const ModelConfig parsed = ParseGood(config);
  EXPECT_EQ(parsed.num_kv_heads, 2);
  EXPECT_EQ(parsed.head_dim, 64);
}

TEST(ModelConfigTest, TypesComeFromEitherKey) {
  EXPECT_EQ(ParseGood(With({{"torch_dtype", "float16"}})).dtype, kernels::DType::kF16);
  EXPECT_EQ(ParseGood(With({{"dtype", "float32"}})).dtype,
            kernels::DType::kF32);  // the newer key wins
}

TEST(ModelConfigTest, EndTokensOfBothFilesCount) {
  const ModelConfig config =
      ParseGood(TinyConfig(), R"({"eos_token_id": [7, 2, 3], "bos_token_id": 5})");
  EXPECT_THAT(config.eos_token_ids, ElementsAre(2, 3, 7));
  EXPECT_EQ(config.bos_token_id, 5);
  EXPECT_THAT(ParseGood(TinyConfig(), "{}").eos_token_ids, ElementsAre(2));
}

TEST(ModelConfigTest, RopeScalingIsReadInBothSpellings) {
  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 64}};
  const ModelConfig old_style =
      ParseGood(With({{"rope_scaling", llama3}, {"rope_theta", 500000.0}}));
  EXPECT_EQ(old_style.ropes[0].scaling.kind, RopeScaling::Kind::kLlama3);
  EXPECT_EQ(old_style.ropes[0].scaling.factor, 8.0);
  EXPECT_EQ(old_style.ropes[0].scaling.original_max_position_embeddings, 64);
  EXPECT_EQ(old_style.ropes[0].theta, 500000.0);

  json inner = llama3;
  inner["rope_theta"] = 500000.0;
  const ModelConfig new_style = ParseGood(With({{"rope_parameters", inner}, {"rope_theta", 3.0}}));
  EXPECT_EQ(new_style.ropes[0].scaling, old_style.ropes[0].scaling);
  EXPECT_EQ(new_style.ropes[0].theta, 500000.0);  // the inner one
}

TEST(ModelConfigTest, YarnTakesItsLengthsFromTheModelWhereItHasNone) {
  const ModelConfig config = ParseGood(
      With({{"rope_scaling", {{"type", "yarn"}, {"original_max_position_embeddings", 64}}}}));
  EXPECT_EQ(config.ropes[0].scaling.factor, 4.0);  // 256 / 64
  const ModelConfig plain =
      ParseGood(With({{"rope_scaling", {{"type", "yarn"}, {"factor", 2.0}}}}));
  EXPECT_EQ(plain.ropes[0].scaling.original_max_position_embeddings, 256);
  const ModelConfig top = ParseGood(
      With({{"original_max_position_embeddings", 128},
            {"rope_scaling", {{"type", "yarn"}, {"original_max_position_embeddings", 64}}}}));
  EXPECT_EQ(top.ropes[0].scaling.original_max_position_embeddings, 128);
}

TEST(ModelConfigTest, WindowsThatCannotBiteAreOff) {
  json mistral = OfFamily("MistralForCausalLM", "mistral");
  for (const json& window : {json(nullptr), json(256), json(4096)}) {
    mistral["sliding_window"] = window;
    ParseGood(mistral);
  }
  mistral.erase("sliding_window");  // 4096 by default, and the model has 256 positions
  ParseGood(mistral);
  json qwen = OfFamily("Qwen2ForCausalLM", "qwen2");
  qwen["sliding_window"] = 64;
  qwen["max_window_layers"] = 0;
  ParseGood(qwen);  // use_sliding_window is false by default
  qwen["use_sliding_window"] = true;
  qwen["max_window_layers"] = 2;  // the first two layers attend fully, and there are two
  ParseGood(qwen);
  qwen["layer_types"] = {"full_attention", "full_attention"};
  EXPECT_THAT(WindowsOf(ParseGood(qwen)), ElementsAre(0, 0));
}

TEST(ModelConfigTest, Qwen3VlsTextPartRotatesAsText) {
  // As the 4B model's file has them.
  const json scaling = {
      {"rope_type", "default"}, {"mrope_interleaved", true}, {"mrope_section", {24, 20, 20}}};
  json whole = {{"architectures", {"Qwen3VLForConditionalGeneration"}},
                {"model_type", "qwen3_vl"},
                {"image_token_id", 151655},
                {"video_token_id", 151656},
                {"vision_start_token_id", 151652},
                {"vision_end_token_id", 151653},
                {"tie_word_embeddings", true},
                {"vision_config", {{"depth", 24}}},
                {"text_config",
                 {{"model_type", "qwen3_vl_text"},
                  {"attention_bias", false},
                  {"dtype", "bfloat16"},
                  {"head_dim", 128},
                  {"hidden_size", 2560},
                  {"intermediate_size", 9728},
                  {"max_position_embeddings", 262144},
                  {"num_attention_heads", 32},
                  {"num_hidden_layers", 36},
                  {"num_key_value_heads", 8},
                  {"rope_scaling", scaling},
                  {"rope_theta", 5000000},
                  {"tie_word_embeddings", true},
                  {"vocab_size", 151936}}}};
  const ModelConfig config = ParseGood(whole);
  EXPECT_TRUE(config.is_text_part && config.tie_word_embeddings);
  EXPECT_EQ(config.family, Family::kQwen3Vl);
  EXPECT_EQ(config.layers, std::vector<LayerSpec>(36, {.qk_norm = true}));
  EXPECT_EQ(config.ropes.size(), 1u);
  EXPECT_EQ(config.ropes[0].theta, 5000000.0);
  EXPECT_EQ(config.ropes[0].scaling.kind, RopeScaling::Kind::kNone);
  EXPECT_THAT(config.unknown_keys, IsEmpty());

  json part = whole["text_config"];
  for (const char* key : {"head_dim", "num_key_value_heads", "rope_theta"}) part.erase(key);
  whole["text_config"] = part;
  const ModelConfig of_defaults = ParseGood(whole);
  EXPECT_EQ(of_defaults.head_dim, 128);
  EXPECT_EQ(of_defaults.num_kv_heads, 32);
  EXPECT_EQ(of_defaults.ropes[0].theta, 500000.0);

  // Elsewhere these keys are none that winnow knows.
  json other = OfFamily("Qwen3ForCausalLM", "qwen3");
  other["rope_scaling"] = scaling;
  EXPECT_THAT(std::string(Parse(other).status().message()), HasSubstr("mrope_interleaved"));
}

TEST(ModelConfigTest, Qwen3VlsExpertsAreNormalisedWhateverTheKeySays) {
  json whole = {{"architectures", {"Qwen3VLMoeForConditionalGeneration"}},
                {"model_type", "qwen3_vl_moe"},
                {"vision_config", {{"depth", 27}}},
                {"text_config",
                 {{"model_type", "qwen3_vl_moe_text"},
                  {"head_dim", 128},
                  {"hidden_size", 2048},
                  {"intermediate_size", 6144},
                  {"mlp_only_layers", {2}},
                  {"moe_intermediate_size", 768},
                  {"norm_topk_prob", false},
                  {"num_attention_heads", 32},
                  {"num_experts", 128},
                  {"num_experts_per_tok", 8},
                  {"num_hidden_layers", 4},
                  {"num_key_value_heads", 4}}}};
  const ModelConfig config = ParseGood(whole);
  EXPECT_EQ(config.family, Family::kQwen3VlMoe);
  EXPECT_EQ(config.experts.count, 128);
  EXPECT_EQ(config.experts.per_token, 8);
  EXPECT_EQ(config.experts.intermediate_size, 768);
  EXPECT_TRUE(config.experts.normalized);
  EXPECT_EQ(config.layers[2].mlp, LayerSpec::Mlp::kGatedSilu);
  EXPECT_EQ(config.NumLayersOf(LayerSpec::Mlp::kExperts), 3);
  EXPECT_THAT(config.unknown_keys, IsEmpty());
  json& part = whole["text_config"];
  for (const char* key : {"moe_intermediate_size", "num_experts", "num_experts_per_tok"}) {
    part.erase(key);
  }
  const ModelConfig of_defaults = ParseGood(whole);
  EXPECT_EQ(of_defaults.experts.count, 60);
  EXPECT_EQ(of_defaults.experts.per_token, 4);
  EXPECT_EQ(of_defaults.experts.intermediate_size, 1408);
}

// As the 4B model's file has them.
json Gemma3(const json& text) {
  json part = {
      {"hidden_size", 2560},     {"intermediate_size", 10240},
      {"num_hidden_layers", 34}, {"model_type", "gemma3_text"},
      {"sliding_window", 1024},  {"rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}}}};
  part.update(text);
  return {{"architectures", {"Gemma3ForConditionalGeneration"}},
          {"model_type", "gemma3"},
          {"boi_token_index", 255999},
          {"eoi_token_index", 256000},
          {"eos_token_id", {1, 106}},
          {"image_token_index", 262144},
          {"mm_tokens_per_image", 256},
          {"torch_dtype", "bfloat16"},
          {"vision_config", {{"model_type", "siglip_vision_model"}}},
          {"text_config", part}};
}

TEST(ModelConfigTest, Gemma3HasWhatItsFilesLeaveOut) {
  const ModelConfig config = ParseGood(Gemma3(json::object()));
  EXPECT_TRUE(config.is_text_part && config.tie_word_embeddings && config.norms_add_one);
  EXPECT_EQ(config.num_heads, 8);
  EXPECT_EQ(config.num_kv_heads, 4);
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.vocab_size, 262208);
  EXPECT_EQ(config.max_position_embeddings, 131072);
  EXPECT_EQ(config.dtype, kernels::DType::kBF16);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(1, 106));
  EXPECT_TRUE(config.unknown_keys.empty());
  EXPECT_DOUBLE_EQ(config.embedding_multiplier, std::sqrt(2560.0));
  EXPECT_FLOAT_EQ(config.AttentionScale(), 1.0f / 16);
  ASSERT_EQ(config.ropes.size(), 2u);
  EXPECT_EQ(config.ropes[0].theta, 1e6);
  EXPECT_EQ(config.ropes[0].scaling.kind, RopeScaling::Kind::kLinear);
  EXPECT_EQ(config.ropes[1].theta, 1e4);
  EXPECT_EQ(config.ropes[1].scaling.kind, RopeScaling::Kind::kNone);
  for (int32_t i = 0; i < config.num_layers(); ++i) {
    const bool full = i % 6 == 5;
    EXPECT_EQ(config.layers[i].window, full ? 0 : 1024) << i;
    EXPECT_EQ(config.layers[i].rope, full ? 0 : 1) << i;
  }

  const ModelConfig other = ParseGood(Gemma3({{"num_attention_heads", 32},
                                              {"num_key_value_heads", 16},
                                              {"head_dim", 128},
                                              {"query_pre_attn_scalar", 168},
                                              {"rope_local_base_freq", 5000},
                                              {"sliding_window_pattern", 2}}));
  EXPECT_FLOAT_EQ(other.AttentionScale(), 1 / std::sqrt(168.0f));
  EXPECT_EQ(other.ropes[1].theta, 5000);
  EXPECT_EQ(other.NumFullLayers(), 17);
  // A window that cannot bite leaves a layer the RoPE of its type.
  const ModelConfig small = ParseGood(Gemma3({{"max_position_embeddings", 1024}}));
  EXPECT_EQ(small.NumFullLayers(), 34);
  EXPECT_EQ(small.layers[0].rope, 1);

  for (const auto& [key, value] : {std::pair("attn_logit_softcapping", json(50.0)),
                                   {"final_logit_softcapping", 30.0},
                                   {"hidden_activation", "silu"},
                                   {"hidden_act", "silu"},
                                   {"use_bidirectional_attention", true}}) {
    const auto refused = Parse(Gemma3({{key, value}}));
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnimplemented) << key;
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr(key));
  }
}

TEST(ModelConfigTest, Olmo3RotatesLayersByTheirTypes) {
  json config = Bare("Olmo3ForCausalLM", "olmo3", {{"num_hidden_layers", 5}});
  config.update({{"num_key_value_heads", 2}, {"sliding_window", 64}});
  config["rope_scaling"] = {
      {"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 64}};
  const ModelConfig older = ParseGood(config);
  EXPECT_THAT(WindowsOf(older), ElementsAre(64, 64, 64, 0, 64));
  EXPECT_THAT(RopesOf(older), ElementsAre(1, 1, 1, 0, 1));
  EXPECT_EQ(older.ropes[0].scaling.kind, RopeScaling::Kind::kYarn);
  EXPECT_EQ(older.ropes[1].scaling.kind, RopeScaling::Kind::kNone);
  EXPECT_EQ(older.ropes[1].theta, 500000.0);

  config.erase("rope_scaling");
  config["rope_parameters"] = {
      {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 777.0}}},
      {"full_attention", {{"rope_type", "linear"}, {"factor", 2.0}}}};
  const ModelConfig newer = ParseGood(config);
  EXPECT_EQ(newer.ropes[0].scaling.kind, RopeScaling::Kind::kLinear);
  EXPECT_EQ(newer.ropes[0].theta, 500000.0);
  EXPECT_EQ(newer.ropes[1].theta, 777.0);

  config["rope_parameters"]["chunked_attention"] = json::object();
  EXPECT_THAT(std::string(Parse(config).status().message()),
              HasSubstr("\"chunked_attention\": winnow does not know this type"));
  config["rope_parameters"].erase("chunked_attention");
  config["rope_parameters"]["full_attention"] = 7;
  EXPECT_THAT(std::string(Parse(config).status().message()),
              HasSubstr("rope_parameters.full_attention"));
}

TEST(ModelConfigTest, Exaone4RotatesTheLayersWithAWindow) {
  constexpr auto kNone = LayerSpec::kNoRope;
  json config = Bare("Exaone4ForCausalLM", "exaone4", {{"num_hidden_layers", 5}});
  config.update({{"num_key_value_heads", 2}, {"sliding_window", 64}});
  const ModelConfig hybrid = ParseGood(config);
  EXPECT_THAT(WindowsOf(hybrid), ElementsAre(64, 64, 64, 0, 64));
  EXPECT_THAT(RopesOf(hybrid), ElementsAre(0, 0, 0, kNone, 0));
  EXPECT_EQ(hybrid.head_dim, 64);
  // The others still do not rotate where no window bites.
  const ModelConfig served = WithServedContext(hybrid, 64);
  EXPECT_EQ(served.NumFullLayers(), 5);
  EXPECT_THAT(RopesOf(served), ElementsAre(0, 0, 0, kNone, 0));
  config["sliding_window"] = config["max_position_embeddings"];
  EXPECT_THAT(RopesOf(ParseGood(config)), ElementsAre(0, 0, 0, kNone, 0));
  config["sliding_window"] = 64;

  // As the 32B model's file has it: letters are for those who know no layer_types.
  config["sliding_window_pattern"] = "LLLG";
  const absl::Status letters = Parse(config).status();
  EXPECT_THAT(std::string(letters.message()), HasSubstr("sliding_window_pattern"));
  config["layer_types"] = {"full_attention", "sliding_attention", "full_attention",
                           "sliding_attention", "full_attention"};
  const ModelConfig typed = ParseGood(config);
  EXPECT_THAT(WindowsOf(typed), ElementsAre(0, 64, 0, 64, 0));
  EXPECT_THAT(RopesOf(typed), ElementsAre(kNone, 0, kNone, 0, kNone));
  EXPECT_THAT(typed.unknown_keys, IsEmpty());
  config.erase("layer_types");
  config["sliding_window_pattern"] = 2;
  EXPECT_THAT(RopesOf(ParseGood(config)), ElementsAre(0, kNone, 0, kNone, 0));

  // As the 1.2B model's: no layer has a window, and all rotate.
  config["sliding_window"] = nullptr;
  const ModelConfig full = ParseGood(config);
  EXPECT_EQ(full.NumFullLayers(), 5);
  EXPECT_THAT(RopesOf(full), ElementsAre(0, 0, 0, 0, 0));
}

TEST(ModelConfigTest, AWindowOfTheServedContextIsNone) {
  json mistral = OfFamily("MistralForCausalLM", "mistral");
  mistral["sliding_window"] = 100;
  const ModelConfig config = ParseGood(mistral);
  EXPECT_THAT(WindowsOf(WithServedContext(config, 101)), ElementsAre(100, 100));
  EXPECT_THAT(WindowsOf(WithServedContext(config, 100)), ElementsAre(0, 0));
}

struct Refusal {
  std::string key;  // what the message names, after the file
  json config;
  absl::StatusCode code;
  std::string says;
};

std::vector<Refusal> Refusals() {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  json mistral = OfFamily("MistralForCausalLM", "mistral");
  json mistral_window = mistral, mistral_types = mistral, mistral_bias = mistral;
  mistral_window["sliding_window"] = 0;
  mistral_types["layer_types"] = {"full_attention", "sliding_attention"};
  mistral_bias["sliding_window"] = nullptr;
  mistral_bias["attention_bias"] = true;
  json qwen = OfFamily("Qwen2ForCausalLM", "qwen2");
  json qwen_types = qwen, qwen_few_types = qwen, qwen_other_types = qwen, qwen_no_window = qwen,
       qwen_mlp_bias = qwen, qwen_kv = qwen, qwen_chunks = qwen;
  qwen_types["layer_types"] = {"full_attention", "sliding_attention"};
  qwen_no_window = qwen_types;
  qwen_no_window.update({{"use_sliding_window", true}, {"sliding_window", nullptr}});
  qwen_few_types["layer_types"] = {"full_attention"};
  qwen_other_types["layer_types"] = {"full_attention", "chunked_attention"};
  qwen_mlp_bias["mlp_bias"] = true;
  qwen_kv.erase("num_key_value_heads");  // 32 by default, for 2 query heads
  qwen_chunks["dual_chunk_attention_config"] = {{"chunk_size", 64}};
  const auto rope = [](const json& scaling) { return With({{"rope_scaling", scaling}}); };

  std::vector<Refusal> table = {
      {"architectures", With({{"architectures", {"Gemma2ForCausalLM"}}, {"model_type", "gemma2"}}),
       kUnimplemented,
       "\"Gemma2ForCausalLM\" is not supported; winnow runs LlamaForCausalLM, MistralForCausalLM, "
       "Ministral3ForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3VLTextModel, "
       "SmolLM3ForCausalLM, SeedOssForCausalLM, GraniteForCausalLM, Phi3ForCausalLM, "
       "GlmForCausalLM, "
       "Glm4ForCausalLM, Olmo2ForCausalLM, Olmo3ForCausalLM, Gemma3ForCausalLM, "
       "Exaone4ForCausalLM, "
       "Ernie4_5ForCausalLM, Ernie4_5_MoeForCausalLM, MixtralForCausalLM, MiniMaxM2ForCausalLM, "
       "Qwen2MoeForCausalLM, Qwen3MoeForCausalLM, Qwen3VLMoeTextModel, "
       "OlmoeForCausalLM, GraniteMoeForCausalLM, Glm4MoeForCausalLM, Dots1ForCausalLM, "
       "GptOssForCausalLM, and the text part of "
       "Mistral3ForConditionalGeneration and of Gemma3ForConditionalGeneration and of "
       "Qwen3VLForConditionalGeneration and of Qwen3VLMoeForConditionalGeneration"},
      {"architectures", With({{"architectures", {"GraniteMoeSharedForCausalLM"}}}), kUnimplemented,
       "winnow runs"},
      {"architectures", With({{"architectures", {"DeepseekV3ForCausalLM"}}}), kUnimplemented,
       "winnow runs"},
      {"architectures", With({{"architectures", "LlamaForCausalLM"}}), kInvalid,
       "list of one string"},
      {"architectures", With({{"architectures", {"A", "B"}}}), kInvalid, "list of one string"},
      {"architectures", With({{"architectures", {1}}}), kInvalid, "list of one string"},
      {"architectures", With({{"architectures", nullptr}, {"model_type", nullptr}}), kInvalid,
       "missing"},
      {"model_type", With({{"architectures", nullptr}, {"model_type", "gpt2"}}), kUnimplemented,
       "\"gpt2\" is not supported"},
      {"model_type", With({{"model_type", "mistral"}}), kInvalid, "does not belong to"},
      {"model_type", With({{"model_type", 1}}), kInvalid, "must be a string"},
      {"num_key_value_heads", With({{"num_attention_heads", 4}, {"num_key_value_heads", 3}}),
       kInvalid, "does not divide"},
      {"num_key_value_heads", qwen_kv, kInvalid, "32 does not divide"},
      {"head_dim", With({{"head_dim", 72}}), kUnimplemented,
       "72 is not supported; winnow has 64, 80, 96, 128, 256"},
      {"head_dim", With({{"head_dim", nullptr}}), kUnimplemented, "16 is not supported"},
      {"num_attention_heads", With({{"head_dim", nullptr}, {"hidden_size", 33}}), kInvalid,
       "does not divide hidden_size"},
      {"hidden_act", With({{"hidden_act", "gelu"}}), kUnimplemented, "\"gelu\" is not supported"},
      {"quantization_config.quant_method",
       With({{"quantization_config", {{"quant_method", "bitsandbytes"}}}}), kUnimplemented,
       "\"bitsandbytes\""},
      {"quantization_config", With({{"quantization_config", "awq"}}), kInvalid, "an object"},
      {"compression_config.quant_method", With({{"compression_config", {{"format", "x"}}}}),
       kUnimplemented, "not supported"},
      {"partial_rotary_factor", With({{"partial_rotary_factor", 0.5}}), kUnimplemented, "only 1"},
      {"torch_dtype", With({{"torch_dtype", "float8_e4m3fn"}}), kUnimplemented,
       "bfloat16, float16 and float32"},
      {"dtype", With({{"dtype", "int8"}}), kUnimplemented, "bfloat16, float16 and float32"},
      {"sliding_window", mistral_window, kInvalid, "from 1"},
      {"layer_types", mistral_types, kUnimplemented, "not supported in Mistral models"},
      {"sliding_window", With({{"sliding_window", 100}}), kUnimplemented,
       "100: Llama models have no windows"},
      {"layer_types", qwen_types, kInvalid, "use_sliding_window is not true"},
      {"layer_types", qwen_no_window, kInvalid, "there is no sliding_window"},
      {"layer_types", qwen_few_types, kInvalid, "must be a list of 2 names"},
      {"layer_types", qwen_other_types, kUnimplemented, "\"chunked_attention\" is not supported"},
      {"dual_chunk_attention_config", qwen_chunks, kUnimplemented, "not supported"},
      {"attention_bias", mistral_bias, kUnimplemented, "Mistral"},
      {"mlp_bias", qwen_mlp_bias, kUnimplemented, "only Llama"},
      {"rope_theta", With({{"rope_theta", 0.5}}), kInvalid, "must be a number from"},
      {"rope_scaling", rope("yarn"), kInvalid, "must be an object"},
      {"rope_scaling.type", rope({{"type", "dynamic"}, {"factor", 2.0}}), kUnimplemented,
       "\"dynamic\" is not supported; winnow has default, linear, llama3, yarn, longrope"},
      {"rope_scaling.short_factor", rope({{"rope_type", "longrope"}}), kInvalid, "missing"},
      {"rope_scaling.long_factor",
       rope({{"rope_type", "longrope"},
             {"short_factor", std::vector<double>(32, 1.0)},
             {"long_factor", std::vector<double>(31, 1.0)}}),
       kInvalid, "must be a list of 32 numbers"},
      {"rope_scaling.short_factor",
       rope({{"rope_type", "longrope"}, {"short_factor", std::vector<double>(32, 0.0)}}), kInvalid,
       "must be a list of 32 numbers from"},
      {"rope_scaling.short_factor", rope({{"rope_type", "longrope"}, {"short_factor", 1.0}}),
       kInvalid, "must be a list of 32 numbers"},
      {"rope_scaling.original_max_position_embeddings",
       rope({{"rope_type", "longrope"},
             {"original_max_position_embeddings", 1},
             {"short_factor", std::vector<double>(32, 1.0)},
             {"long_factor", std::vector<double>(32, 1.0)}}),
       kInvalid, "at least 2"},
      {"rope_scaling.type", Phi3({{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}}}),
       kUnimplemented, "\"linear\" is not supported; Phi-3 models have default and longrope"},
      {"partial_rotary_factor", Phi3({{"partial_rotary_factor", 0.55}}), kInvalid,
       "0.55 of 64 is 35, which is not a positive number of pairs"},
      {"partial_rotary_factor", Phi3({{"partial_rotary_factor", 0.0}}), kInvalid, "is 0, which"},
      {"attention_bias", Phi3({{"attention_bias", true}}), kUnimplemented,
       "Phi-3 models have none"},
      {"mlp_bias", Glm({{"mlp_bias", true}}), kUnimplemented, "models have biases in the MLP"},
      {"partial_rotary_factor", Ernie({{"partial_rotary_factor", 0.5}}), kUnimplemented, "only 1"},
      {"use_bias", Ernie({{"use_bias", 1}}), kInvalid, "true or false"},
      {"mlp_bias", Phi3({{"mlp_bias", true}}), kUnimplemented,
       "only Llama, SmolLM3, Seed-OSS, Granite"},
      {"head_dim", Phi3({{"num_attention_heads", 1}, {"hidden_size", 512}}), kUnimplemented,
       "512 is not supported"},
      {"lm_head_bias", Phi3({{"lm_head_bias", true}}), kUnimplemented, "computes with it"},
      {"no_rope_layers", SmolLM3({{"num_key_value_heads", 1}, {"no_rope_layers", {1}}}), kInvalid,
       "has 1 values for 2 layers"},
      {"no_rope_layers", SmolLM3({{"num_key_value_heads", 1}, {"no_rope_layers", {1, 2}}}),
       kInvalid, "from 0 to 1"},
      {"no_rope_layer_interval",
       SmolLM3({{"num_key_value_heads", 1}, {"no_rope_layer_interval", 0}}), kInvalid, "from 1"},
      {"layer_types",
       SmolLM3({{"num_key_value_heads", 1},
                {"use_sliding_window", true},
                {"layer_types", {"full_attention", "sliding_attention"}}}),
       kInvalid, "there is no sliding_window"},
      {"attention_multiplier", Granite({{"attention_multiplier", 0.0}}), kInvalid, "from 0.0001"},
      {"residual_multiplier", Granite({{"residual_multiplier", -1.0}}), kInvalid, "from 0.0001"},
      {"logits_scaling", Granite({{"logits_scaling", 0}}), kInvalid, "from 0.0001"},
      {"embedding_multiplier", Granite({{"embedding_multiplier", "12"}}), kInvalid, "from 0.0001"},
      {"attention_out_bias", Granite({{"attention_out_bias", true}}), kUnimplemented,
       "computes with it"},
      {"logits_scaling", SeedOss({{"num_key_value_heads", 1}, {"logits_scaling", 8.0}}),
       kUnimplemented, "computes with it"},
      {"rope_scaling.rope_type", rope({{"rope_type", 3}}), kInvalid, "must be a string"},
      {"rope_scaling.factor", rope({{"rope_type", "linear"}}), kInvalid, "missing"},
      {"rope_scaling.factor", rope({{"rope_type", "linear"}, {"factor", 0.0}}), kInvalid,
       "must be a number from 1"},
      {"rope_scaling.factor", rope({{"rope_type", "linear"}, {"factor", "2"}}), kInvalid,
       "must be a number from 1"},
      {"rope_scaling.low_freq_factor", rope({{"rope_type", "llama3"}, {"factor", 8}}), kInvalid,
       "missing"},
      {"rope_scaling.high_freq_factor",
       rope({{"rope_type", "llama3"},
             {"factor", 8},
             {"low_freq_factor", 4.0},
             {"high_freq_factor", 4.0}}),
       kInvalid, "must be above low_freq_factor"},
      {"rope_scaling.truncate", rope({{"rope_type", "yarn"}, {"truncate", 1}}), kInvalid,
       "true or false"},
      {"rope_scaling.partial_rotary_factor",
       rope({{"rope_type", "default"}, {"partial_rotary_factor", 0.25}}), kUnimplemented, "only 1"},
      {"rope_scaling.\"mrope_section\"",
       rope({{"rope_type", "default"}, {"mrope_section", {1, 2}}}), kUnimplemented,
       "does not know"},
      {"rope_parameters.factor", With({{"rope_parameters", {{"rope_type", "linear"}}}}), kInvalid,
       "missing"},
      {"eos_token_id", With({{"eos_token_id", 40}}), kInvalid, "from 0 to 39"},
      {"eos_token_id", With({{"eos_token_id", {1, -1}}}), kInvalid, "from 0 to 39"},
      {"eos_token_id", With({{"eos_token_id", "</s>"}}), kInvalid, "from 0 to 39"},
      {"bos_token_id", With({{"bos_token_id", {1, 2}}}), kInvalid, "list of at most 1"},
      {"rms_norm_eps", With({{"rms_norm_eps", -1.0}}), kInvalid, "from 0 to 1"},
      {"tie_word_embeddings", With({{"tie_word_embeddings", 1}}), kInvalid, "true or false"},
  };
  for (const char* key : {"hidden_size", "intermediate_size", "num_hidden_layers",
                          "num_attention_heads", "vocab_size", "max_position_embeddings"}) {
    table.push_back({key, Without(key), kInvalid, "missing"});
    for (const json& bad : {json(0), json(-4), json(4.0), json("64"), json(true), json({64}),
                            json(int64_t{1} << 40), json(UINT64_MAX), json(1e300)}) {
      table.push_back({key, With({{key, bad}}), kInvalid, "must be an integer from 1 to"});
    }
  }
  return table;
}

TEST(ModelConfigTest, EachRefusalNamesFileAndKey) {
  for (const Refusal& refusal : Refusals()) {
    const auto config = Parse(refusal.config);
    ASSERT_FALSE(config.ok()) << refusal.key << " " << refusal.config.dump();
    const std::string message(config.status().message());
    EXPECT_EQ(config.status().code(), refusal.code) << message;
    EXPECT_THAT(message, StartsWith("dir/config.json: " + refusal.key + ": "));
    EXPECT_THAT(message, HasSubstr(refusal.says));
  }
}

TEST(ModelConfigTest, KeysThatNobodyKnowsAreListedAndHarmlessOnesAreNot) {
  json config = With({{"transformers_version", "4.57.1"},
                      {"use_cache", true},
                      {"initializer_range", 0.02},
                      {"pretraining_tp", 1},
                      {"attention_dropout", 0.0},
                      {"_name_or_path", "x"}});
  EXPECT_THAT(ParseGood(config).unknown_keys, IsEmpty());
  config.update({{"zoom_factor", 2.0},
                 {"a_new_switch", true},
                 {"a_switch_that_is_off", false},
                 {"nothing", nullptr},
                 {"none", json::object()}});
  EXPECT_THAT(ParseGood(config).unknown_keys, ElementsAre("a_new_switch", "zoom_factor"));
  // What the families' own classes write is known.
  const auto trained = LoadModelConfig(SourcePath("models/needle-5m"));
  ASSERT_TRUE(trained.ok()) << trained.status();
  EXPECT_THAT(trained->unknown_keys, IsEmpty());
  const json cases = json::parse(ReadText(SourcePath("tests/golden/families/cases.json")));
  for (const std::string name : cases["cases"]) {
    const auto golden = LoadModelConfig(SourcePath("tests/golden/families/" + name));
    ASSERT_TRUE(golden.ok()) << golden.status();
    EXPECT_THAT(golden->unknown_keys, IsEmpty()) << name;
  }
}

TEST(ModelConfigTest, KeysThatChangeTheComputationAreRefusedUnlessTheyAreNeutral) {
  for (const auto& [key, value] : std::map<std::string, json>{{"logits_scaling", 8.0},
                                                              {"embedding_multiplier", 12},
                                                              {"final_logit_softcapping", 30.0},
                                                              {"num_local_experts", 8},
                                                              {"swiglu_limit", 7.0},
                                                              {"no_rope_layers", {1, 0}},
                                                              {"use_qk_norm", true}}) {
    const absl::Status status = Parse(With({{key, value}})).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << key;
    EXPECT_THAT(std::string(status.message()), StartsWith("dir/config.json: " + key + ": "));
  }
  const ModelConfig neutral = ParseGood(With({{"logits_scaling", 1.0},
                                              {"embedding_multiplier", 1},
                                              {"final_logit_softcapping", nullptr},
                                              {"num_local_experts", 0},
                                              {"use_qk_norm", false}}));
  EXPECT_THAT(neutral.unknown_keys, IsEmpty());
}

json MoeConfig(const char* architecture, const char* model_type, const json& keys) {
  json config = With({{"architectures", {architecture}}, {"model_type", model_type}});
  config.update(keys);
  return config;
}
json Qwen3Moe(const json& keys = json::object()) {
  return MoeConfig("Qwen3MoeForCausalLM", "qwen3_moe", keys);
}

json Mixtral(const json& keys) { return MoeConfig("MixtralForCausalLM", "mixtral", keys); }

TEST(ModelConfigTest, WindowsAreInTheLayersOfTheFamily) {
  // All layers see it, whatever other families' keys say.
  json mistral = OfFamily("MistralForCausalLM", "mistral");
  mistral["sliding_window"] = 255;
  mistral["use_sliding_window"] = false;
  EXPECT_THAT(WindowsOf(ParseGood(mistral)), ElementsAre(255, 255));
  mistral.erase("sliding_window");
  mistral["max_position_embeddings"] = 8192;
  EXPECT_THAT(WindowsOf(ParseGood(mistral)), ElementsAre(4096, 4096));
  EXPECT_THAT(WindowsOf(ParseGood(Mixtral({{"sliding_window", 64}}))), ElementsAre(64, 64));
  EXPECT_THAT(WindowsOf(ParseGood(Phi3({{"sliding_window", 200}}))), ElementsAre(200, 200));
  json moe =
      Qwen3Moe({{"use_sliding_window", true}, {"sliding_window", 64}, {"max_window_layers", 9}});
  EXPECT_THAT(WindowsOf(ParseGood(moe)), ElementsAre(64, 64));
  moe["max_position_embeddings"] = 8192;
  moe.erase("sliding_window");
  EXPECT_THAT(WindowsOf(ParseGood(moe)), ElementsAre(4096, 4096));
  moe["use_sliding_window"] = false;
  EXPECT_THAT(WindowsOf(ParseGood(moe)), ElementsAre(0, 0));

  // Layers that layer_types names see it; without the key, those from a layer on.
  for (const auto& [architecture, type] :
       {std::pair("Qwen2ForCausalLM", "qwen2"), std::pair("Qwen3ForCausalLM", "qwen3")}) {
    json qwen = OfFamily(architecture, type);
    qwen.update({{"use_sliding_window", true}, {"sliding_window", 64}, {"max_window_layers", 1}});
    EXPECT_THAT(WindowsOf(ParseGood(qwen)), ElementsAre(0, 64));
    qwen["layer_types"] = {"sliding_attention", "full_attention"};
    EXPECT_THAT(WindowsOf(ParseGood(qwen)), ElementsAre(64, 0));
    EXPECT_EQ(ParseGood(qwen).NumFullLayers(), 1);
  }

  // The same key, and without it layers without RoPE.
  json smol = SmolLM3({{"num_hidden_layers", 3}, {"num_key_value_heads", 1}});
  smol.update(
      {{"no_rope_layer_interval", 2}, {"use_sliding_window", true}, {"sliding_window", 64}});
  EXPECT_THAT(WindowsOf(ParseGood(smol)), ElementsAre(0, 64, 0));
  smol["layer_types"] = {"sliding_attention", "full_attention", "sliding_attention"};
  EXPECT_THAT(WindowsOf(ParseGood(smol)), ElementsAre(64, 0, 64));
}

TEST(ModelConfigTest, ExpertsAreReadByEitherNameAndWithTheFamilysDefaults) {
  const ModelConfig qwen = ParseGood(Qwen3Moe());
  EXPECT_EQ(qwen.family, Family::kQwen3Moe);
  EXPECT_EQ(qwen.experts, (ExpertsConfig{.count = 128, .per_token = 8, .intermediate_size = 768}));
  EXPECT_EQ(qwen.NumLayersOf(LayerSpec::Mlp::kExperts), 2);
  const ModelConfig mixtral = ParseGood(Mixtral({{"sliding_window", nullptr}}));
  EXPECT_EQ(mixtral.family, Family::kMixtral);
  EXPECT_EQ(
      mixtral.experts,
      (ExpertsConfig{.count = 8, .per_token = 2, .intermediate_size = 48, .normalized = true}));
  for (const char* key : {"num_experts", "num_local_experts"}) {
    const ModelConfig given = ParseGood(Qwen3Moe({{key, 6},
                                                  {"num_experts_per_tok", 6},
                                                  {"moe_intermediate_size", 40},
                                                  {"norm_topk_prob", true},
                                                  {"router_aux_loss_coef", 0.001},
                                                  {"output_router_logits", false}}));
    EXPECT_EQ(
        given.experts,
        (ExpertsConfig{.count = 6, .per_token = 6, .intermediate_size = 40, .normalized = true}));
    EXPECT_THAT(given.unknown_keys, IsEmpty());
  }
  // Another family has none.
  EXPECT_EQ(ParseGood(TinyConfig()).experts, ExpertsConfig());
}

TEST(ModelConfigTest, ExpertsMayBeAllOfAnMlpAndTakeItsSize) {
  const auto olmoe = [](const json& keys) { return MoeConfig("OlmoeForCausalLM", "olmoe", keys); };
  const ModelConfig plain = ParseGood(olmoe({{"clip_qkv", nullptr}}));
  EXPECT_EQ(plain.family, Family::kOlmoe);
  EXPECT_EQ(plain.experts, (ExpertsConfig{.count = 64, .per_token = 8, .intermediate_size = 48}));
  EXPECT_TRUE(plain.layers[0].qk_norm_whole);
  EXPECT_TRUE(ParseGood(olmoe({{"norm_topk_prob", true}})).experts.normalized);
  EXPECT_THAT(std::string(Parse(olmoe({{"clip_qkv", 8.0}})).status().message()),
              HasSubstr("clip_qkv"));

  const auto granite = [](const json& keys) {
    return MoeConfig("GraniteMoeForCausalLM", "granitemoe", keys);
  };
  const ModelConfig scaled = ParseGood(granite({{"residual_multiplier", 0.25},
                                                {"attention_multiplier", 0.5},
                                                {"num_local_experts", 40},
                                                {"num_experts_per_tok", 8}}));
  EXPECT_EQ(scaled.family, Family::kGraniteMoe);
  EXPECT_EQ(
      scaled.experts,
      (ExpertsConfig{.count = 40, .per_token = 8, .intermediate_size = 48, .normalized = true}));
  EXPECT_EQ(scaled.residual_multiplier, 0.25);
  EXPECT_EQ(scaled.AttentionScale(), 0.5);
  EXPECT_EQ(ParseGood(granite(json::object())).experts.count, 8);
}

TEST(ModelConfigTest, SomeLayersMayHaveOneMlpAmongLayersOfExperts) {
  const auto kinds = [](const json& keys) {
    json config = Qwen3Moe({{"num_hidden_layers", 5}});
    config.update(keys);
    std::string text;
    for (const LayerSpec& layer : ParseGood(config).layers) {
      text += layer.mlp == LayerSpec::Mlp::kExperts ? 'e' : 'd';
    }
    return text;
  };
  EXPECT_EQ(kinds(json::object()), "eeeee");
  EXPECT_EQ(kinds({{"mlp_only_layers", {0, 3}}}), "deede");
  EXPECT_EQ(kinds({{"mlp_only_layers", json::array()}, {"decoder_sparse_step", 2}}), "deded");
  EXPECT_EQ(kinds({{"mlp_only_layers", {1}}, {"decoder_sparse_step", 2}}), "ddded");
  EXPECT_EQ(kinds({{"decoder_sparse_step", 6}}), "ddddd");
  EXPECT_EQ(ParseGood(Qwen3Moe({{"decoder_sparse_step", 6}})).experts, ExpertsConfig());
}

using Scores = kernels::ExpertRouting::Scores;

std::string KindsOf(const ModelConfig& config) {
  std::string text;
  for (const LayerSpec& layer : config.layers) {
    text += layer.mlp == LayerSpec::Mlp::kExperts ? 'e' : 'd';
  }
  return text;
}

// As GLM-4.5-Air's file has it, but for the layers' number.
json Glm45Air(const json& keys = json::object()) {
  json config = {{"architectures", {"Glm4MoeForCausalLM"}},
                 {"attention_bias", true},
                 {"attention_dropout", 0.0},
                 {"pad_token_id", 151329},
                 {"eos_token_id", {151329, 151336, 151338}},
                 {"head_dim", 128},
                 {"hidden_act", "silu"},
                 {"hidden_size", 4096},
                 {"partial_rotary_factor", 0.5},
                 {"initializer_range", 0.02},
                 {"intermediate_size", 10944},
                 {"max_position_embeddings", 131072},
                 {"model_type", "glm4_moe"},
                 {"moe_intermediate_size", 1408},
                 {"norm_topk_prob", true},
                 {"num_attention_heads", 96},
                 {"n_group", 1},
                 {"topk_group", 1},
                 {"n_routed_experts", 128},
                 {"n_shared_experts", 1},
                 {"routed_scaling_factor", 1.0},
                 {"num_experts_per_tok", 8},
                 {"first_k_dense_replace", 1},
                 {"num_hidden_layers", 3},
                 {"num_key_value_heads", 8},
                 {"rms_norm_eps", 1e-05},
                 {"rope_scaling", nullptr},
                 {"rope_theta", 1000000},
                 {"num_nextn_predict_layers", 1},
                 {"tie_word_embeddings", false},
                 {"torch_dtype", "bfloat16"},
                 {"use_cache", true},
                 {"use_qk_norm", false},
                 {"vocab_size", 151552}};
  config.update(keys);
  return config;
}

TEST(ModelConfigTest, Glm45IsReadAsItIsPublished) {
  const ModelConfig air = ParseGood(Glm45Air());
  EXPECT_EQ(air.family, Family::kGlm4Moe);
  EXPECT_EQ(air.experts, (ExpertsConfig{.count = 128,
                                        .per_token = 8,
                                        .intermediate_size = 1408,
                                        .scores = Scores::kSigmoid,
                                        .normalized = true,
                                        .corrected = true,
                                        .shared_intermediate_size = 1408}));
  EXPECT_EQ(KindsOf(air), "dee");
  EXPECT_EQ(air.rotary_dim, 64);
  EXPECT_EQ(air.prediction_layers, 1);
  EXPECT_THAT(air.unknown_keys, IsEmpty());
  for (const LayerSpec& layer : air.layers) {
    EXPECT_TRUE(layer.qkv_bias);
    EXPECT_FALSE(layer.o_bias);
    EXPECT_FALSE(layer.qk_norm);
  }
  // GLM-4.5, the larger one.
  const ModelConfig large = ParseGood(Glm45Air({{"use_qk_norm", true},
                                                {"first_k_dense_replace", 2},
                                                {"n_routed_experts", 160},
                                                {"routed_scaling_factor", 2.5},
                                                {"n_shared_experts", 2}}));
  EXPECT_EQ(KindsOf(large), "dde");
  EXPECT_EQ(large.experts.scale, 2.5);
  EXPECT_EQ(large.experts.shared_intermediate_size, 2816);
  EXPECT_TRUE(large.layers[0].qk_norm);
  EXPECT_FALSE(large.layers[0].qk_norm_whole);
  EXPECT_EQ(ParseGood(Glm45Air({{"n_group", 4}, {"topk_group", 4}})).experts, air.experts);
}

// As MiniMax-M2's file has it, but for the layers' number and its quantised weights.
json MiniMaxM2(const json& keys = json::object()) {
  json config = {{"architectures", {"MiniMaxM2ForCausalLM"}},
                 {"attention_dropout", 0.0},
                 {"attn_type_list", {1, 1}},
                 {"auto_map", {{"AutoConfig", "configuration_minimax_m2.MiniMaxM2Config"}}},
                 {"bos_token_id", nullptr},
                 {"eos_token_id", nullptr},
                 {"head_dim", 128},
                 {"hidden_act", "silu"},
                 {"hidden_size", 3072},
                 {"initializer_range", 0.02},
                 {"intermediate_size", 1536},
                 {"layernorm_full_attention_beta", 1.0},
                 {"layernorm_linear_attention_beta", 1.0},
                 {"layernorm_mlp_beta", 1.0},
                 {"max_position_embeddings", 196608},
                 {"mlp_intermediate_size", 8192},
                 {"model_type", "minimax_m2"},
                 {"mtp_transformer_layers", 1},
                 {"num_attention_heads", 48},
                 {"num_experts_per_tok", 8},
                 {"num_hidden_layers", 2},
                 {"num_key_value_heads", 8},
                 {"num_local_experts", 256},
                 {"num_mtp_modules", 3},
                 {"output_router_logits", false},
                 {"qk_norm_type", "per_layer"},
                 {"rms_norm_eps", 1e-06},
                 {"rope_theta", 5000000},
                 {"rotary_dim", 64},
                 {"router_aux_loss_coef", 0.001},
                 {"router_jitter_noise", 0.0},
                 {"scoring_func", "sigmoid"},
                 {"shared_intermediate_size", 0},
                 {"shared_moe_mode", "sigmoid"},
                 {"sliding_window", nullptr},
                 {"tie_word_embeddings", false},
                 {"use_cache", true},
                 {"use_mtp", true},
                 {"use_qk_norm", true},
                 {"use_routing_bias", true},
                 {"vocab_size", 200064}};
  config.update(keys);
  return config;
}

TEST(ModelConfigTest, MiniMaxM2IsReadAsItIsPublished) {
  const ModelConfig config = ParseGood(MiniMaxM2());
  EXPECT_EQ(config.family, Family::kMiniMaxM2);
  EXPECT_EQ(config.experts, (ExpertsConfig{.count = 256,
                                           .per_token = 8,
                                           .intermediate_size = 1536,
                                           .scores = Scores::kSigmoid,
                                           .normalized = true,
                                           .corrected = true}));
  EXPECT_EQ(config.rotary_dim, 64);
  EXPECT_TRUE(config.layers[1].qk_norm_whole);
  EXPECT_THAT(config.unknown_keys, IsEmpty());
}

TEST(ModelConfigTest, Qwen2MoesSharedExpertHasASizeAndAGate) {
  const auto qwen = [](const json& keys) {
    return MoeConfig("Qwen2MoeForCausalLM", "qwen2_moe", keys);
  };
  const ModelConfig plain = ParseGood(qwen({{"sliding_window", 0}, {"use_sliding_window", false}}));
  EXPECT_EQ(plain.experts, (ExpertsConfig{.count = 60,
                                          .per_token = 4,
                                          .intermediate_size = 1408,
                                          .shared_intermediate_size = 5632,
                                          .shared_is_gated = true}));
  EXPECT_TRUE(plain.layers[0].qkv_bias);
  EXPECT_FALSE(plain.layers[0].o_bias);
  const ModelConfig other = ParseGood(qwen({{"qkv_bias", false},
                                            {"mlp_only_layers", {0}},
                                            {"norm_topk_prob", true},
                                            {"shared_expert_intermediate_size", 0}}));
  EXPECT_EQ(KindsOf(other), "de");
  EXPECT_TRUE(other.experts.normalized);
  EXPECT_EQ(other.experts.shared_intermediate_size, 0);
  EXPECT_FALSE(other.experts.shared_is_gated);
  EXPECT_FALSE(other.layers[0].qkv_bias);
}

TEST(ModelConfigTest, ErniesExpertsAreInARangeOfLayers) {
  const auto ernie = [](json keys) {
    keys["num_hidden_layers"] = 6;
    return MoeConfig("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", keys);
  };
  const ModelConfig plain = ParseGood(ernie({{"moe_capacity", {64, 64, 64}},
                                             {"moe_gate", "topk"},
                                             {"moe_use_aux_free", true},
                                             {"moe_norm_min", 1e-12}}));
  EXPECT_EQ(plain.experts, (ExpertsConfig{.count = 64,
                                          .per_token = 6,
                                          .intermediate_size = 1536,
                                          .normalized = true,
                                          .corrected = true,
                                          .shared_intermediate_size = 3072}));
  EXPECT_EQ(KindsOf(plain), "deeeee");
  EXPECT_THAT(plain.unknown_keys, IsEmpty());
  EXPECT_EQ(KindsOf(ParseGood(ernie({{"moe_layer_start_index", 2}, {"moe_layer_end_index", 4}}))),
            "ddeeed");
  EXPECT_EQ(KindsOf(ParseGood(ernie({{"moe_layer_start_index", 0}, {"moe_layer_interval", 2}}))),
            "dedede");
  EXPECT_EQ(ParseGood(ernie({{"moe_num_shared_experts", 0}})).experts.shared_intermediate_size, 0);
  EXPECT_EQ(ParseGood(ernie({{"moe_k", 3}, {"moe_num_experts", 8}})).experts.per_token, 3);
}

TEST(ModelConfigTest, DotsIsReadAsItIsPublished) {
  const ModelConfig dots = ParseGood(MoeConfig("Dots1ForCausalLM", "dots1",
                                               {{"n_routed_experts", 128},
                                                {"n_shared_experts", 2},
                                                {"num_experts_per_tok", 6},
                                                {"moe_intermediate_size", 1408},
                                                {"first_k_dense_replace", 1},
                                                {"routed_scaling_factor", 2.5},
                                                {"norm_topk_prob", true},
                                                {"scoring_func", "noaux_tc"},
                                                {"topk_method", "noaux_tc"},
                                                {"n_group", 1},
                                                {"topk_group", 1},
                                                {"max_window_layers", 62},
                                                {"sliding_window", nullptr}}));
  EXPECT_EQ(dots.experts, (ExpertsConfig{.count = 128,
                                         .per_token = 6,
                                         .intermediate_size = 1408,
                                         .scores = Scores::kSigmoid,
                                         .normalized = true,
                                         .corrected = true,
                                         .scale = 2.5,
                                         .shared_intermediate_size = 2816}));
  EXPECT_EQ(KindsOf(dots), "de");
  EXPECT_TRUE(dots.layers[0].qk_norm);
  EXPECT_THAT(dots.unknown_keys, IsEmpty());
}

// As gpt-oss-20b's file has it, but for the layers' number.
TEST(ModelConfigTest, GptOssIsReadAsItIsPublished) {
  json config = {{"architectures", {"GptOssForCausalLM"}},
                 {"attention_bias", true},
                 {"attention_dropout", 0.0},
                 {"eos_token_id", 200002},
                 {"experts_per_token", 4},
                 {"head_dim", 64},
                 {"hidden_act", "silu"},
                 {"hidden_size", 2880},
                 {"initial_context_length", 4096},
                 {"initializer_range", 0.02},
                 {"intermediate_size", 2880},
                 {"layer_types", {"sliding_attention", "full_attention", "sliding_attention"}},
                 {"max_position_embeddings", 131072},
                 {"model_type", "gpt_oss"},
                 {"num_attention_heads", 64},
                 {"num_experts_per_tok", 4},
                 {"num_hidden_layers", 3},
                 {"num_key_value_heads", 8},
                 {"num_local_experts", 32},
                 {"output_router_logits", false},
                 {"pad_token_id", 199999},
                 {"quantization_config",
                  {{"modules_to_not_convert",
                    {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                     "lm_head"}},
                   {"quant_method", "mxfp4"}}},
                 {"rms_norm_eps", 1e-05},
                 {"rope_scaling",
                  {{"beta_fast", 32.0},
                   {"beta_slow", 1.0},
                   {"factor", 32.0},
                   {"original_max_position_embeddings", 4096},
                   {"rope_type", "yarn"},
                   {"truncate", false}}},
                 {"rope_theta", 150000},
                 {"router_aux_loss_coef", 0.9},
                 {"sliding_window", 128},
                 {"swiglu_limit", 7.0},
                 {"tie_word_embeddings", false},
                 {"transformers_version", "4.55.0.dev0"},
                 {"use_cache", true},
                 {"vocab_size", 201088}};
  const ModelConfig published = ParseGood(config);
  EXPECT_THAT(published.unknown_keys, IsEmpty());
  EXPECT_EQ(published.dtype, kernels::DType::kBF16);
  EXPECT_EQ(published.weight_scheme, WeightScheme(Mxfp4Scheme()));
  EXPECT_THAT(WindowsOf(published), ElementsAre(128, 0, 128));
  EXPECT_EQ(published.experts, (ExpertsConfig{.count = 32,
                                              .per_token = 4,
                                              .intermediate_size = 2880,
                                              .normalized = true,
                                              .clamped = kernels::ClampedSwiglu{1.702f, 7.0f}}));
  // Defaults of the reference, for a file that says little.
  json bare = config;
  for (const char* key :
       {"attention_bias", "experts_per_token", "head_dim", "layer_types", "num_experts_per_tok",
        "quantization_config", "rms_norm_eps", "rope_scaling", "rope_theta", "sliding_window",
        "swiglu_limit", "num_key_value_heads", "num_attention_heads"}) {
    bare.erase(key);
  }
  const ModelConfig defaults = ParseGood(bare);
  EXPECT_EQ(defaults.layers, published.layers);
  EXPECT_EQ(defaults.experts, published.experts);
  EXPECT_EQ(defaults.head_dim, 64);
  EXPECT_EQ(defaults.num_kv_heads, 8);
  EXPECT_EQ(defaults.rms_norm_eps, published.rms_norm_eps);
  EXPECT_EQ(defaults.ropes[0].theta, published.ropes[0].theta);
  EXPECT_EQ(defaults.ropes[0].scaling, published.ropes[0].scaling);

  config.update({{"attention_bias", false}, {"swiglu_alpha", 1.5}, {"swiglu_limit", 3}});
  const ModelConfig other = ParseGood(config);
  EXPECT_FALSE(other.layers[0].qkv_bias || other.layers[0].o_bias);
  EXPECT_TRUE(other.layers[0].mlp_bias && other.layers[0].sinks);
  EXPECT_EQ(other.experts.clamped, (kernels::ClampedSwiglu{1.5f, 3.0f}));
  for (const auto& [key, value] : std::map<std::string, json>{{"experts_per_token", 5},
                                                              {"swiglu_limit", 0},
                                                              {"swiglu_alpha", -1},
                                                              {"hidden_act", "gelu"},
                                                              {"mlp_bias", true}}) {
    json wrong = config;
    wrong[key] = value;
    EXPECT_THAT(std::string(Parse(wrong).status().message()),
                StartsWith("dir/config.json: " + key + ": "));
  }
}

TEST(ModelConfigTest, ExpertsThatCannotBeAreRefusedByKey) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  const struct {
    json config;
    std::string key, says;
    absl::StatusCode code = kInvalid;
  } kCases[] = {
      {Qwen3Moe({{"num_experts", 4}, {"num_experts_per_tok", 5}}), "num_experts_per_tok",
       "5 of 4 experts"},
      {Qwen3Moe({{"num_experts_per_tok", 0}}), "num_experts_per_tok", "from 1 to"},
      {Qwen3Moe({{"num_experts", 0}}), "num_experts", "from 1 to 1024, is 0"},
      {Qwen3Moe({{"num_experts", 1025}}), "num_experts", "from 1 to 1024, is 1025"},
      {Qwen3Moe({{"num_experts", 4}, {"num_local_experts", 8}}), "num_experts",
       "is not num_local_experts, 8"},
      {Qwen3Moe({{"moe_intermediate_size", 0}}), "moe_intermediate_size", "from 1 to"},
      {Qwen3Moe({{"decoder_sparse_step", 0}}), "decoder_sparse_step", "from 1 to"},
      {Qwen3Moe({{"mlp_only_layers", {-1}}}), "mlp_only_layers", "from 0 to"},
      {Qwen3Moe({{"norm_topk_prob", "yes"}}), "norm_topk_prob", ""},
      {Mixtral({{"moe_intermediate_size", 64}}), "moe_intermediate_size", "is not supported",
       kUnimplemented},
      {Mixtral({{"attention_bias", true}}), "attention_bias", "Mixtral models have none",
       kUnimplemented},
      {Mixtral({{"n_shared_experts", 1}}), "n_shared_experts", "is not supported", kUnimplemented},
      {Glm45Air({{"n_group", 8}, {"topk_group", 4}}), "topk_group", "4 of 8 groups",
       kUnimplemented},
      {Glm45Air({{"scoring_func", "softmax"}}), "scoring_func", "must be \"sigmoid\"",
       kUnimplemented},
      {Glm45Air({{"topk_method", "greedy"}}), "topk_method", "must be \"noaux_tc\"",
       kUnimplemented},
      {Glm45Air({{"routed_scaling_factor", 0.0}}), "routed_scaling_factor", ""},
      {Glm45Air({{"n_shared_experts", 1024}}), "n_shared_experts", "together of 1441792"},
      {Glm45Air({{"num_experts_per_tok", 129}}), "num_experts_per_tok", "129 of 128 experts"},
      {MiniMaxM2({{"use_qk_norm", false}}), "use_qk_norm", "false is not supported",
       kUnimplemented},
      {MiniMaxM2({{"qk_norm_type", "per_head"}}), "qk_norm_type", "winnow has \"per_layer\"",
       kUnimplemented},
      {MiniMaxM2({{"use_routing_bias", false}}), "use_routing_bias", "", kUnimplemented},
      {MiniMaxM2({{"shared_intermediate_size", 512}}), "shared_intermediate_size", "",
       kUnimplemented},
      {MiniMaxM2({{"layernorm_mlp_beta", 3.5}}), "layernorm_mlp_beta", "", kUnimplemented},
      {MiniMaxM2({{"attn_type_list", {1, 0}}}), "attn_type_list", "from 1 to 1"},
      {MiniMaxM2({{"rotary_dim", 129}}), "rotary_dim", "from 2 to 128"},
      {MiniMaxM2({{"rotary_dim", 63}}), "partial_rotary_factor", "is 63"},
      {MoeConfig("Dots1ForCausalLM", "dots1", {{"num_experts_per_tok", 2}}), "n_routed_experts",
       "missing"},
      {MoeConfig("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", {{"use_bias", true}}), "use_bias",
       "experts have no biases", kUnimplemented},
      {MoeConfig("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", {{"moe_norm_min", 0.5}}),
       "moe_norm_min", ""},
      {MoeConfig("Qwen2MoeForCausalLM", "qwen2_moe",
                 {{"use_sliding_window", true}, {"sliding_window", 64}}),
       "sliding_window", "have no windows", kUnimplemented},
  };
  for (const auto& refused : kCases) {
    const absl::Status status = Parse(refused.config).status();
    EXPECT_EQ(status.code(), refused.code) << status;
    EXPECT_THAT(std::string(status.message()),
                StartsWith("dir/config.json: " + refused.key + ": "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(refused.says));
  }
}

TEST(ModelConfigTest, RefusalsOfTheGenerationConfigNameItsFile) {
  const auto config = Parse(TinyConfig(), R"({"eos_token_id": 99})");
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(config.status().message()),
              StartsWith("dir/generation_config.json: eos_token_id: "));
  EXPECT_THAT(std::string(Parse(TinyConfig(), "[").status().message()),
              StartsWith("dir/generation_config.json: "));
}

TEST(ModelConfigTest, FilesThatAreMissingOrNoJsonAreNamed) {
  const TempDir dir;
  EXPECT_TRUE(absl::IsNotFound(LoadModelConfig(dir.path()).status()));
  WriteText(dir.File("config.json"), "{\"hidden_size\": ");
  const absl::Status status = LoadModelConfig(dir.path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), StartsWith(dir.File("config.json") + ": "));

  WriteText(dir.File("config.json"), TinyConfig().dump());
  EXPECT_TRUE(LoadModelConfig(dir.path()).ok());  // generation_config.json is optional
  WriteText(dir.File("generation_config.json"), "");
  EXPECT_THAT(std::string(LoadModelConfig(dir.path()).status().message()),
              HasSubstr("generation_config.json: empty"));
}

TEST(ModelConfigTest, NeitherTruncationNorAWrongTypeAnywhereCrashes) {
  json rich =
      json::parse(ReadText(SourcePath("tests/golden/families/llama_yarn_mscale/config.json")));
  const std::string text = rich.dump();
  for (size_t size = 0; size < text.size(); ++size) {
    EXPECT_FALSE(ParseModelConfig(text.substr(0, size), "c", "", "").ok()) << size;
  }
  const std::vector<json> values = {nullptr,        true,      -1,         0,   1,
                                    1e308,          -1e-308,   UINT64_MAX, "x", json::array(),
                                    json::object(), {{"a", 1}}};
  const auto try_all = [&values, &rich](json& slot) {
    const json saved = slot;
    for (const json& value : values) {
      slot = value;
      const auto config = ParseModelConfig(rich.dump(), "c", rich.dump(), "g");
      if (config.ok()) ComputeRope(*config);
    }
    slot = saved;
  };
  for (auto& [key, value] : rich.items()) try_all(value);
  for (auto& [key, value] : rich["rope_parameters"].items()) try_all(value);
}

}  // namespace
}  // namespace winnow::engine
