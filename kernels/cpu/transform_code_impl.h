// See kernels/transform_code.h. Compiled by transform_code_{scalar,avx2,avx512}.cc, one of vec_*.h before it. Every
// expression is rounded as the contract says, so that all of them give the same bits.
#include "kernels/cpu/ops.h"
#include "kernels/transform_code.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

constexpr int kLanes = Vec::kLanes;
constexpr int32_t kTile = kCodeTileTokens;
constexpr int kStepVecs = kLanes > 1 ? 2 : 1;  // vectors of powers that one of steps makes
constexpr int kStepTokens = kStepVecs * kLanes;
// Its lower bits are those of an integer that is added to it.
constexpr float kIntegerFloat = 0x1.8p23f;
constexpr uint32_t kIntegerBits = 0x4B400000;

#if defined(__AVX2__)
// Summand of steps that makes the bits of W. Sums saturate, so that it need not be more than 16 bits have.
inline int16_t PowerUp(int32_t reference) {
  const int32_t up = kMassPowerTop - reference;
  return static_cast<int16_t>(up < INT16_MIN ? INT16_MIN : up > INT16_MAX ? INT16_MAX : up);
}
inline int32_t LargestOf(__m128i eight) {
  // It finds the smallest of unsigned numbers.
  const __m128i turned = _mm_xor_si128(eight, _mm_set1_epi16(INT16_MAX));
  const int smallest = _mm_cvtsi128_si32(_mm_minpos_epu16(turned));
  return static_cast<int16_t>((smallest & 0xffff) ^ INT16_MAX);
}
#endif

#if defined(__AVX512F__)
inline Vec::Reg Fma(Vec::Reg a, Vec::Reg b, Vec::Reg c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__)
inline Vec::Reg Fma(Vec::Reg a, Vec::Reg b, Vec::Reg c) { return _mm256_fmadd_ps(a, b, c); }
#else
inline Vec::Reg Fma(Vec::Reg a, Vec::Reg b, Vec::Reg c) { return std::fma(a, b, c); }
#endif

// kIntegerFloat and X_j of dots.
inline Vec::Reg StepBits(const MassHead& head, Vec::Reg dots) {
  const Vec::Reg at = Fma(Vec::Set1(head.step), dots, Vec::Set1(head.origin + kIntegerFloat));
  return Vec::Min(Vec::Max(at, Vec::Set1(kIntegerFloat - kMassStepMost)),
                  Vec::Set1(kIntegerFloat + kMassStepMost));
}

#if defined(__AVX512F__)

inline Vec::Reg FractionOf(Vec::Reg x) {
  return _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec::Reg TimesPowerOf2(Vec::Reg y, Vec::Reg n) { return _mm512_scalef_ps(y, n); }
inline void StoreInts(int32_t* p, Vec::Reg x) { _mm512_storeu_si512(p, _mm512_cvttps_epi32(x)); }
// Bits of x, less those of a key's begin, held in [0, 65535] and counted from the other end.
inline __m512i DistancesOf(Vec::Reg mass) {
  const __m512i beyond =
      _mm512_sub_epi32(_mm512_set1_epi32(kMassKeyBase + kMassKeyBins - 1),
                       _mm512_srli_epi32(_mm512_castps_si512(mass), kMassKeyShift));
  return _mm512_max_epi32(beyond, _mm512_setzero_si512());
}
inline void StoreDistances(uint16_t* p, Vec::Reg mass) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtusepi32_epi16(DistancesOf(mass)));
}
// Stores those of the vectors that StepPowers makes; of the first kLanes tokens, where no more are left.
inline void StoreDistances(uint16_t* p, const Vec::Reg* masses, int32_t left) {
  const __m512i both = _mm512_packus_epi32(DistancesOf(masses[0]), DistancesOf(masses[1]));
  if (left > kLanes) {
    _mm512_storeu_si512(p, both);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(both));
  }
}

// Bits of W relative to a reference.
class StepPowers {
 public:
  explicit StepPowers(int32_t reference = 0)
      : up_(_mm512_set1_epi16(PowerUp(reference))),
        least_(_mm512_set1_epi16(kMassPowerLeast)),
        top_(_mm512_set1_epi16(kMassPowerTop)) {}
  // W of the steps of kStepTokens tokens: of each eight side by side, four in either vector.
  void Make(const int16_t* steps, Vec::Reg* powers) const {
    const __m512i up = _mm512_adds_epi16(_mm512_loadu_si512(steps), up_);
    const __m512i bits = _mm512_min_epi16(_mm512_max_epi16(up, least_), top_);
    const __m512i zero = _mm512_setzero_si512();
    powers[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, bits));
    powers[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, bits));
  }

 private:
  __m512i up_, least_, top_;
};

