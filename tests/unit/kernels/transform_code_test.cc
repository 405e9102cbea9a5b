#include "kernels/transform_code.h"

#include <cmath>
#include <numeric>

#include "kernels/attention_state.h"
#include "kernels/cpu/ops.h"
#include "tests/unit/kernels/kernel_testing.h"
#include "tests/unit/kernels/paged_kv.h"
#include "tests/unit/kernels/random_transform.h"
#include "tests/unit/kernels/retrieval_testing.h"

namespace winnow::kernels {
namespace {

// Sequences, a transform, the codes of all their keys by the reference, and queries' masses of anchors.
struct Scene {
  Scene(Random& random, int32_t d, int32_t kv_heads, int32_t group_size, int32_t bits,
        std::vector<int32_t> lengths, DType dtype = DType::kBF16, int32_t block_tokens = 64,
        bool delta = false)
      : kv(random, {kv_heads, d, block_tokens, dtype}, lengths),
        weights(RandomTransform(random, d, kv_heads, bits, delta)),
        layout{kv_heads, block_tokens, bits},
        group(group_size),
        codes(kv.num_blocks() * layout.BlockBytes()) {
    for (int s = 0; s < static_cast<int>(lengths.size()); ++s) {
      spans.push_back({kv.table(s), {0, lengths[s]}});
    }
    EncodeTransformKeysRef(spans, kv.pool(), kv.layout(), weights, codes.data(), layout);
  }
  int32_t heads() const { return layout.kv_heads * group; }
  const uint32_t* HeadCodes(int32_t block, int32_t head) const {
    return reinterpret_cast<const uint32_t*>(codes.data() + block * layout.BlockBytes() +
                                             head * layout.HeadBytes());
  }

