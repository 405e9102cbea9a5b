#include "kernels/experts.h"

#include <limits>
#include <set>

#include "tests/unit/kernels/kernel_testing.h"
#include "tests/unit/kernels/routing_testing.h"

namespace winnow::kernels {
namespace {

class ExpertsTest : public EachIsa {
 protected:
  // Logits of which some are equal.
  Matrix AnyLogits(int64_t m, int64_t experts) {
    Matrix logits = Matrix::Normal(random_, m, experts, 3.0f);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t e = 0; e < experts; ++e) {
        if (random_.Int(0, 3) == 0) logits.row(i)[e] = std::round(logits.row(i)[e]);
      }
    }
    return logits;
  }

  std::vector<float> correction_;
};
WINNOW_FOR_EACH_ISA(ExpertsTest);

TEST_P(ExpertsTest, RoutesAsTheReferenceWhateverElseIsInTheBatch) {
  SCOPED_TRACE(Seed());
  for (const int64_t experts : {int64_t{1}, int64_t{8}, int64_t{128}, random_.Int(2, 1024)}) {
    for (const ExpertRouting& routing : AnyRoutings(random_, experts, correction_)) {
      const int64_t m = random_.Int(1, 40),
                    per_token = random_.Int(1, std::min<int64_t>(experts, 12));
      Matrix logits = AnyLogits(m, experts);
      Matrix weights(m, per_token), expected(m, per_token), alone(1, per_token);
      std::vector<int32_t> ids(m * per_token), expected_ids(m * per_token), ids_alone(per_token);
      Make(3)->RouteExperts(logits.tensor(), routing, ids.data(), weights.tensor());
      RouteExpertsRef(logits.tensor(), routing, expected_ids.data(), expected.tensor());
      EXPECT_EQ(ids, expected_ids) << experts << " experts, " << per_token << " for a token";
      ExpectNear(weights, expected, 0, 1e-6);
      const int64_t row = random_.Int(0, m - 1);
      Make(1)->RouteExperts(logits.tensor().RowRange(row, 1), routing, ids_alone.data(),
                            alone.tensor());
      EXPECT_TRUE(SameBits(alone, 0, weights, row));
      EXPECT_TRUE(std::equal(ids_alone.begin(), ids_alone.end(), ids.begin() + row * per_token));
    }
  }
}

TEST_P(ExpertsTest, EqualLogitsGoToTheLowerIdsAndWeightsAreTheSoftmax) {
  Matrix logits(1, 6), weights(1, 3);
  const float values[] = {1.0f, 2.0f, 2.0f, 0.0f, 2.0f, 1.0f};
  std::copy(std::begin(values), std::end(values), logits.row(0));
  std::vector<int32_t> ids(3);
  Make(1)->RouteExperts(logits.tensor(), {.normalized = true}, ids.data(), weights.tensor());
  EXPECT_EQ(ids, (std::vector<int32_t>{1, 2, 4}));
  for (int s = 0; s < 3; ++s) EXPECT_NEAR(weights.row(0)[s], 1.0 / 3, 1e-7);
  Make(1)->RouteExperts(logits.tensor(), {}, ids.data(), weights.tensor());
  const double of_all = 3 * std::exp(2.0) + 2 * std::exp(1.0) + 1;
  for (int s = 0; s < 3; ++s) EXPECT_NEAR(weights.row(0)[s], std::exp(2.0) / of_all, 1e-7);
}

