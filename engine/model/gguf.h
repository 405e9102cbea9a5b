// The GGUF container, version 3, little-endian:
//
//   file    := "GGUF" version[4] num_tensors[8] num_keys[8] key* tensor* padding data
//   key     := string type[4] value
//   value   := a number, a bool of one byte, a string, or an array := type[4] count[8] element*
//   tensor  := string num_dims[4] dim[8]* type[4] offset[8]
//   string  := length[8] bytes
//   data    := begins at a multiple of the alignment, "general.alignment" or 32; each tensor at its
//              offset from there, which is a multiple of it too. The first dimension is the fastest.
//
// The file is untrusted. Counts, lengths, products and offsets are checked before they are used, with
// arithmetic that cannot overflow. Besides what is malformed, winnow refuses: other versions and byte
// orders; a key or a tensor that is there twice; arrays of arrays; a bool that is neither 0 nor 1; a key
// of more than 65,535 bytes or a tensor's name of more than 64 (both by the specification); a tensor of
// no dimension, of more than 4, or with one that is 0; an alignment that is not a power of two up to
// 1 MiB; tensors that overlap; more than 65,536 keys, 65,536 tensors, 2^24 elements of an array, or
// 256 MiB before the data. They bound what a hostile file costs: 32 MiB of heap, and less than 1 s.
#ifndef WINNOW_ENGINE_MODEL_GGUF_H_
#define WINNOW_ENGINE_MODEL_GGUF_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "kernels/quantized.h"

namespace winnow::engine {

// The numbers are the format's.
enum class GgufValueType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

std::string GgufTypeName(GgufValueType type);  // "uint32"

// Spelling of a tensor type's number, as "IQ4_XS"; "type 99" where there is none.
std::string GgufTensorTypeName(uint32_t type);
// The type that winnow reads; absent if it reads no such type.
std::optional<kernels::WeightType> WeightTypeOfGguf(uint32_t type);

// The value of a key; its views live as long as the file's bytes.
struct GgufValue {
  std::string_view key;
  GgufValueType type = GgufValueType::kUint8;
  GgufValueType element = GgufValueType::kUint8;  // of an array
  uint64_t count = 0;                             // elements of an array
  uint64_t offset = 0;               // of the value in the file; of an array's first element
  const std::byte* bytes = nullptr;  // the same place in memory

  // The value as another type of number holds it; absent if the value is no number of that kind.
  // Integers of every width are integers; floats are not.
  std::optional<int64_t> Integer() const;  // absent above 2^63 - 1, too
  std::optional<double> Float() const;
  std::optional<bool> Bool() const;
  std::optional<std::string_view> String() const;

  bool IsArrayOf(GgufValueType of) const { return type == GgufValueType::kArray && element == of; }
  // Element `index` of an array of numbers, as above. REQUIRES: an array, index < count.
  std::optional<int64_t> IntegerAt(uint64_t index) const;
  std::optional<double> FloatAt(uint64_t index) const;
  // REQUIRES: IsArrayOf(kBool), index < count.
  bool BoolAt(uint64_t index) const;
  // All elements of an array of strings: 16 bytes of heap for each. REQUIRES: IsArrayOf(kString).
  std::vector<std::string_view> Strings() const;
};

// One tensor of a file; its views live as long as the file's bytes.
struct GgufTensor {
  std::string_view name;
  uint32_t type = 0;  // the format's number
  uint32_t num_dims = 0;
  std::array<uint64_t, 4> dims = {1, 1, 1, 1};  // the fastest first
  uint64_t begin = 0, end = 0;                  // bytes of the file
};

// Everything of a file but the tensors' data, checked. Immutable; any thread may read it. Movable.
class GgufContents {
 public:
  // `file` is the whole file and must outlive this. InvalidArgument names the key or tensor, the byte
  // offset and the rule. Unimplemented: another version or byte order. Reads no tensor's data.
  static absl::StatusOr<GgufContents> Parse(std::span<const std::byte> file);

  const std::vector<GgufValue>& values() const { return values_; }     // in the file's order
  const std::vector<GgufTensor>& tensors() const { return tensors_; }  // in the file's order
  const GgufValue* Find(std::string_view key) const;                   // null if it is not there
  const GgufTensor* FindTensor(std::string_view name) const;           // null if it is not there
  uint64_t data_offset() const { return data_offset_; }
  std::span<const std::byte> Data(const GgufTensor& tensor) const {
    return file_.subspan(tensor.begin, tensor.end - tensor.begin);
  }

 private:
  class Reader;
  std::span<const std::byte> file_;
  std::vector<GgufValue> values_;
  std::vector<GgufTensor> tensors_;
  absl::flat_hash_map<std::string_view, uint32_t> value_index_, tensor_index_;
  uint64_t data_offset_ = 0;
};

// Whether a model's path means a GGUF file: it is there and is no directory, or is not there and would be called one.
bool IsGgufPath(const std::string& path);

// A memory-mapped, read-only file. The file must not shrink while it is open: reading a page past its
// new end is a SIGBUS. A model's file is not to be changed while it is served.
class GgufFile {
 public:
  // NotFound, PermissionDenied: as the system says. InvalidArgument: not a regular file, or what
  // GgufContents::Parse refuses. Errors begin with the path.
  static absl::StatusOr<std::unique_ptr<GgufFile>> Open(const std::string& path);
  ~GgufFile();
  GgufFile(const GgufFile&) = delete;
  GgufFile& operator=(const GgufFile&) = delete;

  const std::string& path() const { return path_; }
  const GgufContents& contents() const { return contents_; }
  // Gives the pages that were read back to the system; what is read again comes from the file again.
  void ReleasePages() const;

 private:
  GgufFile(std::string path, std::span<const std::byte> bytes, GgufContents contents);
  std::string path_;
  std::span<const std::byte> bytes_;
  GgufContents contents_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_GGUF_H_
