// Layers of experts: against plain loops, and a row's bits whatever else is computed with it, whatever the form of the weights,
// under dense attention and under policies, and on a device whose host must wait for what a router chose.
#include "engine/expert_mlp.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "engine/decoder.h"
#include "engine/model/model_family.h"
#include "engine/model/synthetic_weights.h"
#include "engine/model/weight_storage.h"
#include "engine/model_loader.h"
#include "engine/retrieval/transform_fit.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/pretended_device.h"
#include "tests/unit/engine/sequence_runner.h"

namespace winnow::engine {
namespace {

using kernels::DType;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(GroupByExpertTest, RowsOfAnExpertAreSideBySideInTheirOrder) {
  ExpertGroups groups;
  groups.first.resize(5);
  // Three rows of two slots each; expert 1 has none.
  GroupByExpert(std::vector<int32_t>{3, 0, 0, 2, 3, 0}, 2, &groups);
  EXPECT_THAT(groups.first, ElementsAre(0, 3, 3, 4, 6));
  EXPECT_THAT(groups.rows, ElementsAre(0, 1, 2, 1, 0, 2));
  EXPECT_THAT(groups.places, ElementsAre(4, 0, 1, 3, 5, 2));
  // The same memory serves the next, smaller call.
  GroupByExpert(std::vector<int32_t>{1}, 1, &groups);
  EXPECT_THAT(groups.first, ElementsAre(0, 0, 1, 1, 1));
  EXPECT_THAT(groups.rows, ElementsAre(0));
  EXPECT_THAT(groups.places, ElementsAre(0));
}

class ExpertMlpTest : public ::testing::Test {
 protected:
  ExpertMlpTest() : seed_(testing::TestSeed()), random_(seed_) {
    RecordProperty("WINNOW_TEST_SEED", std::to_string(seed_));
  }
  std::string Seed() const { return "WINNOW_TEST_SEED=" + std::to_string(seed_); }
  int64_t Int(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  std::vector<float> Normal(int64_t count, double deviation) {
    std::normal_distribution<float> normal(0, static_cast<float>(deviation));
    std::vector<float> values(count);
    for (float& value : values) value = normal(random_);
    return values;
  }

  const uint64_t seed_;
  std::mt19937_64 random_;
};

TEST_F(ExpertMlpTest, AddsWhatPlainLoopsAdd) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 20; ++round) {
    ModelConfig config;
    config.hidden_size = 8 * static_cast<int32_t>(Int(1, 12));
    config.experts.count = static_cast<int32_t>(Int(1, 20));
    config.experts.per_token = static_cast<int32_t>(Int(1, std::min(config.experts.count, 6)));
    config.experts.intermediate_size = 8 * static_cast<int32_t>(Int(1, 9));
    config.experts.normalized = round % 2 == 0;
    const bool has_biases = round % 3 == 0;
    if (round % 4 < 2) config.experts.clamped = {.alpha = 1.3f, .limit = 0.8f};
    const bool sigmoid = round % 5 < 2;
    if (sigmoid) config.experts.scores = kernels::ExpertRouting::Scores::kSigmoid;
    config.experts.corrected = round % 7 < 4;
    if (round % 3 == 1) config.experts.scale = 1.7;
    if (round % 4 > 0)
      config.experts.shared_intermediate_size = 8 * static_cast<int32_t>(Int(1, 12));
    config.experts.shared_is_gated = round % 4 > 1;
    const int64_t shared = config.experts.shared_intermediate_size;
    const int64_t hidden = config.hidden_size, width = config.experts.intermediate_size;
    const int64_t m = Int(1, 50), k = config.experts.per_token;
    const auto backend = kernels::MakeCpuBackend("auto", 2);
    const std::vector<float> router =
        Normal(config.experts.count * hidden, 2 / std::sqrt(static_cast<double>(hidden)));
    const std::vector<float> router_bias = Normal(config.experts.count, 1);
    const std::vector<float> gate_up_bias = Normal(config.experts.count * 2 * width, 1);
    const std::vector<float> down_bias = Normal(config.experts.count * hidden, 1);
    const std::vector<float> correction = Normal(config.experts.count, 0.2);
    const std::vector<float> shared_gate_up =
        Normal(2 * shared * hidden, 1 / std::sqrt(static_cast<double>(hidden)));
    const std::vector<float> shared_down = Normal(hidden * shared, 0.3);
    const std::vector<float> shared_gating =
        Normal(hidden, 1 / std::sqrt(static_cast<double>(hidden)));
    std::vector<std::vector<float>> gate_up, down;
    ExpertMlp::Layer layer;
    const auto pack = [&](const std::vector<float>& values, int64_t rows, int64_t cols) {
      return backend->Pack({{kernels::HostMatrix{values.data(), DType::kF32, rows, cols}}},
                           DType::kF32);
    };
    layer.router = pack(router, config.experts.count, hidden);
    const auto copy = [&](const std::vector<float>& values) {
      kernels::Buffer buffer = backend->Allocate(values.size() * sizeof(float));
      std::copy(values.begin(), values.end(), static_cast<float*>(buffer.data()));
      return buffer;
    };
    if (config.experts.corrected) layer.correction = copy(correction);
    if (shared > 0) {
      layer.shared = {pack(shared_gate_up, 2 * shared, hidden), pack(shared_down, hidden, shared)};
    }
    if (config.experts.shared_is_gated) layer.shared_gating = pack(shared_gating, 1, hidden);
    if (has_biases) {
      layer.router_bias = copy(router_bias);
      layer.gate_up_bias = copy(gate_up_bias);
      layer.down_bias = copy(down_bias);
    }
    for (int32_t e = 0; e < config.experts.count; ++e) {
      gate_up.push_back(Normal(2 * width * hidden, 1 / std::sqrt(static_cast<double>(hidden))));
      down.push_back(Normal(hidden * width, 1 / std::sqrt(static_cast<double>(width))));
      layer.experts.push_back(
          {pack(gate_up.back(), 2 * width, hidden), pack(down.back(), hidden, width)});
    }
    std::vector<float> normed = Normal(m * hidden, 1), state = Normal(m * hidden, 1);
    const std::vector<float> before = state;
    const int64_t widest = std::max(width, shared);
    std::vector<float> gate_rows(m * 2 * widest), activated(m * widest);
    const auto view = [m](std::vector<float>& values, int64_t cols) {
      return kernels::Tensor{values.data(), DType::kF32, m, cols, cols};
    };
    auto mlp = ExpertMlp::Create(config, *backend, m);
    ASSERT_TRUE(mlp.ok()) << mlp.status();
    (*mlp)->Add(layer, view(normed, hidden), view(gate_rows, 2 * widest), view(activated, widest),
                view(state, hidden));

    for (int64_t i = 0; i < m; ++i) {
      const float* x = &normed[i * hidden];
      const auto dot = [&](const float* w, const auto* y, int64_t n) {
        double sum = 0;
        for (int64_t j = 0; j < n; ++j) sum += double{w[j]} * y[j];
        return sum;
      };
      std::vector<std::pair<double, int32_t>> logits;
      for (int32_t e = 0; e < config.experts.count; ++e) {
        const double bias = has_biases ? router_bias[e] : 0;
        logits.emplace_back(dot(&router[e * hidden], x, hidden) + bias, e);
      }
      double of_all = 0;
      for (const auto& logit : logits) of_all += std::exp(logit.first);
      const auto logistic = [](double x) { return 1 / (1 + std::exp(-x)); };
      std::vector<double> scores(config.experts.count);
      for (auto& [key, e] : logits) {
        scores[e] = sigmoid ? logistic(key) : std::exp(key) / of_all;
        if (config.experts.corrected) key = scores[e] + correction[e];
      }
      std::sort(logits.begin(), logits.end(), std::greater<>());
      const bool in_doubt =
          k < config.experts.count && logits[k - 1].first - logits[k].first < 1e-5;
      if (in_doubt) continue;
      double of_chosen = 0;
      for (int64_t s = 0; s < k; ++s) of_chosen += scores[logits[s].second];
      std::vector<double> expected(before.begin() + i * hidden, before.begin() + (i + 1) * hidden);
      for (int64_t s = 0; s < k; ++s) {
        const int32_t e = logits[s].second;
        const double weight =
            config.experts.scale * scores[e] / (config.experts.normalized ? of_chosen : 1);
        std::vector<double> inner(width);
        for (int64_t j = 0; j < width; ++j) {
          double gate = dot(&gate_up[e][j * hidden], x, hidden);
          double up = dot(&gate_up[e][(width + j) * hidden], x, hidden);
          if (has_biases) {
            gate += gate_up_bias[e * 2 * width + j];
            up += gate_up_bias[e * 2 * width + width + j];
          }
          if (const auto& by = config.experts.clamped; by.has_value()) {
            gate = std::min<double>(gate, by->limit);
            up = std::clamp<double>(up, -by->limit, by->limit) + 1;
            inner[j] = gate / (1 + std::exp(-by->alpha * gate)) * up;
          } else {
            inner[j] = gate / (1 + std::exp(-gate)) * up;
          }
        }
        for (int64_t j = 0; j < hidden; ++j) {
          const double bias = has_biases ? down_bias[e * hidden + j] : 0;
          expected[j] += weight * (dot(&down[e][j * width], inner.data(), width) + bias);
        }
      }
      const double of_shared =
          config.experts.shared_is_gated ? logistic(dot(shared_gating.data(), x, hidden)) : 1;
      std::vector<double> inner(shared);
      for (int64_t j = 0; j < shared; ++j) {
        const double gate = dot(&shared_gate_up[j * hidden], x, hidden);
        inner[j] = gate * logistic(gate) * dot(&shared_gate_up[(shared + j) * hidden], x, hidden);
      }
      for (int64_t j = 0; j < hidden; ++j) {
        expected[j] += of_shared * dot(&shared_down[j * shared], inner.data(), shared);
      }
      for (int64_t j = 0; j < hidden; ++j) {
        ASSERT_NEAR(state[i * hidden + j], expected[j], 1e-4)
            << "round " << round << " row " << i << " of " << m << ", " << k << " of "
            << config.experts.count << " experts";
      }
    }
  }
}

// A model with two layers of experts about one without, of sizes that each form of weights takes.
class ExpertModelTest : public ExpertMlpTest {
 protected:
  ExpertModelTest() {
    config_.family = ModelConfig::Family::kQwen3Moe;
    config_.hidden_size = 128;
    config_.intermediate_size = 192;
    config_.layers.assign(3, {.qk_norm = true});
    for (const int layer : {0, 2}) config_.layers[layer].mlp = LayerSpec::Mlp::kExperts;
    config_.experts = {.count = 9, .per_token = 3, .intermediate_size = 64, .normalized = true};
    config_.num_heads = 4;
    config_.num_kv_heads = 2;
    config_.head_dim = 64;
    config_.vocab_size = 301;
    config_.max_position_embeddings = 512;
    config_.rms_norm_eps = 1e-5f;
    config_.ropes[0].theta = 10000;
    config_.dtype = DType::kBF16;
    weights_ = *MakeSyntheticWeights(config_, 7);
    FitTransform();
    tokens_.resize(kTokens);
    for (int32_t& token : tokens_) token = static_cast<int32_t>(random_() % config_.vocab_size);
  }
  std::unique_ptr<Decoder> Make(kernels::Backend& backend, WeightStorage storage) {
    DecoderOptions options = {.compute = DType::kBF16,
                              .weights = storage,
                              .kv_dtype = DType::kBF16,
                              .block_tokens = 16,
                              .kv_bytes = 8 << 20,
                              .max_batch_tokens = 256,
                              .max_batch_logits = 256};
    options.retrieval.from = 0;
    options.retrieval.transform = transform_;
    options.retrieval.indexes = {{AttentionPolicy::Kind::kLsh, 128},
                                 {AttentionPolicy::Kind::kQuest, 0},
                                 {AttentionPolicy::Kind::kPca, 128}};
    auto decoder = Decoder::Create(config_, weights_.weights, backend, options);
    EXPECT_TRUE(decoder.ok()) << decoder.status();
    return *std::move(decoder);
  }

