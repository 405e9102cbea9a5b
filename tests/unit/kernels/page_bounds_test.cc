#include "kernels/page_bounds.h"

#include "kernels/host_matrix.h"
#include "kernels/logit_select.h"
#include "tests/unit/kernels/retrieval_testing.h"

namespace winnow::kernels {
namespace {

class PageBoundsTest : public EachIsa {
 protected:
  static std::vector<std::byte> Memory(const PagedKv& kv) {
    return std::vector<std::byte>(kv.num_blocks() * BoundBlockBytes(kv.layout()), kUntouched);
  }
  // The bounds of all tokens of the sequences.
  static std::vector<std::byte> BoundsOf(Backend& backend, const PagedKv& kv, int sequences = 1) {
    std::vector<std::byte> bounds = Memory(kv);
    std::vector<KeySpan> spans;
    for (int i = 0; i < sequences; ++i) spans.push_back({kv.table(i), {0, kv.length(i)}});
    backend.BoundKeys(spans, kv.pool(), kv.layout(), bounds.data());
    return bounds;
  }
};
WINNOW_FOR_EACH_ISA(PageBoundsTest);

TEST_P(PageBoundsTest, BoundsAreTheReferencesBitForBit) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : kKvTypes) {
    for (const int32_t d : {64, 80, 96, 128, 256}) {
      const KvLayout layout{2, d, static_cast<int32_t>(16 * random_.Int(1, 5)), dtype};
      const auto length = static_cast<int32_t>(random_.Int(40, 300));
      PagedKv kv(random_, layout, {length, 70});
      for (int32_t c = 0; c < d; ++c) kv.SetKey(0, 1, 3, c, 1e-39f * static_cast<float>(c - 20));
      for (int32_t t = 16; t < 32; ++t) kv.SetKey(0, 0, t, 5, -2e-39f);  // subnormal throughout
      const auto first = static_cast<int32_t>(random_.Int(0, length - 1));
      const auto last = static_cast<int32_t>(random_.Int(first, length));
      const std::vector<KeySpan> spans = {{kv.table(0), {first, last}}, {kv.table(1), {0, 70}}};
      std::vector<std::byte> expected = Memory(kv), actual = Memory(kv);
      BoundKeysRef(spans, kv.pool(), layout, expected.data());
      Make(2)->BoundKeys(spans, kv.pool(), layout, actual.data());
      EXPECT_TRUE(actual == expected)
          << DTypeName(dtype) << " d " << d << " [" << first << ", " << last << ")";
    }
  }
}

TEST_P(PageBoundsTest, TokenByTokenGivesTheBitsOfAllAtOnce) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{2, AnyHeadDimTo256(random_), 32, AnyKvType(random_)};
  PagedKv kv(random_, layout, {150});
  const auto backend = Make(2);
  const std::vector<std::byte> at_once = BoundsOf(*backend, kv);
  std::vector<std::byte> grown = Memory(kv);
  for (int32_t first = 0; first < 150;) {
    const auto last = static_cast<int32_t>(
        std::min<int64_t>(150, random_.Int(0, 1) == 0 ? first + 1 : first + random_.Int(1, 40)));
    const std::vector<KeySpan> spans = {{kv.table(0), {first, last}}};
    backend->BoundKeys(spans, kv.pool(), layout, grown.data());
    first = last;
  }
  EXPECT_TRUE(grown == at_once);
}

TEST_P(PageBoundsTest, NoTokenScoresAboveItsPagesBound) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 32, AnyKvType(random_)};
  PagedKv kv(random_, layout, {200});
  Matrix q = Matrix::Normal(random_, 1, 3 * 64);
  const auto bounds = BoundsOf(*Make(1), kv);
  const RetrievalQuery query = kv.Query(0, 0, 199, 0, 1, 0);
  const auto scores = BoundScoresRef(q.tensor(), query, bounds.data(), layout, 0);
  for (int32_t t = 0; t < 199; ++t) {
    double dot = 0;
    for (int32_t g = 0; g < 3; ++g) {
      for (int32_t c = 0; c < 64; ++c) {
        dot += q.row(0)[g * 64 + c] * KeyAt(kv.Row(0, 0, t), layout, c);
      }
    }
    EXPECT_LE(dot, scores[t] + 1e-9);
  }
}

