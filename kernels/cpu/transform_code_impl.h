// See kernels/transform_code.h. Compiled by transform_code_{scalar,avx2,avx512}.cc, one of vec_*.h before it. Every
// expression is rounded as the contract says, so that all of them give the same bits.
#include "kernels/cpu/ops.h"
#include "kernels/transform_code.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

constexpr int kLanes = Vec::kLanes;
constexpr int32_t kTile = kCodeTileTokens;

#if defined(__AVX512F__)

inline Vec::Reg Fma(Vec::Reg a, Vec::Reg b, Vec::Reg c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec::Reg FromInts(const int32_t* p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }
inline Vec::Reg Round(Vec::Reg x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec::Reg TimesPowerOf2(Vec::Reg y, Vec::Reg n) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), exponent));
}
inline void StoreInts(int32_t* p, Vec::Reg x) { _mm512_storeu_si512(p, _mm512_cvttps_epi32(x)); }
// Bits of x, less those of a key's begin, held in [0, 65535] and counted from the other end.
inline void StoreDistances(uint16_t* p, Vec::Reg mass) {
  const __m512i key = _mm512_sub_epi32(_mm512_srli_epi32(_mm512_castps_si512(mass), kMassKeyShift),
                                       _mm512_set1_epi32(kMassKeyBase));
  const __m512i held = _mm512_min_epi32(_mm512_max_epi32(key, _mm512_setzero_si512()),
                                        _mm512_set1_epi32(kMassKeyBins - 1));
  const __m512i distance = _mm512_sub_epi32(_mm512_set1_epi32(kMassKeyBins - 1), held);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(distance));
}

// Dots of 16 codes for each of kTiles tiles side by side with the coefficients of kGroup queries. Sums of two tiles are
// independent chains: one alone would wait for itself.
template <int kGroup, int kTiles>
inline void TileDots(const MassCall& call, const uint32_t* tile, int32_t first_query,
                     int32_t* dots) {
  __m512i acc[kGroup][kTiles];
  for (int g = 0; g < kGroup; ++g) {
    for (int t = 0; t < kTiles; ++t) acc[g][t] = _mm512_setzero_si512();
  }
  const int64_t tile_words = int64_t{kTile} * (call.layout.bits / 32);
  const int32_t* coef = call.coefs + int64_t{first_query} * call.num_fields;
  for (int32_t f = 0; f < call.num_fields; ++f) {
    const MassField& field = call.fields[f];
    const __m512i turn = _mm512_set1_epi32((field.shift - field.low) & 31);
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(field.mask << field.low));
    __m512i bytes[kTiles];
    for (int t = 0; t < kTiles; ++t) {
      const __m512i word = _mm512_loadu_si512(tile + t * tile_words + field.word * kTile);
      bytes[t] = _mm512_and_si512(_mm512_rorv_epi32(word, turn), mask);
    }
    for (int g = 0; g < kGroup; ++g) {
      const __m512i c = _mm512_set1_epi32(coef[int64_t{g} * call.num_fields + f]);
      for (int t = 0; t < kTiles; ++t) acc[g][t] = _mm512_dpbusd_epi32(acc[g][t], bytes[t], c);
    }
  }
  for (int g = 0; g < kGroup; ++g) {
    for (int t = 0; t < kTiles; ++t) {
      _mm512_storeu_si512(dots + int64_t{first_query + g} * kMassDotsStride + t * kTile, acc[g][t]);
    }
  }
}

// Cells of a tile's 16 codes: their bits `cell_bits`, the first on top.
inline void TileCells(const uint32_t* tile, const uint8_t* cell_bits, int32_t num_bits,
                      uint8_t* cells) {
  const __m512i one = _mm512_set1_epi32(1);
  __m512i of_tile = _mm512_setzero_si512();
  for (int32_t bit = 0; bit < num_bits; ++bit) {
    const __m512i word = _mm512_loadu_si512(tile + cell_bits[bit] / 32 * kTile);
    const __m512i moved = _mm512_srl_epi32(word, _mm_cvtsi32_si128(cell_bits[bit] % 32));
    of_tile = _mm512_or_si512(_mm512_add_epi32(of_tile, of_tile), _mm512_and_si512(moved, one));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(cells), _mm512_cvtepi32_epi8(of_tile));
}

