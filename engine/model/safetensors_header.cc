// The header's parser. Hostile headers are why it is not a JSON document tree: a tree costs some
// 40 times the text. Tensors are fixed records here, their names and shapes lie in two arrays that
// a first pass over the text sizes, so that nothing is moved while it grows.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "absl/strings/str_join.h"
#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/model/safetensors.h"
#include "kernels/check.h"
#include "nlohmann/json.hpp"

namespace winnow::engine {
namespace {

using Json = nlohmann::json;

constexpr size_t kRankMax = 8;
constexpr size_t kTokenBytesMax = 1 << 20;
constexpr size_t kMetadataEntriesMax = 1 << 16;
// Twice the tensors of the largest public models in all their shards together. Sorting and indexing
// the two million that fit into the longest header would take longer than parsing them.
constexpr size_t kTensorsMax = 1 << 18;
// {"":{"dtype":"U8","shape":[],"data_offsets":[0,0]}}
constexpr size_t kTensorTextBytesMin = 49;

struct DTypeInfo {
  std::string_view name;
  uint64_t bits;
};
// All types of the format: a file may hold tensors that a model does not use.
constexpr std::array<DTypeInfo, 22> kDTypes = {{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};

struct Record {
  uint64_t begin = 0, end = 0;
  uint32_t name_offset = 0, name_size = 0;
  uint32_t shape_offset = 0;
  uint8_t rank = 0;
  uint8_t dtype = 0;  // of kDTypes
};

// A name as a message shows it: printable and short.
std::string Shown(std::string_view name) {
  constexpr size_t kCharsMax = 120;
  const std::string_view head = name.substr(0, kCharsMax);
  std::string shown =
      Json(head).dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  if (head.size() < name.size()) shown += "...";
  return shown;
}

absl::Status Refuse(std::string_view tensor, std::string_view what) {
  return absl::InvalidArgumentError(Concat("tensor ", Shown(tensor), ": ", what));
}

std::string ShapeText(std::span<const uint64_t> shape) {
  return Concat("[", absl::StrJoin(shape, ", "), "]");
}

// What the first pass learns: upper bounds of what the header may hold.
struct Extent {
  size_t tensors = 0;
  size_t dimensions = 0;
  size_t name_bytes = 0;
};

// One pass over the text before the parser sees it. Refuses what would make the parser's own
// buffers grow with the text, and NUL, which it takes for the end.
absl::StatusOr<Extent> Survey(std::string_view text) {
  size_t objects = 0, commas = 0, name_bytes = 0, depth = 0;
  size_t token_begin = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\0') return absl::InvalidArgumentError(Concat("header: a NUL at byte ", i + 8));
    if (i - token_begin > kTokenBytesMax) {
      return absl::InvalidArgumentError(
          Concat("header: a JSON token or a run of blanks of more than ", kTokenBytesMax,
                 " bytes at byte ", token_begin + 8));
    }
    if (in_string) {
      if (c == '\\') {
        ++i;  // whatever follows does not end the string
        if (i < text.size() && text[i] == '\0') --i;
      } else if (c == '"') {
        in_string = false;
        if (depth == 1) name_bytes += i - token_begin;
        token_begin = i;
      }
      continue;
    }
    switch (c) {
      case '"':
        in_string = true;
        token_begin = i;
        break;
      case '{':
      case '[':
        objects += c == '{';
        ++depth;
        token_begin = i;
        break;
      case '}':
      case ']':
        depth -= depth > 0;
        token_begin = i;
        break;
      case ',':
        ++commas;
        token_begin = i;
        break;
      case ':':
        token_begin = i;
        break;
      default:
        break;
    }
  }
  Extent extent;
  extent.tensors = std::min({objects, text.size() / kTensorTextBytesMin + 1, kTensorsMax});
  // A tensor of rank r >= 1 and its neighbour hold r + 3 commas.
  extent.dimensions =
      std::min(commas > 3 * objects ? commas - 3 * objects : 0, kRankMax * extent.tensors) +
      extent.tensors;
  extent.name_bytes = name_bytes;
  return extent;
}

}  // namespace

struct SafetensorsHeader::Rep {
  std::string_view Name(const Record& record) const {
    return std::string_view(names).substr(record.name_offset, record.name_size);
  }
  std::span<const uint64_t> Shape(const Record& record) const {
    return std::span(shapes).subspan(record.shape_offset, record.rank);
  }

