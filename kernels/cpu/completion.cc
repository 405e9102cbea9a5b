// CompleteStates of the CPU backend: one item of work is one group's KV head, which goes through
// the group's queries in turn. Vectors go through the feature maps in tiles; what is summed, and in
// which order, does not depend on the tiles (kernels/completion.h).
#include "kernels/completion.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/attention_state.h"
#include "kernels/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/feature_map.h"

namespace winnow::kernels {
namespace {

constexpr int32_t kTileRows = CpuFeatureMap::kTileRows;
static_assert(kTileRows == 64, "SummaryWeights names tokens by the bits of a word");
static_assert(kTileRows % kSummaryBlockTokens == 0 || kSummaryBlockTokens % kTileRows == 0);

constexpr double kLog2E = 1.4426950408889634;

constexpr int64_t RoundUp16(int64_t floats) { return (floats + 15) / 16 * 16; }

// The parts of one KV head's summary.
struct HeadSummary {
  float *m, *sum, *z;        // of whole blocks
  float *open_sum, *open_z;  // of the tokens since
  HeadSummary(float* data, int64_t features, int64_t head_dim)
      : m(data),
        sum(m + features),
        z(sum + features),
        open_sum(z + features * head_dim),
        open_z(open_sum + features) {}
};

// What all items of a call share.
struct CompletionCall {
  const CpuOps& ops;
  const Tensor& q;
  std::span<const RetrievalQuery> queries;
  std::span<const RowList> lists;
  const std::byte* pool;
  const KvLayout& layout;
  const CpuFeatureMap& key_map;
  const CpuFeatureMap& query_map;
  float* states;
  int32_t group;     // G
  int32_t features;  // F
};

// Memory of a thread, cut up.
class Workspace {
 public:
  explicit Workspace(const CompletionCall& call, std::byte* memory) : next_(memory) {
    const int64_t d = call.layout.head_dim, f = call.features;
    stride = RoundUp16(f);
    inputs = Take(kTileRows * std::max(call.key_map.InputStride(), call.query_map.InputStride()));
    map_scratch = Take(std::max(call.key_map.ScratchFloats(), call.query_map.ScratchFloats()));
    weights = Take(kTileRows * stride);
    factors = Take(kTileRows * stride);
    values = Take(kTileRows * d);
    query_features = Take(kTileRows * stride);
    m = Take(f);
    chosen_sum = Take(f);
    unused_sum = Take(f);
    chosen_z = Take(f * d);
    query_weights = Take(f * RoundUp16(call.group));
    parts = Take(call.group * d);
    state = Take(AttentionStateFloats(d));
    size_bytes = static_cast<size_t>(next_ - memory);
  }

  int64_t stride;  // of rows of features
  float *inputs, *map_scratch, *weights, *factors, *values, *query_features;
  float *m, *chosen_sum, *unused_sum, *chosen_z, *query_weights, *parts, *state;
  size_t size_bytes;

 private:
  float* Take(int64_t floats) {
    float* taken = reinterpret_cast<float*>(next_);
    next_ += static_cast<size_t>(RoundUp16(floats)) * sizeof(float);
    return taken;
  }
  std::byte* next_;
};

class HeadWorker {
 public:
  HeadWorker(const CompletionCall& call, int32_t head, float* summary, const Workspace& work)
      : call_(call),
        head_(head),
        d_(call.layout.head_dim),
        f_(call.features),
        summary_(summary, f_, d_),
        work_(work) {}

  void Clear() const {
    std::fill(summary_.m, summary_.m + f_, -std::numeric_limits<float>::infinity());
    std::fill(summary_.sum, summary_.open_z + f_ * d_, 0.0f);
  }

  // Tokens [first, last) enter.
  void Advance(std::span<const int32_t> block_table, int32_t first, int32_t last) const {
    const KvLayout& layout = call_.layout;
    while (first < last) {
      const int32_t past_border = first % kSummaryBlockTokens;
      const int32_t count = std::min(kSummaryBlockTokens - past_border, last - first);
      for (int32_t i = 0; i < count; ++i) {
        const int32_t token = first + i;
        LoadRow(call_.pool + layout.RowOffset(block_table[token / layout.block_tokens], head_,
                                              token % layout.block_tokens),
                i);
      }
      Enter(count);
      first += count;
      if (first % kSummaryBlockTokens == 0) CloseBlock();
    }
  }

