// The operations of a model's layers that know of no other token: weights are packed once, and each row of activations is
// embedded, normed and multiplied. A token's keys and values are the next group's matter (kv_ops.h).
//
// Shapes: m tokens in the batch, H query heads, Hkv KV heads, d head dimension.
#ifndef WINNOW_KERNELS_MODEL_OPS_H_
#define WINNOW_KERNELS_MODEL_OPS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/experts.h"
#include "kernels/quantized.h"
#include "kernels/silu_mul.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

// ---- weights ----

// A weight matrix W [out_features][in_features] in the backend's own order.
class PackedMatrix {
 public:
  virtual ~PackedMatrix() = default;
  virtual int64_t out_features() const = 0;
  virtual int64_t in_features() const = 0;
  virtual size_t size_bytes() const = 0;  // what one product reads of it
};

// The weights as they lie in the file (host memory, row-major), to be packed or looked up.
struct HostMatrix {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
};

// Weights as they lie in the file, of any type. The rows are multiples of the type's blocks and may lie anywhere in host
// memory: their order is that of the outputs.
struct StoredMatrix {
  WeightType type = WeightType::kF32;
  int64_t cols = 0;
  std::vector<const std::byte*> rows;
  // Bits of kI8x128's integers: 4 where all lie from -8 to 7, so that a backend may keep them in half the room.
  int32_t integer_bits = 8;
};

// The end of a matrix product, after the sum: y = x Wᵀ (+ bias) (+ y).
struct MatmulEpilogue {
  const float* bias = nullptr;  // [out_features], device memory; null for none
  bool accumulate = false;      // add to what y holds (the residual)
};

struct NormMatmulArgs {
  Tensor x;                       // [m][in]
  const float* weight = nullptr;  // [in], of the norm
  float eps = 0;
  const PackedMatrix& w;
  Tensor normed;  // [m][in], scratch: what it holds afterwards is undefined
  Tensor y;       // [m][out]
  MatmulEpilogue epilogue = {};
};

// A layer's gated MLP: hidden += (silu(gate) * up) Wdownᵀ (+ bias), where gate and up are norm(hidden) Wᵀ (+ bias).
struct GatedMlpArgs {
  Tensor hidden;                       // [m][hidden]
  const float* norm_weight = nullptr;  // [hidden]
  float eps = 0;
  const PackedMatrix& gate_up;          // [2n][hidden]: gate, then up
  const float* gate_up_bias = nullptr;  // [2n], or null
  const PackedMatrix& down;             // [hidden][n]
  const float* down_bias = nullptr;     // [hidden], or null
  // Scratch: what it holds afterwards is undefined.
  Tensor normed;     // [m][hidden]
  Tensor gate_rows;  // [m][2n]
  Tensor activated;  // [m][n]
};

// The matrices of a layer's experts, as AddRoutedExperts has them.
class ExpertSet {
 public:
  virtual ~ExpertSet() = default;
};

struct ExpertMatrices {
  const PackedMatrix* gate_up = nullptr;  // [2n][hidden]: gate, then up
  const PackedMatrix* down = nullptr;     // [hidden][n]
  const float* gate_up_bias = nullptr;    // [2n], in the device's memory, or null
  const float* down_bias = nullptr;       // [hidden], the same
};

struct RoutedExpertsArgs {
  const ExpertSet& experts;
  int32_t per_token = 0;
  ExpertRouting routing = {};
  std::optional<ClampedSwiglu> clamped = {};  // gates are those of ClampedSwigluMul; else SiluMul's
  Tensor logits;                              // [m][experts]
  Tensor normed;                              // [m][hidden]: what experts read
  Tensor hidden;                              // [m][hidden]: what they are added to
  Tensor rows;  // [RoutedExpertRows()][hidden], scratch: what it holds afterwards is undefined
};

class ModelOps {
 public:
  // ---- weights ----

  // Stacks `parts` (equal cols) along the rows and packs them for Matmul. `compute` is kF32
  // (weights widened, exact) or kBF16 (activations rounded to bf16, f32 sums) or kF16 (f16 weights,
  // f32 activations). The sources may be unmapped afterwards.
  // Null if the memory cannot be had. REQUIRES: for kF16, f16 sources.
  virtual std::unique_ptr<PackedMatrix> Pack(std::span<const HostMatrix> parts, DType compute) = 0;

  // Whether PackStored takes blocks as they are.
  virtual bool ComputesStored() const { return false; }
  // As Pack, for products that compute with quantised blocks as they are (CPU: quantized_matmul.h; CUDA: cuda/block_order.h,
  // compute kBF16 only); plain parts are packed for `compute`. REQUIRES: ComputesStored(), and cols a multiple of 32 where blocks
  // are quantised.
  virtual std::unique_ptr<PackedMatrix> PackStored(std::span<const StoredMatrix> parts,
                                                   DType compute) {
    return nullptr;
  }

