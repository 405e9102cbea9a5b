// UTF-8 text that remembers which of its bytes came from the request.
//
// Chat templates build prompts by cutting and joining strings. The marks survive all of that, so
// that the tokenizer can be told which part of a prompt may hold control tokens (the template's
// own text) and which may not (text from users).
//
// Plain values; a const object may be read by any thread.
#ifndef WINNOW_ENGINE_TEXT_JINJA_MARKED_TEXT_H_
#define WINNOW_ENGINE_TEXT_JINJA_MARKED_TEXT_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace winnow::engine::jinja {

class MarkedText {
 public:
  // Bytes [begin, end), never empty.
  struct Range {
    size_t begin;
    size_t end;
    bool operator==(const Range&) const = default;
  };

  MarkedText() = default;
  explicit MarkedText(std::string bytes, bool user = false);

  std::string_view bytes() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  // The user's ranges: in order, disjoint, not adjacent.
  const std::vector<Range>& user() const { return user_; }
  bool IsUser(size_t offset) const;
  bool AnyUser() const { return !user_.empty(); }
  // Memory that this text takes.
  size_t Footprint() const { return bytes_.size() + user_.size() * sizeof(Range); }

  void Append(std::string_view bytes, bool user);
  void Append(const MarkedText& other) { Append(other, 0, other.size()); }
  // Appends bytes [begin, end) of `other` with their marks. REQUIRES: &other != this.
  void Append(const MarkedText& other, size_t begin, size_t end);
  MarkedText Slice(size_t begin, size_t end) const;

  // (length, is template) pairs that cover the text in order.
  std::vector<std::pair<size_t, bool>> Segments() const;

 private:
  void Mark(size_t begin, size_t end);

  std::string bytes_;
  std::vector<Range> user_;
};

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_MARKED_TEXT_H_
