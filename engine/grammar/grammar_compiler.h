// Compiles grammars within bounds: of time and memory, by leaving the work to a process that is ended when it passes
// them (engine/grammar/grammar_worker.h), and of what is kept, by a cache that forgets what was used longest ago.
//
// The process starts with the first grammar, lives on for the next ones, and starts again after it was ended or broke.
//
// Any thread. Compile blocks: a call waits for those before it, each of which takes Options::compile_time at most. Not
// for the engine's thread, nor for one that serves others.
#ifndef WINNOW_ENGINE_GRAMMAR_GRAMMAR_COMPILER_H_
#define WINNOW_ENGINE_GRAMMAR_GRAMMAR_COMPILER_H_

#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/base/mutex.h"
#include "engine/grammar/grammar.h"

namespace winnow::engine {

class Tokenizer;

// Ids below `width`, the width of a row of logits. End tokens have no bytes; those of control tokens are no text.
GrammarVocabulary MakeGrammarVocabulary(const Tokenizer& tokenizer, int32_t width,
                                        const std::vector<int32_t>& end_tokens);

struct GrammarCompilerOptions {
  // The worker: a program and its arguments. It talks as RunGrammarWorker does.
  std::string program = "/proc/self/exe";
  std::vector<std::string> arguments = {"grammar-worker"};
  std::chrono::milliseconds compile_time{10'000};
  // The first grammar has to wait for the process and its vocabulary, too.
  std::chrono::milliseconds start_time{30'000};
  // The process's memory: for its first grammar all that it has, for others what is beyond that.
  size_t worker_bytes = size_t{1} << 30;
  size_t compiled_bytes = size_t{32} << 20;  // of one grammar on its way here
  size_t cache_bytes = size_t{256} << 20;    // of grammars that are kept
};

class GrammarCompiler {
 public:
  GrammarCompiler(GrammarCompilerOptions options, GrammarVocabulary vocabulary);
  ~GrammarCompiler();
  GrammarCompiler(const GrammarCompiler&) = delete;
  GrammarCompiler& operator=(const GrammarCompiler&) = delete;

  // REQUIRES: CheckGrammarSource(source) is OK.
  // InvalidArgument: what is wrong with the source; it takes too much time or memory. Unimplemented: a build without
  // xgrammar. Unavailable: the worker cannot be started, or broke.
  absl::StatusOr<std::shared_ptr<const Grammar>> Compile(const GrammarSource& source)
      ABSL_LOCKS_EXCLUDED(worker_mutex_, cache_mutex_);

  // The cache's, of grammars that are kept.
  size_t cached_bytes() const ABSL_LOCKS_EXCLUDED(cache_mutex_);

 private:
  struct Worker;
  struct Cached {
    std::string key;
    std::shared_ptr<const Grammar> grammar;  // null: refused
    absl::Status refused;
    size_t bytes = 0;
  };

  std::optional<absl::StatusOr<std::shared_ptr<const Grammar>>> FromCache(const std::string& key)
      ABSL_LOCKS_EXCLUDED(cache_mutex_);
  void Keep(Cached cached) ABSL_LOCKS_EXCLUDED(cache_mutex_);
  absl::Status Start() ABSL_EXCLUSIVE_LOCKS_REQUIRED(worker_mutex_);
  absl::StatusOr<std::shared_ptr<const Grammar>> CompileNow(const GrammarSource& source)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(worker_mutex_);

  const GrammarCompilerOptions options_;

  Mutex worker_mutex_;  // for as long as something is compiled
  GrammarVocabulary vocabulary_ ABSL_GUARDED_BY(worker_mutex_);
  std::string encoded_vocabulary_ ABSL_GUARDED_BY(worker_mutex_);
  std::unique_ptr<GrammarLibrary> library_ ABSL_GUARDED_BY(worker_mutex_);  // loads; null: not yet
  std::unique_ptr<Worker> worker_ ABSL_GUARDED_BY(worker_mutex_);           // null: none runs

  mutable Mutex cache_mutex_;
  std::list<Cached> cache_ ABSL_GUARDED_BY(cache_mutex_);  // used last first
  absl::flat_hash_map<std::string, std::list<Cached>::iterator> by_key_
      ABSL_GUARDED_BY(cache_mutex_);
  size_t cached_bytes_ ABSL_GUARDED_BY(cache_mutex_) = 0;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_GRAMMAR_GRAMMAR_COMPILER_H_
