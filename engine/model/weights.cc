#include "engine/model/weights.h"

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_join.h"
#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "engine/model/float8_matrix.h"
#include "engine/model/gguf_weights.h"
#include "engine/model/grouped_integers_tensors.h"
#include "engine/model/model_family.h"
#include "engine/model/mxfp4_matrix.h"
#include "engine/model/stacked_matrix.h"
#include "kernels/check.h"

namespace winnow::engine {
namespace {

using kernels::DType;

// A dense model of 1,024 layers has an index of 2 MB, one of 94 layers with 128 experts in 4 bits of 12 MB; as a document tree it
// costs some 20 times its text.
constexpr size_t kIndexBytesMax = 24 << 20;
constexpr size_t kShardsMax = 4096;
constexpr std::string_view kLmHead = "lm_head.weight";

bool Exists(const std::string& path) {
  struct stat info = {};
  return stat(path.c_str(), &info) == 0;
}

// A file and the tensors that the index places in it.
struct Shard {
  std::string name;
  std::vector<std::string> tensors;
};

// A shard's name must be that of a file in the model's own folder.
bool IsPlainFileName(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name[0] != '.' && name.find('/') == name.npos &&
         name.find('\0') == name.npos && name.find("..") == name.npos &&
         name.ends_with(".safetensors");
}

absl::StatusOr<std::vector<Shard>> ReadIndex(const std::string& path) {
  WINNOW_ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonObject(path, kIndexBytesMax));
  const auto map = json.find("weight_map");
  if (map == json.end() || !map->is_object() || map->empty()) {
    return absl::InvalidArgumentError(
        Concat(path, ": weight_map: must be an object that is not empty"));
  }
  std::map<std::string, std::vector<std::string>> by_file;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string() || !IsPlainFileName(file.get_ref<const std::string&>())) {
      return absl::InvalidArgumentError(
          Concat(path, ": weight_map: tensor ", ShortDump(tensor), " is in ", ShortDump(file),
                 ", which is not the name of a .safetensors file beside the index"));
    }
    by_file[file.get<std::string>()].push_back(tensor);
  }
  if (by_file.size() > kShardsMax) {
    return absl::InvalidArgumentError(
        Concat(path, ": weight_map: more than ", kShardsMax, " shards"));
  }
  std::vector<Shard> shards;
  shards.reserve(by_file.size());
  for (auto& [name, tensors] : by_file) shards.push_back({name, std::move(tensors)});
  return shards;
}