  PagedKv kv;
  TransformCodeWeights weights;
  CodeLayout layout;
  int32_t group;
  std::vector<std::byte> codes;
  std::vector<KeySpan> spans;
};

// A residual code of a scene's keys by the reference.
struct Residual {
  Residual(Random& random, const Scene& scene, int32_t bits)
      : weights(RandomResidual(random, scene.weights, bits)),
        layout{scene.layout.kv_heads, scene.layout.block_tokens, bits},
        codes(scene.kv.num_blocks() * layout.BlockBytes()) {
    EncodeResidualsRef(scene.spans, scene.kv.pool(), scene.kv.layout(), scene.weights,
                       scene.codes.data(), scene.layout, weights, codes.data(), layout);
  }
  TransformCodeWeights weights;
  CodeLayout layout;
  std::vector<std::byte> codes;
};

struct OwnedScales {
  OwnedScales(size_t queries, int32_t heads) : references(queries * heads), inverses(references) {
    view = {references.data(), inverses.data()};
  }
  std::vector<float> references, inverses;
  MassScales view;
};

struct OwnedTail {
  OwnedTail(size_t queries, int32_t heads)
      : masses(queries * heads * kTransformCells, -1),
        references(queries * heads),
        deltas(queries * heads) {
    view = {heads, masses.data(), references.data(), deltas.data()};
  }
  std::vector<int64_t> masses;
  std::vector<float> references, deltas;
  TailMasses view;
};

constexpr float kScale = 0.3f;

// Logits in base 2 of one query head for the tokens of mid, in double from the code's indexes; and that the query's
// coefficients of 8 bits give them but for their rounding.
std::vector<double> Logits(const Scene& scene, const float* q, const RetrievalQuery& query,
                           int32_t kv_head) {
  const TransformCodeHead& head = scene.weights.heads[kv_head];
  const int32_t d = scene.weights.head_dim, n = 4 * head.quads;
  const TransformQuery prepared =
      PrepareTransformQueryRef(q, scene.weights, kv_head, kScale * kTransformLog2E);
  std::vector<double> logits;
  for (int32_t token = query.mid.first; token < query.mid.last; ++token) {
    const int32_t bt = scene.layout.block_tokens;
    const std::vector<uint8_t> index =
        TransformDecodeRef(scene.HeadCodes(query.block_table[token / bt], kv_head), token % bt,
                           scene.weights, kv_head);
    double exact = 0, rounded = prepared.b, slack = 1e-3;
    for (int32_t i = 0; i < n; ++i) {
      const double level = index[i] - ((1 << head.widths[i / 4]) - 1) / 2.0;
      for (int32_t c = 0; c < d; ++c) exact += q[c] * head.query_weight[c * n + i] * level;
      rounded += double{prepared.a} * prepared.coef[i] * index[i];
      slack += prepared.a * std::fabs(level) * 0.51;
    }
    for (int32_t c = 0; c < d; ++c) exact += double{q[c]} * head.mean[c];
    EXPECT_NEAR(rounded, exact * kScale * std::log2(std::exp(1.0)), slack);
    logits.push_back(rounded);
  }
  return logits;
}

// W of a logit that is not rounded to steps, in powers of two.
double PowerOf(double logit) {
  const double x = logit - 7.0 / kMassSteps, whole = std::floor(x);
  return std::exp2(whole) * (1 + x - whole);
}
// Half a step more or less.
constexpr double kStepSlack = 0.004;

// The sum of W over the tokens of mid, of each piece relative to its peak.
double SumOfPowers(const std::vector<double>& logits, TokenRange mid) {
  double sum = 0;
  for (int32_t first = mid.first, last = first; first < mid.last; first = last) {
    last = std::min(mid.last, (first / kMassPieceTokens + 1) * kMassPieceTokens);
    const double* begin = &logits[first - mid.first];
    const double peak = *std::max_element(begin, begin + (last - first));
    for (int32_t j = 0; j < last - first; ++j) sum += PowerOf(begin[j] - peak) * std::exp2(peak);
  }
  return sum;
}

TEST(TransformCodeTest, FieldsFillEveryWordForAnyWidths) {
  Random random;
  SCOPED_TRACE(random.seed());
  for (int round = 0; round < 300; ++round) {
    const auto bits = static_cast<int32_t>(64 * random.Int(1, 4));
    const TransformCodeWeights weights = RandomTransform(random, 128, 2, bits);
    ASSERT_EQ(CheckTransformCode(weights), "");
  }
}

TEST(TransformCodeTest, FieldsLieSoThatFewStepsReadThem) {
  struct Case {
    std::vector<uint8_t> widths;
    int32_t words, steps;
  };
  const std::vector<uint8_t> halves = [] {
    std::vector<uint8_t> widths(32, 1);
    std::fill_n(widths.begin(), 16, 2);
    return widths;
  }();
  for (const Case& c : {
           Case{{8, 8}, 2, 1},
           // Three heads of SmolLM2: the fullest word for each quad takes three steps.
           Case{{6, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 1, 1}, 4, 2},
           Case{{7, 4, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1}, 4, 2},
           Case{{7, 5, 4, 4, 4, 3, 2, 1, 1, 1}, 4, 2},
           // Quads of like variances: the emptiest word for each takes five steps.
           Case{halves, 6, 4},
       }) {
    const std::vector<CodeField> fields = LayCodeFields(c.widths, c.words);
    EXPECT_EQ(CodeFieldSteps(fields, c.words), c.steps) << testing::PrintToString(c.widths);
  }
}

TEST(TransformCodeTest, RefusesFieldsThatOverlapOrLackBits) {
  Random random;
  TransformCodeWeights weights = RandomTransform(random, 64, 1, 128);
  ASSERT_EQ(CheckTransformCode(weights), "");
  TransformCodeWeights wrong = weights;
  wrong.heads[0].fields.back().shift ^= 1;
  EXPECT_NE(CheckTransformCode(wrong), "");
  wrong = weights;
  wrong.heads[0].fields.pop_back();
  EXPECT_NE(CheckTransformCode(wrong), "");
  wrong = weights;
  wrong.heads[0].key_weight[5] = std::nanf("");
  EXPECT_NE(CheckTransformCode(wrong), "");
  wrong = weights;
  wrong.heads[0].widths[0] = 9;
  EXPECT_NE(CheckTransformCode(wrong), "");
}

TEST(TransformCodeTest, CodesUnpackToTheIndexesOfTheirKeys) {
  Random random;
  SCOPED_TRACE(random.seed());
  for (const int32_t bits : {64, 128, 192, 256}) {
    Scene scene(random, 64, 2, 1, bits, {150});
    for (int32_t token = 0; token < 150; ++token) {
      for (int32_t head = 0; head < 2; ++head) {
        std::vector<float> key(64);
        for (int32_t c = 0; c < 64; ++c) {
          BF16 value;
          std::memcpy(&value, scene.kv.Row(0, head, token) + 2 * c, 2);
          key[c] = ToFloat(value);
        }
        const uint32_t* of_head = scene.HeadCodes(scene.kv.table(0)[token / 64], head);
        ASSERT_EQ(TransformDecodeRef(of_head, token % 64, scene.weights, head),
                  TransformIndexesRef(key.data(), scene.weights, head));
      }
    }
  }
}

TEST(TransformCodeTest, Exp2IsExactAtWholeNumbersAndCloseBetween) {
  for (int n = 0; n >= -60; --n) {
    EXPECT_EQ(TransformExp2(static_cast<float>(n)), std::ldexp(1.0f, n));
  }
  EXPECT_EQ(TransformExp2(-1000.0f), 0x1p-60f);
  for (double x = -50; x < 0; x += 0.0137) {
    const auto at = static_cast<float>(x);
    EXPECT_NEAR(TransformExp2(at) / std::exp2(static_cast<double>(at)), 1, 3e-7);
  }
}

TEST(TransformCodeTest, PowersOfStepsRiseAndStayNearThoseOfTwo) {
  double sum = 0;
  for (int32_t x = 0; x > -125 * kMassSteps; --x) {
    EXPECT_LT(MassPower(x - 1), MassPower(x));
    const double share = MassPower(x) / std::exp2(static_cast<double>(x) / kMassSteps);
    EXPECT_GT(share, 0.960);
    EXPECT_LT(share, 1.025);
    sum += share;
    EXPECT_NEAR(MassPower(x) / PowerOf(static_cast<double>(x) / kMassSteps), 1, 1e-12);
  }
  EXPECT_NEAR(sum / (125 * kMassSteps), 1, 0.003);
  for (const int32_t x : {-126 * kMassSteps, -(1 << 20)}) EXPECT_EQ(MassPower(x), 0x1p-126f);
  EXPECT_EQ(MassPower(1000), MassPower(0));
}

TEST(TransformCodeTest, StepsAreOfTheLogitAndHeld) {
  Random random;
  SCOPED_TRACE(random.seed());
  for (const float scale : {1e-3f, 1.0f, 30.0f}) {
    Scene scene(random, 64, 1, 1, 128, {100});
    Matrix q = Matrix::Normal(random, 1, 64);
    const TransformQuery query = PrepareTransformQueryRef(q.row(0), scene.weights, 0, scale);
    for (int32_t dot = -130000; dot < 130000; dot += 97) {
      const double steps = 128.0 * query.a * dot + query.origin;
      EXPECT_NEAR(MassStepsOf(query, dot), std::clamp(steps, -16383.0, 16383.0), 0.5001);
      const double logit = double{query.a} * dot + query.b;
      EXPECT_NEAR(steps / kMassSteps + query.offset, logit, 1e-3 + 1e-6 * std::fabs(logit));
    }
  }
}

// A head whose logits no step can hold has none: no integer overflows.
TEST(TransformCodeTest, AHeadBeyondAllStepsHasNoMasses) {
  Random random;
  SCOPED_TRACE(random.seed());
  Scene scene(random, 64, 1, 1, 128, {100});
  Matrix q = Matrix::Normal(random, 1, 64);
  for (int i = 0; i < 64; ++i) q.row(0)[i] *= 1e9f;
  const TransformQuery query = PrepareTransformQueryRef(q.row(0), scene.weights, 0, 1.0f);
  EXPECT_EQ(query.step, 0);
  EXPECT_EQ(query.a, 0);
  EXPECT_EQ(MassStepsOf(query, 12345), 0);
}

TEST(TransformCodeTest, MassKeysKeepTheOrderOfMasses) {
  float last = 0;
  for (float mass = 0x1p-59f; mass <= 16; mass *= 1.0005f) {
    EXPECT_GE(MassKey(mass), MassKey(last));
    last = mass;
  }
  EXPECT_LT(MassKey(1.0f), MassKey(1.001f));
  EXPECT_EQ(MassKey(0), 0);
  EXPECT_LT(MassKey(16.0f), kMassKeyBins);
}

// The reference itself, against the definition of a mass in double.
TEST(TransformCodeTest, SelectsTheLargestSumsOfMassesThatCountTheAnchors) {
  Random random;
  SCOPED_TRACE(random.seed());
  for (int round = 0; round < 6; ++round) {
    const auto bits = static_cast<int32_t>(64 * random.Int(1, 4));
    const auto group = static_cast<int32_t>(random.Int(1, 5));
    Scene scene(random, 64, 2, group, bits, {1300}, DType::kF32);
    Matrix q = Matrix::Normal(random, 1, scene.heads() * 64);
    RetrievalQuery query = scene.kv.Query(0, 0, 1299, 16, 100, 40);
    std::vector<float> anchors;
    for (int32_t h = 0; h < scene.heads(); ++h) anchors.push_back(random.Normal(4.0f) + 6);
    OwnedSelection chosen(1, 2, 40);
    OwnedTail tail(1, scene.heads());
    SelectByMassRef(q.tensor(), {&query, 1}, anchors.data(), scene.weights, kScale,
                    scene.codes.data(), scene.layout, chosen.view(), &tail.view);
    for (int32_t kv_head = 0; kv_head < 2; ++kv_head) {
      std::vector<double> sums(query.mid.size()), all_logits;
      for (int32_t g = 0; g < group; ++g) {
        const int32_t head = kv_head * group + g;
        const std::vector<double> logits = Logits(scene, q.row(0) + head * 64, query, kv_head);
        const double denominator =
            std::exp(static_cast<double>(anchors[head])) + SumOfPowers(logits, query.mid);
        const double reference = tail.references[head];
        double unread = 0;
        const std::vector<int32_t> tokens = chosen.Of(0, kv_head);
        for (size_t j = 0; j < logits.size(); ++j) {
          const double weight = PowerOf(logits[j] - reference);
          sums[j] += weight * std::exp2(reference) / denominator;
          const bool read = std::binary_search(tokens.begin(), tokens.end(),
                                               query.mid.first + static_cast<int32_t>(j));
          if (!read) unread += weight;
        }
        double kept = 0;
        for (int32_t c = 0; c < kTransformCells; ++c) {
          kept += static_cast<double>(tail.masses[head * kTransformCells + c]) * 0x1p-30;
        }
        EXPECT_NEAR(kept, unread, kStepSlack * unread + query.mid.size() * 0x1p-30);
      }
      // Keys have 10 bits.
      ExpectTopK(chosen.Of(0, kv_head), sums, query.mid.first, 40, 0.004 + 2 * kStepSlack);
    }
  }
}

TEST(TransformCodeTest, LeastKeysAreOfTheMassOrLittleLess) {
  Random random;
  SCOPED_TRACE(random.seed());
  EXPECT_EQ(LeastMassKey(0, 4), 0);
  for (int round = 0; round < 1000; ++round) {
    const double share = std::exp2(-random.Int(1, 20)) * (1 + random.Int(0, 999) / 1000.0);
    const auto group = static_cast<int32_t>(random.Int(1, 16));
    const int32_t key = LeastMassKey(share, group);
    EXPECT_EQ(key % kMassKeyStep, 0);
    EXPECT_LE(key, MassKey(static_cast<float>(share * group)));
    EXPECT_GE(key, MassKey(static_cast<float>(share * group / 1.126)));
  }
}

// The reference itself: of what it selects without a least mass, it keeps what has that mass, and the rest joins the tail.
TEST(TransformCodeTest, TokensBelowTheLeastMassAreNotSelected) {
  Random random;
  SCOPED_TRACE(random.seed());
  constexpr int32_t kGroup = 3;
  Scene scene(random, 64, 1, kGroup, 128, {1300}, DType::kF32);
  Matrix q = Matrix::Normal(random, 1, kGroup * 64);
  RetrievalQuery query = scene.kv.Query(0, 0, 1299, 16, 100, 60);
  const std::vector<float> anchors = {3, 5, 4};
  const auto select = [&](OwnedTail& tail) {
    OwnedSelection chosen(1, 1, 60);
    SelectByMassRef(q.tensor(), {&query, 1}, anchors.data(), scene.weights, kScale,
                    scene.codes.data(), scene.layout, chosen.view(), &tail.view);
    return chosen.Of(0, 0);
  };
  OwnedTail tail_of_all(1, kGroup), tail(1, kGroup);
  const std::vector<int32_t> all = select(tail_of_all);
  ASSERT_EQ(all.size(), 60u);
  std::vector<double> masses(query.mid.size());
  std::vector<std::vector<double>> weights;
  for (int32_t g = 0; g < kGroup; ++g) {
    const std::vector<double> logits = Logits(scene, q.row(0) + g * 64, query, 0);
    const double denominator =
        std::exp(static_cast<double>(anchors[g])) + SumOfPowers(logits, query.mid);
    const double reference = tail_of_all.references[g];
    weights.emplace_back();
    for (const double logit : logits) weights[g].push_back(PowerOf(logit - reference));
    for (size_t j = 0; j < masses.size(); ++j) {
      masses[j] += weights[g][j] * std::exp2(reference) / denominator;
    }
  }
  std::vector<double> sorted;
  for (const int32_t token : all) sorted.push_back(masses[token - query.mid.first]);
  std::sort(sorted.begin(), sorted.end());
  query.least_key = LeastMassKey(sorted[30] / kGroup, kGroup);
  const std::vector<int32_t> kept = select(tail);
  EXPECT_GE(kept.size(), 30u);
  std::vector<double> moved(kGroup);
  for (const int32_t token : all) {
    const bool is_kept = std::binary_search(kept.begin(), kept.end(), token);
    const double mass = masses[token - query.mid.first];
    if (mass > (1.005 + 2 * kStepSlack) * sorted[30]) {
      EXPECT_TRUE(is_kept) << mass;
    }
    if (mass < (0.995 - 2 * kStepSlack) * sorted[30] / 1.125) {
      EXPECT_FALSE(is_kept) << mass;
    }
    for (int32_t g = 0; g < kGroup && !is_kept; ++g) {
      moved[g] += weights[g][token - query.mid.first];
    }
  }
  for (int32_t g = 0; g < kGroup; ++g) {
    double more = 0;
    for (int32_t c = 0; c < kTransformCells; ++c) {
      const int32_t at = g * kTransformCells + c;
      more += static_cast<double>(tail.masses[at] - tail_of_all.masses[at]) * 0x1p-30;
    }
    EXPECT_NEAR(more, moved[g], kStepSlack * moved[g] + 60 * 0x1p-30);
  }
  query.least_key = LeastMassKey(0.99, kGroup);
  EXPECT_TRUE(select(tail).empty());
}

// Any tokens may be read: what is left is the mass of all others.
TEST(TransformCodeTest, TheTailLosesTheMassesOfTheTokensThatAreRead) {
  Random random;
  SCOPED_TRACE(random.seed());
  constexpr int32_t kGroup = 3, kHeads = 2 * kGroup;
  Scene scene(random, 64, 2, kGroup, 128, {900}, DType::kF32);
  Matrix q = Matrix::Normal(random, 1, kHeads * 64);
  const RetrievalQuery query = scene.kv.Query(0, 0, 899, 16, 100, 80);
  std::vector<float> anchors;
  for (int32_t h = 0; h < kHeads; ++h) anchors.push_back(random.Normal(4.0f) + 6);
  OwnedSelection selected(1, 2, 80), read(1, 2, 80);
  OwnedTail tail(1, kHeads);
  tail.view.of_all = true;
  SelectByMassRef(q.tensor(), {&query, 1}, anchors.data(), scene.weights, kScale,
                  scene.codes.data(), scene.layout, selected.view(), &tail.view);
  for (int32_t kv_head = 0; kv_head < 2; ++kv_head) {
    std::vector<int32_t> some = selected.Of(0, kv_head);
    std::erase_if(some, [&](int32_t) { return random.Int(0, 2) == 0; });
    read.Set(0, kv_head, some);
  }
  TakeFromTailRef(q.tensor(), {&query, 1}, scene.weights, kScale, scene.codes.data(), scene.layout,
                  read.view(), tail.view);
  for (int32_t head = 0; head < kHeads; ++head) {
    const int32_t kv_head = head / kGroup;
    const std::vector<double> logits = Logits(scene, q.row(0) + head * 64, query, kv_head);
    std::vector<double> unread(kTransformCells);
    const std::vector<int32_t> tokens = read.Of(0, kv_head);
    for (size_t j = 0; j < logits.size(); ++j) {
      const int32_t token = query.mid.first + static_cast<int32_t>(j);
      if (std::binary_search(tokens.begin(), tokens.end(), token)) continue;
      const int32_t cell = TransformCellRef(scene.HeadCodes(query.block_table[token / 64], kv_head),
                                            token % 64, scene.weights, kv_head);
      unread[cell] += PowerOf(logits[j] - tail.references[head]);
    }
    for (int32_t c = 0; c < kTransformCells; ++c) {
      const double left = static_cast<double>(tail.masses[head * kTransformCells + c]) * 0x1p-30;
      EXPECT_NEAR(left, unread[c], kStepSlack * unread[c] + query.mid.size() * 0x1p-30)
          << "head " << head << " cell " << c;
    }
  }
}

TEST(TransformCodeTest, RefusesResidualCodesThatDoNotFitTheFirst) {
  Random random;
  SCOPED_TRACE(random.seed());
  const TransformCodeWeights first = RandomTransform(random, 64, 2, 128);
  const TransformCodeWeights good = RandomResidual(random, first, 128);
  ASSERT_EQ(CheckResidualCode(first, good), "");
  const auto refused = [&](auto change) {
    TransformCodeWeights wrong = good;
    change(wrong, wrong.heads[1]);
    return !CheckResidualCode(first, wrong).empty();
  };
  using Head = TransformCodeHead;
  using Weights = TransformCodeWeights;
  EXPECT_FALSE(refused([](Weights&, Head&) {}));
  EXPECT_TRUE(refused([&](Weights&, Head& head) {
    head.first_dims[3] = static_cast<int16_t>(4 * first.heads[1].quads);
  }));
  EXPECT_TRUE(refused([](Weights&, Head& head) { head.first_dims[3] = -2; }));
  EXPECT_TRUE(refused([](Weights&, Head& head) { head.first_steps.pop_back(); }));
  EXPECT_TRUE(refused([](Weights&, Head& head) { head.first_steps[0] = std::nanf(""); }));
  EXPECT_TRUE(refused([](Weights&, Head& head) {
    head.first_dims.clear();
    head.first_steps.clear();
  }));
  EXPECT_TRUE(refused([](Weights&, Head& head) { head.mean[7] = 0.5f; }));
  EXPECT_TRUE(refused([](Weights&, Head& head) { head.tail = true; }));
  EXPECT_TRUE(refused([](Weights&, Head& head) { head.cell_bits = {3}; }));
  EXPECT_TRUE(refused([](Weights& weights, Head&) { weights.heads.pop_back(); }));
  EXPECT_NE(CheckResidualCode(RandomTransform(random, 96, 2, 128), good), "");
}

// The reference itself, against the definition in double: of the candidates those of the largest masses by both codes, under
// the denominators of the selection in which the candidates' estimates are replaced.
TEST(TransformCodeTest, ReRankingKeepsTheLargestMassesByBothCodes) {
  Random random;
  SCOPED_TRACE(random.seed());
  for (int round = 0; round < 8; ++round) {
    const auto bits = static_cast<int32_t>(64 * random.Int(1, 4));
    const auto group = static_cast<int32_t>(random.Int(1, 5));
    Scene scene(random, 64, 2, group, bits, {1300}, DType::kF32);
    const Residual residual(random, scene, static_cast<int32_t>(64 * random.Int(1, 4)));
    Matrix q = Matrix::Normal(random, 1, scene.heads() * 64);
    RetrievalQuery query = scene.kv.Query(0, 0, 1299, 16, 100, 80);
    std::vector<float> anchors;
    for (int32_t h = 0; h < scene.heads(); ++h) anchors.push_back(random.Normal(4.0f));
    OwnedSelection candidates(1, 2, 80), kept(1, 2, 80);
    OwnedScales scales(1, scene.heads());
    SelectByMassRef(q.tensor(), {&query, 1}, anchors.data(), scene.weights, kScale,
                    scene.codes.data(), scene.layout, candidates.view(), nullptr, &scales.view);
    query.k = 40;
    RerankByMassRef({q.tensor(),
                     {&query, 1},
                     scene.weights,
                     scene.codes.data(),
                     scene.layout,
                     residual.weights,
                     residual.codes.data(),
                     residual.layout,
                     kScale,
                     scales.view,
                     candidates.view(),
                     kept.view()});
    for (int32_t kv_head = 0; kv_head < 2; ++kv_head) {
      const std::vector<int32_t> tokens = candidates.Of(0, kv_head);
      ASSERT_EQ(tokens.size(), 80u);
      std::vector<double> sums(80);
      for (int32_t g = 0; g < group; ++g) {
        const int32_t head = kv_head * group + g;
        const std::vector<double> logits = Logits(scene, q.row(0) + head * 64, query, kv_head);
        const TransformQuery fine = PrepareTransformQueryRef(q.row(0) + head * 64, residual.weights,
                                                             kv_head, kScale * kTransformLog2E);
        const double reference = scales.references[head];
        double rest = std::exp2(reference) / scales.inverses[head], of_candidates = 0;
        std::vector<double> better;
        for (const int32_t token : tokens) {
          const auto* of_head = reinterpret_cast<const uint32_t*>(
              residual.codes.data() + query.block_table[token / 64] * residual.layout.BlockBytes() +
              kv_head * residual.layout.HeadBytes());
          const std::vector<uint8_t> index =
              TransformDecodeRef(of_head, token % 64, residual.weights, kv_head);
          double logit = logits[token - query.mid.first];
          rest -= std::exp2(std::min(logit, reference));
          for (size_t i = 0; i < index.size(); ++i) {
            logit += double{fine.a} * fine.coef[i] * index[i];
          }
          better.push_back(logit + fine.b);
          of_candidates += std::exp2(better.back());
        }
        const double denominator = std::max(rest, 0.0) + of_candidates;
        for (size_t j = 0; j < 80; ++j) sums[j] += std::exp2(better[j]) / denominator;
      }
      // ExpectTopK speaks of places.
      std::vector<int32_t> places;
      for (const int32_t token : kept.Of(0, kv_head)) {
        const auto found = std::lower_bound(tokens.begin(), tokens.end(), token);
        ASSERT_TRUE(found != tokens.end() && *found == token);
        places.push_back(static_cast<int32_t>(found - tokens.begin()));
      }
      ExpectTopK(places, sums, 0, 40, 0.004);  // keys have 10 bits
    }
  }
}

// A key's residual index follows from what the first code left of it.
TEST(TransformCodeTest, ResidualCodesRefineTheFirst) {
  Random random;
  SCOPED_TRACE(random.seed());
  Scene scene(random, 64, 1, 1, 128, {200}, DType::kF32);
  const Residual residual(random, scene, 192);
  const TransformCodeHead& head = residual.weights.heads[0];
  const int32_t n = 4 * head.quads;
  for (int32_t token = 0; token < 200; ++token) {
    std::vector<float> key(64);
    std::memcpy(key.data(), scene.kv.Row(0, 0, token), 64 * sizeof(float));
    const int32_t block = scene.kv.table(0)[token / 64];
    const std::vector<uint8_t> first =
        TransformDecodeRef(scene.HeadCodes(block, 0), token % 64, scene.weights, 0);
    const std::vector<uint8_t> index =
        TransformDecodeRef(reinterpret_cast<const uint32_t*>(residual.codes.data() +
                                                             block * residual.layout.BlockBytes()),
                           token % 64, residual.weights, 0);
    for (int32_t i = 0; i < n; ++i) {
      double t = head.key_bias[i];
      for (int32_t c = 0; c < 64; ++c) t += double{key[c]} * head.key_weight[c * n + i];
      if (head.first_dims[i] >= 0) t -= double{head.first_steps[i]} * first[head.first_dims[i]];
      const double held = std::clamp(t, 0.0, std::ldexp(1.0, head.widths[i / 4]) - 1);
      EXPECT_NEAR(index[i] + 0.5, held, 0.5 + 1e-3) << "token " << token << " dimension " << i;
    }
  }
}

TEST(TransformCodeTest, OfEqualMassesTheLaterTokensAreSelected) {
  Random random;
  Scene scene(random, 64, 1, 2, 128, {600}, DType::kF32);
  for (int32_t token = 1; token < 600; ++token) scene.kv.CopyKey(0, 0, 0, token);
  EncodeTransformKeysRef(scene.spans, scene.kv.pool(), scene.kv.layout(), scene.weights,
                         scene.codes.data(), scene.layout);
  Matrix q = Matrix::Normal(random, 1, 128);
  const RetrievalQuery query = scene.kv.Query(0, 0, 599, 16, 100, 3);
  const std::vector<float> anchors = {1, 1};
  OwnedSelection chosen(1, 1, 3);
  SelectByMassRef(q.tensor(), {&query, 1}, anchors.data(), scene.weights, kScale,
                  scene.codes.data(), scene.layout, chosen.view(), nullptr);
  EXPECT_EQ(chosen.Of(0, 0), (std::vector<int32_t>{497, 498, 499}));
}

TEST(TransformCodeTest, CellTablesSumValuesOfTheirTokensAndTheTailIsTheirWeightedMean) {
  Random random;
  SCOPED_TRACE(random.seed());
  Scene scene(random, 32, 2, 2, 64, {400}, DType::kF32);
  std::vector<float> data(CellTableFloats(2, 32), std::nanf(""));
  Summary table{data.data(), {16, 16}};
  for (const int32_t last : {64, 192, 320}) {
    const CellTableExtension extension{&table, scene.kv.table(0), scene.kv.table(0), last};
    ExtendCellTablesRef({&extension, 1}, scene.kv.pool(), scene.kv.layout(), scene.weights,
                        scene.codes.data(), scene.layout);
    ASSERT_EQ(table.tokens, (TokenRange{16, last}));
  }
  std::vector<int64_t> masses(4 * kTransformCells);
  std::vector<float> references = {1, 2, 3, 4}, deltas = {0, 0, 0, 0.5f};
  for (int64_t& mass : masses) mass = random.Int(0, 3) == 0 ? random.Int(0, 1 << 30) : 0;
  const TailMasses tail{4, masses.data(), references.data(), deltas.data()};
  std::vector<float> states(4 * AttentionStateFloats(32));
  for (int32_t head = 0; head < 4; ++head) {
    ResetAttentionState(&states[head * AttentionStateFloats(32)], 32);
  }
  const RetrievalQuery query = scene.kv.Query(0, 0, 383, 16, 100, 3);
  const float* const tables[] = {table.data};
  MergeTailsRef({&query, 1}, tables, scene.weights, tail, 32, states.data());
  for (int32_t head = 0; head < 4; ++head) {
    const int32_t kv_head = head / 2;
    std::vector<std::vector<double>> sums(kTransformCells, std::vector<double>(32));
    std::vector<double> counts(kTransformCells), all(32), out(32);
    for (int32_t token = 16; token < 320; ++token) {
      const int32_t cell = TransformCellRef(scene.HeadCodes(scene.kv.table(0)[token / 64], kv_head),
                                            token % 64, scene.weights, kv_head);
      ++counts[cell];
      for (int32_t c = 0; c < 32; ++c) {
        float value;
        std::memcpy(&value, scene.kv.Row(0, kv_head, token) + 4 * (32 + c), 4);
        sums[cell][c] += value;
        all[c] += value / 304.0;
      }
    }
    double total = 0;
    for (int32_t cell = 0; cell < kTransformCells; ++cell) {
      const double mass = static_cast<double>(masses[head * kTransformCells + cell]) * 0x1p-30;
      total += mass;
      for (int32_t c = 0; c < 32; ++c)
        out[c] += mass * (sums[cell][c] + all[c]) / (counts[cell] + 1);
    }
    const float* state = &states[head * AttentionStateFloats(32)];
    EXPECT_EQ(state[32], references[head] + deltas[head]);
    EXPECT_NEAR(state[33] / total, 1, 1e-5);
    for (int32_t c = 0; c < 32; ++c) EXPECT_NEAR(state[c], out[c], 1e-4 * total);
  }
}

// ---- each instruction set against the reference, bit for bit ----

class TransformCodeBackendTest : public EachIsa {
 protected:
  void SetUp() override {
    EachIsa::SetUp();
    backend = Make(3);
  }
  Random& random = random_;
  std::unique_ptr<Backend> backend;
};
WINNOW_FOR_EACH_ISA(TransformCodeBackendTest);

TEST_P(TransformCodeBackendTest, EncodesKeysAsTheReferenceDoes) {
  SCOPED_TRACE(Seed());
  for (const int32_t bits : {64, 128, 256}) {
    const DType dtype = AnyKvType(random);
    const int32_t d = bits == 128 ? 96 : 64;
    Scene scene(random, d, 2, 1, bits, {150, 37}, dtype);
    const auto packed = backend->PackTransformCode(scene.weights);
    std::vector<std::byte> codes(scene.codes.size(), std::byte{0});
    // In parts, so that tiles are begun and ended anywhere.
    for (int32_t first = 0, last = 0; first < 150; first = last) {
      last = static_cast<int32_t>(std::min<int64_t>(150, first + random.Int(1, 40)));
      const KeySpan span{scene.kv.table(0), {first, last}};
      backend->EncodeTransformKeys({&span, 1}, scene.kv.pool(), scene.kv.layout(), *packed,
                                   codes.data(), scene.layout);
    }
    backend->EncodeTransformKeys({&scene.spans[1], 1}, scene.kv.pool(), scene.kv.layout(), *packed,
                                 codes.data(), scene.layout);
    EXPECT_TRUE(codes == scene.codes);
  }
}

TEST_P(TransformCodeBackendTest, SelectsAndLeavesTheTailAsTheReferenceDoes) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 8; ++round) {
    const auto bits = static_cast<int32_t>(64 * random.Int(1, 4));
    const auto group = static_cast<int32_t>(random.Int(1, 7));
    Scene scene(random, 64, 2, group, bits, {1400, 300}, DType::kBF16, 64, round % 2 == 1);
    scene.weights.heads[1].tail = random.Int(0, 1) == 1;
    const auto packed = backend->PackTransformCode(scene.weights);
    Matrix q = Matrix::Normal(random, 5, scene.heads() * 64);
    if (round == 3) q.row(2)[5] = std::nanf("");
    // Logits that no step has: those of most tokens are held.
    for (int32_t i = 0; i < scene.heads() * 64 && round % 4 == 2; ++i) q.row(0)[i] *= 300;
    std::vector<RetrievalQuery> queries = {
        scene.kv.Query(0, 0, 1399, 16, 128, static_cast<int32_t>(random.Int(0, 1300))),
        scene.kv.Query(0, 1, static_cast<int32_t>(random.Int(200, 1399)), 3, 1, 20),
        scene.kv.Query(1, 2, 299, 16, 100, 17), scene.kv.Query(1, 3, 250, 0, 7, 0),
        scene.kv.Query(1, 4, 50, 16, 100, 4)};
    for (RetrievalQuery& query : queries) {
      if (random.Int(0, 1) == 0) continue;
      query.least_key = LeastMassKey(std::exp2(-random.Int(1, 16)), group);
    }
    std::vector<float> anchors;
    for (int32_t i = 0; i < 5 * scene.heads(); ++i) anchors.push_back(random.Normal(5.0f));
    anchors[0] = -std::numeric_limits<float>::infinity();
    OwnedSelection chosen(5, 2, 1300), expected(5, 2, 1300);
    OwnedTail tail(5, scene.heads()), expected_tail(5, scene.heads());
    SelectByMassRef(q.tensor(), queries, anchors.data(), scene.weights, kScale, scene.codes.data(),
                    scene.layout, expected.view(), &expected_tail.view);
    for (const bool with_tail : {true, false}) {
      backend->SelectByMass({.q = q.tensor(),
                             .queries = queries,
                             .anchor_masses = anchors.data(),
                             .transform = *packed,
                             .codes = scene.codes.data(),
                             .code_layout = scene.layout,
                             .scale = kScale,
                             .chosen = chosen.view(),
                             .tail = with_tail ? &tail.view : nullptr});
      ASSERT_TRUE(chosen == expected) << "round " << round;
    }
    for (int32_t i = 0; i < 5; ++i) {
      for (int32_t head = 0; head < scene.heads(); ++head) {
        if (queries[i].mid.size() == 0 || !scene.weights.heads[head / group].tail) continue;
        const int32_t at = i * scene.heads() + head;
        ASSERT_EQ(tail.references[at], expected_tail.references[at]);
        ASSERT_EQ(tail.deltas[at], expected_tail.deltas[at]);
        for (int32_t c = 0; c < kTransformCells; ++c) {
          ASSERT_EQ(tail.masses[at * kTransformCells + c],
                    expected_tail.masses[at * kTransformCells + c]);
        }
      }
    }
  }
}