  // Codes of noise, not of the model's own keys: what is chosen matters less here than that it is the same.
  void FitTransform() {
    const int32_t d = config_.head_dim;
    auto fit_of_all = std::make_shared<TransformFit>();
    fit_of_all->bits = 128;
    fit_of_all->id = "of a test";
    for (int32_t kv_head = 0; kv_head < config_.num_kv_heads; ++kv_head) {
      constexpr int32_t kSample = 400;
      TransformSample sample;
      sample.keys = Normal(kSample * d, 1);
      sample.queries = Normal(kSample * d, 1);
      for (int32_t t = 0; t < kSample; ++t) {
        sample.key_positions.push_back(t);
        sample.query_positions.push_back(t);
      }
      TransformFitOptions options;
      options.head_dim = d;
      options.copies = 0;
      options.served_context = kSample;
      options.inv_freq.assign(d / 2, 1.0f);
      auto fit = FitTransformHead(sample, options);
      ASSERT_TRUE(fit.ok()) << fit.status();
      heads_.push_back(fit->head);
    }
    fit_of_all->layers.assign(config_.num_layers(), {d, 128, heads_});
    transform_ = std::move(fit_of_all);
  }

  void ExpectTheSameBitsHoweverAPromptIsCut() {
    SCOPED_TRACE(Seed());
    for (const WeightStorage storage :
         {WeightStorage::kWide, WeightStorage::kInt8, WeightStorage::kInt4, WeightStorage::kFloat8,
          WeightStorage::kW8A8, WeightStorage::kW4A8}) {
      for (const char* text : {"dense", "lsh:k=20,window=16,dense_layers=0,from=0",
                               "pca:k=20,window=16,dense_layers=0,from=0"}) {
        SCOPED_TRACE(std::string(text) + " " + WeightStorageName(storage));
        const auto policy = ParseAttentionPolicy(text);
        ASSERT_TRUE(policy.ok()) << policy.status();
        std::vector<float> expected;
        for (const int32_t chunk : {kTokens, 1, static_cast<int32_t>(Int(2, 64))}) {
          const auto backend = kernels::MakeCpuBackend("auto", chunk == kTokens ? 1 : 3);
          const auto decoder = Make(*backend, storage);
          const auto blocks = testing::ShuffledBlocks(*decoder, random_);
          std::unique_ptr<RetrievalState> state;
          ASSERT_TRUE(decoder->CheckPolicy(*policy).ok()) << decoder->CheckPolicy(*policy);
          if (policy->kind != AttentionPolicy::Kind::kDense) {
            state = *decoder->NewRetrievalState(*policy);
          }
          const std::vector<float> logits =
              testing::Run(*decoder, tokens_, 0, blocks, kTokens, chunk, state.get(), 0);
          if (expected.empty()) {
            expected = logits;
            EXPECT_TRUE(std::all_of(logits.begin(), logits.end(),
                                    [](float logit) { return std::isfinite(logit); }));
            continue;
          }
          ASSERT_EQ(logits.size(), expected.size());
          EXPECT_EQ(std::memcmp(logits.data(), expected.data(), logits.size() * sizeof(float)), 0)
              << "in chunks of " << chunk;
        }
      }
    }
  }