// Every tensor of the index is in its shard and the shard has no other: so none is in two shards.
absl::Status CheckShard(const std::string& index_path, const Shard& shard,
                        const SafetensorsFile& file) {
  absl::flat_hash_set<std::string_view> indexed(shard.tensors.begin(), shard.tensors.end());
  for (const std::string& tensor : shard.tensors) {
    if (file.header().Find(tensor)) continue;
    return absl::NotFoundError(Concat(file.path(), ": tensor ", ShortDump(tensor),
                                      " is missing, which ", index_path, " places here"));
  }
  for (size_t i = 0; i < file.header().num_tensors(); ++i) {
    const SafetensorsEntry entry = file.header().tensor(i);
    if (indexed.contains(entry.name)) continue;
    return absl::InvalidArgumentError(Concat(file.path(), ": tensor ", ShortDump(entry.name),
                                             " at byte ", file.header().data_offset() + entry.begin,
                                             " is not placed here by ", index_path));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::unique_ptr<SafetensorsFile>>> OpenFiles(
    const std::string& model_dir) {
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  const std::string single = Concat(model_dir, "/model.safetensors");
  const std::string index = Concat(model_dir, "/model.safetensors.index.json");
  for (const std::string& path : {single, index}) WINNOW_RETURN_IF_ERROR(CheckLink(path));
  if (Exists(single)) {
    WINNOW_ASSIGN_OR_RETURN(files.emplace_back(), SafetensorsFile::Open(single));
    return files;
  }
  if (!Exists(index)) {
    return absl::NotFoundError(
        Concat(model_dir, ": no model.safetensors and no model.safetensors.index.json",
               Exists(Concat(model_dir, "/pytorch_model.bin")) ||
                       Exists(Concat(model_dir, "/pytorch_model.bin.index.json"))
                   ? " (pytorch_model.bin is a pickle, which winnow does not read)"
                   : ""));
  }
  WINNOW_ASSIGN_OR_RETURN(const std::vector<Shard> shards, ReadIndex(index));
  for (const Shard& shard : shards) {
    const std::string path = Concat(model_dir, "/", shard.name);
    WINNOW_RETURN_IF_ERROR(CheckLink(path));
    absl::StatusOr<std::unique_ptr<SafetensorsFile>> file = SafetensorsFile::Open(path);
    if (absl::IsNotFound(file.status())) {
      return absl::NotFoundError(Concat(file.status().message(), " (", index, " names it, for ",
                                        shard.tensors.size(), " tensors, the first ",
                                        ShortDump(shard.tensors.front()), ")"));
    }
    WINNOW_RETURN_IF_ERROR(file.status());
    WINNOW_RETURN_IF_ERROR(CheckShard(index, shard, **file));
    files.push_back(*std::move(file));
  }
  return files;
}

// The name by which the model knows a tensor of a file; "": what nobody reads. Names of text parts are
// those of transformers since 4.52, or of the versions before.
std::string NameInModel(std::string_view name, const ModelConfig& config) {
  if (name.ends_with(".rotary_emb.inv_freq")) return "";
  if (IsOfPrediction(name, "model.layers.", config)) return "";
  if (!config.is_text_part) {
    return config.tie_word_embeddings && name == kLmHead ? "" : std::string(name);
  }
  // `rest` is the name without "model." at its front.
  constexpr std::string_view kModel = "model.", kText = "language_model.";
  const bool has_model = name.starts_with(kModel);
  const std::string_view rest = name.substr(has_model ? kModel.size() : 0);
  if (rest.starts_with(kText)) return Concat(has_model ? kModel : "", rest.substr(kText.size()));
  for (const std::string_view of_images : {"vision_tower.", "multi_modal_projector.", "visual."}) {
    if (rest.starts_with(of_images)) return "";
  }
  return std::string(name);
}

std::optional<DType> ToDType(std::string_view name) {
  if (name == "BF16") return DType::kBF16;
  if (name == "F16") return DType::kF16;
  if (name == "F32") return DType::kF32;
  return std::nullopt;
}

constexpr std::string_view kFloat8 = "F8_E4M3";

std::string ShapeText(const auto& shape) { return Concat("[", absl::StrJoin(shape, ", "), "]"); }

absl::StatusOr<WeightMatrix> CheckTensor(const SafetensorsFile& file, const SafetensorsEntry& entry,
                                         const TensorSpec& spec) {
  const std::vector<int64_t> expected = spec.FileShape();
  if (!std::equal(expected.begin(), expected.end(), entry.shape.begin(), entry.shape.end())) {
    return absl::InvalidArgumentError(Concat(TensorPlace(file, entry), "shape ",
                                             ShapeText(entry.shape), ", expected ",
                                             ShapeText(expected), " by config.json"));
  }
  const std::optional<DType> dtype = ToDType(entry.dtype);
  if (!dtype) {
    return absl::UnimplementedError(
        Concat(TensorPlace(file, entry), "dtype ", entry.dtype, ", expected BF16, F16 or F32",
               entry.dtype == kFloat8 ? " (8-bit floats need a quantization_config)" : ""));
  }
  return WeightMatrix{file.Data(entry).data(), kernels::WeightTypeOf(*dtype),
                      std::max<int64_t>(spec.rows, 1), spec.cols};
}

// The tensor that `spec` shares with all experts: plain, or by a scheme in several. NotFound: it is neither.
absl::StatusOr<WeightMatrix> TakeStack(const std::optional<WeightScheme>& scheme,
                                       const TensorSpec& spec, const std::string& file_of_missing,
                                       const TakeTensor& take,
                                       std::vector<std::unique_ptr<BlockSource>>* sources) {
  const std::optional<FileTensor> found = take(spec.name);
  const bool is_bias = spec.role == TensorSpec::Role::kBias;
  if (found.has_value()) {
    WINNOW_ASSIGN_OR_RETURN(WeightMatrix matrix, CheckTensor(*found->file, found->entry, spec));
    if (is_bias || !spec.stack->transposed) return matrix;
    sources->push_back(std::make_unique<StackedMatrix>(
        matrix.data, *kernels::PlainType(matrix.type), spec.cols, spec.stack->outputs));
    matrix.source = sources->back().get();
    return matrix;
  }
  if (is_bias || !scheme.has_value() || !std::holds_alternative<Mxfp4Scheme>(*scheme)) {
    return absl::NotFoundError(
        Concat(file_of_missing, ": tensor ", ShortDump(spec.name), " is missing"));
  }
  WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<Mxfp4Matrix> matrix,
                          Mxfp4Matrix::Take(spec.name, file_of_missing, spec.num_experts,
                                            spec.stack->outputs, spec.cols, take));
  const WeightMatrix whole{.data = matrix->blocks(),
                           .type = matrix->block_type(),
                           .rows = spec.rows,
                           .cols = spec.cols,
                           .source = matrix.get()};
  sources->push_back(std::move(matrix));
  return whole;
}

// Takes a matrix whose values are no plain ones, by the scheme; `found`: the tensor of its plain name, if there is one.
// False: it is plain, or is not there.
absl::StatusOr<bool> TakeQuantized(const WeightScheme& scheme, const TensorSpec& spec,
                                   const std::optional<FileTensor>& found, const TakeTensor& take,
                                   std::vector<std::unique_ptr<BlockSource>>* sources) {
  const std::string_view base = std::string_view(spec.name).substr(0, spec.name.rfind('.'));
  std::unique_ptr<BlockSource> source;
  const void* values = nullptr;
  if (std::holds_alternative<Mxfp4Scheme>(scheme)) return false;  // TakeStack has those
  if (const auto* integers = std::get_if<IntegerScheme>(&scheme)) {
    WINNOW_ASSIGN_OR_RETURN(
        auto matrix, TakeGroupedIntegers(*integers, base, found, spec.FileRows(), spec.cols, take));
    if (matrix == nullptr) return false;
    values = matrix->integers;
    source = std::move(matrix);
  } else {
    if (!found.has_value() || found->entry.dtype != kFloat8) return false;
    WINNOW_ASSIGN_OR_RETURN(source, Float8Matrix::Take(std::get<Float8Scheme>(scheme), base, *found,
                                                       spec.FileRows(), spec.cols, take));
    values = found->data();
  }
  *spec.matrix = {.data = values,
                  .type = source->block_type(),
                  .rows = spec.rows,
                  .cols = spec.cols,
                  .source = source.get()};
  sources->push_back(std::move(source));
  return true;
}

// Whether it is a bias of zeros in a GPTQ file, whose writers gave every matrix one, the model's or not.
bool IsEmptyBias(const FileTensor& tensor, const ModelConfig& config) {
  const auto* scheme = config.weight_scheme.has_value()
                           ? std::get_if<IntegerScheme>(&*config.weight_scheme)
                           : nullptr;
  if (scheme == nullptr || scheme->layout != IntegerScheme::Layout::kGptq ||
      !tensor.entry.name.ends_with(".bias") || tensor.entry.shape.size() != 1) {
    return false;
  }
  const std::span<const std::byte> bytes = tensor.file->Data(tensor.entry);
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

// Makes `matrix`, of a whole tensor, the part of it that `spec` asks for.
void SetPart(const ModelConfig& config, const TensorSpec& spec, WeightMatrix* matrix) {
  if (spec.rows != 0) matrix->rows = spec.rows;
  matrix->first_row = spec.first_row;
  if (spec.stack.has_value()) {
    matrix->first_row = spec.expert * spec.stack->outputs + spec.stack->first;
    matrix->row_step = spec.stack->step;
  }
  SetHeadOrder(config, spec, FamilyOf(config.family).interleaves, matrix);
}

// The tensors of one layer.
class LayerTensors {
 public:
  LayerTensors(int32_t layer, std::vector<TensorSpec>* specs)
      : prefix_(Concat("model.layers.", layer, ".")),
        gguf_prefix_(Concat("blk.", layer, ".")),
        specs_(specs) {}

  void Norm(const TensorName& name, int64_t size, WeightMatrix* matrix, int32_t rotary_heads = 0) {
    Add(name, ".weight", 0, size, TensorSpec::Role::kNorm, rotary_heads, matrix);
  }
  void Linear(const TensorName& name, int64_t rows, int64_t cols, bool has_bias,
              WeightMatrix* matrix, WeightMatrix* bias, int32_t rotary_heads = 0) {
    Add(name, ".weight", rows, cols, TensorSpec::Role::kMatrix, rotary_heads, matrix);
    if (has_bias) Add(name, ".bias", 0, rows, TensorSpec::Role::kBias, rotary_heads, bias);
  }
  void Experts(const LayerTensorNames& names, const ExpertsConfig& config, int64_t hidden,
               bool has_biases, LayerWeights* to) {
    using Role = TensorSpec::Role;
    const bool stacked = names.stacks != LayerTensorNames::Stacks::kNone;
    WINNOW_CHECK(stacked || !has_biases);  // others have none
    Add(names.router, ".weight", config.count, hidden, Role::kRouter, 0, &to->router);
    if (has_biases) Add(names.router, ".bias", 0, config.count, Role::kBias, 0, &to->router_bias);
    to->experts.resize(config.count);
    if (config.corrected) {
      Add({names.correction.safetensors, Concat(names.correction.gguf, ".bias")}, "",
          names.correction_dims == 2 ? 1 : 0, config.count, Role::kBias, 0, &to->correction);
    }
    if (const int64_t inner = config.shared_intermediate_size; inner > 0) {
      Linear(names.shared_gate, inner, hidden, false, &to->gate, nullptr);
      Linear(names.shared_up, inner, hidden, false, &to->up, nullptr);
      Linear(names.shared_down, hidden, inner, false, &to->down, nullptr);
    }
    if (config.shared_is_gated) {
      Add(names.shared_gating, ".weight", 1, hidden, Role::kRouter, 0, &to->shared_gating);
    }
    if (stacked) return Stacks(names, config, hidden, has_biases, to);
    for (int32_t expert = 0; expert < config.count; ++expert) {
      ExpertWeights& of = to->experts[expert];
      const auto add = [&](const TensorName& name, int64_t rows, int64_t cols,
                           WeightMatrix* matrix) {
        const std::string of_expert = Concat(names.experts, ".", expert, ".", name.safetensors);
        Add({of_expert, name.gguf}, ".weight", rows, cols, Role::kMatrix, 0, matrix);
        specs_->back().expert = expert;
        specs_->back().num_experts = config.count;
      };
      add(names.expert_gate, config.intermediate_size, hidden, &of.gate);
      add(names.expert_up, config.intermediate_size, hidden, &of.up);
      add(names.expert_down, hidden, config.intermediate_size, &of.down);
    }
  }
  // Experts() where a directory has them in stacks. Matrices of a tensor follow each other.
  void Stacks(const LayerTensorNames& names, const ExpertsConfig& config, int64_t hidden,
              bool has_biases, LayerWeights* to) {
    const int32_t inner = config.intermediate_size;
    const bool in_turn = names.stacks == LayerTensorNames::Stacks::kInTurn;
    const bool transposed = names.stacks != LayerTensorNames::Stacks::kRows;
    const TensorSpec::Stack gates = {2 * inner, 0, in_turn ? 2 : 1, transposed};
    const TensorSpec::Stack ups = {2 * inner, in_turn ? 1 : inner, gates.step, transposed};
    const TensorSpec::Stack downs = {hidden, 0, 1, transposed};
    const auto add = [&](const TensorName& name, bool is_bias, int64_t rows, int64_t cols,
                         const TensorSpec::Stack& stack, int32_t expert, WeightMatrix* matrix) {
      const std::string_view suffix = is_bias ? "_bias" : "";
      specs_->push_back(
          {.name = Concat(prefix_, names.experts, ".", name.safetensors, suffix),
           .gguf_name = Concat(gguf_prefix_, name.gguf, is_bias ? ".bias" : ".weight"),
           .rows = rows,
           .cols = is_bias ? 1 : cols,
           .role = is_bias ? TensorSpec::Role::kBias : TensorSpec::Role::kMatrix,
           .matrix = matrix,
           .expert = expert,
           .num_experts = config.count,
           .stack = stack});
    };
    for (const bool is_bias : {false, true}) {
      if (is_bias && !has_biases) break;
      for (int32_t e = 0; e < config.count; ++e) {
        ExpertWeights& of = to->experts[e];
        add(names.expert_gate, is_bias, inner, hidden, gates, e,
            is_bias ? &of.gate_bias : &of.gate);
        add(names.expert_up, is_bias, inner, hidden, ups, e, is_bias ? &of.up_bias : &of.up);
      }
      for (int32_t e = 0; e < config.count; ++e) {
        ExpertWeights& of = to->experts[e];
        add(names.expert_down, is_bias, hidden, inner, downs, e,
            is_bias ? &of.down_bias : &of.down);
      }
    }
  }
  void Sinks(const TensorName& name, int64_t heads, WeightMatrix* matrix) {
    Add({name.safetensors, Concat(name.gguf, ".weight")}, "", 0, heads, TensorSpec::Role::kBias, 0,
        matrix);
  }
  // Matrices [.rows][cols] that share a tensor.
  struct Part {
    int64_t rows = 0;
    WeightMatrix* matrix = nullptr;
    int32_t rotary_heads = 0;
  };
  void Shared(const TensorName& name, int64_t cols, std::initializer_list<Part> parts) {
    int64_t tensor_rows = 0, first_row = 0;
    for (const Part& part : parts) tensor_rows += part.rows;
    for (const Part& part : parts) {
      Add(name, ".weight", part.rows, cols, TensorSpec::Role::kMatrix, part.rotary_heads,
          part.matrix);
      specs_->back().tensor_rows = tensor_rows;
      specs_->back().first_row = first_row;
      first_row += part.rows;
    }
  }

 private:
  void Add(const TensorName& name, std::string_view suffix, int64_t rows, int64_t cols,
           TensorSpec::Role role, int32_t rotary_heads, WeightMatrix* matrix) {
    specs_->push_back({.name = Concat(prefix_, name.safetensors, suffix),
                       .gguf_name = Concat(gguf_prefix_, name.gguf, suffix),
                       .rows = rows,
                       .cols = cols,
                       .role = role,
                       .rotary_heads = rotary_heads,
                       .matrix = matrix});
  }
  std::string prefix_, gguf_prefix_;
  std::vector<TensorSpec>* specs_;
};

}  // namespace

bool IsOfPrediction(std::string_view name, std::string_view prefix, const ModelConfig& config) {
  if (config.prediction_layers == 0 || !name.starts_with(prefix)) return false;
  const std::string_view rest = name.substr(prefix.size());
  int32_t layer = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), layer);
  if (error != std::errc() || end == rest.data() + rest.size() || *end != '.') return false;
  return layer >= config.num_layers() && layer < config.num_layers() + config.prediction_layers;
}