TEST_P(ExpertsTest, ACorrectionChoosesAndDoesNotWeigh) {
  Matrix logits(1, 4), weights(1, 2);
  const float values[] = {0.0f, 1.0f, -1.0f, 0.5f};
  std::copy(std::begin(values), std::end(values), logits.row(0));
  const std::vector<float> correction = {0.0f, -0.5f, 0.4f, 0.0f};
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  std::vector<int32_t> ids(2);
  ExpertRouting routing = {
      .scores = ExpertRouting::Scores::kSigmoid, .scale = 2, .correction = correction.data()};
  // .5, .73 - .5, .27 + .4, .62
  Make(1)->RouteExperts(logits.tensor(), routing, ids.data(), weights.tensor());
  EXPECT_EQ(ids, (std::vector<int32_t>{2, 3}));
  EXPECT_NEAR(weights.row(0)[0], 2 * sigmoid(-1), 1e-6);
  EXPECT_NEAR(weights.row(0)[1], 2 * sigmoid(0.5), 1e-6);
  routing.normalized = true;
  Make(1)->RouteExperts(logits.tensor(), routing, ids.data(), weights.tensor());
  EXPECT_NEAR(weights.row(0)[0], 2 * sigmoid(-1) / (sigmoid(-1) + sigmoid(0.5)), 1e-6);
  // Scores of the softmax: .17, .46, .06, .28.
  routing = {.correction = correction.data()};
  Make(1)->RouteExperts(logits.tensor(), routing, ids.data(), weights.tensor());
  EXPECT_EQ(ids, (std::vector<int32_t>{2, 3}));
  const double all = 1 + std::exp(1) + std::exp(-1) + std::exp(0.5);
  EXPECT_NEAR(weights.row(0)[0], std::exp(-1) / all, 1e-6);
  // Sigmoids that are all nothing.
  for (int e = 0; e < 4; ++e) logits.row(0)[e] = -1e4f;
  routing = {.scores = ExpertRouting::Scores::kSigmoid, .normalized = true};
  Make(1)->RouteExperts(logits.tensor(), routing, ids.data(), weights.tensor());
  EXPECT_EQ(ids, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(weights.row(0)[0], 0);
}

// Ids can be used for addresses whatever a state has become, and the state does not get well.
TEST_P(ExpertsTest, BrokenLogitsGiveExpertsThatThereAreAndWeightsThatAreNoNumbers) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const ExpertRouting& routing : AnyRoutings(random_, 4, correction_)) {
    for (const std::vector<float>& values :
         {std::vector<float>{0, NAN, 1, 2}, {NAN, NAN, NAN, NAN}, {kInfinity, 0, 1, 2}}) {
      Matrix logits(1, 4), weights(1, 3);
      std::copy(values.begin(), values.end(), logits.row(0));
      std::vector<int32_t> ids(3), expected(3);
      Make(1)->RouteExperts(logits.tensor(), routing, ids.data(), weights.tensor());
      RouteExpertsRef(logits.tensor(), routing, expected.data(), weights.tensor());
      EXPECT_EQ(ids, expected);
      EXPECT_EQ(std::set<int32_t>(ids.begin(), ids.end()).size(), 3);
      Make(1)->RouteExperts(logits.tensor(), routing, ids.data(), weights.tensor());
      for (int s = 0; s < 3; ++s) {
        EXPECT_GE(ids[s], 0);
        EXPECT_LT(ids[s], 4);
        EXPECT_TRUE(std::isnan(weights.row(0)[s]));
      }
    }
  }
  for (const bool normalized : {false, true}) {
    Matrix logits(1, 3), weights(1, 2);
    const float values[] = {-kInfinity, 0, -kInfinity};
    std::copy(std::begin(values), std::end(values), logits.row(0));
    std::vector<int32_t> ids(2);
    Make(1)->RouteExperts(logits.tensor(), {.normalized = normalized}, ids.data(),
                          weights.tensor());
    EXPECT_EQ(ids, (std::vector<int32_t>{1, 0}));
    EXPECT_EQ(weights.row(0)[0], 1);
    EXPECT_EQ(weights.row(0)[1], 0);
  }
}

TEST_P(ExpertsTest, GathersRows) {
  SCOPED_TRACE(Seed());
  const int64_t n = random_.Int(1, 300), m = random_.Int(1, 20), count = random_.Int(1, 90);
  Matrix x = Matrix::Normal(random_, m, n), out(count + 1, n), expected(count + 1, n);
  std::vector<int32_t> rows;
  for (int64_t i = 0; i < count; ++i) rows.push_back(static_cast<int32_t>(random_.Int(0, m - 1)));
  Make(3)->GatherExpertRows(x.tensor(), rows, out.tensor());
  GatherExpertRowsRef(x.tensor(), rows, expected.tensor());
  EXPECT_TRUE(SameBits(out, expected));  // and the last row is as it was
  EXPECT_TRUE(out.GuardsIntact());
}

TEST_P(ExpertsTest, AddsSlotsInTheirOrderWhereverTheirRowsLie) {
  SCOPED_TRACE(Seed());
  for (const int64_t n : {int64_t{1}, int64_t{512}, random_.Int(2, 2000)}) {
    const int64_t m = random_.Int(1, 20), per_token = random_.Int(1, 9);
    Matrix x = Matrix::Normal(random_, m * per_token, n), y = Matrix::Normal(random_, m, n);
    Matrix weights = Matrix::Normal(random_, m, per_token);
    std::vector<int32_t> places(m * per_token);
    for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<int32_t>(i);
    random_.Shuffle(places);
    Matrix out = y, expected = y;
    Make(3)->AddExpertRows(x.tensor(), places, weights.tensor(), out.tensor());
    AddExpertRowsRef(x.tensor(), places, weights.tensor(), expected.tensor());
    ExpectNear(out, expected, 2e-6, 1e-6);
    // The same rows elsewhere, and one row of the batch alone: the same bits.
    Matrix moved(m * per_token, n), again = y, alone(1, n);
    std::vector<int32_t> in_order(places.size());
    for (size_t i = 0; i < places.size(); ++i) {
      in_order[i] = static_cast<int32_t>(i);
      std::copy_n(x.row(places[i]), n, moved.row(static_cast<int64_t>(i)));
    }
    Make(1)->AddExpertRows(moved.tensor(), in_order, weights.tensor(), again.tensor());
    EXPECT_TRUE(SameBits(again, out));
    const int64_t row = random_.Int(0, m - 1);
    std::copy_n(y.row(row), n, alone.row(0));
    Make(1)->AddExpertRows(x.tensor(), std::span(places).subspan(row * per_token, per_token),
                           weights.tensor().RowRange(row, 1), alone.tensor());
    EXPECT_TRUE(SameBits(alone, 0, out, row));
    // As the contract says it, operation by operation.
    for (int64_t j = 0; j < n; ++j) {
      float sum = weights.row(row)[0] * x.row(places[row * per_token])[j];
      for (int64_t s = 1; s < per_token; ++s) {
        const float product = weights.row(row)[s] * x.row(places[row * per_token + s])[j];
        sum += product;
      }
      ASSERT_EQ(std::bit_cast<uint32_t>(alone.row(0)[j]),
                std::bit_cast<uint32_t>(y.row(row)[j] + sum));
    }
  }
}

}  // namespace
}  // namespace winnow::kernels
