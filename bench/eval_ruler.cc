#include "bench/eval_ruler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "bench/eval_words.h"
#include "engine/base/status_macros.h"
#include "fmt/format.h"

namespace winnow::bench {
namespace {

// Makes the task's only question and a document of `units` (sentences, words, passages) beside what it
// asks for. The same seed makes the same question, whatever the units.
using Build = EvalTask (*)(int64_t units, uint64_t seed, const RulerOptions& options);

std::string Listed(const std::vector<std::string>& items) {
  std::string text;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) text += i + 1 == items.size() ? " and " : ", ";
    text += items[i];
  }
  return text;
}

std::string Joined(const std::vector<std::string>& items, std::string_view between) {
  std::string text;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) text += between;
    text += items[i];
  }
  return text;
}

EvalTask OneQuestion(std::string intro, std::string document, EvalQuestion question) {
  question.answer = " " + Listed(question.references) + ".";
  EvalTask task;
  task.intro = std::move(intro);
  task.document = std::move(document);
  task.questions.push_back(std::move(question));
  return task;
}

// ---- haystacks ----

constexpr std::string_view kNoise[] = {"Rain falls on the hills.", "The river runs to the sea.",
                                       "Night comes and lamps are lit.",
                                       "Then it is morning again."};

std::vector<std::string> Noise(int64_t sentences) {
  std::vector<std::string> noise;
  for (int64_t i = 0; i < sentences; ++i) noise.emplace_back(kNoise[i % std::size(kNoise)]);
  return noise;
}

// From anywhere in the given text on, and from its beginning again after its end.
std::vector<std::string> Prose(int64_t sentences, EvalRandom& random, const RulerOptions& options) {
  std::vector<std::string> prose;
  const std::vector<std::string>& given = options.sentences;
  const size_t first = given.empty() ? 0 : random.Below(given.size());
  for (int64_t i = 0; i < sentences; ++i) {
    prose.push_back(given.empty() ? ProseSentence(random) : given[(first + i) % given.size()]);
  }
  return prose;
}

// Puts `needles` in between `hay`, at different ones of 40 depths from the beginning to the end, in
// their order or in any.
std::string WithNeedles(const std::vector<std::string>& hay, std::vector<std::string> needles,
                        bool keep_order, EvalRandom& random) {
  constexpr int kDepths = 40;
  std::vector<int> depths(kDepths);
  for (int i = 0; i < kDepths; ++i) depths[i] = i;
  random.Shuffle(depths);
  depths.resize(needles.size());
  std::sort(depths.begin(), depths.end());
  if (!keep_order) random.Shuffle(needles);
  std::vector<std::string> all;
  size_t next = 0;
  for (size_t i = 0; i <= hay.size(); ++i) {
    while (next < needles.size() && depths[next] * hay.size() <= i * (kDepths - 1)) {
      all.push_back(needles[next++]);
    }
    if (i < hay.size()) all.push_back(hay[i]);
  }
  return Joined(all, " ");
}

// ---- needles in a haystack ----

struct Niah {
  enum class Hay { kNoise, kProse, kNeedles };
  Hay hay = Hay::kProse;
  bool uuid_keys = false, uuid_values = false;
  int keys = 1, values = 1, asked = 1;
};

EvalTask BuildNiah(const Niah& niah, int64_t units, uint64_t seed, const RulerOptions& options) {
  EvalRandom asked_random(seed), hay_random(SeedFrom(seed, "hay"));
  UniqueTexts texts(asked_random), hay_texts(hay_random);
  const std::string kind = niah.uuid_values ? "UUID" : "number";
  const auto key = [&](UniqueTexts& of) { return niah.uuid_keys ? of.Uuid() : of.WordPair(); };
  const auto value = [&](UniqueTexts& of) { return niah.uuid_values ? of.Uuid() : of.Digits(7); };
  const auto needle = [&](const std::string& of, const std::string& is) {
    return fmt::format("A special magic {} of {} is {}.", kind, of, is);
  };

  std::vector<std::string> needles, asked;
  EvalQuestion question;
  for (int i = 0; i < niah.keys; ++i) {
    const std::string of = key(texts);
    const bool wanted = i < niah.asked;
    if (wanted) asked.push_back(of);
    for (int j = 0; j < niah.values; ++j) {
      const std::string is = value(texts);
      needles.push_back(needle(of, is));
      if (wanted) question.references.push_back(is);
    }
  }
  std::vector<std::string> hay;
  switch (niah.hay) {
    case Niah::Hay::kNoise:
      hay = Noise(units);
      break;
    case Niah::Hay::kProse:
      hay = Prose(units, hay_random, options);
      break;
    case Niah::Hay::kNeedles:
      while (static_cast<int64_t>(hay.size()) < units) {
        const std::string of = key(hay_texts);
        const std::string is = value(hay_texts);
        // Else the question would have two answers.
        if (of != asked.front()) hay.push_back(needle(of, is));
      }
      break;
  }
  const bool many = question.references.size() > 1;
  const std::string kinds = many ? kind + "s" : kind;
  question.question =
      fmt::format("Which special magic {} of {} does the text above give?", kinds, Listed(asked));
  question.answer_prefix = fmt::format("The special magic {} of {} that the text gives {}", kinds,
                                       Listed(asked), many ? "are" : "is");
  question.scorer = EvalScorer::kMatchAll;
  question.max_answer_tokens = 128;
  return OneQuestion(
      fmt::format("Some special magic {}s are hidden in the text below. Remember them, because a "
                  "question about them follows the text.\n\n",
                  kind),
      WithNeedles(hay, std::move(needles), /*keep_order=*/false, hay_random), std::move(question));
}

