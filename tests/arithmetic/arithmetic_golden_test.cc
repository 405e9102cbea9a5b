// Results keep their bits until kernels/arithmetic_version.h says otherwise: stored KV outlives the program
// that computed it. tests/golden/arithmetic.json has digests by instruction set. Where they differ and the change is
// meant, raise kArithmeticVersion and put the digests that this prints into that file.
#include <cstdint>
#include <fstream>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/counter_random.h"
#include "engine/decoder.h"
#include "engine/kv/block_name.h"
#include "engine/model/synthetic_weights.h"
#include "engine/retrieval/lsh.h"
#include "engine/retrieval/transform_fit.h"
#include "fmt/format.h"
#include "fmt/ranges.h"
#include "gtest/gtest.h"
#include "kernels/arithmetic_version.h"
#include "nlohmann/json.hpp"
#include "tests/unit/engine/sequence_runner.h"
#include "tests/unit/test_paths.h"

namespace winnow::engine {
namespace {

using kernels::DType;
using nlohmann::json;

std::string DigestOf(std::span<const std::byte> bytes) {
  return fmt::format(
      "{:02x}", fmt::join(Sha256({reinterpret_cast<const char*>(bytes.data()), bytes.size()}), ""));
}

ModelConfig Shape(int32_t head_dim, DType dtype) {
  ModelConfig config;
  config.hidden_size = 128;
  config.intermediate_size = 192;
  config.layers.resize(4);
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = head_dim;
  config.vocab_size = 211;
  config.max_position_embeddings = 512;
  config.rms_norm_eps = 1e-5f;
  config.ropes[0].theta = 10000;
  config.dtype = dtype;
  return config;
}

struct GoldenCase {
  std::string_view name;
  int32_t head_dim = 64;
  bool biases_and_norms = false;
  DType compute = DType::kBF16;
  WeightStorage weights = WeightStorage::kWide;
  std::string_view policy = "dense";
  std::optional<DType> kv = std::nullopt;  // nothing: as products
  bool experts = false;                    // in all layers but the second
};

constexpr GoldenCase kCases[] = {
    {.name = "bf16 d 64"},
    {.name = "bf16 d 128, biases, norms of heads", .head_dim = 128, .biases_and_norms = true},
    {.name = "f32 d 80", .head_dim = 80, .compute = DType::kF32},
    {.name = "int8 weights", .weights = WeightStorage::kInt8},
    {.name = "int4 weights", .weights = WeightStorage::kInt4},
    {.name = "fp8 weights", .weights = WeightStorage::kFloat8},
    {.name = "bf16 quest", .policy = "quest:k=48,window=16,sink=4,dense_layers=1"},
    {.name = "bf16 lsh", .policy = "lsh:k=40,window=16,sink=4,dense_layers=1"},
    {.name = "bf16 pca, tail", .policy = "pca:k=40,window=16,sink=4,dense_layers=1"},
    {.name = "f32 lsh, nucleus",
     .compute = DType::kF32,
     .policy = "lsh:k=64,p=0.9,window=16,sink=4,dense_layers=1"},
};

// Held apart, as KV in 8 bits: digests of an instruction set may be missing.
constexpr GoldenCase kW8A8Cases[] = {
    {.name = "w8a8 weights", .weights = WeightStorage::kW8A8},
};
constexpr GoldenCase kExpertCases[] = {
    {.name = "experts", .experts = true},
    {.name = "experts, int4 weights, pca",
     .weights = WeightStorage::kInt4,
     .policy = "pca:k=40,window=16,sink=4,dense_layers=1",
     .experts = true},
};
constexpr GoldenCase kScaledKvCases[] = {
    {.name = "int8 KV", .kv = DType::kI8},
    {.name = "fp8 KV, f32 d 80", .head_dim = 80, .compute = DType::kF32, .kv = DType::kF8},
    {.name = "int8 KV, quest",
     .policy = "quest:k=48,window=16,sink=4,dense_layers=1",
     .kv = DType::kI8},
    {.name = "fp8 KV, lsh, nucleus",
     .policy = "lsh:k=64,p=0.9,window=16,sink=4,dense_layers=1",
     .kv = DType::kF8},
    {.name = "int8 KV, pca, tail",
     .policy = "pca:k=40,window=16,sink=4,dense_layers=1",
     .kv = DType::kI8},
};

// A fit to noise whose channels differ in size: the same in every process.
std::shared_ptr<const TransformFit> MakeFit(const ModelConfig& config) {
  constexpr int32_t kSamples = 256;
  const int32_t d = config.head_dim;
  auto fit = std::make_shared<TransformFit>();
  fit->bits = 128;
  fit->id = "golden";
  std::vector<kernels::TransformCodeHead> heads;
  for (int32_t head = 0; head < config.num_kv_heads; ++head) {
    TransformSample sample;
    for (int32_t t = 0; t < kSamples; ++t) {
      for (int32_t c = 0; c < d; ++c) {
        const uint64_t index = (uint64_t{1} * head * kSamples + t) * d + c;
        const float size = static_cast<float>(1 + c % 7);
        sample.keys.push_back(size * static_cast<float>(CounterRandom(31, index) - 0.5));
        sample.queries.push_back(size * static_cast<float>(CounterRandom(32, index) - 0.5));
      }
      sample.key_positions.push_back(t);
      sample.query_positions.push_back(t);
    }
    TransformFitOptions options;
    options.head_dim = d;
    options.copies = 0;
    options.served_context = kSamples;
    options.inv_freq.assign(d / 2, 1.0f);
    auto fitted = FitTransformHead(sample, options);
    EXPECT_TRUE(fitted.ok()) << fitted.status();
    fitted->head.tail = true;
    heads.push_back(fitted->head);
  }
  fit->layers.assign(config.num_layers(), {d, 128, heads});
  return fit;
}

// The logits of every token of a prompt, in chunks, and of some tokens decoded one by one after it. Every row of KV
// below the last layer's is in them.
std::vector<float> Logits(kernels::Backend& backend, const GoldenCase& golden) {
  constexpr int32_t kTokens = 200, kPrompt = 192, kChunk = 96;
  ModelConfig config = Shape(golden.head_dim, golden.compute);
  for (LayerSpec& layer : config.layers) layer.qkv_bias = layer.qk_norm = golden.biases_and_norms;
  if (golden.experts) {
    for (const int layer : {0, 2, 3}) config.layers[layer].mlp = LayerSpec::Mlp::kExperts;
    config.experts = {.count = 8, .per_token = 3, .intermediate_size = 64, .normalized = true};
  }
  const auto weights = MakeSyntheticWeights(config, 20);
  DecoderOptions options;
  options.compute = golden.compute;
  options.weights = golden.weights;
  options.kv_dtype = golden.kv.value_or(golden.compute);
  options.block_tokens = 64;
  options.kv_bytes = 8 << 20;
  options.max_batch_tokens = options.max_batch_logits = kChunk;
  const auto policy = ParseAttentionPolicy(golden.policy);
  EXPECT_TRUE(policy.ok()) << policy.status();
  options.retrieval = OptionsFor(std::span(&*policy, 1), nullptr);
  if (policy->kind == AttentionPolicy::Kind::kPca) {
    options.retrieval.transform = MakeFit(config);
    options.retrieval.indexes.push_back({policy->kind, options.retrieval.transform->bits});
  }
  const auto decoder = Decoder::Create(config, weights->weights, backend, options);
  EXPECT_TRUE(decoder.ok()) << decoder.status();
  const auto state = (*decoder)->NewRetrievalState(*policy);
  EXPECT_TRUE(state.ok()) << state.status();

  std::vector<int32_t> tokens(kTokens), blocks((*decoder)->num_blocks());
  for (int32_t i = 0; i < kTokens; ++i) {
    tokens[i] = static_cast<int32_t>(CounterRandom(5, i) * config.vocab_size);
  }
  std::iota(blocks.begin(), blocks.end(), 0);
  const std::span all(tokens);
  std::vector<float> logits =
      testing::Run(**decoder, all.first(kPrompt), 0, blocks, kPrompt, kChunk, state->get());
  for (int32_t at = kPrompt; at < kTokens; ++at) {
    const auto row = testing::Run(**decoder, all.subspan(at, 1), at, blocks, 1, 1, state->get());
    logits.insert(logits.end(), row.begin(), row.end());
  }
  return logits;
}

class ArithmeticGolden : public ::testing::TestWithParam<std::string> {};

// Compares with the digests under `section`, if it has some of this instruction set.
void ExpectDigests(const std::string& isa, const char* section, std::span<const GoldenCase> cases) {
  const auto backend = kernels::MakeCpuBackend(isa, 2);
  json found;
  for (const GoldenCase& golden : cases) {
    const std::vector<float> logits = Logits(*backend, golden);
    found[std::string(golden.name)] = DigestOf(std::as_bytes(std::span(logits)));
  }
  std::ifstream file(SourcePath("tests/golden/arithmetic.json"));
  const json goldens = json::parse(file);
  EXPECT_EQ(goldens.at("version"), kernels::kArithmeticVersion);
  const std::string arithmetic = backend->arithmetic();
  if (!goldens.at(section).contains(arithmetic)) {
    GTEST_SKIP() << "no digests of \"" << arithmetic << "\"; here: " << found.dump(2);
  }
  EXPECT_EQ(found, goldens.at(section).at(arithmetic)) << found.dump(2);
}

TEST_P(ArithmeticGolden, BitsAreThoseOfTheVersion) { ExpectDigests(GetParam(), "logits", kCases); }

TEST_P(ArithmeticGolden, BitsOfW8A8AreThoseOfTheVersion) {
  ExpectDigests(GetParam(), "logits of W8A8", kW8A8Cases);
}

TEST_P(ArithmeticGolden, BitsOfExpertsAreThoseOfTheVersion) {
  ExpectDigests(GetParam(), "logits of experts", kExpertCases);
}

TEST_P(ArithmeticGolden, BitsWithKvIn8BitsAreThoseOfTheVersion) {
  ExpectDigests(GetParam(), "logits of KV in 8 bits", kScaledKvCases);
}

// Rows as they lie in a store: of 8 bits the same bytes on every instruction set.
TEST_P(ArithmeticGolden, StoredRowsAreThoseOfTheVersion) {
  constexpr int32_t kTokens = 48, kWidth = 3 * 80;
  const auto backend = kernels::MakeCpuBackend(GetParam(), 1);
  std::vector<float> k(kTokens * kWidth), v(k.size());
  for (size_t i = 0; i < k.size(); ++i) {
    k[i] = static_cast<float>(CounterRandom(41, i) - 0.5) * static_cast<float>(1 + i % 9);
    v[i] = i % 7 == 0 ? 0.0f : static_cast<float>(CounterRandom(42, i) - 0.5) / 16;
  }
  const auto tensor = [&](std::vector<float>& values) {
    return kernels::Tensor{values.data(), DType::kF32, kTokens, kWidth, kWidth};
  };
  const std::vector<int32_t> table = {2, 0, 1};
  const std::vector<kernels::AttentionChunk> chunk = {{0, kTokens, 0, table}};
  json found;
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kI8, DType::kF8}) {
    const kernels::KvLayout layout{3, 80, 16, dtype};
    std::vector<std::byte> pool(3 * layout.BlockBytes());
    backend->WriteKv(tensor(k), tensor(v), chunk, pool.data(), layout);
    found[kernels::DTypeName(dtype)] = DigestOf(pool);
  }
  std::ifstream file(SourcePath("tests/golden/arithmetic.json"));
  EXPECT_EQ(found, json::parse(file).at("rows of KV")) << found.dump(2);
}

INSTANTIATE_TEST_SUITE_P(Isa, ArithmeticGolden, ::testing::ValuesIn(testing::Isas()),
                         [](const auto& info) { return info.param; });

// Functions that codes are made with; those of artifacts and fits are named by their content.
TEST(ArithmeticVersion, HashFunctionsAreThoseOfTheVersion) {
  json found;
  for (const int32_t head_dim : {64, 80, 128}) {
    const LshEncoder encoder(3, 2, head_dim, 128);
    found[std::to_string(head_dim)] = DigestOf(std::as_bytes(encoder.weights().stages[0].weight));
  }
  std::ifstream file(SourcePath("tests/golden/arithmetic.json"));
  EXPECT_EQ(found, json::parse(file).at("lsh")) << found.dump(2);
}

}  // namespace
}  // namespace winnow::engine
