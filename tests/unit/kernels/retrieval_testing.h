// What tests of retrieval share: sequences in a paged pool, and selections that own their memory.
#ifndef WINNOW_TESTS_UNIT_KERNELS_RETRIEVAL_TESTING_H_
#define WINNOW_TESTS_UNIT_KERNELS_RETRIEVAL_TESTING_H_

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/retrieval.h"
#include "kernels/write_kv.h"
#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {

// Sequences with random keys and values in the shuffled blocks of a pool that holds NaN elsewhere.
class PagedKv {
 public:
  PagedKv(Random& random, const KvLayout& layout, std::vector<int32_t> lengths,
          float key_deviation = 1.0f)
      : layout_(layout), lengths_(std::move(lengths)) {
    const int32_t bt = layout.block_tokens;
    int32_t num_blocks = 2;  // that nobody owns
    for (const int32_t length : lengths_) num_blocks += (length + bt - 1) / bt;
    pool_.assign(num_blocks * layout.BlockBytes(), std::byte{0xff});
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
    std::memcpy(Row(sequence, head, to), Row(sequence, head, from), layout_.ValueOffsetInRow());
  }
  void SetKey(int sequence, int32_t head, int32_t token, int32_t channel, float value) {
    std::byte* at = Row(sequence, head, token) + channel * DTypeBytes(layout_.dtype);
    const BF16 rounded = ToBF16(value);
    if (layout_.dtype == DType::kF32) {
      std::memcpy(at, &value, 4);
    } else {
      std::memcpy(at, &rounded, 2);
    }
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
  std::vector<std::byte> pool_;
};

// Memory for a selection; what is not chosen keeps a guard value.
class OwnedSelection {
 public:
  static constexpr int32_t kGuard = -77;
  OwnedSelection(size_t queries, int32_t kv_heads, int32_t capacity)
      : kv_heads_(kv_heads),
        capacity_(capacity),
        counts_(queries * kv_heads, kGuard),
        tokens_(queries * kv_heads * capacity, kGuard) {}
  Selection view() { return {kv_heads_, capacity_, counts_.data(), tokens_.data()}; }
  std::vector<int32_t> Of(int64_t query, int32_t head) const {
    const int64_t unit = query * kv_heads_ + head;
    const int32_t* first = tokens_.data() + unit * capacity_;
    return {first, first + counts_[unit]};
  }
  void Set(int64_t query, int32_t head, const std::vector<int32_t>& tokens) {
    const int64_t unit = query * kv_heads_ + head;
    counts_[unit] = static_cast<int32_t>(tokens.size());
    std::copy(tokens.begin(), tokens.end(), tokens_.begin() + unit * capacity_);
  }
  // Nothing was written past what was chosen.
  bool GuardsIntact() const {
    for (size_t unit = 0; unit < counts_.size(); ++unit) {
      for (int32_t i = counts_[unit]; i < capacity_; ++i) {
        if (tokens_[unit * capacity_ + i] != kGuard) return false;
      }
    }
    return true;
  }
  bool operator==(const OwnedSelection&) const = default;

 private:
  int32_t kv_heads_, capacity_;
  std::vector<int32_t> counts_, tokens_;
};

// `chosen` (ascending, of [first, first + scores.size())) are k of the largest scores, where scores
// that differ by less than `tolerance` of the k-th may stand for each other.
inline void ExpectTopK(const std::vector<int32_t>& chosen, std::span<const double> scores,
                       int32_t first, int32_t k, double tolerance) {
  ASSERT_EQ(chosen.size(), static_cast<size_t>(k));
  if (k == 0) return;
  ASSERT_TRUE(std::is_sorted(chosen.begin(), chosen.end()));
  ASSERT_EQ(std::adjacent_find(chosen.begin(), chosen.end()), chosen.end());
  ASSERT_GE(chosen.front(), first);
  ASSERT_LT(chosen.back(), first + static_cast<int32_t>(scores.size()));
  std::vector<double> sorted(scores.begin(), scores.end());
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  const double border = sorted[k - 1], slack = tolerance * std::abs(border);
  size_t next = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    const int32_t token = first + static_cast<int32_t>(i);
    const bool taken = next < chosen.size() && chosen[next] == token;
    next += taken ? 1 : 0;
    if (taken) {
      ASSERT_GE(scores[i], border - slack) << "token " << token << " was chosen";
    } else {
      ASSERT_LE(scores[i], border + slack) << "token " << token << " was not chosen";
    }
  }
}

inline int32_t AnyHeadDim(Random& random) {
  return std::vector<int32_t>{64, 80, 96, 128}[random.Int(0, 3)];
}
inline DType AnyKvType(Random& random) {
  return random.Int(0, 1) == 0 ? DType::kBF16 : DType::kF32;
}

}  // namespace winnow::kernels

#endif  // WINNOW_TESTS_UNIT_KERNELS_RETRIEVAL_TESTING_H_