  // The set holds indices of `records` and finds them by name.
  struct NameHash {
    using is_transparent = void;
    const Rep* rep;
    size_t operator()(std::string_view name) const { return absl::Hash<std::string_view>()(name); }
    size_t operator()(uint32_t index) const { return (*this)(rep->Name(rep->records[index])); }
  };
  struct NameEqual {
    using is_transparent = void;
    const Rep* rep;
    std::string_view Get(std::string_view name) const { return name; }
    std::string_view Get(uint32_t index) const { return rep->Name(rep->records[index]); }
    bool operator()(const auto& a, const auto& b) const { return Get(a) == Get(b); }
  };

  std::vector<Record> records;  // by begin, then end
  std::string names;
  std::vector<uint64_t> shapes;
  absl::flat_hash_set<uint32_t, NameHash, NameEqual> by_name{0, NameHash{this}, NameEqual{this}};
  std::map<std::string, std::string> metadata;
  uint64_t data_offset = 0;
};

namespace {

// Takes the parser's events and accepts the header's grammar alone: any other nesting, type or
// field ends the parse at once. Returning false from an event stops the parser.
template <typename Rep>
class Handler {
 public:
  explicit Handler(Rep& rep) : rep_(rep) {}

  absl::Status status() const { return status_; }

  bool start_object(size_t) {
    switch (state_) {
      case State::kStart:
        state_ = State::kNames;
        return true;
      case State::kTensorValue:
        state_ = State::kFields;
        return true;
      case State::kMetadataValue:
        state_ = State::kMetadata;
        return true;
      default:
        return Unexpected("an object");
    }
  }

  bool key(std::string& name) {
    switch (state_) {
      case State::kNames:
        return Name(name);
      case State::kFields:
        return Field(name);
      case State::kMetadata:
        if (rep_.metadata.size() >= kMetadataEntriesMax) {
          return Fail(Concat("header: more than ", kMetadataEntriesMax, " metadata entries"));
        }
        // Copied, not moved, here and below: the parser's buffer is as large as its longest token.
        metadata_key_ = name;
        if (rep_.metadata.contains(metadata_key_)) {
          return Fail(Concat("header: __metadata__ has ", Shown(metadata_key_), " twice"));
        }
        state_ = State::kMetadataString;
        return true;
      default:
        return Unexpected("a key");
    }
  }

  bool end_object() {
    switch (state_) {
      case State::kFields:
        state_ = State::kNames;
        return CloseTensor();
      case State::kMetadata:
        state_ = State::kNames;
        return true;
      default:  // the whole header
        state_ = State::kEnd;
        return true;
    }
  }

  bool start_array(size_t) {
    if (state_ == State::kShapeValue) {
      state_ = State::kShape;
      return true;
    }
    if (state_ == State::kOffsetsValue) {
      state_ = State::kOffsets;
      num_offsets_ = 0;
      return true;
    }
    return Unexpected("a list");
  }

  bool end_array() {
    if (state_ == State::kOffsets && num_offsets_ != 2)
      return FailTensor("data_offsets: must be two integers");
    state_ = State::kFields;
    return true;
  }

  bool number_unsigned(uint64_t value) {
    if (state_ == State::kShape) {
      if (record_.rank == kRankMax)
        return FailTensor(Concat("shape: more than ", kRankMax, " dimensions"));
      rep_.shapes.push_back(value);
      ++record_.rank;
      return true;
    }
    if (state_ == State::kOffsets) {
      if (num_offsets_ == 2) return FailTensor("data_offsets: must be two integers");
      (num_offsets_ == 0 ? record_.begin : record_.end) = value;
      ++num_offsets_;
      return true;
    }
    return Unexpected("a number");
  }

  bool string(std::string& value) {
    if (state_ == State::kDTypeValue) {
      const auto found =
          std::find_if(kDTypes.begin(), kDTypes.end(),
                       [&value](const DTypeInfo& info) { return info.name == value; });
      if (found == kDTypes.end()) return FailTensor(Concat("dtype: unknown type ", Shown(value)));
      record_.dtype = static_cast<uint8_t>(found - kDTypes.begin());
      state_ = State::kFields;
      return true;
    }
    if (state_ == State::kMetadataString) {
      rep_.metadata.emplace(std::move(metadata_key_), std::string(value));
      state_ = State::kMetadata;
      return true;
    }
    return Unexpected("a string");
  }

  bool null() { return Unexpected("null"); }
  bool boolean(bool) { return Unexpected("a boolean"); }
  bool number_integer(int64_t) { return Unexpected("a negative number"); }
  bool number_float(double, const std::string&) {
    return Unexpected("a number that is no 64-bit integer");
  }
  bool binary(Json::binary_t&) { return Unexpected("binary"); }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) {
    // The parser counts bytes from 1; in the file the header begins at byte 8.
    return Fail(Concat("header: not valid JSON at byte ", position + 7));
  }

