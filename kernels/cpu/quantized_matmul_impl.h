// See kernels/quantized_matmul.h. Compiled by quantized_matmul_{scalar,avx2,avx512}.cc.
#include <cmath>
#include <cstring>

#include "kernels/cpu/ops.h"
#include "kernels/cpu/quantized_panel.h"
#include "kernels/cpu/store_tile_impl.h"
#include "kernels/cpu/tile_loops_impl.h"
#include "kernels/quantized_matmul.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

constexpr int kRegs = static_cast<int>(kPanelOutputs) / Vec::kLanes;  // of a panel

// Lanes of 32 bits, one for each output of a register.
//   Dot(sum, w, x)   sum + Σ over four bytes of (w - kTaken) · x, where w is unsigned and x signed
#if defined(__AVX512VNNI__)
struct Ints {
  using Reg = __m512i;
  static constexpr int32_t kTaken = 0;
  static Reg Zero() { return _mm512_setzero_si512(); }
  static Reg Set1(int32_t x) { return _mm512_set1_epi32(x); }
  static Reg Load(const std::byte* step, int) { return _mm512_loadu_si512(step); }
  static Reg LowHalves(Reg x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
  static Reg HighHalves(Reg x) { return LowHalves(_mm512_srli_epi16(x, 4)); }
  template <int kBits>
  static Reg Dot(Reg sum, Reg w, Reg x) {
    return _mm512_dpbusd_epi32(sum, w, x);
  }
  static Vec::Reg ToFloat(Reg x) { return _mm512_cvtepi32_ps(x); }
  static Vec::Reg SignedBytes(const std::byte* at) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
  }
};
#elif defined(__AVX2__)
// Its product of unsigned and signed bytes adds pairs in 16 bits, where those of 255 and 127 have no room. So wide
// integers are taken as signed ones, whose sign goes over to x.
struct Ints {
  using Reg = __m256i;
  static constexpr int32_t kTaken = 128;
  static Reg Zero() { return _mm256_setzero_si256(); }
  static Reg Set1(int32_t x) { return _mm256_set1_epi32(x); }
  static Reg Load(const std::byte* step, int i) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step) + i);
  }
  static Reg LowHalves(Reg x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
  static Reg HighHalves(Reg x) { return LowHalves(_mm256_srli_epi16(x, 4)); }
  template <int kBits>
  static Reg Dot(Reg sum, Reg w, Reg x) {
    if constexpr (kBits == 8) {
      w = _mm256_xor_si256(w, _mm256_set1_epi8(static_cast<char>(0x80)));
      x = _mm256_sign_epi8(x, w);
      w = _mm256_abs_epi8(w);
    }
    const Reg pairs = _mm256_maddubs_epi16(w, x);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static Vec::Reg ToFloat(Reg x) { return _mm256_cvtepi32_ps(x); }
  static Vec::Reg SignedBytes(const std::byte* at) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
  }
};
#else
struct Ints {
  using Reg = int32_t;  // as a step: four bytes
  static constexpr int32_t kTaken = 0;
  static Reg Zero() { return 0; }
  static Reg Set1(int32_t x) { return x; }
  static Reg Load(const std::byte* step, int i) {
    Reg x;
    std::memcpy(&x, step + 4 * i, 4);
    return x;
  }
  static Reg LowHalves(Reg x) { return x & 0x0f0f0f0f; }
  static Reg HighHalves(Reg x) { return (x >> 4) & 0x0f0f0f0f; }
  template <int kBits>
  static Reg Dot(Reg sum, Reg w, Reg x) {
    for (int j = 0; j < 4; ++j) {
      sum += static_cast<uint8_t>(static_cast<uint32_t>(w) >> (8 * j)) *
             static_cast<int8_t>(static_cast<uint32_t>(x) >> (8 * j));
    }
    return sum;
  }
  static Vec::Reg ToFloat(Reg x) { return static_cast<float>(x); }
  static Vec::Reg SignedBytes(const std::byte* at) {
    return static_cast<float>(static_cast<int8_t>(std::to_integer<uint8_t>(*at)));
  }
};
#endif

struct Row {
  const std::byte* integers;
  const float *scales, *scaled_sums;
  const int32_t* sums;
};

// Four inputs in every lane. From memory, as a broadcast out of a register costs a port that products need.
inline Ints::Reg FourInputs(const std::byte* at) {
  int32_t four;
  std::memcpy(&four, at, sizeof four);
  return Ints::Set1(four);
}

// A type's groups, as far as the inner loops ask.
template <int kBitsOf, int kGroupOf, bool kCodesOf, bool kOffsetOf>
struct Kind {
  static constexpr int kBits = kBitsOf;
  static constexpr int kGroup = kGroupOf;
  static constexpr bool kCodes = kCodesOf;
  static constexpr bool kOffset = kOffsetOf;
  static constexpr int64_t kIntegerBytes = kGroup * kPanelOutputs * kBits / 8;
};

