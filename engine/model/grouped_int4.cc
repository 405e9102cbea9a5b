#include "engine/model/grouped_int4.h"

#include <array>
#include <cmath>
#include <cstring>

#include "engine/base/concat.h"
#include "kernels/check.h"
#include "kernels/host_matrix.h"

namespace winnow::engine {
namespace {

using kernels::WeightType;
using Layout = Int4Scheme::Layout;

constexpr int64_t kPerWord = 8;  // integers in an int32
constexpr int64_t kBlockValues = 32;

// Number `which` of the eight integers in word `word` of `words`, as winnow counts them.
uint8_t InWord(const std::byte* words, int64_t word, int64_t which) {
  uint32_t bits;
  std::memcpy(&bits, words + 4 * word, sizeof bits);
  return static_cast<uint8_t>(bits >> (4 * which) & 15);
}

// The place of integer i of eight in AWQ's words.
int64_t AwqPlace(int64_t i) {
  constexpr std::array<int64_t, kPerWord> kPlaces = {0, 4, 1, 5, 2, 6, 3, 7};
  return kPlaces[i];
}

}  // namespace

uint8_t GroupedInt4::Integer(int64_t row, int64_t col) const {
  switch (scheme.layout) {
    case Layout::kPacked:
      return InWord(integers, (row * cols + col) / kPerWord, col % kPerWord);
    case Layout::kGptq:
      return InWord(integers, col / kPerWord * rows + row, col % kPerWord);
    case Layout::kAwq:
      return InWord(integers, (col * rows + row) / kPerWord, AwqPlace(row % kPerWord));
  }
  return 0;
}

// 0 to 16, which products on a GPU count on (kernels/cuda/block_order.h): four bits, and at most one more.
uint8_t GroupedInt4::Zero(int64_t row, int64_t group) const {
  if (zeros == nullptr) return 8;
  uint8_t zero = 0;
  switch (scheme.layout) {
    case Layout::kPacked:
      zero = InWord(zeros, row / kPerWord * groups() + group, row % kPerWord);
      break;
    case Layout::kGptq:
      zero = InWord(zeros, (group * rows + row) / kPerWord, row % kPerWord);
      break;
    case Layout::kAwq:
      zero = InWord(zeros, (group * rows + row) / kPerWord, AwqPlace(row % kPerWord));
      break;
  }
  WINNOW_CHECK(scheme.zero_less == 0 || scheme.zero_less == 1);
  return static_cast<uint8_t>(zero + scheme.zero_less);
}

float GroupedInt4::Scale(int64_t row, int64_t group) const {
  const int64_t place =
      scheme.layout == Layout::kPacked ? row * groups() + group : group * rows + row;
  return kernels::ElementAt(scales, scale_type, place);
}

absl::Status GroupedInt4::CheckScales() const {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t group = 0; group < groups(); ++group) {
      const float scale = Scale(row, group);
      const bool good = scale > 0 && std::isfinite(scale);
      if (good && kernels::ToFloat(kernels::ToF16(scale)) == scale) continue;
      return absl::InvalidArgumentError(
          Concat("the scale of output ", row, ", group ", group, " is ", scale,
                 good ? ", which float16 cannot hold" : "; it must be finite and above 0"));
    }
  }
  return absl::OkStatus();
}

WeightType GroupedInt4::block_type() const {
  if (zeros == nullptr) return WeightType::kQ4_0;
  return scheme.group % 128 == 0 ? WeightType::kI4x128 : WeightType::kI4x32;
}

void GroupedInt4::WriteBlocks(int64_t row, std::byte* out) const {
  const WeightType type = block_type();
  const kernels::BlockSize block = kernels::BlockSizeOf(type);
  for (int64_t at = 0; at < cols; at += block.values, out += block.bytes) {
    const int64_t group = at / scheme.group;
    const kernels::F16 scale = kernels::ToF16(Scale(row, group));
    std::memcpy(out, &scale.bits, 2);
    std::byte* packed = out + 2;
    if (type != WeightType::kQ4_0) {
      out[2] = std::byte{Zero(row, group)};
      out[3] = std::byte{0};
      packed = out + 4;
    }
    for (int64_t first = 0; first < block.values; first += kBlockValues, packed += 16) {
      for (int64_t i = 0; i < 16; ++i) {
        const int low = Integer(row, at + first + i), high = Integer(row, at + first + i + 16);
        packed[i] = static_cast<std::byte>(low | high << 4);
      }
    }
  }
}

}  // namespace winnow::engine