template <Niah niah>
EvalTask BuildNiahOf(int64_t units, uint64_t seed, const RulerOptions& options) {
  return BuildNiah(niah, units, seed, options);
}

// ---- variable tracking ----

struct Chain {
  std::string value;
  std::vector<std::string> variables, assignments;
};

Chain MakeChain(int hops, EvalRandom& random) {
  UniqueTexts texts(random);
  Chain chain;
  chain.value = texts.Digits(5);
  for (int i = 0; i <= hops; ++i) {
    chain.variables.push_back(texts.Capitals(5));
    chain.assignments.push_back(
        i == 0 ? fmt::format("VAR {} = {}", chain.variables[i], chain.value)
               : fmt::format("VAR {} = VAR {}", chain.variables[i], chain.variables[i - 1]));
  }
  return chain;
}

std::string TrackingQuestion(const Chain& chain) {
  return fmt::format("Which variables have the value {} in the text above? Name all of them.",
                     chain.value);
}

std::string TrackingPrefix(const Chain& chain) {
  return fmt::format("By the assignments in the text above, {} variables have the value {}:",
                     chain.variables.size(), chain.value);
}

EvalTask BuildTracking(int64_t units, uint64_t seed, const RulerOptions& options) {
  constexpr int kHops = 4;
  constexpr int kExampleSentences = 20;
  EvalRandom random(seed), hay_random(SeedFrom(seed, "hay"));
  const Chain example = MakeChain(kHops, random), chain = MakeChain(kHops, random);
  const std::string task =
      "Follow the assignments to variables that are hidden in the text below.\n\n";
  // The paper shows one solved example of this task.
  const std::string intro =
      task + WithNeedles(Noise(kExampleSentences), example.assignments, true, random) + "\n\n" +
      TrackingQuestion(example) + "\n" + TrackingPrefix(example) + " " + Listed(example.variables) +
      ".\n\n" + task;
  EvalQuestion question;
  question.question = TrackingQuestion(chain);
  question.answer_prefix = TrackingPrefix(chain);
  question.references = chain.variables;
  question.scorer = EvalScorer::kMatchAll;
  question.max_answer_tokens = 30;
  return OneQuestion(intro, WithNeedles(Noise(units), chain.assignments, true, hay_random),
                     std::move(question));
}

// ---- common and frequent words ----

struct WordList {
  std::string text;
  std::vector<std::string> common;
};

WordList MakeWordList(int common, int common_times, int64_t others, int other_times,
                      EvalRandom& random) {
  const std::vector<std::string> distinct = DistinctWords(common + others, random);
  WordList list;
  list.common.assign(distinct.begin(), distinct.begin() + common);
  std::vector<std::string> words;
  for (size_t i = 0; i < distinct.size(); ++i) {
    words.insert(words.end(), i < list.common.size() ? common_times : other_times, distinct[i]);
  }
  random.Shuffle(words);
  for (size_t i = 0; i < words.size(); ++i) {
    list.text += fmt::format("{}{}. {}", i == 0 ? "" : " ", i + 1, words[i]);
  }
  return list;
}

EvalTask BuildCommonWords(int64_t units, uint64_t seed, const RulerOptions& options) {
  EvalRandom example_random(SeedFrom(seed, "example")), random(seed);
  const WordList example = MakeWordList(10, 3, 20, 1, example_random);
  const WordList list = MakeWordList(10, 30, units, 3, random);
  const std::string task =
      "Below is a numbered list of words, in which some words occur more often than others. "
      "Remember those.\n\n";
  EvalQuestion question;
  question.question = "Which 10 words occur most often in the list above?";
  question.answer_prefix = "The 10 words that occur most often in the list are:";
  question.references = list.common;
  question.scorer = EvalScorer::kMatchAll;
  question.max_answer_tokens = 120;
  const std::string intro = task + example.text + "\n\n" + question.question + "\n" +
                            question.answer_prefix + " " + Listed(example.common) + ".\n\n" + task;
  return OneQuestion(intro, list.text, std::move(question));
}

