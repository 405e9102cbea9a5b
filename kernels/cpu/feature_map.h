// Feature maps in the CPU backend's order: folded (kernels/feature_map.h), float32, as panels.
#ifndef WINNOW_KERNELS_CPU_FEATURE_MAP_H_
#define WINNOW_KERNELS_CPU_FEATURE_MAP_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/ops.h"
#include "kernels/retrieval.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

class CpuFeatureMap final : public PackedFeatureMap {
 public:
  // Vectors mapped at a time: the panels are read once for them, and they stay in L1 and L2.
  static constexpr int32_t kTileRows = 64;

  explicit CpuFeatureMap(const FeatureMapWeights& weights);

  int32_t features() const override { return features_; }
  size_t size_bytes() const override { return buffer_.size_bytes(); }
  int32_t kv_heads() const { return kv_heads_; }
  int32_t head_dim() const { return head_dim_; }
  bool allocated() const { return buffer_.data() != nullptr; }

  // Folds and packs one head's weights.
  void PackHead(const FeatureMapWeights& weights, int32_t head);

  // Floats between rows of inputs. A cache line more than a row, so that rows of 2^k values do not
  // fall into one set of the cache.
  int64_t InputStride() const { return (int64_t{head_dim_} + inner_ + 15) / 16 * 16 + 16; }
  int64_t ScratchFloats() const { return int64_t{kTileRows} * 2 * inner_; }

  // out [rows][out_stride] of inputs [rows][InputStride()], whose first d values are the vectors,
  // rounded to bfloat16; the rest of a row is overwritten. REQUIRES: rows <= kTileRows; scratch has
  // ScratchFloats().
  void Apply(const CpuOps& ops, int32_t head, int32_t rows, float* inputs, float* scratch,
             float* out, int64_t out_stride) const;

 private:
  float* HeadData(int32_t head) const {
    return static_cast<float*>(buffer_.data()) + head * head_floats_;
  }

  const int32_t kv_heads_, head_dim_, inner_, features_;
  // Of a head: panels of gate and up over x, panels of out over (x, z), their biases.
  const int64_t gate_up_floats_, out_floats_, head_floats_;
  const Buffer buffer_;
};

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_FEATURE_MAP_H_