TEST_P(TransformCodeBackendTest, TakesWhatIsReadFromTheTailAsTheReferenceDoes) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 6; ++round) {
    const auto bits = static_cast<int32_t>(64 * random.Int(1, 4));
    const auto group = static_cast<int32_t>(random.Int(1, 7));
    Scene scene(random, 64, 2, group, bits, {1400, 300}, DType::kBF16);
    if (round == 5) scene.weights.heads[1].tail = false;
    const auto packed = backend->PackTransformCode(scene.weights);
    Matrix q = Matrix::Normal(random, 4, scene.heads() * 64);
    if (round == 3) q.row(2)[5] = std::nanf("");
    const std::vector<RetrievalQuery> queries = {
        scene.kv.Query(0, 0, 1399, 16, 128, static_cast<int32_t>(random.Int(1, 1200))),
        scene.kv.Query(1, 1, 299, 16, 100, 30), scene.kv.Query(1, 2, 250, 3, 7, 20),
        scene.kv.Query(1, 3, 50, 16, 100, 4)};
    std::vector<float> anchors;
    for (int32_t i = 0; i < 4 * scene.heads(); ++i) anchors.push_back(random.Normal(5.0f));
    OwnedSelection chosen(4, 2, 1200);
    OwnedTail without(4, scene.heads()), tail(4, scene.heads());
    const auto select = [&](OwnedTail& of_call) {
      backend->SelectByMass({.q = q.tensor(),
                             .queries = queries,
                             .anchor_masses = anchors.data(),
                             .transform = *packed,
                             .codes = scene.codes.data(),
                             .code_layout = scene.layout,
                             .scale = kScale,
                             .chosen = chosen.view(),
                             .tail = &of_call.view});
    };
    const auto take = [&](OwnedSelection& read) {
      backend->TakeFromTail({.q = q.tensor(),
                             .queries = queries,
                             .transform = *packed,
                             .codes = scene.codes.data(),
                             .code_layout = scene.layout,
                             .scale = kScale,
                             .read = read.view(),
                             .tail = tail.view});
    };
    const auto expect_masses = [&](const OwnedTail& expected) {
      for (int32_t i = 0; i < 4; ++i) {
        for (int32_t head = 0; head < scene.heads(); ++head) {
          if (queries[i].mid.size() == 0 || !scene.weights.heads[head / group].tail) continue;
          const auto first = (int64_t{i} * scene.heads() + head) * kTransformCells;
          ASSERT_TRUE(std::equal(&tail.masses[first], &tail.masses[first] + kTransformCells,
                                 &expected.masses[first]))
              << "round " << round << " query " << i << " head " << head;
        }
      }
    };
    // All that is selected: what SelectByMass takes out itself.
    select(without);
    tail.view.of_all = true;
    select(tail);
    take(chosen);
    expect_masses(without);
    // A part of it.
    OwnedSelection read(4, 2, 1200);
    for (int32_t i = 0; i < 4; ++i) {
      for (int32_t head = 0; head < 2; ++head) {
        std::vector<int32_t> some = chosen.Of(i, head);
        std::erase_if(some, [&](int32_t) { return random.Int(0, 1) == 0; });
        read.Set(i, head, some);
      }
    }
    OwnedTail expected(4, scene.heads());
    expected.view.of_all = true;
    SelectByMassRef(q.tensor(), queries, anchors.data(), scene.weights, kScale, scene.codes.data(),
                    scene.layout, chosen.view(), &expected.view);
    TakeFromTailRef(q.tensor(), queries, scene.weights, kScale, scene.codes.data(), scene.layout,
                    read.view(), expected.view);
    select(tail);
    take(read);
    expect_masses(expected);
  }
}