// Adds up terms of up to 2^26, kLanes at a time: 32 of them fit into a lane.
class TermSum {
 public:
  void Add(Vec::Reg terms) {
    part_ = _mm512_add_epi32(part_, _mm512_cvttps_epi32(terms));
    if (++count_ == 32) Widen();
  }
  int64_t Total() {
    Widen();
    return _mm512_reduce_add_epi64(wide_);
  }

 private:
  void Widen() {
    wide_ = _mm512_add_epi64(wide_, _mm512_cvtepu32_epi64(_mm512_castsi512_si256(part_)));
    wide_ = _mm512_add_epi64(wide_, _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(part_, 1)));
    part_ = _mm512_setzero_si512();
    count_ = 0;
  }
  __m512i wide_ = _mm512_setzero_si512(), part_ = _mm512_setzero_si512();
  int count_ = 0;
};
inline Vec::Reg BelowPeak(const int32_t* dots, int32_t peak) {
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(dots), _mm512_set1_epi32(peak)));
}

#elif defined(__AVX2__)

inline Vec::Reg Fma(Vec::Reg a, Vec::Reg b, Vec::Reg c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec::Reg FromInts(const int32_t* p) {
  return _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vec::Reg Round(Vec::Reg x) { return Vec::RoundToNearest(x); }
inline Vec::Reg TimesPowerOf2(Vec::Reg y, Vec::Reg n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
}
inline void StoreInts(int32_t* p, Vec::Reg x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvttps_epi32(x));
}
inline void StoreDistances(uint16_t* p, Vec::Reg mass) {
  const __m256i key = _mm256_sub_epi32(_mm256_srli_epi32(_mm256_castps_si256(mass), kMassKeyShift),
                                       _mm256_set1_epi32(kMassKeyBase));
  const __m256i held = _mm256_min_epi32(_mm256_max_epi32(key, _mm256_setzero_si256()),
                                        _mm256_set1_epi32(kMassKeyBins - 1));
  const __m256i distance = _mm256_sub_epi32(_mm256_set1_epi32(kMassKeyBins - 1), held);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(distance, distance), 0b1000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

// Products of two bytes are added in 16 bits, which a field of 8 bits would overflow: its halves go one by one.
inline __m256i FieldDots(__m256i bytes, int32_t coef, int32_t low) {
  const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi32(coef));
  return _mm256_madd_epi16(pairs, _mm256_set1_epi16(static_cast<int16_t>(1 << low)));
}

template <int kGroup>
inline void OneTileDots(const MassCall& call, const uint32_t* tile, int32_t first_query,
                        int32_t* dots) {
  const int32_t* coef = call.coefs + int64_t{first_query} * call.num_fields;
  for (int half = 0; half < 2; ++half) {
    __m256i acc[kGroup];
    for (int g = 0; g < kGroup; ++g) acc[g] = _mm256_setzero_si256();
    for (int32_t f = 0; f < call.num_fields; ++f) {
      const MassField& field = call.fields[f];
      const __m256i word = _mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(tile + field.word * kTile + 8 * half));
      const __m256i low_bytes = _mm256_srl_epi32(word, _mm_cvtsi32_si128(field.shift));
      if (field.mask == 0xffffffffu) {
        const __m256i nibble = _mm256_set1_epi32(0x0f0f0f0f);
        const __m256i lower = _mm256_and_si256(low_bytes, nibble);
        const __m256i upper = _mm256_and_si256(_mm256_srli_epi32(low_bytes, 4), nibble);
        for (int g = 0; g < kGroup; ++g) {
          const int32_t c = coef[int64_t{g} * call.num_fields + f];
          acc[g] = _mm256_add_epi32(acc[g], FieldDots(lower, c, 0));
          acc[g] = _mm256_add_epi32(acc[g], FieldDots(upper, c, 4));
        }
        continue;
      }
      const __m256i bytes =
          _mm256_and_si256(low_bytes, _mm256_set1_epi32(static_cast<int>(field.mask)));
      for (int g = 0; g < kGroup; ++g) {
        acc[g] = _mm256_add_epi32(
            acc[g], FieldDots(bytes, coef[int64_t{g} * call.num_fields + f], field.low));
      }
    }
    for (int g = 0; g < kGroup; ++g) {
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(dots + int64_t{first_query + g} * kMassDotsStride + 8 * half),
          acc[g]);
    }
  }
}

