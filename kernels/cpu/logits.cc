// SelectByLogits and MeasureSelection of the CPU backend. A unit is one query and KV head; units
// are taken as many at a time as fit the memory for their scores, and each loop below goes over
// splits or units of all of them.
#include <algorithm>
#include <cmath>

#include "kernels/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/top_k.h"
#include "kernels/logit_select.h"

namespace winnow::kernels {
namespace {

// Scores that are held at a time, unless one unit alone has more.
constexpr int64_t kScoresAtOnce = int64_t{16} << 20;

int32_t SplitsOf(int32_t tokens) { return (tokens + kLogitSplitTokens - 1) / kLogitSplitTokens; }

}  // namespace

template <typename Use>
void CpuBackend::ForEachScored(const Tensor& q, std::span<const RetrievalQuery> queries,
                               const void* pool, const KvLayout& layout, float scale, Use use) {
  const RowsCall call = MakeRowsCall(q, layout, scale);
  for (const RetrievalQuery& query : queries) CheckQuery(q, query, layout);
  const int64_t num_units = static_cast<int64_t>(queries.size()) * layout.kv_heads;
  const int64_t group_floats = int64_t{call.queries} * call.dim;
  for (int64_t begin = 0; begin < num_units;) {
    // The units of this round, and where each one's scores and sums lie.
    scored_units_.clear();
    retrieval_items_.clear();
    int64_t scores = 0, sums = 0, end = begin;
    for (; end < num_units; ++end) {
      const RetrievalQuery& query = queries[end / layout.kv_heads];
      const int32_t tokens = query.position + 1;
      if (end > begin && scores + int64_t{tokens} * call.queries > kScoresAtOnce) break;
      const int32_t splits = SplitsOf(tokens);
      for (int32_t split = 0; split < splits; ++split) {
        retrieval_items_.push_back({end - begin, split, split + 1, nullptr});
      }
      scored_units_.push_back({scores, sums});
      scores += int64_t{tokens} * call.queries;
      sums += int64_t{splits} * call.queries * 2;
    }
    const int64_t thread_floats = (group_floats + 15) / 16 * 16;
    float* split_queries = reinterpret_cast<float*>(
        attention_scratch_.Get(thread_floats * sizeof(float) * num_threads()));
    float* all_scores = reinterpret_cast<float*>(
        states_scratch_.Get(static_cast<size_t>(scores + sums) * sizeof(float)));
    float* all_sums = all_scores + scores;
    const auto splits = static_cast<int64_t>(retrieval_items_.size());

    threads_.ParallelFor(splits, [&](int64_t i, int thread) {
      const RetrievalItem& item = retrieval_items_[i];
      const int64_t unit = begin + item.unit;
      const RetrievalQuery& query = queries[unit / layout.kv_heads];
      const auto head = static_cast<int32_t>(unit % layout.kv_heads);
      const int32_t tokens = query.position + 1;
      const int32_t first = item.first * kLogitSplitTokens;
      const int32_t count = std::min(kLogitSplitTokens, tokens - first);
      const std::byte* rows[kLogitSplitTokens];
      for (int32_t t = 0; t < count; ++t) {
        const int32_t token = first + t;
        rows[t] = static_cast<const std::byte*>(pool) +
                  layout.RowOffset(query.block_table[token / layout.block_tokens], head,
                                   token % layout.block_tokens);
      }
      float* split = split_queries + thread * thread_floats;
      ops_.split_row_queries(call, q.f32(query.row) + head * group_floats, split);
      float* of_split = all_scores + scored_units_[item.unit].scores + first;
      ops_.row_scores(call, split, rows, count, of_split, tokens);
      float* max_sum =
          all_sums + scored_units_[item.unit].sums + int64_t{item.first} * call.queries * 2;
      for (int32_t g = 0; g < call.queries; ++g) {
        ops_.score_max_sum(of_split + int64_t{g} * tokens, count, call.scale_log2, max_sum + 2 * g);
      }
    });
    // The first split's place gets the maximum and one over the sum of all.
    threads_.ParallelFor(end - begin, [&](int64_t unit, int) {
      const int32_t of_unit = SplitsOf(queries[(begin + unit) / layout.kv_heads].position + 1);
      float* max_sum = all_sums + scored_units_[unit].sums;
      for (int32_t g = 0; g < call.queries; ++g) {
        float max = max_sum[2 * g];
        double sum = static_cast<double>(max_sum[2 * g + 1]);
        for (int32_t split = 1; split < of_unit; ++split) {
          const float* part = max_sum + 2 * (int64_t{split} * call.queries + g);
          const float new_max = std::max(max, part[0]);
          sum = sum * static_cast<double>(std::exp2(max - new_max)) +
                static_cast<double>(part[1] * std::exp2(part[0] - new_max));
          max = new_max;
        }
        max_sum[2 * g] = max;
        max_sum[2 * g + 1] = static_cast<float>(1.0 / sum);
      }
    });
    threads_.ParallelFor(splits, [&](int64_t i, int) {
      const RetrievalItem& item = retrieval_items_[i];
      const int32_t tokens = queries[(begin + item.unit) / layout.kv_heads].position + 1;
      const int32_t first = item.first * kLogitSplitTokens;
      float* of_split = all_scores + scored_units_[item.unit].scores + first;
      ops_.add_masses(of_split, tokens, call.queries, std::min(kLogitSplitTokens, tokens - first),
                      call.scale_log2, all_sums + scored_units_[item.unit].sums, of_split);
    });
    threads_.ParallelFor(end - begin, [&](int64_t unit, int) {
      const int64_t query = (begin + unit) / layout.kv_heads;
      // The masses of the group stand where the scores of its first query stood; the rest is free.
      use(query, static_cast<int32_t>((begin + unit) % layout.kv_heads),
          std::span<const float>(all_scores + scored_units_[unit].scores,
                                 static_cast<size_t>(queries[query].position) + 1));
    });
    begin = end;
  }
}

void CpuBackend::SelectByLogits(const Tensor& q, std::span<const RetrievalQuery> queries,
                                const void* pool, const KvLayout& layout, float scale,
                                const Selection& chosen) {
  CheckSelection(queries, layout, chosen);
  ForEachScored(q, queries, pool, layout, scale,
                [&](int64_t i, int32_t head, std::span<const float> scores) {
                  const TokenRange mid = queries[i].mid;
                  chosen.count(i, head) = queries[i].k;
                  if (queries[i].k == 0) return;
                  SelectTopK(scores.subspan(mid.first, mid.size()), queries[i].k, mid.first,
                             chosen.chosen(i, head));
                });
}

void CpuBackend::MeasureSelection(const MeasureSelectionArgs& args) {
  const Tensor& q = args.q;
  const std::span<const RetrievalQuery> queries = args.queries;
  const KvLayout& layout = args.layout;
  const Selection& chosen = args.chosen;
  WINNOW_CHECK(chosen.kv_heads == layout.kv_heads);
  const int64_t heads = q.cols / layout.head_dim;
  const auto group = static_cast<double>(heads / layout.kv_heads);
  ForEachScored(q, queries, args.pool, layout, args.scale,
                [&](int64_t i, int32_t head, std::span<const float> scores) {
                  const RetrievalQuery& query = queries[i];
                  const int32_t count = chosen.count(i, head);
                  const int32_t* tokens = chosen.chosen(i, head);
                  WINNOW_CHECK(count >= 0 && count <= std::max(0, query.mid.size()));
                  SelectionQuality& result = args.quality[i * layout.kv_heads + head];
                  const int32_t mid_first = query.mid.size() > 0 ? query.mid.first : 0;
                  const int32_t mid_last = query.mid.size() > 0 ? query.mid.last : 0;
                  double covered = 0;
                  for (int32_t t = 0; t < mid_first; ++t) covered += static_cast<double>(scores[t]);
                  for (int32_t t = mid_last; t <= query.position; ++t) {
                    covered += static_cast<double>(scores[t]);
                  }
                  for (int32_t j = 0; j < count; ++j)
                    covered += static_cast<double>(scores[tokens[j]]);
                  result.coverage = static_cast<float>(std::min(1.0, covered / group));
                  result.iou = 1;
                  if (count == 0) return;
                  // A token is wanted if it is above the threshold, or among the last of those that equal it.
                  const std::span<const float> of_mid = scores.subspan(mid_first, query.mid.size());
                  const TopThreshold top = FindTop(of_mid, count, [](size_t) { return 1; });
                  int64_t both = 0, equal = top.of_equal;
                  int32_t j = count - 1;
                  for (int32_t t = mid_last - 1; t >= mid_first && j >= 0; --t) {
                    const uint32_t bits = OrderedBits(scores[t]);
                    const bool wanted =
                        bits > top.threshold || (bits == top.threshold && equal-- > 0);
                    if (tokens[j] != t) continue;
                    both += wanted ? 1 : 0;
                    --j;
                  }
                  WINNOW_CHECK(j < 0);  // chosen tokens ascend and are of mid
                  result.iou = static_cast<float>(static_cast<double>(both) /
                                                  static_cast<double>(2 * int64_t{count} - both));
                });
}

}  // namespace winnow::kernels
