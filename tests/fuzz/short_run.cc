// A short run of one fuzz target, for the tests: every input of its corpus, then seeded mutations of them. It has no
// feedback of coverage as libFuzzer has: it shows that targets build, that their checks hold around the corpus, and soon
// what a change broke grossly.
//
//   fuzz_test NAME EXECUTIONS SECONDS     ends after so many executions, or seconds
//
// Mutations are the same in every run, so that a failure belongs to a change; campaign.py looks for what nobody knows yet.
// WINNOW_TEST_SEED gives others. A failure leaves its input in fuzz-crash-NAME, which the target under libFuzzer takes as
// an argument.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/unit/test_paths.h"

using Bytes = std::string;
using Target = int (*)(const uint8_t* data, size_t size);

// Each X_fuzz.cc is compiled with its LLVMFuzzerTestOneInput called Fuzz_X.
#define WINNOW_FUZZ_TARGET(name) extern "C" int Fuzz_##name(const uint8_t* data, size_t size);
#include "fuzz_targets.inc"
#undef WINNOW_FUZZ_TARGET

// The sanitizers' own; a build without them has none (scripts/coverage.py).
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace {

constexpr size_t kMaxBytes = 4096;
// Twice the limit of run.sh: other tests run beside this one.
constexpr unsigned kInputSecondsMax = 10;

const std::map<std::string, Target, std::less<>>& Targets() {
  static const auto& targets = *new std::map<std::string, Target, std::less<>>{
#define WINNOW_FUZZ_TARGET(name) {#name, &Fuzz_##name},
#include "fuzz_targets.inc"
#undef WINNOW_FUZZ_TARGET
  };
  return targets;
}

// The input that is being tried, for the hooks below.
std::string crash_file;
const Bytes* current = nullptr;

void KeepInput() {
  if (current == nullptr) return;
  const int fd = open(crash_file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return;
  if (write(fd, current->data(), current->size()) >= 0) {
    std::fprintf(stderr, "The input of %zu bytes is in %s\n", current->size(), crash_file.c_str());
  }
  close(fd);
  current = nullptr;
}

void OnSignal(int number) {
  if (number == SIGALRM) std::fprintf(stderr, "An input took more than %u s\n", kInputSecondsMax);
  KeepInput();
  std::signal(number, SIG_DFL);
  std::raise(number);
}

void Try(Target target, const Bytes& input) {
  // In a buffer of its own, so that a byte read beyond it is seen.
  const std::vector<uint8_t> data(input.begin(), input.end());
  current = &input;
  alarm(kInputSecondsMax);
  target(data.data(), data.size());
  alarm(0);
  current = nullptr;
}

class Mutator {
 public:
  Mutator(const std::vector<Bytes>& corpus, uint64_t seed) : corpus_(corpus), random_(seed) {}

  // One of the corpus, or what the last call gave, altered in one to eight places.
  const Bytes& Next() {
    if (Below(4) != 0) last_ = corpus_[Below(corpus_.size())];
    for (size_t count = 1 + Below(8); count > 0; --count) Alter();
    if (last_.size() > kMaxBytes) last_.resize(kMaxBytes);
    return last_;
  }

 private:
  size_t Below(size_t bound) { return random_() % bound; }

  Bytes Piece(const Bytes& of) {
    if (of.empty()) return of;
    const size_t at = Below(of.size());
    return of.substr(at, 1 + Below(std::min<size_t>(of.size() - at, 64)));
  }

  void Alter() {
    // Numbers at the edges of their types, and what separates and nests.
    static constexpr std::string_view kWords[] = {"0",
                                                  "-1",
                                                  "2147483648",
                                                  "18446744073709551616",
                                                  "1e999",
                                                  "-0.0",
                                                  "\"",
                                                  "\\u0000",
                                                  "{",
                                                  "}",
                                                  "[",
                                                  "]",
                                                  ",",
                                                  ":",
                                                  "\n",
                                                  "\r\n\r\n",
                                                  " ",
                                                  "\xff\xff\xff\xff",
                                                  "\xe2\x80\xa8",
                                                  "%",
                                                  "null"};
    const size_t at = Below(last_.size() + 1);
    switch (Below(8)) {
      case 0:
        if (at < last_.size()) last_[at] = static_cast<char>(last_[at] ^ (1 << Below(8)));
        break;
      case 1:
        if (at < last_.size()) last_[at] = static_cast<char>(Below(256));
        break;
      case 2:
        last_.erase(at, 1 + Below(16));
        break;
      case 3:
        last_.insert(at, 1, static_cast<char>(Below(256)));
        break;
      case 4:
        last_.insert(at, kWords[Below(std::size(kWords))]);
        break;
      case 5:
        last_.insert(at, Piece(corpus_[Below(corpus_.size())]));
        break;
      case 6:
        last_.insert(at, Piece(last_));
        break;
      default:
        last_.resize(at);
        last_ += Piece(corpus_[Below(corpus_.size())]);
    }
  }

  const std::vector<Bytes>& corpus_;
  std::mt19937_64 random_;
  Bytes last_;
};

std::vector<Bytes> ReadCorpus(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());  // a seed says the same wherever the files lie
  std::vector<Bytes> inputs;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return inputs;
}

}  // namespace

int main(int argc, char** argv) {
  const auto found = argc == 4 ? Targets().find(std::string_view(argv[1])) : Targets().end();
  if (found == Targets().end()) {
    std::fprintf(stderr, "usage: fuzz_test NAME EXECUTIONS SECONDS\n");
    return 2;
  }
  const auto& [name, target] = *found;
  const uint64_t most = std::strtoull(argv[2], nullptr, 10);
  const std::chrono::seconds limit(std::strtoull(argv[3], nullptr, 10));
  const char* const fixed = std::getenv("WINNOW_TEST_SEED");
  const uint64_t seed = fixed != nullptr ? std::strtoull(fixed, nullptr, 10) : 1;
  const std::vector<Bytes> corpus =
      ReadCorpus(std::filesystem::path(winnow::SourcePath("tests/fuzz/corpus")) / name);
  if (corpus.empty()) {
    std::fprintf(stderr, "tests/fuzz/corpus/%s has no inputs\n", name.c_str());
    return 1;
  }
  std::fprintf(stderr, "WINNOW_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  crash_file = "fuzz-crash-" + name;
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(KeepInput);
  for (const int number : {SIGABRT, SIGALRM}) std::signal(number, OnSignal);

  const auto began = std::chrono::steady_clock::now();
  for (const Bytes& input : corpus) Try(target, input);
  Mutator mutator(corpus, seed);
  uint64_t done = 0;
  while (done < most && std::chrono::steady_clock::now() - began < limit) {
    Try(target, mutator.Next());
    ++done;
  }
  std::printf("%s: %zu inputs of the corpus, %llu mutations\n", name.c_str(), corpus.size(),
              static_cast<unsigned long long>(done));
  return 0;
}
