// A model's tensors, memory-mapped and checked against its configuration.
#ifndef WINNOW_ENGINE_MODEL_WEIGHTS_H_
#define WINNOW_ENGINE_MODEL_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/block_source.h"
#include "engine/model/gguf.h"
#include "engine/model/model_config.h"
#include "engine/model/safetensors.h"
#include "kernels/dtype.h"
#include "kernels/model_ops.h"
#include "kernels/quantized.h"

namespace winnow::engine {

// One matrix of a model as its file has it; a view. A vector is a matrix of one row; where its values are interleaved,
// of one column.
struct WeightMatrix {
  const void* data = nullptr;  // null: the model has no such tensor; at any address
  kernels::WeightType type = kernels::WeightType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  // The first row of its tensor that is the matrix's, where several share one, one behind the other. `data` is the tensor's
  // begin.
  int64_t first_row = 0;
  // Order in which the file has the rows of each head of Q and K. winnow rotates row j of a head together with row j + d/2.
  enum class HeadOrder : uint8_t {
    kRotated,      // in that order
    kInterleaved,  // GGUF's "llama": row 2j is row j here, and row 2j + 1 is row j + d/2
    kRotaryFirst,  // rows j and j + rotary_dim/2 rotate together
  };
  HeadOrder head_order = HeadOrder::kRotated;
  int32_t heads = 0;  // unless kRotated
  // In order: how many rows of the tensor lie between two of the matrix, and one.
  int64_t row_step = 1;
  // Unless kRotated: rows of a head that rotate, its first ones, even. Those that do not are behind them; here they are the ends
  // of either half.
  int32_t rotary_dim = 0;
  // A matrix in several tensors of a safetensors file, or transposed in one. `type` is then its blocks', or that of its values,
  // and `data` the tensor of its values. Else null.
  const BlockSource* source = nullptr;

  // Whether a backend can take it where it lies: plain values, rows in order.
  bool IsPlain() const {
    return kernels::PlainType(type).has_value() && head_order == HeadOrder::kRotated &&
           source == nullptr && row_step == 1;
  }
  // The same matrix for a backend. REQUIRES: IsPlain().
  kernels::HostMatrix host() const;
  // Row `row` of those that winnow counts, as float32: out [cols].
  void WidenRow(int64_t row, float* out) const;
  // The tensor's row that it is.
  int64_t FileRow(int64_t row) const;
  // Where that row lies in the file: WeightRowBytes(type, cols) bytes. REQUIRES: no source.
  const std::byte* RowInFile(int64_t row) const;
};

// One expert's.
struct ExpertWeights {
  WeightMatrix gate, up;            // [intermediate][hidden]
  WeightMatrix down;                // [hidden][intermediate]
  WeightMatrix gate_bias, up_bias;  // [intermediate][1], optional
  WeightMatrix down_bias;           // [hidden][1], optional
};

// Views into the mapped files; valid while the Weights live. An absent optional tensor has data == nullptr. Data may
// lie at any address: safetensors promises no alignment, and files of its first writers have none.
struct LayerWeights {
  WeightMatrix attention_norm;          // [1][hidden], of what attention reads; optional
  WeightMatrix q, k, v;                 // [H*d][hidden], [Hkv*d][hidden] twice
  WeightMatrix q_bias, k_bias, v_bias;  // [1][...], optional
  WeightMatrix q_norm,
      k_norm;  // [1][d]; [1][H*d] and [1][Hkv*d] of whole ones; optional; or of one column, as biases
  WeightMatrix o;                       // [hidden][H*d]
  WeightMatrix o_bias;                  // optional
  WeightMatrix sinks;                   // [1][H], optional
  WeightMatrix attention_out_norm;      // [1][hidden], of what attention gives; optional
  WeightMatrix mlp_norm, mlp_out_norm;  // the same of the MLP
  WeightMatrix gate,
      up;  // [intermediate][hidden]; of a layer of experts the shared one's, or absent, as is down
  WeightMatrix gate_bias, up_bias;  // optional
  WeightMatrix down;                // [hidden][intermediate]
  WeightMatrix down_bias;           // optional
  WeightMatrix router;              // [experts][hidden] of a layer of experts
  WeightMatrix router_bias;         // [1][experts], optional
  WeightMatrix correction;          // [1][experts], where ExpertsConfig::corrected
  WeightMatrix shared_gating;       // [1][hidden], where ExpertsConfig::shared_is_gated
  std::vector<ExpertWeights> experts;
};

// Movable; moving keeps the views valid.
struct Weights {
  WeightMatrix embedding;  // [vocab][hidden]
  std::vector<LayerWeights> layers;
  WeightMatrix final_norm;                              // [1][hidden]
  WeightMatrix lm_head;                                 // [vocab][hidden]; the embedding when tied
  std::vector<std::unique_ptr<SafetensorsFile>> files;  // of a directory
  std::unique_ptr<GgufFile> gguf;                       // or this
  std::vector<std::unique_ptr<BlockSource>> sources;    // matrices' own

