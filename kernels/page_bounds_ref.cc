#include "kernels/page_bounds.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/host_matrix.h"
#include "kernels/kv_row.h"
#include "kernels/logit_select.h"

namespace winnow::kernels {
namespace {

std::byte* PageOf(void* bounds, const KvLayout& layout, int32_t block, int32_t head, int32_t page) {
  const int32_t pages = layout.block_tokens / kBoundPageTokens;
  return static_cast<std::byte*>(bounds) + block * BoundBlockBytes(layout) +
         (static_cast<size_t>(head) * pages + page) * BoundPageBytes(layout);
}

void PutBound(float bound, BF16 outward, const KvLayout& layout, std::byte* to) {
  if (BoundType(layout) == DType::kF32) {
    std::memcpy(to, &bound, 4);
  } else {
    std::memcpy(to, &outward, 2);
  }
}

}  // namespace

void BoundKeysRef(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                  void* bounds) {
  const size_t value_bytes = DTypeBytes(BoundType(layout));
  for (const KeySpan& span : spans) {
    if (span.tokens.size() <= 0) continue;
    const int32_t begin = span.tokens.first / kBoundPageTokens * kBoundPageTokens;
    for (int32_t first = begin; first < span.tokens.last; first += kBoundPageTokens) {
      const int32_t last = std::min(first + kBoundPageTokens, span.tokens.last);
      const int32_t block = span.block_table[first / layout.block_tokens];
      const int32_t in_block = first % layout.block_tokens;
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        std::byte* page = PageOf(bounds, layout, span.IndexBlock(first / layout.block_tokens), head,
                                 in_block / kBoundPageTokens);
        for (int32_t c = 0; c < layout.head_dim; ++c) {
          const auto value = [&](int32_t t) {
            return KeyAt(
                static_cast<const std::byte*>(pool) + layout.RowOffset(block, head, in_block + t),
                layout, c);
          };
          float low = value(0), high = value(0);
          for (int32_t t = 1; t < last - first; ++t) {
            if (value(t) < low) low = value(t);
            if (value(t) > high) high = value(t);
          }
          PutBound(low, RoundDownToBF16(low), layout, page + c * value_bytes);
          PutBound(high, RoundUpToBF16(high), layout, page + (layout.head_dim + c) * value_bytes);
        }
      }
    }
  }
}

std::vector<double> BoundScoresRef(const Tensor& q, const RetrievalQuery& query, const void* bounds,
                                   const KvLayout& layout, int32_t kv_head) {
  const int32_t d = layout.head_dim;
  const int64_t group = q.cols / d / layout.kv_heads;
  std::vector<double> scores;
  for (int32_t t = query.mid.first; t < query.mid.last; ++t) {
    const std::byte* page =
        PageOf(const_cast<void*>(bounds), layout, query.block_table[t / layout.block_tokens],
               kv_head, t % layout.block_tokens / kBoundPageTokens);
    double score = 0;
    for (int64_t g = 0; g < group; ++g) {
      const float* of_head = q.f32(query.row) + (kv_head * group + g) * d;
      for (int32_t c = 0; c < d; ++c) {
        const double x = of_head[c];
        score += std::max(x * ElementAt(page, BoundType(layout), c),
                          x * ElementAt(page, BoundType(layout), d + c));
      }
    }
    scores.push_back(score);
  }
  return scores;
}

void SelectByBoundsRef(const Tensor& q, std::span<const RetrievalQuery> queries, const void* bounds,
                       const KvLayout& layout, const Selection& chosen) {
  for (size_t i = 0; i < queries.size(); ++i) {
    for (int32_t head = 0; head < layout.kv_heads; ++head) {
      const std::vector<int32_t> tokens =
          TopKRef(BoundScoresRef(q, queries[i], bounds, layout, head), queries[i].k);
      chosen.count(i, head) = static_cast<int32_t>(tokens.size());
      for (size_t j = 0; j < tokens.size(); ++j) {
        chosen.chosen(i, head)[j] = queries[i].mid.first + tokens[j];
      }
    }
  }
}

}  // namespace winnow::kernels