  // Log-features of the heads of queries [first, first + count), G rows each.
  void MapQueries(int32_t first, int32_t count) const {
    int32_t row = 0;
    for (int32_t i = first; i < first + count; ++i) {
      const float* q = call_.q.f32(call_.queries[i].row) + int64_t{head_} * call_.group * d_;
      for (int32_t g = 0; g < call_.group; ++g, ++row) {
        float* to = work_.inputs + row * call_.query_map.InputStride();
        for (int64_t c = 0; c < d_; ++c) to[c] = ToFloat(ToBF16(q[g * d_ + c]));
      }
    }
    call_.query_map.Apply(call_.ops, head_, row, work_.inputs, work_.map_scratch,
                          work_.query_features, work_.stride);
  }

  // Merges what the summary less the query's chosen tokens gives. `b` are its heads' log-features
  // [G][stride].
  void Complete(int32_t query, const float* b) const {
    const RowList& list = call_.lists[int64_t{query} * call_.layout.kv_heads + head_];
    const int32_t chosen = list.chosen_last - list.chosen_first;
    if (chosen >= call_.queries[query].mid.size()) return;
    SumChosen(list);
    // What the summary holds beside the chosen, in their place.
    float* rest = work_.chosen_sum;
    float* rest_z = work_.chosen_z;
    for (int64_t j = 0; j < f_; ++j) {
      const float all = summary_.sum[j] + summary_.open_sum[j];
      const float left = all - rest[j];
      rest[j] = left > kCompletionFloor * all ? left : 0.0f;
    }
    const int64_t count = f_ * d_;
    for (int64_t i = 0; i < count; ++i) {
      rest_z[i] = (summary_.z[i] + summary_.open_z[i]) - rest_z[i];
    }
    const int64_t groups = RoundUp16(call_.group);
    std::fill(work_.parts, work_.parts + call_.group * d_, 0.0f);
    double max[kTileRows], sum[kTileRows];
    for (int32_t g = 0; g < call_.group; ++g) {
      QueryWeights(b + g * work_.stride, rest, work_.query_weights + g, groups, &max[g], &sum[g]);
    }
    AddOuterCall outer;
    outer.weights = work_.query_weights;
    outer.weights_stride = groups;
    outer.values = rest_z;
    outer.count = f_;
    outer.rows = call_.group;
    outer.cols = d_;
    outer.sums = work_.parts;
    call_.ops.add_outer(outer);
    const int64_t state_floats = AttentionStateFloats(d_);
    float* states = call_.states +
                    (int64_t{query} * call_.layout.kv_heads + head_) * call_.group * state_floats;
    for (int32_t g = 0; g < call_.group; ++g) {
      std::copy(work_.parts + g * d_, work_.parts + (g + 1) * d_, work_.state);
      work_.state[d_] = static_cast<float>(max[g] * kLog2E);
      work_.state[d_ + 1] = static_cast<float>(sum[g]);
      MergeAttentionState(states + g * state_floats, work_.state, d_);
    }
  }

 private:
  // K of a row into inputs, rounded to bfloat16, and V into values.
  void LoadRow(const std::byte* row, int32_t i) const {
    float* key = work_.inputs + i * call_.key_map.InputStride();
    const DType dtype = call_.layout.dtype;
    call_.ops.read_kv_row(row, d_, dtype, key, work_.values + i * d_);
    if (dtype == DType::kBF16) return;
    for (int64_t c = 0; c < d_; ++c) key[c] = ToFloat(ToBF16(key[c]));
  }

  void MapKeys(int32_t count) const {
    call_.key_map.Apply(call_.ops, head_, count, work_.inputs, work_.map_scratch, work_.weights,
                        work_.stride);
  }

  SummaryWeightsCall WeightsCall(int32_t count, float* m, float* sum, float* earlier_sum) const {
    return {work_.weights, work_.factors, work_.stride, count, static_cast<int32_t>(f_), m,
            sum,           earlier_sum};
  }

  // z [F][d] += the weights of tokens [first, last), times their values.
  void AddValues(int32_t first, int32_t last, float* z) const {
    AddOuterCall outer;
    outer.weights = work_.weights + first * work_.stride;
    outer.weights_stride = work_.stride;
    outer.values = work_.values + first * d_;
    outer.count = last - first;
    outer.rows = f_;
    outer.cols = d_;
    outer.sums = z;
    call_.ops.add_outer(outer);
  }

  // The `count` rows that were loaded enter.
  void Enter(int32_t count) const {
    MapKeys(count);
    uint64_t raising =
        call_.ops.summary_weights(WeightsCall(count, summary_.m, summary_.open_sum, summary_.sum));
    int32_t first = 0;
    while (raising != 0) {
      const int32_t token = std::countr_zero(raising);
      raising &= raising - 1;
      AddValues(first, token, summary_.open_z);
      first = token;
      const float* factors = work_.factors + token * work_.stride;
      for (int64_t j = 0; j < f_; ++j) {
        if (factors[j] == 1.0f) continue;
        for (int64_t i = j * d_; i < (j + 1) * d_; ++i) {
          summary_.z[i] *= factors[j];
          summary_.open_z[i] *= factors[j];
        }
      }
    }
    AddValues(first, count, summary_.open_z);
  }

