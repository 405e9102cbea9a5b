#include "kernels/experts.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "tests/cuda/backend_testing.h"

namespace winnow::kernels::cuda {
namespace {

class CudaExpertsTest : public CudaBackendFixture {
 protected:
  struct Routed {
    std::vector<int32_t> ids;
    Matrix weights;
  };
  Routed Route(Matrix& logits, int64_t per_token, bool normalize, int64_t first, int64_t rows) {
    Routed routed = {{}, Matrix(rows, per_token)};
    auto on_device = Put(logits), of_weights = Put(routed.weights);
    const Buffer ids = backend_->AllocateShared(rows * per_token * sizeof(int32_t));
    auto* const made = static_cast<int32_t*>(ids.data());
    backend_->RouteExperts(on_device.tensor.RowRange(first, rows), normalize, made,
                           of_weights.tensor);
    of_weights.Fetch();  // waits
    routed.ids.assign(made, made + rows * per_token);
    return routed;
  }
};

TEST_F(CudaExpertsTest, RoutesAsTheReferenceAndARowAloneHasTheSameBits) {
  SCOPED_TRACE(Seed());
  for (const int64_t experts :
       {int64_t{1}, int64_t{8}, int64_t{33}, int64_t{128}, int64_t{1024}, random_.Int(2, 1024)}) {
    for (const bool normalize : {false, true}) {
      const int64_t m = random_.Int(1, 70);
      const int64_t per_token = random_.Int(1, std::min<int64_t>(experts, 40));
      Matrix logits = Matrix::Normal(random_, m, experts, 3.0f);
      for (int64_t i = 0; i < m * experts / 4; ++i) {
        float& value = logits.row(random_.Int(0, m - 1))[random_.Int(0, experts - 1)];
        value = std::round(value);  // some are equal
      }
      const Routed routed = Route(logits, per_token, normalize, 0, m);
      Matrix expected(m, per_token);
      std::vector<int32_t> ids(m * per_token);
      RouteExpertsRef(logits.tensor(), normalize, ids.data(), expected.tensor());
      EXPECT_EQ(routed.ids, ids) << experts << " experts, " << per_token << " for a token";
      ExpectNear(routed.weights, expected, 1e-9, 1e-5);
      const int64_t row = random_.Int(0, m - 1);
      const Routed alone = Route(logits, per_token, normalize, row, 1);
      EXPECT_TRUE(SameBits(alone.weights, 0, routed.weights, row));
      EXPECT_TRUE(std::equal(alone.ids.begin(), alone.ids.end(), ids.begin() + row * per_token));
    }
  }
}

TEST_F(CudaExpertsTest, BrokenLogitsGiveTheReferencesExpertsAndWeightsThatAreNoNumbers) {
  for (const bool normalize : {false, true}) {
    for (const std::vector<float>& values :
         {std::vector<float>{0, NAN, 1, 2}, {NAN, NAN, NAN, NAN}, {INFINITY, 0, 1, 2}}) {
      Matrix logits(1, 4), weights(1, 3);
      std::copy(values.begin(), values.end(), logits.row(0));
      std::vector<int32_t> ids(3);
      RouteExpertsRef(logits.tensor(), normalize, ids.data(), weights.tensor());
      const Routed routed = Route(logits, 3, normalize, 0, 1);
      EXPECT_EQ(routed.ids, ids);
      for (int s = 0; s < 3; ++s) EXPECT_TRUE(std::isnan(routed.weights.row(0)[s]));
    }
  }
}

TEST_F(CudaExpertsTest, GathersAnyRows) {
  SCOPED_TRACE(Seed());
  for (const int64_t n : {int64_t{1}, int64_t{2048}, random_.Int(2, 3000)}) {
    for (const int64_t padding : {0, 3, 4}) {
      const int64_t m = random_.Int(1, 20), count = random_.Int(1, 900);
      Matrix x = Matrix::Normal(random_, m, n, 1.0f, padding), out(count, n, padding);
      Matrix expected = out;
      std::vector<int32_t> rows;
      for (int64_t i = 0; i < count; ++i) {
        rows.push_back(static_cast<int32_t>(random_.Int(0, m - 1)));
      }
      auto of_x = Put(x), of_out = Put(out);
      backend_->GatherExpertRows(of_x.tensor, rows, of_out.tensor);
      of_out.Fetch();
      GatherExpertRowsRef(x.tensor(), rows, expected.tensor());
      EXPECT_TRUE(SameBits(out, expected));
      EXPECT_TRUE(out.GuardsIntact());
    }
  }
}

// The bits that experts.h promises, which are those of the CPU.
TEST_F(CudaExpertsTest, AddsSlotsInTheirOrderWhereverTheirRowsLie) {
  SCOPED_TRACE(Seed());
  for (const int64_t n : {int64_t{1}, int64_t{256}, int64_t{2048}, random_.Int(2, 3000)}) {
    const int64_t m = random_.Int(1, 30), per_token = random_.Int(1, 9);
    Matrix x = Matrix::Normal(random_, m * per_token, n), y = Matrix::Normal(random_, m, n);
    Matrix weights = Matrix::Normal(random_, m, per_token), expected = y, near = y;
    std::vector<int32_t> places(m * per_token);
    for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<int32_t>(i);
    random_.Shuffle(places);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        float sum = weights.row(i)[0] * x.row(places[i * per_token])[j];
        for (int64_t s = 1; s < per_token; ++s) {
          const float product = weights.row(i)[s] * x.row(places[i * per_token + s])[j];
          sum += product;
        }
        expected.row(i)[j] += sum;
      }
    }
    AddExpertRowsRef(x.tensor(), places, weights.tensor(), near.tensor());
    auto of_x = Put(x), of_y = Put(y), of_weights = Put(weights);
    backend_->AddExpertRows(of_x.tensor, places, of_weights.tensor, of_y.tensor);
    of_y.Fetch();
    EXPECT_TRUE(SameBits(y, expected));
    ExpectNear(y, near, 2e-6, 1e-6);
  }
}

}  // namespace
}  // namespace winnow::kernels::cuda
