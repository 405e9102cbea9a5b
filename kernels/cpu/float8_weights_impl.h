// 8-bit floats of panels (float8_panel.h) in registers. Included after one vec_*.h; see there for why this is in an anonymous
// namespace.
#ifndef WINNOW_KERNELS_CPU_FLOAT8_WEIGHTS_IMPL_H_
#define WINNOW_KERNELS_CPU_FLOAT8_WEIGHTS_IMPL_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/float8_panel.h"
#include "kernels/cpu/tile_impl.h"
#include "kernels/dtype.h"

namespace winnow::kernels {
namespace {

// Weights of a step become float16 by moving their magnitude seven bits up below the sign, and then float32. The sign comes
// along twice where 16 bits are shifted as a signed number; the mask takes the second away.
struct Float8Panels {
  static constexpr size_t kStepBytes = kFloat8StepBytes;
  // 12.4 to 14.4 ms a step of 1.35 GB with 16 threads of a Xeon where nothing is asked for, 11.4 to 12.4 so, 2 KiB 12.4 to 12.6.
  static constexpr size_t kAheadBytes = kOneRowAheadBytes;
  using Row = float;
  static constexpr int kRowPerStep = kFloat8StepInputs, kParts = 1;
  struct Weights {
    Vec::Reg first, second;
  };
  struct Input {
    Vec::Reg first, second;
  };
  static Weights LoadWeights(const std::byte* step, int i, int /*part*/) {
#if defined(__AVX512F__)
    const auto widen = [](__m256i high) {
      return _mm512_cvtph_ps(
          _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(kMask)));
    };
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step) + i);
    return {widen(_mm256_slli_epi16(pairs, 8)), widen(pairs)};
#elif defined(__AVX2__)
    const auto widen = [](__m128i high) {
      return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16(kMask)));
    };
    const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(step) + i);
    return {widen(_mm_slli_epi16(pairs, 8)), widen(pairs)};
#else
    uint16_t pair;
    std::memcpy(&pair, step + kFloat8StepInputs * i, sizeof pair);
    const auto widen = [](uint16_t high) {
      return ToFloat(F16{static_cast<uint16_t>((high & 0x8000) | (high & 0x7f00) >> 1)});
    };
    return {widen(static_cast<uint16_t>(pair << 8)), widen(pair)};
#endif
  }
  static Input LoadInput(const Row* row, int /*part*/) {
    return {Vec::Set1(row[0]), Vec::Set1(row[1])};
  }
  static Vec::Reg MulAdd(Input x, Weights w, Vec::Reg sum) {
    return Vec::MulAdd(x.second, w.second, Vec::MulAdd(x.first, w.first, sum));
  }

 private:
  [[maybe_unused]] static constexpr auto kMask = static_cast<int16_t>(0xbf80);
};

// A block's sums, times its outputs' scales, are added to `totals`; `block`: the first panel's.
template <int kRows, int kPanels>
inline void AddScaled(const TileSums<kRows, kPanels>& sums, const std::byte* block,
                      size_t panel_bytes, TileSums<kRows, kPanels>& totals) {
  for (int i = 0; i < totals.kRegs; ++i) {
    const Vec::Reg scale =
        Vec::Load(reinterpret_cast<const float*>(block + static_cast<size_t>(i / kRegsPerPanel) *
                                                             panel_bytes) +
                  i % kRegsPerPanel * Vec::kLanes);
    for (int r = 0; r < kRows; ++r) {
      totals.reg[r][i] = Vec::MulAdd(sums.reg[r][i], scale, totals.reg[r][i]);
    }
  }
}

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_FLOAT8_WEIGHTS_IMPL_H_