  void CloseBlock() const {
    for (int64_t j = 0; j < f_; ++j) summary_.sum[j] += summary_.open_sum[j];
    const int64_t count = f_ * d_;
    for (int64_t i = 0; i < count; ++i) summary_.z[i] += summary_.open_z[i];
    std::fill(summary_.open_sum, summary_.open_z + count, 0.0f);
  }

  // chosen_sum and chosen_z: the chosen rows' terms, with the summary's m.
  void SumChosen(const RowList& list) const {
    std::copy(summary_.m, summary_.m + f_, work_.m);
    std::fill(work_.chosen_sum, work_.chosen_sum + f_, 0.0f);
    std::fill(work_.unused_sum, work_.unused_sum + f_, 0.0f);
    std::fill(work_.chosen_z, work_.chosen_z + f_ * d_, 0.0f);
    for (int32_t first = list.chosen_first; first < list.chosen_last; first += kTileRows) {
      const int32_t count = std::min(kTileRows, list.chosen_last - first);
      for (int32_t i = 0; i < count; ++i) LoadRow(list.rows[first + i], i);
      MapKeys(count);
      // Chosen tokens entered before, with the same log-features: none raises m.
      call_.ops.summary_weights(WeightsCall(count, work_.m, work_.chosen_sum, work_.unused_sum));
      AddValues(0, count, work_.chosen_z);
    }
  }

  // For one query head: weights[j * stride] = exp(b_j + m_j - max), zero for an empty feature, with
  // max the largest c_j, and sum = Σ_j exp(c_j - max). The state's sum is zero if all are empty.
  void QueryWeights(const float* b, const float* rest, float* weights, int64_t stride, double* max,
                    double* sum) const {
    *max = -std::numeric_limits<double>::infinity();
    *sum = 0;
    for (int64_t j = 0; j < f_; ++j) {
      if (rest[j] > 0) {
        *max = std::max(*max, double{b[j]} + summary_.m[j] + std::log(double{rest[j]}));
      }
    }
    for (int64_t j = 0; j < f_; ++j) {
      const double weight = rest[j] > 0 ? std::exp(double{b[j]} + summary_.m[j] - *max) : 0;
      weights[j * stride] = static_cast<float>(weight);
      *sum += weight * rest[j];
    }
  }