 private:
  enum class State {
    kStart,
    kNames,
    kTensorValue,
    kFields,
    kDTypeValue,
    kShapeValue,
    kShape,
    kOffsetsValue,
    kOffsets,
    kMetadataValue,
    kMetadata,
    kMetadataString,
    kEnd,
  };

  bool Fail(std::string_view what) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(ToAbsl(what));
    return false;
  }
  bool FailTensor(std::string_view what) {
    if (status_.ok()) status_ = Refuse(rep_.Name(record_), what);
    return false;
  }
  bool Unexpected(std::string_view what) {
    switch (state_) {
      case State::kTensorValue:
        return FailTensor(Concat("must be an object, is ", what));
      case State::kDTypeValue:
        return FailTensor(Concat("dtype: must be a string, is ", what));
      case State::kShapeValue:
        return FailTensor(Concat("shape: must be a list, is ", what));
      case State::kShape:
        return FailTensor(Concat("shape: must hold 64-bit unsigned integers, holds ", what));
      case State::kOffsetsValue:
        return FailTensor(Concat("data_offsets: must be a list, is ", what));
      case State::kOffsets:
        return FailTensor(Concat("data_offsets: must hold 64-bit unsigned integers, holds ", what));
      case State::kMetadataValue:
        return Fail(Concat("header: __metadata__ must be an object, is ", what));
      case State::kMetadataString:
        return Fail(
            Concat("header: __metadata__ ", Shown(metadata_key_), " must be a string, is ", what));
      default:
        return Fail(Concat("header: unexpected ", what));
    }
  }

  bool Name(const std::string& name) {
    if (name == "__metadata__") {
      if (has_metadata_) return Fail("header: __metadata__ is there twice");
      has_metadata_ = true;
      state_ = State::kMetadataValue;
      return true;
    }
    if (rep_.records.size() >= kTensorsMax) {
      return Fail(Concat("header: more than ", kTensorsMax, " tensors"));
    }
    record_ = Record{.name_offset = static_cast<uint32_t>(rep_.names.size()),
                     .name_size = static_cast<uint32_t>(name.size()),
                     .shape_offset = static_cast<uint32_t>(rep_.shapes.size())};
    rep_.names += name;
    fields_ = 0;
    state_ = State::kTensorValue;
    return true;
  }

  bool Field(const std::string& name) {
    int bit = 0;
    if (name == "dtype") {
      bit = 1;
      state_ = State::kDTypeValue;
    } else if (name == "shape") {
      bit = 2;
      state_ = State::kShapeValue;
    } else if (name == "data_offsets") {
      bit = 4;
      state_ = State::kOffsetsValue;
    } else {
      return FailTensor(Concat("unknown field ", Shown(name)));
    }
    if ((fields_ & bit) != 0) return FailTensor(Concat(name, ": is there twice"));
    fields_ |= bit;
    return true;
  }

  bool CloseTensor() {
    for (const auto& [bit, field] : {std::pair{1, "dtype"}, {2, "shape"}, {4, "data_offsets"}}) {
      if ((fields_ & bit) == 0) return FailTensor(Concat(field, ": missing"));
    }
    if (record_.end < record_.begin) {
      return FailTensor(
          Concat("data_offsets: [", record_.begin, ", ", record_.end, ") ends before it begins"));
    }
    const std::span<const uint64_t> shape = rep_.Shape(record_);
    uint64_t bits = kDTypes[record_.dtype].bits;
    // The element count first, as the reference has it: a zero dimension does not excuse an
    // overflow before it.
    uint64_t elements = 1;
    for (const uint64_t dimension : shape) {
      if (__builtin_mul_overflow(elements, dimension, &elements)) {
        return FailTensor(Concat("shape: ", ShapeText(shape), " overflows 64 bits"));
      }
    }
    if (__builtin_mul_overflow(elements, bits, &bits)) {
      return FailTensor(Concat("shape: ", ShapeText(shape), " overflows 64 bits"));
    }
    if (bits % 8 != 0) {
      return FailTensor(Concat("shape: ", ShapeText(shape), " of ", kDTypes[record_.dtype].name,
                               " does not fill whole bytes"));
    }
    if (bits / 8 != record_.end - record_.begin) {
      return FailTensor(Concat("data_offsets: [", record_.begin, ", ", record_.end, ") hold ",
                               record_.end - record_.begin, " bytes, but ", ShapeText(shape),
                               " of ", kDTypes[record_.dtype].name, " takes ", bits / 8));
    }
    rep_.records.push_back(record_);
    return true;
  }

