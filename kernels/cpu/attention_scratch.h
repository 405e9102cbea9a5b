// The memory in which one thread works on one tile of queries, cut into its parts.
#ifndef WINNOW_KERNELS_CPU_ATTENTION_SCRATCH_H_
#define WINNOW_KERNELS_CPU_ATTENTION_SCRATCH_H_

#include <cstddef>
#include <cstdint>

namespace winnow::kernels {

// Sized for the largest element of any instruction set (float32), so that one size fits all.
// d at most 256; a unit has at most 64 tokens, a tile of rows at most 16 rows.
struct AttentionScratch {
  static constexpr int64_t kUnitTokens = 64, kMaxHeadDim = 256, kMaxTileRows = 16, kMaxLanes = 16;

  std::byte* key_panels;
  std::byte* value_panels;
  float* scores;   // [16][64]
  void* weights;   // [16][64]
  float* rescale;  // [16][16], a row's factor in every lane
  float* part;     // one state
  float* maxima;   // [rows]
  float* sums;     // [rows][16], per lane
  float* outputs;  // [rows][d]
  void* queries;   // [rows][d]
  // For matrix tiles, a few rows of each KV head (attention_tiles_impl.h).
  float* turned_scores;     // [64][16]
  std::byte* query_panels;  // a panel of d / 2 steps for 16 rows of a head
  std::byte* wide_rows;     // [64] rows of bfloat16 K and V, of KV in 8 bits (WidenRows)
  size_t size_bytes;

  inline __attribute__((always_inline))
  AttentionScratch(std::byte* memory, int64_t head_dim, int64_t rows, int64_t kv_heads) {
    std::byte* next = memory;
    auto take = [&next](int64_t floats) __attribute__((always_inline)) {
      std::byte* taken = next;
      next += (floats * 4 + 63) / 64 * 64;
      return taken;
    };
    key_panels = take(kUnitTokens * head_dim);
    value_panels = take(kUnitTokens * head_dim);
    scores = reinterpret_cast<float*>(take(kMaxTileRows * kUnitTokens));
    weights = take(kMaxTileRows * kUnitTokens);
    rescale = reinterpret_cast<float*>(take(kMaxTileRows * kMaxLanes));
    part = reinterpret_cast<float*>(take(kMaxHeadDim + 2));
    maxima = reinterpret_cast<float*>(take(rows));
    sums = reinterpret_cast<float*>(take(rows * kMaxLanes));
    outputs = reinterpret_cast<float*>(take(rows * head_dim));
    queries = take(rows * head_dim);
    turned_scores = reinterpret_cast<float*>(take(kUnitTokens * kMaxTileRows));
    const int64_t panels = kv_heads * ((rows / kv_heads + kMaxTileRows - 1) / kMaxTileRows);
    query_panels = take(panels * kMaxTileRows * head_dim / 2);
    wide_rows = take(kUnitTokens * head_dim);
    size_bytes = static_cast<size_t>(next - memory);
  }
};

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_ATTENTION_SCRATCH_H_
