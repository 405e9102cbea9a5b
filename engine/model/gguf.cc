#include "engine/model/gguf.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <numeric>

#include "absl/cleanup/cleanup.h"
#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "kernels/check.h"

namespace winnow::engine {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are read as they lie");

constexpr uint64_t kKeysMax = 1 << 16, kTensorsMax = 1 << 16, kElementsMax = 1 << 24;
constexpr uint64_t kMetadataBytesMax = uint64_t{256} << 20;
constexpr uint64_t kKeyBytesMax = 65535, kTensorNameBytesMax = 64, kDimsMax = 4;
constexpr uint64_t kAlignmentDefault = 32, kAlignmentMax = 1 << 20;
constexpr uint32_t kVersion = 3;

// Size of a number; 0 for a string or an array.
uint64_t NumberBytes(GgufValueType type) {
  switch (type) {
    case GgufValueType::kUint8:
    case GgufValueType::kInt8:
    case GgufValueType::kBool:
      return 1;
    case GgufValueType::kUint16:
    case GgufValueType::kInt16:
      return 2;
    case GgufValueType::kUint32:
    case GgufValueType::kInt32:
    case GgufValueType::kFloat32:
      return 4;
    case GgufValueType::kUint64:
    case GgufValueType::kInt64:
    case GgufValueType::kFloat64:
      return 8;
    case GgufValueType::kString:
    case GgufValueType::kArray:
      return 0;
  }
  return 0;
}

template <typename T>
T Load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

std::optional<int64_t> IntegerOf(GgufValueType type, const std::byte* at) {
  switch (type) {
    case GgufValueType::kUint8:
      return Load<uint8_t>(at);
    case GgufValueType::kInt8:
      return Load<int8_t>(at);
    case GgufValueType::kUint16:
      return Load<uint16_t>(at);
    case GgufValueType::kInt16:
      return Load<int16_t>(at);
    case GgufValueType::kUint32:
      return Load<uint32_t>(at);
    case GgufValueType::kInt32:
      return Load<int32_t>(at);
    case GgufValueType::kInt64:
      return Load<int64_t>(at);
    case GgufValueType::kUint64: {
      const auto value = Load<uint64_t>(at);
      if (value > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
      return static_cast<int64_t>(value);
    }
    default:
      return std::nullopt;
  }
}

std::optional<double> FloatOf(GgufValueType type, const std::byte* at) {
  if (type == GgufValueType::kFloat32) return Load<float>(at);
  if (type == GgufValueType::kFloat64) return Load<double>(at);
  return std::nullopt;
}

std::string Quote(std::string_view text) { return ShortDump(std::string(text)); }

// A type of tensors by the format, whether or not winnow reads it: what a block takes is known, so that places are
// checked and the type refused by name where the tensor is needed.
struct TensorType {
  uint32_t number;
  const char* name;
  uint64_t block_values, block_bytes;
};
constexpr TensorType kTensorTypes[] = {
    {0, "F32", 1, 4},         {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},
    {3, "Q4_1", 32, 20},      {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},
    {8, "Q8_0", 32, 34},      {9, "Q8_1", 32, 40},      {10, "Q2_K", 256, 84},
    {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},
    {14, "Q6_K", 256, 210},   {15, "Q8_K", 256, 292},   {16, "IQ2_XXS", 256, 66},
    {17, "IQ2_XS", 256, 74},  {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50},
    {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110},  {22, "IQ2_S", 256, 82},
    {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},         {25, "I16", 1, 2},
    {26, "I32", 1, 4},        {27, "I64", 1, 8},        {28, "F64", 1, 8},
    {29, "IQ1_M", 256, 56},   {30, "BF16", 1, 2},       {34, "TQ1_0", 256, 54},
    {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},    {40, "NVFP4", 64, 36},
    {41, "Q1_0", 128, 18},
};

const TensorType* FindTensorType(uint32_t number) {
  const auto found = std::find_if(std::begin(kTensorTypes), std::end(kTensorTypes),
                                  [&](const TensorType& type) { return type.number == number; });
  return found == std::end(kTensorTypes) ? nullptr : found;
}

}  // namespace

std::string GgufTypeName(GgufValueType type) {
  constexpr const char* kNames[] = {"uint8",  "int8",    "uint16", "int16",  "uint32",
                                    "int32",  "float32", "bool",   "string", "array",
                                    "uint64", "int64",   "float64"};
  const auto number = static_cast<size_t>(type);
  return number < std::size(kNames) ? kNames[number] : Concat("type ", number);
}

std::string GgufTensorTypeName(uint32_t type) {
  const TensorType* known = FindTensorType(type);
  return known != nullptr ? known->name : Concat("type ", type);
}

std::optional<kernels::WeightType> WeightTypeOfGguf(uint32_t type) {
  const TensorType* known = FindTensorType(type);
  if (known == nullptr) return std::nullopt;
  for (int i = 0; i < kernels::kNumGgufTypes; ++i) {
    const auto weight_type = static_cast<kernels::WeightType>(i);
    if (std::string_view(kernels::WeightTypeName(weight_type)) == known->name) return weight_type;
  }
  return std::nullopt;
}

std::optional<int64_t> GgufValue::Integer() const { return IntegerOf(type, bytes); }
std::optional<double> GgufValue::Float() const { return FloatOf(type, bytes); }

std::optional<bool> GgufValue::Bool() const {
  if (type != GgufValueType::kBool) return std::nullopt;
  return Load<uint8_t>(bytes) != 0;
}

std::optional<std::string_view> GgufValue::String() const {
  if (type != GgufValueType::kString) return std::nullopt;
  return std::string_view(reinterpret_cast<const char*>(bytes) + 8, Load<uint64_t>(bytes));
}

std::optional<int64_t> GgufValue::IntegerAt(uint64_t index) const {
  WINNOW_CHECK(type == GgufValueType::kArray && index < count);
  return IntegerOf(element, bytes + index * NumberBytes(element));
}

std::optional<double> GgufValue::FloatAt(uint64_t index) const {
  WINNOW_CHECK(type == GgufValueType::kArray && index < count);
  return FloatOf(element, bytes + index * NumberBytes(element));
}

bool GgufValue::BoolAt(uint64_t index) const {
  WINNOW_CHECK(IsArrayOf(GgufValueType::kBool) && index < count);
  return Load<uint8_t>(bytes + index) != 0;
}

std::vector<std::string_view> GgufValue::Strings() const {
  WINNOW_CHECK(IsArrayOf(GgufValueType::kString));
  std::vector<std::string_view> strings;
  strings.reserve(count);
  const std::byte* at = bytes;
  for (uint64_t i = 0; i < count; ++i) {
    const auto length = Load<uint64_t>(at);
    strings.emplace_back(reinterpret_cast<const char*>(at) + 8, length);
    at += 8 + length;
  }
  return strings;
}

// Reads from the beginning of the file to the data. The first error sticks: what is read after it is zero or empty.
class GgufContents::Reader {
 public:
  explicit Reader(std::span<const std::byte> file)
      : file_(file), end_(std::min<uint64_t>(file.size(), kMetadataBytesMax)) {}

