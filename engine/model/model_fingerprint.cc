#include "engine/model/model_fingerprint.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "engine/model/rope.h"
#include "fmt/format.h"
#include "fmt/ranges.h"

namespace winnow::engine {
namespace {

constexpr uint64_t kBytesPerTensor = 65536;
constexpr size_t kThreadsMax = 16;

// A digest that is fed piece by piece; the first failure of the library sticks.
class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) {
    good_ = context_ != nullptr && EVP_DigestInit_ex(context_, EVP_sha256(), nullptr) == 1;
  }
  ~Sha256() { EVP_MD_CTX_free(context_); }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Add(const void* data, size_t size) {
    good_ = good_ && EVP_DigestUpdate(context_, data, size) == 1;
  }
  void Add(std::string_view text) { Add(text.data(), text.size()); }

  absl::StatusOr<std::string> Hex() {
    std::array<unsigned char, 32> digest = {};
    unsigned int size = 0;
    if (!good_ || EVP_DigestFinal_ex(context_, digest.data(), &size) != 1 ||
        size != digest.size()) {
      return absl::InternalError("OpenSSL gives no SHA-256");
    }
    return fmt::format("{:02x}", fmt::join(digest, ""));
  }

 private:
  EVP_MD_CTX* context_;
  bool good_;
};

std::string_view RopeType(RopeScaling::Kind kind) {
  switch (kind) {
    case RopeScaling::Kind::kNone:
      return "default";
    case RopeScaling::Kind::kLinear:
      return "linear";
    case RopeScaling::Kind::kLlama3:
      return "llama3";
    case RopeScaling::Kind::kYarn:
      return "yarn";
    case RopeScaling::Kind::kFactors:
      return "factors";
    case RopeScaling::Kind::kLongRope:
      return "longrope";
  }
  return "";
}

// A tensor as its file has it.
struct Tensor {
  std::string_view name;
  std::string type, shape;  // "BF16", "2x3"
  std::span<const std::byte> data;
};

void SortByName(std::vector<Tensor>* tensors) {
  std::sort(tensors->begin(), tensors->end(),
            [](const Tensor& a, const Tensor& b) { return a.name < b.name; });
}

std::vector<Tensor> TensorsByName(std::span<const std::unique_ptr<SafetensorsFile>> files) {
  std::vector<Tensor> tensors;
  for (const auto& file : files) {
    for (size_t i = 0; i < file->header().num_tensors(); ++i) {
      const SafetensorsEntry entry = file->header().tensor(i);
      tensors.push_back({entry.name, std::string(entry.dtype),
                         fmt::format("{}", fmt::join(entry.shape, "x")), file->Data(entry)});
    }
  }
  SortByName(&tensors);
  return tensors;
}

std::vector<Tensor> TensorsByName(const Weights& weights) {
  if (weights.gguf == nullptr) return TensorsByName(weights.files);
  std::vector<Tensor> tensors;
  const GgufContents& contents = weights.gguf->contents();
  for (const GgufTensor& tensor : contents.tensors()) {
    const std::span dims(tensor.dims.data(), tensor.num_dims);
    tensors.push_back({tensor.name, GgufTensorTypeName(tensor.type),
                       fmt::format("{}", fmt::join(dims, "x")), contents.Data(tensor)});
  }
  SortByName(&tensors);
  return tensors;
}

void AddTensor(const Tensor& tensor, uint64_t most_bytes, Sha256* digest) {
  digest->Add(fmt::format("{} {} {}\n", tensor.name, tensor.type, tensor.shape));
  digest->Add(tensor.data.data(), std::min<uint64_t>(tensor.data.size(), most_bytes));
}

LayerSpec FirstLayer(const ModelConfig& config) {
  return config.layers.empty() ? LayerSpec() : config.layers[0];
}

// Adds the properties of a layer that no tensor shows, and its RoPE set. A layer adds nothing if the rest of KvDigest
// implies it: normed like the first, rotated by set 0, attending to everything. So stored KV of such models keeps its name.
void AddUnlikeLayers(const ModelConfig& config, Sha256* digest) {
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const LayerSpec& layer = config.layers[i];
    if (layer.window == 0 && layer.rope == 0 && layer.norms == LayerSpec::Norms::kBefore &&
        layer.mlp == LayerSpec::Mlp::kGatedSilu && layer.qk_norm == FirstLayer(config).qk_norm &&
        !layer.qk_norm_whole) {
      continue;
    }
    digest->Add(fmt::format("layer {} window {} rope {} norms {} mlp {} qk_norm {}\n", i,
                            layer.window, layer.rope, static_cast<int>(layer.norms),
                            static_cast<int>(layer.mlp), layer.qk_norm));
    if (layer.qk_norm_whole) digest->Add("of all heads\n");
    if (layer.rope <= 0) continue;
    const RopeParameters rope = ComputeRope(config, layer.rope);
    digest->Add(rope.inv_freq.data(), rope.inv_freq.size() * sizeof(float));
    digest->Add(&rope.attention_factor, sizeof rope.attention_factor);
  }
}

