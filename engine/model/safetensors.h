// The safetensors container, by the rules of the reference implementation:
//
//   file    := length header data
//   length  := N, 8 bytes little-endian, at most 100,000,000
//   header  := N bytes of JSON that begin with '{':
//              {"name": tensor, ..., "__metadata__": {"key": "value", ...}}
//   tensor  := {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}
//   data    := the tensors' bytes, without hole or overlap, up to the end of the file
//
// The file is untrusted. What the reference lets pass and winnow refuses: blanks before the '{', a
// name or a field twice, fields besides the three, a null "__metadata__", more than 8 dimensions, a
// JSON string, number or run of blanks beyond 1 MiB, more than 65,536 metadata entries or 262,144
// tensors. They bound what a hostile header costs: at most 2 bytes of heap per byte of header (plus
// 16 MiB), and less than 1 s for the longest (0.5 s was measured).
#ifndef WINNOW_ENGINE_MODEL_SAFETENSORS_H_
#define WINNOW_ENGINE_MODEL_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"

namespace winnow::engine {

// The longest header by the format's rules.
inline constexpr uint64_t kSafetensorsHeaderBytesMax = 100'000'000;

// What stands before the data of a file with this header: its length, and the text, padded with
// blanks so that the data begin on a multiple of 8.
std::string SafetensorsHead(std::string header_json);

// One tensor of a header; its views live as long as the header.
struct SafetensorsEntry {
  std::string_view name;
  std::string_view dtype;           // "BF16", "F32", "I64", ...
  std::span<const uint64_t> shape;  // empty for a scalar
  uint64_t begin = 0, end = 0;      // bytes from the start of the data section
};

// A checked header. Immutable; any thread may read it. Movable (moving keeps views valid).
class SafetensorsHeader {
 public:
  // `prefix` holds at least the 8 length bytes and the header; `file_size` is the whole file's
  // size. InvalidArgument names the tensor and the rule it breaks. Keeps nothing of `prefix`.
  static absl::StatusOr<SafetensorsHeader> Parse(std::span<const std::byte> prefix,
                                                 uint64_t file_size);

  SafetensorsHeader(SafetensorsHeader&&) noexcept;
  SafetensorsHeader& operator=(SafetensorsHeader&&) noexcept;
  ~SafetensorsHeader();

  size_t num_tensors() const;
  SafetensorsEntry tensor(
      size_t index) const;  // in the order of their bytes. REQUIRES: index < num_tensors()
  std::optional<SafetensorsEntry> Find(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const;
  uint64_t data_offset() const;  // of the data section in the file

 private:
  struct Rep;
  explicit SafetensorsHeader(std::unique_ptr<Rep> rep);
  std::unique_ptr<Rep> rep_;
};

// A memory-mapped, read-only file. The file must not shrink while it is open: reading a page past
// its new end is a SIGBUS. A model directory is not to be changed while it is served.
class SafetensorsFile {
 public:
  // NotFound, PermissionDenied: as the system says. InvalidArgument: not a regular file, or what
  // SafetensorsHeader::Parse refuses. Errors begin with the path. Reads the header alone.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size_bytes() const { return size_bytes_; }
  const SafetensorsHeader& header() const { return header_; }
  // The bytes of one of this file's entries. Aligned as the file has them, possibly not at all.
  std::span<const std::byte> Data(const SafetensorsEntry& entry) const;

  // Gives the pages that were read back to the system; what is read again comes from the file
  // again. For when the tensors have been copied: a process need not hold its weights twice.
  void ReleasePages() const;

 private:
  SafetensorsFile(std::string path, SafetensorsHeader header, const std::byte* map,
                  uint64_t size_bytes);
  std::string path_;
  SafetensorsHeader header_;
  const std::byte* map_;
  uint64_t size_bytes_;
};

// "FILE: tensor "NAME" at byte N: ", for errors.
std::string TensorPlace(const SafetensorsFile& file, const SafetensorsEntry& entry);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_SAFETENSORS_H_