TEST_P(TransformCodeBackendTest, EncodesResidualsAsTheReferenceDoes) {
  SCOPED_TRACE(Seed());
  for (const int32_t bits : {64, 128, 192, 256}) {
    const DType dtype = AnyKvType(random);
    const int32_t d = bits == 128 ? 96 : 64;
    Scene scene(random, d, 2, 1, static_cast<int32_t>(64 * random.Int(1, 4)), {150, 37}, dtype);
    const Residual residual(random, scene, bits);
    const auto packed = backend->PackTransformCode(scene.weights);
    const auto packed_residual = backend->PackTransformCode(residual.weights);
    std::vector<std::byte> codes(residual.codes.size(), std::byte{0});
    const auto encode = [&](const KeySpan& span) {
      backend->EncodeResiduals({.spans = {&span, 1},
                                .pool = scene.kv.pool(),
                                .layout = scene.kv.layout(),
                                .transform = *packed,
                                .codes = scene.codes.data(),
                                .code_layout = scene.layout,
                                .residual = *packed_residual,
                                .residual_codes = codes.data(),
                                .residual_layout = residual.layout});
    };
    for (int32_t first = 0, last = 0; first < 150; first = last) {
      last = static_cast<int32_t>(std::min<int64_t>(150, first + random.Int(1, 40)));
      encode({scene.kv.table(0), {first, last}});
    }
    encode(scene.spans[1]);
    EXPECT_TRUE(codes == residual.codes) << bits;
  }
}

