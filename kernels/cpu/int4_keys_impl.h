// See kernels/int4_keys.h. Compiled by int4_keys_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/ops.h"
#include "kernels/cpu/round_bf16_impl.h"
#include "kernels/cpu/row_scores_impl.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

constexpr int64_t kMaxDim = 256;

// Whole numbers 0..15, rounded to nearest even.
inline void StoreCodes(int32_t* to, Vec::Reg steps) {
#if defined(__AVX512F__)
  _mm512_storeu_si512(to, _mm512_cvtps_epi32(steps));
#elif defined(__AVX2__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_cvtps_epi32(steps));
#else
  *to = static_cast<int32_t>(Vec::RoundToNearest(steps));
#endif
}

// Values of four-bit keys: of a pair the even and the odd channels, as SplitPairs puts bf16.
struct Int4Values {
  int64_t d;

  inline __attribute__((always_inline)) RegPair Pair(const std::byte* key, int64_t i) const {
#if defined(__AVX512F__)
    // (A key's last 16 bytes may hold 8 of codes; nothing past them is read.)
    const __mmask16 there = i + kPairValues <= d ? 0xffff : 0x00ff;
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, key + i / 2));
    return {_mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32(15))),
            _mm512_cvtepi32_ps(_mm512_srli_epi32(codes, 4))};
#elif defined(__AVX2__)
    const __m256i codes =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(key + i / 2)));
    return {_mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15))),
            _mm256_cvtepi32_ps(_mm256_srli_epi32(codes, 4))};
#else
    const int codes = static_cast<int>(key[i / 2]);
    return {static_cast<float>(codes & 15), static_cast<float>(codes >> 4)};
#endif
  }
  // Queries are filled up to whole pairs.
  Vec::Reg One(const std::byte*, int64_t) const { return Vec::Zero(); }
};

inline int64_t WholePairs(int64_t d) { return (d + kPairValues - 1) / kPairValues * kPairValues; }

template <DType kKv>
void QuantizeKeyOf(const std::byte* key, int64_t d, std::byte* out) {
  constexpr int kLanes = Vec::kLanes;
  const float scale_of_key = KeyScale<kKv>(key, d);
  const auto load = [&](int64_t c) {
    return LoadScaled<kKv>(key + c * static_cast<int64_t>(DTypeBytes(kKv)), scale_of_key);
  };
  Vec::Reg low = Vec::Sub(Vec::Zero(), load(0)), high = load(0);  // low: of the negated channels
  for (int64_t c = kLanes; c < d; c += kLanes) {
    const Vec::Reg x = load(c);
    low = Vec::Max(low, Vec::Sub(Vec::Zero(), x));
    high = Vec::Max(high, x);
  }
  // (A sum, not a negation, so that zero is never -0.)
  const uint16_t zero = RoundDownToBF16(0.0f - Vec::ReduceMax(low));
  const float range = Vec::ReduceMax(high) - FloatOf(zero);
  uint16_t scale = 0;
  float inverse = 0;
  if (range > 0) {
    const float step = range / 15.0f;
    scale = RoundUpToBF16(step > 0x1p-100f ? step : 0x1p-100f);
    inverse = 1.0f / FloatOf(scale);
  }
  int32_t codes[kMaxDim];
  for (int64_t c = 0; c < d; c += kLanes) {
    const Vec::Reg steps =
        Vec::Mul(Vec::Sub(load(c), Vec::Set1(FloatOf(zero))), Vec::Set1(inverse));
    StoreCodes(codes + c, Vec::Min(Vec::Max(steps, Vec::Zero()), Vec::Set1(15.0f)));
  }
  for (int64_t i = 0; i < d / 2; ++i) {
    out[i] = static_cast<std::byte>(codes[2 * i] | codes[2 * i + 1] << 4);
  }
  __builtin_memcpy(out + d / 2, &scale, 2);
  __builtin_memcpy(out + d / 2 + 2, &zero, 2);
}

}  // namespace

void QuantizeKey(const std::byte* key, DType dtype, int64_t d, std::byte* out) {
  ForKvType(dtype, [&]<DType kKv>(KvType<kKv>) { QuantizeKeyOf<kKv>(key, d, out); });
}

void PrepareInt4Queries(const RowsCall& call, const float* queries, float* prepared) {
  const int64_t whole = WholePairs(call.dim);
  float* sums = prepared + call.queries * whole;
  for (int32_t g = 0; g < call.queries; ++g) {
    const float* query = queries + int64_t{g} * call.dim;
    double sum = 0;
    for (int64_t c = 0; c < whole; ++c) {
      const int64_t of_pair = c % kPairValues;
      const int64_t to = c - of_pair + of_pair / 2 + of_pair % 2 * Vec::kLanes;
      prepared[g * whole + to] = c < call.dim ? query[c] : 0.0f;
      if (c < call.dim) sum += static_cast<double>(query[c]);
    }
    sums[g] = static_cast<float>(sum);
  }
}

void Int4Scores(const RowsCall& call, const float* prepared, const std::byte* const* keys,
                int32_t count, float* scores, int64_t stride) {
  const int64_t whole = WholePairs(call.dim);
  const float* sums = prepared + call.queries * whole;
  constexpr int32_t kAhead = 16;
  ScoreRows(
      Int4Values{call.dim}, prepared, call.queries, whole, keys, count, scores,
      stride, [=](int32_t i) __attribute__((always_inline)) {
        if (i + kAhead < count) {
          __builtin_prefetch(keys[i + kAhead]);
          __builtin_prefetch(keys[i + kAhead] + 63);  // most keys lie in two lines
        }
      });
  for (int32_t i = 0; i < count; ++i) {
    uint16_t scale, zero;
    __builtin_memcpy(&scale, keys[i] + call.dim / 2, 2);
    __builtin_memcpy(&zero, keys[i] + call.dim / 2 + 2, 2);
    for (int32_t g = 0; g < call.queries; ++g) {
      float& score = scores[g * stride + i];
      score = FloatOf(scale) * score + FloatOf(zero) * sums[g];
    }
  }
}

}  // namespace winnow::kernels::WINNOW_ISA
