#include "kernels/hash_encode.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace winnow::kernels {
namespace {

// In double, rounded twice: no result lies so close to the middle between two bfloat16 that the
// first rounding could matter (docs/artifact-format.md), and halves of subnormals are exact.
uint16_t Silu(uint16_t bits) {
  const double a = ToFloat(BF16{bits});
  if (std::isnan(a)) return 0x7fc0;
  const double clamped = std::max(a, -87.0);
  return ToBF16(static_cast<float>(clamped / (1.0 + std::exp(-clamped)))).bits;
}

std::array<uint16_t, 65536> MakeTable() {
  std::array<uint16_t, 65536> table{};
  for (size_t i = 0; i < table.size(); ++i) table[i] = Silu(static_cast<uint16_t>(i));
  return table;
}

}  // namespace

const uint16_t* SiluTable() {
  static const std::array<uint16_t, 65536> table = MakeTable();
  return table.data();
}

}  // namespace winnow::kernels
