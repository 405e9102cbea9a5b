#include "engine/text/jinja/value.h"

#include <cmath>
#include <cstring>

#include "engine/base/concat.h"

namespace winnow::engine::jinja {

bool Dict::HashKey(const Value& key, std::string* out, int depth) {
  constexpr int kDepthMax = 64;
  switch (key.kind) {
    case Kind::kString:
      out->append(Concat("s", key.bytes().size(), ":"));
      out->append(key.bytes());
      return true;
    case Kind::kNone:
      out->append("N");
      return true;
    case Kind::kBool:
    case Kind::kInt:
      out->append(Concat("i", key.AsInt(), ";"));
      return true;
    case Kind::kFloat: {
      // 1.0 and 1 are one key.
      if (key.real == std::floor(key.real) && std::fabs(key.real) < 9.2e18) {
        out->append(Concat("i", static_cast<int64_t>(key.real), ";"));
      } else {
        out->push_back('f');
        out->append(reinterpret_cast<const char*>(&key.real), sizeof(key.real));
      }
      return true;
    }
    case Kind::kTuple:
      if (depth >= kDepthMax) return false;
      out->push_back('(');
      for (const Value& item : Items(key)) {
        if (!HashKey(item, out, depth + 1)) return false;
      }
      out->push_back(')');
      return true;
    case Kind::kUndefined:
      // All undefined values are equal.
      out->push_back('U');
      return true;
    case Kind::kFunction:
    case Kind::kNamespace:
    case Kind::kLoop:
    case Kind::kIterator:
    case Kind::kCycler:
    case Kind::kJoiner: {
      out->push_back('o');
      out->append(reinterpret_cast<const char*>(&key.object), sizeof(key.object));
      return true;
    }
    default:
      return false;
  }
}

const Value* Dict::FindHashed(const std::string& hashed) const {
  const auto found = index_.find(hashed);
  return found == index_.end() ? nullptr : &entries_[found->second].second;
}

const Value* Dict::Find(const Value& key) const {
  std::string hashed;
  return HashKey(key, &hashed) ? FindHashed(hashed) : nullptr;
}

const Value* Dict::Find(std::string_view key) const {
  return FindHashed(Concat("s", key.size(), ":", key));
}

void Dict::Set(const Value& key, Value value) {
  std::string hashed;
  HashKey(key, &hashed);
  const auto [at, added] = index_.try_emplace(std::move(hashed), entries_.size());
  if (added) {
    entries_.emplace_back(key, std::move(value));
  } else {
    entries_[at->second].second = std::move(value);
  }
}

Value* Arguments::FindKeyword(std::string_view name) {
  for (auto& [key, value] : keyword) {
    if (key == name) return &value;
  }
  return nullptr;
}

Value Arguments::TakeKeyword(std::string_view name) {
  for (auto it = keyword.begin(); it != keyword.end(); ++it) {
    if (it->first != name) continue;
    Value value = std::move(it->second);
    keyword.erase(it);
    return value;
  }
  return Value();
}

Value Heap::String(MarkedText text) {
  const size_t bytes = text.Footprint() + sizeof(MarkedText);
  bytes_ += bytes;
  Value out(Kind::kString);
  out.text = Text(new MarkedText(std::move(text)), [this, bytes](const MarkedText* gone) {
    bytes_ -= bytes;
    delete gone;
  });
  return out;
}

std::string_view TypeName(const Value& value) {
  switch (value.kind) {
    case Kind::kMissing:
    case Kind::kUndefined:
      return "Undefined";
    case Kind::kNone:
      return "NoneType";
    case Kind::kBool:
      return "bool";
    case Kind::kInt:
      return "int";
    case Kind::kFloat:
      return "float";
    case Kind::kString:
      return value.markup ? "Markup" : "str";
    case Kind::kList:
      return "list";
    case Kind::kTuple:
      return "tuple";
    case Kind::kDict:
      return "dict";
    case Kind::kRange:
      return "range";
    case Kind::kIterator:
      return static_cast<const Iterator*>(value.object)->type;
    case Kind::kDictView:
      switch (static_cast<const DictView*>(value.object)->part) {
        case DictView::kKeys:
          return "dict_keys";
        case DictView::kValues:
          return "dict_values";
        case DictView::kItems:
          return "dict_items";
      }
      return "";
    case Kind::kNamespace:
      return "Namespace";
    case Kind::kFunction:
      return static_cast<const Function*>(value.object)->is_macro ? "Macro" : "function";
    case Kind::kLoop:
      return "LoopContext";
    case Kind::kCycler:
      return "Cycler";
    case Kind::kJoiner:
      return "Joiner";
    case Kind::kTemplate:
      return "TemplateReference";
  }
  return "";
}

}  // namespace winnow::engine::jinja
