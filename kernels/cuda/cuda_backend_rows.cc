#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/check.h"
#include "kernels/cuda/completion.h"
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/row_attention.h"
#include "kernels/cuda/transform_code.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int32_t kExtendTokens = 8192;

class CudaPackedFeatureMap final : public Packed<PackedFeatureMap, DeviceFeatureMap> {
 public:
  using Packed::Packed;
  int32_t features() const override { return device().features; }
};

const DeviceFeatureMap& MapOf(const PackedFeatureMap& map) {
  return static_cast<const CudaPackedFeatureMap&>(map).device();
}

// Tokens of each of `count` sequences that enter at a time: the workspace has room for as many of all,
// be it that only one of them is behind.
int32_t ExtendTokens(int32_t count, const DeviceFeatureMap& map) {
  int32_t tokens = kExtendTokens;
  while (tokens > 1 && ExtendSummariesWorkspaceBytes(count, tokens, map) > kWorkspaceBytes) {
    tokens /= 2;
  }
  return tokens;
}

}  // namespace

// ---- attention over what was chosen ----

bool CudaBackend::FindsRows(const void* pool) const {
  const HostPool* const host = HostPoolOf(pool);
  return host == nullptr || !host->kv->shape().of_frames;
}

void CudaBackend::AttendRows(const AttendRowsArgs& args) {
  const AttentionOutput output =
      args.states != nullptr
          ? AttentionOutput{.states = args.states}
          : AttentionOutput{
                .out = args.out.f32(), .out_stride = args.out.stride, .sinks = args.sinks};
  if (!args.rows.are_tokens()) {
    WINNOW_CHECK(args.states != nullptr);
    AttendAddresses(args, output);
  } else if (HostPool* host = HostPoolOf(args.rows.pool)) {
    AttendInHostPool(*host, args, output);
  } else {
    AttendInPool(args, output);
  }
}

void CudaBackend::AttendAddresses(const AttendRowsArgs& args, const AttentionOutput& output) {
  const KvLayout& layout = args.rows.layout;
  const std::span<const RowList> lists = args.rows.lists;
  WINNOW_CHECK(lists.size() == args.queries.size() * layout.kv_heads);
  // Nothing reads the tables here: the rows have their addresses.
  const DeviceQuery* on_device = StageQueries(args.queries, kNoTables, lists.size_bytes() + 64);
  if (on_device == nullptr) return;
  const RowList* of_lists = StageLists(lists);
  if (of_lists == nullptr || !EndStaging()) return;
  RowAttentionShape shape{static_cast<int32_t>(args.queries.size()), GroupOf(args.q, layout),
                          layout};
  for (const RowList& list : lists) shape.max_rows = std::max(shape.max_rows, list.count);
  if (!PrepareRows(shape)) return;
  Good(cuda::AttendRows(shape, args.q.f32(), args.q.stride, on_device, of_lists, args.scale, output,
                        rows_.data(), stream()),
       "attention over rows");
}

void CudaBackend::AttendInPool(const AttendRowsArgs& args, const AttentionOutput& output) {
  const KvLayout& layout = args.rows.layout;
  const DeviceQuery* on_device = StageQueries(args.queries, layout.block_tokens);
  if (on_device == nullptr || !EndStaging()) return;
  const Selection selection = SelectionToRead(args.rows.chosen, args.queries.size());
  RowAttentionShape shape{static_cast<int32_t>(args.queries.size()), GroupOf(args.q, layout),
                          layout};
  shape.max_rows = MostAnchors(args.queries) + selection.capacity;
  if (!PrepareRows(shape)) return;
  if (Good(cuda::AttendChosen(shape, args.q.f32(), args.q.stride, on_device, selection,
                              args.rows.pool, args.scale, output, rows_.data(), stream()),
           "attention over rows")) {
    just_attended_ = args.q.f32();
  }
}

