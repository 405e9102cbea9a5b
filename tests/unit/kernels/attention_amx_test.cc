// The products of attention by matrix tiles on any processor, with tiles in plain C++. Attention as a whole, and with a
// processor's tiles, is attention_test.cc's.

// clang-format off
#include "kernels/cpu/vec_scalar.h"
// clang-format on
#include "kernels/cpu/attention_tiles_impl.h"

#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/dtype.h"
#include "tests/unit/kernels/emulated_tiles.h"
#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {
namespace {

using Tiles = AttentionTiles<emulated::EmulatedTiles>;

std::vector<BF16> Values(Random& random, int64_t n) {
  std::vector<BF16> values(static_cast<size_t>(n));
  for (BF16& value : values) value = ToBF16(random.Normal(1.0f));
  return values;
}

// The panels of kernels/cpu/panel.h: [columns / 16][inner / 2][16] pairs of from(inner, column).
std::vector<BF16> Panels(int64_t inner, int64_t columns, auto from) {
  std::vector<BF16> panels(static_cast<size_t>(inner * ((columns + 15) / 16) * 16));
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t i = 0; i < inner; ++i) {
      panels[static_cast<size_t>(c / 16 * inner * 16 + i / 2 * 32 + c % 16 * 2 + i % 2)] =
          from(i, c);
    }
  }
  return panels;
}

const std::byte* Bytes(const std::vector<BF16>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

class AttentionAmxTest : public testing::Test {
 protected:
  void SetUp() override {
    rows_ = static_cast<int32_t>(random_.Int(1, 16));
    tokens_ = static_cast<int32_t>(16 * random_.Int(1, 4));
    d_ = 16 * random_.Int(1, 8);
  }
  Random random_;
  int32_t rows_ = 0, tokens_ = 0;
  int64_t d_ = 0;
};

TEST_F(AttentionAmxTest, ScoresOfKeysAsTheyLieHaveTheBitsOfPackedOnes) {
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(random_.seed()));
  for (int round = 0; round < 40; ++round) {
    SetUp();
    SCOPED_TRACE(testing::Message() << rows_ << " rows, " << tokens_ << " tokens, d " << d_);
    const std::vector<BF16> queries = Values(random_, rows_ * d_),
                            keys = Values(random_, tokens_ * d_);
    const auto query = [&](int64_t i, int64_t r) {
      return queries[static_cast<size_t>(r * d_ + i)];
    };
    const auto key = [&](int64_t i, int64_t t) { return keys[static_cast<size_t>(t * d_ + i)]; };
    float packed[16][kAttentionUnitTokens] = {}, as_they_lie[16][kAttentionUnitTokens] = {};
    float turned[kAttentionUnitTokens * 16];
    Tiles::Configure(rows_);
    const size_t row_bytes = static_cast<size_t>(d_) * sizeof(BF16);
    Tiles::TileScores(Bytes(queries), row_bytes, rows_, Bytes(Panels(d_, tokens_, key)), tokens_,
                      d_, packed[0]);
    Tiles::TokenScores(Bytes(Panels(d_, rows_, query)), rows_, {Bytes(keys), nullptr, row_bytes},
                       tokens_, d_, turned, as_they_lie[0]);
    for (int32_t r = 0; r < rows_; ++r) {
      ASSERT_EQ(0, std::memcmp(packed[r], as_they_lie[r], static_cast<size_t>(tokens_) * 4)) << r;
      for (int32_t t = 0; t < tokens_; ++t) {
        double sum = 0;
        for (int64_t i = 0; i < d_; ++i) sum += double{ToFloat(query(i, r))} * ToFloat(key(i, t));
        ASSERT_NEAR(packed[r][t], sum, 1e-4) << "row " << r << ", token " << t;
      }
    }
  }
}

TEST_F(AttentionAmxTest, ValuesAreAddedByTheirWeights) {
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(random_.seed()));
  for (int round = 0; round < 40; ++round) {
    SetUp();
    SCOPED_TRACE(testing::Message() << rows_ << " rows, " << tokens_ << " tokens, d " << d_);
    const std::vector<BF16> weights = Values(random_, rows_ * tokens_),
                            values = Values(random_, tokens_ * d_);
    const auto value = [&](int64_t t, int64_t i) {
      return values[static_cast<size_t>(t * d_ + i)];
    };
    std::vector<float> outputs(static_cast<size_t>(rows_ * d_ + 1));
    for (float& output : outputs) output = random_.Normal(1.0f);
    const std::vector<float> before = outputs;
    Tiles::Configure(rows_);
    Tiles::AddValues(Bytes(weights), static_cast<size_t>(tokens_) * sizeof(BF16), rows_,
                     Bytes(Panels(tokens_, d_, value)), tokens_, d_, outputs.data());
    for (int32_t r = 0; r < rows_; ++r) {
      for (int64_t i = 0; i < d_; ++i) {
        const auto at = static_cast<size_t>(r * d_ + i);
        double sum = before[at];
        for (int32_t t = 0; t < tokens_; ++t) {
          sum +=
              double{ToFloat(weights[static_cast<size_t>(r * tokens_ + t)])} * ToFloat(value(t, i));
        }
        ASSERT_NEAR(outputs[at], sum, 1e-4) << "row " << r << ", column " << i;
      }
    }
    EXPECT_EQ(outputs.back(), before.back());
  }
}

}  // namespace
}  // namespace winnow::kernels
