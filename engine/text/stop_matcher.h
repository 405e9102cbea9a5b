// Stop strings over a stream of text, across token borders.
//
// The string whose end comes first in the text wins; of those that end at the same byte the longest
// (it began first). So the result depends on the text alone, not on how it was cut into tokens, and
// a match is final as soon as it is complete. Held back is the longest end of the text that begins
// a stop string, no byte more; text comes in whole characters, so it leaves in whole characters.
#ifndef WINNOW_ENGINE_TEXT_STOP_MATCHER_H_
#define WINNOW_ENGINE_TEXT_STOP_MATCHER_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace winnow::engine {

class StopMatcher {
 public:
  // REQUIRES: no string is empty. None at all is fine: everything passes.
  StopMatcher(const std::vector<std::string>& strings, bool include_stop);

  // The text that is certain to be output. On a match: what comes before it (with include_stop: up
  // to its end); the rest of the text is dropped. REQUIRES: !matched().
  std::string Add(std::string_view text);
  // The end of the stream, or of a stretch of it: what was held back. No string is found that goes on beyond it.
  std::string Flush();

  bool matched() const { return match_ != nullptr; }
  const std::string& match() const { return match_->text; }  // REQUIRES: matched()

 private:
  // One string and the automaton of Knuth, Morris and Pratt that looks for it: linear in the text
  // whatever the strings are.
  struct Pattern {
    std::string text;
    std::vector<size_t> border;  // [i]: longest proper prefix of text[0..i] that ends it
    size_t length = 0;           // of its prefix that ends the text seen so far
    void Step(char byte);
  };

  std::vector<Pattern> patterns_;
  const bool include_stop_;
  std::string held_;
  const Pattern* match_ = nullptr;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_STOP_MATCHER_H_