bool CudaBackend::PrepareRows(const RowAttentionShape& shape) {
  return Prepare(rows_, RowAttentionWorkspaceBytes(shape), RowAttentionZeroedPart(shape),
                 {shape.num_queries, shape.group, shape.layout.kv_heads, shape.layout.head_dim, 1},
                 "attention over rows");
}

// ---- completion ----

std::unique_ptr<PackedFeatureMap> CudaBackend::PackFeatureMap(const FeatureMapWeights& weights) {
  if (failed()) return nullptr;
  const size_t bytes = PackedFeatureMapBytes(weights);
  Buffer memory = Allocate(bytes);
  if (memory.data() == nullptr) return nullptr;
  std::vector<std::byte> host(bytes);
  const DeviceFeatureMap map = cuda::PackFeatureMap(weights, host.data(), memory.data());
  if (map.features == 0) return nullptr;
  CopyToDevice(host.data(), memory.data(), bytes);
  return std::make_unique<CudaPackedFeatureMap>(map, std::move(memory));
}

bool CudaBackend::Extend(std::span<const DeviceExtension> extensions, const void* pool,
                         const KvLayout& layout, const DeviceFeatureMap& key_map) {
  int32_t most = 0;
  for (const DeviceExtension& extension : extensions) {
    most = std::max(most, extension.tokens.size());
  }
  const auto count = static_cast<int32_t>(extensions.size());
  // Pieces, so that a long document's log-features need not lie in memory together.
  const int32_t piece_tokens = ExtendTokens(count, key_map);
  for (int32_t first = 0; first == 0 || first < most; first += piece_tokens) {
    std::vector<DeviceExtension>& piece = extensions_;
    piece.assign(extensions.begin(), extensions.end());
    for (DeviceExtension& extension : piece) {
      const TokenRange all = extension.tokens;
      extension.tokens.first = std::min(all.first + first, all.last);
      extension.tokens.last = std::min(extension.tokens.first + piece_tokens, all.last);
      if (first > 0) extension.clear = 0;
    }
    const int32_t tokens = std::min(piece_tokens, most - first);
    if (!BeginStaging(piece.size() * sizeof(DeviceExtension) + 256)) return false;
    const DeviceExtension* on_device = Stage(std::span<const DeviceExtension>(piece));
    if (!EndStaging() ||
        !Grow(extend_, ExtendSummariesWorkspaceBytes(count, tokens, key_map), "summaries") ||
        !Good(cuda::ExtendSummaries(on_device, count, tokens, pool, layout, key_map, extend_.data(),
                                    stream()),
              "summaries")) {
      return false;
    }
  }
  return true;
}

void CudaBackend::ExtendSummaries(std::span<const SummaryExtension> extensions, const void* pool,
                                  const KvLayout& layout, const PackedFeatureMap& key_map) {
  const DeviceFeatureMap& map = MapOf(key_map);
  size_t bytes = 0;
  int32_t most = 0;
  for (const SummaryExtension& extension : extensions) {
    bytes += TableBytes(BlocksOf(extension.last, layout.block_tokens));
    most = std::max(most, extension.last - extension.summary->tokens.last);
  }
  // Room for the descriptors of all pieces too: a table must not go between its staging and its use.
  const auto count = static_cast<int32_t>(extensions.size());
  const auto pieces = static_cast<size_t>(most / ExtendTokens(count, map)) + 1;
  bytes += pieces * (extensions.size() * sizeof(DeviceExtension) + 512) + 256;
  if (!BeginStaging(bytes)) return;
  std::vector<DeviceExtension> on_host;
  for (const SummaryExtension& extension : extensions) {
    Summary& summary = *extension.summary;
    WINNOW_CHECK(extension.last >= summary.tokens.last);
    const bool empty = summary.tokens.size() <= 0;
    on_host.push_back(
        {StageTable(extension.block_table, BlocksOf(extension.last, layout.block_tokens)),
         summary.data,
         {summary.tokens.last, extension.last},
         empty ? 1 : 0,
         0});
  }
  if (!EndStaging() || !Extend(on_host, pool, layout, map)) return;
  for (const SummaryExtension& extension : extensions) {
    extension.summary->tokens.last = extension.last;
  }
}

