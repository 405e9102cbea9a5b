#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/check.h"
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/hamming_select.h"
#include "kernels/cuda/hash_encode.h"
#include "kernels/cuda/int4_keys.h"
#include "kernels/cuda/logit_select.h"
#include "kernels/cuda/page_bounds.h"
#include "kernels/cuda/top_p.h"

namespace winnow::kernels::cuda {
namespace {

// Shapes grow in such steps, so that a sequence's next token does not make a new one.
constexpr int32_t kShapeTokens = 8192;
// Of the counts of selections: those of all layers of a step, so that the host need not wait in it.
constexpr size_t kLeastCountsBytes = size_t{1} << 20;

int32_t LastPosition(std::span<const RetrievalQuery> queries) {
  int32_t last = 0;
  for (const RetrievalQuery& query : queries) last = std::max(last, query.position);
  return last;
}

class CudaPackedEncoder final : public Packed<PackedEncoder, DeviceEncoder> {
 public:
  using Packed::Packed;
  int32_t bits() const override { return device().bits(); }
};

const DeviceEncoder& EncoderOf(const PackedEncoder& encoder) {
  return static_cast<const CudaPackedEncoder&>(encoder).device();
}

}  // namespace

// ---- indexes ----

std::unique_ptr<PackedEncoder> CudaBackend::PackEncoder(const EncoderWeights& weights) {
  if (failed()) return nullptr;
  const size_t bytes = PackedEncoderBytes(weights);
  Buffer memory = Allocate(bytes);
  if (memory.data() == nullptr) return nullptr;
  std::vector<std::byte> host(bytes);
  const DeviceEncoder encoder = cuda::PackEncoder(weights, host.data(), memory.data());
  if (encoder.num_stages == 0) return nullptr;
  CopyToDevice(host.data(), memory.data(), bytes);
  return std::make_unique<CudaPackedEncoder>(encoder, std::move(memory));
}

void CudaBackend::EncodeKeys(std::span<const KeySpan> spans, const void* pool,
                             const KvLayout& layout, const PackedEncoder& encoder, void* codes,
                             const CodeLayout& code_layout) {
  int32_t most = 0;
  const DeviceKeySpan* on_device = StageSpans(spans, layout, &most);
  if (on_device == nullptr) return;
  const auto is_held = [&](const KeySpan& span) {
    const size_t i = &span - spans.data();
    // The joined launch finds KV and codes by one table.
    return span.tokens == TokenRange{held_rows_[i].position, held_rows_[i].position + 1} &&
           (span.index_table.empty() || span.index_table.data() == span.block_table.data());
  };
  if (held_back_ == HeldBack::kRotation && pool == held_tokens_.pool &&
      code_layout.block_tokens == layout.block_tokens && spans.size() == held_rows_.size() &&
      std::all_of(spans.begin(), spans.end(), is_held)) {
    held_tokens_.codes = codes;
    held_tokens_.code_layout = code_layout;
    held_encoder_ = &EncoderOf(encoder);
    held_spans_ = on_device;
    held_back_ = HeldBack::kRotationAndKeys;
    return;
  }
  Good(cuda::EncodeKeys(EncoderOf(encoder), on_device, static_cast<int32_t>(spans.size()), most,
                        pool, layout, codes, code_layout, stream()),
       "codes of keys");
}

void CudaBackend::BoundKeys(std::span<const KeySpan> spans, const void* pool,
                            const KvLayout& layout, void* bounds) {
  int32_t most = 0;
  const DeviceKeySpan* on_device = StageSpans(spans, layout, &most);
  if (on_device == nullptr) return;
  Good(cuda::BoundKeys(on_device, static_cast<int32_t>(spans.size()), most, pool, layout, bounds,
                       stream()),
       "bounds of pages");
}

void CudaBackend::QuantizeKeys(std::span<const KeySpan> spans, const void* pool,
                               const KvLayout& layout, void* int4_keys) {
  int32_t most = 0;
  const DeviceKeySpan* on_device = StageSpans(spans, layout, &most);
  if (on_device == nullptr) return;
  Good(cuda::QuantizeKeys(on_device, static_cast<int32_t>(spans.size()), most, pool, layout,
                          int4_keys, stream()),
       "four-bit keys");
}

// ---- selection ----

Selection CudaBackend::NewSelection(const Selection& chosen, size_t queries) {
  const size_t lists = queries * chosen.kv_heads, tokens = lists * chosen.capacity;
  const size_t before = selected_queries_ * selected_.kv_heads * selected_.capacity;
  if (selected_.tokens != nullptr && !tokens_sent_ &&
      (chosen.tokens > selected_.tokens || chosen.tokens + tokens < selected_.tokens + before)) {
    SendTokens();  // somebody else's
  }
  selected_ = {};
  tokens_sent_ = true;
  if (counts_end_ + lists > counts_.size_bytes() / 4) {
    if (!Synchronize()) return {};  // takes those that are on their way
    if (lists > counts_.size_bytes() / 4) {
      const size_t bytes = std::max(kLeastCountsBytes, 8 * lists);
      counts_ = Buffer();
      arrived_counts_ = Buffer();
      counts_ = Allocate(bytes);
      arrived_counts_ = AllocateShared(bytes);
      if ((counts_.data() == nullptr || arrived_counts_.data() == nullptr) && !failed()) {
        failure_ = "no memory for the counts of a selection";
      }
    }
  }
  if (failed() || !Grow(selection_, tokens * 4, "a selection")) return {};
  const Selection selection{chosen.kv_heads, chosen.capacity,
                            static_cast<int32_t*>(counts_.data()) + counts_end_,
                            reinterpret_cast<int32_t*>(selection_.data())};
  counts_end_ += lists;
  return selection;
}

void CudaBackend::NoteSelection(const Selection& on_device, const Selection& chosen,
                                size_t queries) {
  const auto first =
      static_cast<size_t>(on_device.counts - static_cast<const int32_t*>(counts_.data()));
  const size_t count = queries * chosen.kv_heads;
  counts_on_their_way_.push_back({chosen.counts, first, count});
  counts_end_ = std::max(counts_end_, first + count);
  selected_ = chosen;
  selected_on_device_ = on_device;
  selected_queries_ = queries;
  tokens_sent_ = false;
}

void CudaBackend::SendTokens() {
  tokens_sent_ = true;
  if (failed()) return;
  Good(cudaMemcpyAsync(selected_.tokens, selected_on_device_.tokens,
                       selected_queries_ * selected_.kv_heads * selected_.capacity * 4,
                       cudaMemcpyDeviceToHost, stream()),
       "a selection");
}

void CudaBackend::SendSelections() {
  if (selected_.tokens != nullptr && !tokens_sent_) SendTokens();
  if (failed() || counts_on_their_way_.empty()) return;
  Good(cudaMemcpyAsync(arrived_counts_.data(), counts_.data(), counts_end_ * 4,
                       cudaMemcpyDeviceToHost, stream()),
       "a selection");
}

void CudaBackend::TakeCounts() {
  const auto* arrived = static_cast<const int32_t*>(arrived_counts_.data());
  for (const CountsOnTheirWay& counts : counts_on_their_way_) {
    std::copy_n(arrived + counts.first, counts.count, counts.to);
  }
  counts_on_their_way_.clear();
  counts_end_ = 0;
}

Selection CudaBackend::SelectionToRead(const Selection& chosen, size_t queries) {
  if (HasOnDevice(chosen, queries)) return selected_on_device_;
  const std::span<const int32_t> counts(chosen.counts, queries * chosen.kv_heads);
  if (!std::all_of(counts.begin(), counts.end(), [](int32_t count) { return count == 0; })) {
    return SelectionToChange(chosen, queries);
  }
  // Nothing was chosen, as always by the window's policy: without a copy the next kernel can stand ready.
  if (!Grow(zeros_, counts.size_bytes(), "a selection")) return {};
  auto* zeros = reinterpret_cast<int32_t*>(zeros_.data());
  return {chosen.kv_heads, 1, zeros, zeros};
}

Selection CudaBackend::SelectionToChange(const Selection& chosen, size_t queries) {
  if (HasOnDevice(chosen, queries)) return selected_on_device_;
  const Selection selection = NewSelection(chosen, queries);
  if (failed()) return selection;
  const size_t lists = queries * chosen.kv_heads;
  Good(
      cudaMemcpyAsync(selection.counts, chosen.counts, lists * 4, cudaMemcpyHostToDevice, stream()),
      "a selection");
  Good(cudaMemcpyAsync(selection.tokens, chosen.tokens, lists * chosen.capacity * 4,
                       cudaMemcpyHostToDevice, stream()),
       "a selection");
  return selection;
}

bool CudaBackend::HasOnDevice(const Selection& chosen, size_t queries) const {
  return selected_.tokens != nullptr && selected_.tokens == chosen.tokens &&
         selected_.counts == chosen.counts && selected_.capacity == chosen.capacity &&
         selected_.kv_heads == chosen.kv_heads && selected_queries_ == queries;
}

void CudaBackend::EncodeQueries(const Tensor& q, std::span<const RetrievalQuery> queries,
                                const PackedEncoder& encoder, void* codes) {
  const DeviceEncoder& of_queries = EncoderOf(encoder);
  const int32_t head_dim = of_queries.stages[0].in / of_queries.queries_per_input;
  const auto group = static_cast<int32_t>(q.cols / head_dim / of_queries.kv_heads);
  const auto is_held = [&](const RetrievalQuery& query) {
    const HeldRow& row = held_rows_[&query - queries.data()];
    return query.row == row.row && query.position == row.position;
  };
  if (held_back_ == HeldBack::kRotationAndKeys && q.data == held_tokens_.q.data &&
      group <= kTokenInputs * of_queries.queries_per_input && queries.size() == held_rows_.size() &&
      std::all_of(queries.begin(), queries.end(), is_held)) {
    held_back_ = HeldBack::kNothing;
    held_tokens_.query_codes = codes;
    Good(EncodeTokens(held_tokens_, *held_encoder_, of_queries, bare_stream()),
         "rotation, KV and codes");
    return;
  }
  const DeviceQuery* on_device = StageQueries(queries, kNoTables);
  if (on_device == nullptr || !EndStaging()) return;
  Good(cuda::EncodeQueries(of_queries, on_device, static_cast<int32_t>(queries.size()), group,
                           q.f32(), q.stride, head_dim, codes, stream()),
       "codes of queries");
}

void CudaBackend::SelectByCodes(std::span<const RetrievalQuery> queries, const void* query_codes,
                                int32_t group, const void* codes, const CodeLayout& code_layout,
                                const Selection& chosen) {
  int32_t longest = 0;
  for (const RetrievalQuery& query : queries) longest = std::max(longest, query.mid.size());
  longest = RoundUp(longest, kShapeTokens);
  const auto shape_of = [&](int32_t num_queries) {
    return HammingSelectShape{num_queries, group, code_layout, longest, alone_};
  };
  const DeviceQuery* on_device = StageQueries(queries, code_layout.block_tokens);
  if (on_device == nullptr || !EndStaging()) return;
  const Selection selection = NewSelection(chosen, queries.size());
  // Many rows at a time leave distances in the workspace: 64 queries of 8 heads at 1M tokens 1 GiB.
  const size_t at_once = QueriesAtOnce(queries.size(), [&](int32_t num_queries) {
    return HammingSelectWorkspaceBytes(shape_of(num_queries));
  });
  const size_t query_bytes = code_layout.CodeBytes() * code_layout.kv_heads * group;
  for (size_t first = 0; first < queries.size() && !failed(); first += at_once) {
    const HammingSelectShape shape =
        shape_of(static_cast<int32_t>(std::min(at_once, queries.size() - first)));
    if (!Prepare(codes_, HammingSelectWorkspaceBytes(shape), HammingSelectZeroedPart(shape),
                 {shape.num_queries, group, code_layout.kv_heads, code_layout.bits,
                  code_layout.block_tokens, shape.max_mid_tokens, 1},
                 "selection by codes")) {
      return;
    }
    Good(
        cuda::SelectByCodes(shape, on_device + first,
                            static_cast<const std::byte*>(query_codes) + first * query_bytes, codes,
                            selection.From(static_cast<int64_t>(first)), codes_.data(), stream()),
        "selection by codes");
  }
  if (!failed()) NoteSelection(selection, chosen, queries.size());
}

void CudaBackend::SelectByBounds(const Tensor& q, std::span<const RetrievalQuery> queries,
                                 const void* bounds, const KvLayout& layout, float /*scale*/,
                                 const Selection& chosen) {
  BoundSelectShape shape{static_cast<int32_t>(queries.size()), GroupOf(q, layout), layout, 0};
  for (const RetrievalQuery& query : queries) {
    shape.max_mid_last = std::max(shape.max_mid_last, query.mid.last);
  }
  const DeviceQuery* on_device = StageQueries(queries, layout.block_tokens);
  if (on_device == nullptr || !EndStaging()) return;
  const Selection selection = NewSelection(chosen, queries.size());
  if (failed() || !Grow(bounds_, BoundSelectWorkspaceBytes(shape), "selection by bounds")) return;
  if (Good(cuda::SelectByBounds(shape, q.f32(), q.stride, on_device, bounds, selection,
                                bounds_.data(), stream()),
           "selection by bounds")) {
    NoteSelection(selection, chosen, queries.size());
  }
}

void CudaBackend::SelectByLogits(const Tensor& q, std::span<const RetrievalQuery> queries,
                                 const void* pool, const KvLayout& layout, float scale,
                                 const Selection& chosen) {
  const DeviceQuery* on_device = StageQueries(queries, layout.block_tokens);
  if (on_device == nullptr || !EndStaging()) return;
  const Selection selection = NewSelection(chosen, queries.size());
  for (size_t first = 0; first < queries.size() && !failed();) {
    LogitSelectShape shape{0, GroupOf(q, layout), layout, 0};
    while (first + shape.num_queries < queries.size()) {
      LogitSelectShape wider = shape;
      ++wider.num_queries;
      wider.max_keys = std::max(shape.max_keys, queries[first + shape.num_queries].position + 1);
      if (shape.num_queries > 0 && LogitSelectWorkspaceBytes(wider) > kWorkspaceBytes) break;
      shape = wider;
    }
    if (!Grow(logits_, LogitSelectWorkspaceBytes(shape), "selection by logits")) return;
    Good(
        cuda::SelectByLogits(shape, q.f32(), q.stride, on_device + first, pool, scale,
                             selection.From(static_cast<int64_t>(first)), logits_.data(), stream()),
        "selection by logits");
    first += shape.num_queries;
  }
  if (!failed()) NoteSelection(selection, chosen, queries.size());
}

void CudaBackend::PruneSelection(const PruneSelectionArgs& args) {
  const Tensor& q = args.q;
  const std::span<const RetrievalQuery> queries = args.queries;
  const KvLayout& layout = args.layout;
  const Selection &candidates = args.candidates, &kept = args.kept;
  WINNOW_CHECK(candidates.capacity == kept.capacity && candidates.kv_heads == kept.kv_heads);
  const int32_t anchors = RoundUp(MostAnchors(queries), 1024);
  const int32_t most = RoundUp(candidates.capacity, 1024), group = GroupOf(q, layout);
  const auto shape_of = [&](int32_t num_queries) {
    return TopPShape{num_queries, group, layout, anchors, most};
  };
  const DeviceQuery* on_device = StageQueries(queries, layout.block_tokens);
  if (on_device == nullptr || !EndStaging()) return;
  // The device prunes in place. Where the host keeps both, its candidates travel first, and back.
  const bool in_place = kept.counts == candidates.counts && kept.tokens == candidates.tokens;
  if (!in_place && !Synchronize()) return;
  const Selection selection = SelectionToChange(candidates, queries.size());
  const size_t at_once = QueriesAtOnce(queries.size(), [&](int32_t num_queries) {
    return TopPWorkspaceBytes(shape_of(num_queries));
  });
  for (size_t first = 0; first < queries.size() && !failed(); first += at_once) {
    const TopPShape shape =
        shape_of(static_cast<int32_t>(std::min(at_once, queries.size() - first)));
    if (!Grow(prune_, TopPWorkspaceBytes(shape), "pruning")) return;
    const Selection part = selection.From(static_cast<int64_t>(first));
    Good(cuda::PruneSelection(shape, q.f32(), q.stride, on_device + first, args.int4_keys,
                              args.scale, args.p, part, part, prune_.data(), stream()),
         "pruning");
  }
  if (!failed()) NoteSelection(selection, kept, queries.size());
}

void CudaBackend::MeasureSelection(const MeasureSelectionArgs& args) {
  const Tensor& q = args.q;
  const std::span<const RetrievalQuery> queries = args.queries;
  const KvLayout& layout = args.layout;
  const Selection& chosen = args.chosen;
  if (!Synchronize()) return;  // the host reads what was chosen
  const size_t lists = queries.size() * layout.kv_heads;
  int32_t most = 1;
  for (size_t i = 0; i < lists; ++i) most = std::max(most, chosen.counts[i]);
  const LogitSelectShape shape{static_cast<int32_t>(queries.size()), GroupOf(q, layout), layout,
                               LastPosition(queries) + 1};
  const size_t tokens_bytes = lists * most * 4;
  const DeviceQuery* on_device =
      StageQueries(queries, layout.block_tokens, tokens_bytes + lists * 4 + 256);
  if (on_device == nullptr) return;
  numbers_.assign(lists * most, 0);
  for (size_t i = 0; i < lists; ++i) {
    std::copy_n(chosen.tokens + i * chosen.capacity, chosen.counts[i],
                numbers_.begin() + static_cast<int64_t>(i) * most);
  }
  const Selection measured{layout.kv_heads, most,
                           Stage(std::span<const int32_t>(chosen.counts, lists)),
                           Stage(std::span<const int32_t>(numbers_))};
  if (!EndStaging() || !Grow(logits_, MeasureSelectionWorkspaceBytes(shape, most), "measuring") ||
      !Grow(quality_, lists * sizeof(SelectionQuality), "measuring")) {
    return;
  }
  auto* results = reinterpret_cast<SelectionQuality*>(quality_.data());
  if (Good(cuda::MeasureSelection(shape, most, q.f32(), q.stride, on_device, args.pool, args.scale,
                                  measured, results, logits_.data(), stream()),
           "measuring")) {
    CopyToHost(results, args.quality, lists * sizeof(SelectionQuality));
  }
}

}  // namespace winnow::kernels::cuda
