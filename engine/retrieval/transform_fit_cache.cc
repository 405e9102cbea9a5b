#include "engine/retrieval/transform_fit_cache.h"

#include <cstring>
#include <filesystem>
#include <utility>

#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/replace_file.h"
#include "engine/base/status_macros.h"
#include "engine/kv/block_name.h"
#include "fmt/format.h"
#include "kernels/transform_code.h"

namespace winnow::engine {
namespace {

using kernels::CodeField;
using kernels::TransformCodeHead;
using kernels::TransformCodeWeights;

constexpr std::string_view kMagic = "WNWTFIT2";
constexpr size_t kFileBytesMax = size_t{1} << 31;

void AddBytes(const void* bytes, size_t size, std::string& out) {
  out.append(static_cast<const char*>(bytes), size);
}
void AddU32(uint32_t value, std::string& out) { AddBytes(&value, sizeof value, out); }
void AddFloats(const std::vector<float>& values, std::string& out) {
  AddBytes(values.data(), values.size() * sizeof(float), out);
}

// Takes values off the front of a text; once that fails, everything does.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}
  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && text_.empty(); }
  uint32_t U32() {
    uint32_t value = 0;
    Take(&value, sizeof value);
    return value;
  }
  uint8_t U8() {
    uint8_t value = 0;
    Take(&value, sizeof value);
    return value;
  }
  int16_t I16() {
    int16_t value = 0;
    Take(&value, sizeof value);
    return value;
  }
  std::vector<float> Floats(size_t count) {
    if (!ok_ || text_.size() / sizeof(float) < count) {
      ok_ = false;
      return {};
    }
    std::vector<float> values(count);
    Take(values.data(), count * sizeof(float));
    return values;
  }

 private:
  void Take(void* to, size_t size) {
    ok_ &= text_.size() >= size;
    if (!ok_ || size == 0) return;
    std::memcpy(to, text_.data(), size);
    text_.remove_prefix(size);
  }
  std::string_view text_;
  bool ok_ = true;
};

void AddHead(const TransformCodeHead& head, size_t d, std::string& out) {
  AddU32(static_cast<uint32_t>(head.quads), out);
  AddBytes(head.widths.data(), head.widths.size(), out);
  AddU32(static_cast<uint32_t>(head.fields.size()), out);
  for (const CodeField& field : head.fields) {
    for (const uint8_t value : {field.word, field.shift, field.width, field.low, field.quad}) {
      out.push_back(static_cast<char>(value));
    }
  }
  AddU32(static_cast<uint32_t>(head.cell_bits.size()), out);
  AddBytes(head.cell_bits.data(), head.cell_bits.size(), out);
  out.push_back(head.tail ? 1 : 0);
  AddU32(static_cast<uint32_t>(head.delta_weight.size() / d), out);
  AddFloats(head.key_weight, out);
  AddFloats(head.key_bias, out);
  AddFloats(head.query_weight, out);
  AddFloats(head.mean, out);
  AddFloats(head.delta_weight, out);
  AddBytes(head.first_dims.data(), head.first_dims.size() * sizeof(int16_t), out);
  AddFloats(head.first_steps, out);
}

std::string Body(const TransformFit& fit) {
  std::string out;
  AddU32(static_cast<uint32_t>(fit.bits), out);
  AddU32(static_cast<uint32_t>(fit.sample_tokens), out);
  AddU32(static_cast<uint32_t>(fit.layers.size()), out);
  const bool any = !fit.layers.empty();
  AddU32(any ? static_cast<uint32_t>(fit.layers[0].heads.size()) : 0, out);
  AddU32(any ? static_cast<uint32_t>(fit.layers[0].head_dim) : 0, out);
  for (size_t layer = 0; layer < fit.layers.size(); ++layer) {
    for (const TransformCodeWeights* code : {&fit.layers[layer], &fit.residuals[layer]}) {
      for (const TransformCodeHead& head : code->heads) AddHead(head, code->head_dim, out);
    }
  }
  return out;
}