// Largest steps, kStepTokens at a time.
class StepMax {
 public:
  explicit StepMax(const int16_t* steps) : most_(_mm512_loadu_si512(steps)) {}
  void Add(const int16_t* steps) { most_ = _mm512_max_epi16(most_, _mm512_loadu_si512(steps)); }
  int32_t Get() const {
    const __m256i half =
        _mm256_max_epi16(_mm512_castsi512_si256(most_), _mm512_extracti64x4_epi64(most_, 1));
    return LargestOf(
        _mm_max_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
  }

 private:
  __m512i most_;
};

// Sums of integers below 2^22, as the lower bits of floats: kLanes at a time.
class PowerSum {
 public:
  void Add(Vec::Reg power) {
    const Vec::Reg term = Fma(power, Vec::Set1(0x1p22f), Vec::Set1(kIntegerFloat));
    bits_ = _mm512_add_epi32(bits_, _mm512_castps_si512(term));
  }
  uint32_t Bits() const { return static_cast<uint32_t>(_mm512_reduce_add_epi32(bits_)); }

 private:
  __m512i bits_ = _mm512_setzero_si512();
};

// Integers of four queries, those of a token side by side (FixedPlace).
inline void StoreFixed(int32_t* p, const Vec::Reg* of_queries) {
  const __m512i a = _mm512_cvttps_epi32(of_queries[0]), b = _mm512_cvttps_epi32(of_queries[1]);
  const __m512i c = _mm512_cvttps_epi32(of_queries[2]), d = _mm512_cvttps_epi32(of_queries[3]);
  const __m512i ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
  const __m512i cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
  _mm512_storeu_si512(p, _mm512_unpacklo_epi64(ab_low, cd_low));
  _mm512_storeu_si512(p + kLanes, _mm512_unpackhi_epi64(ab_low, cd_low));
  _mm512_storeu_si512(p + 2 * kLanes, _mm512_unpacklo_epi64(ab_high, cd_high));
  _mm512_storeu_si512(p + 3 * kLanes, _mm512_unpackhi_epi64(ab_high, cd_high));
}

// Takes dots of kLanes tokens of a query, `at` places behind the first tile's first token.
struct DotsOut {
  float* dots;
  void Store(int32_t query, int32_t at, __m512i sums) const {
    _mm512_storeu_ps(dots + int64_t{query} * kMassStride + at, _mm512_cvtepi32_ps(sums));
  }
};
struct StepsOut {
  const MassHead* heads;
  int16_t* steps;
  void Store(int32_t query, int32_t at, __m512i sums) const {
    const Vec::Reg integers = StepBits(heads[query], _mm512_cvtepi32_ps(sums));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(steps + int64_t{query} * kMassStride + at),
                        _mm512_cvtepi32_epi16(_mm512_castps_si512(integers)));
  }
};

// Dots of 16 codes for each of kTiles tiles side by side with the coefficients of kGroup queries. One instruction takes a
// field out of all bytes, and what is taken out serves all queries.
template <int kGroup, int kTiles, typename Out>
inline void TileDots(const MassCall& call, const uint32_t* const* tiles, int32_t first_query,
                     int32_t at, const Out& out) {
  __m512i acc[kGroup][kTiles];
  for (int g = 0; g < kGroup; ++g) {
    for (int t = 0; t < kTiles; ++t) acc[g][t] = _mm512_setzero_si512();
  }
  const int32_t* coef = call.coefs + int64_t{first_query} * call.num_fields;
  for (int32_t f = 0; f < call.num_fields; ++f) {
    const MassField& field = call.fields[f];
    const __m512i matrix = _mm512_set1_epi64(static_cast<int64_t>(field.matrix));
    __m512i bytes[kTiles];
    for (int t = 0; t < kTiles; ++t) {
      const __m512i word = _mm512_loadu_si512(tiles[t] + int64_t{field.word} * kTile);
      bytes[t] = _mm512_gf2p8affine_epi64_epi8(word, matrix, 0);
    }
    for (int g = 0; g < kGroup; ++g) {
      const __m512i c = _mm512_set1_epi32(coef[int64_t{g} * call.num_fields + f]);
      for (int t = 0; t < kTiles; ++t) acc[g][t] = _mm512_dpbusd_epi32(acc[g][t], bytes[t], c);
    }
  }
  for (int g = 0; g < kGroup; ++g) {
    for (int t = 0; t < kTiles; ++t) out.Store(first_query + g, at + t * kTile, acc[g][t]);
  }
}

// Takes cells out of tiles: their bits `cell_bits`, the first on top.
class CellBits {
 public:
  CellBits(const uint8_t* cell_bits, int32_t num_bits) : num_bits_(num_bits) {
    for (int32_t i = 0; i < num_bits; ++i) {
      const int32_t place = num_bits - 1 - i;
      word_[i] = cell_bits[i] / 32 * kTile;
      turn_[i] = _mm512_set1_epi32((cell_bits[i] - place) & 31);
      mask_[i] = _mm512_set1_epi32(1 << place);
    }
  }
  template <int kTiles>
  void Take(const uint32_t* const* tiles, uint8_t* cells) const {
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
    __m512i of_tile[kTiles];
    for (int t = 0; t < kTiles; ++t) of_tile[t] = _mm512_setzero_si512();
    for (int32_t i = 0; i < num_bits_; ++i) {
      const __m512i turn = turn_[i], mask = mask_[i];
      for (int t = 0; t < kTiles; ++t) {
        const __m512i word = _mm512_loadu_si512(tiles[t] + word_[i]);
        of_tile[t] =
            _mm512_ternarylogic_epi32(of_tile[t], _mm512_rorv_epi32(word, turn), mask, kOrAnd);
      }
    }
    for (int t = 0; t < kTiles; ++t) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(cells + t * kTile),
                       _mm512_cvtepi32_epi8(of_tile[t]));
    }
  }

 private:
  int32_t num_bits_;
  int32_t word_[8];
  __m512i turn_[8], mask_[8];
};

