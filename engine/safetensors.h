// The safetensors container, by the rules of the reference implementation: 8-byte little-endian
// header length N (at most 100,000,000), N bytes of JSON that starts with '{', then the tensors'
// bytes without hole or overlap up to the end of the file. The file is untrusted.
#ifndef WINNOW_ENGINE_SAFETENSORS_H_
#define WINNOW_ENGINE_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace winnow::engine {

struct SafetensorsEntry {
  std::string dtype;            // "BF16", "F32", "I64", ...
  std::vector<uint64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes from the start of the data section
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry, std::less<>> tensors;
  std::map<std::string, std::string> metadata;
  uint64_t data_offset = 0;     // of the data section in the file
};

// `prefix` holds at least the 8 length bytes and the header; `file_size` is the whole file's size.
// InvalidArgument names the tensor and the rule it breaks. Memory: a small multiple of the header.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::span<const std::byte> prefix, uint64_t file_size);

// A memory-mapped, read-only file. Movable through its unique_ptr only.
class SafetensorsFile {
 public:
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  const SafetensorsHeader& header() const { return header_; }
  std::span<const std::byte> Data(const SafetensorsEntry& entry) const;

 private:
  SafetensorsFile() = default;
  std::string path_;
  SafetensorsHeader header_;
  const std::byte* map_ = nullptr;
  uint64_t size_bytes_ = 0;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SAFETENSORS_H_