TEST_P(TransformCodeBackendTest, ReRanksAsTheReferenceDoes) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 12; ++round) {
    const auto bits = static_cast<int32_t>(64 * random.Int(1, 4));
    const auto group = static_cast<int32_t>(random.Int(1, 7));
    const auto block_tokens = static_cast<int32_t>(16 * random.Int(1, 5));
    Scene scene(random, 64, 2, group, bits, {2600, 300}, DType::kBF16, block_tokens);
    if (round % 3 == 0) {  // ties
      for (int32_t token = 0; token < 2600; ++token) {
        if (token % 5 != 0) scene.kv.CopyKey(0, 0, 0, token);
      }
      EncodeTransformKeysRef(scene.spans, scene.kv.pool(), scene.kv.layout(), scene.weights,
                             scene.codes.data(), scene.layout);
    }
    const Residual residual(random, scene, static_cast<int32_t>(64 * random.Int(1, 4)));
    const auto packed = backend->PackTransformCode(scene.weights);
    const auto packed_residual = backend->PackTransformCode(residual.weights);
    Matrix q = Matrix::Normal(random, 5, scene.heads() * 64);
    if (round == 4) q.row(2)[5] = std::nanf("");
    // The first has more candidates than a piece has tokens.
    std::vector<RetrievalQuery> queries = {
        scene.kv.Query(0, 0, 2599, 16, 128, static_cast<int32_t>(random.Int(0, 1200))),
        scene.kv.Query(0, 1, static_cast<int32_t>(random.Int(200, 2599)), 3, 1, 20),
        scene.kv.Query(1, 2, 299, 16, 100, 17), scene.kv.Query(1, 3, 250, 0, 7, 0),
        scene.kv.Query(1, 4, 50, 16, 100, 4)};
    std::vector<float> anchors;
    for (int32_t i = 0; i < 5 * scene.heads(); ++i) anchors.push_back(random.Normal(5.0f));
    anchors[0] = -std::numeric_limits<float>::infinity();
    std::vector<RetrievalQuery> wide = queries;
    for (size_t i = 0; i < queries.size(); ++i) {
      wide[i].k = std::min(2 * queries[i].k, queries[i].mid.size());
      if (random.Int(0, 1) == 0) continue;
      queries[i].least_key = LeastMassKey(std::exp2(-random.Int(1, 16)), group);
    }
    OwnedSelection candidates(5, 2, 2400), wide_expected(5, 2, 2400);
    OwnedSelection kept(5, 2, 2400), expected(5, 2, 2400);
    OwnedScales scales(5, scene.heads()), expected_scales(5, scene.heads());
    SelectByMassRef(q.tensor(), wide, anchors.data(), scene.weights, kScale, scene.codes.data(),
                    scene.layout, wide_expected.view(), nullptr, &expected_scales.view);
    backend->SelectByMass({.q = q.tensor(),
                           .queries = wide,
                           .anchor_masses = anchors.data(),
                           .transform = *packed,
                           .codes = scene.codes.data(),
                           .code_layout = scene.layout,
                           .scale = kScale,
                           .chosen = candidates.view(),
                           .scales = &scales.view});
    ASSERT_TRUE(candidates == wide_expected) << "round " << round;
    for (int32_t i = 0; i < 5; ++i) {
      if (queries[i].mid.size() == 0) continue;
      for (int32_t head = 0; head < scene.heads(); ++head) {
        const int32_t at = i * scene.heads() + head;
        ASSERT_EQ(scales.references[at], expected_scales.references[at]);
        ASSERT_EQ(scales.inverses[at], expected_scales.inverses[at]);
      }
    }
    RerankByMassRef({q.tensor(), queries, scene.weights, scene.codes.data(), scene.layout,
                     residual.weights, residual.codes.data(), residual.layout, kScale,
                     expected_scales.view, candidates.view(), expected.view()});
    const auto rerank = [&](OwnedSelection& to) {
      backend->RerankByMass({.q = q.tensor(),
                             .queries = queries,
                             .transform = *packed,
                             .codes = scene.codes.data(),
                             .code_layout = scene.layout,
                             .residual = *packed_residual,
                             .residual_codes = residual.codes.data(),
                             .residual_layout = residual.layout,
                             .scale = kScale,
                             .scales = scales.view,
                             .candidates = candidates.view(),
                             .kept = to.view()});
    };
    rerank(kept);
    ASSERT_TRUE(kept == expected) << "round " << round;
    rerank(candidates);  // in place
    for (int32_t i = 0; i < 5; ++i) {
      for (int32_t head = 0; head < 2; ++head) {
        ASSERT_EQ(candidates.Of(i, head), expected.Of(i, head)) << "round " << round;
      }
    }
  }
}