#elif defined(__AVX2__)

inline Vec::Reg FractionOf(Vec::Reg x) { return Vec::Sub(x, Vec::RoundToNearest(x)); }
inline Vec::Reg TimesPowerOf2(Vec::Reg y, Vec::Reg n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
}
inline void StoreInts(int32_t* p, Vec::Reg x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvttps_epi32(x));
}
inline __m256i DistancesOf(Vec::Reg mass) {
  const __m256i key = _mm256_sub_epi32(_mm256_srli_epi32(_mm256_castps_si256(mass), kMassKeyShift),
                                       _mm256_set1_epi32(kMassKeyBase));
  const __m256i held = _mm256_min_epi32(_mm256_max_epi32(key, _mm256_setzero_si256()),
                                        _mm256_set1_epi32(kMassKeyBins - 1));
  return _mm256_sub_epi32(_mm256_set1_epi32(kMassKeyBins - 1), held);
}
inline void StoreDistances(uint16_t* p, Vec::Reg mass) {
  const __m256i distance = DistancesOf(mass);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(distance, distance), 0b1000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline void StoreDistances(uint16_t* p, const Vec::Reg* masses, int32_t left) {
  const __m256i both = _mm256_packus_epi32(DistancesOf(masses[0]), DistancesOf(masses[1]));
  if (left > kLanes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(both));
  }
}

class StepPowers {
 public:
  explicit StepPowers(int32_t reference = 0)
      : up_(_mm256_set1_epi16(PowerUp(reference))),
        least_(_mm256_set1_epi16(kMassPowerLeast)),
        top_(_mm256_set1_epi16(kMassPowerTop)) {}
  void Make(const int16_t* steps, Vec::Reg* powers) const {
    const __m256i up =
        _mm256_adds_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(steps)), up_);
    const __m256i bits = _mm256_min_epi16(_mm256_max_epi16(up, least_), top_);
    const __m256i zero = _mm256_setzero_si256();
    powers[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, bits));
    powers[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, bits));
  }

 private:
  __m256i up_, least_, top_;
};

class StepMax {
 public:
  explicit StepMax(const int16_t* steps)
      : most_(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(steps))) {}
  void Add(const int16_t* steps) {
    most_ = _mm256_max_epi16(most_, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(steps)));
  }
  int32_t Get() const {
    return LargestOf(
        _mm_max_epi16(_mm256_castsi256_si128(most_), _mm256_extracti128_si256(most_, 1)));
  }

 private:
  __m256i most_;
};

class PowerSum {
 public:
  void Add(Vec::Reg power) {
    const Vec::Reg term = Fma(power, Vec::Set1(0x1p22f), Vec::Set1(kIntegerFloat));
    bits_ = _mm256_add_epi32(bits_, _mm256_castps_si256(term));
  }
  uint32_t Bits() const {
    alignas(32) uint32_t lanes[kLanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), bits_);
    uint32_t sum = 0;
    for (const uint32_t lane : lanes) sum += lane;
    return sum;
  }

 private:
  __m256i bits_ = _mm256_setzero_si256();
};

// Takes dots of a tile's tokens of a query.
struct DotsOut {
  float* dots;
  void Store(int32_t query, int32_t at, const __m256i (&sums)[2]) const {
    float* const to = dots + int64_t{query} * kMassStride + at;
    for (int half = 0; half < 2; ++half) {
      _mm256_storeu_ps(to + 8 * half, _mm256_cvtepi32_ps(sums[half]));
    }
  }
};
struct StepsOut {
  const MassHead* heads;
  int16_t* steps;
  void Store(int32_t query, int32_t at, const __m256i (&sums)[2]) const {
    const __m256i begin = _mm256_castps_si256(Vec::Set1(kIntegerFloat));
    __m256i wide[2];
    for (int half = 0; half < 2; ++half) {
      const Vec::Reg integers = StepBits(heads[query], _mm256_cvtepi32_ps(sums[half]));
      wide[half] = _mm256_sub_epi32(_mm256_castps_si256(integers), begin);
    }
    const __m256i packed =
        _mm256_permute4x64_epi64(_mm256_packs_epi32(wide[0], wide[1]), 0b11011000);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(steps + int64_t{query} * kMassStride + at),
                        packed);
  }
};

// Integers of four queries, those of a token side by side (FixedPlace).
inline void StoreFixed(int32_t* p, const Vec::Reg* of_queries) {
  const __m256i a = _mm256_cvttps_epi32(of_queries[0]), b = _mm256_cvttps_epi32(of_queries[1]);
  const __m256i c = _mm256_cvttps_epi32(of_queries[2]), d = _mm256_cvttps_epi32(of_queries[3]);
  const __m256i ab_low = _mm256_unpacklo_epi32(a, b), ab_high = _mm256_unpackhi_epi32(a, b);
  const __m256i cd_low = _mm256_unpacklo_epi32(c, d), cd_high = _mm256_unpackhi_epi32(c, d);
  auto* const to = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(to, _mm256_unpacklo_epi64(ab_low, cd_low));
  _mm256_storeu_si256(to + 1, _mm256_unpackhi_epi64(ab_low, cd_low));
  _mm256_storeu_si256(to + 2, _mm256_unpacklo_epi64(ab_high, cd_high));
  _mm256_storeu_si256(to + 3, _mm256_unpackhi_epi64(ab_high, cd_high));
}

