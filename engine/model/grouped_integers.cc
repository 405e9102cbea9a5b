#include "engine/model/grouped_integers.h"

#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "engine/base/concat.h"
#include "kernels/check.h"
#include "kernels/host_matrix.h"

namespace winnow::engine {
namespace {

using kernels::WeightType;
using Layout = IntegerScheme::Layout;

constexpr int64_t kBlockValues = 32;

// Number `which` of the integers of `bits` bits in word `word` of `words`, as winnow counts them.
uint8_t InWord(const std::byte* words, int64_t word, int64_t which, int32_t bits) {
  uint32_t all;
  std::memcpy(&all, words + 4 * word, sizeof all);
  return static_cast<uint8_t>(all >> (bits * which) & ((1u << bits) - 1));
}

// The place of integer i of eight in AWQ's words.
int64_t AwqPlace(int64_t i) {
  constexpr std::array<int64_t, 8> kPlaces = {0, 4, 1, 5, 2, 6, 3, 7};
  return kPlaces[i];
}

// Whether float16 has the scale, or may have it rounded.
bool FitsF16(float scale, kernels::DType type) {
  const float rounded = kernels::ToFloat(kernels::ToF16(scale));
  if (type == kernels::DType::kF32) return std::fabs(rounded - scale) <= 0x1p-11f * scale;
  return rounded == scale;
}

}  // namespace

void GroupedIntegers::ReadIntegers(int64_t row, int64_t first, int64_t count, uint8_t* out) const {
  const auto read = [&]<int kBits>(std::integral_constant<int, kBits>) {
    constexpr int64_t n = 32 / kBits;  // in a word
    for (int64_t i = 0; i < count; ++i) {
      const int64_t col = first + i;
      switch (scheme.layout) {
        case Layout::kPlain:
          out[i] = static_cast<uint8_t>(integers[row * cols + col]) ^ 128;
          break;
        case Layout::kPacked:
          out[i] = InWord(integers, (row * cols + col) / n, col % n, kBits);
          break;
        case Layout::kGptq:
          out[i] = InWord(integers, col / n * rows + row, col % n, kBits);
          break;
        case Layout::kAwq:
          out[i] = InWord(integers, (col * rows + row) / n, AwqPlace(row % n), kBits);
          break;
      }
    }
  };
  if (scheme.bits == 4) {
    read(std::integral_constant<int, 4>());
  } else {
    read(std::integral_constant<int, 8>());
  }
}

// Zero points of 4 bits are 0 to 16, which products on a GPU count on (kernels/cuda/block_order.h): four bits, and at most one more.
int32_t GroupedIntegers::Zero(int64_t row, int64_t group) const {
  if (zeros == nullptr) return middle();
  const int64_t n = scheme.in_word();
  int32_t zero = 0;
  switch (scheme.layout) {
    case Layout::kPlain:
      zero = static_cast<uint8_t>(zeros[one_scale ? 0 : row * groups() + group]) ^ 128;
      break;
    case Layout::kPacked:
      zero = InWord(zeros, row / n * groups() + group, row % n, scheme.bits);
      break;
    case Layout::kGptq:
      zero = InWord(zeros, (group * rows + row) / n, row % n, scheme.bits);
      break;
    case Layout::kAwq:
      zero = InWord(zeros, (group * rows + row) / n, AwqPlace(row % n), scheme.bits);
      break;
  }
  WINNOW_CHECK(scheme.zero_less == 0 || scheme.zero_less == 1);
  return zero + scheme.zero_less;
}

float GroupedIntegers::Scale(int64_t row, int64_t group) const {
  const bool by_row = scheme.layout == Layout::kPacked || scheme.layout == Layout::kPlain;
  const int64_t place = one_scale ? 0 : by_row ? row * groups() + group : group * rows + row;
  return kernels::ElementAt(scales, scale_type, place);
}

int64_t GroupedIntegers::GroupOf(int64_t col) const {
  int32_t group;
  std::memcpy(&group, order + col * static_cast<int64_t>(sizeof group), sizeof group);
  return group;
}

absl::Status GroupedIntegers::CheckScales() const {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t group = 0; group < groups(); ++group) {
      const float scale = Scale(row, group);
      const bool good = scale > 0 && std::isfinite(scale);
      if (good && FitsF16(scale, scale_type)) continue;
      return absl::InvalidArgumentError(
          Concat("the scale of output ", row, ", group ", group, " is ", scale,
                 good ? ", which float16 cannot hold" : "; it must be finite and above 0"));
    }
  }
  return absl::OkStatus();
}

WeightType GroupedIntegers::block_type() const {
  if (scheme.bits == 8) return WeightType::kQ8_0;
  if (zeros == nullptr) return WeightType::kQ4_0;
  return group() % 128 == 0 ? WeightType::kI4x128 : WeightType::kI4x32;
}

int32_t GroupedIntegers::bits_as_i8x128() const {
  const WeightType type = block_type();
  const bool symmetric = type == WeightType::kQ8_0 || type == WeightType::kQ4_0;
  return symmetric && has_blocks() && (group() == cols || group() % 128 == 0) ? scheme.bits : 0;
}

void GroupedIntegers::WriteValues(int64_t row, float* out) const {
  struct OfGroup {
    float scale;
    int32_t zero;
  };
  std::vector<OfGroup> of(groups());
  for (int64_t g = 0; g < groups(); ++g) {
    of[g] = {kernels::ToFloat(kernels::ToF16(Scale(row, g))), Zero(row, g)};
  }
  std::vector<uint8_t> of_row(cols);
  ReadIntegers(row, 0, cols, of_row.data());
  const auto value = [&](int64_t col, const OfGroup& g) {
    return g.scale * static_cast<float>(of_row[col] - g.zero);
  };
  if (has_blocks()) {
    for (int64_t g = 0; g < groups(); ++g) {
      for (int64_t i = 0; i < group(); ++i) out[g * group() + i] = value(g * group() + i, of[g]);
    }
  } else {
    for (int64_t col = 0; col < cols; ++col) out[col] = value(col, of[GroupOf(col)]);
  }
}

void GroupedIntegers::WriteBlocks(int64_t row, std::byte* out) const {
  WINNOW_CHECK(has_blocks());
  const WeightType type = block_type();
  const kernels::BlockSize block = kernels::BlockSizeOf(type);
  for (int64_t at = 0; at < cols; at += block.values, out += block.bytes) {
    uint8_t of_block[128];
    ReadIntegers(row, at, block.values, of_block);
    const kernels::F16 scale = kernels::ToF16(Scale(row, at / group()));
    std::memcpy(out, &scale.bits, 2);
    std::byte* values = out + 2;
    if (type == WeightType::kQ8_0) {
      for (int64_t i = 0; i < block.values; ++i)
        values[i] = static_cast<std::byte>(of_block[i] ^ 128);
      continue;
    }
    if (type != WeightType::kQ4_0) {
      out[2] = static_cast<std::byte>(Zero(row, at / group()));
      out[3] = std::byte{0};
      values = out + 4;
    }
    for (int64_t first = 0; first < block.values; first += kBlockValues, values += 16) {
      for (int64_t i = 0; i < 16; ++i) {
        values[i] = static_cast<std::byte>(of_block[first + i] | of_block[first + i + 16] << 4);
      }
    }
  }
}

}  // namespace winnow::engine