  absl::Status Read(GgufContents* contents);

 private:
  bool ok() const { return status_.ok(); }
  void Fail(std::string_view what) { FailAt(at_, what); }
  void FailAt(uint64_t offset, std::string_view what) {
    if (ok()) status_ = absl::InvalidArgumentError(Concat(place_, "at byte ", offset, ": ", what));
  }

  // Whether `bytes` more are there.
  bool Has(uint64_t bytes, std::string_view what) {
    if (!ok()) return false;
    if (bytes <= end_ - at_) return true;
    Fail(end_ < file_.size()
             ? Concat(what, " of ", bytes, " bytes goes beyond the ", kMetadataBytesMax,
                      " bytes that may lie before the data")
             : Concat(what, " of ", bytes, " bytes goes beyond the end of the file"));
    return false;
  }

  template <typename T>
  T Number(std::string_view what) {
    if (!Has(sizeof(T), what)) return T{};
    const T value = Load<T>(file_.data() + at_);
    at_ += sizeof(T);
    return value;
  }

  std::string_view String(std::string_view what, uint64_t bytes_max) {
    const uint64_t from = at_;
    const auto length = Number<uint64_t>(what);
    if (!Has(length, what)) return {};
    if (length > bytes_max) {
      FailAt(from, Concat(what, " of ", length, " bytes; ", bytes_max, " is the most"));
      return {};
    }
    const std::string_view text(reinterpret_cast<const char*>(file_.data()) + at_, length);
    at_ += length;
    return text;
  }

