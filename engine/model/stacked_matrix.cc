#include "engine/model/stacked_matrix.h"

#include <cstring>

#include "kernels/host_matrix.h"

namespace winnow::engine {

const std::byte* StackedMatrix::FirstOf(int64_t row) const {
  const auto value_bytes = static_cast<int64_t>(kernels::DTypeBytes(dtype_));
  return values_ + (row / outputs_ * inputs_ * outputs_ + row % outputs_) * value_bytes;
}

void StackedMatrix::WriteValues(int64_t row, float* out) const {
  const std::byte* const from = FirstOf(row);
  for (int64_t i = 0; i < inputs_; ++i) out[i] = kernels::ElementAt(from, dtype_, i * outputs_);
}

void StackedMatrix::WriteBlocks(int64_t row, std::byte* out) const {
  const std::byte* const from = FirstOf(row);
  const auto value_bytes = static_cast<int64_t>(kernels::DTypeBytes(dtype_));
  for (int64_t i = 0; i < inputs_; ++i) {
    std::memcpy(out + i * value_bytes, from + i * outputs_ * value_bytes,
                static_cast<size_t>(value_bytes));
  }
}

}  // namespace winnow::engine
