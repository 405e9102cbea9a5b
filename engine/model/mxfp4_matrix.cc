#include "engine/model/mxfp4_matrix.h"

#include <algorithm>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "kernels/dtype.h"

namespace winnow::engine {
namespace {

constexpr int64_t kValues = 32;  // of a scale
constexpr int64_t kBytes = kValues / 2;
// Six times the next power of two, 2^126, is more than the largest float32. 255 is no number.
constexpr uint8_t kMostScale = 252;

uint8_t Half(std::byte both, bool high) {
  return std::to_integer<uint8_t>(high ? both >> 4 : both & std::byte{15});
}

}  // namespace

absl::StatusOr<std::unique_ptr<Mxfp4Matrix>> Mxfp4Matrix::Take(const std::string& name,
                                                               std::string_view file,
                                                               int64_t experts, int64_t outputs,
                                                               int64_t inputs,
                                                               const TakeTensor& take) {
  const auto u64 = [](int64_t x) { return static_cast<uint64_t>(x); };
  std::optional<FileTensor> tensors[2];
  constexpr std::string_view kSuffixes[] = {"_blocks", "_scales"};
  for (int i = 0; i < 2; ++i) {
    const std::string wanted = Concat(name, kSuffixes[i]);
    tensors[i] = take(wanted);
    if (!tensors[i].has_value()) {
      return absl::NotFoundError(Concat(file, ": tensor ", ShortDump(wanted), " is missing"));
    }
  }
  if (inputs % kValues != 0) {
    return WrongTensor(*tensors[0],
                       Concat("rows of ", inputs, " values, which are no multiple of 32"));
  }
  const int64_t groups = inputs / kValues;
  WINNOW_RETURN_IF_ERROR(
      CheckForm(*tensors[0], {u64(experts), u64(outputs), u64(groups), u64(kBytes)}, {"U8"}));
  WINNOW_RETURN_IF_ERROR(CheckForm(*tensors[1], {u64(experts), u64(outputs), u64(groups)}, {"U8"}));
  const std::span<const std::byte> scales = tensors[1]->file->Data(tensors[1]->entry);
  const auto wrong = std::find_if(scales.begin(), scales.end(),
                                  [](std::byte scale) { return scale > std::byte{kMostScale}; });
  if (wrong != scales.end()) {
    const int64_t at = wrong - scales.begin();
    return WrongTensor(*tensors[1],
                       Concat("the scale of expert ", at / groups / outputs, ", output ",
                              at / groups % outputs, ", inputs from ", at % groups * kValues,
                              " on is 2^", std::to_integer<int>(*wrong) - 127,
                              " (255: no number); 2^", int{kMostScale} - 127, " is the largest"));
  }
  std::unique_ptr<Mxfp4Matrix> matrix(new Mxfp4Matrix);
  matrix->inputs_ = inputs;
  matrix->blocks_ = tensors[0]->data();
  matrix->scales_ = scales.data();
  return matrix;
}

void Mxfp4Matrix::WriteValues(int64_t row, float* out) const {
  const int64_t groups = inputs_ / kValues;
  for (int64_t group = row * groups; group < (row + 1) * groups; ++group) {
    const auto code = std::to_integer<uint8_t>(scales_[group]);
    const float scale = kernels::ToFloat(kernels::Mxfp4Scale(code));
    const std::byte* const packed = blocks_ + group * kBytes;
    for (int64_t i = 0; i < kValues; ++i) {
      *out++ = scale * static_cast<float>(kernels::kDoubledE2M1[Half(packed[i / 2], i % 2 != 0)]);
    }
  }
}

void Mxfp4Matrix::WriteBlocks(int64_t row, std::byte* out) const {
  const int64_t groups = inputs_ / kValues;
  for (int64_t group = row * groups; group < (row + 1) * groups; ++group) {
    const std::byte* const packed = blocks_ + group * kBytes;
    *out++ = scales_[group];
    // Byte i of a block has values i and i + 16 (kernels/quantized.cc).
    for (int64_t i = 0; i < kBytes; ++i) {
      const bool high = i % 2 != 0;
      *out++ = static_cast<std::byte>(Half(packed[i / 2], high) |
                                      Half(packed[kBytes / 2 + i / 2], high) << 4);
    }
  }
}

}  // namespace winnow::engine
