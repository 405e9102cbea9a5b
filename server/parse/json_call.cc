#include "server/parse/json_call.h"

#include <utility>

#include "nlohmann/json.hpp"

namespace winnow::server {
namespace {

bool IsJsonSpace(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

// The string that JSON text stands for; false if it is none.
bool DecodeString(const std::string& text, std::string* out) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_string()) return false;
  *out = json.get<std::string>();
  return true;
}

}  // namespace

JsonCall::State JsonCall::Add(char c) {
  if (!has_name_) text_.push_back(c);
  switch (place_) {
    case Place::kBeforeObject:
      if (IsJsonSpace(c)) return State::kOpen;
      if (c != '{') return State::kBroken;
      place_ = Place::kBeforeKey;
      return State::kOpen;
    case Place::kBeforeKey:
      if (IsJsonSpace(c)) return State::kOpen;
      if (c == '}') return AddAfterValue(c);
      if (c != '"') return State::kBroken;
      key_.assign(1, '"');
      escaped_ = false;
      place_ = Place::kInKey;
      return State::kOpen;
    case Place::kInKey:
      return AddKeyByte(c);
    case Place::kAfterKey:
      if (IsJsonSpace(c)) return State::kOpen;
      if (c != ':') return State::kBroken;
      place_ = Place::kBeforeValue;
      return State::kOpen;
    case Place::kBeforeValue:
      if (IsJsonSpace(c)) return State::kOpen;
      value_.clear();
      depth_ = 0;
      in_string_ = escaped_ = is_container_ = false;
      place_ = Place::kInValue;
      return AddValueByte(c);
    case Place::kInValue:
      return AddValueByte(c);
    case Place::kAfterValue:
      return AddAfterValue(c);
  }
  return State::kBroken;
}

JsonCall::State JsonCall::AddKeyByte(char c) {
  key_.push_back(c);
  if (escaped_) {
    escaped_ = false;
  } else if (c == '\\') {
    escaped_ = true;
  } else if (c == '"') {
    std::string key;
    if (!DecodeString(key_, &key)) return State::kBroken;
    member_ = key == "name" && !has_name_                                      ? Member::kName
              : (key == "arguments" || key == "parameters") && !has_arguments_ ? Member::kArguments
                                                                               : Member::kOther;
    place_ = Place::kAfterKey;
  }
  return State::kOpen;
}

JsonCall::State JsonCall::AddValueByte(char c) {
  const bool top = depth_ == 0;
  if (!in_string_ && top && !value_.empty() &&
      (c == ',' || c == '}' || c == ']' || IsJsonSpace(c))) {
    // Behind a number or a word, whose end is what follows.
    if (const State state = EndValue(); state != State::kOpen) return state;
    return AddAfterValue(c);
  }
  if (value_.empty() && !is_container_) is_container_ = c == '{' || c == '[';
  const bool streams = member_ == Member::kArguments && is_container_;
  if (streams) {
    arguments_.push_back(c);
  } else if (member_ != Member::kOther || value_.empty()) {
    value_.push_back(c);
  }
  if (streams && value_.empty()) value_.assign(1, '{');  // it has begun
  if (in_string_) {
    if (escaped_) {
      escaped_ = false;
    } else if (c == '\\') {
      escaped_ = true;
    } else if (c == '"') {
      in_string_ = false;
      if (top) return EndValue();
    }
    return State::kOpen;
  }
  if (c == '"') {
    in_string_ = true;
  } else if (c == '{' || c == '[') {
    ++depth_;
  } else if (c == '}' || c == ']') {
    if (top) return State::kBroken;
    if (--depth_ == 0) return EndValue();
  } else if (top && (c == ',' || c == ':')) {
    return State::kBroken;
  }
  return State::kOpen;
}

JsonCall::State JsonCall::EndValue() {
  place_ = Place::kAfterValue;
  if (member_ == Member::kName) {
    if (!DecodeString(value_, &name_) || name_.empty()) return State::kBroken;
    has_name_ = true;
  } else if (member_ == Member::kArguments) {
    has_arguments_ = true;
    // Some models write the object as a string of it, or null for none.
    if (!is_container_ && !DecodeString(value_, &arguments_)) arguments_.clear();
  }
  return State::kOpen;
}

JsonCall::State JsonCall::AddAfterValue(char c) {
  if (IsJsonSpace(c)) return State::kOpen;
  if (c == ',' && place_ == Place::kAfterValue) {
    place_ = Place::kBeforeKey;
    return State::kOpen;
  }
  if (c != '}' || !has_name_) return State::kBroken;
  if (!given_ && arguments_.empty()) arguments_ = "{}";
  return State::kDone;
}

std::string JsonCall::TakeArguments() {
  if (!has_name_) return "";
  if (!arguments_.empty()) given_ = true;
  return std::exchange(arguments_, {});
}

}  // namespace winnow::server