void CudaBackend::CompleteStates(const CompleteStatesArgs& args) {
  const Tensor& q = args.q;
  const std::span<const RetrievalQuery> queries = args.queries;
  const std::span<const CompletionGroup> groups = args.groups;
  const std::span<const RowList> lists = args.rows.lists;
  const KvLayout& layout = args.rows.layout;
  const bool are_tokens = args.rows.are_tokens();
  WINNOW_CHECK(lists.size() == (are_tokens ? 0 : queries.size() * layout.kv_heads));
  const DeviceFeatureMap& keys = MapOf(args.key_map);
  const int32_t group = GroupOf(q, layout);
  const int64_t state_floats = int64_t{layout.kv_heads} * group * (layout.head_dim + 2);
  // Queries of one sequence complete one after the other, as its summary goes on between them; the
  // queries of several sequences, one each, do so together.
  size_t longest = 0;
  for (const CompletionGroup& of_group : groups) {
    longest = std::max<size_t>(longest, of_group.num_queries);
  }
  const size_t at_once = longest != 1 ? 1 : QueriesAtOnce(queries.size(), [&](int32_t num_queries) {
    return CompleteStatesWorkspaceBytes({num_queries, group, layout, 0}, keys);
  });
  const Selection selection =
      are_tokens ? SelectionToRead(args.rows.chosen, queries.size()) : Selection{};
  for (size_t first = 0; first < queries.size() && !failed();) {
    const size_t count = std::min(at_once, queries.size() - first);
    std::vector<SummaryExtension> extensions;
    std::vector<const float*> summaries;
    for (size_t i = first; i < first + count; ++i) {
      for (const CompletionGroup& of_group : groups) {
        if (static_cast<int32_t>(i) < of_group.first_query ||
            static_cast<int32_t>(i) >= of_group.first_query + of_group.num_queries) {
          continue;
        }
        summaries.push_back(of_group.summary->data);
        if (queries[i].mid.last > of_group.summary->tokens.last ||
            of_group.summary->tokens.size() <= 0) {
          extensions.push_back({of_group.summary, queries[i].block_table,
                                std::max(queries[i].mid.last, of_group.summary->tokens.last)});
        }
      }
    }
    WINNOW_CHECK(summaries.size() == count);
    if (!extensions.empty()) ExtendSummaries(extensions, args.rows.pool, layout, args.key_map);
    const auto of_call = queries.subspan(first, count);
    const auto lists_of_call =
        are_tokens ? lists : lists.subspan(first * layout.kv_heads, count * layout.kv_heads);
    const DeviceQuery* on_device =
        StageQueries(of_call, are_tokens ? layout.block_tokens : kNoTables,
                     lists_of_call.size_bytes() + summaries.size() * sizeof(float*) + 256);
    if (on_device == nullptr) return;
    CompletionShape shape{static_cast<int32_t>(count), group, layout, 0};
    ChosenRows rows{.pool = args.rows.pool};
    if (are_tokens) {
      shape.max_chosen = selection.capacity;
      rows.chosen = selection.From(static_cast<int64_t>(first));
    } else {
      for (const RowList& list : lists_of_call) {
        shape.max_chosen = std::max(shape.max_chosen, list.chosen_last - list.chosen_first);
      }
      rows.lists = StageLists(lists_of_call);
      if (rows.lists == nullptr) return;
    }
    const float* const* of_summaries = Stage(std::span<const float* const>(summaries));
    if (!EndStaging() ||
        !Prepare(complete_, CompleteStatesWorkspaceBytes(shape, keys),
                 CompleteStatesZeroedPart(shape, keys),
                 {shape.num_queries, group, layout.kv_heads, layout.head_dim, keys.features, 1},
                 "completion")) {
      return;
    }
    Good(cuda::CompleteStates(
             shape, q.f32(), q.stride, on_device, rows, of_summaries, keys, MapOf(args.query_map),
             args.states + static_cast<int64_t>(first) * state_floats, complete_.data(), stream()),
         "completion");
    first += count;
  }
}

