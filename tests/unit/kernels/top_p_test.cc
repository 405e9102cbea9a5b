#include "kernels/top_p.h"

#include <cmath>

#include "kernels/int4_keys.h"
#include "tests/unit/kernels/retrieval_testing.h"

namespace winnow::kernels {
namespace {

class TopPTest : public EachIsa {
 protected:
  static std::vector<std::byte> Quantize(const PagedKv& kv, int sequences) {
    std::vector<std::byte> keys(kv.num_blocks() * Int4BlockBytes(kv.layout()), std::byte{0xff});
    std::vector<KeySpan> spans;
    for (int i = 0; i < sequences; ++i) spans.push_back({kv.table(i), {0, kv.length(i)}});
    QuantizeKeysRef(spans, kv.pool(), kv.layout(), keys.data());
    return keys;
  }
  // `count` tokens of the query's mid, ascending.
  std::vector<int32_t> AnyOfMid(const RetrievalQuery& query, int64_t count) {
    std::vector<int32_t> tokens(query.mid.size());
    std::iota(tokens.begin(), tokens.end(), query.mid.first);
    random_.Shuffle(tokens);
    tokens.resize(std::min<size_t>(count, tokens.size()));
    std::sort(tokens.begin(), tokens.end());
    return tokens;
  }
  static std::vector<int32_t> AnchorsOf(const RetrievalQuery& query) {
    std::vector<int32_t> anchors;
    for (int32_t t = 0; t <= query.position; ++t) {
      if (t < query.mid.first || t >= query.mid.last) anchors.push_back(t);
    }
    return anchors;
  }
};
WINNOW_FOR_EACH_ISA(TopPTest);

// Against a plain sort and cut. What float32 may decide the other way: candidates whose weight is
// that of a head's cut to 1e-5, and cuts whose sum is p to 1e-6.
TEST_P(TopPTest, KeepsWhatSortingAndCuttingKeeps) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 30; ++round) {
    const KvLayout layout{static_cast<int32_t>(random_.Int(1, 2)), AnyHeadDimTo256(random_),
                          static_cast<int32_t>(16 * random_.Int(1, 5)), AnyKvType(random_)};
    const auto group = random_.Int(1, 6);
    PagedKv kv(random_, layout, {static_cast<int32_t>(random_.Int(200, 1300))});
    const auto keys = Quantize(kv, 1);
    const float strength = random_.Int(0, 1) == 0 ? 1.0f : 4.0f;
    Matrix q = Matrix::Normal(random_, 3, layout.kv_heads * group * layout.head_dim, strength);
    const float p = static_cast<float>(random_.Int(0, 999)) / 1000.0f;
    SCOPED_TRACE(testing::Message() << "p " << p << " d " << layout.head_dim << " G " << group);
    const float scale = 1.0f / std::sqrt(static_cast<float>(layout.head_dim));
    std::vector<RetrievalQuery> queries;
    OwnedSelection candidates(3, layout.kv_heads, 900), kept(3, layout.kv_heads, 900);
    for (int32_t i = 0; i < 3; ++i) {
      queries.push_back(kv.Query(0, i, static_cast<int32_t>(random_.Int(150, kv.length(0) - 1)),
                                 static_cast<int32_t>(random_.Int(0, 16)),
                                 static_cast<int32_t>(random_.Int(1, 64)), 0));
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        candidates.Set(i, head, AnyOfMid(queries[i], random_.Int(0, 900)));
      }
    }
    Make(static_cast<int>(random_.Int(1, 3)))
        ->PruneSelection({.q = q.tensor(),
                          .queries = queries,
                          .int4_keys = keys.data(),
                          .layout = layout,
                          .scale = scale,
                          .p = p,
                          .candidates = candidates.view(),
                          .kept = kept.view()});
    EXPECT_TRUE(kept.GuardsIntact());
    for (int32_t i = 0; i < 3; ++i) {
      const std::vector<int32_t> anchors = AnchorsOf(queries[i]);
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        const std::vector<int32_t> tokens = candidates.Of(i, head), result = kept.Of(i, head);
        std::vector<int32_t> all = anchors;
        all.insert(all.end(), tokens.begin(), tokens.end());
        ASSERT_TRUE(std::is_sorted(result.begin(), result.end()));
        ASSERT_TRUE(std::includes(tokens.begin(), tokens.end(), result.begin(), result.end()));
        std::vector<bool> must(tokens.size()), may(tokens.size());
        for (int64_t g = 0; g < group; ++g) {
          const auto weights = EstimatedWeightsRef(q.tensor(), queries[i], keys.data(), layout,
                                                   scale, head * group + g, all);
          const std::span<const double> of_all(weights);
          const auto of_anchors = of_all.first(anchors.size());
          const auto of_mid = of_all.subspan(anchors.size());
          const auto less = TopPRef(of_anchors, of_mid, p - 1e-6);
          const auto more = TopPRef(of_anchors, of_mid, std::min(p + 1e-6, 0.9999999));
          double cut = INFINITY,
                 next = 0;  // the least weight that is surely kept, the most that is surely not
          for (size_t j = 0; j < tokens.size(); ++j) {
            if (less[j]) cut = std::min(cut, of_mid[j]);
            if (!more[j]) next = std::max(next, of_mid[j]);
          }
          for (size_t j = 0; j < tokens.size(); ++j) {
            if (less[j] && of_mid[j] > next * (1 + 1e-5)) must[j] = true;
            if (more[j] || of_mid[j] >= cut * (1 - 1e-5)) may[j] = true;
          }
        }
        for (size_t j = 0; j < tokens.size(); ++j) {
          const bool is_kept = std::binary_search(result.begin(), result.end(), tokens[j]);
          ASSERT_FALSE(must[j] && !is_kept) << "token " << tokens[j];
          ASSERT_FALSE(!may[j] && is_kept) << "token " << tokens[j];
        }
      }
    }
  }
}