  // Gives the pages that were read back to the system, for when the tensors have been copied: a process need not hold
  // its weights twice.
  void ReleasePages() const;
};

// Opens `model_path`: of a directory model.safetensors, or else the shards that model.safetensors.index.json names;
// or a GGUF file. Every tensor the configuration needs must be there with its shape and a supported type (BF16, F16,
// F32, in a GGUF file also those of kernels/quantized.h; types may be mixed). Tensors it does not know are refused
// unless they are known leftovers (rotary inv_freq, a tied lm_head, GGUF's rope_freqs, biases of zeros in GPTQ's files). The index and the shards must
// agree tensor by tensor.
// Where the configuration has a WeightScheme a matrix may be in its tensors instead; scales and the order of groups are
// checked. Errors name file, tensor and offset. NotFound: no weights, a shard or a tensor that is not there.
// Unimplemented: another type. InvalidArgument: everything else. Before all tensors are checked
// nothing is read but headers, and nothing is allocated but their contents.
absl::StatusOr<Weights> LoadWeights(const std::string& model_path, const ModelConfig& config);

// `from` for a backend: where it lies if it can be taken so, else as a copy in `*copy`, with its rows in order and
// quantised blocks as `dtype` (kF32 is exact). ResourceExhausted: no memory for the copy. REQUIRES: a dtype other than
// kF16 where blocks are quantised.
absl::StatusOr<kernels::HostMatrix> HostMatrixOf(const WeightMatrix& from, kernels::DType dtype,
                                                 std::unique_ptr<std::byte[]>* copy);

// Memory that such copies take at most at a time, while a decoder packs one product's weights after another.
int64_t PackingCopyBytes(const Weights& weights, kernels::DType dtype);

// What all tensors come to; a tied output embedding counts once.
struct WeightsSummary {
  int64_t parameters = 0;
  int64_t bytes = 0;  // as they lie in the files
  std::string dtype;  // of most values
};
WeightsSummary Summarize(const ModelConfig& config, const Weights& weights);

// A tensor that a configuration calls for.
struct TensorSpec {
  std::string name;            // "model.layers.0.self_attn.q_proj.weight"
  std::string gguf_name = {};  // "blk.0.attn_q.weight"
  int64_t rows = 0;            // 0: a vector of `cols`
  int64_t cols = 0;
  enum class Role { kMatrix, kEmbedding, kNorm, kBias, kRouter };
  Role role = Role::kMatrix;
  int32_t rotary_heads = 0;        // of Q and K: how many heads the rows are of
  WeightMatrix* matrix = nullptr;  // where in `weights` it belongs; null without weights
  // Matrices that share a tensor, which their names say: the tensor's rows, and which of them is this one's first. 0: its
  // tensor is its own.
  int64_t tensor_rows = 0, first_row = 0;
  // The place of an expert's matrix: a GGUF file has those of all experts in one tensor [num_experts][rows][cols].
  int32_t expert = 0, num_experts = 0;
  // A directory's tensor that all experts share: of biases [num_experts][outputs], of matrices [num_experts][outputs][cols], or
  // `transposed`, [num_experts][cols][outputs]. An expert's matrix is every `step`-th output of its own from `first` on. A bias has
  // `cols` of 1.
  struct Stack {
    int64_t outputs = 0;
    int32_t first = 0, step = 1;
    bool transposed = true;
  };
  std::optional<Stack> stack = {};

  // Its dimensions in a directory, and in a GGUF file, which counts from the innermost one.
  std::vector<int64_t> FileShape() const;
  std::vector<int64_t> GgufDims() const;
  int64_t FileRows() const { return tensor_rows != 0 ? tensor_rows : rows; }
};

// Says whether a tensor of this name is of layers that are passed over (ModelConfig::prediction_layers). `prefix`: what stands
// before a layer's number.
bool IsOfPrediction(std::string_view name, std::string_view prefix, const ModelConfig& config);

// All of them, in the order of the forward pass. With `weights` (whose layers are resized), says
// where each belongs.
std::vector<TensorSpec> ModelTensors(const ModelConfig& config, Weights* weights);
// As files have them: matrices that share a tensor are one. Without places.
std::vector<TensorSpec> FileTensors(const ModelConfig& config);

// Gives `matrix`, which a file has as `spec` says, the order of its rows. `interleaved`: the file has HeadOrder::kInterleaved.
// A bias becomes a matrix of one column. REQUIRES: then, a plain type.
void SetHeadOrder(const ModelConfig& config, const TensorSpec& spec, bool interleaved,
                  WeightMatrix* matrix);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_WEIGHTS_H_
