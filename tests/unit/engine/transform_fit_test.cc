#include "engine/retrieval/transform_fit.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>
#include <optional>

#include "engine/retrieval/transform_fit_cache.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/attention_state.h"
#include "kernels/backend.h"
#include "kernels/transform_code.h"
#include "nlohmann/json.hpp"
#include "tests/unit/temp_dir.h"
#include "tests/unit/test_paths.h"

namespace winnow::engine {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kDim = 32, kTokens = 900, kGroup = 2, kBits = 64, kSink = 16, kWindow = 128;

// As tests/golden/transform_code.py makes them.
class Lcg {
 public:
  explicit Lcg(uint32_t seed) : state_(seed) {}
  double Centred() {
    state_ = state_ * 1664525u + 1013904223u;
    return (static_cast<double>(state_ >> 16) - 32768) / 32768;
  }

 private:
  uint32_t state_;
};

std::vector<float> Rows(uint32_t seed, int32_t n, double spread, double offset) {
  Lcg lcg(seed);
  std::vector<float> rows;
  for (int32_t t = 0; t < n; ++t) {
    double factors[4];
    for (double& factor : factors) factor = 4 * lcg.Centred();
    for (int32_t c = 0; c < kDim; ++c) {
      rows.push_back(static_cast<float>(std::ldexp(factors[c % 4], -(c / 8)) +
                                        spread * lcg.Centred() + (c % 16 == 5 ? offset : 0)));
    }
  }
  return rows;
}

struct Golden {
  Golden() {
    keys = Rows(1, kTokens, 0.5, 4);
    values = Rows(2, kTokens, 0.25, 0);
    queries = Rows(3, 300, 1, 1);
    for (int32_t t = 0; t < kTokens; t += 7) {
      for (int32_t c = 0; c < kDim; ++c) keys[t * kDim + c] /= 2;
    }
    for (int32_t t = 0; t < kTokens; ++t) {
      for (int32_t c = 0; c < kDim; ++c) {
        float& value = values[t * kDim + c];
        value = value / 2 + keys[t * kDim + kDim - 1 - c] / 4;
      }
    }
    std::ifstream file(SourcePath("tests/golden/transform_code.json"));
    expected = nlohmann::json::parse(file);
    sample = {keys, std::vector<int32_t>(kTokens), queries, std::vector<int32_t>(300)};
    options.head_dim = kDim;
    options.bits = kBits;
    options.served_context = 1000;
    options.copies = 0;
    options.inv_freq.assign(kDim / 2, 0.01f);
  }
  std::vector<double> Expected(const char* name) const {
    return expected.at(name).get<std::vector<double>>();
  }
  std::vector<float> keys, values, queries;
  nlohmann::json expected;
  TransformSample sample;
  TransformFitOptions options;
};

TEST(TransformFitTest, HasTheVariancesWidthsAndCellsOfTheGolden) {
  const Golden golden;
  const auto fit = FitTransformHead(golden.sample, golden.options);
  ASSERT_TRUE(fit.ok()) << fit.status();
  EXPECT_EQ(std::vector<int>(fit->head.widths.begin(), fit->head.widths.end()),
            golden.expected.at("widths").get<std::vector<int>>());
  const std::vector<double> variance = golden.Expected("variance");
  constexpr double kErrors[] = {1,       0.3634,  0.1188,   0.03744,  0.01154,
                                0.00349, 0.00104, 0.000304, 0.0000877};
  for (int32_t i = 0; i < kDim; ++i) {
    const int width = i < 4 * fit->head.quads ? fit->head.widths[i / 4] : 0;
    EXPECT_NEAR(fit->distortion[i] / (variance[i] * kErrors[width]), 1, 1e-5) << i;
  }
  const auto cells = golden.Expected("cell_bits");
  EXPECT_EQ(fit->head.cell_bits.size(), std::accumulate(cells.begin(), cells.end(), size_t{0}));
}

// The fit, codes, selection, table and tail together, through the backend.
TEST(TransformFitTest, SelectsAndEstimatesAsTheGoldenDoes) {
  Golden golden;
  auto fit = FitTransformHead(golden.sample, golden.options);
  ASSERT_TRUE(fit.ok()) << fit.status();
  fit->head.tail = true;
  const kernels::TransformCodeWeights weights{kDim, kBits, {fit->head}};
  ASSERT_EQ(kernels::CheckTransformCode(weights), "");
  const auto backend = kernels::MakeCpuBackend("auto", 2);
  const auto packed = backend->PackTransformCode(weights);
  const kernels::KvLayout layout{1, kDim, 64, kernels::DType::kF32};
  const kernels::CodeLayout codes_layout{1, 64, kBits};
  constexpr int32_t kBlocks = (kTokens + 63) / 64;
  std::vector<float> pool(size_t{kBlocks} * 64 * 2 * kDim);
  for (int32_t t = 0; t < kTokens; ++t) {
    std::copy_n(&golden.keys[t * kDim], kDim, &pool[t * 2 * kDim]);
    std::copy_n(&golden.values[t * kDim], kDim, &pool[t * 2 * kDim + kDim]);
  }
  std::vector<int32_t> table(kBlocks);
  std::iota(table.begin(), table.end(), 0);
  std::vector<std::byte> codes(codes_layout.BlockBytes() * kBlocks);
  const kernels::KeySpan span{table, {0, kTokens}};
  backend->EncodeTransformKeys({&span, 1}, pool.data(), layout, *packed, codes.data(),
                               codes_layout);

  const auto k = static_cast<int32_t>(golden.expected.at("selected").size());
  float* q_data = &golden.queries[(300 - kGroup) * kDim];
  const kernels::Tensor q{q_data, kernels::DType::kF32, 1, kGroup * kDim, kGroup * kDim};
  const kernels::RetrievalQuery query{0, table, kTokens - 1, {kSink, kTokens - kWindow}, k};
  std::vector<int32_t> counts(1), tokens(k);
  std::vector<float> anchors;
  for (const double mass : golden.Expected("anchor_masses"))
    anchors.push_back(static_cast<float>(mass));
  std::vector<int64_t> masses(kGroup * kernels::kTransformCells);
  std::vector<float> references(kGroup), deltas(kGroup);
  const kernels::TailMasses tail{kGroup, masses.data(), references.data(), deltas.data()};
  const float scale = 1 / std::sqrt(static_cast<float>(kDim));
  backend->SelectByMass({.q = q,
                         .queries = {&query, 1},
                         .anchor_masses = anchors.data(),
                         .transform = *packed,
                         .codes = codes.data(),
                         .code_layout = codes_layout,
                         .scale = scale,
                         .chosen = {1, k, counts.data(), tokens.data()},
                         .tail = &tail});
  const auto selected = golden.expected.at("selected").get<std::vector<int32_t>>();
  std::vector<int32_t> both;
  std::set_intersection(tokens.begin(), tokens.end(), selected.begin(), selected.end(),
                        std::back_inserter(both));
  // Coefficients of 8 bits move masses by a few per cent: near the border tokens change places.
  EXPECT_GE(both.size(), static_cast<size_t>(k - 2));

  // Of the golden's selection, so that the outputs can be compared closely.
  std::vector<float> data(kernels::CellTableFloats(1, kDim));
  kernels::Summary cells{data.data(), {kSink, kSink}};
  const kernels::CellTableExtension extension{&cells, table, table, kTokens / 64 * 64};
  backend->ExtendCellTables({&extension, 1}, pool.data(), layout, *packed, codes.data(),
                            codes_layout);
  std::vector<const std::byte*> rows;
  const auto add = [&](int32_t t) {
    rows.push_back(reinterpret_cast<const std::byte*>(&pool[t * 2 * kDim]));
  };
  for (int32_t t = 0; t < kSink; ++t) add(t);
  for (const int32_t t : tokens) add(t);
  for (int32_t t = kTokens - kWindow; t < kTokens; ++t) add(t);
  const kernels::RowList list{rows.data(), static_cast<int32_t>(rows.size()), kSink, kSink + k};
  std::vector<float> states(kGroup * kernels::AttentionStateFloats(kDim));
  backend->AttendRows({.q = q,
                       .queries = {&query, 1},
                       .rows = {.layout = layout, .lists = {&list, 1}},
                       .scale = scale,
                       .states = states.data()});
  std::vector<float> none(kGroup * kDim), with(kGroup * kDim);
  backend->FinishStates({&query, 1}, states.data(), kDim, nullptr,
                        {none.data(), kernels::DType::kF32, 1, kGroup * kDim, kGroup * kDim});
  const float* const tables[] = {data.data()};
  backend->MergeTails({&query, 1}, tables, *packed, tail, kDim, states.data());
  backend->FinishStates({&query, 1}, states.data(), kDim, nullptr,
                        {with.data(), kernels::DType::kF32, 1, kGroup * kDim, kGroup * kDim});
  const auto distance = [](const std::vector<float>& a, const std::vector<double>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
    return std::sqrt(sum);
  };
  const std::vector<double> without_tail = golden.Expected("without_tail"),
                            with_tail = golden.Expected("with_tail");
  std::vector<float> as_floats(with_tail.begin(), with_tail.end());
  const double moved = distance(as_floats, without_tail);
  EXPECT_LT(distance(none, without_tail), 0.2 * moved);
  EXPECT_LT(distance(with, with_tail), 0.2 * moved);
}

// A short sample hardly turns the slow pairs of RoPE; at positions far behind it they point elsewhere. Spread, the fit
// knows of it.
TEST(TransformFitTest, SpreadsPositionsOverTheServedContext) {
  Golden golden;
  std::iota(golden.sample.key_positions.begin(), golden.sample.key_positions.end(), 0);
  for (int32_t i = 0; i < 300; ++i) golden.sample.query_positions[i] = 3 * i;
  golden.options.inv_freq.assign(kDim / 2, 1e-4f);
  golden.options.served_context = 60000;  // nearly a whole turn
  golden.options.first_query = 0;
  const auto still = FitTransformHead(golden.sample, golden.options);
  golden.options.copies = 4;
  const auto turned = FitTransformHead(golden.sample, golden.options);
  ASSERT_TRUE(still.ok() && turned.ok());
  // The offset of a few dimensions is a mean while it stands still, and variance once it turns.
  const auto norm = [](const std::vector<float>& mean) {
    double sum = 0;
    for (const float x : mean) sum += double{x} * x;
    return std::sqrt(sum);
  };
  EXPECT_GT(norm(still->head.mean), 4);
  EXPECT_LT(norm(turned->head.mean), 1.5);
  const auto again = FitTransformHead(golden.sample, golden.options);
  EXPECT_EQ(again->head.key_weight, turned->head.key_weight);  // the same seed, the same fit
}

// A layer without RoPE, or the part of a head that does not rotate: keys of any position are like the sample's.
TEST(TransformFitTest, TurnsNothingWhereNothingRotates) {
  Golden golden;
  std::iota(golden.sample.key_positions.begin(), golden.sample.key_positions.end(), 0);
  for (int32_t i = 0; i < 300; ++i) golden.sample.query_positions[i] = 3 * i;
  golden.options.inv_freq.assign(kDim / 2, 0.0f);
  golden.options.served_context = 60000;
  golden.options.first_query = 0;
  golden.options.copies = 0;
  const auto still = FitTransformHead(golden.sample, golden.options);
  golden.options.copies = 4;
  const auto spread = FitTransformHead(golden.sample, golden.options);
  ASSERT_TRUE(still.ok() && spread.ok());
  ASSERT_EQ(still->head.mean.size(), spread->head.mean.size());
  for (size_t c = 0; c < still->head.mean.size(); ++c) {
    EXPECT_NEAR(still->head.mean[c], spread->head.mean[c], 1e-5) << c;
  }
  EXPECT_EQ(still->head.widths, spread->head.widths);
  for (size_t i = 0; i < still->distortion.size(); ++i) {
    EXPECT_NEAR(still->distortion[i], spread->distortion[i], 1e-6 * still->distortion[0]) << i;
  }
}

// Delta makes up for the error of logits, which the scale of attention is part of.
TEST(TransformFitTest, DeltaFollowsTheScaleOfAttention) {
  Golden golden;
  const auto of_model = FitTransformHead(golden.sample, golden.options);
  golden.options.logit_divisor = 2 * std::sqrt(double{kDim});
  const auto half = FitTransformHead(golden.sample, golden.options);
  ASSERT_TRUE(of_model.ok() && half.ok());
  EXPECT_EQ(half->head.key_weight, of_model->head.key_weight);
  for (size_t i = 0; i < half->delta_weight.size(); ++i) {
    EXPECT_NEAR(half->delta_weight[i], of_model->delta_weight[i] / 2,
                1e-6 * std::abs(of_model->delta_weight[i]));
  }
}

TEST(TransformFitTest, RefusesSamplesThatHaveNoFit) {
  Golden golden;
  TransformSample sample = golden.sample;
  sample.keys[77] = std::nanf("");
  EXPECT_THAT(FitTransformHead(sample, golden.options).status().message(),
              HasSubstr("a key is not finite"));
  sample = golden.sample;
  std::fill(sample.keys.begin(), sample.keys.end(), 1.0f);
  EXPECT_THAT(FitTransformHead(sample, golden.options).status().message(),
              HasSubstr("do not vary"));
  sample = golden.sample;
  std::fill(sample.queries.begin(), sample.queries.end(), 0.0f);
  EXPECT_THAT(FitTransformHead(sample, golden.options).status().message(),
              HasSubstr("queries are all zero"));
  sample = golden.sample;
  sample.keys.resize(10 * kDim);
  sample.key_positions.resize(10);
  EXPECT_THAT(FitTransformHead(sample, golden.options).status().message(), HasSubstr("too short"));
}

TEST(TransformFitTest, ATailIsJudgedByTheErrorOfTheOutput) {
  const Golden golden;
  const auto fit = FitTransformHead(golden.sample, golden.options);
  ASSERT_TRUE(fit.ok());
  TransformWindow window{kTokens, golden.keys, golden.values, {}, {}, 1};
  for (int32_t i = 0; i < 8; ++i) {
    window.query_positions.push_back(500 + 50 * i);
    window.queries.insert(window.queries.end(), &golden.queries[i * kDim],
                          &golden.queries[i * kDim] + kDim);
  }
  const TailErrors helps = MeasureTail(window, *fit);
  EXPECT_EQ(helps.outputs, 8);
  EXPECT_LT(helps.tail, helps.none);
  // Values that have nothing to do with the cells, and a heavy mass that the code does not see.
  TransformHeadFit blind = *fit;
  for (float& weight : blind.head.query_weight) weight = -3 * weight;
  const TailErrors harms = MeasureTail(window, blind);
  EXPECT_GT(harms.tail, harms.none);
}

TEST(SymmetricEigenTest, TakesAMatrixApart) {
  Lcg lcg(9);
  constexpr int32_t kN = 24;
  std::vector<double> m(kN * kN), values, vectors;
  for (int32_t i = 0; i < kN; ++i) {
    for (int32_t j = 0; j <= i; ++j) m[i * kN + j] = m[j * kN + i] = lcg.Centred();
  }
  ASSERT_TRUE(SymmetricEigen(m, kN, &values, &vectors));
  EXPECT_TRUE(std::is_sorted(values.rbegin(), values.rend()));
  for (int32_t i = 0; i < kN; ++i) {
    for (int32_t j = 0; j < kN; ++j) {
      double sum = 0, dot = 0;
      for (int32_t k = 0; k < kN; ++k) {
        sum += vectors[i * kN + k] * values[k] * vectors[j * kN + k];
        dot += vectors[k * kN + i] * vectors[k * kN + j];
      }
      EXPECT_NEAR(sum, m[i * kN + j], 1e-10);
      EXPECT_NEAR(dot, i == j ? 1 : 0, 1e-10);
    }
  }
  m[5] = std::nan("");
  EXPECT_FALSE(SymmetricEigen(m, kN, &values, &vectors));
}

// Every dimension is kept by one code or the other, or by neither because it has next to no error; and logits are estimated
// far better by both than by the first.
TEST(TransformFitTest, ResidualCodesSharpenTheEstimates) {
  const Golden golden;
  const auto fit = FitTransformHead(golden.sample, golden.options);
  ASSERT_TRUE(fit.ok()) << fit.status();
  const kernels::TransformCodeWeights first{kDim, kBits, {fit->head}};
  const kernels::TransformCodeWeights residual{kDim, kBits, {fit->residual}};
  ASSERT_EQ(kernels::CheckResidualCode(first, residual), "");
  const auto& dims = fit->residual.first_dims;
  EXPECT_GT(std::count(dims.begin(), dims.end(), -1), 0);
  EXPECT_GT(std::count_if(dims.begin(), dims.end(), [](int dim) { return dim >= 0; }), 0);
  const auto estimate = [](const float* q, const kernels::TransformCodeHead& head,
                           const std::vector<uint8_t>& index) {
    double sum = 0;
    const int32_t n = 4 * head.quads;
    for (int32_t c = 0; c < kDim; ++c) {
      double value = head.mean[c];
      for (int32_t i = 0; i < n; ++i) {
        value += head.query_weight[c * n + i] * (index[i] - ((1 << head.widths[i / 4]) - 1) / 2.0);
      }
      sum += q[c] * value;
    }
    return sum;
  };
  double of_first = 0, of_both = 0;
  for (int32_t t = 0; t < kTokens; t += 3) {
    const float* key = &golden.keys[t * kDim];
    const std::vector<uint8_t> index = kernels::TransformIndexesRef(key, first, 0);
    const std::vector<uint8_t> fine = kernels::TransformIndexesRef(key, residual, 0, index);
    for (int32_t i = 0; i < 300; i += 10) {
      const float* q = &golden.queries[i * kDim];
      double logit = 0;
      for (int32_t c = 0; c < kDim; ++c) logit += double{q[c]} * key[c];
      const double error = estimate(q, fit->head, index) - logit;
      of_first += error * error;
      const double left = error + estimate(q, fit->residual, fine);
      of_both += left * left;
    }
  }
  EXPECT_LT(of_both, 0.2 * of_first) << of_first << " " << of_both;
}

// ---- the file ----

struct Stored {
  Stored() {
    const Golden golden;
    auto head = FitTransformHead(golden.sample, golden.options);
    head->head.tail = true;
    config.layers.resize(2);
    config.num_kv_heads = 1;
    config.head_dim = kDim;
    fit.bits = kBits;
    fit.sample_tokens = 900;
    for (int32_t layer = 0; layer < 2; ++layer) {
      fit.layers.push_back({kDim, kBits, {head->head}});
      fit.residuals.push_back({kDim, kBits, {head->residual}});
    }
    fit.layers[1].heads[0].tail = false;
    fit.layers[1].heads[0].delta_weight = head->delta_weight;
    fit.id = TransformFitId(fit);
    text = SerialiseTransformFit(fit, "key");
  }
  ModelConfig config;
  TransformFit fit;
  std::string text;
};

TEST(TransformFitCacheTest, GivesBackWhatWasWritten) {
  const Stored stored;
  auto directory = std::make_optional<TempDir>();
  const std::string path = directory->File("winnow-fit/one/fit.bin");
  ASSERT_TRUE(WriteTransformFit(path, "key", stored.fit).ok());
  const auto found = ReadTransformFit(path, "key", stored.config);
  ASSERT_TRUE(found.ok() && found->has_value());
  EXPECT_EQ((*found)->id, stored.fit.id);
  EXPECT_EQ(SerialiseTransformFit(**found, "key"), stored.text);
  EXPECT_FALSE((*found)->layers[1].heads[0].tail);
  EXPECT_EQ((*found)->residuals[1].heads[0].first_dims,
            stored.fit.residuals[1].heads[0].first_dims);
  TransformFit other = stored.fit;
  other.residuals[0].heads[0].first_steps[0] += 1;
  EXPECT_NE(TransformFitId(other), stored.fit.id);
  directory.reset();
  const auto gone = ReadTransformFit(path, "key", stored.config);
  EXPECT_TRUE(gone.ok() && !gone->has_value());
}

TEST(TransformFitCacheTest, TakesNothingOfAnotherKeyOrModelOrThatIsDamaged) {
  const Stored stored;
  EXPECT_TRUE(ParseTransformFit(stored.text, "key", stored.config).has_value());
  EXPECT_FALSE(ParseTransformFit(stored.text, "another", stored.config).has_value());
  ModelConfig other = stored.config;
  other.layers.resize(3);
  EXPECT_FALSE(ParseTransformFit(stored.text, "key", other).has_value());
  for (size_t at = 0; at < stored.text.size(); at += 1 + stored.text.size() / 300) {
    std::string damaged = stored.text;
    damaged[at] ^= 4;
    EXPECT_FALSE(ParseTransformFit(damaged, "key", stored.config).has_value()) << at;
    EXPECT_FALSE(ParseTransformFit(stored.text.substr(0, at), "key", stored.config).has_value());
  }
}

// Digests that are right say nothing about what they are of.
TEST(TransformFitCacheTest, ChecksWhatAWriterOfDigestsMayHavePut) {
  const Stored stored;
  for (int round = 0; round < 5; ++round) {
    TransformFit wrong = stored.fit;
    kernels::TransformCodeHead& head = wrong.layers[0].heads[0];
    kernels::TransformCodeHead& residual = wrong.residuals[1].heads[0];
    if (round == 3) residual.first_dims[2] = static_cast<int16_t>(4 * head.quads);
    if (round == 4) residual.first_steps[1] = std::numeric_limits<float>::quiet_NaN();
    if (round == 0) head.key_weight[3] = std::numeric_limits<float>::infinity();
    if (round == 1) head.fields[0].word = 200;
    if (round == 2) head.cell_bits[0] = 255;
    EXPECT_FALSE(
        ParseTransformFit(SerialiseTransformFit(wrong, "key"), "key", stored.config).has_value());
  }
}

}  // namespace
}  // namespace winnow::engine