// Weights that are powers of two, so that every sum is exact and the cut is known.
TEST_P(TopPTest, CutsExactlyWhereTheWeightIsReached) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, AnyHeadDimTo256(random_), 16, AnyWideKvType(random_)};
  PagedKv kv(random_, layout, {64}, 0.0f);
  // Logits 0, -1, -2, ... in base 2 by one channel that four bits hold exactly: zero is the
  // channel's own value, all others 0, so the code is 0 for it and 15 for them.
  const auto logit = [&](int32_t token, int value) {
    kv.SetKey(0, 0, token, 3, static_cast<float>(value) * 15);
  };
  for (int32_t t = 0; t < 64; ++t) logit(t, -40);
  logit(0, -1);   // the anchor: 1/2
  logit(10, -2);  // candidates: 1/4,
  logit(30, -3);  // 1/8,
  logit(20, -4);  // 1/16, twice
  logit(25, -4);
  const auto keys = Quantize(kv, 1);
  Matrix q(1, layout.head_dim);
  q.row(0)[3] = 1.0f / 15;
  const RetrievalQuery query = kv.Query(0, 0, 63, 1, 5, 0);
  const std::vector<RetrievalQuery> queries = {query};
  OwnedSelection candidates(1, 1, 8);
  candidates.Set(0, 0, {10, 20, 25, 30});
  const auto backend = Make(1);
  const auto keep = [&](float p) {
    OwnedSelection kept(1, 1, 8);
    backend->PruneSelection({.q = q.tensor(),
                             .queries = queries,
                             .int4_keys = keys.data(),
                             .layout = layout,
                             .scale = std::log(2.0f),
                             .p = p,
                             .candidates = candidates.view(),
                             .kept = kept.view()});
    return kept.Of(0, 0);
  };
  using Tokens = std::vector<int32_t>;
  // The window's five tokens weigh 2^-40 each; the sum is 1 + 5 * 2^-40, so a hair of p is left.
  EXPECT_EQ(keep(0.0f), Tokens({}));
  EXPECT_EQ(keep(0.49f), Tokens({}));
  EXPECT_EQ(keep(0.51f), Tokens({10}));
  EXPECT_EQ(keep(0.749f), Tokens({10}));
  EXPECT_EQ(keep(0.751f), Tokens({10, 30}));
  EXPECT_EQ(keep(0.874f), Tokens({10, 30}));
  EXPECT_EQ(keep(0.876f), Tokens({10, 25, 30}));  // of equals the later
  EXPECT_EQ(keep(0.937f), Tokens({10, 25, 30}));
  EXPECT_EQ(keep(0.938f), Tokens({10, 20, 25, 30}));
  EXPECT_EQ(keep(1.0f), Tokens({10, 20, 25, 30}));
}