// So many tokens that a bound is guessed, and so few different masses that it is of no use.
TEST_P(TransformCodeBackendTest, SelectsLikeTheReferenceWhereMassesAreManyAndWhereTheyTie) {
  for (const bool ties : {false, true}) {
    Scene scene(random, 32, 1, 2, 64, {9000});
    if (ties) {
      for (int32_t token = 0; token < 9000; ++token) {
        if (token % 5 != 0) scene.kv.CopyKey(0, 0, 0, token);
      }
      EncodeTransformKeysRef(scene.spans, scene.kv.pool(), scene.kv.layout(), scene.weights,
                             scene.codes.data(), scene.layout);
    }
    const auto packed = backend->PackTransformCode(scene.weights);
    Matrix q = Matrix::Normal(random, 1, 64);
    RetrievalQuery query =
        scene.kv.Query(0, 0, 8999, 16, 128, static_cast<int32_t>(random.Int(1, 2500)));
    const std::vector<float> anchors = {2, 3};
    for (const double least : {0.0, 1e-5, 1e-4, 1e-3}) {
      query.least_key = LeastMassKey(least, 2);
      OwnedSelection chosen(1, 1, 2500), expected(1, 1, 2500);
      SelectByMassRef(q.tensor(), {&query, 1}, anchors.data(), scene.weights, kScale,
                      scene.codes.data(), scene.layout, expected.view(), nullptr);
      backend->SelectByMass({.q = q.tensor(),
                             .queries = {&query, 1},
                             .anchor_masses = anchors.data(),
                             .transform = *packed,
                             .codes = scene.codes.data(),
                             .code_layout = scene.layout,
                             .scale = kScale,
                             .chosen = chosen.view()});
      EXPECT_TRUE(chosen == expected) << least;
    }
  }
}