TEST_P(PageBoundsTest, ChoosesWhatTheReferenceChooses) {
  SCOPED_TRACE(Seed());
  int close_calls = 0;
  for (int round = 0; round < 20; ++round) {
    const KvLayout layout{static_cast<int32_t>(random_.Int(1, 2)), AnyHeadDimTo256(random_),
                          static_cast<int32_t>(16 * random_.Int(1, 5)), AnyKvType(random_)};
    const auto group = random_.Int(1, 8);
    const int sequences = 2;
    PagedKv kv(random_, layout, {static_cast<int32_t>(random_.Int(60, 1400)), 300});
    Matrix q = Matrix::Normal(random_, 4, layout.kv_heads * group * layout.head_dim);
    const auto bounds = BoundsOf(*Make(1), kv, sequences);
    std::vector<RetrievalQuery> queries;
    for (int32_t row = 0; row < 4; ++row) {
      const int sequence = static_cast<int>(random_.Int(0, 1));
      // Any borders of mid, inside of pages too.
      queries.push_back(kv.Query(
          sequence, row, static_cast<int32_t>(random_.Int(0, kv.length(sequence) - 1)),
          static_cast<int32_t>(random_.Int(0, 30)), static_cast<int32_t>(random_.Int(1, 60)),
          static_cast<int32_t>(random_.Int(0, 200))));
    }
    OwnedSelection chosen(4, layout.kv_heads, 200), expected(4, layout.kv_heads, 200);
    Make(static_cast<int>(random_.Int(1, 3)))
        ->SelectByBounds(q.tensor(), queries, bounds.data(), layout, 0.125f, chosen.view());
    SelectByBoundsRef(q.tensor(), queries, bounds.data(), layout, expected.view());
    EXPECT_TRUE(chosen.GuardsIntact());
    for (int i = 0; i < 4; ++i) {
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        if (chosen.Of(i, head) == expected.Of(i, head)) continue;
        // Once in tens of thousands two pages' bounds are closer than float32 can tell.
        SCOPED_TRACE(testing::Message() << "query " << i << " head " << head);
        const TokenRange mid = queries[i].mid;
        const auto scores = BoundScoresRef(q.tensor(), queries[i], bounds.data(), layout, head);
        ExpectTopK(chosen.Of(i, head), std::span(scores).subspan(mid.first, mid.size()), mid.first,
                   queries[i].k, 1e-5);
        ++close_calls;
      }
    }
  }
  EXPECT_LE(close_calls, 1);
}

TEST_P(PageBoundsTest, OfEqualPagesTheLaterTokensAreChosen) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 32, AnyKvType(random_)};
  PagedKv kv(random_, layout, {400});
  for (int32_t t = 1; t < 400; ++t) kv.CopyKey(0, 0, 0, t);
  Matrix q = Matrix::Normal(random_, 1, 2 * 64);
  const auto backend = Make(2);
  const auto bounds = BoundsOf(*backend, kv);
  for (int32_t k = 0; k <= 330; k += 11) {
    const std::vector<RetrievalQuery> queries = {kv.Query(0, 0, 398, 5, 60, k)};
    OwnedSelection chosen(1, 1, 400);
    backend->SelectByBounds(q.tensor(), queries, bounds.data(), layout, 0.125f, chosen.view());
    std::vector<int32_t> last(k);
    std::iota(last.begin(), last.end(), queries[0].mid.last - k);
    EXPECT_EQ(chosen.Of(0, 0), last);
  }
}

// Half a page is its later half.
TEST_P(PageBoundsTest, TheLastPageIsChosenFromItsEnd) {
  const KvLayout layout{1, 64, 64, DType::kF32};
  PagedKv kv(random_, layout, {320}, 0.0f);
  kv.SetKey(0, 0, 100, 0, 2.0f);  // page 6, tokens 96 to 111
  kv.SetKey(0, 0, 200, 0, 1.0f);  // page 12, tokens 192 to 207
  Matrix q(1, 64);
  q.row(0)[0] = 1;
  const auto backend = Make(1);
  const auto bounds = BoundsOf(*backend, kv);
  const std::vector<RetrievalQuery> queries = {kv.Query(0, 0, 319, 16, 32, 20)};
  OwnedSelection chosen(1, 1, 20);
  backend->SelectByBounds(q.tensor(), queries, bounds.data(), layout, 1.0f, chosen.view());
  std::vector<int32_t> expected(16);
  std::iota(expected.begin(), expected.end(), 96);
  expected.insert(expected.end(), {204, 205, 206, 207});
  EXPECT_EQ(chosen.Of(0, 0), expected);
}

TEST_P(PageBoundsTest, TheSameOnAnyNumberOfThreadsAndAmongOthers) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{2, AnyHeadDimTo256(random_), 64, AnyKvType(random_)};
  PagedKv kv(random_, layout, {9000, 100});
  Matrix q = Matrix::Normal(random_, 2, 2 * 4 * layout.head_dim);
  const auto bounds = BoundsOf(*Make(3), kv, 2);
  const std::vector<RetrievalQuery> queries = {kv.Query(0, 0, 8999, 16, 64, 300),
                                               kv.Query(1, 1, 99, 16, 64, 7)};
  OwnedSelection expected(2, 2, 300);
  Make(1)->SelectByBounds(q.tensor(), queries, bounds.data(), layout, 0.125f, expected.view());
  for (int threads = 2; threads <= 4; ++threads) {
    OwnedSelection chosen(2, 2, 300), alone(1, 2, 300);
    const auto backend = Make(threads);
    backend->SelectByBounds(q.tensor(), queries, bounds.data(), layout, 0.125f, chosen.view());
    EXPECT_TRUE(chosen == expected);
    backend->SelectByBounds(q.tensor(), {&queries[1], 1}, bounds.data(), layout, 0.125f,
                            alone.view());
    for (int32_t head = 0; head < 2; ++head) EXPECT_EQ(alone.Of(0, head), expected.Of(1, head));
  }
}

}  // namespace
}  // namespace winnow::kernels