// One field of eight tokens, in the bytes of a lane each.
inline __attribute__((always_inline)) __m256i FieldBytes(const MassField& field,
                                                         const uint32_t* tile, int half) {
  const __m256i word =
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + field.word * kTile + 8 * half));
  return _mm256_and_si256(_mm256_srl_epi32(word, _mm_cvtsi32_si128(field.shift)),
                          _mm256_set1_epi32(static_cast<int>(field.mask)));
}
inline __m256i AddPairs(__m256i sum, __m256i pairs, int32_t low) {
  const __m256i factor = _mm256_set1_epi16(static_cast<int16_t>(1 << low));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, factor));
}

// Adds field `f`, of 8 bits, whose products do not fit: its halves go one by one.
template <int kGroup>
inline void AddWideField(const MassCall& call, const uint32_t* tile, const int32_t* coefs,
                         int32_t f, __m256i (&sums)[kGroup][2]) {
  const __m256i nibble = _mm256_set1_epi32(0x0f0f0f0f);
  for (int half = 0; half < 2; ++half) {
    const __m256i bytes = FieldBytes(call.fields[f], tile, half);
    const __m256i lower = _mm256_and_si256(bytes, nibble);
    const __m256i upper = _mm256_and_si256(_mm256_srli_epi32(bytes, 4), nibble);
    for (int g = 0; g < kGroup; ++g) {
      const __m256i coef = _mm256_set1_epi32(coefs[int64_t{g} * call.num_fields + f]);
      sums[g][half] = AddPairs(sums[g][half], _mm256_maddubs_epi16(lower, coef), 0);
      sums[g][half] = AddPairs(sums[g][half], _mm256_maddubs_epi16(upper, coef), 4);
    }
  }
}

// Adds a run of fields (MassField), which begins at `f`; returns where the next one begins. (Inlined, GCC would keep sums in registers
// and pairs in memory.)
template <int kGroup>
__attribute__((noinline)) int32_t AddFields(const MassCall& call, const uint32_t* tile,
                                            const int32_t* coefs, int32_t f,
                                            __m256i (&sums)[kGroup][2]) {
  const int32_t low = call.fields[f].low;
  __m256i pairs[kGroup][2];
#pragma GCC unroll 4
  for (auto& of_query : pairs) of_query[0] = of_query[1] = _mm256_setzero_si256();
  bool ends = false;
  for (; !ends; ++f) {
    const MassField& field = call.fields[f];
    ends = field.ends_pairs;
    const __m256i first = FieldBytes(field, tile, 0), last = FieldBytes(field, tile, 1);
#pragma GCC unroll 4
    for (int g = 0; g < kGroup; ++g) {
      const __m256i coef = _mm256_set1_epi32(coefs[int64_t{g} * call.num_fields + f]);
      pairs[g][0] = _mm256_add_epi16(pairs[g][0], _mm256_maddubs_epi16(first, coef));
      pairs[g][1] = _mm256_add_epi16(pairs[g][1], _mm256_maddubs_epi16(last, coef));
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < kGroup; ++g) {
    for (int half = 0; half < 2; ++half) {
      sums[g][half] = AddPairs(sums[g][half], pairs[g][half], low);
    }
  }
  return f;
}

// Multiplications are what dots wait for. One instruction multiplies the bytes of 8 tokens and adds up two products in 16 bits;
// products of further fields are added there, too, as long as they fit, and one more multiplication makes 32 bits of a run's sums.
template <int kGroup, typename Out>
inline void OneTileDots(const MassCall& call, const uint32_t* tile, int32_t first_query, int32_t at,
                        const Out& out) {
  __m256i sums[kGroup][2];
  for (auto& of_query : sums) of_query[0] = of_query[1] = _mm256_setzero_si256();
  const int32_t* const coefs = call.coefs + int64_t{first_query} * call.num_fields;
  for (int32_t f = 0; f < call.num_fields;) {
    if (call.fields[f].mask == 0xffffffffu) {
      AddWideField(call, tile, coefs, f++, sums);
    } else {
      f = AddFields(call, tile, coefs, f, sums);
    }
  }
  for (int g = 0; g < kGroup; ++g) out.Store(first_query + g, at, sums[g]);
}

inline void TakeTileCells(const uint32_t* tile, const uint8_t* cell_bits, int32_t num_bits,
                          uint8_t* cells) {
  const __m256i one = _mm256_set1_epi32(1);
  __m256i of_half[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int32_t bit = 0; bit < num_bits; ++bit) {
    const auto* words = reinterpret_cast<const __m256i*>(tile + cell_bits[bit] / 32 * kTile);
    const __m128i shift = _mm_cvtsi32_si128(cell_bits[bit] % 32);
    for (int half = 0; half < 2; ++half) {
      const __m256i moved = _mm256_srl_epi32(_mm256_loadu_si256(words + half), shift);
      of_half[half] = _mm256_or_si256(_mm256_add_epi32(of_half[half], of_half[half]),
                                      _mm256_and_si256(moved, one));
    }
  }
  const __m256i packed =
      _mm256_permute4x64_epi64(_mm256_packus_epi32(of_half[0], of_half[1]), 0b11011000);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(cells),
      _mm_packus_epi16(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1)));
}

