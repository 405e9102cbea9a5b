#include "engine/retrieval/retrieval_state.h"

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
  candidate_rows += other.candidate_rows;
  selected_rows += other.selected_rows;
  probes += other.probes;
  coverage += other.coverage;
  iou += other.iou;
  tail_estimates += other.tail_estimates;
  tail_mass += other.tail_mass;
  widened_tokens += other.widened_tokens;
  floor_dense_tokens += other.floor_dense_tokens;
  return *this;
}

QueryPlan PlanQuery(const AttentionPolicy& policy, int32_t position, int32_t from, int32_t widen) {
  const int32_t visible = position + 1;
  QueryPlan plan;
  plan.mid = {policy.sink, std::max(policy.sink, visible - policy.window)};
  if (policy.select_by() == SelectBy::kBounds) {
    // Whole pages: what is left over at either end joins the anchors.
    plan.mid.first = RoundUpToPage(plan.mid.first);
    plan.mid.last = std::max(plan.mid.first, plan.mid.last / kPage * kPage);
  }
  if (policy.IsDense()) return plan;
  plan.k = policy.KFor(visible);
  if (policy.select_by() == SelectBy::kBounds) plan.k = RoundUpToPage(plan.k);
  if (plan.mid.size() <= plan.k || visible < policy.from.value_or(from)) return plan;
  plan.dense = false;
  const auto widened = [&](int32_t count) {
    return static_cast<int32_t>(std::min<int64_t>(int64_t{count} * widen, plan.mid.size()));
  };
  plan.k = widened(plan.k);
  plan.candidates = plan.k;
  plan.min_mass = policy.min_mass.value_or(0) / widen;
  if (policy.p.has_value() || policy.rerank) {
    plan.candidates = policy.CandidatesFor(visible);
    if (policy.select_by() == SelectBy::kBounds) {
      plan.candidates = RoundUpToPage(plan.candidates);
    }
    plan.candidates = widened(plan.candidates);
  }
  return plan;
}

void FloorSteps::Fell(int32_t taken, int32_t next, bool can_widen) {
  const auto all = static_cast<int32_t>(first_.size());
  if (Taken(next) != taken) return;
  for (int32_t i = taken; i < (can_widen ? std::min(taken + 1, all) : all); ++i) first_[i] = next;
}

int32_t FloorSteps::Taken(int32_t position) const {
  return static_cast<int32_t>(std::count_if(first_.begin(), first_.end(),
                                            [&](int32_t first) { return first <= position; }));
}

void FloorSteps::Rewind(int32_t tokens) {
  for (int32_t& first : first_) {
    if (first > tokens) first = kNever;
  }
}

bool IsProbed(int32_t position, int32_t layer, int32_t interval) {
  // The last steps of SplitMix64, which mix every bit into every other.
  uint64_t mixed =
      (static_cast<uint64_t>(position) << 32 | static_cast<uint32_t>(layer)) + 0x9E3779B97F4A7C15;
  mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9;
  mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB;
  return (mixed ^ mixed >> 31) % static_cast<uint64_t>(interval) == 0;
}

RetrievalState::RetrievalState(const AttentionPolicy& policy, const std::vector<bool>& sees_all)
    : policy_(policy), layers_(sees_all.size()) {
  for (size_t i = 0; i < sees_all.size(); ++i) {
    layers_[i].retrieves = policy.RetrievesIn(static_cast<int32_t>(i)) && sees_all[i];
  }
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
  floor_.Rewind(tokens);
}

void RetrievalState::Suspend() {
  Truncate(0);
  for (Layer& layer : layers_) layer.summary = {};
  summaries_ = {};
}

int32_t RetrievalState::NotIndexed(int32_t tokens) const {
  int32_t most = 0;
  for (int32_t i = 0; i < num_layers(); ++i) {
    if (layers_[i].retrieves) most = std::max(most, tokens - layers_[i].indexed);
  }
  return most;
}

RetrievalCounts RetrievalState::TakeCounts() { return std::exchange(counts_, {}); }

}  // namespace winnow::engine
