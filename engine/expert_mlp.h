// The MLP of a layer of experts: a router sends each row to some of them, and what these give is weighed and added to the
// residual stream, and so may be what one more gives, which all rows go to. Router and experts may have biases. Every product is the backend's own, of an expert's rows at a time, so a layer's matrices may have any form.
//
// A GPU routes rows by itself (AddRoutedExperts), where its kernels have a way for matrices of that kind. Elsewhere the host decides
// what is multiplied: it reads the ids that the router chose, which on a device is a wait in each such layer.
// A row's bits do not depend on others: products do not, wherever a row stands among those of its expert, and its experts' rows
// are added in the order of its own slots (kernels/experts.h).
#ifndef WINNOW_ENGINE_EXPERT_MLP_H_
#define WINNOW_ENGINE_EXPERT_MLP_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/model_config.h"
#include "kernels/backend.h"

namespace winnow::engine {

// Slots of rows by expert, those of one side by side in the order of rows.
struct ExpertGroups {
  std::vector<int32_t> rows;    // [m * per_token] the row at each place
  std::vector<int32_t> places;  // [m * per_token] the place of each row's each slot
  std::vector<int32_t> first;   // [experts + 1] each one's first place; last, how many there are
};

// `ids` [m][per_token]: experts of rows. REQUIRES: ids of experts that there are.
void GroupByExpert(std::span<const int32_t> ids, int32_t per_token, ExpertGroups* groups);

class ExpertMlp {
 public:
  struct Expert {
    std::unique_ptr<kernels::PackedMatrix> gate_up;  // [2*intermediate][hidden]: gate, then up
    std::unique_ptr<kernels::PackedMatrix> down;     // [hidden][intermediate]
  };
  struct Layer {
    // Router and biases are the same in every form of the experts' weights: LayerBeside shares them.
    std::shared_ptr<kernels::PackedMatrix> router;         // [experts][hidden]
    kernels::Buffer router_bias;                           // [experts], or empty
    kernels::Buffer correction;                            // [experts], or empty
    std::shared_ptr<kernels::PackedMatrix> shared_gating;  // [1][hidden], or null
    std::vector<Expert> experts;
    Expert shared;  // nulls where there is none
    // Biases of all experts, or empty.
    kernels::Buffer gate_up_bias;             // [experts][2*intermediate]: gate, then up
    kernels::Buffer down_bias;                // [experts][hidden]
    std::unique_ptr<kernels::ExpertSet> set;  // of them; null where the backend has none
  };

  // For up to `rows_max` rows at a time; Add allocates nothing. ResourceExhausted: with bytes asked for.
  static absl::StatusOr<std::unique_ptr<ExpertMlp>> Create(const ModelConfig& config,
                                                           kernels::Backend& backend,
                                                           int64_t rows_max);

  // A layer without experts yet whose router and biases are `layer`'s, which must outlive it.
  static Layer LayerBeside(const Layer& layer);
  // The expert's matrices and biases, for MakeExpertSet.
  static kernels::ExpertMatrices MatricesOf(const Layer& layer, int32_t expert);

  // hidden [m][hidden] += the layer of normed [m][hidden]. gate_up [m][2n or more] and activated [m][n or more] are
  // scratch, n: the largest intermediate size. Where the device fails meanwhile the rest is left out.
  void Add(const Layer& layer, const kernels::Tensor& normed, const kernels::Tensor& gate_up,
           const kernels::Tensor& activated, const kernels::Tensor& hidden);

  size_t scratch_bytes() const { return scratch_bytes_; }

 private:
  ExpertMlp(const ExpertsConfig& config, kernels::Backend& backend)
      : config_(config), backend_(backend) {}
  void AddRouted(const Layer& layer, const kernels::Tensor& normed, const kernels::Tensor& gate_up,
                 const kernels::Tensor& activated, const kernels::Tensor& hidden);
  void AddShared(const Layer& layer, const kernels::Tensor& normed, const kernels::Tensor& gate_up,
                 const kernels::Tensor& activated, const kernels::Tensor& hidden);

  const ExpertsConfig config_;
  kernels::Backend& backend_;
  size_t scratch_bytes_ = 0;
  kernels::Buffer logits_;   // [rows_max][experts]
  kernels::Buffer weights_;  // [rows_max][per_token]
  // [num_rows_][hidden] by place: what experts read, and then, in its place, what they give.
  kernels::Buffer rows_;
  int64_t num_rows_ = 0;              // rows_max * per_token, or more where a device routes
  kernels::Buffer ids_;               // [rows_max][per_token] in shared memory
  ExpertGroups groups_;               // of the call
  std::vector<int32_t> row_numbers_;  // [rows_max] 0, 1, 2, ...
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_EXPERT_MLP_H_
