#include "server/wire.h"

#include <limits>
#include <map>
#include <optional>
#include <string>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/message.h"
#include "google/protobuf/wire_format_lite.h"
#include "server/status.h"
#include "server/strings.h"
#include "server/utf8.h"

namespace winnow::server {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

struct BadString {
  std::string field;
  size_t offset = 0;
};

// Finds the first string of `bytes` that is not UTF-8. Stops quietly where the bytes are not
// Protobuf: that is the other error. Messages nest as deep as the schema does, which has no cycle.
std::optional<BadString> FindBadString(std::string_view bytes, const Descriptor& descriptor,
                                       const std::string& prefix) {
  if (bytes.size() > static_cast<size_t>(std::numeric_limits<int>::max())) return std::nullopt;
  CodedInputStream in(reinterpret_cast<const uint8_t*>(bytes.data()),
                      static_cast<int>(bytes.size()));
  std::map<int, int> seen;  // field number -> elements so far, for the index in the path
  while (const uint32_t tag = in.ReadTag()) {
    const FieldDescriptor* field =
        descriptor.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
    const bool delimited =
        WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
    if (field == nullptr || !delimited) {
      if (!WireFormatLite::SkipField(&in, tag)) return std::nullopt;
      continue;
    }
    uint32_t length = 0;
    if (!in.ReadVarint32(&length)) return std::nullopt;
    const auto start = static_cast<size_t>(in.CurrentPosition());
    if (length > bytes.size() - start || !in.Skip(static_cast<int>(length))) return std::nullopt;
    const std::string_view value = bytes.substr(start, length);
    std::string path = Concat(prefix, field->name());
    if (field->is_repeated()) Append(path, "[", seen[field->number()]++, "]");
    if (field->type() == FieldDescriptor::TYPE_STRING) {
      if (const auto offset = InvalidUtf8At(value)) return BadString{path, *offset};
    } else if (field->type() == FieldDescriptor::TYPE_MESSAGE) {
      if (auto bad = FindBadString(value, *field->message_type(), path + ".")) return bad;
    }
  }
  return std::nullopt;
}

}  // namespace

absl::Status ParseMessage(std::string_view bytes, google::protobuf::Message& message) {
  if (bytes.size() <= static_cast<size_t>(std::numeric_limits<int>::max()) &&
      message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return absl::OkStatus();
  }
  if (const auto bad = FindBadString(bytes, *message.GetDescriptor(), "")) {
    return InvalidField(bad->field, Concat("is not UTF-8 at byte ", bad->offset));
  }
  return ErrorWithReason(absl::StatusCode::kInvalidArgument, "INVALID_ENCODING",
                         Concat("the message is not a ", message.GetDescriptor()->full_name()));
}

}  // namespace winnow::server
