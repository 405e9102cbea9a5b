// What tests of retrieval share beside paged_kv.h: selections that own their memory, and what a
// right one is.
#ifndef WINNOW_TESTS_UNIT_KERNELS_RETRIEVAL_TESTING_H_
#define WINNOW_TESTS_UNIT_KERNELS_RETRIEVAL_TESTING_H_

#include <algorithm>
#include <vector>

#include "kernels/retrieval.h"
#include "tests/unit/kernels/kernel_testing.h"
#include "tests/unit/kernels/paged_kv.h"

namespace winnow::kernels {

// A byte of an index before a test.
inline constexpr std::byte kUntouched{0x5a};

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

// A head dimension that a GPU has for each type of KV, and one that it has for bfloat16.
inline int32_t AnyHeadDim(Random& random) {
  return std::vector<int32_t>{64, 80, 96, 128}[random.Int(0, 3)];
}
inline int32_t AnyHeadDimTo256(Random& random) {
  return random.Int(0, 4) == 0 ? 256 : AnyHeadDim(random);
}
inline DType AnyKvType(Random& random) { return kKvTypes[random.Int(0, 3)]; }
// One that holds small whole numbers exactly, whatever lies beside them.
inline DType AnyWideKvType(Random& random) { return kKvTypes[random.Int(0, 1)]; }

// 100 tokens whose logits are in base 2, of a query that is 1 in its first channel and 0 elsewhere. Half of the mass is
// the first token's, half its equal's, the last one's: a weight of 2^-126 is half that. Of [4, 90) one token's mass is not
// below 2^-126: kHeavyOfFading's.
inline constexpr int32_t kHeavyOfFading = 20;
inline PagedKv KvOfFadingMasses(Random& random, DType dtype) {
  PagedKv kv(random, {1, 64, 16, dtype}, {100}, 0.0f);
  for (int32_t t = 1; t < 99; ++t) kv.SetKey(0, 0, t, 0, -200);
  kv.SetKey(0, 0, kHeavyOfFading, 0, -120);
  kv.SetKey(0, 0, 30, 0, -127);
  kv.SetKey(0, 0, 40, 0, -140);
  kv.SetKey(0, 0, 50, 0, -126);
  return kv;
}

}  // namespace winnow::kernels

#endif  // WINNOW_TESTS_UNIT_KERNELS_RETRIEVAL_TESTING_H_
