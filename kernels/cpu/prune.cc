// QuantizeKeys and PruneSelection of the CPU backend (kernels/int4_keys.h, kernels/top_p.h).
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/int4_keys.h"
#include "kernels/top_p.h"

namespace winnow::kernels {
namespace {

constexpr int32_t kKeysPerItem = 512;

// What the candidates of one query head keep: those of a weight above `threshold`, and of those
// that equal it the last `of_equal`.
struct TopP {
  float threshold = 0;
  int64_t of_equal = 0;
};

constexpr int kDigits = 256;

// sums[digit] = the weights of this digit of their bits, added. Four tables take turns, because
// most weights have one of a few exponents, and an addition to the same place waits for the last
// one.
void AddByDigit(std::span<const float> weights, int shift, double (&sums)[kDigits]) {
  double tables[4][kDigits] = {};
  for (size_t i = 0; i < weights.size(); ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(weights[i]);
    tables[i % 4][bits >> shift & (kDigits - 1)] += static_cast<double>(weights[i]);
  }
  for (int digit = 0; digit < kDigits; ++digit) {
    sums[digit] = tables[0][digit] + tables[1][digit] + tables[2][digit] + tables[3][digit];
  }
}

// The bits of floats that are not negative have their order: the threshold is found from the top,
// eight bits at a time, among the weights that have the bits found so far. `scratch` has room for
// the weights.
TopP FindTopP(std::span<const float> weights, double of_anchors, float p, float* scratch) {
  double sums[kDigits];
  AddByDigit(weights, 24, sums);
  double needed = 0;
  for (const double sum : sums) needed += sum;
  needed = static_cast<double>(p) * (of_anchors + needed) - of_anchors;
  if (p >= 1) return {0, 0};
  if (needed <= 0) return {std::numeric_limits<float>::infinity(), 0};
  uint32_t prefix = 0;
  for (const int shift : {24, 16, 8, 0}) {
    if (shift < 24) {
      const int above = shift + 8;  // bits from there on are those of the prefix
      size_t count = 0;
      for (const float weight : weights) {
        scratch[count] = weight;
        count += std::bit_cast<uint32_t>(weight) >> above == prefix >> above ? 1 : 0;
      }
      weights = {scratch, count};
      AddByDigit(weights, shift, sums);
    }
    int digit = kDigits - 1;
    for (; digit > 0 && sums[digit] < needed; --digit) needed -= sums[digit];
    prefix |= static_cast<uint32_t>(digit) << shift;
  }
  const float threshold = std::bit_cast<float>(prefix);
  if (threshold == 0) return {0, 0};
  return {threshold, static_cast<int64_t>(std::ceil(needed / static_cast<double>(threshold)))};
}

}  // namespace

void CpuBackend::QuantizeKeys(std::span<const KeySpan> spans, const void* pool,
                              const KvLayout& layout, void* int4_keys) {
  CheckKv(layout);
  for (const KeySpan& span : spans) {
    WINNOW_CHECK(span.tokens.first >= 0 &&
                 span.tokens.last <=
                     static_cast<int64_t>(span.block_table.size()) * layout.block_tokens);
    ForEachRow(
        std::max(0, span.tokens.size()), 4 * int64_t{layout.kv_heads} * layout.head_dim,
        [&](int64_t i) {
          const int32_t token = span.tokens.first + static_cast<int32_t>(i);
          const int32_t block = span.block_table[token / layout.block_tokens];
          const int32_t in_block = token % layout.block_tokens;
          for (int32_t head = 0; head < layout.kv_heads; ++head) {
            ops_.quantize_key(
                static_cast<const std::byte*>(pool) + layout.RowOffset(block, head, in_block),
                layout.dtype, layout.head_dim,
                static_cast<std::byte*>(int4_keys) +
                    Int4KeyOffset(layout, span.IndexBlock(token / layout.block_tokens), head,
                                  in_block));
          }
        });
  }
}

void CpuBackend::PruneSelection(const PruneSelectionArgs& args) {
  const Tensor& q = args.q;
  const std::span<const RetrievalQuery> queries = args.queries;
  const KvLayout& layout = args.layout;
  const Selection &candidates = args.candidates, &kept = args.kept;
  const RowsCall call = MakeRowsCall(q, layout, args.scale);
  WINNOW_CHECK(args.p >= 0);
  WINNOW_CHECK(candidates.kv_heads == layout.kv_heads && kept.kv_heads == layout.kv_heads);
  // Anchors of a query, in order: [0, mid.first), [mid.last, position].
  const auto before = [&](int64_t i) {
    return queries[i].mid.size() > 0 ? queries[i].mid.first : 0;
  };
  const auto after = [&](int64_t i) { return queries[i].mid.size() > 0 ? queries[i].mid.last : 0; };
  const auto num_anchors = [&](int64_t i) {
    return before(i) + queries[i].position + 1 - after(i);
  };
  retrieval_items_.clear();
  scored_units_.clear();
  int64_t scores = 0;
  int32_t most = 0;  // candidates
  for (size_t i = 0; i < queries.size(); ++i) {
    CheckQuery(q, queries[i], layout);
    for (int32_t head = 0; head < layout.kv_heads; ++head) {
      const int32_t count = candidates.count(i, head);
      WINNOW_CHECK(count >= 0 && count <= candidates.capacity && count <= kept.capacity);
      WINNOW_CHECK(count <= std::max(0, queries[i].mid.size()));
      const int32_t keys = count == 0 ? 0 : num_anchors(i) + count;
      for (int32_t key = 0; key < keys; key += kKeysPerItem) {
        retrieval_items_.push_back({static_cast<int64_t>(scored_units_.size()), key,
                                    std::min(keys, key + kKeysPerItem), nullptr});
      }
      scored_units_.push_back({scores, keys});
      scores += int64_t{keys} * call.queries;
      most = std::max(most, count);
    }
  }
  const int64_t query_floats = int64_t{call.queries} * call.dim;
  const size_t prepared_bytes =
      (static_cast<size_t>(Int4QueryFloats(call)) * sizeof(float) + 63) / 64 * 64;
  const size_t top_p_bytes = (static_cast<size_t>(most) * (sizeof(float) + 1) + 63) / 64 * 64;
  const size_t thread_bytes = std::max(prepared_bytes, top_p_bytes);  // one after the other
  std::byte* scratch = attention_scratch_.Get(thread_bytes * num_threads());
  float* all_scores =
      reinterpret_cast<float*>(states_scratch_.Get(static_cast<size_t>(scores) * sizeof(float)));

  threads_.ParallelFor(static_cast<int64_t>(retrieval_items_.size()), [&](int64_t item_index,
                                                                          int thread) {
    const RetrievalItem& item = retrieval_items_[item_index];
    const int64_t i = item.unit / layout.kv_heads;
    const auto head = static_cast<int32_t>(item.unit % layout.kv_heads);
    const RetrievalQuery& query = queries[i];
    const int32_t anchors = num_anchors(i);
    const std::byte* keys[kKeysPerItem];
    for (int32_t key = item.first; key < item.last; ++key) {
      const int32_t token = key < before(i) ? key
                            : key < anchors ? after(i) + key - before(i)
                                            : candidates.chosen(i, head)[key - anchors];
      keys[key - item.first] = static_cast<const std::byte*>(args.int4_keys) +
                               Int4KeyOffset(layout, query.block_table[token / layout.block_tokens],
                                             head, token % layout.block_tokens);
    }
    float* prepared = reinterpret_cast<float*>(scratch + thread * thread_bytes);
    ops_.prepare_int4_queries(call, q.f32(query.row) + head * query_floats, prepared);
    ops_.int4_scores(call, prepared, keys, item.last - item.first,
                     all_scores + scored_units_[item.unit].scores + item.first,
                     scored_units_[item.unit].sums);
  });

  threads_.ParallelFor(static_cast<int64_t>(scored_units_.size()), [&](int64_t unit, int thread) {
    const int64_t i = unit / layout.kv_heads;
    const auto head = static_cast<int32_t>(unit % layout.kv_heads);
    const int32_t count = candidates.count(i, head), anchors = num_anchors(i);
    float* left = reinterpret_cast<float*>(scratch + thread * thread_bytes);
    auto* wanted = reinterpret_cast<uint8_t*>(left + most);
    std::fill(wanted, wanted + count, uint8_t{0});
    for (int32_t g = 0; g < call.queries && count > 0; ++g) {
      float* weights = all_scores + scored_units_[unit].scores + g * scored_units_[unit].sums;
      ops_.weigh_scores(weights, scored_units_[unit].sums, call.scale_log2);
      double of_anchors = 0;
      for (int32_t j = 0; j < anchors; ++j) of_anchors += static_cast<double>(weights[j]);
      const std::span<const float> of_mid(weights + anchors, static_cast<size_t>(count));
      const TopP top = FindTopP(of_mid, of_anchors, args.p, left);
      for (int32_t j = 0; j < count; ++j) wanted[j] |= of_mid[j] > top.threshold ? 1 : 0;
      int64_t equal = top.of_equal;
      for (int32_t j = count - 1; j >= 0 && equal > 0; --j) {
        if (of_mid[j] == top.threshold) {
          wanted[j] = 1;
          --equal;
        }
      }
    }
    const int32_t* from = candidates.chosen(i, head);
    int32_t* to = kept.chosen(i, head);  // may be `from`: nothing is written before it is read
    int32_t number = 0;
    for (int32_t j = 0; j < count; ++j) {
      if (wanted[j] != 0) to[number++] = from[j];
    }
    kept.count(i, head) = number;
  });
}

}  // namespace winnow::kernels
