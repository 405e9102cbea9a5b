#include "kernels/write_kv.h"

#include "kernels/kv_row.h"
#include "tests/unit/kernels/kernel_testing.h"
#include "tests/unit/kernels/paged_kv.h"

namespace winnow::kernels {
namespace {

class WriteKvTest : public EachIsa {};
WINNOW_FOR_EACH_ISA(WriteKvTest);

TEST_P(WriteKvTest, EqualsTheReferenceByteForByteAndTouchesNothingElse) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : kKvTypes) {
    for (const int32_t d : {16, 48, 64, 80, 96, 112, 128}) {
      const KvLayout layout{3, d, static_cast<int32_t>(16 * random_.Int(1, 6)), dtype};
      std::vector<std::byte> pool(12 * layout.BlockBytes(), std::byte{0xa5}), expected = pool;
      std::vector<int32_t> blocks = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
      random_.Shuffle(blocks);
      const std::vector<int32_t> first(blocks.begin(), blocks.begin() + 6),
          second(blocks.begin() + 6, blocks.end());
      Matrix k = Matrix::Normal(random_, 60, 3 * d), v = Matrix::Normal(random_, 60, 3 * d);
      const std::vector<AttentionChunk> chunks = {
          {0, 1, static_cast<int32_t>(random_.Int(0, 6 * layout.block_tokens - 1)), first},
          {1, 59, static_cast<int32_t>(random_.Int(0, 6 * layout.block_tokens - 59)), second}};
      Make(3)->WriteKv(k.tensor(), v.tensor(), chunks, pool.data(), layout);
      WriteKvRef(k.tensor(), v.tensor(), chunks, expected.data(), layout);
      EXPECT_EQ(pool, expected) << DTypeName(dtype) << " d " << d;
    }
  }
}

TEST_P(WriteKvTest, RoundsToNearestEven) {
  const KvLayout layout{1, 64, 16, DType::kBF16};
  std::vector<std::byte> pool(layout.BlockBytes());
  const std::vector<int32_t> table = {0};
  Matrix k(1, 64), v(1, 64);
  k.row(0)[0] = std::bit_cast<float>(0x3f808000u);  // halfway: to the even 0x3f80
  k.row(0)[1] = std::bit_cast<float>(0x3f818000u);  // halfway: to the even 0x3f82
  k.row(0)[2] = std::bit_cast<float>(0x3f808001u);
  k.row(0)[3] = std::bit_cast<float>(0xff7fffffu);  // rounds to minus infinity
  v.row(0)[0] = INFINITY;
  v.row(0)[1] = NAN;
  const std::vector<AttentionChunk> chunks = {{0, 1, 0, table}};
  Make(1)->WriteKv(k.tensor(), v.tensor(), chunks, pool.data(), layout);
  const uint16_t* written = reinterpret_cast<const uint16_t*>(pool.data());
  EXPECT_EQ(written[0], 0x3f80);
  EXPECT_EQ(written[1], 0x3f82);
  EXPECT_EQ(written[2], 0x3f81);
  EXPECT_EQ(written[3], 0xff80);
  EXPECT_EQ(written[64], 0x7f80);
  EXPECT_TRUE(std::isnan(ToFloat(BF16{written[65]})));
}

