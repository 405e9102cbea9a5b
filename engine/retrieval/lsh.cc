#include "engine/retrieval/lsh.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "engine/base/counter_random.h"
#include "kernels/check.h"
#include "kernels/dtype.h"

namespace winnow::engine {
namespace {

// Any number would do. It is part of the format of stored codes.
constexpr uint64_t kSeed = 0x77696e6e6f770001;  // "winnow", 1

// Below it a product with a small input could be inexact, and codes with it
// (docs/artifact-format.md).
constexpr float kSmallestWeight = 0x1p-30f;

// Four sums side by side, in one order on every machine: a single one would wait for itself.
double Dot(const double* a, const double* b, int32_t size) {
  std::array<double, 4> sums = {};
  int32_t i = 0;
  for (; i + 4 <= size; i += 4) {
    for (int32_t lane = 0; lane < 4; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < size; ++i) sums[0] += a[i] * b[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// row -= 2 (row . v) v: the mirror image of row in the plane that the unit vector v is normal to.
void Reflect(double* row, const double* v, int32_t size) {
  const double twice = 2 * Dot(row, v, size);
  for (int32_t i = 0; i < size; ++i) row[i] -= twice * v[i];
}

std::vector<double> Gaussian(int64_t size, uint64_t seed, uint64_t first_index) {
  std::vector<double> numbers(size);
  for (int64_t i = 0; i < size; ++i) {
    const uint64_t index = first_index + 2 * static_cast<uint64_t>(i);
    const double radius = std::sqrt(-2 * std::log(1 - CounterRandom(seed, index)));  // 1 - [0, 1)
    numbers[i] = radius * std::cos(2 * std::numbers::pi * CounterRandom(seed, index + 1));
  }
  return numbers;
}

}  // namespace

// A Gaussian matrix is L Q with L lower triangular and Q orthogonal; Q is uniformly distributed if
// L's diagonal is positive (Mezzadri, Notices of the AMS 2007). Reflections H_0, H_1, ... applied
// from the right make the rows of A triangular one after the other: A H_0 ... H_{dim-2} = L, so
// Q = H_{dim-2} ... H_0. Each reflection has determinant -1, which is how the sign is known.
std::vector<double> RandomRotation(int32_t dim, uint64_t seed, int32_t number) {
  WINNOW_CHECK(dim >= 2 && number >= 0);
  const int64_t size = int64_t{dim} * dim;
  std::vector<double> a = Gaussian(size, seed, 2 * static_cast<uint64_t>(size) * number);
  bool positive = true;  // the determinant so far
  std::vector<bool> negated(dim);
  for (int32_t k = 0; k + 1 < dim; ++k) {
    // Row k, from column k on, is mapped to (l, 0, ..., 0); v lies where the row was.
    double* v = &a[k * dim + k];
    const int32_t rest = dim - k;
    const double l = std::copysign(std::sqrt(Dot(v, v, rest)), -v[0]);  // this sign cancels nothing
    v[0] -= l;
    const double norm = std::sqrt(Dot(v, v, rest));
    for (int32_t i = 0; i < rest; ++i) v[i] /= norm;
    for (int32_t row = k + 1; row < dim; ++row) Reflect(&a[row * dim + k], v, rest);
    negated[k] = l < 0;
    positive = positive == negated[k];  // -1 of the reflection, times the sign of l
  }
  negated[dim - 1] = a[size - 1] < 0;
  positive = positive != negated[dim - 1];
  if (!positive) negated[dim - 1] = !negated[dim - 1];

  std::vector<double> q(size);
  for (int32_t row = 0; row < dim; ++row) {
    q[row * dim + row] = negated[row] ? -1 : 1;
    // The reflections after `row` do not reach its unit vector.
    for (int32_t k = std::min(row, dim - 2); k >= 0; --k)
      Reflect(&q[row * dim + k], &a[k * dim + k], dim - k);
  }
  return q;
}

LshEncoder::LshEncoder(int32_t layer, int32_t kv_heads, int32_t head_dim, int32_t bits)
    : kv_heads_(kv_heads), head_dim_(head_dim), bits_(bits) {
  WINNOW_CHECK(layer >= 0 && kv_heads >= 1 && head_dim >= 2);
  WINNOW_CHECK(bits >= 32 && bits <= 1024 && (bits & (bits - 1)) == 0);
  weight_.reserve(int64_t{kv_heads} * bits * head_dim);
  bias_.resize(int64_t{kv_heads} * bits);
  for (int32_t head = 0; head < kv_heads; ++head) {
    // Another seed is another key of the generator: no two heads share a number.
    const uint64_t seed =
        kSeed ^ (static_cast<uint64_t>(layer) << 32 | static_cast<uint64_t>(head) << 16);
    for (int32_t row = 0; row < bits; row += head_dim) {
      const std::vector<double> rotation = RandomRotation(head_dim, seed, row / head_dim);
      const int64_t used = int64_t{std::min(bits - row, head_dim)} * head_dim;
      for (int64_t i = 0; i < used; ++i) {
        const auto weight = static_cast<float>(rotation[i]);
        weight_.push_back(std::fabs(weight) < kSmallestWeight ? 0 : kernels::ToBF16(weight).bits);
      }
    }
  }
}

kernels::EncoderWeights LshEncoder::weights() const {
  return {.kv_heads = kv_heads_,
          .queries_per_input = 1,
          .stages = {{.weight = weight_, .bias = bias_, .in = head_dim_, .out = bits_}}};
}

}  // namespace winnow::engine