std::vector<TensorSpec> ModelTensors(const ModelConfig& config, Weights* weights) {
  using Role = TensorSpec::Role;
  std::vector<TensorSpec> specs;
  Weights unused;  // so that the code below need not ask whether there are weights
  Weights& to = weights != nullptr ? *weights : unused;
  to.layers.resize(config.num_layers());

  const int64_t hidden = config.hidden_size, intermediate = config.intermediate_size,
                d = config.head_dim;
  const int64_t q_rows = config.num_heads * d, kv_rows = config.num_kv_heads * d;
  specs.push_back({.name = "model.embed_tokens.weight",
                   .gguf_name = "token_embd.weight",
                   .rows = config.vocab_size,
                   .cols = hidden,
                   .role = Role::kEmbedding,
                   .matrix = &to.embedding});
  const LayerTensorNames& names = *FamilyOf(config.family).tensors;
  for (int32_t i = 0; i < config.num_layers(); ++i) {
    const LayerSpec& spec = config.layers[i];
    LayerWeights& to_layer = to.layers[i];
    LayerTensors tensors(i, &specs);
    if (spec.NormsBefore()) tensors.Norm(names.attention_norm, hidden, &to_layer.attention_norm);
    if (names.q.safetensors == names.k.safetensors) {
      tensors.Shared(names.q, hidden,
                     {{.rows = q_rows, .matrix = &to_layer.q, .rotary_heads = config.num_heads},
                      {.rows = kv_rows, .matrix = &to_layer.k, .rotary_heads = config.num_kv_heads},
                      {.rows = kv_rows, .matrix = &to_layer.v}});
    } else {
      tensors.Linear(names.q, q_rows, hidden, spec.qkv_bias, &to_layer.q, &to_layer.q_bias,
                     config.num_heads);
      tensors.Linear(names.k, kv_rows, hidden, spec.qkv_bias, &to_layer.k, &to_layer.k_bias,
                     config.num_kv_heads);
      tensors.Linear(names.v, kv_rows, hidden, spec.qkv_bias, &to_layer.v, &to_layer.v_bias);
    }
    if (spec.qk_norm) {
      // Their values are in the order of the rows that they norm.
      const int32_t q_heads = spec.qk_norm_whole ? config.num_heads : 1,
                    k_heads = spec.qk_norm_whole ? config.num_kv_heads : 1;
      tensors.Norm(names.q_norm, q_heads * d, &to_layer.q_norm, q_heads);
      tensors.Norm(names.k_norm, k_heads * d, &to_layer.k_norm, k_heads);
    }
    tensors.Linear(names.o, hidden, q_rows, spec.o_bias, &to_layer.o, &to_layer.o_bias);
    if (spec.sinks) tensors.Sinks(names.sinks, config.num_heads, &to_layer.sinks);
    if (spec.NormsAfter()) {
      tensors.Norm(names.attention_out_norm, hidden, &to_layer.attention_out_norm);
      tensors.Norm(names.mlp_out_norm, hidden, &to_layer.mlp_out_norm);
    }
    if (spec.NormsBefore()) tensors.Norm(names.mlp_norm, hidden, &to_layer.mlp_norm);
    if (spec.mlp == LayerSpec::Mlp::kExperts) {
      tensors.Experts(names, config.experts, hidden, spec.mlp_bias, &to_layer);
      continue;
    }
    if (names.gate.safetensors == names.up.safetensors) {
      tensors.Shared(names.gate, hidden,
                     {{.rows = intermediate, .matrix = &to_layer.gate},
                      {.rows = intermediate, .matrix = &to_layer.up}});
    } else {
      tensors.Linear(names.gate, intermediate, hidden, spec.mlp_bias, &to_layer.gate,
                     &to_layer.gate_bias);
      tensors.Linear(names.up, intermediate, hidden, spec.mlp_bias, &to_layer.up,
                     &to_layer.up_bias);
    }
    tensors.Linear(names.down, hidden, intermediate, spec.mlp_bias, &to_layer.down,
                   &to_layer.down_bias);
  }
  specs.push_back({.name = "model.norm.weight",
                   .gguf_name = "output_norm.weight",
                   .cols = hidden,
                   .role = Role::kNorm,
                   .matrix = &to.final_norm});
  if (!config.tie_word_embeddings) {
    specs.push_back({.name = std::string(kLmHead),
                     .gguf_name = "output.weight",
                     .rows = config.vocab_size,
                     .cols = hidden,
                     .role = Role::kEmbedding,
                     .matrix = &to.lm_head});
  }
  if (weights == nullptr) {
    for (TensorSpec& spec : specs) spec.matrix = nullptr;
  }
  return specs;
}