// Adds Granite's factors, as far as KV depends on them, how tokens go to experts, which of LongRoPE's factors are used, and by what queries are scaled. Other models add nothing, and keep
// their names.
void AddFactors(const ModelConfig& config, Sha256* digest) {
  if (config.embedding_multiplier != 1 || config.residual_multiplier != 1 ||
      config.attention_multiplier.has_value()) {
    digest->Add(fmt::format("embedding {:.17g} residual {:.17g} attention {:.9g}\n",
                            config.embedding_multiplier, config.residual_multiplier,
                            config.AttentionScale()));
  }
  // The rest of experts is in the shapes of their tensors.
  if (config.experts.count > 0) {
    digest->Add(fmt::format("experts {} normalized {}\n", config.experts.per_token,
                            config.experts.normalized));
  }
  const ExpertsConfig& experts = config.experts;
  if (experts.scores != kernels::ExpertRouting::Scores::kSoftmax || experts.scale != 1 ||
      experts.corrected || experts.shared_is_gated) {
    digest->Add(fmt::format("scores {} scale {:.17g} corrected {} shared gated {}\n",
                            static_cast<int>(experts.scores), experts.scale, experts.corrected,
                            experts.shared_is_gated));
  }
  if (const auto& clamped = config.experts.clamped; clamped.has_value()) {
    digest->Add(fmt::format("clamped swiglu {:.9g} {:.9g}\n", clamped->alpha, clamped->limit));
  }
  if (config.norms_add_one) digest->Add("norms add one\n");
  const RopeScaling& scaling = config.ropes[0].scaling;
  if (scaling.kind == RopeScaling::Kind::kLongRope) {
    digest->Add(fmt::format("longrope {}\n", scaling.UsesLongFactors() ? "long" : "short"));
  }
  if (const QueryScaling& queries = config.ropes[0].query_scaling; queries.beta != 0) {
    digest->Add(fmt::format("queries {:.17g} {:.17g}\n", queries.beta, queries.length));
  }
}

absl::StatusOr<std::string> ModelDigest(const ModelConfig& config,
                                        const std::vector<Tensor>& tensors) {
  Sha256 digest;
  digest.Add(fmt::format(
      "winnow-model-fingerprint 1\nlayers={}\nquery_heads={}\nkv_heads={}\nhead_dim={}\n"
      "rope_theta={:.17g}\nrope_type={}\nrope_factor={:.17g}\n",
      config.num_layers(), config.num_heads, config.num_kv_heads, config.head_dim,
      config.ropes[0].theta, RopeType(config.ropes[0].scaling.kind),
      config.ropes[0].scaling.factor));
  AddFactors(config, &digest);
  for (const Tensor& tensor : tensors) AddTensor(tensor, kBytesPerTensor, &digest);
  return digest.Hex();
}

absl::StatusOr<std::string> KvDigest(const ModelConfig& config,
                                     const std::vector<Tensor>& tensors) {
  // A core digests 1.7 GB a second.
  std::vector<absl::StatusOr<std::string>> digests(tensors.size());
  std::atomic<size_t> next = 0;
  {
    std::vector<std::jthread> threads;
    const size_t count =
        std::min<size_t>({tensors.size(), kThreadsMax, std::thread::hardware_concurrency()});
    for (size_t i = 0; i < std::max<size_t>(count, 1); ++i) {
      threads.emplace_back([&] {
        for (size_t at = next++; at < tensors.size(); at = next++) {
          Sha256 digest;
          AddTensor(tensors[at], UINT64_MAX, &digest);
          digests[at] = digest.Hex();
        }
      });
    }
  }
  Sha256 digest;
  digest.Add(fmt::format("winnow-kv-fingerprint 1\n{} heads {} {} of {} eps {:.9g} qk_norm {}\n",
                         config.architecture, config.num_heads, config.num_kv_heads,
                         config.head_dim, config.rms_norm_eps, FirstLayer(config).qk_norm));
  // What comes of all the keys that a rotary embedding may have.
  const RopeParameters rope = ComputeRope(config);
  digest.Add(rope.inv_freq.data(), rope.inv_freq.size() * sizeof(float));
  digest.Add(&rope.attention_factor, sizeof rope.attention_factor);
  AddUnlikeLayers(config, &digest);
  AddFactors(config, &digest);
  for (const absl::StatusOr<std::string>& of_tensor : digests) {
    WINNOW_RETURN_IF_ERROR(of_tensor.status());
    digest.Add(*of_tensor);
  }
  return digest.Hex();
}

}  // namespace

absl::StatusOr<std::string> ModelFingerprint(const ModelConfig& config, const Weights& weights) {
  return ModelDigest(config, TensorsByName(weights));
}

absl::StatusOr<std::string> ModelFingerprint(
    const ModelConfig& config, std::span<const std::unique_ptr<SafetensorsFile>> files) {
  return ModelDigest(config, TensorsByName(files));
}

absl::StatusOr<std::string> KvFingerprint(const ModelConfig& config, const Weights& weights) {
  return KvDigest(config, TensorsByName(weights));
}

absl::StatusOr<std::string> KvFingerprint(const ModelConfig& config,
                                          std::span<const std::unique_ptr<SafetensorsFile>> files) {
  return KvDigest(config, TensorsByName(files));
}

}  // namespace winnow::engine