#else

inline Vec::Reg FractionOf(Vec::Reg x) { return x - std::nearbyint(x); }
inline Vec::Reg TimesPowerOf2(Vec::Reg y, Vec::Reg n) { return std::ldexp(y, static_cast<int>(n)); }
inline void StoreInts(int32_t* p, Vec::Reg x) { *p = static_cast<int32_t>(x); }
inline void StoreFixed(int32_t* p, const Vec::Reg* of_queries) {
  for (int g = 0; g < kMassAddQueries; ++g) StoreInts(p + g, of_queries[g]);
}
inline void StoreDistances(uint16_t* p, Vec::Reg mass) {
  uint32_t bits;
  __builtin_memcpy(&bits, &mass, sizeof bits);
  int32_t key = static_cast<int32_t>(bits >> kMassKeyShift) - kMassKeyBase;
  key = key < 0 ? 0 : key >= kMassKeyBins ? kMassKeyBins - 1 : key;
  *p = static_cast<uint16_t>(kMassKeyBins - 1 - key);
}
inline void StoreDistances(uint16_t* p, const Vec::Reg* masses, int32_t /*left*/) {
  StoreDistances(p, *masses);
}

class StepPowers {
 public:
  explicit StepPowers(int32_t reference = 0) : reference_(reference) {}
  void Make(const int16_t* steps, Vec::Reg* powers) const {
    *powers = MassPower(*steps - reference_);
  }

 private:
  int32_t reference_;
};

class StepMax {
 public:
  explicit StepMax(const int16_t* steps) : most_(*steps) {}
  void Add(const int16_t* steps) { most_ = *steps > most_ ? *steps : most_; }
  int32_t Get() const { return most_; }

 private:
  int32_t most_;
};

class PowerSum {
 public:
  void Add(Vec::Reg power) {
    const float term = Fma(power, 0x1p22f, kIntegerFloat);
    uint32_t bits;
    __builtin_memcpy(&bits, &term, sizeof bits);
    bits_ += bits;
  }
  uint32_t Bits() const { return bits_; }

 private:
  uint32_t bits_ = 0;
};

struct DotsOut {
  float* dots;
  void Store(int32_t query, int32_t at, int32_t sum) const {
    dots[int64_t{query} * kMassStride + at] = static_cast<float>(sum);
  }
};
struct StepsOut {
  const MassHead* heads;
  int16_t* steps;
  void Store(int32_t query, int32_t at, int32_t sum) const {
    steps[int64_t{query} * kMassStride + at] =
        static_cast<int16_t>(StepBits(heads[query], static_cast<float>(sum)) - kIntegerFloat);
  }
};

inline void TakeTileCells(const uint32_t* tile, const uint8_t* cell_bits, int32_t num_bits,
                          uint8_t* cells) {
  for (int32_t t = 0; t < kTile; ++t) {
    uint32_t cell = 0;
    for (int32_t bit = 0; bit < num_bits; ++bit) {
      cell = cell << 1 | (tile[cell_bits[bit] / 32 * kTile + t] >> cell_bits[bit] % 32 & 1);
    }
    cells[t] = static_cast<uint8_t>(cell);
  }
}

template <int kGroup, typename Out>
inline void OneTileDots(const MassCall& call, const uint32_t* tile, int32_t first_query, int32_t at,
                        const Out& out) {
  for (int g = 0; g < kGroup; ++g) {
    int32_t sums[kTile] = {};
    for (int32_t f = 0; f < call.num_fields; ++f) {
      const MassField& field = call.fields[f];
      const auto coef =
          static_cast<uint32_t>(call.coefs[int64_t{first_query + g} * call.num_fields + f]);
      for (int32_t t = 0; t < kTile; ++t) {
        const uint32_t bytes = tile[field.word * kTile + t] >> field.shift & field.mask;
        int32_t sum = 0;
        for (int b = 0; b < 4; ++b) {
          sum += static_cast<int32_t>(bytes >> 8 * b & 0xff) *
                 static_cast<int8_t>(coef >> 8 * b & 0xff);
        }
        sums[t] += sum * (1 << field.low);
      }
    }
    for (int32_t t = 0; t < kTile; ++t) out.Store(first_query + g, at + t, sums[t]);
  }
}

#endif

#if !defined(__AVX512F__)
class CellBits {
 public:
  CellBits(const uint8_t* cell_bits, int32_t num_bits)
      : cell_bits_(cell_bits), num_bits_(num_bits) {}
  template <int kTiles>
  void Take(const uint32_t* const* tiles, uint8_t* cells) const {
    for (int t = 0; t < kTiles; ++t) {
      TakeTileCells(tiles[t], cell_bits_, num_bits_, cells + t * kTile);
    }
  }

 private:
  const uint8_t* cell_bits_;
  int32_t num_bits_;
};