std::vector<int64_t> TensorSpec::FileShape() const {
  if (!stack.has_value()) {
    return rows != 0 ? std::vector<int64_t>{FileRows(), cols} : std::vector<int64_t>{cols};
  }
  if (role == Role::kBias) return {num_experts, stack->outputs};
  if (!stack->transposed) return {num_experts, stack->outputs, cols};
  return {num_experts, cols, stack->outputs};
}

std::vector<int64_t> TensorSpec::GgufDims() const {
  std::vector<int64_t> dims;
  if (!stack.has_value() || role != Role::kBias) dims.push_back(cols);
  if (rows != 0) dims.push_back(FileRows());
  if (num_experts != 0) dims.push_back(num_experts);
  return dims;
}

std::vector<TensorSpec> FileTensors(const ModelConfig& config) {
  std::vector<TensorSpec> tensors;
  for (TensorSpec& spec : ModelTensors(config, nullptr)) {
    // The tensor came with its first matrix.
    if (spec.first_row != 0) continue;
    if (spec.stack.has_value() && (spec.expert != 0 || spec.stack->first != 0)) continue;
    if (spec.tensor_rows != 0) {
      spec.rows = std::exchange(spec.tensor_rows, 0);
      spec.rotary_heads = 0;  // of a part
    }
    tensors.push_back(std::move(spec));
  }
  return tensors;
}

