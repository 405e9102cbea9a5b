#include "engine/model/gguf_weights.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <vector>

#include "absl/strings/str_join.h"
#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "engine/model/model_family.h"

namespace winnow::engine {
namespace {

std::string Place(const GgufFile& file, const GgufTensor& tensor) {
  return Concat(file.path(), ": tensor ", ShortDump(std::string(tensor.name)), " at byte ",
                tensor.begin, ": ");
}

std::string SupportedTypes() {
  std::vector<const char*> names;
  for (int i = 0; i < kernels::kNumGgufTypes; ++i) {
    names.push_back(kernels::WeightTypeName(static_cast<kernels::WeightType>(i)));
  }
  return absl::StrJoin(names, ", ");
}

absl::StatusOr<WeightMatrix> CheckTensor(const GgufFile& file, const GgufTensor& tensor,
                                         const TensorSpec& spec, const ModelConfig& config) {
  std::vector<int64_t> expected = spec.GgufDims();
  std::vector<int64_t> shape(tensor.dims.begin(), tensor.dims.begin() + tensor.num_dims);
  // Last dimensions of 1 say nothing, and writers differ in them.
  for (std::vector<int64_t>* dims : {&expected, &shape}) {
    while (dims->size() > 1 && dims->back() == 1) dims->pop_back();
  }
  if (shape != expected) {
    return absl::InvalidArgumentError(
        Concat(Place(file, tensor), "dimensions [", absl::StrJoin(shape, ", "), "], expected [",
               absl::StrJoin(expected, ", "), "] by the file's keys"));
  }
  const std::optional<kernels::WeightType> type = WeightTypeOfGguf(tensor.type);
  if (!type) {
    return absl::UnimplementedError(Concat(Place(file, tensor), "type ",
                                           GgufTensorTypeName(tensor.type),
                                           " is not supported; winnow reads ", SupportedTypes()));
  }
  WeightMatrix matrix{.data = file.contents().Data(tensor).data(),
                      .type = *type,
                      .rows = std::max<int64_t>(spec.rows, 1),
                      .cols = spec.cols,
                      .first_row = spec.first_row + spec.expert * spec.rows};
  const bool interleaved = FamilyOf(config.family).gguf_interleaves;
  if (spec.rotary_heads > 0 && spec.rows == 0 && !kernels::PlainType(*type)) {
    return absl::UnimplementedError(Concat(Place(file, tensor), "a vector of type ",
                                           GgufTensorTypeName(tensor.type), " is not supported"));
  }
  SetHeadOrder(config, spec, interleaved, &matrix);
  return matrix;
}

// Makes the error for a tensor that is not there.
absl::Status MissingTensor(const GgufFile& file, const TensorSpec& spec) {
  // The first writers of experts gave each a tensor of its own: "ffn_gate.0.weight" for "ffn_gate_exps.weight".
  constexpr std::string_view kTogether = "_exps.weight";
  if (spec.num_experts != 0 && spec.gguf_name.ends_with(kTogether)) {
    const std::string of_first =
        Concat(spec.gguf_name.substr(0, spec.gguf_name.size() - kTogether.size()), ".0.weight");
    if (const GgufTensor* first = file.contents().FindTensor(of_first); first != nullptr) {
      return absl::UnimplementedError(
          Concat(Place(file, *first),
                 "experts in tensors of their own are not supported; a newer converter "
                 "writes them together, as ",
                 ShortDump(spec.gguf_name)));
    }
  }
  return absl::NotFoundError(
      Concat(file.path(), ": tensor ", ShortDump(spec.gguf_name), " is missing"));
}

}  // namespace

absl::StatusOr<Weights> LoadGgufWeights(const std::string& path, const ModelConfig& config) {
  Weights weights;
  WINNOW_ASSIGN_OR_RETURN(weights.gguf, GgufFile::Open(path));
  const GgufFile& file = *weights.gguf;
  std::set<std::string_view> known = {"rope_freqs.weight", "rope_factors_short.weight",
                                      "rope_factors_long.weight"};  // read by GgufModelConfig
  const std::vector<TensorSpec> specs = ModelTensors(config, &weights);
  for (const TensorSpec& spec : specs) {
    const GgufTensor* tensor = file.contents().FindTensor(spec.gguf_name);
    if (tensor == nullptr) return MissingTensor(file, spec);
    WINNOW_ASSIGN_OR_RETURN(*spec.matrix, CheckTensor(file, *tensor, spec, config));
    known.insert(tensor->name);
  }
  for (const GgufTensor& tensor : file.contents().tensors()) {
    if (known.contains(tensor.name) || IsOfPrediction(tensor.name, "blk.", config)) continue;
    return absl::InvalidArgumentError(Concat(Place(file, tensor), "no part of a ",
                                             config.architecture, " with ", config.num_layers(),
                                             " layers and the biases of its first"));
  }
  if (config.tie_word_embeddings) weights.lm_head = weights.embedding;
  return weights;
}

}  // namespace winnow::engine