inline void TileCells(const uint32_t* tile, const uint8_t* cell_bits, int32_t num_bits,
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

class TermSum {
 public:
  void Add(Vec::Reg terms) {
    part_ = _mm256_add_epi32(part_, _mm256_cvttps_epi32(terms));
    if (++count_ == 32) Widen();
  }
  int64_t Total() {
    Widen();
    alignas(32) int64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), wide_);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
  }

 private:
  void Widen() {
    wide_ = _mm256_add_epi64(wide_, _mm256_cvtepu32_epi64(_mm256_castsi256_si128(part_)));
    wide_ = _mm256_add_epi64(wide_, _mm256_cvtepu32_epi64(_mm256_extracti128_si256(part_, 1)));
    part_ = _mm256_setzero_si256();
    count_ = 0;
  }
  __m256i wide_ = _mm256_setzero_si256(), part_ = _mm256_setzero_si256();
  int count_ = 0;
};
inline Vec::Reg BelowPeak(const int32_t* dots, int32_t peak) {
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(dots)), _mm256_set1_epi32(peak)));
}

#else

inline Vec::Reg Fma(Vec::Reg a, Vec::Reg b, Vec::Reg c) { return std::fma(a, b, c); }
inline Vec::Reg FromInts(const int32_t* p) { return static_cast<float>(*p); }
inline Vec::Reg Round(Vec::Reg x) { return std::nearbyint(x); }
inline Vec::Reg TimesPowerOf2(Vec::Reg y, Vec::Reg n) { return std::ldexp(y, static_cast<int>(n)); }
inline void StoreInts(int32_t* p, Vec::Reg x) { *p = static_cast<int32_t>(x); }
inline void StoreDistances(uint16_t* p, Vec::Reg mass) {
  uint32_t bits;
  __builtin_memcpy(&bits, &mass, sizeof bits);
  int32_t key = static_cast<int32_t>(bits >> kMassKeyShift) - kMassKeyBase;
  key = key < 0 ? 0 : key >= kMassKeyBins ? kMassKeyBins - 1 : key;
  *p = static_cast<uint16_t>(kMassKeyBins - 1 - key);
}

inline void TileCells(const uint32_t* tile, const uint8_t* cell_bits, int32_t num_bits,
                      uint8_t* cells) {
  for (int32_t t = 0; t < kTile; ++t) {
    uint32_t cell = 0;
    for (int32_t bit = 0; bit < num_bits; ++bit) {
      cell = cell << 1 | (tile[cell_bits[bit] / 32 * kTile + t] >> cell_bits[bit] % 32 & 1);
    }
    cells[t] = static_cast<uint8_t>(cell);
  }
}

class TermSum {
 public:
  void Add(Vec::Reg term) { total_ += static_cast<int32_t>(term); }
  int64_t Total() const { return total_; }

 private:
  int64_t total_ = 0;
};
inline Vec::Reg BelowPeak(const int32_t* dots, int32_t peak) {
  return static_cast<float>(*dots - peak);
}

template <int kGroup>
inline void OneTileDots(const MassCall& call, const uint32_t* tile, int32_t first_query,
                        int32_t* dots) {
  for (int g = 0; g < kGroup; ++g) {
    int32_t* to = dots + int64_t{first_query + g} * kMassDotsStride;
    for (int32_t t = 0; t < kTile; ++t) to[t] = 0;
  }
  for (int32_t f = 0; f < call.num_fields; ++f) {
    const MassField& field = call.fields[f];
    for (int g = 0; g < kGroup; ++g) {
      const auto coef =
          static_cast<uint32_t>(call.coefs[int64_t{first_query + g} * call.num_fields + f]);
      int32_t* to = dots + int64_t{first_query + g} * kMassDotsStride;
      for (int32_t t = 0; t < kTile; ++t) {
        const uint32_t bytes = tile[field.word * kTile + t] >> field.shift & field.mask;
        int32_t sum = 0;
        for (int b = 0; b < 4; ++b) {
          sum += static_cast<int32_t>(bytes >> 8 * b & 0xff) *
                 static_cast<int8_t>(coef >> 8 * b & 0xff);
        }
        to[t] += sum * (1 << field.low);
      }
    }
  }
}

#endif