bool ReadHead(Reader& in, size_t d, bool is_residual, TransformCodeHead& head) {
  const uint32_t quads = in.U32();
  if (!in.ok() || quads < 1 || 4 * size_t{quads} > d) return false;
  head.quads = static_cast<int32_t>(quads);
  for (uint32_t i = 0; i < quads; ++i) head.widths.push_back(in.U8());
  const uint32_t fields = in.U32();
  if (!in.ok() || fields > 64) return false;
  for (uint32_t i = 0; i < fields; ++i) {
    CodeField field;
    for (uint8_t* value : {&field.word, &field.shift, &field.width, &field.low, &field.quad}) {
      *value = in.U8();
    }
    head.fields.push_back(field);
  }
  const uint32_t cell_bits = in.U32();
  if (!in.ok() || cell_bits > 8) return false;
  for (uint32_t i = 0; i < cell_bits; ++i) head.cell_bits.push_back(in.U8());
  const uint8_t tail = in.U8();
  const uint32_t delta_rows = in.U32();
  if (!in.ok() || tail > 1 || delta_rows > d) return false;
  head.tail = tail == 1;
  const size_t n = size_t{4} * quads;
  head.key_weight = in.Floats(d * n);
  head.key_bias = in.Floats(n);
  head.query_weight = in.Floats(d * n);
  head.mean = in.Floats(d);
  head.delta_weight = in.Floats(delta_rows * d);
  if (is_residual) {
    for (size_t i = 0; i < n; ++i) head.first_dims.push_back(in.I16());
    head.first_steps = in.Floats(n);
  }
  return in.ok();
}

std::string DigestOf(std::string_view bytes) {
  const Digest digest = Sha256(bytes);
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

std::string TransformFitId(const TransformFit& fit) {
  std::string id;
  for (const char byte : DigestOf(Body(fit))) {
    id += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  }
  return id;
}

std::string SerialiseTransformFit(const TransformFit& fit, std::string_view key) {
  const std::string body = Body(fit);
  return Concat(std::string(kMagic), DigestOf(key), DigestOf(body), body);
}

std::optional<TransformFit> ParseTransformFit(std::string_view text, std::string_view key,
                                              const ModelConfig& config) {
  const size_t digest = sizeof(Digest), head_bytes = kMagic.size() + 2 * digest;
  if (text.size() < head_bytes || text.substr(0, kMagic.size()) != kMagic ||
      text.substr(kMagic.size(), digest) != DigestOf(key)) {
    return std::nullopt;
  }
  const std::string_view body = text.substr(head_bytes);
  if (text.substr(kMagic.size() + digest, digest) != DigestOf(body)) return std::nullopt;
  Reader in(body);
  TransformFit fit;
  fit.bits = static_cast<int32_t>(in.U32());
  fit.sample_tokens = static_cast<int32_t>(in.U32());
  const uint32_t layers = in.U32(), heads = in.U32(), d = in.U32();
  if (!in.ok() || layers != static_cast<uint32_t>(config.num_layers()) ||
      heads != static_cast<uint32_t>(config.num_kv_heads) ||
      d != static_cast<uint32_t>(config.head_dim)) {
    return std::nullopt;
  }
  for (uint32_t layer = 0; layer < layers; ++layer) {
    for (std::vector<TransformCodeWeights>* codes : {&fit.layers, &fit.residuals}) {
      TransformCodeWeights& weights = codes->emplace_back();
      weights.head_dim = static_cast<int32_t>(d);
      weights.bits = fit.bits;
      for (uint32_t head = 0; head < heads; ++head) {
        if (!ReadHead(in, d, codes == &fit.residuals, weights.heads.emplace_back())) {
          return std::nullopt;
        }
      }
    }
    if (!kernels::CheckTransformCode(fit.layers.back()).empty() ||
        !kernels::CheckResidualCode(fit.layers.back(), fit.residuals.back()).empty()) {
      return std::nullopt;
    }
  }
  if (!in.at_end()) return std::nullopt;
  fit.id = TransformFitId(fit);
  return fit;
}

absl::StatusOr<std::optional<TransformFit>> ReadTransformFit(const std::string& path,
                                                             std::string_view key,
                                                             const ModelConfig& config) {
  const absl::StatusOr<std::string> text = ReadSmallFile(path, kFileBytesMax);
  if (absl::IsNotFound(text.status())) return std::nullopt;
  WINNOW_RETURN_IF_ERROR(text.status());
  return ParseTransformFit(*text, key, config);
}

absl::Status WriteTransformFit(const std::string& path, std::string_view key,
                               const TransformFit& fit) {
  return ReplaceFile(path, SerialiseTransformFit(fit, key), Sync::kNo);
}

std::string TransformFitPath(const std::string& crossover_path, std::string_view key) {
  if (crossover_path.empty()) return "";
  std::string name = "fit-";
  for (const char byte : DigestOf(key).substr(0, 12)) {
    name += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  }
  return (std::filesystem::path(crossover_path).parent_path() / (name + ".bin")).string();
}

}  // namespace winnow::engine