EvalTask BuildFrequentWords(int64_t units, uint64_t seed, const RulerOptions& options) {
  constexpr double kZetaOf2 = 1.6449340668482264;
  EvalRandom random(seed);
  UniqueTexts texts(random);
  std::vector<std::string> words, references;
  for (int64_t rank = 1; static_cast<int64_t>(words.size()) < units; ++rank) {
    const double share = 1 / (kZetaOf2 * static_cast<double>(rank) * static_cast<double>(rank));
    const auto times = std::max<int64_t>(1, std::llround(share * static_cast<double>(units)));
    // Words have six letters each, so that none is part of another.
    const std::string word = rank == 1 ? "...." : texts.Letters(6);
    if (rank >= 2 && rank <= 4) references.push_back(word);
    words.insert(words.end(), std::min(times, units - static_cast<int64_t>(words.size())), word);
  }
  random.Shuffle(words);
  EvalQuestion question;
  question.question =
      "Leave out the dots (....). Which three coded words occur most often in the text above? Give "
      "nothing but the words.";
  question.answer_prefix = "The three coded words that occur most often in the text are:";
  question.references = references;
  question.scorer = EvalScorer::kMatchAll;
  question.max_answer_tokens = 50;
  return OneQuestion(
      "Count the coded words in the text below and find the three that occur most often.\n\n",
      Joined(words, " "), std::move(question));
}

// ---- questions about passages ----

EvalTask BuildPassages(bool linked, int64_t units, uint64_t seed) {
  EvalRandom random(seed), hay_random(SeedFrom(seed, "hay"));
  // One writer, so that no name occurs twice.
  FactWriter writer(random);
  std::vector<FactPassage> passages;
  std::pair<std::string, std::vector<std::string>> asked;
  if (linked) {
    LinkedPassages pair = writer.PersonAndTown();
    asked = random.OneOf(pair.questions);
    passages.push_back(std::move(pair.person));
    passages.push_back(std::move(pair.town));
  } else {
    passages.push_back(random.Below(2) == 0 ? writer.Person() : writer.Town());
    asked = random.OneOf(passages.front().questions);
  }
  for (int64_t i = 0; i < units; ++i) {
    passages.push_back(i % 2 == 0 ? writer.Person() : writer.Town());
  }
  hay_random.Shuffle(passages);
  std::string document;
  for (size_t i = 0; i < passages.size(); ++i) {
    document += fmt::format("{}Document {}:\n{}\n{}", i == 0 ? "" : "\n\n", i + 1,
                            passages[i].title, passages[i].text);
  }
  EvalQuestion question;
  const std::string task = "Answer the question from the documents. Give nothing but the answer.";
  question.question = task + "\n\nQuestion: " + asked.first;
  question.answer_prefix = "Answer:";
  question.references = asked.second;
  question.scorer = EvalScorer::kMatchAny;
  question.max_answer_tokens = 32;
  return OneQuestion(task + "\n\nThe documents:\n\n", document, std::move(question));
}

// ---- the suite ----

struct RulerTask {
  std::string_view name;
  Build build;
  int64_t least_units;
  int64_t few_units;  // for a first look at how many tokens a unit has
};

constexpr std::array<RulerTask, 13> kTasks = {{
    {"niah_single_1", BuildNiahOf<Niah{.hay = Niah::Hay::kNoise}>, 1, 100},
    {"niah_single_2", BuildNiahOf<Niah{}>, 1, 60},
    {"niah_single_3", BuildNiahOf<Niah{.uuid_values = true}>, 1, 60},
    {"niah_multikey_1", BuildNiahOf<Niah{.keys = 4}>, 1, 60},
    {"niah_multikey_2", BuildNiahOf<Niah{.hay = Niah::Hay::kNeedles}>, 1, 40},
    {"niah_multikey_3",
     BuildNiahOf<Niah{.hay = Niah::Hay::kNeedles, .uuid_keys = true, .uuid_values = true}>, 1, 16},
    {"niah_multivalue", BuildNiahOf<Niah{.values = 4}>, 1, 60},
    {"niah_multiquery", BuildNiahOf<Niah{.keys = 4, .asked = 4}>, 1, 60},
    {"vt", BuildTracking, 1, 100},
    {"cwe", BuildCommonWords, 1, 40},
    {"fwe", BuildFrequentWords, 100, 300},
    {"qa_1",
     [](int64_t units, uint64_t seed, const RulerOptions&) {
       return BuildPassages(false, units, seed);
     },
     1, 20},
    {"qa_2",
     [](int64_t units, uint64_t seed, const RulerOptions&) {
       return BuildPassages(true, units, seed);
     },
     1, 20},
}};

