#include "kernels/quantized.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/unit/test_paths.h"
#include "tests/unit/test_seed.h"

namespace winnow::kernels {
namespace {

std::vector<WeightType> AllTypes() {
  std::vector<WeightType> types;
  for (int i = 0; i < kNumWeightTypes; ++i) types.push_back(static_cast<WeightType>(i));
  return types;
}

std::vector<std::byte> FromHex(const std::string& hex) {
  std::vector<std::byte> bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

std::vector<uint32_t> Bits(const std::vector<float>& values) {
  std::vector<uint32_t> bits(values.size());
  std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

TEST(Quantized, ScalesOfMxfp4ArePowersOfTwoToTheLastBit) {
  for (int code = 0; code < 255; ++code) {
    EXPECT_EQ(ToFloat(Mxfp4Scale(static_cast<uint8_t>(code))), std::ldexp(1.0f, code - 128))
        << code;
  }
  EXPECT_TRUE(std::isnan(ToFloat(Mxfp4Scale(255))));
}

// tests/golden/gguf/make_blocks.py says how they were made.
TEST(Quantized, EveryTypeDequantisesBitForBitAsPyPiGguf) {
  std::ifstream file(SourcePath("tests/golden/gguf/blocks.json"));
  const nlohmann::json goldens = nlohmann::json::parse(file);
  ASSERT_EQ(goldens.size(), static_cast<size_t>(kNumGgufTypes));
  for (const WeightType type : AllTypes()) {
    if (static_cast<int>(type) >= kNumGgufTypes) continue;
    SCOPED_TRACE(WeightTypeName(type));
    const auto golden = std::find_if(
        goldens.begin(), goldens.end(),
        [&](const nlohmann::json& item) { return item.at("type") == WeightTypeName(type); });
    ASSERT_NE(golden, goldens.end());
    const std::vector<std::byte> blocks = FromHex(golden->at("blocks"));
    const std::vector<std::byte> expected_bytes = FromHex(golden->at("values"));
    std::vector<uint32_t> expected(expected_bytes.size() / sizeof(uint32_t));
    std::memcpy(expected.data(), expected_bytes.data(), expected_bytes.size());

    const BlockSize block = BlockSizeOf(type);
    const auto count = static_cast<int64_t>(blocks.size()) / block.bytes * block.values;
    ASSERT_EQ(static_cast<size_t>(count), expected.size());
    ASSERT_EQ(WeightRowBytes(type, count), static_cast<int64_t>(blocks.size()));
    std::vector<float> values(count);
    DequantizeRow(type, blocks.data(), count, values.data());
    EXPECT_EQ(Bits(values), expected);
  }
}

TEST(Quantized, BlocksMayLieAtAnyAddressAndDoNotDependOnEachOther) {
  std::mt19937 random(7);
  for (const WeightType type : AllTypes()) {
    SCOPED_TRACE(WeightTypeName(type));
    const BlockSize block = BlockSizeOf(type);
    constexpr int64_t kBlocks = 5;
    std::vector<std::byte> bytes(block.bytes * kBlocks + 1);
    for (std::byte& byte : bytes)
      byte = static_cast<std::byte>(random() & 0x7B);  // all numbers finite
    std::vector<float> together(block.values * kBlocks), alone(block.values);
    DequantizeRow(type, bytes.data() + 1, block.values * kBlocks, together.data());
    for (int64_t i = 0; i < kBlocks; ++i) {
      std::vector<std::byte> one(bytes.begin() + 1 + i * block.bytes,
                                 bytes.begin() + 1 + (i + 1) * block.bytes);
      DequantizeRow(type, one.data(), block.values, alone.data());
      EXPECT_EQ(Bits(alone), Bits({together.begin() + i * block.values,
                                   together.begin() + (i + 1) * block.values}));
    }
  }
}

TEST(Quantized, PlainTypesAreThoseOfBackends) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    EXPECT_EQ(PlainType(WeightTypeOf(dtype)), dtype);
    EXPECT_EQ(BlockSizeOf(WeightTypeOf(dtype)).bytes, static_cast<int64_t>(DTypeBytes(dtype)));
  }
  for (const WeightType type : AllTypes()) {
    EXPECT_EQ(PlainType(type).has_value(), BlockSizeOf(type).values == 1) << WeightTypeName(type);
  }
}

TEST(Quantized, PartsOfABlockGiveItsValues) {
  TestRandom random;
  for (const WeightType type : AllTypes()) {
    if (PlainType(type) || IsFloat8(type) || type == WeightType::kI8x128) continue;
    SCOPED_TRACE(WeightTypeName(type));
    const BlockSize size = BlockSizeOf(type);
    const BlockShape shape = BlockShapeOf(type);
    EXPECT_EQ(shape.values, size.values);
    for (int round = 0; round < 200; ++round) {
      std::vector<std::byte> block(size.bytes);
      for (std::byte& byte : block) byte = static_cast<std::byte>(random());
      std::vector<float> expected(size.values);
      DequantizeRow(type, block.data(), size.values, expected.data());
      BlockParts parts;
      SplitBlock(type, block.data(), &parts);
      const float scale = shape.has_table ? ToFloat(BF16{parts.scale}) : ToFloat(F16{parts.scale});
      const float offset = ToFloat(F16{parts.offset});
      for (int64_t i = 0; i < size.values; ++i) {
        ASSERT_LT(parts.integers[i], 1 << (shape.bits == 4 ? 4 : 8));
        const int64_t group = i / shape.group;
        const float s = shape.has_codes ? scale * parts.scale_codes[group] : scale;
        const float o = !shape.has_offset ? 0
                        : shape.has_codes ? -(offset * parts.offset_codes[group])
                                          : offset;
        const int integer =
            shape.has_table ? kDoubledE2M1[parts.integers[i]] : parts.integers[i] - shape.bias;
        const float value = s * static_cast<float>(integer) + o;
        if (std::isnan(expected[i])) {
          ASSERT_TRUE(std::isnan(value));
        } else {
          ASSERT_EQ(value, expected[i]) << "value " << i;
        }
      }
    }
  }
}

// Normal values of many sizes, and two blocks of one value each.
std::vector<float> RowToRound(std::mt19937_64& random, int64_t cols) {
  std::normal_distribution<float> normal;
  std::vector<float> row(cols);
  for (float& x : row) x = normal(random) * std::exp(normal(random));
  std::fill_n(row.begin(), 32, 0.0f);
  std::fill_n(row.begin() + 32, 32, -3.25f);
  return row;
}

// A row, the blocks that it is rounded to, and what those stand for.
struct RoundedRow {
  RoundedRow(WeightType type, std::vector<float> values)
      : row(std::move(values)),
        packed(WeightRowBytes(type, static_cast<int64_t>(row.size()))),
        back(row.size()) {
    const auto cols = static_cast<int64_t>(row.size());
    QuantizeRow(type, row.data(), cols, packed.data());
    DequantizeRow(type, packed.data(), cols, back.data());
  }
  std::vector<float> row;
  std::vector<std::byte> packed;
  std::vector<float> back;
};

TEST(Quantized, RowsRoundedToEightBitsAreAsNearAsTheirStepsAllow) {
  TestRandom random;
  constexpr int64_t kCols = 32 * 40;
  const auto [row, packed, back] = RoundedRow(WeightType::kQ8_0, RowToRound(random, kCols));
  for (int64_t at = 0; at < kCols; at += 32) {
    float largest = 0;
    for (int64_t i = at; i < at + 32; ++i) largest = std::max(largest, std::abs(row[i]));
    // Half a step, and what f16 loses of the scale.
    for (int64_t i = at; i < at + 32; ++i) {
      ASSERT_NEAR(back[i], row[i], 0.5f * largest / 127 + 16e-4f * largest) << "value " << i;
    }
  }
}

// Beside the line from the smallest to the largest value, which is where the search begins.
TEST(Quantized, RowsRoundedToFourBitsAreNearerThanTheLineThroughTheirEnds) {
  TestRandom random;
  constexpr int64_t kCols = 32 * 1600;
  const auto [row, packed, back] = RoundedRow(WeightType::kL4x32, RowToRound(random, kCols));
  const auto rounded = [](float x) { return ToFloat(ToF16(ToFloat(ToBF16(x)))); };
  double of_ends = 0, of_rounding = 0;
  for (int64_t at = 0; at < kCols; at += 32) {
    SCOPED_TRACE(at / 32);
    const auto [least, most] = std::minmax_element(row.begin() + at, row.begin() + at + 32);
    const float step = (*most - *least) / 15;
    float scale = rounded(step), offset = rounded(*least + 8 * step);
    // The smaller one is left out of any line, of this one too (QuantizeRow).
    if (std::abs(offset) * 1024 < std::abs(scale)) offset = 0;
    if (std::abs(scale) * 1024 < std::abs(offset)) scale = 0;
    BlockParts parts;
    SplitBlock(WeightType::kL4x32, packed.data() + at / 32 * 20, &parts);
    const float own_scale = ToFloat(F16{parts.scale}), own_offset = ToFloat(F16{parts.offset});
    const auto nearest = [](float x, float s, float o) {
      return s == 0 ? 8 : std::nearbyint(std::clamp((x - o) * (1 / s) + 8, 0.0f, 15.0f));
    };
    double ends = 0, rounding = 0;
    for (int64_t i = at; i < at + 32; ++i) {
      const float end = (nearest(row[i], scale, offset) - 8) * scale + offset;
      ends += std::pow(double{end} - row[i], 2);
      rounding += std::pow(double{back[i]} - row[i], 2);
      ASSERT_EQ(parts.integers[i - at], nearest(row[i], own_scale, own_offset)) << "value " << i;
    }
    ASSERT_LE(rounding, ends * (1 + 1e-5));
    const double largest = std::max(std::abs(*least), std::abs(*most));
    of_ends += ends / (largest * largest + 1e-30);
    of_rounding += rounding / (largest * largest + 1e-30);
  }
  EXPECT_LT(of_rounding, 0.89 * of_ends);  // .870 ± .003; after one round .917
}

// Four blocks of I8x128 have one scale, of the largest of their 128 values; the last ones of a row may be fewer.
TEST(Quantized, BlocksOfW8A8ShareTheirScale) {
  TestRandom random;
  for (const int64_t cols : {64, 96, 128, 160, 32 * 41}) {
    SCOPED_TRACE(cols);
    const auto [row, packed, back] = RoundedRow(WeightType::kI8x128, RowToRound(random, cols));
    for (int64_t at = 0; at < cols; at += 128) {
      const int64_t end = std::min<int64_t>(at + 128, cols);
      float largest = 0;
      for (int64_t i = at; i < end; ++i) largest = std::max(largest, std::abs(row[i]));
      const F16 scale = ToF16(largest / 127);
      for (int64_t block = at / 32; block < end / 32; ++block) {
        ASSERT_EQ(std::memcmp(packed.data() + block * 34, &scale, 2), 0) << "block " << block;
      }
      for (int64_t i = at; i < end; ++i) {
        ASSERT_NEAR(back[i], row[i], 0.5f * largest / 127 + 16e-4f * largest) << "value " << i;
      }
    }
  }
}

// Integers of W4A8 lie from -8 to 7, are the nearest, and their scale is no worse than the one of the largest value.
TEST(Quantized, GroupsOfFourBitsAreRoundedToTheirNearestIntegers) {
  TestRandom random;
  double of_rounding = 0, of_largest = 0;
  for (const int64_t cols : {64, 96, 128, 160, 32 * 41}) {
    SCOPED_TRACE(cols);
    const std::vector<float> row = RowToRound(random, cols);
    std::vector<std::byte> packed(WeightRowBytes(WeightType::kI8x128, cols));
    std::vector<float> back(cols);
    QuantizeRowToFourBits(row.data(), cols, packed.data());
    DequantizeRow(WeightType::kI8x128, packed.data(), cols, back.data());
    for (int64_t at = 0; at < cols; at += 128) {
      const int64_t end = std::min<int64_t>(at + 128, cols);
      float largest = 0;
      for (int64_t i = at; i < end; ++i) {
        if (std::abs(row[i]) > std::abs(largest)) largest = row[i];
      }
      F16 scale;
      std::memcpy(&scale.bits, packed.data() + at / 32 * 34, 2);
      const float s = ToFloat(scale), plain = ToFloat(ToF16(largest / -8));
      const auto error = [](float value, float by) {
        const float q = by == 0 ? 0 : std::clamp(std::nearbyint(value / by), -8.0f, 7.0f);
        return std::pow(double{q} * by - value, 2);
      };
      double rounding = 0, ends = 0;
      for (int64_t i = at; i < end; ++i) {
        const std::byte* const block = packed.data() + i / 32 * 34;
        ASSERT_EQ(std::memcmp(block, &scale, 2), 0);
        const auto q = static_cast<int8_t>(block[2 + i % 32]);
        ASSERT_GE(q, -8);
        ASSERT_LE(q, 7);
        ASSERT_EQ(back[i], s * static_cast<float>(q));
        rounding += std::pow(double{back[i]} - row[i], 2);
        ends += error(row[i], plain);
        // Ties, and quotients that round to one, may go to either side.
        ASSERT_LE(std::pow(double{back[i]} - row[i], 2), error(row[i], s) * (1 + 1e-4) + 1e-12);
      }
      ASSERT_LE(rounding, ends * (1 + 1e-4) + 1e-30);
      of_rounding += rounding / (double{largest} * largest + 1e-30);
      of_largest += ends / (double{largest} * largest + 1e-30);
    }
  }
  EXPECT_LT(of_rounding, of_largest);
}

// The promise of QuantizeRow, by which a GPU makes such values in one operation.
TEST(Quantized, LinesOfFourBitsHaveScalesThatAreExactInBfloat16) {
  TestRandom random;
  std::normal_distribution<float> normal;
  constexpr int64_t kBlocks = 2000;
  std::vector<float> values(32 * kBlocks);
  for (int64_t block = 0; block < kBlocks; ++block) {
    // Values that f16 has, of any size, far from zero or about it, all the same, or zero.
    const auto size = [&](float exponents) {
      return std::exp2(std::clamp(normal(random), -2.0f, 2.0f) * exponents);
    };
    const float middle = random() % 4 == 0 ? 0 : size(4) * normal(random);
    const float spread = random() % 8 == 0 ? 0 : size(6) / 16;
    // Or steps of a line that hardly misses zero.
    const bool steps = random() % 4 == 0;
    for (int i = 0; i < 32; ++i) {
      values[32 * block + i] = steps ? spread * (static_cast<float>(i % 16 - 8) + 1.0f / 3000)
                                     : middle + spread * normal(random);
    }
  }
  const auto [row, packed, back] = RoundedRow(WeightType::kL4x32, values);
  int left_out = 0;
  for (int64_t block = 0; block < kBlocks; ++block) {
    SCOPED_TRACE(block);
    BlockParts parts;
    SplitBlock(WeightType::kL4x32, packed.data() + 20 * block, &parts);
    const float scale = ToFloat(F16{parts.scale}), offset = ToFloat(F16{parts.offset});
    ASSERT_EQ(ToFloat(ToBF16(scale)), scale);
    ASSERT_EQ(ToFloat(ToBF16(offset)), offset);
    left_out += (scale == 0) != (offset == 0);
    if (scale != 0 && offset != 0) {
      ASSERT_LE(std::abs(offset), 1024 * std::abs(scale));
      ASSERT_LE(std::abs(scale), 1024 * std::abs(offset));
    }
    float largest = 0;
    double error = 0;
    for (int64_t i = 32 * block; i < 32 * block + 32; ++i) {
      largest = std::max(largest, std::abs(row[i]));
      error += std::pow(double{back[i]} - row[i], 2);
      const double exact = double{scale} * (parts.integers[i % 32] - 8) + double{offset};
      ASSERT_EQ(static_cast<double>(back[i]), exact);
    }
    // Steps of a fifteenth of what the values span, or eight bits of what they all are.
    ASSERT_LE(std::sqrt(error / 32), largest * 0.06 + 0x1p-23);
  }
  EXPECT_GT(left_out, 20);
}

TEST(Quantized, RowsRoundedToFloatsOfEightBitsAreAsNearAsTheirMantissas) {
  TestRandom random;
  std::normal_distribution<float> normal;
  for (const int64_t cols : {32 * 39, 128 * 10}) {
    const WeightType type = Float8TypeFor(cols);
    EXPECT_EQ(type, cols % 128 == 0 ? WeightType::kF8x128 : WeightType::kF8x32);
    const int64_t block = BlockSizeOf(type).values;
    std::vector<float> row(cols), back(cols);
    for (float& x : row) x = normal(random) * std::exp(normal(random));
    std::fill_n(row.begin(), block, 0.0f);
    std::fill_n(row.begin() + block, block, -3.25f);
    std::vector<std::byte> packed(WeightRowBytes(type, cols));
    QuantizeRow(type, row.data(), cols, packed.data());
    DequantizeRow(type, packed.data(), cols, back.data());
    for (int64_t at = 0; at < cols; at += block) {
      float largest = 0;
      for (int64_t i = at; i < at + block; ++i) largest = std::max(largest, std::abs(row[i]));
      // Half a step: a sixteenth of the value, or of the smallest normal one. And what float32 rounds.
      for (int64_t i = at; i < at + block; ++i) {
        const float step = std::max(std::abs(row[i]) / 16, largest / 448 * 0x1p-10f);
        ASSERT_LE(std::abs(back[i] - row[i]), step * (1 + 1e-5f)) << "value " << i;
      }
    }
  }
}

// scale[4], little-endian, then the values.
TEST(Quantized, BlocksOfFloatsOfEightBitsAreTheirScaleAndTheirValues) {
  for (const WeightType type : {WeightType::kF8x32, WeightType::kF8x128}) {
    std::vector<std::byte> block(BlockSizeOf(type).bytes, std::byte{0x38});  // 1
    const float scale = 0.3f;
    std::memcpy(block.data(), &scale, sizeof scale);
    block[4 + 1] = std::byte{0xc4};  // -3
    block[4 + 2] = std::byte{0x01};  // 2^-9
    block.back() = std::byte{0x7e};  // 448
    std::vector<float> values(BlockSizeOf(type).values);
    DequantizeRow(type, block.data(), BlockSizeOf(type).values, values.data());
    EXPECT_EQ(values[0], 0.3f);
    EXPECT_EQ(values[1], -3 * 0.3f);
    EXPECT_EQ(values[2], 0x1p-9f * 0.3f);
    EXPECT_EQ(values.back(), 448 * 0.3f);
  }
}

TEST(Half, RoundsToTheNearestAndTiesToEven) {
  const auto value = [](uint32_t bits) { return ToFloat(F16{static_cast<uint16_t>(bits)}); };
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const float x = value(bits), above = bits + 1 == 0x7c00 ? 65536.0f : value(bits + 1);
    const float tie = x + (above - x) / 2;
    ASSERT_EQ(ToF16(x).bits, bits);
    ASSERT_EQ(ToF16(-x).bits, bits | 0x8000);
    ASSERT_EQ(ToF16(std::nextafter(tie, 0.0f)).bits, bits);
    ASSERT_EQ(ToF16(std::nextafter(tie, 1e9f)).bits, bits + 1);
    ASSERT_EQ(ToF16(tie).bits, bits % 2 == 0 ? bits : bits + 1);
  }
  EXPECT_EQ(ToF16(INFINITY).bits, 0x7c00);
  EXPECT_EQ(ToF16(1e30f).bits, 0x7c00);
  EXPECT_EQ(ToF16(1e-30f).bits, 0);
  EXPECT_TRUE(std::isnan(ToFloat(ToF16(NAN))));
}

TEST(Quantized, FourBitFloatsAreEightBitFloats) {
  for (int scale = 0; scale < 255; ++scale) {
    std::byte block[17] = {static_cast<std::byte>(scale)};
    for (int i = 0; i < 16; ++i) block[1 + i] = static_cast<std::byte>(i | (15 - i) << 4);
    std::byte as_float8[36];
    Mxfp4ToFloat8(block, 32, as_float8);
    float expected[32], values[32];
    DequantizeRow(WeightType::kMxfp4, block, 32, expected);
    DequantizeRow(WeightType::kF8x32, as_float8, 32, values);
    for (int i = 0; i < 32; ++i) {
      ASSERT_EQ(values[i], expected[i]) << "scale " << scale << ", value " << i;
    }
  }
}

}  // namespace
}  // namespace winnow::kernels