  Rep& rep_;
  State state_ = State::kStart;
  Record record_;
  int fields_ = 0;
  int num_offsets_ = 0;
  bool has_metadata_ = false;
  std::string metadata_key_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<SafetensorsHeader> SafetensorsHeader::Parse(std::span<const std::byte> prefix,
                                                           uint64_t file_size) {
  static_assert(std::endian::native == std::endian::little);
  uint64_t header_bytes = 0;
  if (file_size < sizeof(header_bytes)) {
    return absl::InvalidArgumentError(Concat(
        "truncated: ", file_size, " bytes, too short for the 8 bytes of the header's length"));
  }
  WINNOW_CHECK(prefix.size() >= sizeof(header_bytes));
  std::memcpy(&header_bytes, prefix.data(), sizeof(header_bytes));
  if (header_bytes > kSafetensorsHeaderBytesMax) {
    return absl::InvalidArgumentError(Concat("header: ", header_bytes, " bytes, more than the ",
                                             kSafetensorsHeaderBytesMax,
                                             " allowed (or not a safetensors file)"));
  }
  if (header_bytes > file_size - sizeof(header_bytes)) {
    return absl::InvalidArgumentError(Concat("truncated: the header ends at byte ",
                                             header_bytes + 8, ", the file at ", file_size));
  }
  WINNOW_CHECK(prefix.size() - sizeof(header_bytes) >= header_bytes);
  const std::string_view text(reinterpret_cast<const char*>(prefix.data()) + sizeof(header_bytes),
                              header_bytes);
  if (text.empty() || text[0] != '{')
    return absl::InvalidArgumentError("header: does not begin with '{' at byte 8");

  WINNOW_ASSIGN_OR_RETURN(const Extent extent, Survey(text));
  auto rep = std::make_unique<Rep>();
  rep->data_offset = sizeof(header_bytes) + header_bytes;
  rep->records.reserve(extent.tensors);
  rep->shapes.reserve(extent.dimensions);
  rep->names.reserve(extent.name_bytes);
  Handler<Rep> handler(*rep);
  const bool parsed = Json::sax_parse(text.data(), text.data() + text.size(), &handler);
  WINNOW_RETURN_IF_ERROR(handler.status());
  WINNOW_CHECK(parsed);

  const auto by_place = [](const Record& a, const Record& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  };
  if (!std::is_sorted(rep->records.begin(), rep->records.end(), by_place)) {
    std::sort(rep->records.begin(), rep->records.end(), by_place);
  }
  rep->by_name.reserve(rep->records.size());
  for (uint32_t i = 0; i < rep->records.size(); ++i) {
    if (!rep->by_name.insert(i).second) return Refuse(rep->Name(rep->records[i]), "is there twice");
  }

  uint64_t covered = 0;
  for (const Record& record : rep->records) {
    if (record.begin != covered) {
      return Refuse(rep->Name(record),
                    Concat("data_offsets: begins at ", record.begin,
                           record.begin < covered ? ", inside another tensor that ends at "
                                                  : ", leaving a hole after byte ",
                           covered, " of the data"));
    }
    covered = record.end;
    if (covered > file_size - rep->data_offset) {
      return Refuse(rep->Name(record),
                    Concat("truncated: its bytes [", record.begin, ", ", record.end,
                           ") of the data go past the file, which ends at byte ", file_size, " (",
                           file_size - rep->data_offset, " of the data)"));
    }
  }
  if (covered != file_size - rep->data_offset) {
    return absl::InvalidArgumentError(Concat("the tensors end at byte ", rep->data_offset + covered,
                                             ", the file at ", file_size,
                                             ": bytes that no tensor owns"));
  }
  return SafetensorsHeader(std::move(rep));
}

SafetensorsHeader::SafetensorsHeader(std::unique_ptr<Rep> rep) : rep_(std::move(rep)) {}
SafetensorsHeader::SafetensorsHeader(SafetensorsHeader&&) noexcept = default;
SafetensorsHeader& SafetensorsHeader::operator=(SafetensorsHeader&&) noexcept = default;
SafetensorsHeader::~SafetensorsHeader() = default;

size_t SafetensorsHeader::num_tensors() const { return rep_->records.size(); }

SafetensorsEntry SafetensorsHeader::tensor(size_t index) const {
  WINNOW_CHECK(index < rep_->records.size());
  const Record& record = rep_->records[index];
  return {rep_->Name(record), kDTypes[record.dtype].name, rep_->Shape(record), record.begin,
          record.end};
}

std::optional<SafetensorsEntry> SafetensorsHeader::Find(std::string_view name) const {
  const auto found = rep_->by_name.find(name);
  if (found == rep_->by_name.end()) return std::nullopt;
  return tensor(*found);
}

const std::map<std::string, std::string>& SafetensorsHeader::metadata() const {
  return rep_->metadata;
}
uint64_t SafetensorsHeader::data_offset() const { return rep_->data_offset; }

}  // namespace winnow::engine
