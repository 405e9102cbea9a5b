#include "kernels/logit_select.h"

#include "tests/unit/kernels/retrieval_testing.h"

namespace winnow::kernels {
namespace {

class LogitSelectTest : public EachIsa {
 protected:
  // Queries at random positions of random sequences, one of them with an empty mid.
  std::vector<RetrievalQuery> AnyQueries(const PagedKv& kv, int sequences, int32_t rows) {
    std::vector<RetrievalQuery> queries;
    for (int32_t row = 0; row < rows; ++row) {
      const int sequence = static_cast<int>(random_.Int(0, sequences - 1));
      const auto position = static_cast<int32_t>(random_.Int(0, kv.length(sequence) - 1));
      const auto sink = static_cast<int32_t>(random_.Int(0, 16));
      const auto window = static_cast<int32_t>(random_.Int(1, 40));
      const auto k = static_cast<int32_t>(random_.Int(0, 60));
      queries.push_back(kv.Query(sequence, row, position, sink, window, k));
    }
    return queries;
  }
  // Intersection over union as MeasureSelectionRef computes it, from the scores of mid, whose first token is `first`.
  static double Iou(std::span<const double> scores, int32_t first,
                    const std::vector<int32_t>& chosen) {
    std::vector<int32_t> both, wanted = TopKRef(scores, static_cast<int64_t>(chosen.size()));
    for (int32_t& token : wanted) token += first;
    std::set_intersection(chosen.begin(), chosen.end(), wanted.begin(), wanted.end(),
                          std::back_inserter(both));
    const auto common = static_cast<double>(both.size());
    return chosen.empty() ? 1 : common / (2 * static_cast<double>(chosen.size()) - common);
  }
  // The scores with the k-th and the next one in the other order, if they are so near that float32 may have it.
  static std::vector<double> InTheOtherOrder(std::vector<double> scores, size_t k) {
    if (k == 0 || k >= scores.size()) return scores;
    std::vector<int32_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return scores[a] != scores[b] ? scores[a] > scores[b] : a > b;
    });
    double &last = scores[order[k - 1]], &next = scores[order[k]];
    if (last - next < 1e-5 * last) std::swap(last, next);
    return scores;
  }
};
WINNOW_FOR_EACH_ISA(LogitSelectTest);

TEST_P(LogitSelectTest, ChoosesWhatTheReferenceChooses) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 12; ++round) {
    const KvLayout layout{static_cast<int32_t>(random_.Int(1, 2)), AnyHeadDimTo256(random_),
                          static_cast<int32_t>(16 * random_.Int(1, 5)), AnyKvType(random_)};
    const auto group = random_.Int(1, 8);
    PagedKv kv(random_, layout, {static_cast<int32_t>(random_.Int(1, 1400)), 300});
    Matrix q = Matrix::Normal(random_, 4, layout.kv_heads * group * layout.head_dim, 2.0f);
    const auto queries = AnyQueries(kv, 2, 4);
    const float scale = 1.0f / std::sqrt(static_cast<float>(layout.head_dim));
    OwnedSelection chosen(4, layout.kv_heads, 61);
    Make(static_cast<int>(random_.Int(1, 3)))
        ->SelectByLogits(q.tensor(), queries, kv.pool(), layout, scale, chosen.view());
    EXPECT_TRUE(chosen.GuardsIntact());
    for (int i = 0; i < 4; ++i) {
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        const auto scores = LogitScoresRef(q.tensor(), queries[i], kv.pool(), layout, scale, head);
        const TokenRange mid = queries[i].mid;
        if (mid.size() == 0) {
          EXPECT_TRUE(chosen.Of(i, head).empty());
          continue;
        }
        ExpectTopK(chosen.Of(i, head), std::span(scores).subspan(mid.first, mid.size()), mid.first,
                   queries[i].k, 1e-4);
      }
    }
  }
}