// Indexes and coefficients at their largest, where sums of products in 16 bits would be too much.
TEST_P(TransformCodeBackendTest, SelectsLikeTheReferenceWhereAllProductsAreTheLargest) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 20; ++round) {
    Scene scene(random, 64, 1, 4, static_cast<int32_t>(64 * random.Int(1, 4)), {300});
    TransformCodeHead& head = scene.weights.heads[0];
    const int32_t n = 4 * head.quads;
    std::fill(head.key_weight.begin(), head.key_weight.end(), 0.0f);
    std::fill(head.query_weight.begin(), head.query_weight.end(), 0.0f);
    std::fill(head.mean.begin(), head.mean.end(), 0.0f);
    for (int32_t i = 0; i < n; ++i) {
      // An index is 0 or the largest, as the sign of one of three channels of the key says.
      head.key_weight[random.Int(0, 2) * n + i] = 1e6f;
      head.query_weight[i] = 1;
      head.query_weight[n + i] = random.Int(0, 1) == 0 ? -1.0f : 1.0f;
    }
    EncodeTransformKeysRef(scene.spans, scene.kv.pool(), scene.kv.layout(), scene.weights,
                           scene.codes.data(), scene.layout);
    Matrix q(1, 4 * 64);
    q.row(0)[0] = 0.01f;
    q.row(0)[64] = -0.01f;
    q.row(0)[128 + 1] = 0.01f;
    q.row(0)[192 + 1] = 0.02f;
    const RetrievalQuery query = scene.kv.Query(0, 0, 299, 16, 32, 40);
    const std::vector<float> anchors = {0, 1, 0, 1};
    OwnedSelection chosen(1, 1, 40), expected(1, 1, 40);
    OwnedScales scales(1, 4), expected_scales(1, 4);
    SelectByMassRef(q.tensor(), {&query, 1}, anchors.data(), scene.weights, kScale,
                    scene.codes.data(), scene.layout, expected.view(), nullptr,
                    &expected_scales.view);
    const auto packed = backend->PackTransformCode(scene.weights);
    backend->SelectByMass({.q = q.tensor(),
                           .queries = {&query, 1},
                           .anchor_masses = anchors.data(),
                           .transform = *packed,
                           .codes = scene.codes.data(),
                           .code_layout = scene.layout,
                           .scale = kScale,
                           .chosen = chosen.view(),
                           .scales = &scales.view});
    EXPECT_TRUE(chosen == expected);
    EXPECT_EQ(scales.references, expected_scales.references);
    EXPECT_EQ(scales.inverses, expected_scales.inverses);
  }
}

// Whole tiles by four and one by one, blocks of any size, and threads that take whole units or parts of them.
TEST_P(TransformCodeBackendTest, SelectsLikeTheReferenceWhereverMidBeginsAndEnds) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 6; ++round) {
    const auto group = static_cast<int32_t>(random.Int(1, 9));
    const auto bits = static_cast<int32_t>(64 * random.Int(1, 4));
    const auto block_tokens = static_cast<int32_t>(16 * random.Int(1, 9));
    Scene scene(random, 64, 2, group, bits, {1500}, DType::kBF16, block_tokens);
    Matrix q = Matrix::Normal(random, 7, scene.heads() * 64);
    std::vector<RetrievalQuery> queries;
    for (int32_t i = 0; i < 7; ++i) {
      const auto sink = static_cast<int32_t>(random.Int(0, 700));
      RetrievalQuery query = scene.kv.Query(0, i, static_cast<int32_t>(random.Int(800, 1499)), sink,
                                            static_cast<int32_t>(random.Int(1, 90)), 0);
      query.k = static_cast<int32_t>(random.Int(0, query.mid.size()));
      queries.push_back(query);
    }
    std::vector<float> anchors;
    for (int32_t i = 0; i < 7 * scene.heads(); ++i) anchors.push_back(random.Normal(5.0f));
    OwnedSelection expected(7, 2, 1500);
    OwnedTail expected_tail(7, scene.heads());
    OwnedScales expected_scales(7, scene.heads());
    SelectByMassRef(q.tensor(), queries, anchors.data(), scene.weights, kScale, scene.codes.data(),
                    scene.layout, expected.view(), &expected_tail.view, &expected_scales.view);
    for (const int threads : {1, 2, 3, 7}) {
      const auto other = Make(threads);
      const auto packed = other->PackTransformCode(scene.weights);
      OwnedSelection chosen(7, 2, 1500);
      OwnedTail tail(7, scene.heads());
      OwnedScales scales(7, scene.heads());
      other->SelectByMass({.q = q.tensor(),
                           .queries = queries,
                           .anchor_masses = anchors.data(),
                           .transform = *packed,
                           .codes = scene.codes.data(),
                           .code_layout = scene.layout,
                           .scale = kScale,
                           .chosen = chosen.view(),
                           .tail = &tail.view,
                           .scales = &scales.view});
      ASSERT_TRUE(chosen == expected) << threads << " threads, round " << round;
      ASSERT_EQ(tail.masses, expected_tail.masses) << threads << " threads, round " << round;
      ASSERT_EQ(tail.references, expected_tail.references);
      ASSERT_EQ(scales.inverses, expected_scales.inverses);
    }
  }
}

