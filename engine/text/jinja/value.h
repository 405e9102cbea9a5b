// The values that a template computes with: Python's, as far as templates can reach them.
//
// Strings are shared and immutable. Everything else that is more than a number lives in the Heap
// of one rendering and is freed with it, because namespaces and macros may form cycles.
#ifndef WINNOW_ENGINE_TEXT_JINJA_VALUE_H_
#define WINNOW_ENGINE_TEXT_JINJA_VALUE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/text/jinja/marked_text.h"

namespace winnow::engine::jinja {

class Interpreter;

enum class Kind {
  kMissing,  // a variable without a value, or an argument that was not given; templates never see it
  kUndefined,  // text: what is wrong with using it
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kList,
  kTuple,
  kDict,
  kRange,
  kIterator,  // a generator: read once
  kDictView,  // keys(), values(), items()
  kNamespace,
  kFunction,  // functions, bound methods, macros
  kLoop,
  kCycler,
  kJoiner,
  kTemplate,  // "self": a template without blocks has nothing in it
};

// Everything in a Heap.
struct Object {
  virtual ~Object() = default;
};

using Text = std::shared_ptr<const MarkedText>;

struct Value {
  Kind kind = Kind::kMissing;
  bool markup = false;  // of a string: Markup, as `safe` and `escape` make it
  union {
    bool boolean;
    int64_t integer = 0;
    double real;
    Object* object;
  };
  Text text;

  Value() = default;
  explicit Value(Kind of) : kind(of) {}

  static Value None() { return Value(Kind::kNone); }
  static Value Bool(bool value) {
    Value out(Kind::kBool);
    out.boolean = value;
    return out;
  }
  static Value Int(int64_t value) {
    Value out(Kind::kInt);
    out.integer = value;
    return out;
  }
  static Value Float(double value) {
    Value out(Kind::kFloat);
    out.real = value;
    return out;
  }
  static Value Of(Kind kind, Object* object) {
    Value out(kind);
    out.object = object;
    return out;
  }
  // Not counted against a Heap: for constants of a template and short texts.
  static Value String(std::string bytes, bool user = false) {
    Value out(Kind::kString);
    out.text = std::make_shared<const MarkedText>(std::move(bytes), user);
    return out;
  }

  bool Is(Kind k) const { return kind == k; }
  bool IsMissing() const { return kind == Kind::kMissing; }
  bool IsUndefined() const { return kind == Kind::kUndefined; }
  bool IsString() const { return kind == Kind::kString; }
  bool IsIntLike() const { return kind == Kind::kInt || kind == Kind::kBool; }
  bool IsNumber() const { return IsIntLike() || kind == Kind::kFloat; }
  int64_t AsInt() const { return kind == Kind::kBool ? int64_t{boolean} : integer; }
  double AsDouble() const { return kind == Kind::kFloat ? real : static_cast<double>(AsInt()); }
  std::string_view bytes() const { return text->bytes(); }  // REQUIRES: kString or kUndefined
};

// Lists and tuples.
struct Sequence : Object {
  std::vector<Value> items;
};

// A dict in order of insertion. Keys are hashable values.
class Dict : public Object {
 public:
  const std::vector<std::pair<Value, Value>>& entries() const { return entries_; }
  // nullptr if there is none.
  const Value* Find(const Value& key) const;
  const Value* Find(std::string_view key) const;
  void Set(const Value& key, Value value);
  // The bytes that two keys share if and only if they are equal in Python; false: not hashable,
  // or a tuple nested deeper than 64.
  static bool HashKey(const Value& key, std::string* out, int depth = 0);

 private:
  const Value* FindHashed(const std::string& hashed) const;
  std::vector<std::pair<Value, Value>> entries_;
  std::unordered_map<std::string, size_t> index_;
};

struct Range : Object {
  int64_t start;
  int64_t stop;
  int64_t step;
  int64_t size;
  int64_t At(int64_t index) const { return start + index * step; }
};

struct Iterator : Object {
  std::function<bool(Value*)> next;  // false at the end
  std::string type;                  // "generator", ..., for messages
};

struct DictView : Object {
  enum Part { kKeys, kValues, kItems } part;
  const Dict* dict;
};

struct Namespace : Object {
  Dict* attributes;
};

// The arguments of a call.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> keyword;
  Value* FindKeyword(std::string_view name);
  // Takes a keyword argument out; kMissing if it was not given.
  Value TakeKeyword(std::string_view name);
};

struct Function : Object {
  std::string name;
  bool is_macro = false;
  std::function<Value(Interpreter&, Arguments)> call;
};

struct Loop : Object {
  std::function<bool(Value*)> next;  // the items that are not yet taken
  int64_t known_length = -1;         // of the whole, if it has one
  int64_t index0 = -1;
  int64_t depth0 = 0;
  Value before;
  Value current;
  Value after;  // an item taken early
  Value last_changed;
  bool exhausted = false;
  Function* recurse = nullptr;  // of a recursive loop
};

struct Cycler : Object {
  std::vector<Value> items;
  size_t position = 0;
};

struct Joiner : Object {
  Value separator;
  bool used = false;
};

// Owns the objects of one rendering, and counts its memory.
class Heap {
 public:
  explicit Heap(size_t bytes_max) : bytes_max_(bytes_max) {}
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  template <typename T>
  T* New() {
    auto object = std::make_unique<T>();
    T* raw = object.get();
    objects_.push_back(std::move(object));
    Charge(sizeof(T) + sizeof(void*) * 4);
    return raw;
  }
  // A string that counts until its last reference is gone. The Heap must outlive it.
  Value String(MarkedText text);

  // Memory that is about to be taken and is kept to the end.
  void Charge(size_t bytes) { bytes_ += bytes; }
  void Release(size_t bytes) { bytes_ -= bytes; }
  bool full() const { return bytes_ > bytes_max_; }
  // Whether so many bytes more would be too many.
  bool Exceeds(size_t bytes) const { return bytes_ > bytes_max_ || bytes > bytes_max_ - bytes_; }
  size_t bytes() const { return bytes_; }
  size_t bytes_max() const { return bytes_max_; }

 private:
  size_t bytes_max_;
  size_t bytes_ = 0;
  std::vector<std::unique_ptr<Object>> objects_;
};

// Python's name of the type, for messages: "str", "list", ...
std::string_view TypeName(const Value& value);

inline const std::vector<Value>& Items(const Value& value) {
  return static_cast<const Sequence*>(value.object)->items;
}
inline Dict& AsDict(const Value& value) { return *static_cast<Dict*>(value.object); }

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_VALUE_H_