// Scales (which = 0) or offsets (1) of a group, for outputs of register i.
template <typename K>
inline Vec::Reg GroupFactor(const std::byte* head, const std::byte* group, int which, int i) {
  const std::byte* own = group + K::kIntegerBytes;
  const auto halves = [&](const std::byte* from) {
    return Vec::LoadF16(reinterpret_cast<const uint16_t*>(from) + which * kPanelOutputs +
                        i * Vec::kLanes);
  };
  if constexpr (!K::kCodes) return halves(own);
  // Offset codes have 6 bits, so that their sign is never set.
  return Vec::Mul(halves(head), Ints::SignedBytes(own + which * kPanelOutputs + i * Vec::kLanes));
}

// Adds a group to the sums of kRows rows and kPanels panels. `at`: the group's first input.
template <typename K, int kRows, int kPanels>
inline void AddGroup(const Row* rows, int64_t at, int32_t bias, const std::byte* head,
                     const std::byte* group, int64_t panel_bytes,
                     Vec::Reg (&sums)[kRows][kPanels * kRegs]) {
  // Integers begin at what is taken from them: types with offsets take nothing.
  constexpr bool kTakes = !K::kOffset || (K::kBits == 8 && Ints::kTaken != 0);
  const int32_t taken = bias - (K::kBits == 8 ? Ints::kTaken : 0);
  Ints::Reg products[kRows][kPanels * kRegs];
  for (int r = 0; r < kRows; ++r) {
    Ints::Reg first = Ints::Zero();
    if constexpr (kTakes) {
      int32_t sum = rows[r].sums[at / 16];
      if constexpr (K::kGroup == 32) sum += rows[r].sums[at / 16 + 1];
      first = Ints::Set1(-taken * sum);
    }
    for (Ints::Reg& product : products[r]) product = first;
  }
  constexpr int kStepInputs = K::kBits == 4 ? 8 : 4;
  for (int step = 0; step < K::kGroup / kStepInputs; ++step) {
    Ints::Reg low[kPanels * kRegs];
    [[maybe_unused]] Ints::Reg high[kPanels * kRegs];
    for (int i = 0; i < kPanels * kRegs; ++i) {
      low[i] = Ints::Load(group + i / kRegs * panel_bytes + step * kStepBytes, i % kRegs);
      if constexpr (K::kBits == 4) {
        high[i] = Ints::HighHalves(low[i]);
        low[i] = Ints::LowHalves(low[i]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      const std::byte* inputs = rows[r].integers + at + step * kStepInputs;
      const Ints::Reg first = FourInputs(inputs);
      for (int i = 0; i < kPanels * kRegs; ++i) {
        products[r][i] = Ints::Dot<K::kBits>(products[r][i], low[i], first);
      }
      if constexpr (K::kBits == 4) {
        const Ints::Reg second = FourInputs(inputs + 4);
        for (int i = 0; i < kPanels * kRegs; ++i) {
          products[r][i] = Ints::Dot<4>(products[r][i], high[i], second);
        }
      }
    }
  }
  for (int i = 0; i < kPanels * kRegs; ++i) {
    const int64_t panel = i / kRegs * panel_bytes;
    const Vec::Reg scale = GroupFactor<K>(head + panel, group + panel, 0, i % kRegs);
    [[maybe_unused]] Vec::Reg offset;
    if constexpr (K::kOffset) offset = GroupFactor<K>(head + panel, group + panel, 1, i % kRegs);
    for (int r = 0; r < kRows; ++r) {
      Vec::Reg& to = sums[r][i];
      const Vec::Reg t = Vec::Set1(rows[r].scales[at / 32]);
      to = Vec::MulAdd(Ints::ToFloat(products[r][i]), Vec::Mul(scale, t), to);
      if constexpr (K::kOffset) {
        to = Vec::MulAdd(offset, Vec::Set1(rows[r].scaled_sums[at / 32]), to);
      }
    }
  }
}

// One row takes more panels at a time, because each product waits for the one before it on the same output.
template <typename K>
struct QuantizedKernel {
  static constexpr int kMostRows = kRegs == 16 ? 2 : 4, kMostPanels = kRegs == 1 ? 2 : 1;
  static constexpr int kOneRowPanels = kRegs == 1 ? 4 : kRegs == 2 ? 2 : 1;

  template <int kRows, int kPanels>
  static void Tile(const QuantizedMatmulCall& call, int64_t row, int64_t panel) {
    const int64_t n = call.in_features;
    const int64_t panel_bytes = QuantizedPanelBytes(call.shape, n);
    Row rows[kRows];
    for (int r = 0; r < kRows; ++r) {
      const std::byte* at =
          static_cast<const std::byte*>(call.rows) + static_cast<size_t>(row + r) * call.row_bytes;
      rows[r] = {at, reinterpret_cast<const float*>(at + PreparedRow::ScalesAt(n)),
                 reinterpret_cast<const float*>(at + PreparedRow::ScaledSumsAt(n)),
                 reinterpret_cast<const int32_t*>(at + PreparedRow::SumsAt(n))};
    }
    Vec::Reg sums[kRows][kPanels * kRegs];
    for (auto& row_sums : sums) {
      for (Vec::Reg& sum : row_sums) sum = Vec::Zero();
    }
    const std::byte* block = call.panels + panel * panel_bytes;
    const int64_t head_bytes = PanelHeadBytes(call.shape);
    const int64_t group_bytes = PanelGroupBytes(call.shape);
    const int64_t groups = call.shape.groups();
    for (int64_t at = 0; at < n;) {
      const std::byte* group = block + head_bytes;
      for (int64_t g = 0; g < groups; ++g, at += K::kGroup, group += group_bytes) {
        AddGroup<K, kRows, kPanels>(rows, at, call.shape.bias, block, group, panel_bytes, sums);
      }
      block = group;
    }
    StoreTile(call, row, panel, sums);
  }
};

}  // namespace

void QuantizedMatmulTiles(const QuantizedMatmulCall& call, int64_t first_row, int64_t last_row,
                          int64_t first_panel, int64_t last_panel) {
  const BlockShape& shape = call.shape;
  const auto run = [&](auto kind) {
    TileLoops<QuantizedKernel<decltype(kind)>, QuantizedMatmulCall>::Run(call, first_row, last_row,
                                                                         first_panel, last_panel);
  };
  if (shape.group == 16) return run(Kind<8, 16, true, false>());
  if (shape.has_codes) {
    return shape.bits == 4 ? run(Kind<4, 32, true, true>()) : run(Kind<8, 32, true, true>());
  }
  if (shape.has_offset) {
    return shape.bits == 4 ? run(Kind<4, 32, false, true>()) : run(Kind<8, 32, false, true>());
  }
  return shape.bits == 4 ? run(Kind<4, 32, false, false>()) : run(Kind<8, 32, false, false>());
}

void PrepareRoundedRow(const float* x, int64_t n, void* out) {
  std::byte* to = static_cast<std::byte*>(out);
  float* scales = reinterpret_cast<float*>(to + PreparedRow::ScalesAt(n));
  int32_t* sums = reinterpret_cast<int32_t*>(to + PreparedRow::SumsAt(n));
  float* scaled_sums = reinterpret_cast<float*>(to + PreparedRow::ScaledSumsAt(n));
  for (int64_t at = 0; at < n; at += kRoundedValues) {
    // The bits of magnitudes are in their order, and those that are not finite come last.
    uint32_t bits[kRoundedValues], largest_bits = 0;
    std::memcpy(bits, x + at, sizeof bits);
    for (int64_t i = 0; i < kRoundedValues; ++i) {
      const uint32_t magnitude = bits[i] & 0x7fffffffu;
      largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
    }
    float largest;
    std::memcpy(&largest, &largest_bits, sizeof largest);
    const bool finite = largest_bits < 0x7f800000u;
    const bool zero = !finite || largest < kLeastRounded;
    const float inverse = zero ? 0 : 127 / largest;
    scales[at / kRoundedValues] = !finite ? NAN : zero ? 0 : largest / 127;
    int8_t integers[kRoundedValues];
    for (int64_t i = 0; i < kRoundedValues; ++i) {
      // Adding 1.5 · 2^23 rounds to the nearest whole number, ties to even, and leaves it in the low bits.
      const float shifted = (zero ? 0 : x[at + i]) * inverse + 12582912.0f;
      int32_t whole;
      std::memcpy(&whole, &shifted, sizeof whole);
      integers[i] = static_cast<int8_t>(whole);
    }
    std::memcpy(to + at, integers, sizeof integers);
    for (int64_t half = 0; half < kRoundedValues; half += PreparedRow::kSumValues) {
      int32_t sum = 0;
      for (int64_t i = 0; i < PreparedRow::kSumValues; ++i) sum += integers[half + i];
      sums[(at + half) / PreparedRow::kSumValues] = sum;
    }
    const int64_t first = at / PreparedRow::kSumValues;
    scaled_sums[at / kRoundedValues] =
        scales[at / kRoundedValues] * static_cast<float>(sums[first] + sums[first + 1]);
  }
}

}  // namespace winnow::kernels::WINNOW_ISA