  // A device that routes gives the host's logits.
  template <typename Device>
  void ExpectTheSameWhereItRoutes(kernels::Backend& cpu, Device& device) {
    device.most = 50;
    const auto of_cpu = Make(cpu, WeightStorage::kWide);
    const auto of_device = Make(device, WeightStorage::kWide);
    const std::vector<int32_t> blocks = testing::ShuffledBlocks(*of_cpu, random_);
    EXPECT_EQ(testing::Run(*of_device, tokens_, 0, blocks, kTokens, 50),
              testing::Run(*of_cpu, tokens_, 0, blocks, kTokens, 50));
  }

  static constexpr int32_t kTokens = 200;
  std::vector<kernels::TransformCodeHead> heads_;
  std::shared_ptr<const TransformFit> transform_;
  ModelConfig config_;
  SyntheticWeights weights_;
  std::vector<int32_t> tokens_;
};

TEST_F(ExpertModelTest, ATokenHasTheSameBitsHoweverItsPromptIsCutInEveryFormOfWeights) {
  ExpectTheSameBitsHoweverAPromptIsCut();
}

// A model as gpt-oss has it: sinks, windows in every other layer, biases everywhere and the clamped gate.
class GptOssModelTest : public ExpertModelTest {
 protected:
  GptOssModelTest() {
    config_.family = ModelConfig::Family::kGptOss;
    config_.layers.assign(3, FamilyOf(config_.family).layer);
    config_.layers[0].window = config_.layers[2].window = 70;
    config_.experts.clamped.emplace();
    weights_ = *MakeSyntheticWeights(config_, 7);
  }
};

TEST_F(GptOssModelTest, ATokenHasTheSameBitsHoweverItsPromptIsCutInEveryFormOfWeights) {
  ExpectTheSameBitsHoweverAPromptIsCut();
}

// A model as GLM-4.5 has it: corrected sigmoids, weights scaled, a shared expert, which is wider here, and with Qwen2 MoE's gate.
class SharedExpertModelTest : public ExpertModelTest {
 protected:
  SharedExpertModelTest() {
    config_.family = ModelConfig::Family::kQwen2Moe;
    for (LayerSpec& layer : config_.layers) layer.qk_norm = false;
    ExpertsConfig& experts = config_.experts;
    experts.scores = kernels::ExpertRouting::Scores::kSigmoid;
    experts.scale = 1.5;
    experts.shared_intermediate_size = 256;
    experts.shared_is_gated = true;
    weights_ = *MakeSyntheticWeights(config_, 7);
  }
};

TEST_F(SharedExpertModelTest, ATokenHasTheSameBitsHoweverItsPromptIsCutInEveryFormOfWeights) {
  ExpectTheSameBitsHoweverAPromptIsCut();
}

TEST_F(SharedExpertModelTest, TheGateCountsAndTheSharedExpertIsNoneThatAStepPassesBy) {
  const auto cpu = kernels::MakeCpuBackend("auto", 2);
  const auto gated = Make(*cpu, WeightStorage::kWide);
  const std::vector<int32_t> blocks = testing::ShuffledBlocks(*gated, random_);
  const auto expected = testing::Run(*gated, tokens_, 0, blocks, kTokens, 50);
  // The shared expert's bytes are read for every token: they are none of the experts' that a step may pass by.
  config_.experts.shared_is_gated = false;
  weights_ = *MakeSyntheticWeights(config_, 7);
  const auto plain = Make(*cpu, WeightStorage::kWide);
  EXPECT_NE(testing::Run(*plain, tokens_, 0, blocks, kTokens, 50), expected);
  EXPECT_EQ(plain->expert_bytes(), gated->expert_bytes());
  config_.experts.shared_intermediate_size = 0;
  weights_ = *MakeSyntheticWeights(config_, 7);
  const auto alone = Make(*cpu, WeightStorage::kWide);
  EXPECT_EQ(alone->expert_bytes(), gated->expert_bytes());
  EXPECT_LT(alone->weight_bytes(), plain->weight_bytes());
}

// The router's choice can be read when the device was waited for, and not before.
TEST_F(ExpertModelTest, ADeviceIsWaitedForAndGivesTheSameLogits) {
  const auto cpu = kernels::MakeCpuBackend("auto", 2);
  const auto of_cpu = Make(*cpu, WeightStorage::kWide);
  PretendedDevice device(*cpu);
  const auto of_device = Make(device, WeightStorage::kWide);
  const std::vector<int32_t> blocks = testing::ShuffledBlocks(*of_cpu, random_);
  EXPECT_EQ(testing::Run(*of_device, tokens_, 0, blocks, kTokens, 50),
            testing::Run(*of_cpu, tokens_, 0, blocks, kTokens, 50));
  // One wait for each run of rows in a layer of experts, and what a pass of any model waits for.
  EXPECT_LE(device.waits, 2 + 3);
  EXPECT_GE(device.waits, 2);
}

// A device that routes up to `most` rows by itself: each slot's products alone.
class RoutingDevice : public PretendedDevice {
 public:
  explicit RoutingDevice(kernels::Backend& cpu) : PretendedDevice(cpu), cpu_(cpu) {}
  int64_t most = 0;
  int sets = 0, calls = 0, refusals = 0;