// ---- states ----

void CudaBackend::StateMasses(const float* states, int64_t count, int32_t head_dim, float* masses) {
  if (failed()) return;
  const float* const attended = just_attended_;
  static_cast<void>(stream());
  held_masses_ = {states, count, head_dim, masses, attended};
  held_back_ = HeldBack::kMasses;
}

const float* CudaBackend::TakeHeldMasses(const float* masses, int64_t count, int32_t head_dim) {
  const HeldMasses& held = held_masses_;
  if (held_back_ != HeldBack::kMasses || held.masses != masses || held.count != count ||
      held.head_dim != head_dim) {
    return nullptr;
  }
  held_back_ = HeldBack::kNothing;
  return held.states;
}

void CudaBackend::MergeStates(const float* parts, int64_t count, int32_t head_dim, float* states) {
  if (failed() || count == 0) return;
  WINNOW_CHECK(count <= INT32_MAX);
  static_cast<void>(stream());
  // As of one query, until somebody says of how many.
  held_merges_ = {.states = states,
                  .num_queries = 1,
                  .heads = static_cast<int32_t>(count),
                  .head_dim = head_dim,
                  .parts = parts};
  held_back_ = HeldBack::kMerges;
}

void CudaBackend::MergeTails(std::span<const RetrievalQuery> queries,
                             std::span<const float* const> tables,
                             const PackedTransformCode& transform, const TailMasses& tail,
                             int32_t head_dim, float* states) {
  WINNOW_CHECK(tables.size() == queries.size());
  if (failed() || queries.empty()) return;
  const int64_t count = static_cast<int64_t>(queries.size()) * tail.heads;
  const StateEnd& held = held_merges_;
  const bool goes_on = held_back_ == HeldBack::kMerges && held.states == states &&
                       held.head_dim == head_dim && held.tables.empty() &&
                       int64_t{held.num_queries} * held.heads == count;
  if (!goes_on) {
    static_cast<void>(stream());
    held_merges_ = {.states = states, .head_dim = head_dim};
  }
  held_tables_.assign(tables.begin(), tables.end());
  held_merges_.num_queries = static_cast<int32_t>(queries.size());
  held_merges_.heads = tail.heads;
  held_merges_.transform = &TransformOf(transform);
  held_merges_.tables = held_tables_;
  held_merges_.tail = tail;
  held_back_ = HeldBack::kMerges;
}

void CudaBackend::FinishStates(std::span<const RetrievalQuery> queries, const float* states,
                               int32_t head_dim, const float* sinks, const Tensor& out) {
  const auto heads = static_cast<int32_t>(out.cols / head_dim);
  StateEnd end = held_merges_;
  const bool merges =
      held_back_ == HeldBack::kMerges && end.states == states && end.head_dim == head_dim &&
      int64_t{end.num_queries} * end.heads == static_cast<int64_t>(queries.size()) * heads &&
      (end.tables.empty() || end.heads == heads);
  if (merges) held_back_ = HeldBack::kNothing;
  const DeviceQuery* on_device = StageQueries(queries, kNoTables);
  if (on_device == nullptr || !EndStaging()) return;
  if (!merges) {
    Good(cuda::FinishStates(states, on_device, static_cast<int32_t>(queries.size()), heads,
                            head_dim, sinks, out.f32(), out.stride, stream()),
         "attention over rows");
    return;
  }
  end.num_queries = static_cast<int32_t>(queries.size());
  end.heads = heads;
  end.queries = on_device;
  end.out = out.f32();
  end.out_stride = out.stride;
  end.sinks = sinks;
  Good(EndStates(end, stream()), "attention over rows");
}

}  // namespace winnow::kernels::cuda
