#include "kernels/page_bounds.h"

#include <array>

#include "kernels/cuda/page_bounds.h"
#include "kernels/logit_select.h"
#include "tests/cuda/backend_testing.h"

namespace winnow::kernels::cuda {
namespace {

class CudaPageBoundsTest : public CudaBackendFixture {
 protected:
  // Keys of small integers, so that sums are exact and ties are many.
  void MakeIntegers(PagedKv& kv, int sequence) {
    for (int32_t head = 0; head < kv.layout().kv_heads; ++head) {
      for (int32_t t = 0; t < kv.length(sequence); ++t) {
        for (int32_t c = 0; c < kv.layout().head_dim; ++c) {
          kv.SetKey(sequence, head, t, c, static_cast<float>(random_.Int(-2, 2)));
        }
      }
    }
  }
};

TEST_F(CudaPageBoundsTest, BoundsAreTheReferencesToTheBitInAnyNumberOfSpans) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 15; ++round) {
    const int32_t d = kCudaHeadDims[round % 5];
    const KvLayout layout{2, d, static_cast<int32_t>(16 * random_.Int(1, 5)),
                          CudaKvTypeOf(d, kCudaKvTypes[round / 5])};
    SCOPED_TRACE(DTypeName(layout.dtype));
    const auto n = static_cast<int32_t>(random_.Int(40, 700));
    // Behind the keys of a span lie others, which are nobody's yet.
    PagedKv kv(random_, layout, {n + 40, 77 + 40});
    const auto pool = UploadPool(kv);
    std::vector<std::byte> expected(kv.num_blocks() * BoundBlockBytes(layout), std::byte{0xff});
    const std::vector<KeySpan> all = {{kv.table(0), {0, n}}, {kv.table(1), {0, 77}}};
    BoundKeysRef(all, kv.pool(), layout, expected.data());
    DeviceArray<std::byte> bounds(expected.size());
    backend_->BeginPass();
    for (int32_t first = 0; first < n;) {
      const int32_t last = std::min<int32_t>(n, first + static_cast<int32_t>(random_.Int(1, 90)));
      const std::vector<KeySpan> span = {{kv.table(0), {first, last}}};
      backend_->BoundKeys(span, pool.data(), layout, bounds.data());
      first = last;
    }
    const std::vector<KeySpan> other = {{kv.table(1), {0, 77}}};
    backend_->BoundKeys(other, pool.data(), layout, bounds.data());
    ASSERT_TRUE(backend_->Synchronize());
    ASSERT_TRUE(bounds.Get() == expected) << "d " << d;
  }
}

TEST_F(CudaPageBoundsTest, ChoosesTheReferencesTokensWithTiesToTheLater) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 12; ++round) {
    const int32_t d = AnyHeadDim(random_);
    const auto group = static_cast<int32_t>(random_.Int(1, 8));
    const KvLayout layout{2, d, 64, kCudaKvTypes[round % 3]};
    const auto n = static_cast<int32_t>(random_.Int(200, 3000));
    PagedKv kv(random_, layout, {n});
    MakeIntegers(kv, 0);
    const auto pool = UploadPool(kv);
    Matrix q(3, int64_t{2} * group * d);
    for (int i = 0; i < 3; ++i) {
      for (int64_t c = 0; c < q.cols(); ++c) q.row(i)[c] = static_cast<float>(random_.Int(-1, 1));
    }
    std::vector<RetrievalQuery> queries;
    for (int i = 0; i < 3; ++i) {
      const auto position = static_cast<int32_t>(random_.Int(50, n - 1));
      queries.push_back(kv.Query(0, i, position, static_cast<int32_t>(random_.Int(0, 40)),
                                 static_cast<int32_t>(random_.Int(1, 60)), 0));
      queries.back().k =
          static_cast<int32_t>(random_.Int(0, std::max(0, queries.back().mid.size())));
    }
    std::vector<std::byte> expected_bounds(kv.num_blocks() * BoundBlockBytes(layout));
    const std::vector<KeySpan> all = {{kv.table(0), {0, n}}};
    BoundKeysRef(all, kv.pool(), layout, expected_bounds.data());
    const DeviceArray<std::byte> bounds(expected_bounds);
    OwnedSelection expected(3, 2, n);
    SelectByBoundsRef(q.tensor(), queries, expected_bounds.data(), layout, expected.view());
    const SharedSelection chosen(*backend_, 3, 2, n);
    auto of_q = Put(q);
    backend_->BeginPass();
    backend_->SelectByBounds(of_q.tensor, queries, bounds.data(), layout, 0.1f, chosen.view());
    ASSERT_TRUE(backend_->Synchronize());
    for (int i = 0; i < 3; ++i) {
      for (int head = 0; head < 2; ++head) {
        ASSERT_EQ(chosen.Of(i, head), expected.Of(i, head)) << "round " << round << " query " << i;
      }
    }
  }
}

}  // namespace
}  // namespace winnow::kernels::cuda
