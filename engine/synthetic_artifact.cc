#include "engine/synthetic_artifact.h"

#include <cmath>

#include <numeric>
#include <random>
#include <utility>
#include <vector>
#include "engine/base/counter_random.h"

#include "absl/status/status.h"
#include "engine/base/concat.h"
#include "engine/base/counter_random.h"
#include "engine/base/status_macros.h"
#include "engine/model/safetensors.h"
#include "kernels/dtype.h"
#include "nlohmann/json.hpp"

namespace winnow::engine {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr int64_t kFeatures = 64;

// A safetensors file in the making: the header's entries, and the data behind it.
struct File {
  OrderedJson header = OrderedJson::object();
  std::string data;

  void Add(const std::string& name, const char* dtype, std::vector<int64_t> shape,
           const void* values, size_t size_bytes) {
    header[name] = {{"dtype", dtype},
                    {"shape", std::move(shape)},
                    {"data_offsets", {data.size(), data.size() + size_bytes}}};
    data.append(static_cast<const char*>(values), size_bytes);
  }

  std::string Bytes() const { return SafetensorsHead(header.dump()) + data; }
};

// PREFIX.weight [heads][out][in] with outputs of the order of one for inputs of that order, and
// PREFIX.bias of zeros.
void AddAffine(File& file, const std::string& prefix, int64_t heads, int64_t out, int64_t in,
               std::mt19937_64& random) {
  std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(static_cast<float>(in)));
  std::vector<uint16_t> weight(heads * out * in);
  for (uint16_t& value : weight) value = kernels::ToBF16(normal(random)).bits;
  const std::vector<float> bias(heads * out, 0.0f);
  file.Add(prefix + ".weight", "BF16", {heads, out, in}, weight.data(),
           weight.size() * sizeof(weight[0]));
  file.Add(prefix + ".bias", "F32", {heads, out}, bias.data(), bias.size() * sizeof(bias[0]));
}

// Widths after the input of each kind's stages.
std::vector<std::pair<const char*, std::vector<int64_t>>> Kinds(int64_t head_dim) {
  return {{"hata", {128}},
          {"spotlight", {2 * head_dim, 128}},
          {"hashattention", {head_dim, head_dim, 32}}};
}

}  // namespace

absl::StatusOr<SyntheticArtifact> MakeSyntheticArtifact(const ModelConfig& config, uint64_t seed) {
  const int64_t heads = config.num_kv_heads, d = config.head_dim;
  const std::string fingerprint(64, '0');
  std::vector<int32_t> layers(config.num_layers());
  std::iota(layers.begin(), layers.end(), 0);
  std::mt19937_64 random(seed);
  OrderedJson about = {{"format", 1},
                       {"model",
                        {{"fingerprint", fingerprint},
                         {"layers", config.num_layers()},
                         {"query_heads", config.num_heads},
                         {"kv_heads", heads},
                         {"head_dim", d}}},
                       {"dense_layers", 0},
                       {"kinds", OrderedJson::object()},
                       {"features",
                        {{"features", kFeatures},
                         {"layers", layers},
                         {"training", OrderedJson::object()},
                         {"helps", std::vector<bool>(layers.size() * heads, true)}}},
                       {"provenance", {{"tool", "random functions, for measurements of speed"}}}};
  File file;
  for (const auto& [kind, widths] : Kinds(d)) {
    about["kinds"][kind] = {{"bits", widths.back()},
                            {"query", "head"},
                            {"stages", widths.size()},
                            {"layers", layers},
                            {"training", {{"recipe", "random"}}}};
    for (const int32_t layer : layers) {
      for (const char* side : {"key", "query"}) {
        int64_t in = d;
        for (size_t stage = 0; stage < widths.size(); ++stage) {
          AddAffine(file, Concat("layers.", layer, ".", kind, ".", side, ".", stage), heads,
                    widths[stage], in, random);
          in = widths[stage];
        }
      }
    }
  }
  for (const int32_t layer : layers) {
    for (const char* side : {"key", "query"}) {
      const std::string prefix = Concat("layers.", layer, ".features.", side, ".");
      AddAffine(file, prefix + "stem", heads, d, d, random);
      AddAffine(file, prefix + "gate", heads, d / 2, d, random);
      AddAffine(file, prefix + "up", heads, d / 2, d, random);
      AddAffine(file, prefix + "down", heads, d, d / 2, random);
      AddAffine(file, prefix + "out", heads, kFeatures, d, random);
    }
  }
  file.header["__metadata__"] = {{"winnow_artifact", about.dump()}};

  SyntheticArtifact made;
  made.bytes = std::make_unique<const std::string>(file.Bytes());
  WINNOW_ASSIGN_OR_RETURN(made.artifact, Artifact::Parse(std::as_bytes(std::span(*made.bytes)),
                                                         "random functions", config, fingerprint));
  return made;
}

absl::StatusOr<std::shared_ptr<const TransformFit>> MakeSyntheticTransform(
    const ModelConfig& config, int32_t bits) {
  constexpr int32_t kRows = 512;
  TransformFitOptions options;
  options.head_dim = config.head_dim;
  options.bits = bits;
  options.copies = 0;
  options.served_context = kRows;
  options.inv_freq.assign(config.head_dim / 2, 1.0f);
  TransformSample sample;
  uint64_t index = 0;
  for (int32_t row = 0; row < kRows; ++row) {
    for (int32_t c = 0; c < config.head_dim; ++c) {
      // Variances fall as a model's do, so that widths differ.
      const double scale = std::exp2(-8.0 * c / config.head_dim);
      sample.keys.push_back(static_cast<float>(scale * (CounterRandom(1, index++) - 0.5)));
      sample.queries.push_back(static_cast<float>(CounterRandom(1, index++) - 0.5));
    }
    sample.key_positions.push_back(row);
    sample.query_positions.push_back(row);
  }
  WINNOW_ASSIGN_OR_RETURN(TransformHeadFit head, FitTransformHead(sample, options));
  head.head.tail = true;
  auto fit = std::make_shared<TransformFit>();
  fit->bits = bits;
  fit->sample_tokens = kRows;
  fit->layers.assign(config.num_layers(),
                     {config.head_dim, bits,
                      std::vector<kernels::TransformCodeHead>(config.num_kv_heads, head.head)});
  fit->residuals.assign(config.num_layers(), {config.head_dim, bits,
                                              std::vector<kernels::TransformCodeHead>(
                                                  config.num_kv_heads, head.residual)});
  fit->id = "synthetic";
  return std::shared_ptr<const TransformFit>(std::move(fit));
}

}  // namespace winnow::engine
