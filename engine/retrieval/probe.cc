#include "engine/retrieval/probe.h"

#include <algorithm>
#include <optional>
#include <span>

namespace winnow::engine {

using kernels::RetrievalQuery;
using kernels::Selection;
using kernels::SelectionQuality;
using kernels::Tensor;

// Which queries are measured is a function of position and layer, so that a sequence that is
// computed again is measured at the same places, and `floor` acts from the same position on.
void Probe::Measure(const QueryCall& call, const Selection& selected, const Tensor& q) {
  if (interval_ == 0) return;
  for (size_t i = 0; i < call.size(); ++i) {
    const int32_t position = call.queries[i].position;
    if (!IsProbed(position, call.layer, interval_)) continue;
    RetrievalState& state = call.rows[i]->state();
    const bool counted = position < state.counted();
    const std::optional<double>& floor = state.policy().floor;
    if (counted && !floor.has_value()) continue;
    const bool measured = MeasureQuery(call, i, selected, q);
    if (!backend_.failure().empty()) return;
    if (!measured) continue;
    const double coverage = CountQuery(state, counted);
    if (floor.has_value() && coverage < *floor) StepFloor(*call.rows[i], position);
  }
}

bool Probe::IsDue(const QueryCall& call) const {
  return interval_ > 0 &&
         std::any_of(call.queries.begin(), call.queries.end(), [&](const RetrievalQuery& query) {
           return IsProbed(query.position, call.layer, interval_);
         });
}

// quality_ of the query. False: its chunk is lost.
bool Probe::MeasureQuery(const QueryCall& call, size_t i, const Selection& selected,
                         const Tensor& q) {
  bool measured = false;
  whole_.ForEach(call.Part(i, 1),
                 [&](size_t, std::span<const RetrievalQuery> queries, const void* pool) {
                   backend_.MeasureSelection({.q = q,
                                              .queries = queries,
                                              .pool = pool,
                                              .layout = shape_.layout,
                                              .scale = shape_.scale,
                                              .chosen = selected.From(static_cast<int64_t>(i)),
                                              .quality = quality_.data()});
                   measured = true;
                 });
  return measured;
}

// The mean coverage over KV heads.
double Probe::CountQuery(RetrievalState& state, bool counted) const {
  double coverage = 0;
  for (const SelectionQuality& head : quality_) {
    coverage += head.coverage;
    if (counted) continue;
    RetrievalCounts& tally = state.tally();
    ++tally.probes;
    tally.coverage += head.coverage;
    tally.iou += head.iou;
  }
  return coverage / shape_.kv_heads;
}

void Probe::StepFloor(const PassRows& rows, int32_t position) const {
  const AttentionPolicy& policy = rows.policy();
  // Not within the prompt: which of its tokens have attended by now, and in which layers, depends on
  // how it was cut into chunks, and results must not.
  const int32_t before = policy.suffix > 0 ? shape_.layout.block_tokens - 1 : 0;
  const int32_t prompt_end = rows.chunk->retrieve_from + policy.suffix + before;
  rows.state().floor().Fell(rows.floor.Taken(position), std::max(position + 1, prompt_end),
                            policy.HasBudget());
}

}  // namespace winnow::engine