  GgufValueType ValueType() {
    const uint64_t from = at_;
    const auto number = Number<uint32_t>("a type");
    if (ok() && number > static_cast<uint32_t>(GgufValueType::kFloat64)) {
      FailAt(from, Concat("there is no value type ", number));
    }
    return ok() ? static_cast<GgufValueType>(number) : GgufValueType::kUint8;
  }

  void Array(GgufValue* value);
  void Value(GgufValue* value);
  void Key(GgufContents* contents);
  void Tensor(GgufContents* contents);
  void PlaceData(GgufContents* contents);

  std::span<const std::byte> file_;
  uint64_t end_;  // of what may be read
  uint64_t at_ = 0;
  std::string place_;  // what is being read, for errors: "key \"general.name\" "
  absl::Status status_;
};

void GgufContents::Reader::Array(GgufValue* value) {
  value->element = ValueType();
  const uint64_t count_at = at_;
  value->count = Number<uint64_t>("a count");
  if (!ok()) return;
  if (value->element == GgufValueType::kArray) return Fail("arrays of arrays are not supported");
  if (value->count > kElementsMax) {
    return FailAt(count_at, Concat("an array of ", value->count, " elements; ", kElementsMax,
                                   " is the most"));
  }
  value->offset = at_;
  value->bytes = file_.data() + at_;
  if (value->element == GgufValueType::kString) {
    for (uint64_t i = 0; i < value->count && ok(); ++i) String("a string", kMetadataBytesMax);
    return;
  }
  const uint64_t bytes = value->count * NumberBytes(value->element);  // below 2^27
  if (!Has(bytes, "an array")) return;
  if (value->element == GgufValueType::kBool) {
    for (uint64_t i = 0; i < value->count; ++i) {
      if (Load<uint8_t>(file_.data() + at_ + i) > 1)
        return FailAt(at_ + i, "a bool must be 0 or 1");
    }
  }
  at_ += bytes;
}

void GgufContents::Reader::Value(GgufValue* value) {
  value->type = ValueType();
  if (!ok()) return;
  value->offset = at_;
  value->bytes = file_.data() + at_;
  if (value->type == GgufValueType::kArray) return Array(value);
  if (value->type == GgufValueType::kString) {
    String("a string", kMetadataBytesMax);
    return;
  }
  if (!Has(NumberBytes(value->type), "a number")) return;
  if (value->type == GgufValueType::kBool && Load<uint8_t>(value->bytes) > 1) {
    return Fail("a bool must be 0 or 1");
  }
  at_ += NumberBytes(value->type);
}

void GgufContents::Reader::Key(GgufContents* contents) {
  place_ = Concat("key ", contents->values_.size(), " ");
  const uint64_t from = at_;
  GgufValue value;
  value.key = String("a name", kKeyBytesMax);
  if (!ok()) return;
  if (value.key.empty()) return FailAt(from, "its name is empty");
  place_ = Concat("key ", Quote(value.key), " ");
  Value(&value);
  if (!ok()) return;
  const auto number = static_cast<uint32_t>(contents->values_.size());
  if (!contents->value_index_.emplace(value.key, number).second)
    return FailAt(from, "is there twice");
  contents->values_.push_back(value);
}

void GgufContents::Reader::Tensor(GgufContents* contents) {
  place_ = Concat("tensor ", contents->tensors_.size(), " ");
  const uint64_t from = at_;
  GgufTensor tensor;
  tensor.name = String("a name", kTensorNameBytesMax);
  if (!ok()) return;
  if (tensor.name.empty()) return FailAt(from, "its name is empty");
  place_ = Concat("tensor ", Quote(tensor.name), " ");
  tensor.num_dims = Number<uint32_t>("a number of dimensions");
  if (!ok()) return;
  if (tensor.num_dims < 1 || tensor.num_dims > kDimsMax) {
    return FailAt(at_ - 4, Concat(tensor.num_dims, " dimensions; there must be 1 to ", kDimsMax));
  }
  for (uint32_t i = 0; i < tensor.num_dims; ++i) {
    tensor.dims[i] = Number<uint64_t>("a dimension");
    if (!ok()) return;
    if (tensor.dims[i] == 0) return FailAt(at_ - 8, "a dimension is 0");
  }
  tensor.type = Number<uint32_t>("a type");
  if (!ok()) return;
  const TensorType* type = FindTensorType(tensor.type);
  if (type == nullptr) return FailAt(at_ - 4, Concat("there is no tensor type ", tensor.type));
  if (tensor.dims[0] % type->block_values != 0) {
    return FailAt(at_ - 4, Concat("rows of ", tensor.dims[0], " values, which ", type->name,
                                  " has in blocks of ", type->block_values));
  }
  const uint64_t offset_at = at_;
  const auto offset = Number<uint64_t>("an offset");
  if (!ok()) return;
  uint64_t bytes = tensor.dims[0] / type->block_values;
  bool fits = !__builtin_mul_overflow(bytes, type->block_bytes, &bytes);
  for (uint32_t i = 1; i < tensor.num_dims; ++i) {
    fits = fits && !__builtin_mul_overflow(bytes, tensor.dims[i], &bytes);
  }
  if (!fits || bytes > file_.size() || offset > file_.size()) {
    return FailAt(offset_at, "its data go beyond the end of the file");
  }
  // From the data's beginning, which is not known yet.
  tensor.begin = offset;
  tensor.end = offset + bytes;
  const auto number = static_cast<uint32_t>(contents->tensors_.size());
  if (!contents->tensor_index_.emplace(tensor.name, number).second) {
    return FailAt(from, "is there twice");
  }
  contents->tensors_.push_back(tensor);
}

// Finds where the data begin, and checks each tensor's place there.
void GgufContents::Reader::PlaceData(GgufContents* contents) {
  uint64_t alignment = kAlignmentDefault;
  if (const GgufValue* value = contents->Find("general.alignment")) {
    place_ = "key \"general.alignment\" ";
    const std::optional<int64_t> number = value->Integer();
    if (!number || *number < 1 || static_cast<uint64_t>(*number) > kAlignmentMax ||
        !std::has_single_bit(static_cast<uint64_t>(*number))) {
      return FailAt(value->offset, Concat("must be a power of two up to ", kAlignmentMax));
    }
    alignment = static_cast<uint64_t>(*number);
  }
  place_.clear();
  contents->data_offset_ = (at_ + alignment - 1) / alignment * alignment;
  std::vector<GgufTensor>& tensors = contents->tensors_;
  if (tensors.empty()) return;
  const uint64_t data_bytes =
      file_.size() < contents->data_offset_ ? 0 : file_.size() - contents->data_offset_;
  std::vector<uint32_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return tensors[a].begin < tensors[b].begin; });
  uint64_t taken = 0;
  const GgufTensor* before = nullptr;
  for (const uint32_t number : order) {
    GgufTensor& tensor = tensors[number];
    place_ = Concat("tensor ", Quote(tensor.name), " ");
    const uint64_t shown = contents->data_offset_ + tensor.begin;
    if (tensor.begin % alignment != 0) {
      return FailAt(shown, Concat("its offset ", tensor.begin, " is no multiple of the alignment ",
                                  alignment));
    }
    if (tensor.end > data_bytes) {
      return FailAt(shown, Concat("its ", tensor.end - tensor.begin,
                                  " bytes go beyond the end of the file, ", file_.size()));
    }
    if (tensor.begin < taken) {
      return FailAt(shown, Concat("overlaps with tensor ", Quote(before->name)));
    }
    taken = tensor.end;
    before = &tensor;
  }
  for (GgufTensor& tensor : tensors) {
    tensor.begin += contents->data_offset_;
    tensor.end += contents->data_offset_;
  }
}