  // ---- rows of activations ----

  // out[i] = table[ids[i]] widened to f32, times `scale`. REQUIRES: 0 <= ids[i] < table.rows.
  virtual void EmbedRows(const HostMatrix& table, std::span<const int32_t> ids, float scale,
                         const Tensor& out) = 0;

  // y[m][out] = x[m][in] Wᵀ, then the epilogue.
  virtual void Matmul(const Tensor& x, const PackedMatrix& w, const Tensor& y,
                      const MatmulEpilogue& epilogue) = 0;

  // out[i] = x[i] / sqrt(mean(x[i]^2) + eps) * weight. out may be x.
  virtual void RmsNorm(const Tensor& x, const float* weight, float eps, const Tensor& out) = 0;

  // The same per head, in place: x [m][heads*d], weight [d] (Qwen3's QK norm).
  virtual void RmsNormHeads(const Tensor& x, int32_t head_dim, const float* weight, float eps) = 0;

  // y[i] += RmsNorm of x[i]. What x holds afterwards is undefined.
  virtual void AddRmsNorm(const Tensor& x, const float* weight, float eps, const Tensor& y) = 0;

  // out[m][n] = silu(gate) * up, where gate_up [m][2n] holds gate, then up; or gelu(gate) * up, by its tanh; or the clamped
  // gate times the clamped up and one (silu_mul.h). REQUIRES: alpha and limit > 0.
  virtual void SiluMul(const Tensor& gate_up, const Tensor& out) = 0;
  virtual void GeluTanhMul(const Tensor& gate_up, const Tensor& out) = 0;
  virtual void ClampedSwigluMul(const Tensor& gate_up, const ClampedSwiglu& by,
                                const Tensor& out) = 0;

  // ---- a layer of experts, beside its products (experts.h) ----

  // ids [m][per_token], in shared memory, and weights [m][per_token]: the experts that each row goes to, of logits [m][experts],
  // and how much of each. REQUIRES: 1 <= per_token <= experts <= kExpertsMax.
  virtual void RouteExperts(const Tensor& logits, const ExpertRouting& routing, int32_t* ids,
                            const Tensor& weights) = 0;

  // out[i] = x[rows[i]]. REQUIRES: 0 <= rows[i] < x.rows.
  virtual void GatherExpertRows(const Tensor& x, std::span<const int32_t> rows,
                                const Tensor& out) = 0;

  // y[i] += the sum over slots of weights[i][slot] * x[places[i * per_token + slot]]. REQUIRES: weights [m][per_token],
  // 0 <= places[i] < x.rows.
  virtual void AddExpertRows(const Tensor& x, std::span<const int32_t> places,
                             const Tensor& weights, const Tensor& y) = 0;

  // For AddRoutedExperts; null where the backend has no way for matrices of this kind, or no memory. They are not copied: REQUIRES:
  // they outlive it, and all have biases, or none.
  virtual std::unique_ptr<ExpertSet> MakeExpertSet(std::span<const ExpertMatrices> experts) {
    return nullptr;
  }

  // ---- several of these in one: the sum of its parts, to the bit; a backend may save what lies between them ----

  // Rows of scratch that AddRoutedExperts takes for so many slots, per_token for each row.
  virtual int64_t RoutedExpertRows(int64_t slots, int64_t experts) const { return slots; }
  // RouteExperts, each expert's Matmul and SiluMatmul of its rows, and AddExpertRows, where the host need not know what the
  // router chose. False, and nothing done: not for so many rows, with so little scratch, or for such gates.
  virtual bool AddRoutedExperts(const RoutedExpertsArgs& args) { return false; }

  // RmsNorm of x, then Matmul.
  virtual void NormMatmul(const NormMatmulArgs& args) {
    RmsNorm(args.x, args.weight, args.eps, args.normed);
    Matmul(args.normed, args.w, args.y, args.epilogue);
  }

  // SiluMul, then Matmul. `activated` [m][in] is scratch: what it holds afterwards is undefined.
  virtual void SiluMatmul(const Tensor& gate_up, const PackedMatrix& w, const Tensor& activated,
                          const Tensor& y, const MatmulEpilogue& epilogue) {
    SiluMul(gate_up, activated);
    Matmul(activated, w, y, epilogue);
  }

  // NormMatmul, then SiluMatmul.
  virtual void GatedMlp(const GatedMlpArgs& args) {
    NormMatmul({.x = args.hidden,
                .weight = args.norm_weight,
                .eps = args.eps,
                .w = args.gate_up,
                .normed = args.normed,
                .y = args.gate_rows,
                .epilogue = {.bias = args.gate_up_bias}});
    SiluMatmul(args.gate_rows, args.down, args.activated, args.hidden,
               {.bias = args.down_bias, .accumulate = true});
  }

 protected:
  ~ModelOps() = default;
};

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_MODEL_OPS_H_
