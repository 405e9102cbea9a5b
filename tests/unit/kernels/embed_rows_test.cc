#include "kernels/embed_rows.h"

#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {
namespace {

class EmbedRowsTest : public EachIsa {};
WINNOW_FOR_EACH_ISA(EmbedRowsTest);

TEST_P(EmbedRowsTest, WidensAndScalesFromEveryDTypeAtOddAddresses) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t n : {int64_t{1}, int64_t{16}, random_.Int(17, 300)}) {
      const FileMatrix table(random_, 50, n, dtype);
      std::vector<int32_t> ids = {0, 49};
      for (int i = 0; i < 20; ++i) ids.push_back(static_cast<int32_t>(random_.Int(0, 49)));
      Matrix out(22, n), expected(22, n);
      for (const float scale : {1.0f, 54.545456f, 0.25f}) {
        Make(2)->EmbedRows(table.host(), ids, scale, out.tensor());
        EmbedRowsRef(table.host(), ids, scale, expected.tensor());
        EXPECT_TRUE(SameBits(out, expected)) << DTypeName(dtype) << " n " << n << " by " << scale;
        EXPECT_TRUE(out.GuardsIntact());
      }
    }
  }
}

TEST_P(EmbedRowsTest, KnowsEveryFloat16) {
  std::vector<uint16_t> bits(1 << 16);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  Matrix out(1, 1 << 16, 0);
  const std::vector<int32_t> ids = {0};
  Make(1)->EmbedRows({bits.data(), DType::kF16, 1, 1 << 16}, ids, 1.0f, out.tensor());
  for (int64_t i = 0; i < 1 << 16; ++i) {
    const float expected = ToFloat(F16{static_cast<uint16_t>(i)});
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(out.row(0)[i]));
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(out.row(0)[i]), std::bit_cast<uint32_t>(expected)) << i;
    }
  }
}

}  // namespace
}  // namespace winnow::kernels
