// Matrix tiles as Intel describes them (tileloadd, tdpbf16ps, tdpbssd, tilestored), in plain C++: what *_amx_impl.h compute on a
// processor without them, and what those of a processor are compared with.
#ifndef WINNOW_TESTS_UNIT_KERNELS_EMULATED_TILES_H_
#define WINNOW_TESTS_UNIT_KERNELS_EMULATED_TILES_H_

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "kernels/dtype.h"

namespace winnow::kernels::emulated {

// "amx" where this processor has tiles; most have none.
inline std::vector<std::string> IsasWithTiles() {
  std::vector<std::string> isas;
  if (MakeCpuBackend("amx", 1) != nullptr) isas.emplace_back("amx");
  return isas;
}

struct Tile {
  int rows = 0, bytes_per_row = 0;
  std::array<std::array<std::byte, 64>, 16> bytes;

  float BF16Value(int row, int i) const {
    BF16 value;
    std::memcpy(&value, &bytes[row][2 * i], sizeof value);
    return ToFloat(value);
  }
};

// Denormals are zero, going in and coming out.
inline float Flush(float x) {
  return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
inline float FlushedMulAdd(float a, float b, float c) {
  return Flush(std::fma(Flush(a), Flush(b), Flush(c)));
}

// A class for amx_tiles_impl.h. One thread at a time.
class EmulatedTiles {
 public:
  template <typename Shapes>
  static void Configure(const Shapes& shapes) {
    for (size_t t = 0; t < tiles_.size(); ++t) {
      tiles_[t].rows = shapes[t].rows;
      tiles_[t].bytes_per_row = shapes[t].bytes_per_row;
      Clear(tiles_[t]);
    }
    configured_ = true;
  }
  template <int t>
  static void Zero() {
    Clear(At<t>());
  }
  template <int t>
  static void Load(const void* from, size_t stride) {
    Tile& tile = At<t>();
    Clear(tile);
    for (int r = 0; r < tile.rows; ++r) {
      std::memcpy(tile.bytes[r].data(), static_cast<const std::byte*>(from) + r * stride,
                  tile.bytes_per_row);
    }
  }
  template <int t>
  static void Store(void* to, size_t stride) {
    const Tile& tile = At<t>();
    for (int r = 0; r < tile.rows; ++r) {
      std::memcpy(static_cast<std::byte*>(to) + r * stride, tile.bytes[r].data(),
                  tile.bytes_per_row);
    }
  }
  template <int sum, int rows, int panel>
  static void Dot() {
    ForEachSum<sum, rows, panel, float>(
        [](const Tile& a, const Tile& b, int m, int n, float before) {
          float even = 0, odd = 0;
          for (int k = 0; k < b.rows; ++k) {
            even = FlushedMulAdd(a.BF16Value(m, 2 * k), b.BF16Value(k, 2 * n), even);
            odd = FlushedMulAdd(a.BF16Value(m, 2 * k + 1), b.BF16Value(k, 2 * n + 1), odd);
          }
          return Flush(Flush(before) + Flush(even + odd));
        });
  }
  template <int sum, int rows, int panel>
  static void DotBytes() {
    ForEachSum<sum, rows, panel, int32_t>([](const Tile& a, const Tile& b, int m, int n,
                                             int32_t before) {
      for (int k = 0; k < a.bytes_per_row; ++k) {
        before +=
            static_cast<int8_t>(a.bytes[m][k]) * static_cast<int8_t>(b.bytes[k / 4][4 * n + k % 4]);
      }
      return before;
    });
  }
  static void Release() { configured_ = false; }
  static bool configured() { return configured_; }

 private:
  // Each value of the tile `sum`, of row m and output n, becomes of(rows, panel, m, n, value).
  template <int sum, int rows, int panel, typename Value>
  static void ForEachSum(auto of) {
    Tile& c = At<sum>();
    const Tile& a = At<rows>();
    const Tile& b = At<panel>();
    EXPECT_EQ(c.rows, a.rows);
    EXPECT_EQ(c.bytes_per_row, b.bytes_per_row);
    EXPECT_EQ(b.rows, a.bytes_per_row / 4);
    for (int m = 0; m < c.rows; ++m) {
      for (int n = 0; n < c.bytes_per_row / 4; ++n) {
        Value value;
        std::memcpy(&value, &c.bytes[m][4 * n], sizeof value);
        value = of(a, b, m, n, value);
        std::memcpy(&c.bytes[m][4 * n], &value, sizeof value);
      }
    }
  }
  template <int t>
  static Tile& At() {
    EXPECT_TRUE(configured_);
    return tiles_[t];
  }
  static void Clear(Tile& tile) {
    for (auto& row : tile.bytes) row.fill(std::byte{0});
  }

  static inline std::array<Tile, 8> tiles_;
  static inline bool configured_ = false;
};

}  // namespace winnow::kernels::emulated

#endif  // WINNOW_TESTS_UNIT_KERNELS_EMULATED_TILES_H_
