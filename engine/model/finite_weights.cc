#include "engine/model/finite_weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "kernels/check.h"

namespace winnow::engine {
namespace {

using kernels::DType;
using kernels::HostMatrix;

// Values that are looked at together: what a core's first cache holds.
constexpr int64_t kChunkValues = 8192;
// Bytes below which a thread costs more than it saves, and the most threads that memory feeds.
constexpr int64_t kBytesPerThread = 4 << 20;
constexpr int64_t kThreadsMax = 8;

// Whether the exponent of any of `count` values is all ones. No branch, so that it is compiled to
// vector instructions.
template <typename Bits>
bool AnyNonFinite(const std::byte* values, int64_t count, Bits exponent) {
  Bits found = 0;
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, values + i * sizeof(Bits), sizeof(Bits));
    found |= static_cast<Bits>((bits & exponent) == exponent);
  }
  return found != 0;
}

bool AnyNonFinite(const HostMatrix& matrix, int64_t first, int64_t count) {
  const std::byte* values = static_cast<const std::byte*>(matrix.data) +
                            first * static_cast<int64_t>(kernels::DTypeBytes(matrix.dtype));
  switch (matrix.dtype) {
    case DType::kF32:
      return AnyNonFinite<uint32_t>(values, count, 0x7f800000u);
    case DType::kF16:
      return AnyNonFinite<uint16_t>(values, count, 0x7c00u);
    case DType::kBF16:
      return AnyNonFinite<uint16_t>(values, count, 0x7f80u);
    default:
      WINNOW_CHECK(false && "weights are float32, float16 or bfloat16");
      return true;
  }
}

std::optional<int64_t> FindInRange(const HostMatrix& matrix, int64_t begin, int64_t end) {
  for (int64_t first = begin; first < end; first += kChunkValues) {
    const int64_t count = std::min(kChunkValues, end - first);
    if (!AnyNonFinite(matrix, first, count)) continue;
    for (int64_t i = first; i < first + count; ++i) {
      if (AnyNonFinite(matrix, i, 1)) return i;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<int64_t> FindNonFinite(const HostMatrix& matrix) {
  const int64_t values = matrix.rows * matrix.cols;
  const int64_t bytes = values * static_cast<int64_t>(kernels::DTypeBytes(matrix.dtype));
  const int64_t threads =
      std::min({bytes / kBytesPerThread, kThreadsMax,
                static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()))});
  if (threads <= 1) return FindInRange(matrix, 0, values);
  std::vector<std::optional<int64_t>> found(threads);
  {
    std::vector<std::jthread> pool;
    for (int64_t t = 0; t < threads; ++t) {
      pool.emplace_back([&, t] {
        found[t] = FindInRange(matrix, values * t / threads, values * (t + 1) / threads);
      });
    }
  }
  for (const std::optional<int64_t>& first : found) {
    if (first.has_value()) return first;  // ranges ascend
  }
  return std::nullopt;
}

absl::Status NonFiniteError(const ModelConfig& config, const Weights& weights, const void* tensor,
                            int64_t row, int64_t col, float value) {
  std::string name = "a tensor";
  std::string file;
  // ModelTensors takes the addresses of the views and changes nothing: the layers have their number.
  for (const TensorSpec& spec : ModelTensors(config, const_cast<Weights*>(&weights))) {
    if (spec.matrix->data != tensor) continue;
    name = Concat("tensor ", ShortDump(weights.gguf != nullptr ? spec.gguf_name : spec.name));
    if (weights.gguf != nullptr) file = Concat(weights.gguf->path(), ": ");
    for (const auto& candidate : weights.files) {
      if (candidate->header().Find(spec.name)) file = Concat(candidate->path(), ": ");
    }
    break;
  }
  return absl::InvalidArgumentError(
      Concat(file, name, " has ", std::isnan(value) ? "NaN" : "infinity", " at [", row, ", ", col,
             "]: the file is damaged, or was written wrongly"));
}

}  // namespace winnow::engine
