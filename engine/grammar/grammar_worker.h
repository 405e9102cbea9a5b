// A process that compiles grammars for another one, because only a process can be stopped that takes too long or too
// much memory, and because what breaks in it breaks nothing else. `winnow grammar-worker` is it; the other end is
// GrammarCompiler.
//
// Over a socket that is its standard input and output: frames of a byte `tag`, the number of bytes (8, little endian) and these bytes.
//   in    kVocabulary, once     GrammarVocabulary
//   in    kind of a source      `closed` (1 byte), text
//   out   code of a status      what was compiled, or the message
#ifndef WINNOW_ENGINE_GRAMMAR_GRAMMAR_WORKER_H_
#define WINNOW_ENGINE_GRAMMAR_GRAMMAR_WORKER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "engine/grammar/grammar.h"

namespace winnow::engine {

struct GrammarFrame {
  uint8_t tag = 0;
  std::string bytes;
};
inline constexpr uint8_t kVocabularyTag = 0xff;

std::string EncodeVocabulary(const GrammarVocabulary& vocabulary);

// The sockets block. Unavailable: the other end is gone.
absl::Status WriteGrammarFrame(int fd, uint8_t tag, std::string_view bytes);
// ResourceExhausted: a frame of more than `most` bytes. `go_on`, where given, is asked every 10 ms while nothing
// comes, and after a part of a frame; its error is the result. An answer or an end that is there is taken without asking.
absl::Status ReadGrammarFrame(int fd, size_t most, const std::function<absl::Status()>& go_on,
                              GrammarFrame* frame);

// Serves until the other end closes; the process's exit code.
int RunGrammarWorker(int in, int out);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_GRAMMAR_GRAMMAR_WORKER_H_