template <int kGroup, int kTiles, typename Out>
inline void TileDots(const MassCall& call, const uint32_t* const* tiles, int32_t first_query,
                     int32_t at, const Out& out) {
  for (int t = 0; t < kTiles; ++t) {
    OneTileDots<kGroup>(call, tiles[t], first_query, at + t * kTile, out);
  }
}
#endif

template <int kTiles, typename Out>
inline void GroupDots(const MassCall& call, const uint32_t* const* tiles, int32_t at,
                      const Out& out) {
  int32_t g = 0;
  for (; g + 4 <= call.group; g += 4) TileDots<4, kTiles>(call, tiles, g, at, out);
  switch (call.group - g) {
    case 3:
      return TileDots<3, kTiles>(call, tiles, g, at, out);
    case 2:
      return TileDots<2, kTiles>(call, tiles, g, at, out);
    case 1:
      return TileDots<1, kTiles>(call, tiles, g, at, out);
    default:
      return;
  }
}

// x = E2(x).
inline void MassExp2(Vec::Reg* x) {
  const Vec::Reg held = Vec::Max(*x, Vec::Set1(kTransformExp2Least));
  const Vec::Reg f = FractionOf(held);
  Vec::Reg y = Vec::Set1(kTransformExp2[0]);
  for (int i = 1; i < 6; ++i) y = Fma(y, f, Vec::Set1(kTransformExp2[i]));
  *x = TimesPowerOf2(y, Vec::Sub(held, f));
}

// The place at which StoreFixed puts the integers of token j, in the order that StepPowers has tokens: those of j, j + 1,
// j + 2 and j + 3 (j a multiple of 4) are kFixedStep apart.
constexpr uint32_t kFixedStep = kLanes < 4 ? kMassAddQueries : kLanes;
inline uint32_t FixedPlace(uint32_t j) {
  if constexpr (kLanes < 4) return j * kMassAddQueries;
  return (j / kStepTokens * kStepVecs + j / 4 % kStepVecs) * (kLanes * kMassAddQueries) +
         j % kStepTokens / 8 * kMassAddQueries + j % 4 * kFixedStep;
}

// Goes through the tiles of a head's codes from the one that has `token` on.
class TileWalk {
 public:
  TileWalk(const MassCall& call, int32_t token)
      : block_tiles_(call.layout.block_tokens / kTile),
        tile_words_(kTile * (call.layout.bits / 32)),
        block_words_(static_cast<int64_t>(call.layout.BlockBytes() / sizeof(uint32_t))),
        codes_(static_cast<const uint32_t*>(call.codes) +
               call.head * static_cast<int64_t>(call.layout.HeadBytes() / sizeof(uint32_t))),
        block_(call.block_table + token / call.layout.block_tokens),
        tile_(token % call.layout.block_tokens / kTile) {}
  const uint32_t* Next() {
    const uint32_t* const tile = codes_ + *block_ * block_words_ + tile_ * tile_words_;
    if (++tile_ == block_tiles_) {
      tile_ = 0;
      ++block_;
    }
    return tile;
  }

 private:
  const int32_t block_tiles_;
  const int64_t tile_words_, block_words_;
  const uint32_t* const codes_;
  const int32_t* block_;
  int32_t tile_;
};

// Adds the weights of kCount queries to the masses of kStepTokens tokens. `fixed`: as MassWeights, of these tokens.
template <int kCount>
inline void WeighQueries(const MassHead* heads, const StepPowers* powers, const int16_t* steps,
                         Vec::Reg* masses, int32_t* fixed) {
  Vec::Reg weights[kMassAddQueries][kStepVecs];
  for (int g = 0; g < kCount; ++g) {
    powers[g].Make(steps + int64_t{g} * kMassStride, weights[g]);
    for (int v = 0; v < kStepVecs; ++v) {
      masses[v] = Fma(weights[g][v], Vec::Set1(heads[g].inverse), masses[v]);
    }
  }
  if (fixed == nullptr) return;
  for (int v = 0; v < kStepVecs; ++v) {
    Vec::Reg of_queries[kMassAddQueries];
    for (int g = 0; g < kMassAddQueries; ++g) {
      of_queries[g] = g < kCount ? Vec::Mul(weights[g][v], Vec::Set1(0x1p30f)) : Vec::Zero();
    }
    StoreFixed(fixed + v * kLanes * kMassAddQueries, of_queries);
  }
}

// As WeighQueries, of the `left` queries from the first on, at most kMassAddQueries.
inline void WeighSome(int32_t left, const MassHead* heads, const StepPowers* powers,
                      const int16_t* steps, Vec::Reg* masses, int32_t* fixed) {
  switch (left) {
    case 1:
      return WeighQueries<1>(heads, powers, steps, masses, fixed);
    case 2:
      return WeighQueries<2>(heads, powers, steps, masses, fixed);
    case 3:
      return WeighQueries<3>(heads, powers, steps, masses, fixed);
    default:
      return WeighQueries<kMassAddQueries>(heads, powers, steps, masses, fixed);
  }
}

