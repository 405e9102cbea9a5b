// Which chunks of a call to dense attention (dense_attention.h) go which way on the device. All ways give the same
// bits, so the choice may depend on anything: it is about time alone. Host code without CUDA, so that tests run anywhere.
#ifndef WINNOW_KERNELS_CUDA_ATTENTION_WAYS_H_
#define WINNOW_KERNELS_CUDA_ATTENTION_WAYS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/dense_widening.h"
#include "kernels/kv_ops.h"

namespace winnow::kernels::cuda {

// Rows (tokens times heads of a group) that share a tile.
inline constexpr int32_t kAttentionTileRows = 16;
// Tiles that are split together, and share one reading of the keys (dense_attention.cu).
inline constexpr int32_t kAttentionTilesOfASet = 4;
// Tokens of a chunk that is always split, as is one whose tiles are a set and that sees many keys, or keys of 8 bits, which blocks
// in turn widen each for itself. H200, 24 sequences of 8 KV heads with 9 and 16 rows, a step in turn and split, ms: at 32K 45.4
// and 39.3 (9 rows), at 8K 18.3 and 18.6, 21.7 and 24.2; 64 with 9 at 2K 24.6 and 24.8. Of int8 at 8K 24.8 and 17.3, 27.9 and 22.9;
// 64 at 2K 27.4 and 24.0.
inline constexpr int32_t kFewQueries = 8;
inline constexpr int32_t kLongContext = 16384;
// Sets, over all KV heads, that are split in the time that one wave of blocks takes with its splits in turn. A block in
// turn has 128 rows and walks all keys alone: where a call has few blocks most of the device waits.
inline constexpr int64_t kSetsOfAWave = 64;

inline int64_t AttentionTiles(int32_t num_tokens, int32_t group) {
  return (int64_t{num_tokens} * group + kAttentionTileRows - 1) / kAttentionTileRows;
}
inline int64_t AttentionSets(int32_t num_tokens, int32_t group, int32_t kv_heads) {
  return (AttentionTiles(num_tokens, group) + kAttentionTilesOfASet - 1) / kAttentionTilesOfASet *
         kv_heads;
}

// Rows of a chunk from which on its KV of 8 bits is made bfloat16 first, and blocks in turn that each part of the heads must give
// then (dense_widening.h): fewer would leave much of the device waiting.
inline constexpr int64_t kWidenedRows = 512;
inline constexpr int64_t kWidenedBlocks = 96;

struct AttentionWays {
  // Side by side, in calls of their own: those of one tile, which has a kernel of its own, and those of more. Tiles of a
  // call are as many as its longest chunk needs.
  std::vector<AttentionChunk> few, several;
  std::vector<AttentionChunk> many;     // in turn
  std::vector<AttentionChunk> widened;  // in turn, too, over a copy of their KV in bfloat16
};

// Whether attention of a chunk by itself over KV of 8 bits is faster over a copy in bfloat16.
inline bool PaysToWiden(const AttentionChunk& chunk, int32_t group, const KvLayout& layout) {
  const int64_t rows = int64_t{chunk.num_tokens} * group;
  if (!HasScales(layout.dtype) || rows < kWidenedRows || chunk.window > 0) return false;
  const WidenedShape widened = ShapeOfWidened(layout, 1, chunk.position + chunk.num_tokens);
  if (widened.bytes > kWidenedKvBytes) return false;
  return widened.heads == layout.kv_heads ||
         widened.heads * ((rows + kDenseBlockRows - 1) / kDenseBlockRows) >= kWidenedBlocks;
}

// Sorts `chunks` by way, in their order; what `ways` had is gone.
inline void ChooseWays(std::span<const AttentionChunk> chunks, int32_t group,
                       const KvLayout& layout, AttentionWays& ways) {
  ways.few.clear();
  ways.several.clear();
  ways.many.clear();
  ways.widened.clear();
  const auto sets = [&](const AttentionChunk& chunk) {
    return AttentionSets(chunk.num_tokens, group, layout.kv_heads);
  };
  // Decoding, and drafts: more blocks than in turn, and the keys are read no more often.
  const auto is_short = [&](const AttentionChunk& chunk) {
    return chunk.num_tokens <= kFewQueries ||
           (AttentionTiles(chunk.num_tokens, group) <= kAttentionTilesOfASet &&
            (chunk.position >= kLongContext || HasScales(layout.dtype)));
  };
  // Many chunks fill the device in turn, too.
  int64_t sum = 0;
  for (const AttentionChunk& chunk : chunks) {
    if (!is_short(chunk) && sets(chunk) <= kSetsOfAWave) sum += sets(chunk);
  }
  for (const AttentionChunk& chunk : chunks) {
    if (AttentionTiles(chunk.num_tokens, group) == 1) {
      ways.few.push_back(chunk);
    } else if (is_short(chunk) || (sum <= kSetsOfAWave && sets(chunk) <= kSetsOfAWave)) {
      ways.several.push_back(chunk);
    } else if (PaysToWiden(chunk, group, layout)) {
      ways.widened.push_back(chunk);
    } else {
      ways.many.push_back(chunk);
    }
  }
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_ATTENTION_WAYS_H_
