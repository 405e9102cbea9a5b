// See kernels/page_bounds.h. Compiled by page_bounds_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/ops.h"
#include "kernels/cpu/round_bf16_impl.h"
#include "kernels/cpu/row_pairs_impl.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

// Upper halves of values whose lower halves are zero. (Not Vec::StoreBF16, which may take a
// subnormal for zero: bounds are copies.)
inline void StoreUpperHalves(uint16_t* to, Vec::Reg x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16)));
#elif defined(__AVX2__)
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(x), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0b1000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
#else
  *to = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, x) >> 16);
#endif
}

// The same of any values, rounded down or up.
template <uint16_t (*kRound)(float)>
inline void StoreRounded(uint16_t* to, Vec::Reg x) {
  float values[Vec::kLanes];
  Vec::Store(values, x);
  for (int i = 0; i < Vec::kLanes; ++i) to[i] = kRound(values[i]);
}

template <DType kKv>
void BoundPageOf(const std::byte* rows, size_t row_bytes, int32_t count, int64_t d,
                 std::byte* page) {
  constexpr int kLanes = Vec::kLanes;
  constexpr size_t kValueBytes = DTypeBytes(kKv);
  constexpr size_t kBoundBytes = kKv == DType::kF32 ? 4 : 2;
  float scales[kBoundPageTokens];
  for (int32_t t = 0; t < count; ++t) {
    scales[t] = KeyScale<kKv>(rows + static_cast<size_t>(t) * row_bytes, d);
  }
  for (int64_t c = 0; c < d; c += kLanes) {
    const auto load = [&](int32_t t) {
      return LoadScaled<kKv>(rows + static_cast<size_t>(t) * row_bytes + c * kValueBytes,
                             scales[t]);
    };
    Vec::Reg low = load(0), high = low;
    for (int32_t t = 1; t < count; ++t) {
      const Vec::Reg x = load(t);
      low = Vec::Min(x, low);  // of a NaN and a number the second: one NaN is passed over
      high = Vec::Max(x, high);
    }
    std::byte* min = page + c * kBoundBytes;
    std::byte* max = page + (d + c) * kBoundBytes;
    if constexpr (kKv == DType::kF32) {
      Vec::Store(reinterpret_cast<float*>(min), low);
      Vec::Store(reinterpret_cast<float*>(max), high);
    } else if constexpr (HasScales(kKv)) {
      StoreRounded<RoundDownToBF16>(reinterpret_cast<uint16_t*>(min), low);
      StoreRounded<RoundUpToBF16>(reinterpret_cast<uint16_t*>(max), high);
    } else {
      StoreUpperHalves(reinterpret_cast<uint16_t*>(min), low);
      StoreUpperHalves(reinterpret_cast<uint16_t*>(max), high);
    }
  }
}

}  // namespace

void BoundPage(const std::byte* rows, size_t row_bytes, int32_t count, int64_t d, DType dtype,
               std::byte* page) {
  ForKvType(dtype,
            [&]<DType kKv>(KvType<kKv>) { BoundPageOf<kKv>(rows, row_bytes, count, d, page); });
}

}  // namespace winnow::kernels::WINNOW_ISA
