// GGUF files made on the spot, for the tests of what reads them.
#ifndef WINNOW_TESTS_UNIT_ENGINE_GGUF_FILES_H_
#define WINNOW_TESTS_UNIT_ENGINE_GGUF_FILES_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "engine/model/gguf.h"

namespace winnow::engine {

// Writes keys and tensors in the order in which they are added. What breaks a file is set in the fields, or in the
// bytes that it gives.
class GgufBuilder {
 public:
  template <typename T>
  static std::string Bytes(T value) {
    std::string bytes(sizeof(value), '\0');
    std::memcpy(bytes.data(), &value, sizeof(value));
    return bytes;
  }
  static std::string String(std::string_view text) {
    return Bytes<uint64_t>(text.size()) + std::string(text);
  }

  // A key whose value's bytes are given.
  void Raw(std::string_view key, GgufValueType type, std::string_view value) {
    keys_.push_back({std::string(key), Bytes(static_cast<uint32_t>(type)) + std::string(value)});
  }
  void Set(std::string_view key, uint32_t value) { Raw(key, GgufValueType::kUint32, Bytes(value)); }
  void Set(std::string_view key, float value) { Raw(key, GgufValueType::kFloat32, Bytes(value)); }
  void Set(std::string_view key, bool value) {
    Raw(key, GgufValueType::kBool, Bytes<uint8_t>(value ? 1 : 0));
  }
  void Set(std::string_view key, std::string_view value) {
    Raw(key, GgufValueType::kString, String(value));
  }
  void Set(std::string_view key, const char* value) { Set(key, std::string_view(value)); }
  void Array(std::string_view key, GgufValueType element, uint64_t count, std::string_view bytes) {
    Raw(key, GgufValueType::kArray,
        Bytes(static_cast<uint32_t>(element)) + Bytes(count) + std::string(bytes));
  }
  void Set(std::string_view key, const std::vector<std::string>& values) {
    std::string bytes;
    for (const std::string& value : values) bytes += String(value);
    Array(key, GgufValueType::kString, values.size(), bytes);
  }
  void Set(std::string_view key, const std::vector<int32_t>& values) {
    std::string bytes;
    for (const int32_t value : values) bytes += Bytes(value);
    Array(key, GgufValueType::kInt32, values.size(), bytes);
  }
  void Set(std::string_view key, const std::vector<float>& values) {
    std::string bytes;
    for (const float value : values) bytes += Bytes(value);
    Array(key, GgufValueType::kFloat32, values.size(), bytes);
  }
  void Remove(std::string_view key) {
    std::erase_if(keys_, [&](const auto& entry) { return entry.first == key; });
  }

  // `dims` with the fastest first; `type` is the format's number.
  void Tensor(std::string_view name, std::vector<uint64_t> dims, uint32_t type, std::string data) {
    data_.resize((data_.size() + alignment - 1) / alignment * alignment, '\0');
    tensors_.push_back({std::string(name), std::move(dims), type, data_.size()});
    data_ += data;
  }
  struct TensorInfo {
    std::string name;
    std::vector<uint64_t> dims;
    uint32_t type;
    uint64_t offset;
  };
  std::vector<TensorInfo>& tensors() { return tensors_; }

  uint32_t version = 3;
  uint64_t alignment = 32;
  uint64_t more_keys = 0, more_tensors = 0;  // that the head counts and nobody wrote

  std::string Build() const {
    std::string file = "GGUF" + Bytes(version) + Bytes<uint64_t>(tensors_.size() + more_tensors) +
                       Bytes<uint64_t>(keys_.size() + more_keys);
    for (const auto& [key, value] : keys_) file += String(key) + value;
    for (const TensorInfo& tensor : tensors_) {
      file += String(tensor.name) + Bytes<uint32_t>(static_cast<uint32_t>(tensor.dims.size()));
      for (const uint64_t dim : tensor.dims) file += Bytes(dim);
      file += Bytes(tensor.type) + Bytes(tensor.offset);
    }
    file.resize((file.size() + alignment - 1) / alignment * alignment, '\0');
    return file + data_;
  }

 private:
  std::vector<std::pair<std::string, std::string>> keys_;  // name, and type with value
  std::vector<TensorInfo> tensors_;
  std::string data_;
};

// The tensor types' numbers that tests use.
inline constexpr uint32_t kGgufF32 = 0, kGgufF16 = 1, kGgufQ8_0 = 8, kGgufQ4K = 12, kGgufBF16 = 30;

inline std::span<const std::byte> AsBytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

}  // namespace winnow::engine

#endif  // WINNOW_TESTS_UNIT_ENGINE_GGUF_FILES_H_
