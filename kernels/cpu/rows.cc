// AttendRows, StateMasses and FinishStates of the CPU backend. A list is one thread's, unless it is a large
// share of the call: then its parts go to whichever threads are free, and their states are merged
// in order afterwards. They are merged in the same order either way, so the split does not show in
// the result.
#include <algorithm>

#include "kernels/attention_state.h"
#include "kernels/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/row_attention.h"

namespace winnow::kernels {
namespace {

constexpr double kLog2E = 1.4426950408889634;

// Parts that a thread takes at a time of a list that is shared: enough to make the first,
// unannounced reads of each piece cheap.
constexpr int32_t kPartsPerItem = 4;
// Parts of a shared list whose states are kept at a time: bounds the memory for lists of any
// length.
constexpr int32_t kPartsPerRound = 1024;

int32_t PartsOf(const RowList& list) { return (list.count + kRowsPerPart - 1) / kRowsPerPart; }

size_t RoundUp16(int64_t floats) { return static_cast<size_t>((floats + 15) / 16 * 16); }

}  // namespace

RowsCall MakeRowsCall(const Tensor& q, const KvLayout& layout, float scale) {
  const int32_t d = layout.head_dim;
  CheckKv(layout);
  WINNOW_CHECK(scale > 0);
  WINNOW_CHECK(q.cols > 0 && q.cols % (int64_t{layout.kv_heads} * d) == 0);
  RowsCall call;
  call.dim = d;
  call.queries = static_cast<int32_t>(q.cols / d / layout.kv_heads);
  call.dtype = layout.dtype;
  call.scale_log2 = static_cast<float>(scale * kLog2E);
  return call;
}

void CheckQuery(const Tensor& q, const RetrievalQuery& query, const KvLayout& layout) {
  WINNOW_CHECK(query.row >= 0 && query.row < q.rows && query.position >= 0);
  WINNOW_CHECK(query.position <
               static_cast<int64_t>(query.block_table.size()) * layout.block_tokens);
  if (query.mid.size() <= 0) return;
  WINNOW_CHECK(query.mid.first >= 0 && query.mid.last <= query.position + 1);
}

void CheckSelection(std::span<const RetrievalQuery> queries, const KvLayout& layout,
                    const Selection& chosen) {
  WINNOW_CHECK(chosen.kv_heads == layout.kv_heads);
  for (const RetrievalQuery& query : queries) {
    WINNOW_CHECK(query.k >= 0 && query.k <= std::max(0, query.mid.size()));
    WINNOW_CHECK(query.k <= chosen.capacity);
  }
}

void CpuBackend::AttendRows(const AttendRowsArgs& args) {
  WINNOW_CHECK(!args.rows.are_tokens() && args.states != nullptr);
  const Tensor& q = args.q;
  const std::span<const RetrievalQuery> queries = args.queries;
  const std::span<const RowList> lists = args.rows.lists;
  const KvLayout& layout = args.rows.layout;
  float* const states = args.states;
  const RowsCall call = MakeRowsCall(q, layout, args.scale);
  const int64_t num_lists = static_cast<int64_t>(queries.size()) * layout.kv_heads;
  WINNOW_CHECK(static_cast<int64_t>(lists.size()) == num_lists);
  for (const RetrievalQuery& query : queries) WINNOW_CHECK(query.row >= 0 && query.row < q.rows);
  const int64_t group_floats = int64_t{call.queries} * call.dim;
  const int64_t group_states = call.queries * AttentionStateFloats(call.dim);
  int64_t total_parts = 0;
  int32_t most_parts = 0;
  for (const RowList& list : lists) {
    WINNOW_CHECK(list.count >= 0);
    total_parts += PartsOf(list);
    most_parts = std::max(most_parts, PartsOf(list));
  }
  // A list that is more than a quarter of one thread's share is run part by part.
  const auto is_shared = [&](const RowList& list) {
    return num_threads() > 1 && PartsOf(list) > kPartsPerItem &&
           int64_t{PartsOf(list)} * 4 * num_threads() > total_parts;
  };
  const size_t split_floats = RoundUp16(group_floats);
  const size_t thread_floats = split_floats + RoundUp16(AttendPartsFloats(call));
  float* scratch = reinterpret_cast<float*>(
      attention_scratch_.Get(thread_floats * sizeof(float) * num_threads()));
  const auto attend = [&](int64_t list, int32_t first_part, int32_t last_part, bool merge,
                          float* to, int thread) {
    float* split = scratch + thread * thread_floats;
    const int64_t query = list / layout.kv_heads, head = list % layout.kv_heads;
    ops_.split_row_queries(call, q.f32(queries[query].row) + head * group_floats, split);
    ops_.attend_parts(call, split, lists[list], first_part, last_part, merge, to,
                      split + split_floats);
  };

  retrieval_items_.clear();
  int64_t num_shared = 0;
  for (int64_t list = 0; list < num_lists; ++list) {
    if (is_shared(lists[list])) {
      ++num_shared;
    } else {
      retrieval_items_.push_back({list, 0, PartsOf(lists[list]), nullptr});
    }
  }
  // Lists that are shared: pieces of one round, each with the place of its first state.
  const size_t round_states =
      static_cast<size_t>(std::min(most_parts, kPartsPerRound)) * static_cast<size_t>(group_states);
  float* shared_states = reinterpret_cast<float*>(
      states_scratch_.Get(round_states * sizeof(float) * static_cast<size_t>(num_shared)));
  for (int32_t round = 0; round == 0 || round < most_parts; round += kPartsPerRound) {
    float* of_list = shared_states;
    for (int64_t list = 0; list < num_lists && num_shared > 0; ++list) {
      if (!is_shared(lists[list])) continue;
      const int32_t last = std::min(PartsOf(lists[list]), round + kPartsPerRound);
      for (int32_t part = round; part < last; part += kPartsPerItem) {
        retrieval_items_.push_back({list, part, std::min(last, part + kPartsPerItem),
                                    of_list + (part - round) * group_states});
      }
      of_list += round_states;
    }
    threads_.ParallelFor(static_cast<int64_t>(retrieval_items_.size()), [&](int64_t i, int thread) {
      const RetrievalItem& item = retrieval_items_[i];
      const bool whole = item.states == nullptr;
      attend(item.unit, item.first, item.last, whole,
             whole ? states + item.unit * group_states : item.states, thread);
    });
    retrieval_items_.clear();
    if (num_shared == 0) return;
    of_list = shared_states;
    for (int64_t list = 0; list < num_lists; ++list) {
      if (!is_shared(lists[list])) continue;
      retrieval_items_.push_back({list, round, PartsOf(lists[list]), of_list});
      of_list += round_states;
    }
    threads_.ParallelFor(num_shared * call.queries, [&](int64_t i, int) {
      const RetrievalItem& item = retrieval_items_[i / call.queries];
      const int64_t head = (i % call.queries) * AttentionStateFloats(call.dim);
      float* state = states + item.unit * group_states + head;
      if (round == 0) ResetAttentionState(state, call.dim);
      for (int32_t part = round; part < std::min(item.last, round + kPartsPerRound); ++part) {
        MergeAttentionState(state, item.states + (part - round) * group_states + head, call.dim);
      }
    });
    retrieval_items_.clear();
  }
}

void CpuBackend::StateMasses(const float* states, int64_t count, int32_t head_dim, float* masses) {
  for (int64_t i = 0; i < count; ++i) {
    masses[i] = AttentionStateLogSumExp(states + i * AttentionStateFloats(head_dim), head_dim);
  }
}

void CpuBackend::FinishStates(std::span<const RetrievalQuery> queries, const float* states,
                              int32_t head_dim, const float* sinks, const Tensor& out) {
  WINNOW_CHECK(head_dim > 0 && out.cols % head_dim == 0);
  const int64_t heads = out.cols / head_dim;
  for (const RetrievalQuery& query : queries) WINNOW_CHECK(query.row >= 0 && query.row < out.rows);
  ForEachRow(static_cast<int64_t>(queries.size()), out.cols, [&](int64_t i) {
    for (int64_t head = 0; head < heads; ++head) {
      const float* state = states + (i * heads + head) * AttentionStateFloats(head_dim);
      float* to = out.f32(queries[i].row) + head * head_dim;
      if (state[head_dim + 1] == 0) {
        std::fill(to, to + head_dim, 0.0f);
      } else if (sinks != nullptr) {
        FinishAttentionState(state, head_dim, static_cast<float>(sinks[head] * kLog2E), to);
      } else {
        FinishAttentionState(state, head_dim, to);
      }
    }
  });
}

}  // namespace winnow::kernels