#if !defined(__AVX512F__)
template <int kGroup, int kTiles>
inline void TileDots(const MassCall& call, const uint32_t* tile, int32_t first_query,
                     int32_t* dots) {
  for (int t = 0; t < kTiles; ++t) {
    OneTileDots<kGroup>(call, tile + int64_t{t} * kTile * (call.layout.bits / 32), first_query,
                        dots + t * kTile);
  }
}
#endif

template <int kTiles>
inline void GroupDots(const MassCall& call, const uint32_t* tile, int32_t* dots) {
  int32_t g = 0;
  for (; g + 4 <= call.group; g += 4) TileDots<4, kTiles>(call, tile, g, dots);
  switch (call.group - g) {
    case 3:
      return TileDots<3, kTiles>(call, tile, g, dots);
    case 2:
      return TileDots<2, kTiles>(call, tile, g, dots);
    case 1:
      return TileDots<1, kTiles>(call, tile, g, dots);
    default:
      return;
  }
}

// Power of two of x <= 0 (transform_code.h, E2).
inline Vec::Reg MassExp2(Vec::Reg x) {
  x = Vec::Max(x, Vec::Set1(kTransformExp2Least));
  const Vec::Reg n = Round(x), f = Vec::Sub(x, n);
  Vec::Reg y = Vec::Set1(kTransformExp2[0]);
  for (int i = 1; i < 6; ++i) y = Fma(y, f, Vec::Set1(kTransformExp2[i]));
  return TimesPowerOf2(y, n);
}

// Words of the tile that has `token`.
inline const uint32_t* TileOf(const MassCall& call, int32_t token) {
  const int32_t bt = call.layout.block_tokens;
  const auto* of_head =
      reinterpret_cast<const uint32_t*>(static_cast<const std::byte*>(call.codes) +
                                        call.block_table[token / bt] * call.layout.BlockBytes() +
                                        call.head * call.layout.HeadBytes());
  return of_head + int64_t{token % bt / kTile} * kTile * (call.layout.bits / 32);
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

void MassDots(const MassCall& call, int32_t first, int32_t last, int32_t* dots) {
  for (int32_t token = first / kTile * kTile; token < last;) {
    const uint32_t* tile = TileOf(call, token);
    // Side by side where both are of one block.
    const bool two = token + kTile < last &&
                     token % call.layout.block_tokens + 2 * kTile <= call.layout.block_tokens;
    if (two) {
      GroupDots<2>(call, tile, dots);
    } else {
      GroupDots<1>(call, tile, dots);
    }
    const int32_t done = two ? 2 * kTile : kTile;
    token += done;
    dots += done;
  }
}

int64_t MassSum(const int32_t* dots, int32_t count, float a, int32_t* peak_of) {
  int32_t peak = dots[0];
  int32_t seen = 1;
#if defined(__AVX512F__)
  if (count >= kLanes) {
    __m512i most = _mm512_loadu_si512(dots);
    for (seen = kLanes; seen + kLanes <= count; seen += kLanes) {
      most = _mm512_max_epi32(most, _mm512_loadu_si512(dots + seen));
    }
    peak = _mm512_reduce_max_epi32(most);
  }
#elif defined(__AVX2__)
  if (count >= kLanes) {
    __m256i most = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(dots));
    for (seen = kLanes; seen + kLanes <= count; seen += kLanes) {
      most =
          _mm256_max_epi32(most, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(dots + seen)));
    }
    alignas(32) int32_t lanes[kLanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), most);
    for (int lane = 0; lane < kLanes; ++lane) peak = lanes[lane] > peak ? lanes[lane] : peak;
  }
#endif
  for (; seen < count; ++seen) peak = dots[seen] > peak ? dots[seen] : peak;
  *peak_of = peak;
  const Vec::Reg scale = Vec::Set1(a), top = Vec::Set1(0x1p26f);
  TermSum terms;
  int32_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    terms.Add(Vec::Mul(MassExp2(Vec::Mul(scale, BelowPeak(dots + i, peak))), top));
  }
  int64_t sum = terms.Total();
  if (i < count) {
    alignas(64) int32_t below[kLanes], last[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      below[lane] = i + lane < count ? dots[i + lane] - peak : 0;
    }
    StoreInts(last, Vec::Mul(MassExp2(Vec::Mul(scale, FromInts(below))), top));
    for (int lane = 0; i + lane < count; ++lane) sum += last[lane];
  }
  return sum;
}