void Weights::ReleasePages() const {
  for (const auto& file : files) file->ReleasePages();
  if (gguf != nullptr) gguf->ReleasePages();
}

WeightsSummary Summarize(const ModelConfig& config, const Weights& weights) {
  WeightsSummary summary;
  std::map<std::string, int64_t> values_of_dtype;
  // ModelTensors takes the addresses of the views and changes nothing: the layers have their number.
  for (const TensorSpec& spec : ModelTensors(config, const_cast<Weights*>(&weights))) {
    const WeightMatrix& matrix = *spec.matrix;
    const int64_t values = matrix.rows * matrix.cols;
    summary.parameters += values;
    summary.bytes +=
        matrix.rows * static_cast<int64_t>(kernels::WeightRowBytes(matrix.type, matrix.cols));
    values_of_dtype[kernels::WeightTypeName(matrix.type)] += values;
  }
  summary.dtype = std::max_element(values_of_dtype.begin(), values_of_dtype.end(),
                                   [](const auto& a, const auto& b) { return a.second < b.second; })
                      ->first;
  return summary;
}

absl::StatusOr<Weights> LoadWeights(const std::string& model_path, const ModelConfig& config) {
  if (IsGgufPath(model_path)) return LoadGgufWeights(model_path, config);
  Weights weights;
  WINNOW_ASSIGN_OR_RETURN(weights.files, OpenFiles(model_path));
  absl::flat_hash_map<std::string, FileTensor> tensors;  // by their names in the model
  for (const auto& file : weights.files) {
    for (size_t i = 0; i < file->header().num_tensors(); ++i) {
      const SafetensorsEntry entry = file->header().tensor(i);
      std::string name = NameInModel(entry.name, config);
      if (name.empty()) continue;
      const auto [same, is_new] = tensors.emplace(std::move(name), FileTensor{file.get(), entry});
      if (is_new) continue;
      return absl::InvalidArgumentError(Concat(TensorPlace(*file, entry), "is the same as ",
                                               ShortDump(std::string(same->second.entry.name))));
    }
  }

  const auto take = [&](const std::string& name) -> std::optional<FileTensor> {
    const auto found = tensors.find(name);
    if (found == tensors.end()) return std::nullopt;
    const FileTensor tensor = found->second;
    tensors.erase(found);
    return tensor;
  };
  std::vector<TensorSpec> specs = ModelTensors(config, &weights);
  const std::string file_of_missing =
      weights.files.size() == 1 ? weights.files[0]->path() : model_path;
  WeightMatrix shared;  // the tensor of several matrices that was taken last, and its name
  std::string_view shared_name;
  for (const TensorSpec& spec : specs) {
    if (spec.first_row != 0 || (spec.stack.has_value() && spec.name == shared_name)) {
      *spec.matrix = shared;
      SetPart(config, spec, spec.matrix);
      continue;
    }
    shared_name = spec.name;
    if (spec.stack.has_value()) {
      WINNOW_ASSIGN_OR_RETURN(
          shared, TakeStack(config.weight_scheme, spec, file_of_missing, take, &weights.sources));
      *spec.matrix = shared;
      SetPart(config, spec, spec.matrix);
      continue;
    }
    const std::optional<FileTensor> found = take(spec.name);
    bool taken = false;
    // Rows of the embedding are looked up one by one, where the file has them.
    if (config.weight_scheme.has_value() && spec.rows != 0 && spec.matrix != &weights.embedding) {
      WINNOW_ASSIGN_OR_RETURN(
          taken, TakeQuantized(*config.weight_scheme, spec, found, take, &weights.sources));
    }
    if (!taken) {
      if (!found.has_value()) {
        return absl::NotFoundError(
            Concat(file_of_missing, ": tensor ", ShortDump(spec.name), " is missing"));
      }
      WINNOW_ASSIGN_OR_RETURN(*spec.matrix, CheckTensor(*found->file, found->entry, spec));
    }
    shared = *spec.matrix;
    SetPart(config, spec, spec.matrix);
  }
  absl::erase_if(tensors, [&](const auto& tensor) { return IsEmptyBias(tensor.second, config); });
  if (!tensors.empty()) {
    // The first in the files' order, so that the message does not depend on the hash.
    const auto first =
        std::min_element(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
          return std::pair(a.second.file->path(), a.second.entry.begin) <
                 std::pair(b.second.file->path(), b.second.entry.begin);
        });
    return absl::InvalidArgumentError(Concat(
        TensorPlace(*first->second.file, first->second.entry), "no part of a ", config.architecture,
        " with ", config.num_layers(), " layers and the biases of config.json"));
  }
  if (config.tie_word_embeddings) weights.lm_head = weights.embedding;
  return weights;
}

}  // namespace winnow::engine