  std::unique_ptr<kernels::ExpertSet> MakeExpertSet(
      std::span<const kernels::ExpertMatrices> experts) override {
    ++sets;
    auto set = std::make_unique<Set>();
    set->experts.assign(experts.begin(), experts.end());
    return set;
  }
  bool AddRoutedExperts(const kernels::RoutedExpertsArgs& args) override {
    const int64_t m = args.normed.rows, slots = m * args.per_token;
    if (m > most) {
      ++refusals;
      return false;
    }
    ++calls;
    EXPECT_GE(args.rows.rows, slots);
    const auto& experts = static_cast<const Set&>(args.experts).experts;
    std::vector<int32_t> ids(slots), places(slots);
    std::vector<float> weights(slots);
    const auto view = [](std::vector<float>& values, int64_t rows) {
      const auto cols = static_cast<int64_t>(values.size()) / rows;
      return kernels::Tensor{values.data(), DType::kF32, rows, cols, cols};
    };
    cpu_.RouteExperts(args.logits, args.routing, ids.data(), view(weights, m));
    for (int64_t slot = 0; slot < slots; ++slot) {
      const kernels::ExpertMatrices& expert = experts[ids[slot]];
      std::vector<float> gated(expert.gate_up->out_features()), activated(gated.size() / 2);
      const int64_t row = slot / args.per_token;
      cpu_.Matmul(args.normed.RowRange(row, 1), *expert.gate_up, view(gated, 1),
                  {.bias = expert.gate_up_bias});
      if (args.clamped.has_value()) {
        cpu_.ClampedSwigluMul(view(gated, 1), *args.clamped, view(activated, 1));
      } else {
        cpu_.SiluMul(view(gated, 1), view(activated, 1));
      }
      cpu_.Matmul(view(activated, 1), *expert.down, args.rows.RowRange(slot, 1),
                  {.bias = expert.down_bias});
      places[slot] = static_cast<int32_t>(slot);
    }
    cpu_.AddExpertRows(args.rows.RowRange(0, slots), places, view(weights, m), args.hidden);
    return true;
  }