void MassWeights(const MassHead* heads, int32_t group, const int32_t* dots, int32_t count,
                 uint16_t* distances, int32_t* fixed) {
  for (int32_t i = 0; i < count; i += kLanes) {
    Vec::Reg mass = Vec::Zero();
    for (int32_t g = 0; g < group; ++g) {
      const MassHead& head = heads[g];
      const Vec::Reg logit = Fma(
          Vec::Set1(head.a), FromInts(dots + int64_t{g} * kMassDotsStride + i), Vec::Set1(head.b));
      const Vec::Reg weight = MassExp2(Vec::Sub(logit, Vec::Set1(head.reference)));
      mass = Fma(weight, Vec::Set1(head.inverse), mass);
      if (fixed == nullptr) continue;
      StoreInts(fixed + int64_t{g} * kMassDotsStride + i, Vec::Mul(weight, Vec::Set1(0x1p30f)));
    }
    StoreDistances(distances + i, mass);
  }
}

void MassCells(const MassCall& call, const uint8_t* cell_bits, int32_t num_bits, int32_t first,
               int32_t last, uint8_t* cells) {
  for (int32_t token = first / kTile * kTile; token < last; token += kTile, cells += kTile) {
    TileCells(TileOf(call, token), cell_bits, num_bits, cells);
  }
}

void MassAdd(const int32_t* fixed, const uint8_t* cells, int32_t begin, int32_t end,
             int64_t* masses) {
  const auto add_one = [&](int32_t j) {
    int64_t* of_cell = masses + int64_t{cells[j]} * kMassAddQueries;
    for (int g = 0; g < kMassAddQueries; ++g) of_cell[g] += fixed[g * kMassDotsStride + j];
  };
  int32_t j = begin;
#if defined(__AVX2__)
  const auto load = [&](int g, int32_t at) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(fixed + g * kMassDotsStride + at));
  };
  const auto add = [&](int32_t at, __m128i of_token) {
    auto* of_cell = reinterpret_cast<__m256i*>(masses + int64_t{cells[at]} * kMassAddQueries);
    _mm256_storeu_si256(
        of_cell, _mm256_add_epi64(_mm256_loadu_si256(of_cell), _mm256_cvtepi32_epi64(of_token)));
  };
  for (; j + 4 <= end; j += 4) {
    const __m128i a = load(0, j), b = load(1, j), c = load(2, j), d = load(3, j);
    const __m128i ab_low = _mm_unpacklo_epi32(a, b), ab_high = _mm_unpackhi_epi32(a, b);
    const __m128i cd_low = _mm_unpacklo_epi32(c, d), cd_high = _mm_unpackhi_epi32(c, d);
    add(j, _mm_unpacklo_epi64(ab_low, cd_low));
    add(j + 1, _mm_unpackhi_epi64(ab_low, cd_low));
    add(j + 2, _mm_unpacklo_epi64(ab_high, cd_high));
    add(j + 3, _mm_unpackhi_epi64(ab_high, cd_high));
  }
#endif
  for (; j < end; ++j) add_one(j);
}

int64_t RerankLogits(const RerankHead& head, const int32_t* dots, const int32_t* residual_dots,
                     int32_t count, float* logits, float* most) {
  const Vec::Reg top = Vec::Set1(0x1p26f), reference = Vec::Set1(head.reference);
  alignas(64) int32_t terms[kLanes];
  alignas(64) float lanes[kLanes];
  int64_t sum = 0;
  Vec::Reg largest = Vec::Set1(*most);
  for (int32_t i = 0; i < count; i += kLanes) {
    const Vec::Reg logit = Fma(Vec::Set1(head.a), FromInts(dots + i), Vec::Set1(head.b));
    const Vec::Reg rest =
        Fma(Vec::Set1(head.residual_a), FromInts(residual_dots + i), Vec::Set1(head.residual_b));
    const Vec::Reg both = Vec::Add(logit, rest);
    Vec::Store(logits + i, both);
    StoreInts(terms, Vec::Mul(MassExp2(Vec::Sub(logit, reference)), top));
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
    const Vec::Reg weight = MassExp2(Vec::Sub(Vec::Load(logits + i), Vec::Set1(most)));
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