// A head that has all it needs in an anchor has no say, however loud its logits.
TEST_P(LogitSelectTest, TheMassIsOverAnchorsToo) {
  const KvLayout layout{1, 64, 16, DType::kF32};
  PagedKv kv(random_, layout, {100}, 0.0f);  // keys are zero
  Matrix q(1, 2 * 64);
  q.row(0)[0] = 8;            // the first head sees channel 0,
  q.row(0)[64 + 1] = 8;       // the second channel 1
  kv.SetKey(0, 0, 0, 0, 10);  // the sink holds all of the first head's mass
  kv.SetKey(0, 0, 40, 0, 5);  // the first head's best of mid: exp(40 - 80)
  kv.SetKey(0, 0, 60, 1, 1);  // the second head's: exp(8) of exp(8) + 99
  const std::vector<RetrievalQuery> queries = {kv.Query(0, 0, 99, 4, 10, 1)};
  OwnedSelection chosen(1, 1, 1);
  Make(1)->SelectByLogits(q.tensor(), queries, kv.pool(), layout, 1.0f, chosen.view());
  EXPECT_EQ(chosen.Of(0, 0), std::vector<int32_t>{60});
}

// Below 2^-126 a mass is zero, though float32 has smaller ones: of zeros the later are chosen.
TEST_P(LogitSelectTest, MassesBelowTheLeastNormalNumberAreZero) {
  PagedKv kv = KvOfFadingMasses(random_, DType::kF32);
  Matrix q(1, 64);
  q.row(0)[0] = 1;
  const std::vector<RetrievalQuery> queries = {kv.Query(0, 0, 99, 4, 10, 3)};
  OwnedSelection chosen(1, 1, 3);
  Make(1)->SelectByLogits(q.tensor(), queries, kv.pool(), kv.layout(), std::log(2.0f),
                          chosen.view());
  EXPECT_EQ(chosen.Of(0, 0), std::vector<int32_t>({kHeavyOfFading, 88, 89}));
}

TEST_P(LogitSelectTest, OfEqualScoresTheLaterTokensAreChosen) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, AnyHeadDimTo256(random_), 32, AnyKvType(random_)};
  PagedKv kv(random_, layout, {700});
  for (int32_t t = 1; t < 700; ++t) kv.CopyKey(0, 0, 0, t);
  Matrix q = Matrix::Normal(random_, 1, 3 * layout.head_dim);
  const auto backend = Make(2);
  for (const int32_t k : {1, 5, 100, 555}) {
    const std::vector<RetrievalQuery> queries = {kv.Query(0, 0, 698, 13, 50, k)};
    OwnedSelection chosen(1, 1, 600);
    backend->SelectByLogits(q.tensor(), queries, kv.pool(), layout, 0.125f, chosen.view());
    std::vector<int32_t> last(queries[0].k);
    std::iota(last.begin(), last.end(), queries[0].mid.last - queries[0].k);
    EXPECT_EQ(chosen.Of(0, 0), last);
  }
}

// Copies of one key in any places score the same bits, so that the rule for ties decides.
TEST_P(LogitSelectTest, EqualKeysAreEqualWhereverTheyStand) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 10; ++round) {
    const KvLayout layout{1, AnyHeadDimTo256(random_), 16, AnyKvType(random_)};
    PagedKv kv(random_, layout, {1300});
    Matrix q = Matrix::Normal(random_, 1, 4 * layout.head_dim);
    std::vector<int32_t> copies;
    for (int32_t c = 0; c < layout.head_dim; ++c) {  // the best key there can be
      float sum = 0;
      for (int g = 0; g < 4; ++g) sum += q.row(0)[g * layout.head_dim + c];
      kv.SetKey(0, 0, 700, c, 3 * sum);
    }
    for (int i = 0; i < 40; ++i) copies.push_back(static_cast<int32_t>(random_.Int(20, 1199)));
    copies.push_back(700);
    std::sort(copies.begin(), copies.end());
    copies.erase(std::unique(copies.begin(), copies.end()), copies.end());
    for (const int32_t t : copies) {
      if (t != 700) kv.CopyKey(0, 0, 700, t);
    }
    const auto k = static_cast<int32_t>(random_.Int(1, static_cast<int64_t>(copies.size())));
    const std::vector<RetrievalQuery> queries = {kv.Query(0, 0, 1299, 20, 100, k)};
    OwnedSelection chosen(1, 1, k);
    Make(1)->SelectByLogits(q.tensor(), queries, kv.pool(), layout, 0.125f, chosen.view());
    EXPECT_EQ(chosen.Of(0, 0), std::vector<int32_t>(copies.end() - k, copies.end()));
  }
}