 private:
  struct Set final : public kernels::ExpertSet {
    std::vector<kernels::ExpertMatrices> experts;
  };
  kernels::Backend& cpu_;
};

TEST_F(ExpertModelTest, ADeviceThatRoutesIsNotWaitedForAndTheHostRoutesTheRest) {
  const auto cpu = kernels::MakeCpuBackend("auto", 2);
  const auto of_cpu = Make(*cpu, WeightStorage::kWide);
  RoutingDevice device(*cpu);
  const auto of_device = Make(device, WeightStorage::kWide);
  EXPECT_EQ(device.sets, 2);
  const std::vector<int32_t> blocks = testing::ShuffledBlocks(*of_cpu, random_);
  const auto expected = testing::Run(*of_cpu, tokens_, 0, blocks, kTokens, 50);
  device.most = 50;
  EXPECT_EQ(testing::Run(*of_device, tokens_, 0, blocks, kTokens, 50), expected);
  EXPECT_GT(device.calls, 0);
  EXPECT_EQ(device.refusals, 0);
  EXPECT_LE(device.waits, 3);
  // Rows that it does not take.
  device.most = 49;
  device.calls = 0;
  EXPECT_EQ(testing::Run(*of_device, tokens_, 0, blocks, kTokens, 50), expected);
  EXPECT_GT(device.refusals, 0);
}

TEST_F(GptOssModelTest, ADeviceThatRoutesIsToldOfBiasesAndOfTheGate) {
  const auto cpu = kernels::MakeCpuBackend("auto", 2);
  RoutingDevice device(*cpu);
  ExpectTheSameWhereItRoutes(*cpu, device);
  EXPECT_GT(device.calls, 0);
}

TEST_F(SharedExpertModelTest, ADeviceThatRoutesIsToldHow) {
  config_.family = ModelConfig::Family::kGlm4Moe;
  config_.experts.corrected = true;
  config_.experts.shared_is_gated = false;
  weights_ = *MakeSyntheticWeights(config_, 7);
  const auto cpu = kernels::MakeCpuBackend("auto", 2);
  RoutingDevice device(*cpu);
  ExpectTheSameWhereItRoutes(*cpu, device);
  EXPECT_GT(device.calls, 0);
}

TEST_F(ExpertModelTest, ADeviceThatFailsInALayerOfExpertsMakesItUnavailable) {
  const auto cpu = kernels::MakeCpuBackend("auto", 2);
  for (const int waits : {0, 1}) {  // in the first of its layers, and in the second
    PretendedDevice device(*cpu);
    const auto decoder = Make(device, WeightStorage::kWide);
    const std::vector<int32_t> blocks = testing::ShuffledBlocks(*decoder, random_);
    device.fail_after_waits = waits;
    Batch batch;
    batch.chunks.push_back({tokens_, 0, blocks, 1});
    std::vector<float> logits(config_.vocab_size);
    const absl::Status status = decoder->Forward(batch, logits);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << waits << " " << status;
  }
}

TEST_F(ExpertModelTest, BytesAreCountedAsTheyAreKept) {
  const auto backend = kernels::MakeCpuBackend("auto", 2);
  for (const WeightStorage storage :
       {WeightStorage::kWide, WeightStorage::kInt8, WeightStorage::kInt4, WeightStorage::kFloat8,
        WeightStorage::kW8A8, WeightStorage::kW4A8}) {
    SCOPED_TRACE(WeightStorageName(storage));
    const auto decoder = Make(*backend, storage);
    const auto of_experts =
        static_cast<double>(ExpertStorageBytes(storage, weights_.weights, DType::kBF16, false));
    EXPECT_GE(static_cast<double>(decoder->expert_bytes()), of_experts);
    EXPECT_LE(static_cast<double>(decoder->expert_bytes()), 1.3 * of_experts);
    // Two layers of nine experts of three matrices.
    const double values = 2.0 * 9 * 3 * 128 * 64;
    EXPECT_GT(of_experts, values / 2);
    if (storage == WeightStorage::kWide) {
      EXPECT_EQ(of_experts, 2 * values);
      EXPECT_EQ(ExpertWeightBytes(config_, DType::kBF16), 2 * values);
      EXPECT_EQ(WeightBytes(config_, DType::kBF16) - ExpertWeightBytes(config_, DType::kBF16),
                StorageBytes(storage, weights_.weights, DType::kBF16, false) -
                    ExpertStorageBytes(storage, weights_.weights, DType::kBF16, false) +
                    int64_t{301} * 128 * 2);  // the embedding, which is looked up
    }
  }
}

// A shape that is measured sends its tokens to as many experts as a model does: no two rows of a router are equal.
TEST_F(ExpertModelTest, ARandomRoutersRowsDiffer) {
  config_.hidden_size = 2048;
  config_.experts.count = 128;
  const SyntheticWeights made = *MakeSyntheticWeights(config_, 3);
  const WeightMatrix& router = made.weights.layers[2].router;
  std::set<std::string> rows;
  for (int64_t row = 0; row < router.rows; ++row) {
    rows.emplace(reinterpret_cast<const char*>(router.RowInFile(row)),
                 kernels::WeightRowBytes(router.type, router.cols));
  }
  EXPECT_EQ(rows.size(), 128);
}

TEST_F(ExpertModelTest, ARouterOrAnExpertThatIsNoNumberIsRefusedByName) {
  const auto backend = kernels::MakeCpuBackend("auto", 1);
  for (const bool of_router : {true, false}) {
    Weights weights;
    weights.embedding = weights_.weights.embedding;
    weights.layers = weights_.weights.layers;
    weights.final_norm = weights_.weights.final_norm;
    weights.lm_head = weights_.weights.lm_head;
    WeightMatrix& broken = of_router ? weights.layers[2].router : weights.layers[2].experts[4].down;
    std::vector<float> values(broken.rows * broken.cols, 0.5f);
    values[3 * broken.cols + 5] = NAN;
    broken = {values.data(), kernels::WeightType::kF32, broken.rows, broken.cols};
    const absl::Status status = Decoder::Create(config_, weights, *backend,
                                                {.compute = DType::kBF16,
                                                 .kv_dtype = DType::kBF16,
                                                 .block_tokens = 16,
                                                 .kv_bytes = 1 << 20})
                                    .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(
        std::string(status.message()),
        HasSubstr(of_router ? "tensor \"model.layers.2.mlp.gate.weight\" has NaN at [3, 5]"
                            : "tensor \"model.layers.2.mlp.experts.4.down_proj.weight\" has NaN "
                              "at [3, 5]"));
  }
}

}  // namespace
}  // namespace winnow::engine