// KV of 8 bits: what a row becomes, and what is read of it.
class ScaledKvTest : public EachIsa {
 protected:
  struct Row {
    std::vector<float> values;  // as read
    float scale = 0;
    std::vector<int> codes;
  };
  // K of a row, as the backend writes it; V is read, too, to see that it is V. What the reference writes must be the
  // same bytes.
  Row Write(DType dtype, const std::vector<float>& key) {
    const auto d = static_cast<int32_t>(key.size());
    const KvLayout layout{1, d, 16, dtype};
    std::vector<std::byte> pool(layout.BlockBytes()), expected = pool;
    const std::vector<int32_t> table = {0};
    Matrix k(1, d), v(1, d);
    std::copy(key.begin(), key.end(), k.row(0));
    for (int32_t c = 0; c < d; ++c) v.row(0)[c] = c % 2 == 0 ? 0.5f : -0.5f;
    const std::vector<AttentionChunk> chunks = {{0, 1, 5, table}};
    Make(1)->WriteKv(k.tensor(), v.tensor(), chunks, pool.data(), layout);
    WriteKvRef(k.tensor(), v.tensor(), chunks, expected.data(), layout);
    EXPECT_EQ(pool, expected);
    const std::byte* row = pool.data() + layout.RowOffset(0, 0, 5);
    Row read;
    read.scale = ElementAt(row + layout.ScaleOffsetInRow(), DType::kBF16, 0);
    for (int32_t c = 0; c < d; ++c) {
      read.values.push_back(KeyAt(row, layout, c));
      read.codes.push_back(static_cast<int>(row[c]));
      EXPECT_NEAR(ValueAt(row, layout, c), v.row(0)[c], 0.5 / 127);
    }
    return read;
  }
  static constexpr DType kTypes[] = {DType::kI8, DType::kF8};
  static float LargestCode(DType dtype) { return dtype == DType::kI8 ? 127.0f : kLargestF8; }
};
WINNOW_FOR_EACH_ISA(ScaledKvTest);

TEST_P(ScaledKvTest, NoValueIsWrongByMoreThanHalfAStep) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : kTypes) {
    for (const float deviation : {1e-25f, 1e-3f, 1.0f, 1e4f, 1e36f}) {
      for (const int32_t d : {16, 64, 80, 128}) {
        std::vector<float> key(d);
        for (float& value : key) value = random_.Normal(deviation);
        if (d == 80)
          key[random_.Int(0, d - 1)] = 300 * deviation;  // an outlier, which sets the scale
        const Row row = Write(dtype, key);
        float largest = 0;
        for (const float value : key) largest = std::max(largest, std::abs(value));
        // The smallest bfloat16 from which the largest value is reached.
        EXPECT_GE(static_cast<double>(row.scale) * LargestCode(dtype), largest * (1 - 1e-7));
        EXPECT_LE(row.scale, largest / LargestCode(dtype) * (1 + 1.0 / 128));
        for (int32_t c = 0; c < d; ++c) {
          const double error = std::abs(static_cast<double>(row.values[c]) - key[c]);
          // Half a step, and what the quotient's rounding may add to it.
          double step = row.scale;
          if (dtype == DType::kF8) {
            const double code = std::abs(key[c]) / row.scale;
            step *= std::exp2(std::max(std::floor(std::log2(code)), -6.0) - 3);
          }
          ASSERT_LE(error, step * (0.5 + 1e-5)) << DTypeName(dtype) << " " << key[c];
        }
      }
    }
  }
}

TEST_P(ScaledKvTest, ValuesBetweenTheLargestAndItsStepAreNotCutOff) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : kTypes) {
    for (int round = 0; round < 2000; ++round) {
      std::vector<float> key(16, 0.0f);
      key[3] = std::exp2(static_cast<float>(random_.Int(-40, 40))) *
               static_cast<float>(1 + 1e-6 * static_cast<double>(random_.Int(0, 999999)));
      key[7] = -key[3];
      const Row row = Write(dtype, key);
      ASSERT_NEAR(row.values[3] / key[3], 1, dtype == DType::kI8 ? 0.0040 : 0.0358);
      ASSERT_EQ(row.values[7], -row.values[3]);
    }
  }
}

TEST_P(ScaledKvTest, ZerosAndTheSmallestNumbersAreFiniteAndNearZero) {
  for (const DType dtype : kTypes) {
    std::vector<float> key(64, 0.0f);
    for (int32_t c = 0; c < 64; c += 3) key[c] = -0.0f;
    Row row = Write(dtype, key);
    EXPECT_EQ(row.scale, 0.0f);
    for (const float value : row.values) EXPECT_EQ(value, 0.0f);
    for (const float tiny : {1e-45f, -3e-42f, 1.17549435e-38f, 1e-33f}) {
      key[5] = tiny;
      row = Write(dtype, key);
      EXPECT_EQ(row.scale, kKvScaleFloor);
      for (int32_t c = 0; c < 64; ++c) ASSERT_LE(std::abs(row.values[c] - key[c]), 0x1p-101f);
    }
  }
}

