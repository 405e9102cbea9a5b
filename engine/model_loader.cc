#include "engine/model_loader.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "engine/status_macros.h"
#include "fmt/format.h"

namespace winnow::engine {
namespace {

// A number after `key` in a file of "key number" lines, or alone in the file if `key` is empty.
std::optional<int64_t> ReadNumber(const char* path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    if (key.empty()) {
      int64_t value = 0;
      if (std::sscanf(word.c_str(), "%" SCNd64, &value) == 1) return value;
      return std::nullopt;  // "max": no limit
    }
    int64_t value = 0;
    if (word == key && file >> value) return value;
  }
  return std::nullopt;
}

// What this process may still allocate: the machine's memory, and its container's if it has one.
std::optional<int64_t> AvailableMemoryBytes() {
  std::optional<int64_t> available;
  if (const auto kib = ReadNumber("/proc/meminfo", "MemAvailable:")) available = *kib * 1024;
  const auto limit = ReadNumber("/sys/fs/cgroup/memory.max", "");
  const auto used = ReadNumber("/sys/fs/cgroup/memory.current", "");
  if (limit && used) {
    // Clean pages of files are counted as used, and given back when memory runs short.
    const int64_t cached = ReadNumber("/sys/fs/cgroup/memory.stat", "inactive_file").value_or(0);
    const int64_t left = std::max<int64_t>(0, *limit - *used + cached);
    available = std::min(available.value_or(left), left);
  }
  return available;
}

// Memory is taken lazily by the system: without this check a pool that does not fit would end the
// process in the middle of a request.
absl::Status CheckMemory(const ModelConfig& config, const DecoderOptions& options) {
  const std::optional<int64_t> available = AvailableMemoryBytes();
  if (!available) return absl::OkStatus();
  const int64_t weight_bytes = WeightBytes(config, options.compute);
  if (weight_bytes + options.kv_bytes <= *available) return absl::OkStatus();
  return absl::ResourceExhaustedError(fmt::format(
      "{} bytes of memory are available; the weights take {} and the KV pool (kv_bytes) {}",
      *available, weight_bytes, options.kv_bytes));
}

}  // namespace

absl::StatusOr<std::unique_ptr<LoadedModel>> LoadModel(const std::string& model_dir,
                                                       const ModelOptions& options) {
  WINNOW_ASSIGN_OR_RETURN(ModelConfig config, LoadModelConfig(model_dir));
  WINNOW_ASSIGN_OR_RETURN(const DecoderOptions decoder_options,
                          ResolveDecoderOptions(config, options));
  WINNOW_ASSIGN_OR_RETURN(Weights weights, LoadWeights(model_dir, config));
  WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<Tokenizer> tokenizer, Tokenizer::Load(model_dir));
  if (tokenizer->vocab_size() > config.vocab_size) {
    return absl::InvalidArgumentError(
        fmt::format("{}/tokenizer.json: has ids up to {}, but config.json's vocab_size is {}",
                    model_dir, tokenizer->vocab_size() - 1, config.vocab_size));
  }
  WINNOW_ASSIGN_OR_RETURN(ChatTemplate chat_template, ChatTemplate::Load(model_dir));
  WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<kernels::Backend> backend, MakeBackend(options));
  WINNOW_RETURN_IF_ERROR(CheckMemory(config, decoder_options));
  WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<Decoder> decoder,
                          Decoder::Create(config, weights, *backend, decoder_options));
  // The packed copy is what runs; the mapped one need not stay in memory beside it.
  for (const auto& file : weights.files) file->ReleasePages();
  return std::unique_ptr<LoadedModel>(new LoadedModel{
      .model_dir = model_dir,
      .config = std::move(config),
      .weights = std::move(weights),
      .tokenizer = std::move(tokenizer),
      .chat_template = std::move(chat_template),
      .backend = std::move(backend),
      .decoder_options = decoder_options,
      .decoder = std::move(decoder),
  });
}

}  // namespace winnow::engine