absl::Status GgufContents::Reader::Read(GgufContents* contents) {
  if (file_.size() < 4 || std::memcmp(file_.data(), "GGUF", 4) != 0) {
    return absl::InvalidArgumentError("not a GGUF file: it does not begin with \"GGUF\"");
  }
  at_ = 4;
  const auto version = Number<uint32_t>("the version");
  if (ok() && version == __builtin_bswap32(kVersion)) {
    return absl::UnimplementedError("big-endian GGUF is not supported");
  }
  if (ok() && version != kVersion) {
    return absl::UnimplementedError(
        Concat("GGUF version ", version, " is not supported; winnow reads version ", kVersion));
  }
  const auto num_tensors = Number<uint64_t>("the number of tensors");
  const auto num_keys = Number<uint64_t>("the number of keys");
  if (ok() && num_tensors > kTensorsMax) {
    FailAt(8, Concat(num_tensors, " tensors; ", kTensorsMax, " are the most"));
  }
  if (ok() && num_keys > kKeysMax)
    FailAt(16, Concat(num_keys, " keys; ", kKeysMax, " are the most"));
  for (uint64_t i = 0; i < num_keys && ok(); ++i) Key(contents);
  for (uint64_t i = 0; i < num_tensors && ok(); ++i) Tensor(contents);
  if (ok()) PlaceData(contents);
  return status_;
}