TEST_P(TopPTest, OfEqualWeightsTheLaterAreKept) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, AnyHeadDimTo256(random_), 32, AnyKvType(random_)};
  PagedKv kv(random_, layout, {500});
  for (int32_t t = 1; t < 500; ++t) kv.CopyKey(0, 0, 0, t);
  const auto keys = Quantize(kv, 1);
  Matrix q = Matrix::Normal(random_, 1, 3 * layout.head_dim);
  const std::vector<RetrievalQuery> queries = {kv.Query(0, 0, 499, 10, 40, 0)};
  const std::vector<int32_t> tokens = AnyOfMid(queries[0], 150);
  OwnedSelection candidates(1, 1, 150), kept(1, 1, 150);
  candidates.Set(0, 0, tokens);
  // 50 anchors and 150 candidates of equal weight: 0.7 of 200 is 140, 90 of them candidates.
  // (0.7f is a little less than 0.7.)
  Make(2)->PruneSelection({.q = q.tensor(),
                           .queries = queries,
                           .int4_keys = keys.data(),
                           .layout = layout,
                           .scale = 0.125f,
                           .p = 0.7f,
                           .candidates = candidates.view(),
                           .kept = kept.view()});
  EXPECT_EQ(kept.Of(0, 0), std::vector<int32_t>(tokens.end() - 90, tokens.end()));
}

TEST_P(TopPTest, POfOneKeepsEveryWeightThatIsNotZero) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 32, DType::kF32};
  PagedKv kv(random_, layout, {600});
  Matrix q = Matrix::Normal(random_, 1, 2 * 64);
  const std::vector<RetrievalQuery> queries = {kv.Query(0, 0, 599, 16, 64, 0)};
  OwnedSelection candidates(1, 1, 400), kept(1, 1, 400);
  candidates.Set(0, 0, AnyOfMid(queries[0], 400));
  const auto backend = Make(2);
  backend->PruneSelection({.q = q.tensor(),
                           .queries = queries,
                           .int4_keys = Quantize(kv, 1).data(),
                           .layout = layout,
                           .scale = 0.125f,
                           .p = 1.0f,
                           .candidates = candidates.view(),
                           .kept = kept.view()});
  EXPECT_EQ(kept.Of(0, 0), candidates.Of(0, 0));
  // With logits of some thousands most weights are zero in float32.
  PagedKv far(random_, layout, {600}, 300.0f);
  const auto keys = Quantize(far, 1);
  const std::vector<RetrievalQuery> far_queries = {far.Query(0, 0, 599, 16, 64, 0)};
  backend->PruneSelection({.q = q.tensor(),
                           .queries = far_queries,
                           .int4_keys = keys.data(),
                           .layout = layout,
                           .scale = 1.0f,
                           .p = 1.0f,
                           .candidates = candidates.view(),
                           .kept = kept.view()});
  std::vector<int32_t> all = AnchorsOf(far_queries[0]);
  const size_t anchors = all.size();
  const std::vector<int32_t> tokens = candidates.Of(0, 0), result = kept.Of(0, 0);
  all.insert(all.end(), tokens.begin(), tokens.end());
  std::vector<double> best(tokens.size());
  for (int64_t head = 0; head < 2; ++head) {
    // Half the scale gives a weight's square root, which is not zero next to the border.
    const auto roots =
        EstimatedWeightsRef(q.tensor(), far_queries[0], keys.data(), layout, 0.5f, head, all);
    for (size_t j = 0; j < tokens.size(); ++j) {
      best[j] = std::max(best[j], roots[anchors + j] * roots[anchors + j]);
    }
  }
  size_t zeros = 0;
  for (size_t j = 0; j < tokens.size(); ++j) {
    const bool is_kept = std::binary_search(result.begin(), result.end(), tokens[j]);
    // Logits of thousands have weights in float32 that are a hundredth off: one just below the border may be kept.
    const bool is_zero = best[j] < 0.97 * 0x1p-126;
    zeros += is_zero ? 1 : 0;
    EXPECT_FALSE(is_zero && is_kept);
    EXPECT_FALSE(best[j] > 0x1p-125 && !is_kept);
  }
  EXPECT_GT(zeros, 0u);
}