// The longest document that fits: the number of units is searched, because only the tokenizer knows
// their tokens. Each step goes where the tokens per unit so far say.
absl::StatusOr<EvalTask> Fitted(const RulerTask& task, int32_t length, uint64_t seed,
                                const RulerOptions& options, const CountPromptTokens& count) {
  constexpr int kSteps = 12;
  struct Sized {
    int64_t units = 0;
    int64_t tokens = 0;
  };
  std::optional<EvalTask> best;
  const auto measure = [&](int64_t units) -> absl::StatusOr<Sized> {
    EvalTask made = task.build(units, seed, options);
    WINNOW_ASSIGN_OR_RETURN(const int32_t prompt, count(made));
    const Sized sized{units, int64_t{prompt} + made.questions.front().max_answer_tokens};
    if (sized.tokens <= length) best = std::move(made);
    return sized;
  };
  WINNOW_ASSIGN_OR_RETURN(Sized fits, measure(task.least_units));
  if (fits.tokens > length) {
    return absl::InvalidArgumentError(fmt::format(
        "{} needs at least {} tokens, and the length is {}", task.name, fits.tokens, length));
  }
  std::optional<Sized> too_long;
  Sized last = fits;
  int64_t next = task.few_units;
  for (int step = 0; step < kSteps; ++step) {
    const int64_t limit = too_long ? too_long->units - 1 : INT64_MAX;
    next = std::clamp(next, fits.units + 1, std::max(fits.units + 1, limit));
    if (too_long && next >= too_long->units) break;
    WINNOW_ASSIGN_OR_RETURN(const Sized now, measure(next));
    const double per_unit =
        static_cast<double>(now.tokens - last.tokens) / static_cast<double>(now.units - last.units);
    (now.tokens <= length ? fits : too_long.emplace()) = now;
    last = now;
    const double room = static_cast<double>(length - now.tokens);
    if (room >= 0 && room < per_unit) break;
    next = now.units + static_cast<int64_t>(std::floor(room / std::max(per_unit, 0.25)));
  }
  return *std::move(best);
}

}  // namespace

std::vector<std::string> RulerTasks() {
  std::vector<std::string> names;
  for (const RulerTask& task : kTasks) names.emplace_back(task.name);
  return names;
}

absl::StatusOr<EvalTaskSource> RulerSource(RulerOptions options, CountPromptTokens count_tokens) {
  std::vector<const RulerTask*> wanted;
  for (const std::string& name : options.tasks.empty() ? RulerTasks() : options.tasks) {
    const auto* const found = std::find_if(
        kTasks.begin(), kTasks.end(), [&](const RulerTask& task) { return task.name == name; });
    if (found == kTasks.end()) {
      return absl::InvalidArgumentError(
          fmt::format("RULER has no task '{}'; it has {}", name, Listed(RulerTasks())));
    }
    wanted.push_back(found);
  }
  const size_t of_task = options.lengths.size() * options.questions;
  EvalTaskSource source;
  source.size = wanted.size() * of_task;
  const auto length_of = [lengths = options.lengths, of_task, questions = options.questions](
                             size_t i) { return lengths[i % of_task / questions]; };
  source.work = [length_of](size_t i) {
    return ExpectedEvalWork(static_cast<double>(length_of(i)));
  };
  const auto shared = std::make_shared<const RulerOptions>(std::move(options));
  source.at = [wanted, of_task, length_of, shared,
               count_tokens = std::move(count_tokens)](size_t i) -> absl::StatusOr<EvalTask> {
    const RulerTask& ruler = *wanted[i / of_task];
    const int32_t length = length_of(i);
    const std::string id = fmt::format("{}-{}-{}", ruler.name, length, i % shared->questions);
    WINNOW_ASSIGN_OR_RETURN(
        EvalTask task, Fitted(ruler, length, SeedFrom(shared->seed, id), *shared, count_tokens));
    task.id = id;
    task.task = ruler.name;
    task.target_tokens = length;
    return task;
  };
  return source;
}

std::vector<std::string> SentencesOf(std::string_view text) {
  constexpr size_t kBytesMax = 600;
  std::vector<std::string> sentences;
  std::string sentence;
  const auto is_space = [](char c) { return c == ' ' || (c >= '\t' && c <= '\r'); };
  for (size_t i = 0; i <= text.size(); ++i) {
    const bool space = i == text.size() || is_space(text[i]);
    if (!space) {
      sentence += text[i];
      continue;
    }
    if (i == text.size() && sentence.ends_with(' ')) sentence.pop_back();
    if (sentence.empty() || sentence.ends_with(' ')) continue;
    const char last = sentence.back();
    if (i < text.size() && last != '.' && last != '!' && last != '?') {
      sentence += ' ';
      continue;
    }
    if (sentence.size() <= kBytesMax) sentences.push_back(sentence);
    sentence.clear();
  }
  return sentences;
}

}  // namespace winnow::bench
