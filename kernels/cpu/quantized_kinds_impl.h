// Integers of quantised panels (quantized_panel.h) in registers, and the kinds of groups that they lie in. Included after one
// vec_*.h; see there for why this is in an anonymous namespace.
#ifndef WINNOW_KERNELS_CPU_QUANTIZED_KINDS_IMPL_H_
#define WINNOW_KERNELS_CPU_QUANTIZED_KINDS_IMPL_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/quantized_panel.h"
#include "kernels/cpu/tile_impl.h"

namespace winnow::kernels {
namespace {

// kDoubledE2M1 with the bias of kMxfp4 added (BlockShapeOf), 0 to 24: what pairs of products with signed bytes have room for.
alignas(16) inline constexpr uint8_t kBiasedE2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                        12, 11, 10, 9,  8,  6,  4,  0};

// Lanes of 32 bits, one for each output of a register.
//   LookUp(places)   bytes of kBiasedE2M1
//   StoreLess        bytes less `taken`, as register i of a step; of the instruction sets that matrix tiles go with
//   Dot(sum, w, x)   sum + Σ over four bytes of w · x, where w is unsigned and has kBits and x is signed; of 8 bits w - kTaken
//   FlipSigns(x)     signed bytes plus 128 as unsigned ones
#if defined(__AVX512VNNI__)
struct Ints {
  using Reg = __m512i;
  static constexpr int32_t kTaken = 0;
  static Reg Zero() { return _mm512_setzero_si512(); }
  static Reg Set1(int32_t x) { return _mm512_set1_epi32(x); }
  static Reg FlipSigns(Reg x) {
    return _mm512_xor_si512(x, _mm512_set1_epi8(static_cast<char>(0x80)));
  }
  static Reg Load(const std::byte* step, int) { return _mm512_loadu_si512(step); }
  static Reg LowHalves(Reg x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
  static Reg HighHalves(Reg x) { return LowHalves(_mm512_srli_epi16(x, 4)); }
  static Reg LookUp(Reg places) {
    return _mm512_shuffle_epi8(
        _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kBiasedE2M1))),
        places);
  }
  static void StoreLess(Reg x, uint8_t taken, int8_t* to, int) {
    _mm512_storeu_si512(to, _mm512_sub_epi8(x, _mm512_set1_epi8(static_cast<char>(taken))));
  }
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
  static Reg FlipSigns(Reg x) {
    return _mm256_xor_si256(x, _mm256_set1_epi8(static_cast<char>(0x80)));
  }
  static Reg Load(const std::byte* step, int i) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step) + i);
  }
  static Reg LowHalves(Reg x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
  static Reg HighHalves(Reg x) { return LowHalves(_mm256_srli_epi16(x, 4)); }
  static Reg LookUp(Reg places) {
    return _mm256_shuffle_epi8(
        _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kBiasedE2M1))),
        places);
  }
  template <int kBits>
  static Reg Dot(Reg sum, Reg w, Reg x) {
    if constexpr (kBits == 8) {
      w = FlipSigns(w);
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
  static Reg FlipSigns(Reg x) { return x ^ static_cast<int32_t>(0x80808080u); }
  static Reg Load(const std::byte* step, int i) {
    Reg x;
    std::memcpy(&x, step + 4 * i, 4);
    return x;
  }
  static Reg LowHalves(Reg x) { return x & 0x0f0f0f0f; }
  static Reg HighHalves(Reg x) { return (x >> 4) & 0x0f0f0f0f; }
  static Reg LookUp(Reg places) {
    uint8_t bytes[4];
    std::memcpy(bytes, &places, 4);
    for (uint8_t& byte : bytes) byte = kBiasedE2M1[byte];
    std::memcpy(&places, bytes, 4);
    return places;
  }
  static void StoreLess(Reg x, uint8_t taken, int8_t* to, int i) {
    for (int j = 0; j < 4; ++j) {
      to[4 * i + j] =
          static_cast<int8_t>(static_cast<uint8_t>(static_cast<uint32_t>(x) >> (8 * j)) - taken);
    }
  }
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

// Sums of a group's products, one for each output of a register. TakePairs is called before the sum is read, and with a table, whose
// integers are larger, also in the middle of a group.
template <int kBits>
struct GroupSum {
  Ints::Reg sum;
  void Begin(Ints::Reg first) { sum = first; }
  void Add(Ints::Reg w, Ints::Reg x) { sum = Ints::Dot<kBits>(sum, w, x); }
  void TakePairs() {}
};
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
// Products of 4 bits are added up in 16 bits before another multiplication makes 32 of them: those of 32 integers are at most
// 8 * 2 * 15 * 127, those of 16 from a table 4 * 2 * 24 * 127.
template <>
struct GroupSum<4> {
  Ints::Reg sum, pairs;
  void Begin(Ints::Reg first) {
    sum = first;
    pairs = Ints::Zero();
  }
  void Add(Ints::Reg w, Ints::Reg x) {
    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w, x));
  }
  void TakePairs() {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    pairs = Ints::Zero();
  }
};
#endif

// A type's groups, as far as the inner loops ask.
template <int kBitsOf, int kGroupOf, bool kCodesOf, bool kOffsetOf, bool kBiasOf = !kOffsetOf,
          bool kTableOf = false>
struct Kind {
  static constexpr int kBits = kBitsOf;
  static constexpr int kGroup = kGroupOf;
  static constexpr bool kCodes = kCodesOf;
  static constexpr bool kOffset = kOffsetOf;
  static constexpr bool kBias = kBiasOf;  // else it is 0
  static constexpr bool kTable = kTableOf;
  // Bits that an integer can have: types with codes store 5 or 6 of them in a byte.
  static constexpr int kMostBits = kBitsOf == 8 && kCodesOf ? 6 : kBitsOf;
  static constexpr int64_t kIntegerBytes = kGroup * kPanelOutputs * kBits / 8;
};

// Scales (which = 0) or offsets (1) of a group, for outputs of register i.
template <typename K>
inline Vec::Reg GroupFactor(const std::byte* head, const std::byte* group, int which, int i) {
  const std::byte* own = group + K::kIntegerBytes;
  if constexpr (K::kTable) {
    return Vec::LoadBF16(reinterpret_cast<const uint16_t*>(own) + i * Vec::kLanes);
  }
  const auto halves = [&](const std::byte* from) {
    return Vec::LoadF16(reinterpret_cast<const uint16_t*>(from) + which * kPanelOutputs +
                        i * Vec::kLanes);
  };
  if constexpr (!K::kCodes) return halves(own);
  // Offset codes have 6 bits, so that their sign is never set.
  return Vec::Mul(halves(head), Ints::SignedBytes(own + which * kPanelOutputs + i * Vec::kLanes));
}

// Calls f with the Kind of a type's groups.
inline void WithKind(const BlockShape& shape, auto f) {
  if (shape.group == 16) return f(Kind<8, 16, true, false>());
  if (shape.has_table) return f(Kind<4, 32, false, false, true, true>());
  if (shape.has_codes) {
    return shape.bits == 4 ? f(Kind<4, 32, true, true>()) : f(Kind<8, 32, true, true>());
  }
  if (shape.has_offset) {
    if (shape.bias != 0) return f(Kind<4, 32, false, true, true>());
    return shape.bits == 4 ? f(Kind<4, 32, false, true>()) : f(Kind<8, 32, false, true>());
  }
  return shape.bits == 4 ? f(Kind<4, 32, false, false>()) : f(Kind<8, 32, false, false>());
}

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_QUANTIZED_KINDS_IMPL_H_