// Gives `out` the dots of the tiles that hold [first, last), and asks for codes ahead.
template <typename Out>
inline void WalkDots(const MassCall& call, int32_t first, int32_t last, const Out& out) {
  constexpr int kTiles = 4;                           // a block of 64 tokens
  constexpr int32_t kReadAhead = 2 * kTiles * kTile;  // blocks lie anywhere
  const int32_t words = call.layout.bits / 32;
  const int32_t begin = first / kTile * kTile;
  TileWalk walk(call, begin), ahead(call, begin + kReadAhead);
  for (int32_t token = begin; token < last;) {
    const int32_t at = token - begin;
    const uint32_t* tiles[kTiles];
    const int count = token + (kTiles - 1) * kTile < last ? kTiles : 1;
    for (int t = 0; t < count; ++t, token += kTile) {
      tiles[t] = walk.Next();
      if (token + kReadAhead >= call.last) continue;
      const uint32_t* const next = ahead.Next();
      for (int32_t word = 0; word < words; ++word) __builtin_prefetch(next + word * kTile);
    }
    if (count == kTiles) {
      GroupDots<kTiles>(call, tiles, at, out);
    } else {
      GroupDots<1>(call, tiles, at, out);
    }
  }
}

}  // namespace

void TransformRows(const float* x, int64_t rows, int32_t d, const float* weights, int32_t n,
                   const float* begin, float* y) {
  constexpr int kRows = 4;  // that share a load of weights
  for (int64_t row = 0; row < rows; row += kRows) {
    const int count = rows - row < kRows ? static_cast<int>(rows - row) : kRows;
    for (int32_t i = 0; i < n; i += kLanes) {
      Vec::Reg acc[kRows];
      for (int r = 0; r < kRows; ++r) acc[r] = Vec::Load(begin + i);
      if (count == kRows) {
        for (int32_t c = 0; c < d; ++c) {
          const Vec::Reg w = Vec::Load(weights + int64_t{c} * n + i);
          for (int r = 0; r < kRows; ++r) {
            acc[r] = Fma(Vec::Set1(x[(row + r) * d + c]), w, acc[r]);
          }
        }
      } else {
        for (int r = 0; r < count; ++r) {
          for (int32_t c = 0; c < d; ++c) {
            const Vec::Reg w = Vec::Load(weights + int64_t{c} * n + i);
            acc[r] = Fma(Vec::Set1(x[(row + r) * d + c]), w, acc[r]);
          }
        }
      }
      for (int r = 0; r < count; ++r) Vec::Store(y + (row + r) * n + i, acc[r]);
    }
  }
}

void MassDots(const MassCall& call, int32_t first, int32_t last, float* dots) {
  WalkDots(call, first, last, DotsOut{dots});
}

void MassSteps(const MassCall& call, const MassHead* heads, int32_t first, int32_t last,
               int16_t* steps) {
  WalkDots(call, first, last, StepsOut{heads, steps});
}

int64_t MassSum(const int16_t* steps, int32_t count, int32_t* peak_of) {
  int32_t peak = steps[0];
  int32_t i = 0;
  if (count >= kStepTokens) {
    StepMax most(steps);
    for (i = kStepTokens; i + kStepTokens <= count; i += kStepTokens) most.Add(steps + i);
    peak = most.Get();
  }
  for (; i < count; ++i) peak = steps[i] > peak ? steps[i] : peak;
  *peak_of = peak;
  const StepPowers powers(peak);
  PowerSum sums[kStepVecs];
  for (i = 0; i + kStepTokens <= count; i += kStepTokens) {
    Vec::Reg of_tokens[kStepVecs];
    powers.Make(steps + i, of_tokens);
    for (int v = 0; v < kStepVecs; ++v) sums[v].Add(of_tokens[v]);
  }
  // Bits that overflow do so in both terms: a piece's sum is below 2^32.
  uint32_t sum = 0u - static_cast<uint32_t>(i) * kIntegerBits;
  for (const PowerSum& of_vecs : sums) sum += of_vecs.Bits();
  for (; i < count; ++i)
    sum += static_cast<uint32_t>(std::rint(MassPower(steps[i] - peak) * 0x1p22f));
  return sum;
}

void MassWeights(const MassHead* heads, int32_t group, const int16_t* steps, int32_t count,
                 uint16_t* distances, int32_t* fixed) {
  constexpr int32_t kPartTokens = 128;  // of which all queries are weighed before those behind them
  alignas(64) float of_part[kPartTokens + kStepTokens];
  for (int32_t first = 0; first < count; first += kPartTokens) {
    const int32_t last = first + kPartTokens < count ? first + kPartTokens : count;
    for (int32_t g = 0; g < group; g += kMassAddQueries) {
      const int32_t queries = group - g < kMassAddQueries ? group - g : kMassAddQueries;
      StepPowers powers[kMassAddQueries];
      for (int32_t i = 0; i < queries; ++i) powers[i] = StepPowers(heads[g + i].reference);
      for (int32_t i = first; i < last; i += kStepTokens) {
        float* const sums = of_part + (i - first);
        Vec::Reg masses[kStepVecs];
        for (int v = 0; v < kStepVecs; ++v) {
          masses[v] = g == 0 ? Vec::Zero() : Vec::Load(sums + v * kLanes);
        }
        WeighSome(queries, heads + g, powers, steps + int64_t{g} * kMassStride + i, masses,
                  fixed == nullptr
                      ? nullptr
                      : fixed + int64_t{g} * kMassStride + int64_t{i} * kMassAddQueries);
        if (g + kMassAddQueries >= group) {
          StoreDistances(distances + i, masses, last - i);
        } else {
          for (int v = 0; v < kStepVecs; ++v) Vec::Store(sums + v * kLanes, masses[v]);
        }
      }
    }
  }
}

