#include "engine/model/weight_storage.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <new>
#include <optional>

#include "absl/strings/str_join.h"
#include "engine/base/concat.h"
#include "engine/model/row_ranges.h"
#include "kernels/check.h"
#include "kernels/int8_matmul.h"
#include "kernels/quantized.h"

namespace winnow::engine {
namespace {

using kernels::WeightType;

constexpr WeightStorage kStorages[] = {
    WeightStorage::kWide,   WeightStorage::kStored, WeightStorage::kInt8, WeightStorage::kInt4,
    WeightStorage::kFloat8, WeightStorage::kW8A8,   WeightStorage::kW4A8};

bool IsQuantized(const WeightMatrix& matrix) {
  return matrix.data != nullptr && !kernels::PlainType(matrix.type).has_value();
}

// Calls visit(matrix, is_output) for every matrix that products read.
void ForEachMatrix(const Weights& weights,
                   const std::function<void(const WeightMatrix&, bool)>& visit) {
  for (const LayerWeights& layer : weights.layers) {
    for (const WeightMatrix* matrix :
         {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
      if (matrix->data != nullptr) visit(*matrix, false);
    }
    for (const ExpertWeights& expert : layer.experts) {
      for (const WeightMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
        visit(*matrix, false);
      }
    }
  }
  visit(weights.lm_head, true);
}

// Norms, biases and routers: whatever the form of the matrices, they are float32 (Decoder::Widen, PackRouter).
int64_t VectorBytes(const Weights& weights) {
  const auto values = [](const WeightMatrix& vector) {
    return vector.data != nullptr ? vector.rows * vector.cols : 0;
  };
  int64_t sum = values(weights.final_norm);
  for (const LayerWeights& layer : weights.layers) {
    for (const WeightMatrix* vector :
         {&layer.attention_norm, &layer.attention_out_norm, &layer.mlp_out_norm, &layer.q_bias,
          &layer.k_bias, &layer.v_bias, &layer.q_norm, &layer.k_norm, &layer.o_bias,
          &layer.mlp_norm, &layer.gate_bias, &layer.up_bias, &layer.down_bias, &layer.router,
          &layer.router_bias, &layer.sinks, &layer.correction, &layer.shared_gating}) {
      sum += values(*vector);
    }
    for (const ExpertWeights& expert : layer.experts) {
      sum += values(expert.gate_bias) + values(expert.up_bias) + values(expert.down_bias);
    }
  }
  return sum * static_cast<int64_t>(sizeof(float));
}

bool RoundsBothSides(WeightStorage storage) {
  return storage == WeightStorage::kW8A8 || storage == WeightStorage::kW4A8;
}

// Type that a matrix of plain values is rounded to, and that one of integers is taken as.
WeightType RoundedType(WeightStorage storage, int64_t cols, bool is_output) {
  if (storage == WeightStorage::kFloat8) return kernels::Float8TypeFor(cols);
  if (storage == WeightStorage::kInt4 && !is_output) return WeightType::kL4x32;
  if (RoundsBothSides(storage) && !is_output) return WeightType::kI8x128;
  return WeightType::kQ8_0;
}

bool Rounds(WeightStorage storage) {
  return storage == WeightStorage::kInt8 || storage == WeightStorage::kInt4 ||
         storage == WeightStorage::kFloat8 || RoundsBothSides(storage);
}

// Whether the file's own integers are of that form.
bool HasIntegersFor(WeightStorage storage, const WeightMatrix& matrix) {
  return RoundsBothSides(storage) && matrix.source != nullptr &&
         matrix.source->bits_as_i8x128() == (storage == WeightStorage::kW4A8 ? 4 : 8);
}

// As it is packed.
int64_t MatrixBytes(WeightStorage storage, const WeightMatrix& matrix, bool is_output,
                    kernels::DType compute, bool bfloat16_blocks) {
  if (Rounds(storage)) {
    const WeightType type = RoundedType(storage, matrix.cols, is_output);
    // Whole groups, with a float32 each (kernels/int8_matmul.h).
    constexpr int64_t kGroup = kernels::kInt8GroupValues;
    const int64_t group_bytes = kGroup / (storage == WeightStorage::kW4A8 ? 2 : 1) + 4;
    const int64_t row_bytes = type == WeightType::kI8x128
                                  ? (matrix.cols + kGroup - 1) / kGroup * group_bytes
                                  : kernels::WeightRowBytes(type, matrix.cols);
    return matrix.rows * row_bytes;
  }
  if (storage == WeightStorage::kStored && kernels::IsFloat8(matrix.type)) {
    return matrix.rows * kernels::WeightRowBytes(matrix.type, matrix.cols);
  }
  if (storage == WeightStorage::kStored && bfloat16_blocks && matrix.type == WeightType::kMxfp4) {
    return matrix.rows * kernels::WeightRowBytes(WeightType::kF8x32, matrix.cols);
  }
  if (storage == WeightStorage::kStored && IsQuantized(matrix)) {
    // Integers of 5 and 6 bits take 8, scales stay as they are.
    const kernels::BlockShape shape = kernels::BlockShapeOf(matrix.type);
    const int64_t scales = (shape.has_codes ? shape.groups() + 2 : 2) * (shape.has_offset ? 2 : 1);
    return matrix.rows * (matrix.cols / shape.values) * (shape.values * shape.bits / 8 + scales);
  }
  return matrix.rows * matrix.cols * static_cast<int64_t>(kernels::DTypeBytes(compute));
}

// Writes rows of a matrix as those of `part`, whose type and bits they become. Of one thread.
class RowWriter {
 public:
  RowWriter(const WeightMatrix& matrix, const kernels::StoredMatrix& part, bool rounds)
      : matrix_(matrix), type_(part.type), bits_(part.integer_bits), rounds_(rounds) {
    if (rounds) {
      values_.resize(matrix.cols);
    } else if (matrix.source->block_type() != part.type &&
               matrix.source->block_type() == WeightType::kQ4_0) {
      blocks_.resize(kernels::WeightRowBytes(WeightType::kQ4_0, matrix.cols));
    }
  }
  void Write(int64_t row, std::byte* to) {
    if (rounds_) {
      matrix_.WidenRow(row, values_.data());
      if (bits_ == 4) {
        kernels::QuantizeRowToFourBits(values_.data(), matrix_.cols, to);
      } else {
        kernels::QuantizeRow(type_, values_.data(), matrix_.cols, to);
      }
    } else if (blocks_.empty()) {
      matrix_.source->WriteBlocks(matrix_.FileRow(row), to);
    } else {
      matrix_.source->WriteBlocks(matrix_.FileRow(row), blocks_.data());
      kernels::Q4_0ToQ8_0(blocks_.data(), matrix_.cols, to);
    }
  }

 private:
  const WeightMatrix& matrix_;
  const WeightType type_;
  const int32_t bits_;
  const bool rounds_;
  std::vector<float> values_;      // of a row that is rounded
  std::vector<std::byte> blocks_;  // of one whose integers of 4 bits become 8
};

// Facts that decide which forms a file can be kept in: matrices that stand for others of their kind, or null.
struct FormsOfFile {
  const WeightMatrix* quantized = nullptr;  // whose integers are not of the form asked for
  const WeightMatrix* odd = nullptr;        // whose rows make no whole blocks
  bool scattered = false;                   // groups out of order
};

FormsOfFile FormsOf(const Weights& weights, WeightStorage storage) {
  FormsOfFile file;
  ForEachMatrix(weights, [&](const WeightMatrix& matrix, bool) {
    if (IsQuantized(matrix) && !HasIntegersFor(storage, matrix)) file.quantized = &matrix;
    if (matrix.cols % 32 != 0) file.odd = &matrix;
    if (matrix.source != nullptr && !matrix.source->has_blocks()) file.scattered = true;
  });
  return file;
}

// `otherwise`: what the option may say instead.
absl::Status CheckForm(std::string_view option, std::string_view otherwise, WeightStorage storage,
                       const FormsOfFile& file) {
  const std::string begin = Concat(option, " is ", WeightStorageName(storage), ": ");
  if (storage == WeightStorage::kStored) {
    if (file.scattered) {
      return absl::InvalidArgumentError(
          Concat(begin,
                 "groups of this model's file are out of order (act-order), and have no "
                 "blocks: say ",
                 otherwise));
    }
    if (file.quantized != nullptr) return absl::OkStatus();
    return absl::InvalidArgumentError(
        Concat(begin,
               "this model's file has no quantised weights; int8, int4, fp8, w8a8 and w4a8 "
               "round them"));
  }
  if (file.odd != nullptr) {
    return absl::InvalidArgumentError(Concat(begin, "a matrix of this model has rows of ",
                                             file.odd->cols,
                                             " values, which are no multiple of 32"));
  }
  return absl::OkStatus();
}

}  // namespace

const char* WeightStorageName(WeightStorage storage) {
  switch (storage) {
    case WeightStorage::kWide:
      return "wide";
    case WeightStorage::kStored:
      return "stored";
    case WeightStorage::kInt8:
      return "int8";
    case WeightStorage::kInt4:
      return "int4";
    case WeightStorage::kFloat8:
      return "fp8";
    case WeightStorage::kW8A8:
      return "w8a8";
    case WeightStorage::kW4A8:
      return "w4a8";
  }
  return "";
}

std::vector<std::string> WeightStorageNames() {
  std::vector<std::string> names;
  for (const WeightStorage storage : kStorages) names.emplace_back(WeightStorageName(storage));
  return names;
}

absl::StatusOr<WeightStorage> ParseWeightStorage(std::string_view text) {
  for (const WeightStorage storage : kStorages) {
    if (text == WeightStorageName(storage)) return storage;
  }
  return absl::InvalidArgumentError(
      Concat("weights: '", text, "' is not one of ", absl::StrJoin(WeightStorageNames(), ", ")));
}

absl::Status CheckWeightStorage(WeightStorage storage, const Weights& weights) {
  if (storage == WeightStorage::kWide) return absl::OkStatus();
  const FormsOfFile file = FormsOf(weights, storage);
  if (Rounds(storage) && file.quantized != nullptr) {
    return absl::InvalidArgumentError(
        Concat("weights is ", WeightStorageName(storage), ": this model's file is quantised (",
               kernels::WeightTypeName(file.quantized->type), "): say ",
               file.scattered ? "wide" : "stored or wide"));
  }
  return CheckForm("weights", "wide", storage, file);
}

std::vector<std::string> DraftWeightNames() {
  std::vector<std::string> names = {std::string(kNoDraftWeights)};
  for (const WeightStorage storage : kStorages) {
    if (storage != WeightStorage::kWide) names.emplace_back(WeightStorageName(storage));
  }
  return names;
}

absl::StatusOr<std::optional<WeightStorage>> ParseDraftWeights(std::string_view text,
                                                               WeightStorage of_answers) {
  if (text == kNoDraftWeights) return std::nullopt;
  const std::vector<std::string> names = DraftWeightNames();
  if (std::find(names.begin(), names.end(), text) == names.end()) {
    return absl::InvalidArgumentError(
        Concat("draft_weights: '", text, "' is not one of ", absl::StrJoin(names, ", ")));
  }
  absl::StatusOr<WeightStorage> storage = ParseWeightStorage(text);
  if (!storage.ok()) return storage.status();
  if (*storage == of_answers) {
    return absl::InvalidArgumentError(
        Concat("draft_weights is ", text, ", which is what answers have (weights): say none"));
  }
  return *storage;
}

absl::Status CheckDraftWeights(WeightStorage storage, const Weights& weights) {
  return CheckForm("draft_weights", kNoDraftWeights, storage, FormsOf(weights, storage));
}

int64_t StorageBytes(WeightStorage storage, const Weights& weights, kernels::DType compute,
                     bool bfloat16_blocks) {
  int64_t bytes = VectorBytes(weights);
  ForEachMatrix(weights, [&](const WeightMatrix& matrix, bool is_output) {
    bytes += MatrixBytes(storage, matrix, is_output, compute, bfloat16_blocks);
  });
  return bytes;
}

int64_t DraftWeightBytes(WeightStorage storage, const Weights& weights, kernels::DType compute,
                         bool bfloat16_blocks) {
  int64_t bytes = 0;
  ForEachMatrix(weights, [&](const WeightMatrix& matrix, bool is_output) {
    bytes += MatrixBytes(storage, matrix, is_output, compute, bfloat16_blocks);
  });
  return bytes;
}

int64_t ExpertStorageBytes(WeightStorage storage, const Weights& weights, kernels::DType compute,
                           bool bfloat16_blocks) {
  int64_t bytes = 0;
  for (const LayerWeights& layer : weights.layers) {
    for (const ExpertWeights& expert : layer.experts) {
      for (const WeightMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
        bytes += MatrixBytes(storage, *matrix, /*is_output=*/false, compute, bfloat16_blocks);
      }
      for (const WeightMatrix* bias : {&expert.gate_bias, &expert.up_bias, &expert.down_bias}) {
        if (bias->data != nullptr) bytes += bias->rows * static_cast<int64_t>(sizeof(float));
      }
    }
  }
  return bytes;
}

int64_t WideningBytes(WeightStorage storage, const Weights& weights) {
  if (storage == WeightStorage::kWide) return 0;
  int64_t values = weights.lm_head.rows * weights.lm_head.cols;
  for (const LayerWeights& layer : weights.layers) {
    const int64_t qkv = (layer.q.rows + layer.k.rows + layer.v.rows) * layer.q.cols;
    const int64_t gate_up = (layer.gate.rows + layer.up.rows) * layer.gate.cols;
    values = std::max(
        {values, qkv, layer.o.rows * layer.o.cols, gate_up, layer.down.rows * layer.down.cols});
    for (const ExpertWeights& expert : layer.experts) {
      values = std::max({values, (expert.gate.rows + expert.up.rows) * expert.gate.cols,
                         expert.down.rows * expert.down.cols});
    }
  }
  return std::min(2 * values, kWidenedBytesMax);
}

bool IsStored(WeightStorage storage, std::span<const WeightMatrix> parts) {
  if (Rounds(storage)) return true;
  return storage == WeightStorage::kStored && std::any_of(parts.begin(), parts.end(), IsQuantized);
}

absl::StatusOr<StoredParts> StoredPartsOf(WeightStorage storage,
                                          std::span<const WeightMatrix> parts, bool is_output) {
  StoredParts stored;
  for (const WeightMatrix& matrix : parts) {
    kernels::StoredMatrix part{.type = matrix.type, .cols = matrix.cols, .rows = {}};
    const bool rounds = Rounds(storage) && !HasIntegersFor(storage, matrix);
    if (!rounds && matrix.source == nullptr) {
      for (int64_t row = 0; row < matrix.rows; ++row) part.rows.push_back(matrix.RowInFile(row));
      stored.parts.push_back(std::move(part));
      continue;
    }
    if (Rounds(storage)) part.type = RoundedType(storage, matrix.cols, is_output);
    if (storage == WeightStorage::kW4A8 && part.type == WeightType::kI8x128) part.integer_bits = 4;
    const int64_t row_bytes = kernels::WeightRowBytes(part.type, matrix.cols);
    std::unique_ptr<std::byte[]> copy(new (std::nothrow) std::byte[matrix.rows * row_bytes]);
    if (copy == nullptr) {
      return absl::ResourceExhaustedError(
          Concat("no memory to round or reorder weights: ", matrix.rows * row_bytes, " bytes"));
    }
    ForEachRowRange(matrix.rows, matrix.cols, [&](int64_t first, int64_t last) {
      RowWriter writer(matrix, part, rounds);
      for (int64_t row = first; row < last; ++row) writer.Write(row, copy.get() + row * row_bytes);
    });
    for (int64_t row = 0; row < matrix.rows; ++row) {
      part.rows.push_back(copy.get() + row * row_bytes);
    }
    stored.parts.push_back(std::move(part));
    stored.copies.push_back(std::move(copy));
  }
  return stored;
}

}  // namespace winnow::engine