TEST_P(ScaledKvTest, CodesAreThoseOfTheTypeToTheBit) {
  // The scale is 1: values become codes as they are.
  std::vector<float> halves(128), all(128);
  for (int c = 0; c < 128; ++c) halves[c] = static_cast<float>(c - 64) + 0.5f;
  halves[0] = 127;
  const Row ints = Write(DType::kI8, halves);
  EXPECT_EQ(ints.scale, 1.0f);
  for (int c = 1; c < 128; ++c) {
    EXPECT_EQ(static_cast<int8_t>(ints.codes[c]), std::nearbyint(halves[c])) << halves[c];
  }
  for (int part = 0; part < 4; ++part) {
    // Every number of E4M3, and between neighbours their middle, which goes to the even one.
    for (int c = 0; c < 64; ++c) {
      const int code = std::min(part * 32 + c / 2, 0x7e);
      const float low = ToFloat(F8E4M3{static_cast<uint8_t>(code)});
      const float high = ToFloat(F8E4M3{static_cast<uint8_t>(std::min(code + 1, 0x7e))});
      all[c] = c % 2 == 0 ? low : (low + high) / 2;
      all[64 + c] = -all[c];
    }
    all[63] = kLargestF8;
    all[127] = -kLargestF8;
    const Row floats = Write(DType::kF8, all);
    EXPECT_EQ(floats.scale, 1.0f);
    for (int c = 0; c < 128; ++c) {
      EXPECT_EQ(floats.codes[c], ToF8E4M3(all[c]).bits) << all[c];
      if (c % 2 == 0) {
        EXPECT_EQ(floats.values[c], all[c]);
      }
    }
  }
}

// A pass's fault is found by what it leaves: nothing may make a number of what is none.
TEST_P(ScaledKvTest, WhatIsNotFiniteStaysVisibleInTheWholeRow) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : kTypes) {
    for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
      std::vector<float> key(80);
      for (float& value : key) value = random_.Normal();
      key[random_.Int(0, 79)] = bad;
      for (const float value : Write(dtype, key).values) ASSERT_TRUE(std::isnan(value));
      // It reaches what attends to it.
      const KvLayout layout{1, 80, 16, dtype};
      std::vector<std::byte> pool(layout.BlockBytes());
      const std::vector<int32_t> table = {0};
      for (const bool in_key : {true, false}) {
        Matrix k = Matrix::Normal(random_, 12, 80), v = Matrix::Normal(random_, 12, 80);
        (in_key ? k : v).row(4)[random_.Int(0, 79)] = bad;
        const std::vector<AttentionChunk> chunk = {{0, 12, 0, table}}, last = {{0, 1, 11, table}};
        const auto backend = Make(1);
        backend->WriteKv(k.tensor(), v.tensor(), chunk, pool.data(), layout);
        Matrix q = Matrix::Normal(random_, 1, 160), out(1, 160);
        backend->Attend(q.tensor(), last, pool.data(), layout, 0.1f, out.tensor());
        for (int c = 0; c < 160; ++c) ASSERT_TRUE(std::isnan(out.row(0)[c])) << in_key;
      }
    }
  }
}

// The bytes of a row are the same on every instruction set.
TEST(ScaledKvBytesTest, AreTheSameOnEveryInstructionSet) {
  Random random;
  SCOPED_TRACE(random.seed());
  for (const DType dtype : {DType::kI8, DType::kF8}) {
    const KvLayout layout{2, 96, 16, dtype};
    Matrix k = Matrix::Normal(random, 16, 192, 3.0f), v = Matrix::Normal(random, 16, 192, 0.1f);
    const std::vector<int32_t> table = {0};
    const std::vector<AttentionChunk> chunk = {{0, 16, 0, table}};
    std::vector<std::vector<std::byte>> pools;
    for (const char* isa : {"scalar", "avx2", "avx512"}) {
      const auto backend = MakeCpuBackend(isa, 1);
      if (backend == nullptr) continue;
      pools.emplace_back(layout.BlockBytes());
      backend->WriteKv(k.tensor(), v.tensor(), chunk, pools.back().data(), layout);
      EXPECT_EQ(pools.back(), pools.front()) << isa;
    }
  }
}

}  // namespace
}  // namespace winnow::kernels
