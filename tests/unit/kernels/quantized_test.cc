#include "kernels/quantized.h"

#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

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

// tests/golden/gguf/make_blocks.py says how they were made.
TEST(Quantized, EveryTypeDequantisesBitForBitAsPyPiGguf) {
  std::ifstream file(std::string(WINNOW_SOURCE_DIR) + "/tests/golden/gguf/blocks.json");
  const nlohmann::json goldens = nlohmann::json::parse(file);
  ASSERT_EQ(goldens.size(), static_cast<size_t>(kNumWeightTypes));
  for (const WeightType type : AllTypes()) {
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

}  // namespace
}  // namespace winnow::kernels