// Dots of a sequence so long that no thread keeps them: they are computed twice.
TEST_P(TransformCodeBackendTest, SelectsTheSameFromDotsThatAreKeptAndComputedAgain) {
  constexpr int32_t kTokens = 70000, kGroup = 16;  // 4.6 MB of dots
  Scene scene(random, 16, 1, kGroup, 64, {2000});
  // The same blocks over and over: the reference encodes few keys.
  std::vector<int32_t> table;
  for (int32_t i = 0; i <= kTokens / 64; ++i) table.push_back(scene.kv.table(0)[random.Int(0, 30)]);
  const auto packed = backend->PackTransformCode(scene.weights);
  Matrix q = Matrix::Normal(random, 1, kGroup * 16);
  const std::vector<float> anchors(kGroup, 2.0f);
  RetrievalQuery query;
  query.block_table = table;
  query.position = kTokens;
  query.mid = {16, kTokens};
  query.k = 500;
  const auto select = [&](Backend& by, OwnedSelection& chosen, OwnedTail& tail) {
    by.SelectByMass({.q = q.tensor(),
                     .queries = {&query, 1},
                     .anchor_masses = anchors.data(),
                     .transform = *packed,
                     .codes = scene.codes.data(),
                     .code_layout = scene.layout,
                     .scale = kScale,
                     .chosen = chosen.view(),
                     .tail = &tail.view});
  };
  OwnedSelection one(1, 1, 500), many(1, 1, 500);
  OwnedTail one_tail(1, kGroup), many_tail(1, kGroup);
  select(*Make(1), one, one_tail);
  select(*Make(7), many, many_tail);
  EXPECT_TRUE(one == many);
  EXPECT_EQ(one_tail.masses, many_tail.masses);
}

// All steps from 0 down to nothing, at places before and behind the last whole vectors, and of every reference that a row
// or a state may have.
TEST_P(TransformCodeBackendTest, PowersHaveTheReferencesBitsDownToNothing) {
  const CpuOps& ops = *FindCpuOps(GetParam().c_str());
  constexpr int32_t kQueries = 5;
  std::vector<int16_t> steps(size_t{kQueries} * kMassStride);
  std::vector<uint16_t> distances(kMassStride);
  std::vector<int32_t> fixed(size_t{2} * kMassAddQueries * kMassStride);
  uint8_t cells[kMassStride];
  for (int32_t i = 0; i < kMassStride; ++i) cells[i] = static_cast<uint8_t>(i % 256);
  for (int32_t first = 0, round = 0; first < 2 * kMassStepMost; first += 499, ++round) {
    const auto count = 480 + round % 33;
    std::vector<MassHead> heads;
    for (int32_t g = 0; g < kQueries; ++g) {
      const int32_t of_query[] = {kMassStepMost, kMassStepMost + 3000, 1 << 20, 0, -(1 << 20)};
      heads.push_back({0, 0, of_query[g], 0.25f + static_cast<float>(g)});
      for (int32_t i = 0; i < kMassStride; ++i) {
        const int32_t below = i == round % 40 ? 0 : std::min(first + i, 2 * kMassStepMost);
        steps[g * kMassStride + i] = static_cast<int16_t>(kMassStepMost - below);
      }
    }
    int64_t sum = 0;
    std::vector<int64_t> masses(size_t{kMassAddQueries} * 256), second(masses), expected(masses),
        expected_second(masses);
    ops.mass_weights(heads.data(), kQueries, steps.data(), count, distances.data(), fixed.data());
    ops.mass_add(fixed.data(), cells, 0, count, masses.data());
    ops.mass_add(fixed.data() + int64_t{kMassAddQueries} * kMassStride, cells, 0, count,
                 second.data());
    for (int32_t i = 0; i < count; ++i) {
      float mass = 0;
      for (int32_t g = 0; g < kQueries; ++g) {
        const float weight = MassPower(steps[g * kMassStride + i] - heads[g].reference);
        mass = std::fmaf(weight, heads[g].inverse, mass);
        int64_t* of_cell =
            &(g < kMassAddQueries ? expected : expected_second)[size_t{kMassAddQueries} * cells[i]];
        of_cell[g % kMassAddQueries] += static_cast<int64_t>(weight * 0x1p30f);
      }
      sum += static_cast<int64_t>(std::rint(MassPower(steps[i] - kMassStepMost) * 0x1p22f));
      ASSERT_EQ(distances[i], kMassKeyBins - 1 - MassKey(mass)) << steps[i];
    }
    ASSERT_EQ(masses, expected) << first;
    ASSERT_EQ(second, expected_second) << first;
    int32_t peak = 1;
    ASSERT_EQ(ops.mass_sum(steps.data(), count, &peak), sum) << first;
    ASSERT_EQ(peak, kMassStepMost);
    ASSERT_EQ(ops.mass_sum(steps.data() + round % 40 + 1, count / 2, &peak), [&] {
      int64_t behind = 0;
      const int16_t* from = &steps[round % 40 + 1];
      const int32_t most = *std::max_element(from, from + count / 2);
      for (int32_t i = 0; i < count / 2; ++i) {
        behind += static_cast<int64_t>(std::rint(MassPower(from[i] - most) * 0x1p22f));
      }
      return behind;
    }());
  }
}

TEST_P(TransformCodeBackendTest, ExtendsTablesAsTheReferenceDoesHoweverTheyAreCut) {
  Scene scene(random, 64, 3, 1, 128, {700});
  const auto packed = backend->PackTransformCode(scene.weights);
  std::vector<float> data(CellTableFloats(3, 64), 5), expected(data);
  Summary table{data.data(), {16, 16}}, expected_table{expected.data(), {16, 16}};
  const CellTableExtension all{&expected_table, scene.kv.table(0), scene.kv.table(0), 640};
  ExtendCellTablesRef({&all, 1}, scene.kv.pool(), scene.kv.layout(), scene.weights,
                      scene.codes.data(), scene.layout);
  for (int32_t last = 16; last < 640;) {
    last = static_cast<int32_t>(std::min<int64_t>(640, (last / 64 + random.Int(1, 4)) * 64));
    const CellTableExtension extension{&table, scene.kv.table(0), scene.kv.table(0), last};
    backend->ExtendCellTables({&extension, 1}, scene.kv.pool(), scene.kv.layout(), *packed,
                              scene.codes.data(), scene.layout);
  }
  EXPECT_EQ(table.tokens, expected_table.tokens);
  EXPECT_EQ(data, expected);
}

TEST_P(TransformCodeBackendTest, MergesTailsAsTheReferenceDoes) {
  Scene scene(random, 64, 2, 3, 128, {700});
  scene.weights.heads[0].tail = false;
  const auto packed = backend->PackTransformCode(scene.weights);
  std::vector<float> data(CellTableFloats(2, 64));
  Summary table{data.data(), {16, 16}};
  const CellTableExtension extension{&table, scene.kv.table(0), scene.kv.table(0), 640};
  ExtendCellTablesRef({&extension, 1}, scene.kv.pool(), scene.kv.layout(), scene.weights,
                      scene.codes.data(), scene.layout);
  const int64_t floats = AttentionStateFloats(64);
  OwnedTail tail(2, 6);
  for (int64_t& mass : tail.masses) mass = random.Int(0, 1) * random.Int(0, 1 << 30);
  std::fill_n(tail.masses.begin() + 4 * kTransformCells, kTransformCells, 0);
  for (float& reference : tail.references) reference = random.Normal(20);
  std::vector<float> states(2 * 6 * floats);
  for (float& value : states) value = random.Normal();
  for (int32_t i = 0; i < 12; ++i) states[i * floats + 65] = 1 + random.Normal() * random.Normal();
  for (int32_t i = 0; i < 12; ++i) states[i * floats + 65] = std::fabs(states[i * floats + 65]);
  std::vector<float> expected = states, before = states;
  const std::vector<RetrievalQuery> queries(2, scene.kv.Query(0, 0, 699, 16, 100, 3));
  const float* const tables[] = {table.data, table.data};
  MergeTailsRef(queries, tables, scene.weights, tail.view, 64, expected.data());
  backend->MergeTails(queries, tables, *packed, tail.view, 64, states.data());
  for (size_t i = 0; i < states.size(); ++i) {
    ASSERT_NEAR(states[i], expected[i], 2e-4 * (1 + std::fabs(expected[i]))) << i;
  }
  // Heads without a tail, and a query head without mass, keep their bits.
  for (int64_t i = 0; i < 3 * floats; ++i) ASSERT_EQ(states[i], before[i]);
  for (int64_t i = 4 * floats; i < 5 * floats; ++i) ASSERT_EQ(states[i], before[i]);
}

}  // namespace
}  // namespace winnow::kernels
