#include "engine/expert_mlp.h"

#include <algorithm>
#include <numeric>

#include "absl/status/status.h"
#include "fmt/format.h"
#include "kernels/check.h"

namespace winnow::engine {

using kernels::Buffer;
using kernels::DType;
using kernels::Tensor;

namespace {

Tensor View(const Buffer& buffer, int64_t rows, int64_t cols) {
  return {buffer.data(), DType::kF32, rows, cols, cols};
}

// Row `expert` of [experts][values], or null.
const float* BiasOf(const Buffer& biases, int32_t expert, int64_t values) {
  if (biases.data() == nullptr) return nullptr;
  return static_cast<const float*>(biases.data()) + expert * values;
}

}  // namespace

kernels::ExpertMatrices ExpertMlp::MatricesOf(const Layer& layer, int32_t expert) {
  const Expert& of = layer.experts[expert];
  return {.gate_up = of.gate_up.get(),
          .down = of.down.get(),
          .gate_up_bias = BiasOf(layer.gate_up_bias, expert, of.gate_up->out_features()),
          .down_bias = BiasOf(layer.down_bias, expert, of.down->out_features())};
}

void GroupByExpert(std::span<const int32_t> ids, int32_t per_token, ExpertGroups* groups) {
  const auto count = static_cast<int32_t>(ids.size());
  const auto experts = static_cast<int32_t>(groups->first.size()) - 1;
  std::vector<int32_t>& first = groups->first;
  std::fill(first.begin(), first.end(), 0);
  for (const int32_t id : ids) {
    WINNOW_CHECK(id >= 0 && id < experts);
    ++first[id];
  }
  // Each one's end; counting down from there leaves its first place, and its rows in order.
  for (int32_t e = 1; e <= experts; ++e) first[e] += first[e - 1];
  groups->rows.resize(count);
  groups->places.resize(count);
  for (int32_t slot = count - 1; slot >= 0; --slot) {
    const int32_t place = --first[ids[slot]];
    groups->rows[place] = slot / per_token;
    groups->places[slot] = place;
  }
}

ExpertMlp::Layer ExpertMlp::LayerBeside(const Layer& layer) {
  const auto borrow = [](const Buffer& buffer) {
    return Buffer(buffer.data(), buffer.size_bytes(), [](void*) {});
  };
  Layer beside;
  beside.router = layer.router;
  beside.router_bias = borrow(layer.router_bias);
  beside.correction = borrow(layer.correction);
  beside.shared_gating = layer.shared_gating;
  beside.gate_up_bias = borrow(layer.gate_up_bias);
  beside.down_bias = borrow(layer.down_bias);
  return beside;
}

absl::StatusOr<std::unique_ptr<ExpertMlp>> ExpertMlp::Create(const ModelConfig& config,
                                                             kernels::Backend& backend,
                                                             int64_t rows_max) {
  const ExpertsConfig& experts = config.experts;
  std::unique_ptr<ExpertMlp> mlp(new ExpertMlp(experts, backend));
  const int64_t slots = rows_max * experts.per_token;
  mlp->num_rows_ = std::max(slots, backend.RoutedExpertRows(slots, experts.count));
  const struct {
    Buffer* to;
    int64_t values;
    bool shared;
  } kBuffers[] = {{&mlp->logits_, rows_max * experts.count, false},
                  {&mlp->weights_, slots, false},
                  {&mlp->rows_, mlp->num_rows_ * config.hidden_size, false},
                  {&mlp->ids_, slots, true}};
  for (const auto& buffer : kBuffers) {
    const auto size_bytes = static_cast<size_t>(buffer.values) * sizeof(float);
    *buffer.to = buffer.shared ? backend.AllocateShared(size_bytes) : backend.Allocate(size_bytes);
    if (buffer.to->data() == nullptr) {
      return absl::ResourceExhaustedError(
          fmt::format("no memory for rows of experts: {} bytes", size_bytes));
    }
    mlp->scratch_bytes_ += size_bytes;
  }
  mlp->groups_.rows.reserve(slots);
  mlp->groups_.places.reserve(slots);
  mlp->groups_.first.resize(experts.count + 1);
  mlp->row_numbers_.resize(rows_max);
  std::iota(mlp->row_numbers_.begin(), mlp->row_numbers_.end(), 0);
  return mlp;
}

void ExpertMlp::Add(const Layer& layer, const Tensor& normed, const Tensor& gate_up,
                    const Tensor& activated, const Tensor& hidden) {
  AddRouted(layer, normed, gate_up.ColRange(0, 2 * config_.intermediate_size),
            activated.ColRange(0, config_.intermediate_size), hidden);
  if (config_.shared_intermediate_size == 0) return;
  AddShared(layer, normed, gate_up.ColRange(0, 2 * config_.shared_intermediate_size),
            activated.ColRange(0, config_.shared_intermediate_size), hidden);
}

// hidden += (silu(gate) * up) · Wdownᵀ of normed, times the sigmoid of its gate where it has one.
void ExpertMlp::AddShared(const Layer& layer, const Tensor& normed, const Tensor& gate_up,
                          const Tensor& activated, const Tensor& hidden) {
  const int64_t m = normed.rows;
  backend_.Matmul(normed, *layer.shared.gate_up, gate_up, {});
  if (!config_.shared_is_gated) {
    backend_.SiluMatmul(gate_up, *layer.shared.down, activated, hidden, {.accumulate = true});
    return;
  }
  const Tensor rows = View(rows_, m, hidden.cols);
  const Tensor logits = View(logits_, m, 1), weights = View(weights_, m, 1);
  backend_.SiluMatmul(gate_up, *layer.shared.down, activated, rows, {});
  // It is routed as an only expert, whose weight is its score.
  backend_.Matmul(normed, *layer.shared_gating, logits, {});
  backend_.RouteExperts(logits, {.scores = kernels::ExpertRouting::Scores::kSigmoid},
                        static_cast<int32_t*>(ids_.data()), weights);
  backend_.AddExpertRows(rows, std::span(row_numbers_).first(m), weights, hidden);
}

void ExpertMlp::AddRouted(const Layer& layer, const Tensor& normed, const Tensor& gate_up,
                          const Tensor& activated, const Tensor& hidden) {
  const int64_t m = normed.rows, per_token = config_.per_token;
  const Tensor logits = View(logits_, m, config_.count);
  const Tensor weights = View(weights_, m, per_token);
  const Tensor rows = View(rows_, m * per_token, hidden.cols);
  auto* const ids = static_cast<int32_t*>(ids_.data());

  const kernels::ExpertRouting routing = {.scores = config_.scores,
                                          .normalized = config_.normalized,
                                          .scale = static_cast<float>(config_.scale),
                                          .correction = BiasOf(layer.correction, 0, 0)};

  // ids, weights [m][per_token] of logits [m][experts] = normed · Wᵀ + bias
  backend_.Matmul(normed, *layer.router, logits, {.bias = BiasOf(layer.router_bias, 0, 0)});
  if (layer.set != nullptr &&
      backend_.AddRoutedExperts({.experts = *layer.set,
                                 .per_token = config_.per_token,
                                 .routing = routing,
                                 .clamped = config_.clamped,
                                 .logits = logits,
                                 .normed = normed,
                                 .hidden = hidden,
                                 .rows = View(rows_, num_rows_, hidden.cols)})) {
    return;
  }
  backend_.RouteExperts(logits, routing, ids, weights);
  if (!backend_.Synchronize()) return;
  GroupByExpert({ids, static_cast<size_t>(m * per_token)}, config_.per_token, &groups_);

  // rows [m * per_token][hidden] by expert: (silu(gate) * up) · Wdownᵀ + bias of normed, or of the clamped gate
  backend_.GatherExpertRows(normed, groups_.rows, rows);
  for (int32_t e = 0; e < config_.count; ++e) {
    const int32_t first = groups_.first[e], count = groups_.first[e + 1] - first;
    if (count == 0) continue;
    const kernels::ExpertMatrices expert = MatricesOf(layer, e);
    const Tensor of_expert = rows.RowRange(first, count);
    const Tensor gated = gate_up.RowRange(0, count), inner = activated.RowRange(0, count);
    const kernels::MatmulEpilogue epilogue = {.bias = expert.down_bias};
    backend_.Matmul(of_expert, *expert.gate_up, gated, {.bias = expert.gate_up_bias});
    if (config_.clamped.has_value()) {
      backend_.ClampedSwigluMul(gated, *config_.clamped, inner);
      backend_.Matmul(inner, *expert.down, of_expert, epilogue);
    } else {
      backend_.SiluMatmul(gated, *expert.down, inner, of_expert, epilogue);
    }
  }

  // hidden += the sum over slots of weights · rows
  backend_.AddExpertRows(rows, groups_.places, weights, hidden);
}

}  // namespace winnow::engine
