#include "engine/retrieval_state.h"

#include <algorithm>
#include <utility>

namespace winnow::engine {
namespace {

constexpr int32_t kPage = kernels::kBoundPageTokens;

constexpr int32_t RoundUpToPage(int32_t tokens) { return (tokens + kPage - 1) / kPage * kPage; }

}  // namespace

RetrievalCounts& RetrievalCounts::operator+=(const RetrievalCounts& other) {
  rows_read += other.rows_read;
  rows_dense += other.rows_dense;
  rows_cached += other.rows_cached;
  rows_stored += other.rows_stored;
  mid_rows += other.mid_rows;
  chosen_rows += other.chosen_rows;
  probes += other.probes;
  coverage += other.coverage;
  iou += other.iou;
  completions += other.completions;
  completed += other.completed;
  return *this;
}

QueryPlan PlanQuery(const AttentionPolicy& policy, int32_t position, int32_t from) {
  const int32_t visible = position + 1;
  QueryPlan plan;
  plan.mid = {policy.sink, std::max(policy.sink, visible - policy.window)};
  if (policy.kind == AttentionPolicy::Kind::kQuest) {
    // Whole pages: what is left over at either end joins the anchors.
    plan.mid.first = RoundUpToPage(plan.mid.first);
    plan.mid.last = std::max(plan.mid.first, plan.mid.last / kPage * kPage);
  }
  if (policy.IsDense()) return plan;
  plan.k = policy.KFor(visible);
  if (policy.kind == AttentionPolicy::Kind::kQuest) plan.k = RoundUpToPage(plan.k);
  if (plan.mid.size() <= plan.k || visible < policy.from.value_or(from)) return plan;
  plan.dense = false;
  plan.candidates = plan.k;
  if (policy.p.has_value()) {
    plan.candidates = policy.CandidatesFor(visible);
    if (policy.kind == AttentionPolicy::Kind::kQuest) {
      plan.candidates = RoundUpToPage(plan.candidates);
    }
    plan.candidates = std::min(plan.candidates, plan.mid.size());
  }
  return plan;
}

void RetrievalState::Truncate(int32_t tokens) {
  // The next query sees one token more than is left. A summary cannot give tokens back.
  const int32_t mid_last = PlanQuery(policy_, tokens, 0).mid.last;
  for (Layer& layer : layers_) {
    layer.indexed = std::min(layer.indexed, tokens);
    const int32_t last = policy_.HasTail()
                             ? tokens / kernels::kCellRefreshTokens * kernels::kCellRefreshTokens
                             : mid_last;
    if (layer.summary.tokens.last > last) {
      layer.summary.tokens.last = layer.summary.tokens.first;
    }
  }
}

void RetrievalState::Rewind(int32_t tokens) {
  Truncate(tokens);
  counted_ = std::min(counted_, tokens);
  if (dense_from_ > tokens) dense_from_ = std::numeric_limits<int32_t>::max();
}

void RetrievalState::Suspend() {
  Truncate(0);
  for (Layer& layer : layers_) layer.summary = {};
  summaries_ = {};
}

RetrievalCounts RetrievalState::TakeCounts() { return std::exchange(counts_, {}); }

}  // namespace winnow::engine
