// What tests of kernels share: every backend this processor has, fresh random inputs, comparisons.
#ifndef WINNOW_TESTS_UNIT_KERNELS_KERNEL_TESTING_H_
#define WINNOW_TESTS_UNIT_KERNELS_KERNEL_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "tests/unit/kernels/guarded_array.h"
#include "tests/unit/test_seed.h"

namespace winnow::kernels {

// A generator whose seed is new in every run and is printed with a failure; WINNOW_TEST_SEED
// repeats one.
class Random {
 public:
  Random() : seed_(TestSeed()), engine_(seed_) {}
  uint64_t seed() const { return seed_; }
  int64_t Int(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  float Normal(float deviation = 1.0f) {
    return std::normal_distribution<float>(0, deviation)(engine_);
  }
  template <typename T>
  void Shuffle(std::vector<T>& values) {
    std::shuffle(values.begin(), values.end(), engine_);
  }

 private:
  const uint64_t seed_;
  std::mt19937_64 engine_;
};

// A matrix that owns its values, with rows further apart than their width: a kernel that takes the
// width for the stride fails, and writes between rows are seen. Behind the last row nothing can be touched.
class Matrix {
 public:
  static constexpr float kGuard = 12345.0f;

  Matrix(int64_t rows, int64_t cols, int64_t padding = 3)
      : rows_(rows),
        cols_(cols),
        stride_(cols + padding),
        values_(rows > 0 ? rows * stride_ - padding : 0, kGuard) {
    for (int64_t i = 0; i < rows; ++i) std::fill(row(i), row(i) + cols, 0.0f);
  }
  static Matrix Normal(Random& random, int64_t rows, int64_t cols, float deviation = 1.0f,
                       int64_t padding = 3) {
    Matrix matrix(rows, cols, padding);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) matrix.row(i)[j] = random.Normal(deviation);
    }
    return matrix;
  }
  float* row(int64_t i) { return values_.data() + i * stride_; }
  const float* row(int64_t i) const { return values_.data() + i * stride_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  Tensor tensor() { return {values_.data(), DType::kF32, rows_, cols_, stride_}; }
  bool GuardsIntact() const {
    for (int64_t i = 0; i + 1 < rows_; ++i) {
      for (int64_t j = cols_; j < stride_; ++j) {
        if (row(i)[j] != kGuard) return false;
      }
    }
    return true;
  }

 private:
  int64_t rows_, cols_, stride_;
  GuardedArray<float> values_;
};

// Weights as a file holds them: any dtype, at an odd address.
class FileMatrix {
 public:
  FileMatrix(Random& random, int64_t rows, int64_t cols, DType dtype, float deviation = 1.0f)
      : rows_(rows), cols_(cols), dtype_(dtype), bytes_(1 + rows * cols * DTypeBytes(dtype)) {
    for (int64_t i = 0; i < rows * cols; ++i) {
      std::byte* to = bytes_.data() + 1 + i * DTypeBytes(dtype);
      if (dtype == DType::kF16) {
        const F16 value = ToF16(static_cast<float>(random.Int(-1000, 1000)) / 1024.0f * deviation);
        std::memcpy(to, &value, 2);
      } else if (dtype == DType::kBF16) {
        const BF16 value = ToBF16(random.Normal(deviation));
        std::memcpy(to, &value, 2);
      } else {
        const float value = random.Normal(deviation);
        std::memcpy(to, &value, 4);
      }
    }
  }
  HostMatrix host() const { return {bytes_.data() + 1, dtype_, rows_, cols_}; }

 private:
  int64_t rows_, cols_;
  DType dtype_;
  GuardedArray<std::byte> bytes_;
};

inline const std::vector<std::string>& AvailableIsas() {
  static const std::vector<std::string> isas = [] {
    std::vector<std::string> found;
    for (const char* isa : {"scalar", "avx2", "avx512", "amx"}) {
      if (MakeCpuBackend(isa, 1) != nullptr) found.push_back(isa);
    }
    return found;
  }();
  return isas;
}

// Runs a test once for every instruction set of this processor.
class EachIsa : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { RecordProperty("seed", std::to_string(random_.seed())); }
  std::unique_ptr<Backend> Make(int num_threads) const {
    return MakeCpuBackend(GetParam(), num_threads);
  }
  std::string Seed() const { return "WINNOW_TEST_SEED=" + std::to_string(random_.seed()); }

  Random random_;
};

#define WINNOW_FOR_EACH_ISA(suite)                    \
  INSTANTIATE_TEST_SUITE_P(                           \
      Cpu, suite, testing::ValuesIn(AvailableIsas()), \
      [](const testing::TestParamInfo<std::string>& info) { return info.param; })

// |actual - expected| <= absolute + relative * |expected| everywhere.
inline void ExpectNear(const Matrix& actual, const Matrix& expected, double absolute,
                       double relative) {
  ASSERT_EQ(actual.rows(), expected.rows());
  ASSERT_EQ(actual.cols(), expected.cols());
  for (int64_t i = 0; i < actual.rows(); ++i) {
    for (int64_t j = 0; j < actual.cols(); ++j) {
      const double a = actual.row(i)[j], e = expected.row(i)[j];
      ASSERT_LE(std::abs(a - e), absolute + relative * std::abs(e))
          << "row " << i << " column " << j << ": " << a << " for " << e;
    }
  }
  EXPECT_TRUE(actual.GuardsIntact());
}

// The same bits in row `i` of a and row `j` of b.
inline testing::AssertionResult SameBits(const Matrix& a, int64_t i, const Matrix& b, int64_t j) {
  for (int64_t column = 0; column < a.cols(); ++column) {
    if (std::bit_cast<uint32_t>(a.row(i)[column]) != std::bit_cast<uint32_t>(b.row(j)[column])) {
      return testing::AssertionFailure()
             << "rows " << i << " and " << j << " differ in column " << column << ": "
             << a.row(i)[column] << " and " << b.row(j)[column];
    }
  }
  return testing::AssertionSuccess();
}
inline testing::AssertionResult SameBits(const Matrix& a, const Matrix& b) {
  for (int64_t i = 0; i < a.rows(); ++i) {
    if (auto same = SameBits(a, i, b, i); !same) return same;
  }
  return testing::AssertionSuccess();
}

}  // namespace winnow::kernels

#endif  // WINNOW_TESTS_UNIT_KERNELS_KERNEL_TESTING_H_