TEST_P(LogitSelectTest, TheSameOnAnyNumberOfThreadsAloneAndAmongOthers) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{2, AnyHeadDimTo256(random_), 64, AnyKvType(random_)};
  PagedKv kv(random_, layout, {2500, 90});
  Matrix q = Matrix::Normal(random_, 5, 2 * 3 * layout.head_dim);
  const auto queries = AnyQueries(kv, 2, 5);
  OwnedSelection expected(5, 2, 60);
  std::vector<SelectionQuality> expected_quality(10);
  const auto one = Make(1);
  one->SelectByLogits(q.tensor(), queries, kv.pool(), layout, 0.125f, expected.view());
  one->MeasureSelection({.q = q.tensor(),
                         .queries = queries,
                         .pool = kv.pool(),
                         .layout = layout,
                         .scale = 0.125f,
                         .chosen = expected.view(),
                         .quality = expected_quality.data()});
  for (int threads = 2; threads <= 4; ++threads) {
    const auto backend = Make(threads);
    OwnedSelection chosen(5, 2, 60);
    backend->SelectByLogits(q.tensor(), queries, kv.pool(), layout, 0.125f, chosen.view());
    EXPECT_TRUE(chosen == expected) << threads << " threads";
    for (int i = 0; i < 5; ++i) {
      OwnedSelection alone(1, 2, 60);
      SelectionQuality quality[2];
      const std::span<const RetrievalQuery> query(&queries[i], 1);
      backend->SelectByLogits(q.tensor(), query, kv.pool(), layout, 0.125f, alone.view());
      backend->MeasureSelection({.q = q.tensor(),
                                 .queries = query,
                                 .pool = kv.pool(),
                                 .layout = layout,
                                 .scale = 0.125f,
                                 .chosen = alone.view(),
                                 .quality = quality});
      for (int32_t head = 0; head < 2; ++head) {
        EXPECT_EQ(alone.Of(0, head), expected.Of(i, head));
        EXPECT_EQ(quality[head].coverage, expected_quality[2 * i + head].coverage);
        EXPECT_EQ(quality[head].iou, 1.0f);
      }
    }
  }
}

TEST_P(LogitSelectTest, ExtremeLogitsStillMakeAChoice) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 16, DType::kF32};
  PagedKv kv(random_, layout, {1000}, 400.0f);  // logits of both signs up to about 1e4
  Matrix q = Matrix::Normal(random_, 1, 4 * 64);
  // Four heads, and room for 16: in one run of a hundred two logits of a head are so near that both have a share.
  const std::vector<RetrievalQuery> queries = {kv.Query(0, 0, 999, 0, 1, 16)};
  OwnedSelection chosen(1, 1, 16);
  Make(2)->SelectByLogits(q.tensor(), queries, kv.pool(), layout, 1.0f, chosen.view());
  // Each head's best token, unless it is the query's own, has a mass near one.
  const auto scores = LogitScoresRef(q.tensor(), queries[0], kv.pool(), layout, 1.0f, 0);
  const auto tokens = chosen.Of(0, 0);
  for (int32_t t = 0; t < 999; ++t) {
    if (scores[t] > 0.1) {
      EXPECT_TRUE(std::binary_search(tokens.begin(), tokens.end(), t)) << "token " << t;
    }
  }
}

