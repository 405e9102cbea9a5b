// How the keys of dense attention (dense_attention.h) are cut: into units and splits, which fix its order of sums, and into
// blocks of threads, which do not. Host code without CUDA as well, so that tests run anywhere.
#ifndef WINNOW_KERNELS_CUDA_DENSE_SPLITS_H_
#define WINNOW_KERNELS_CUDA_DENSE_SPLITS_H_

#include <algorithm>
#include <cstdint>
#include <limits>

namespace winnow::kernels::cuda {

inline constexpr int32_t kDenseUnitTokens = 64;
// Rows of queries of a block that takes splits in turn.
inline constexpr int32_t kDenseBlockRows = 128;
// Splits, by their units' numbers: 256 tokens up to token 8,192, 512 up to 32,768, 1,024 from there. A short context has many,
// for as many blocks to take; of a long one fewer states are written and merged. Where they become longer is a multiple of
// the longer one.
constexpr int32_t DenseSplitUnits(int32_t unit) { return unit < 128 ? 4 : unit < 512 ? 8 : 16; }
constexpr int32_t DenseSplitOf(int32_t unit) {
  return unit < 128 ? unit / 4 : unit < 512 ? 32 + (unit - 128) / 8 : 80 + (unit - 512) / 16;
}
// Their units are powers of two, which a device need not divide by.
constexpr bool BeginsDenseSplit(int32_t unit) { return (unit & (DenseSplitUnits(unit) - 1)) == 0; }
// The first unit from this one on with which a split begins.
constexpr int32_t NextDenseSplit(int32_t unit) {
  const int32_t each = DenseSplitUnits(unit);
  return (unit + each - 1) & -each;
}
constexpr int32_t DenseUnits(int32_t tokens) {
  return (tokens + kDenseUnitTokens - 1) / kDenseUnitTokens;
}
// Splits of a context, at least one.
constexpr int32_t DenseSplits(int32_t tokens) {
  return tokens > 0 ? DenseSplitOf(DenseUnits(tokens) - 1) + 1 : 1;
}
// Units of a block, for `rows` of `units` each, where `slots` blocks run at once: whole splits of the longest kind that there
// is, so that each block begins where a split does. Two things make a call long, and count the same. Blocks run in waves, and
// one's beginning, in which it only waits, is as long as two units. And smaller blocks end closer together, at the price of
// more beginnings. H200, d 128, G 4, step of 9 rows at 128K in blocks of 16, 32, 64 units: 9.25, 9.30, 9.54 ms. Up to eight
// rows on Hopper are shared out otherwise (dense_attention_splits_warp.cu).
constexpr int32_t DenseBlockUnits(int32_t units, int64_t rows, int64_t slots) {
  constexpr double kBeginning = 2;
  const auto ceil_of = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t grain = DenseSplitUnits(units - 1), grains = ceil_of(units, grain);
  int64_t best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t wave = 1; wave <= 8; ++wave) {
    const int64_t each = ceil_of(grains, std::clamp<int64_t>(wave * slots / rows, 1, grains));
    const int64_t blocks = rows * ceil_of(grains, each);
    const auto block_units = static_cast<double>(each * grain);
    const double in_waves =
        static_cast<double>(ceil_of(blocks, slots)) * (block_units + kBeginning);
    const double ends = block_units / 4 + static_cast<double>(blocks) / static_cast<double>(slots);
    if (in_waves + ends < least) {
      least = in_waves + ends;
      best = each * grain;
    }
  }
  return static_cast<int32_t>(best);
}

// Blocks that share out the units of `heads` of up to `splits` each, where `slots` run at once: all, or up to a tenth fewer if
// then each has whole heads, or each head whole blocks, as where contexts are of one length. What a block has of a head is then
// one state (dense_attention_splits_warp.cu).
constexpr int64_t DenseSharers(int64_t heads, int64_t splits, int64_t slots) {
  const auto ceil_of = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t even =
      heads > slots ? ceil_of(heads, ceil_of(heads, slots)) : slots / heads * heads;
  return std::min(heads * splits, even >= slots - slots / 10 ? even : slots);
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_DENSE_SPLITS_H_
