#include "engine/model/grouped_integers.h"

#include <array>
#include <cmath>
#include <cstring>
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

uint8_t GroupedIntegers::Integer(int64_t row, int64_t col) const {
  const int64_t n = scheme.in_word();
  switch (scheme.layout) {
    case Layout::kPlain:
      return static_cast<uint8_t>(integers[row * cols + col]) ^ 128;
    case Layout::kPacked:
      return InWord(integers, (row * cols + col) / n, col % n, scheme.bits);
    case Layout::kGptq:
      return InWord(integers, col / n * rows + row, col % n, scheme.bits);
    case Layout::kAwq:
      return InWord(integers, (col * rows + row) / n, AwqPlace(row % n), scheme.bits);
  }
  return 0;
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
  if (order == nullptr) return col / group();
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

bool GroupedIntegers::is_i8x128() const {
  return scheme.bits == 8 && has_blocks() && (group() == cols || group() % 128 == 0);
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
  for (int64_t col = 0; col < cols; ++col) {
    const OfGroup& g = of[GroupOf(col)];
    out[col] = g.scale * static_cast<float>(Integer(row, col) - g.zero);
  }
}

void GroupedIntegers::WriteBlocks(int64_t row, std::byte* out) const {
  WINNOW_CHECK(has_blocks());
  const WeightType type = block_type();
  const kernels::BlockSize block = kernels::BlockSizeOf(type);
  for (int64_t at = 0; at < cols; at += block.values, out += block.bytes) {
    const kernels::F16 scale = kernels::ToF16(Scale(row, at / group()));
    std::memcpy(out, &scale.bits, 2);
    std::byte* values = out + 2;
    if (type == WeightType::kQ8_0) {
      for (int64_t i = 0; i < block.values; ++i) {
        values[i] = static_cast<std::byte>(Integer(row, at + i) ^ 128);
      }
      continue;
    }
    if (type != WeightType::kQ4_0) {
      out[2] = static_cast<std::byte>(Zero(row, at / group()));
      out[3] = std::byte{0};
      values = out + 4;
    }
    for (int64_t first = 0; first < block.values; first += kBlockValues, values += 16) {
      for (int64_t i = 0; i < 16; ++i) {
        const int low = Integer(row, at + first + i), high = Integer(row, at + first + i + 16);
        values[i] = static_cast<std::byte>(low | high << 4);
      }
    }
  }
}

}  // namespace winnow::engine