void MassCells(const MassCall& call, const uint8_t* cell_bits, int32_t num_bits, int32_t first,
               int32_t last, uint8_t* cells) {
  const CellBits bits(cell_bits, num_bits);
  constexpr int kTiles = 4;
  const int32_t begin = first / kTile * kTile;
  TileWalk walk(call, begin);
  for (int32_t token = begin; token < last;) {
    const uint32_t* tiles[kTiles];
    const int count = token + (kTiles - 1) * kTile < last ? kTiles : 1;
    for (int t = 0; t < count; ++t) tiles[t] = walk.Next();
    if (count == kTiles) {
      bits.Take<kTiles>(tiles, cells);
    } else {
      bits.Take<1>(tiles, cells);
    }
    token += count * kTile;
    cells += count * kTile;
  }
}

void MassAdd(const int32_t* fixed, const uint8_t* cells, int32_t begin, int32_t end,
             int64_t* masses) {
  const auto add = [&](uint8_t cell, const int32_t* of_token) {
    int64_t* const of_cell = masses + int64_t{cell} * kMassAddQueries;
#if defined(__AVX2__)
    const __m256i wide =
        _mm256_cvtepi32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(of_token)));
    auto* const sums = reinterpret_cast<__m256i*>(of_cell);
    _mm256_storeu_si256(sums, _mm256_add_epi64(_mm256_loadu_si256(sums), wide));
#else
    for (int g = 0; g < kMassAddQueries; ++g) of_cell[g] += of_token[g];
#endif
  };
  int32_t j = begin;
  for (; j < end && j % 4 != 0; ++j) add(cells[j], fixed + FixedPlace(j));
  for (; j + 4 <= end; j += 4) {
    const int32_t* const of_four = fixed + FixedPlace(j);
    add(cells[j], of_four);
    add(cells[j + 1], of_four + kFixedStep);
    add(cells[j + 2], of_four + 2 * kFixedStep);
    add(cells[j + 3], of_four + 3 * kFixedStep);
  }
  for (; j < end; ++j) add(cells[j], fixed + FixedPlace(j));
}

int64_t RerankLogits(const RerankHead& head, const float* dots, const float* residual_dots,
                     int32_t count, float* logits, float* most) {
  const Vec::Reg reference = Vec::Set1(head.reference), top = Vec::Set1(0x1p26f);
  alignas(64) int32_t terms[kLanes];
  alignas(64) float lanes[kLanes];
  int64_t sum = 0;
  Vec::Reg largest = Vec::Set1(*most);
  for (int32_t i = 0; i < count; i += kLanes) {
    const Vec::Reg logit = Fma(Vec::Set1(head.a), Vec::Load(dots + i), Vec::Set1(head.b));
    const Vec::Reg rest =
        Fma(Vec::Set1(head.residual_a), Vec::Load(residual_dots + i), Vec::Set1(head.residual_b));
    const Vec::Reg both = Vec::Add(logit, rest);
    Vec::Store(logits + i, both);
    Vec::Reg power = Vec::Min(Vec::Sub(logit, reference), Vec::Zero());
    MassExp2(&power);
    StoreInts(terms, Vec::Mul(power, top));
    if (i + kLanes <= count) {
      largest = Vec::Max(largest, both);
      for (int lane = 0; lane < kLanes; ++lane) sum += terms[lane];
      continue;
    }
    for (int lane = 0; i + lane < count; ++lane) {
      sum += terms[lane];
      *most = logits[i + lane] > *most ? logits[i + lane] : *most;
    }
  }
  Vec::Store(lanes, largest);
  for (int lane = 0; lane < kLanes; ++lane) *most = lanes[lane] > *most ? lanes[lane] : *most;
  return sum;
}

int64_t RerankWeights(float most, int32_t count, float* logits) {
  const Vec::Reg top = Vec::Set1(0x1p26f);
  alignas(64) int32_t terms[kLanes];
  int64_t sum = 0;
  for (int32_t i = 0; i < count; i += kLanes) {
    Vec::Reg weight = Vec::Sub(Vec::Load(logits + i), Vec::Set1(most));
    MassExp2(&weight);
    Vec::Store(logits + i, weight);
    StoreInts(terms, Vec::Mul(weight, top));
    for (int lane = 0; lane < kLanes && i + lane < count; ++lane) sum += terms[lane];
  }
  return sum;
}

void RerankDistances(const float* weights, int64_t stride, const float* inverses, int32_t group,
                     int32_t count, uint16_t* distances) {
  for (int32_t i = 0; i < count; i += kLanes) {
    Vec::Reg mass = Vec::Zero();
    for (int32_t g = 0; g < group; ++g) {
      mass = Fma(Vec::Load(weights + g * stride + i), Vec::Set1(inverses[g]), mass);
    }
    StoreDistances(distances + i, mass);
  }
}

}  // namespace winnow::kernels::WINNOW_ISA