  const CompletionCall& call_;
  const int32_t head_;
  const int64_t d_, f_;
  const HeadSummary summary_;
  const Workspace& work_;
};

// Calls body(index, worker, workspace) for each of `count` summaries and each KV head, on any
// thread; summary(index) is the memory of all of its heads. `scratch` gives as many bytes as are
// asked for.
template <typename SummaryOf, typename Scratch, typename Body>
void ForEachHead(ThreadPool& threads, const CompletionCall& call, size_t count, SummaryOf summary,
                 Scratch scratch, Body body) {
  const int32_t kv_heads = call.layout.kv_heads;
  const size_t thread_bytes = (Workspace(call, nullptr).size_bytes + 63) / 64 * 64;
  std::byte* memory = scratch(thread_bytes * threads.num_threads());
  const int64_t head_floats = SummaryFloats(call.features, call.layout.head_dim);
  threads.ParallelFor(static_cast<int64_t>(count) * kv_heads, [&](int64_t item, int thread) {
    const int64_t index = item / kv_heads;
    const int32_t head = static_cast<int32_t>(item % kv_heads);
    const Workspace work(call, memory + thread * thread_bytes);
    body(index, HeadWorker(call, head, summary(index) + head * head_floats, work), work);
  });
}

}  // namespace

void CpuBackend::ExtendSummaries(std::span<const SummaryExtension> extensions, const void* pool,
                                 const KvLayout& layout, const PackedFeatureMap& key_map) {
  const auto& keys = static_cast<const CpuFeatureMap&>(key_map);
  const int32_t d = layout.head_dim, kv_heads = layout.kv_heads;
  CheckKv(layout);
  WINNOW_CHECK(keys.head_dim() == d && keys.kv_heads() == kv_heads);
  for (const SummaryExtension& extension : extensions) {
    WINNOW_CHECK(extension.last >= extension.summary->tokens.last);
    WINNOW_CHECK(extension.last <=
                 static_cast<int64_t>(extension.block_table.size()) * layout.block_tokens);
  }
  // No queries: the parts of a call that are about them stay empty.
  const Tensor no_queries;
  const CompletionCall call{
      ops_,           no_queries, {},   {},      static_cast<const std::byte*>(pool),
      layout,         keys,       keys, nullptr, 1,
      keys.features()};
  ForEachHead(
      threads_, call, extensions.size(), [&](int64_t i) { return extensions[i].summary->data; },
      [&](size_t size_bytes) { return completion_scratch_.Get(size_bytes); },
      [&](int64_t i, const HeadWorker& worker, const Workspace&) {
        const TokenRange held = extensions[i].summary->tokens;
        if (held.size() == 0) worker.Clear();
        worker.Advance(extensions[i].block_table, held.last, extensions[i].last);
      });
  for (const SummaryExtension& extension : extensions) {
    extension.summary->tokens.last = extension.last;
  }
}

void CpuBackend::CompleteStates(const CompleteStatesArgs& args) {
  WINNOW_CHECK(!args.rows.are_tokens());
  const Tensor& q = args.q;
  const std::span<const RetrievalQuery> queries = args.queries;
  const std::span<const CompletionGroup> groups = args.groups;
  const std::span<const RowList> lists = args.rows.lists;
  const KvLayout& layout = args.rows.layout;
  const auto& keys = static_cast<const CpuFeatureMap&>(args.key_map);
  const auto& query_features = static_cast<const CpuFeatureMap&>(args.query_map);
  const int32_t d = layout.head_dim, kv_heads = layout.kv_heads;
  CheckKv(layout);
  WINNOW_CHECK(d > 0 && d % 16 == 0 && q.cols % (int64_t{kv_heads} * d) == 0);
  WINNOW_CHECK(keys.head_dim() == d && query_features.head_dim() == d);
  WINNOW_CHECK(keys.kv_heads() == kv_heads && query_features.kv_heads() == kv_heads);
  WINNOW_CHECK(keys.features() == query_features.features());
  WINNOW_CHECK(lists.size() == queries.size() * kv_heads);
  const CompletionCall call{ops_,
                            q,
                            queries,
                            lists,
                            static_cast<const std::byte*>(args.rows.pool),
                            layout,
                            keys,
                            query_features,
                            args.states,
                            static_cast<int32_t>(q.cols / d / kv_heads),
                            keys.features()};
  WINNOW_CHECK(call.group <= kTileRows);
  for (const CompletionGroup& group : groups) {
    WINNOW_CHECK(group.first_query >= 0 && group.num_queries >= 0 &&
                 group.first_query + group.num_queries <= static_cast<int64_t>(queries.size()));
    TokenRange held = group.summary->tokens;
    for (const RetrievalQuery& query : queries.subspan(group.first_query, group.num_queries)) {
      WINNOW_CHECK(query.row >= 0 && query.row < q.rows);
      if (query.mid.size() <= 0) continue;
      WINNOW_CHECK(held.size() == 0 ||
                   (held.first == query.mid.first && held.last <= query.mid.last));
      WINNOW_CHECK(query.mid.last <=
                   static_cast<int64_t>(query.block_table.size()) * layout.block_tokens);
      held = query.mid;
    }
  }
  const int32_t queries_per_tile = kTileRows / call.group;
  ForEachHead(
      threads_, call, groups.size(), [&](int64_t i) { return groups[i].summary->data; },
      [&](size_t size_bytes) { return completion_scratch_.Get(size_bytes); },
      [&](int64_t index, const HeadWorker& worker, const Workspace& work) {
        const CompletionGroup& group = groups[index];
        TokenRange held = group.summary->tokens;
        for (int32_t i = 0; i < group.num_queries; ++i) {
          const int32_t query = group.first_query + i;
          const int32_t in_tile = i % queries_per_tile;
          if (in_tile == 0) {
            worker.MapQueries(query, std::min(queries_per_tile, group.num_queries - i));
          }
          const TokenRange mid = queries[query].mid;
          if (mid.size() <= 0) continue;
          if (held.size() == 0) {
            worker.Clear();
            held = {mid.first, mid.first};
          }
          worker.Advance(queries[query].block_table, held.last, mid.last);
          held = mid;
          worker.Complete(query, work.query_features + in_tile * call.group * work.stride);
        }
      });
  for (const CompletionGroup& group : groups) {
    for (const RetrievalQuery& query : queries.subspan(group.first_query, group.num_queries)) {
      if (query.mid.size() > 0) group.summary->tokens = query.mid;
    }
  }
}

}  // namespace winnow::kernels
