#include "kernels/logit_select.h"

#include "kernels/cuda/logit_select.h"
#include "tests/cuda/backend_testing.h"

namespace winnow::kernels::cuda {
namespace {

class CudaLogitSelectTest : public CudaBackendFixture {};

TEST_F(CudaLogitSelectTest, ChoosesTokensOfTheLargestMass) {
  SCOPED_TRACE(Seed());
  int round = 0;
  for (const int32_t d : kCudaHeadDims) {
    for (const int32_t group : {1, 3, 4, 8, 16}) {
      const KvLayout layout{2, d, static_cast<int32_t>(16 * random_.Int(1, 5)),
                            CudaKvTypeOf(d, kCudaKvTypes[round++ % 3])};
      const auto n = static_cast<int32_t>(random_.Int(100, 2500));
      PagedKv kv(random_, layout, {n, 700});
      const auto pool = UploadPool(kv);
      const float scale = 1.0f / std::sqrt(static_cast<float>(d));
      Matrix q = Matrix::Normal(random_, 2, int64_t{2} * group * d);
      const std::vector<RetrievalQuery> queries = {
          kv.Query(0, 1, n - 1, 4, 20, static_cast<int32_t>(random_.Int(1, n / 4))),
          kv.Query(1, 0, 650, static_cast<int32_t>(random_.Int(0, 9)), 64, 100)};
      const int32_t capacity = std::max(queries[0].k, queries[1].k) + 3;
      const SharedSelection chosen(*backend_, 2, 2, capacity);
      auto of_q = Put(q);
      backend_->BeginPass();
      backend_->SelectByLogits(of_q.tensor, queries, pool.data(), layout, scale, chosen.view());
      ASSERT_TRUE(backend_->Synchronize());
      for (int i = 0; i < 2; ++i) {
        for (int head = 0; head < 2; ++head) {
          SCOPED_TRACE(testing::Message() << "d " << d << " G " << group << " n " << n << " query "
                                          << i << " head " << head);
          const auto scores =
              LogitScoresRef(q.tensor(), queries[i], kv.pool(), layout, scale, head);
          ExpectTopK(chosen.Of(i, head),
                     std::span(scores).subspan(queries[i].mid.first, queries[i].mid.size()),
                     queries[i].mid.first, queries[i].k, 1e-4);
        }
      }
    }
  }
}

TEST_F(CudaLogitSelectTest, OfTokensWithTheSameKeyTheLaterAreChosen) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 16, AnyCudaKvType(random_)};
  PagedKv kv(random_, layout, {1500});
  for (int32_t t = 1; t < 1500; ++t) kv.CopyKey(0, 0, 0, t);
  const auto pool = UploadPool(kv);
  Matrix q = Matrix::Normal(random_, 1, 2 * 64);
  const std::vector<RetrievalQuery> queries = {kv.Query(0, 0, 1499, 4, 16, 300)};
  const SharedSelection chosen(*backend_, 1, 1, 300);
  auto of_q = Put(q);
  backend_->SelectByLogits(of_q.tensor, queries, pool.data(), layout, 0.125f, chosen.view());
  ASSERT_TRUE(backend_->Synchronize());
  std::vector<int32_t> last;
  for (int32_t t = queries[0].mid.last - 300; t < queries[0].mid.last; ++t) last.push_back(t);
  EXPECT_EQ(chosen.Of(0, 0), last);
}

TEST_F(CudaLogitSelectTest, MassesBelowTheLeastNormalNumberAreZero) {
  PagedKv kv = KvOfFadingMasses(random_, DType::kBF16);
  const auto pool = UploadPool(kv);
  Matrix q(1, 64);
  q.row(0)[0] = 1;
  auto of_q = Put(q);
  const SharedSelection chosen(*backend_, 1, 1, 3);
  backend_->SelectByLogits(of_q.tensor, std::vector{kv.Query(0, 0, 99, 4, 10, 3)}, pool.data(),
                           kv.layout(), std::log(2.0f), chosen.view());
  ASSERT_TRUE(backend_->Synchronize());
  EXPECT_EQ(chosen.Of(0, 0), std::vector<int32_t>({kHeavyOfFading, 88, 89}));
}

TEST_F(CudaLogitSelectTest, MeasuresWhatASelectionCovers) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 10; ++round) {
    const int32_t d = AnyHeadDim(random_);
    const auto group = static_cast<int32_t>(random_.Int(1, 8));
    const KvLayout layout{2, d, 32, kCudaKvTypes[round % 3]};
    const auto n = static_cast<int32_t>(random_.Int(100, 1500));
    PagedKv kv(random_, layout, {n});
    const auto pool = UploadPool(kv);
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    Matrix q = Matrix::Normal(random_, 2, int64_t{2} * group * d);
    std::vector<RetrievalQuery> queries;
    for (int i = 0; i < 2; ++i) {
      // A short query has no mid, so its lists are empty.
      const auto position = static_cast<int32_t>(i == 0 ? n - 1 : random_.Int(0, n - 1));
      queries.push_back(kv.Query(0, i, position, 8, static_cast<int32_t>(random_.Int(1, 80)), 0));
    }
    OwnedSelection selection(2, 2, n);
    const SharedSelection shared(*backend_, 2, 2, n);
    for (int i = 0; i < 2; ++i) {
      for (int head = 0; head < 2; ++head) {
        std::vector<int32_t> tokens;
        for (int32_t t = queries[i].mid.first; t < queries[i].mid.last; ++t) {
          if (random_.Int(0, 3) == 0) tokens.push_back(t);
        }
        selection.Set(i, head, tokens);
        shared.view().count(i, head) = static_cast<int32_t>(tokens.size());
        std::copy(tokens.begin(), tokens.end(), shared.view().chosen(i, head));
      }
    }
    std::vector<SelectionQuality> expected(4), actual(4, {-1, -1});
    MeasureSelectionRef(q.tensor(), queries, kv.pool(), layout, scale, selection.view(),
                        expected.data());
    auto of_q = Put(q);
    backend_->BeginPass();
    backend_->MeasureSelection({.q = of_q.tensor,
                                .queries = queries,
                                .pool = pool.data(),
                                .layout = layout,
                                .scale = scale,
                                .chosen = shared.view(),
                                .quality = actual.data()});
    for (int i = 0; i < 4; ++i) {
      EXPECT_NEAR(actual[i].coverage, expected[i].coverage, 1e-4) << "round " << round;
      // A token or two of nearly the same mass may come in another order.
      EXPECT_NEAR(actual[i].iou, expected[i].iou, 0.02) << "round " << round;
    }
  }
}

}  // namespace
}  // namespace winnow::kernels::cuda
