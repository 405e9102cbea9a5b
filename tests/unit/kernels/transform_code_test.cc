#include "kernels/transform_code.h"

#include <cmath>
#include <numeric>

#include "kernels/attention_state.h"
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

TEST(TransformCodeTest, FieldsFillEveryWordForAnyWidths) {
  Random random;
  SCOPED_TRACE(random.seed());
  for (int round = 0; round < 300; ++round) {
    const auto bits = static_cast<int32_t>(64 * random.Int(1, 4));
    const TransformCodeWeights weights = RandomTransform(random, 128, 2, bits);
    ASSERT_EQ(CheckTransformCode(weights), "");
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
        double denominator = std::exp(static_cast<double>(anchors[head]));
        for (const double logit : logits) denominator += std::exp2(logit);
        double unread = 0;
        const std::vector<int32_t> tokens = chosen.Of(0, kv_head);
        for (size_t j = 0; j < logits.size(); ++j) {
          sums[j] += std::exp2(logits[j]) / denominator;
          const bool read = std::binary_search(tokens.begin(), tokens.end(),
                                               query.mid.first + static_cast<int32_t>(j));
          if (!read) unread += std::exp2(logits[j] - tail.references[head]);
        }
        double kept = 0;
        for (int32_t c = 0; c < kTransformCells; ++c) {
          kept += static_cast<double>(tail.masses[head * kTransformCells + c]) * 0x1p-30;
        }
        EXPECT_NEAR(kept, unread, 1e-4 * unread + query.mid.size() * 0x1p-30);
      }
      ExpectTopK(chosen.Of(0, kv_head), sums, query.mid.first, 40, 0.004);  // keys have 10 bits
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

}  // namespace
}  // namespace winnow::kernels