absl::StatusOr<GgufContents> GgufContents::Parse(std::span<const std::byte> file) {
  GgufContents contents;
  contents.file_ = file;
  WINNOW_RETURN_IF_ERROR(Reader(file).Read(&contents));
  return contents;
}

const GgufValue* GgufContents::Find(std::string_view key) const {
  const auto found = value_index_.find(key);
  return found == value_index_.end() ? nullptr : &values_[found->second];
}

const GgufTensor* GgufContents::FindTensor(std::string_view name) const {
  const auto found = tensor_index_.find(name);
  return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

bool IsGgufPath(const std::string& path) {
  struct stat info = {};
  if (stat(path.c_str(), &info) != 0) return path.ends_with(".gguf");
  return !S_ISDIR(info.st_mode);
}

absl::StatusOr<std::unique_ptr<GgufFile>> GgufFile::Open(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not hang the start.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::ErrnoToStatus(errno, path);
  const absl::Cleanup closer = [fd] { close(fd); };  // the mapping outlives it

  struct stat info = {};
  if (fstat(fd, &info) != 0) return absl::ErrnoToStatus(errno, path);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(Concat(path, ": not a regular file"));
  }
  if (info.st_size == 0) return absl::InvalidArgumentError(Concat(path, ": empty"));
  const auto size_bytes = static_cast<uint64_t>(info.st_size);
  void* map = mmap(nullptr, size_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
  if (map == MAP_FAILED) {
    return absl::ErrnoToStatus(errno, Concat(path, ": mmap of ", size_bytes, " bytes"));
  }
  const std::span bytes(static_cast<const std::byte*>(map), size_bytes);
  absl::StatusOr<GgufContents> contents = GgufContents::Parse(bytes);
  if (!contents.ok()) {
    munmap(map, size_bytes);
    return absl::Status(contents.status().code(), Concat(path, ": ", contents.status().message()));
  }
  return std::unique_ptr<GgufFile>(new GgufFile(path, bytes, *std::move(contents)));
}

GgufFile::GgufFile(std::string path, std::span<const std::byte> bytes, GgufContents contents)
    : path_(std::move(path)), bytes_(bytes), contents_(std::move(contents)) {}

GgufFile::~GgufFile() { munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size()); }

void GgufFile::ReleasePages() const {
  // The mapping is private and never written, so nothing can be lost; a refusal costs memory only.
  (void)madvise(const_cast<std::byte*>(bytes_.data()), bytes_.size(), MADV_DONTNEED);
}

}  // namespace winnow::engine