TEST_P(LogitSelectTest, MeasuresWhatTheReferenceMeasures) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 10; ++round) {
    const KvLayout layout{2, AnyHeadDimTo256(random_), 48, AnyKvType(random_)};
    const auto group = random_.Int(1, 5);
    PagedKv kv(random_, layout, {static_cast<int32_t>(random_.Int(200, 1200))});
    Matrix q = Matrix::Normal(random_, 3, 2 * group * layout.head_dim, 3.0f);
    const auto queries = AnyQueries(kv, 1, 3);
    OwnedSelection chosen(3, 2, 60);
    for (int i = 0; i < 3; ++i) {
      for (int32_t head = 0; head < 2; ++head) {  // some of the best, some of any
        const auto scores = LogitScoresRef(q.tensor(), queries[i], kv.pool(), layout, 0.125f, head);
        const TokenRange mid = queries[i].mid;
        const auto best = TopKRef(std::span(scores).subspan(mid.first, mid.size()), queries[i].k);
        std::vector<int32_t> tokens;
        for (const int32_t t : best) {
          tokens.push_back(
              mid.first +
              (random_.Int(0, 1) == 0 ? t : static_cast<int32_t>(random_.Int(0, mid.size() - 1))));
        }
        std::sort(tokens.begin(), tokens.end());
        tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
        chosen.Set(i, head, tokens);
      }
    }
    std::vector<SelectionQuality> expected(6), actual(6);
    MeasureSelectionRef(q.tensor(), queries, kv.pool(), layout, 0.125f, chosen.view(),
                        expected.data());
    Make(2)->MeasureSelection({.q = q.tensor(),
                               .queries = queries,
                               .pool = kv.pool(),
                               .layout = layout,
                               .scale = 0.125f,
                               .chosen = chosen.view(),
                               .quality = actual.data()});
    for (int unit = 0; unit < 6; ++unit) {
      EXPECT_NEAR(actual[unit].coverage, expected[unit].coverage, 1e-5);
      if (std::abs(actual[unit].iou - expected[unit].iou) <= 1e-6) continue;
      // Right all the same if one of two nearly equal scores was chosen, and the oracle takes the other.
      const RetrievalQuery& query = queries[unit / 2];
      const auto scores = LogitScoresRef(q.tensor(), query, kv.pool(), layout, 0.125f, unit % 2);
      const std::vector<int32_t> tokens = chosen.Of(unit / 2, unit % 2);
      const auto other = InTheOtherOrder(
          {scores.begin() + query.mid.first, scores.begin() + query.mid.last}, tokens.size());
      EXPECT_NEAR(actual[unit].iou, Iou(other, query.mid.first, tokens), 1e-6)
          << "not " << expected[unit].iou;
    }
  }
}

TEST_P(LogitSelectTest, EverythingCoversAllAndNothingCoversTheAnchors) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 64, DType::kBF16};
  PagedKv kv(random_, layout, {600});
  Matrix q = Matrix::Normal(random_, 1, 4 * 64);
  const std::vector<RetrievalQuery> queries = {kv.Query(0, 0, 599, 16, 100, 0)};
  const auto backend = Make(2);
  const TokenRange mid = queries[0].mid;
  OwnedSelection chosen(1, 1, 600);
  SelectionQuality quality;
  std::vector<int32_t> all(mid.size());
  std::iota(all.begin(), all.end(), mid.first);
  chosen.Set(0, 0, all);
  backend->MeasureSelection({.q = q.tensor(),
                             .queries = queries,
                             .pool = kv.pool(),
                             .layout = layout,
                             .scale = 0.125f,
                             .chosen = chosen.view(),
                             .quality = &quality});
  EXPECT_NEAR(quality.coverage, 1.0, 1e-5);
  EXPECT_EQ(quality.iou, 1.0f);
  chosen.Set(0, 0, {});
  backend->MeasureSelection({.q = q.tensor(),
                             .queries = queries,
                             .pool = kv.pool(),
                             .layout = layout,
                             .scale = 0.125f,
                             .chosen = chosen.view(),
                             .quality = &quality});
  const auto scores = LogitScoresRef(q.tensor(), queries[0], kv.pool(), layout, 0.125f, 0);
  const double of_mid =
      std::accumulate(scores.begin() + mid.first, scores.begin() + mid.last, 0.0) / 4;
  EXPECT_NEAR(quality.coverage, 1 - of_mid, 1e-5);
  EXPECT_EQ(quality.iou, 1.0f);
}

}  // namespace
}  // namespace winnow::kernels
