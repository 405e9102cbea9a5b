#include "engine/retrieval/selector.h"

#include <algorithm>
#include <span>
#include <utility>

#include "engine/base/status_macros.h"

namespace winnow::engine {

using kernels::RetrievalQuery;
using kernels::Selection;
using kernels::Tensor;

absl::Status Selector::Allocate(int64_t max_entries, ScratchAllocator& scratch) {
  const size_t counts = size_t{kMaxCallQueries} * shape_.kv_heads * sizeof(int32_t);
  WINNOW_RETURN_IF_ERROR(
      scratch.Allocate(kCallSlots * counts, "counts of chosen tokens", /*shared=*/true, &counts_));
  WINNOW_RETURN_IF_ERROR(scratch.Allocate(max_entries * sizeof(int32_t), "chosen tokens",
                                          /*shared=*/true, &tokens_));
  WINNOW_RETURN_IF_ERROR(scratch.Allocate(counts, "no counts", /*shared=*/true, &no_counts_));
  const size_t scales =
      indexes_.has_residuals() ? size_t{kMaxCallQueries} * shape_.num_heads * sizeof(float) : 0;
  WINNOW_RETURN_IF_ERROR(
      scratch.Allocate(scales, "references of candidates", /*shared=*/false, &references_));
  WINNOW_RETURN_IF_ERROR(
      scratch.Allocate(scales, "denominators of masses", /*shared=*/false, &inverses_));
  return scratch.Allocate(size_t{kMaxCallQueries} * shape_.num_heads * indexes_.max_code_bytes(),
                          "codes of queries",
                          /*shared=*/false, &query_codes_);
}

Selection Selector::Nothing() const {
  return {shape_.kv_heads, 1, static_cast<int32_t*>(no_counts_.data()),
          static_cast<int32_t*>(tokens_.data())};
}

Selection Selector::Select(const QueryCall& call, const Tensor& q, const MassInputs& masses) {
  int32_t capacity = 1;
  for (const int32_t candidates : call.candidates) capacity = std::max(capacity, candidates);
  int32_t* const counts = static_cast<int32_t*>(counts_.data()) +
                          int64_t{call.slot} * kMaxCallQueries * shape_.kv_heads;
  const Selection selected{shape_.kv_heads, capacity, counts,
                           static_cast<int32_t*>(tokens_.data())};
  // Wider first where the selection is pruned or re-ranked afterwards. A least mass is the second code's matter then.
  least_keys_.assign(call.size(), 0);
  const auto swap_plans = [&] {
    for (size_t i = 0; i < call.size(); ++i) {
      std::swap(call.queries[i].k, call.candidates[i]);
      if (call.policy->rerank) std::swap(call.queries[i].least_key, least_keys_[i]);
    }
  };
  swap_plans();
  SelectTokens(call, q, masses, selected);
  swap_plans();
  if (call.policy->p.has_value()) {
    Prune(call, q, selected);
  } else if (call.policy->rerank) {
    Rerank(call, q, selected);
  } else {
    return selected;
  }
  TakeFromTail(call, q, masses, selected);
  return selected;
}

void Selector::Prune(const QueryCall& call, const Tensor& q, const Selection& selected) {
  backend_.PruneSelection({.q = q,
                           .queries = call.queries,
                           .int4_keys = indexes_.int4_keys(call.layer),
                           .layout = shape_.layout,
                           .scale = shape_.scale,
                           .p = static_cast<float>(*call.policy->p),
                           .candidates = selected,
                           .kept = selected});
}

void Selector::Rerank(const QueryCall& call, const Tensor& q, const Selection& selected) {
  const Indexes::Codes& codes = *indexes_.CodesOf(*call.policy);
  const Indexes::Codes::Layer& of_layer = codes.layers[call.layer];
  backend_.RerankByMass({.q = q,
                         .queries = call.queries,
                         .transform = *of_layer.transform,
                         .codes = of_layer.pool.data(),
                         .code_layout = codes.layout,
                         .residual = *of_layer.residual,
                         .residual_codes = of_layer.residual_pool.data(),
                         .residual_layout = codes.layout,
                         .scale = shape_.scale,
                         .scales = scales(),
                         .candidates = selected,
                         .kept = selected});
}

void Selector::TakeFromTail(const QueryCall& call, const Tensor& q, const MassInputs& masses,
                            const Selection& selected) {
  if (call.policy->select_by() != SelectBy::kMasses || masses.tail == nullptr) return;
  const Indexes::Codes& codes = *indexes_.CodesOf(*call.policy);
  const Indexes::Codes::Layer& of_layer = codes.layers[call.layer];
  backend_.TakeFromTail({.q = q,
                         .queries = call.queries,
                         .transform = *of_layer.transform,
                         .codes = of_layer.pool.data(),
                         .code_layout = codes.layout,
                         .scale = shape_.scale,
                         .read = selected,
                         .tail = *masses.tail});
}

void Selector::SelectTokens(const QueryCall& call, const Tensor& q, const MassInputs& masses,
                            const Selection& selected) {
  switch (call.policy->select_by()) {
    case SelectBy::kNothing:
      std::fill_n(selected.counts, call.size() * shape_.kv_heads, 0);
      return;
    case SelectBy::kKeys:
      std::fill_n(selected.counts, call.size() * shape_.kv_heads, 0);
      whole_.ForEach(call,
                     [&](size_t begin, std::span<const RetrievalQuery> queries, const void* pool) {
                       backend_.SelectByLogits(q, queries, pool, shape_.layout, shape_.scale,
                                               selected.From(static_cast<int64_t>(begin)));
                     });
      return;
    case SelectBy::kBounds:
      backend_.SelectByBounds(q, call.queries, indexes_.bounds(call.layer), shape_.layout,
                              shape_.scale, selected);
      return;
    case SelectBy::kMasses:
      SelectByMass(call, q, masses, selected);
      return;
    case SelectBy::kCodes: {
      const Indexes::Codes& codes = *indexes_.CodesOf(*call.policy);
      const Indexes::Codes::Layer& of_layer = codes.layers[call.layer];
      backend_.EncodeQueries(q, call.queries, *of_layer.query, query_codes_.data());
      backend_.SelectByCodes(call.queries, query_codes_.data(), shape_.group(),
                             of_layer.pool.data(), codes.layout, selected);
      return;
    }
  }
}

void Selector::SelectByMass(const QueryCall& call, const Tensor& q, const MassInputs& masses,
                            const Selection& selected) {
  const Indexes::Codes& codes = *indexes_.CodesOf(*call.policy);
  const Indexes::Codes::Layer& of_layer = codes.layers[call.layer];
  kernels::TailMasses tail;
  if (masses.tail != nullptr) {
    tail = *masses.tail;
    tail.of_all = call.policy->p.has_value() || call.policy->rerank;
  }
  const kernels::MassScales of_call = scales();
  backend_.SelectByMass({.q = q,
                         .queries = call.queries,
                         .anchor_masses = masses.anchors,
                         .transform = *of_layer.transform,
                         .codes = of_layer.pool.data(),
                         .code_layout = codes.layout,
                         .scale = shape_.scale,
                         .chosen = selected,
                         .tail = masses.tail != nullptr ? &tail : nullptr,
                         .scales = call.policy->rerank ? &of_call : nullptr});
}

}  // namespace winnow::engine
