#include "engine/model/random_model.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "engine/model/model_config.h"
#include "kernels/check.h"

namespace winnow::engine {
namespace {

using kernels::DType;
using OrderedJson = nlohmann::ordered_json;
using Role = TensorSpec::Role;

constexpr size_t kConfigBytesMax = 1 << 20;
constexpr size_t kTokenizerBytesMax = 256 << 20;
constexpr size_t kChunkBytes = 1 << 20;
constexpr size_t kShardsMax = 4096;  // as LoadWeights has it
// tokenizer.json must be there; the others are copied if they are.
constexpr std::array<std::string_view, 6> kTokenizerFiles = {"tokenizer.json",
                                                             "tokenizer_config.json",
                                                             "special_tokens_map.json",
                                                             "chat_template.jinja",
                                                             "vocab.json",
                                                             "merges.txt"};

// ---- values ----

uint64_t Mix(
    uint64_t z) {  // splitmix64's finaliser: a bijection in which every bit hangs on every bit
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

uint64_t StreamOf(uint64_t seed, std::string_view name) {  // FNV-1a, then mixed with the seed
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return Mix(hash ^ Mix(seed + 0x9e3779b97f4a7c15u));
}

// Nearly normal with mean 0 and variance 1: the sum of four 16-bit uniforms, by the central limit.
// One multiplication chain per value, no transcendental, the same bits on every machine.
float Bell(uint64_t stream, uint64_t index) {
  const uint64_t random = Mix(stream + index * 0x9e3779b97f4a7c15u);
  const int64_t sum = static_cast<int64_t>((random & 0xffff) + ((random >> 16) & 0xffff) +
                                           ((random >> 32) & 0xffff) + (random >> 48));
  constexpr float kScale = 0x1p-16f * 1.7320508f;  // each uniform on [0,1) has variance 1/12
  return static_cast<float>(sum - 2 * 0xffff) * kScale;
}

struct Distribution {
  float mean, deviation;
};

Distribution DistributionOf(const TensorSpec& spec, const ModelConfig& config) {
  switch (spec.role) {
    case Role::kNorm:
      return {1.0f, 0.1f};
    case Role::kBias:
      return {0.0f, 0.1f};
    case Role::kEmbedding: {
      // As an output matrix it meets normed activations: logits then deviate by 2. As an input
      // alone it is of the size of what the layers add.
      const bool is_output = spec.name == "lm_head.weight" || config.tie_word_embeddings;
      return {0.0f, is_output ? 2.0f / std::sqrt(static_cast<float>(spec.cols)) : 1.0f};
    }
    case Role::kRouter:
    case Role::kMatrix: {
      const bool writes_residual =
          spec.name.ends_with("o_proj.weight") || spec.name.ends_with("down_proj.weight") ||
          spec.name.ends_with("experts.down_proj") || spec.name.ends_with(".w2.weight");
      const float inputs =
          static_cast<float>(spec.cols) *
          (writes_residual ? 2.0f * static_cast<float>(config.num_layers()) : 1.0f);
      return {0.0f, 1.0f / std::sqrt(inputs)};
    }
  }
  WINNOW_CHECK(false);
  return {};
}

// Round to nearest even, with subnormals. REQUIRES: |x| < 65520.
uint16_t ToF16Bits(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24, which adding 0.5 rounds to
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(shifted) - 0x3f000000u);
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

// ---- files ----

// The files made so far; removes them again unless Keep is called.
class Output {
 public:
  explicit Output(std::string dir) : dir_(std::move(dir)) {}
  ~Output() {
    for (const std::string& path : made_) unlink(path.c_str());
    if (made_dir_) rmdir(dir_.c_str());
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  absl::Status MakeDir() {
    std::error_code error;
    made_dir_ = std::filesystem::create_directories(dir_, error);
    if (error) return absl::ErrnoToStatus(error.value(), dir_);
    if (std::filesystem::is_empty(dir_, error) && !error) return absl::OkStatus();
    if (error) return absl::ErrnoToStatus(error.value(), dir_);
    return absl::AlreadyExistsError(Concat(dir_, ": exists and is not empty"));
  }

  // A new file to write to; -1 and the status where it cannot be had.
  absl::StatusOr<int> Create(std::string_view name) {
    const std::string path = Path(name);
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) return absl::ErrnoToStatus(errno, path);
    made_.push_back(path);
    return fd;
  }

  absl::Status WriteFile(std::string_view name, std::string_view text) {
    WINNOW_ASSIGN_OR_RETURN(const int fd, Create(name));
    absl::Status status = WriteAll(fd, name, std::as_bytes(std::span(text)));
    status.Update(Close(fd, name));
    return status;
  }

  absl::Status WriteAll(int fd, std::string_view name, std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t count = write(fd, bytes.data(), bytes.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return absl::ErrnoToStatus(errno, Path(name));
      bytes = bytes.subspan(count);
    }
    return absl::OkStatus();
  }

  absl::Status Close(int fd, std::string_view name) const {
    return close(fd) == 0 ? absl::OkStatus() : absl::ErrnoToStatus(errno, Path(name));
  }

  void Keep() {
    made_.clear();
    made_dir_ = false;
  }

 private:
  std::string Path(std::string_view name) const { return Concat(dir_, "/", name); }

  std::string dir_;
  bool made_dir_ = false;
  std::vector<std::string> made_;
};

uint64_t ValuesOf(const TensorSpec& spec) {
  uint64_t values = 1;
  for (const int64_t size : spec.FileShape()) values *= static_cast<uint64_t>(size);
  return values;
}

struct Shard {
  std::string name;
  std::span<const TensorSpec> tensors;
  uint64_t data_bytes = 0;
};

absl::StatusOr<std::vector<Shard>> CutIntoShards(std::span<const TensorSpec> tensors, DType dtype,
                                                 int64_t shard_bytes) {
  std::vector<Shard> shards;
  size_t begin = 0;
  while (begin < tensors.size()) {
    uint64_t data_bytes = 0;
    size_t end = begin;
    while (end < tensors.size()) {
      const uint64_t size_bytes = ValuesOf(tensors[end]) * kernels::DTypeBytes(dtype);
      if (end > begin && data_bytes + size_bytes > static_cast<uint64_t>(shard_bytes)) break;
      data_bytes += size_bytes;
      ++end;
    }
    shards.push_back({"", tensors.subspan(begin, end - begin), data_bytes});
    begin = end;
  }
  if (shards.size() > kShardsMax) {
    return absl::InvalidArgumentError(Concat("shard_bytes: ", shard_bytes, " makes ", shards.size(),
                                             " files, more than ", kShardsMax));
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    char name[64] = "model.safetensors";
    if (shards.size() > 1) {
      std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
    }
    shards[i].name = name;
  }
  return shards;
}

std::string HeaderOf(const Shard& shard, DType dtype) {
  const char* type = dtype == DType::kBF16 ? "BF16" : dtype == DType::kF16 ? "F16" : "F32";
  OrderedJson header;
  header["__metadata__"] = {{"format", "pt"}};
  uint64_t offset = 0;
  for (const TensorSpec& spec : shard.tensors) {
    const uint64_t end = offset + ValuesOf(spec) * kernels::DTypeBytes(dtype);
    OrderedJson& entry = header[spec.name];
    entry["dtype"] = type;
    entry["shape"] = spec.FileShape();
    entry["data_offsets"] = OrderedJson::array({offset, end});
    offset = end;
  }
  return SafetensorsHead(header.dump());
}

absl::Status CheckSpace(const std::string& dir, uint64_t needed_bytes) {
  struct statvfs info = {};
  if (statvfs(dir.c_str(), &info) != 0) return absl::ErrnoToStatus(errno, dir);
  const uint64_t free_bytes = static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
  if (needed_bytes <= free_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      Concat(dir, ": the weights take ", needed_bytes, " bytes, ", free_bytes, " are free"));
}

class WeightWriter {
 public:
  WeightWriter(const ModelConfig& config, uint64_t seed, DType dtype, Output& output)
      : config_(config), seed_(seed), dtype_(dtype), output_(output), chunk_(kChunkBytes) {}

  absl::Status Write(const Shard& shard) {
    WINNOW_ASSIGN_OR_RETURN(const int fd, output_.Create(shard.name));
    const std::string header = HeaderOf(shard, dtype_);
    absl::Status status = output_.WriteAll(fd, shard.name, std::as_bytes(std::span(header)));
    for (const TensorSpec& spec : shard.tensors) {
      if (status.ok()) status = WriteTensor(fd, shard.name, spec);
    }
    status.Update(output_.Close(fd, shard.name));
    return status;
  }

 private:
  absl::Status WriteTensor(int fd, std::string_view file, const TensorSpec& spec) {
    const uint64_t num_values = ValuesOf(spec);
    const uint64_t values_per_chunk = chunk_.size() / kernels::DTypeBytes(dtype_);
    for (uint64_t first = 0; first < num_values; first += values_per_chunk) {
      const uint64_t count = std::min(values_per_chunk, num_values - first);
      const std::span<std::byte> bytes(chunk_.data(), count * kernels::DTypeBytes(dtype_));
      FillRandomTensor(spec, config_, seed_, dtype_, first, bytes);
      WINNOW_RETURN_IF_ERROR(output_.WriteAll(fd, file, bytes));
    }
    return absl::OkStatus();
  }

  const ModelConfig& config_;
  uint64_t seed_;
  DType dtype_;
  Output& output_;
  std::vector<std::byte> chunk_;
};

absl::Status WriteIndex(std::span<const Shard> shards, uint64_t total_bytes, Output& output) {
  OrderedJson index;
  index["metadata"]["total_size"] = total_bytes;
  for (const Shard& shard : shards) {
    for (const TensorSpec& spec : shard.tensors) index["weight_map"][spec.name] = shard.name;
  }
  return output.WriteFile("model.safetensors.index.json", index.dump(1) + "\n");
}

// The configuration as given, with the type that the weights have.
std::string ConfigText(const std::string& config_json, DType dtype) {
  OrderedJson json = OrderedJson::parse(config_json);
  json[json.contains("dtype") ? "dtype" : "torch_dtype"] = kernels::DTypeName(dtype);
  return json.dump(2) + "\n";
}

std::string GenerationConfigText(const ModelConfig& config) {
  OrderedJson json = OrderedJson::object();
  if (config.bos_token_id) json["bos_token_id"] = *config.bos_token_id;
  if (!config.eos_token_ids.empty()) json["eos_token_id"] = config.eos_token_ids;
  return json.dump(2) + "\n";
}

// tokenizer.json with a token for every row of the embedding, so that a small tokenizer goes with a
// large shape. No text leads to the tokens that fill it up: no merge makes them.
absl::StatusOr<std::string> FillVocabulary(const std::string& text, int32_t vocab_size,
                                           const std::string& path) {
  OrderedJson json = OrderedJson::parse(text, nullptr, /*allow_exceptions=*/false);
  const OrderedJson::json_pointer vocab_path("/model/vocab");
  if (!json.is_object() || !json.contains(vocab_path) || !json[vocab_path].is_object()) {
    return absl::InvalidArgumentError(Concat(path, ": has no $.model.vocab"));
  }
  OrderedJson& vocab = json[vocab_path];
  int64_t id_end = 0;
  for (const auto& [token, id] : vocab.items()) {
    if (id.is_number_integer()) id_end = std::max(id_end, id.get<int64_t>() + 1);
  }
  // An added token beyond the vocabulary gets a place in it: else it would follow the last filler.
  if (const auto added = json.find("added_tokens"); added != json.end() && added->is_array()) {
    for (const OrderedJson& token : *added) {
      if (!token.is_object() || !token.contains("id") || !token["id"].is_number_integer()) continue;
      const int64_t id = token["id"].get<int64_t>();
      if (id < id_end || !token.contains("content") || !token["content"].is_string()) continue;
      vocab[token["content"].get<std::string>()] = id;
      id_end = id + 1;
    }
  }
  if (id_end >= vocab_size) return text;
  for (int64_t id = id_end; id < vocab_size; ++id) vocab[Concat("[unused", id, "]")] = id;
  return json.dump();
}

absl::Status CopyTokenizer(const std::string& from_dir, int32_t vocab_size, Output& output) {
  for (const std::string_view name : kTokenizerFiles) {
    const absl::StatusOr<std::string> text =
        ReadSmallFile(Concat(from_dir, "/", name), kTokenizerBytesMax);
    if (absl::IsNotFound(text.status()) && name != "tokenizer.json") continue;
    WINNOW_RETURN_IF_ERROR(text.status());
    if (name == "tokenizer.json") {
      WINNOW_ASSIGN_OR_RETURN(const std::string filled,
                              FillVocabulary(*text, vocab_size, Concat(from_dir, "/", name)));
      WINNOW_RETURN_IF_ERROR(output.WriteFile(name, filled));
      continue;
    }
    WINNOW_RETURN_IF_ERROR(output.WriteFile(name, *text));
  }
  return absl::OkStatus();
}

}  // namespace

void FillRandomTensor(const TensorSpec& spec, const ModelConfig& config, uint64_t seed, DType dtype,
                      uint64_t first, std::span<std::byte> out) {
  const auto [mean, deviation] = DistributionOf(spec, config);
  const uint64_t stream = StreamOf(seed, spec.name);
  const size_t count = out.size() / kernels::DTypeBytes(dtype);
  for (size_t i = 0; i < count; ++i) {
    const float value = mean + deviation * Bell(stream, first + i);
    if (dtype == DType::kF32) {
      std::memcpy(&out[i * sizeof(value)], &value, sizeof(value));
    } else {
      const uint16_t bits = dtype == DType::kBF16 ? kernels::ToBF16(value).bits : ToF16Bits(value);
      std::memcpy(&out[i * sizeof(bits)], &bits, sizeof(bits));
    }
  }
}

absl::StatusOr<RandomModelReport> WriteRandomModel(const RandomModelOptions& options) {
  if (options.shard_bytes < 1) {
    return absl::InvalidArgumentError(
        Concat("shard_bytes: must be positive, is ", options.shard_bytes));
  }
  WINNOW_ASSIGN_OR_RETURN(const std::string config_json,
                          ReadSmallFile(options.config_path, kConfigBytesMax));
  WINNOW_ASSIGN_OR_RETURN(ModelConfig config,
                          ParseModelConfig(config_json, options.config_path, "", ""));
  const DType dtype = options.dtype.value_or(config.dtype);
  const std::vector<TensorSpec> tensors = FileTensors(config);
  WINNOW_ASSIGN_OR_RETURN(std::vector<Shard> shards,
                          CutIntoShards(tensors, dtype, options.shard_bytes));
  RandomModelReport report;
  report.num_files = static_cast<int>(shards.size());
  for (const TensorSpec& spec : tensors) report.num_parameters += ValuesOf(spec);
  report.weight_bytes = report.num_parameters * kernels::DTypeBytes(dtype);

  Output output(options.out_dir);
  WINNOW_RETURN_IF_ERROR(output.MakeDir());
  WINNOW_RETURN_IF_ERROR(CheckSpace(options.out_dir, report.weight_bytes));
  if (!options.tokenizer_dir.empty())
    WINNOW_RETURN_IF_ERROR(CopyTokenizer(options.tokenizer_dir, config.vocab_size, output));
  WeightWriter writer(config, options.seed, dtype, output);
  for (const Shard& shard : shards) WINNOW_RETURN_IF_ERROR(writer.Write(shard));
  if (shards.size() > 1) WINNOW_RETURN_IF_ERROR(WriteIndex(shards, report.weight_bytes, output));
  WINNOW_RETURN_IF_ERROR(output.WriteFile("generation_config.json", GenerationConfigText(config)));
  // Last, so that a directory without it is seen to be unfinished.
  WINNOW_RETURN_IF_ERROR(output.WriteFile("config.json", ConfigText(config_json, dtype)));
  output.Keep();
  return report;
}

}  // namespace winnow::engine
