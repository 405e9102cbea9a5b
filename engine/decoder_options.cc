#include "engine/decoder_options.h"

#include <string_view>

#include "fmt/format.h"

namespace winnow::engine {

absl::Status CheckDecoderOptions(const ModelConfig& config, const DecoderOptions& options) {
  const auto refuse = [](std::string_view option, int64_t value, std::string_view wanted) {
    return absl::InvalidArgumentError(fmt::format("{} is {}: must be {}", option, value, wanted));
  };
  if (options.block_tokens < 16 || options.block_tokens > 1024 || options.block_tokens % 16 != 0) {
    return refuse("block_tokens", options.block_tokens, "a multiple of 16 from 16 to 1024");
  }
  if (options.kv_dtype == kernels::DType::kF16) {
    return absl::InvalidArgumentError(
        "kv_dtype is float16: must be bfloat16, float32, int8 or float8_e4m3");
  }
  if (options.max_batch_tokens < 1 || options.max_batch_tokens > 65536) {
    return refuse("max_batch_tokens", options.max_batch_tokens, "from 1 to 65536");
  }
  if (options.max_batch_logits < 1 || options.max_batch_logits > options.max_batch_tokens) {
    return refuse("max_batch_logits", options.max_batch_logits, "from 1 to max_batch_tokens");
  }
  if (options.max_context < 0 || options.max_context > config.max_position_embeddings) {
    return refuse("max_context", options.max_context,
                  fmt::format("at most the model's max_position_embeddings, {}",
                              config.max_position_embeddings));
  }
  return absl::OkStatus();
}

}  // namespace winnow::engine
