// Sequences in a paged pool, for every test of attention.
#ifndef WINNOW_TESTS_UNIT_KERNELS_PAGED_KV_H_
#define WINNOW_TESTS_UNIT_KERNELS_PAGED_KV_H_

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/kv_layout.h"
#include "kernels/kv_ops.h"
#include "kernels/kv_row.h"
#include "kernels/retrieval.h"
#include "kernels/write_kv.h"
#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {

// Types that KV may have on a processor.
inline constexpr DType kKvTypes[] = {DType::kBF16, DType::kF32, DType::kI8, DType::kF8};

// Sequences with random keys and values in the shuffled blocks of a pool that holds NaN elsewhere.
class PagedKv {
 public:
  PagedKv(Random& random, const KvLayout& layout, std::vector<int32_t> lengths,
          float key_deviation = 1.0f)
      : layout_(layout), lengths_(std::move(lengths)) {
    const int32_t bt = layout.block_tokens;
    int32_t num_blocks = 2;  // that nobody owns
    for (const int32_t length : lengths_) num_blocks += (length + bt - 1) / bt;
    pool_ = GuardedArray<std::byte>(num_blocks * layout.BlockBytes(),
                                    std::byte{0xff});  // NaN in bf16, in f32 and as a scale
    std::vector<int32_t> free(num_blocks);
    std::iota(free.begin(), free.end(), 0);
    random.Shuffle(free);
    for (const int32_t length : lengths_) {
      std::vector<int32_t>& table = tables_.emplace_back();
      for (int32_t block = 0; block < (length + bt - 1) / bt; ++block) {
        table.push_back(free.back());
        free.pop_back();
      }
      const int64_t width = int64_t{layout.kv_heads} * layout.head_dim;
      Matrix k = Matrix::Normal(random, length, width, key_deviation);
      Matrix v = Matrix::Normal(random, length, width);
      const std::vector<AttentionChunk> chunk = {{0, length, 0, table}};
      WriteKvRef(k.tensor(), v.tensor(), chunk, pool_.data(), layout);
    }
  }
  // The same values as KV of another type, rounded to it, in the same places.
  PagedKv As(DType dtype) const {
    PagedKv other = *this;
    other.layout_.dtype = dtype;
    other.pool_ =
        GuardedArray<std::byte>(num_blocks() * other.layout_.BlockBytes(), std::byte{0xff});
    std::vector<float> key(layout_.head_dim), value(layout_.head_dim);
    for (size_t sequence = 0; sequence < lengths_.size(); ++sequence) {
      for (int32_t token = 0; token < lengths_[sequence]; ++token) {
        const int32_t block = tables_[sequence][token / layout_.block_tokens];
        for (int32_t head = 0; head < layout_.kv_heads; ++head) {
          const int32_t row = token % layout_.block_tokens;
          const std::byte* from = pool_.data() + layout_.RowOffset(block, head, row);
          for (int32_t c = 0; c < layout_.head_dim; ++c) {
            key[c] = KeyAt(from, layout_, c);
            value[c] = ValueAt(from, layout_, c);
          }
          PutKvRow(key.data(), value.data(), other.layout_,
                   other.pool_.data() + other.layout_.RowOffset(block, head, row));
        }
      }
    }
    return other;
  }
  const KvLayout& layout() const { return layout_; }
  const void* pool() const { return pool_.data(); }
  int32_t num_blocks() const { return static_cast<int32_t>(pool_.size() / layout_.BlockBytes()); }
  int32_t length(int sequence) const { return lengths_[sequence]; }
  std::span<const int32_t> table(int sequence) const { return tables_[sequence]; }
  std::byte* Row(int sequence, int32_t head, int32_t token) {
    return pool_.data() + layout_.RowOffset(tables_[sequence][token / layout_.block_tokens], head,
                                            token % layout_.block_tokens);
  }
  void CopyKey(int sequence, int32_t head, int32_t from, int32_t to) {
    std::byte *target = Row(sequence, head, to), *source = Row(sequence, head, from);
    std::memcpy(target, source, layout_.ValueOffsetInRow());
    if (!HasScales(layout_.dtype)) return;
    const size_t scale = layout_.ScaleOffsetInRow();
    std::memcpy(target + scale, source + scale, kKvScaleBytes);
  }
  // In 8 bits the row's other channels are rounded once more.
  void SetKey(int sequence, int32_t head, int32_t token, int32_t channel, float value) {
    std::byte* row = Row(sequence, head, token);
    std::vector<float> key, values;
    for (int32_t c = 0; c < layout_.head_dim; ++c) {
      key.push_back(c == channel ? value : KeyAt(row, layout_, c));
      values.push_back(ValueAt(row, layout_, c));
    }
    PutKvRow(key.data(), values.data(), layout_, row);
  }
  // `num_tokens` queries of a sequence from `position`, at rows first_row...
  AttentionChunk Chunk(int sequence, int32_t first_row, int32_t num_tokens,
                       int32_t position) const {
    return {first_row, num_tokens, position, tables_[sequence]};
  }
  // A chunk whose queries see a window. `table` becomes its table, where blocks before the window are no blocks of the pool.
  AttentionChunk WindowChunk(int sequence, int32_t first_row, int32_t num_tokens, int32_t position,
                             int32_t window, std::vector<int32_t>* table) const {
    AttentionChunk chunk{first_row, num_tokens, position, {}, window};
    *table = tables_[sequence];
    std::fill_n(table->begin(), chunk.FirstRead() / layout_.block_tokens, 1 << 26);
    chunk.block_table = *table;
    return chunk;
  }
  // A query of a sequence's token at `position`, with the given sink and window. An empty mid may
  // lie past the position.
  RetrievalQuery Query(int sequence, int32_t row, int32_t position, int32_t sink, int32_t window,
                       int32_t k) const {
    RetrievalQuery query{
        row, tables_[sequence], position, {sink, std::max(sink, position + 1 - window)}, k};
    query.k = std::min(k, query.mid.size());
    return query;
  }

 private:
  KvLayout layout_;
  std::vector<int32_t> lengths_;
  std::vector<std::vector<int32_t>> tables_;
  GuardedArray<std::byte> pool_;
};

}  // namespace winnow::kernels

#endif  // WINNOW_TESTS_UNIT_KERNELS_PAGED_KV_H_
