// Words, sentences and facts for generated documents (eval_ruler.h), the same from the same seed on
// every machine.
//
// Plain data and pure functions of their arguments; any thread, one at a time per object.
#ifndef WINNOW_BENCH_EVAL_WORDS_H_
#define WINNOW_BENCH_EVAL_WORDS_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace winnow::bench {

// The standard's engine is the same everywhere; its distributions are not, so these are own.
class EvalRandom {
 public:
  explicit EvalRandom(uint64_t seed) : engine_(seed) {}

  size_t Below(size_t count);  // uniform from 0 to count - 1. REQUIRES: count > 0
  template <typename Container>
  const auto& OneOf(const Container& container) {
    return container[Below(std::size(container))];
  }
  template <typename T>
  void Shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[Below(i)]);
  }

 private:
  std::mt19937_64 engine_;
};

// A seed from a seed and a text, such as "vt 8192 17".
uint64_t SeedFrom(uint64_t seed, std::string_view text);

// Different texts, each only once.
class UniqueTexts {
 public:
  explicit UniqueTexts(EvalRandom& random) : random_(random) {}

  std::string WordPair();           // "amber-kettle"; of three words when pairs run short
  std::string Digits(int count);    // "7319942", the first not 0
  std::string Uuid();               // "0b5e9c1a-…", of version 4
  std::string Letters(int count);   // lower-case letters
  std::string Capitals(int count);  // upper-case letters

 private:
  template <typename Make>
  std::string Draw(const Make& make);

  EvalRandom& random_;
  std::set<std::string> drawn_;
};

// Different words in random order: single ones and, as far as those do not suffice, pairs.
std::vector<std::string> DistinctWords(int64_t count, EvalRandom& random);

// A sentence of a story that leads nowhere.
std::string ProseSentence(EvalRandom& random);

// A passage about a person or a town that does not exist, as an encyclopaedia would have it.
struct FactPassage {
  std::string title;
  std::string text;
  // Questions that the passage answers, with all forms of the answer that count.
  std::vector<std::pair<std::string, std::vector<std::string>>> questions;
};

// Two passages, and questions that only both together answer.
struct LinkedPassages {
  FactPassage person, town;
  std::vector<std::pair<std::string, std::vector<std::string>>> questions;
};

// People and towns, each with a name of its own.
class FactWriter {
 public:
  explicit FactWriter(EvalRandom& random) : random_(random) {}

  FactPassage Person() { return PersonOf(TownName()); }
  FactPassage Town() { return TownOf(TownName(), nullptr); }
  LinkedPassages PersonAndTown();

 private:
  struct TownFacts {
    std::string river;
    std::string founded;  // year
    std::string founder;
  };
  std::string PersonName();
  std::string TownName();
  FactPassage PersonOf(const std::string& birthplace);
  FactPassage TownOf(const std::string& name, TownFacts* facts);

  EvalRandom& random_;
  std::set<std::string> names_;
};

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_EVAL_WORDS_H_
