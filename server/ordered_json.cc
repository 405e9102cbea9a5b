#include "server/ordered_json.h"

#include <string>
#include <vector>

#include "server/strings.h"

namespace winnow::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

size_t SkipSpace(std::string_view json, size_t at) {
  while (at < json.size() &&
         (json[at] == ' ' || json[at] == '\t' || json[at] == '\n' || json[at] == '\r')) {
    ++at;
  }
  return at;
}

// Behind the string that begins at `at`.
size_t SkipString(std::string_view json, size_t at) {
  for (++at; at < json.size() && json[at] != '"'; ++at) {
    if (json[at] == '\\') ++at;
  }
  return at + 1;
}

// Behind the value that begins at `at`.
size_t SkipValue(std::string_view json, size_t at) {
  int depth = 0;
  while (at < json.size()) {
    const char c = json[at];
    if (c == '"') {
      at = SkipString(json, at);
      if (depth == 0) return at;
      continue;
    }
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') {
      // Ends with what holds a number or a word, which has no end of its own.
      if (depth == 0) return at;
      if (--depth == 0) return at + 1;
    }
    if (c == ',' && depth == 0) return at;
    ++at;
  }
  return at;
}

}  // namespace

absl::StatusOr<OrderedJson> ParseOrdered(std::string_view text) {
  std::vector<int> members = {0};  // by depth
  bool many = false, deep = false;
  OrderedJson json = OrderedJson::parse(
      text,
      [&](int depth, OrderedJson::parse_event_t event, OrderedJson&) {
        if (depth > kMaxOrderedDepth) deep = true;
        if (event == OrderedJson::parse_event_t::object_start) {
          members.resize(static_cast<size_t>(depth) + 2);
          members.back() = 0;
        } else if (event == OrderedJson::parse_event_t::key) {
          members.resize(static_cast<size_t>(depth) + 1);
          many = many || ++members.back() > kMaxOrderedMembers;
        }
        return !many && !deep;
      },
      /*allow_exceptions=*/false);
  if (many) {
    return absl::InvalidArgumentError(
        Concat("an object has more than ", kMaxOrderedMembers, " members"));
  }
  if (deep) return absl::InvalidArgumentError(Concat("is nested deeper than ", kMaxOrderedDepth));
  if (json.is_discarded()) return absl::InvalidArgumentError("is not JSON");
  return json;
}

std::string_view TextOfMember(std::string_view json, std::string_view name) {
  std::string_view found;
  size_t at = SkipSpace(json, 0) + 1;  // behind the brace
  for (;;) {
    at = SkipSpace(json, at);
    if (at >= json.size() || json[at] != '"') return found;
    const size_t end = SkipString(json, at);
    // A name may be written with escapes.
    const OrderedJson key =
        OrderedJson::parse(json.substr(at, end - at), nullptr, /*allow_exceptions=*/false);
    const size_t value = SkipSpace(json, SkipSpace(json, end) + 1);  // behind the colon
    at = SkipValue(json, value);
    if (key.is_string() && key.get_ref<const std::string&>() == name) {
      found = json.substr(value, at - value);
    }
    at = SkipSpace(json, at) + 1;  // behind the comma
  }
}

}  // namespace winnow::server
