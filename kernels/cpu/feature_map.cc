#include "kernels/cpu/feature_map.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/panel.h"
#include "kernels/feature_map.h"

namespace winnow::kernels {
namespace {

constexpr int64_t PanelFloats(int64_t outputs, int64_t inner) {
  return NumPanels(outputs) * inner * kPanelOutputs;
}

// One head's weights [out][in] of a stage, or what stages make of each other.
struct Affine {
  int32_t in = 0, out = 0;
  std::vector<double> weight, bias;
};

Affine HeadOf(const AffineStage& stage, int32_t head) {
  Affine affine{stage.in, stage.out, {}, {}};
  const size_t values = size_t(stage.in) * stage.out;
  affine.weight.reserve(values);
  for (const uint16_t bits : stage.weight.subspan(head * values, values)) {
    affine.weight.push_back(ToFloat(BF16{bits}));
  }
  const auto bias = stage.bias.subspan(size_t(head) * stage.out, stage.out);
  affine.bias.assign(bias.begin(), bias.end());
  return affine;
}

// outer(inner(x)).
Affine Compose(const Affine& outer, const Affine& inner) {
  Affine both{inner.in, outer.out, std::vector<double>(size_t(inner.in) * outer.out), outer.bias};
  for (int32_t o = 0; o < outer.out; ++o) {
    double* row = both.weight.data() + size_t(o) * both.in;
    for (int32_t j = 0; j < outer.in; ++j) {
      const double w = outer.weight[size_t(o) * outer.in + j];
      const double* from = inner.weight.data() + size_t(j) * inner.in;
      for (int32_t i = 0; i < inner.in; ++i) row[i] += w * from[i];
      both.bias[o] += w * inner.bias[j];
    }
  }
  return both;
}

// Writes the weights to outputs from `first_output` and inputs from `first_input` on.
void PackInto(float* panels, int64_t panel_inputs, const Affine& affine, int64_t first_output,
              int64_t first_input) {
  for (int32_t o = 0; o < affine.out; ++o) {
    const int64_t output = first_output + o;
    float* to = panels + output / kPanelOutputs * panel_inputs * kPanelOutputs +
                first_input * kPanelOutputs + output % kPanelOutputs;
    for (int32_t i = 0; i < affine.in; ++i) {
      to[i * kPanelOutputs] = static_cast<float>(affine.weight[size_t(o) * affine.in + i]);
    }
  }
}

}  // namespace

CpuFeatureMap::CpuFeatureMap(const FeatureMapWeights& weights)
    : kv_heads_(weights.kv_heads),
      head_dim_(weights.stem.in),
      inner_(weights.gate.out),
      features_(weights.out.out),
      gate_up_floats_(PanelFloats(2 * int64_t{inner_}, head_dim_)),
      out_floats_(PanelFloats(features_, int64_t{head_dim_} + inner_)),
      head_floats_((gate_up_floats_ + out_floats_ + 2 * inner_ + features_ + 15) / 16 * 16),
      buffer_(AllocateHostMemory(static_cast<size_t>(kv_heads_ * head_floats_) * sizeof(float))) {}

void CpuFeatureMap::PackHead(const FeatureMapWeights& weights, int32_t head) {
  const Affine stem = HeadOf(weights.stem, head);
  const Affine gate = Compose(HeadOf(weights.gate, head), stem);
  const Affine up = Compose(HeadOf(weights.up, head), stem);
  const Affine out = HeadOf(weights.out, head);
  Affine out_of_x = Compose(out, stem);
  Affine down = HeadOf(weights.down, head);
  const Affine out_of_z = Compose(out, down);
  // Both compositions carry the bias of `out`.
  for (int32_t j = 0; j < features_; ++j) out_of_x.bias[j] += out_of_z.bias[j] - out.bias[j];

  float* gate_up_panels = HeadData(head);
  float* out_panels = gate_up_panels + gate_up_floats_;
  float* biases = out_panels + out_floats_;
  PackInto(gate_up_panels, head_dim_, gate, 0, 0);
  PackInto(gate_up_panels, head_dim_, up, inner_, 0);
  PackInto(out_panels, int64_t{head_dim_} + inner_, out_of_x, 0, 0);
  PackInto(out_panels, int64_t{head_dim_} + inner_, out_of_z, 0, head_dim_);
  biases = std::copy(gate.bias.begin(), gate.bias.end(), biases);
  biases = std::copy(up.bias.begin(), up.bias.end(), biases);
  std::copy(out_of_x.bias.begin(), out_of_x.bias.end(), biases);
}

void CpuFeatureMap::Apply(const CpuOps& ops, int32_t head, int32_t rows, float* inputs,
                          float* scratch, float* out, int64_t out_stride) const {
  const float* data = HeadData(head);
  MatmulCall call;
  call.compute = DType::kF32;
  call.rows = inputs;
  call.row_bytes = static_cast<size_t>(InputStride()) * sizeof(float);
  call.panels = reinterpret_cast<const std::byte*>(data);
  call.in_features = head_dim_;
  call.out_features = 2 * int64_t{inner_};
  call.y = scratch;
  call.y_stride = 2 * int64_t{inner_};
  call.bias = data + gate_up_floats_ + out_floats_;
  ops.matmul_tiles(call, 0, rows, 0, NumPanels(call.out_features));
  for (int32_t row = 0; row < rows; ++row) {
    ops.gelu_mul_row(scratch + row * call.y_stride, inner_,
                     inputs + row * InputStride() + head_dim_);
  }
  call.panels = reinterpret_cast<const std::byte*>(data + gate_up_floats_);
  call.in_features = int64_t{head_dim_} + inner_;
  call.bias += call.out_features;
  call.out_features = features_;
  call.y = out;
  call.y_stride = out_stride;
  ops.matmul_tiles(call, 0, rows, 0, NumPanels(features_));
}

std::unique_ptr<PackedFeatureMap> CpuBackend::PackFeatureMap(const FeatureMapWeights& weights) {
  CheckFeatureMapShapes(weights);
  auto packed = std::make_unique<CpuFeatureMap>(weights);
  if (!packed->allocated()) return nullptr;
  threads_.ParallelFor(weights.kv_heads, [&](int64_t head, int) {
    packed->PackHead(weights, static_cast<int32_t>(head));
  });
  return packed;
}

}  // namespace winnow::kernels