// Below 2^-126 a weight is zero, though float32 has smaller ones.
TEST_P(TopPTest, WeightsBelowTheLeastNormalNumberAreZero) {
  const KvLayout layout{1, 64, 16, DType::kF32};
  PagedKv kv(random_, layout, {64}, 0.0f);
  // Logits in base 2, as in CutsExactlyWhereTheWeightIsReached.
  const auto logit = [&](int32_t token, int value) {
    kv.SetKey(0, 0, token, 3, static_cast<float>(value) * 15);
  };
  logit(10, -125);
  logit(20, -127);
  logit(25, -135);
  logit(30, -148);
  logit(35, -200);
  logit(40, -120);
  const auto keys = Quantize(kv, 1);
  Matrix q(1, layout.head_dim);
  q.row(0)[3] = 1.0f / 15;
  const std::vector<RetrievalQuery> queries = {kv.Query(0, 0, 63, 1, 5, 0)};
  OwnedSelection candidates(1, 1, 8), kept(1, 1, 8);
  candidates.Set(0, 0, {10, 20, 25, 30, 35, 40});
  Make(1)->PruneSelection({.q = q.tensor(),
                           .queries = queries,
                           .int4_keys = keys.data(),
                           .layout = layout,
                           .scale = std::log(2.0f),
                           .p = 1.0f,
                           .candidates = candidates.view(),
                           .kept = kept.view()});
  EXPECT_EQ(kept.Of(0, 0), std::vector<int32_t>({10, 40}));
}

TEST_P(TopPTest, MorePKeepsMoreAndInPlaceIsTheSame) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{2, AnyHeadDimTo256(random_), 64, AnyKvType(random_)};
  PagedKv kv(random_, layout, {3000});
  const auto keys = Quantize(kv, 1);
  Matrix q = Matrix::Normal(random_, 2, 2 * 4 * layout.head_dim, 2.0f);
  const std::vector<RetrievalQuery> queries = {kv.Query(0, 0, 2999, 16, 64, 0),
                                               kv.Query(0, 1, 1500, 16, 64, 0)};
  OwnedSelection candidates(2, 2, 1000);
  for (int i = 0; i < 2; ++i) {
    for (int32_t head = 0; head < 2; ++head) candidates.Set(i, head, AnyOfMid(queries[i], 1000));
  }
  OwnedSelection before(2, 2, 1000);
  for (int i = 0; i < 2; ++i) {
    for (int32_t head = 0; head < 2; ++head) before.Set(i, head, {});
  }
  for (const float p : {0.3f, 0.6f, 0.8f, 0.9f, 0.95f, 0.99f, 1.0f}) {
    OwnedSelection kept(2, 2, 1000);
    Make(1)->PruneSelection({.q = q.tensor(),
                             .queries = queries,
                             .int4_keys = keys.data(),
                             .layout = layout,
                             .scale = 0.125f,
                             .p = p,
                             .candidates = candidates.view(),
                             .kept = kept.view()});
    for (int i = 0; i < 2; ++i) {
      for (int32_t head = 0; head < 2; ++head) {
        const auto more = kept.Of(i, head), less = before.Of(i, head);
        EXPECT_TRUE(std::includes(more.begin(), more.end(), less.begin(), less.end()));
      }
    }
    for (int threads = 2; threads <= 4; ++threads) {
      OwnedSelection in_place = candidates;
      Make(threads)->PruneSelection({.q = q.tensor(),
                                     .queries = queries,
                                     .int4_keys = keys.data(),
                                     .layout = layout,
                                     .scale = 0.125f,
                                     .p = p,
                                     .candidates = in_place.view(),
                                     .kept = in_place.view()});
      OwnedSelection alone(1, 2, 1000);
      const std::vector<int32_t> of_1[2] = {candidates.Of(1, 0), candidates.Of(1, 1)};
      for (int32_t head = 0; head < 2; ++head) alone.Set(0, head, of_1[head]);
      Make(threads)->PruneSelection({.q = q.tensor(),
                                     .queries = {&queries[1], 1},
                                     .int4_keys = keys.data(),
                                     .layout = layout,
                                     .scale = 0.125f,
                                     .p = p,
                                     .candidates = alone.view(),
                                     .kept = alone.view()});
      for (int32_t head = 0; head < 2; ++head) {
        EXPECT_EQ(in_place.Of(0, head), kept.Of(0, head)) << threads << " threads";
        EXPECT_EQ(in_place.Of(1, head), kept.Of(1, head)) << threads << " threads";
        EXPECT_EQ(alone.Of(0, head), kept.Of(1, head)) << threads << " threads";
      }
    }
    before = kept;
  }
}

}  // namespace
}  // namespace winnow::kernels
