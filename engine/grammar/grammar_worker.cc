#include "engine/grammar/grammar_worker.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <vector>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"

namespace winnow::engine {
namespace {

constexpr int kPollMilliseconds = 10;
constexpr size_t kHeadBytes = 9;

void PutNumber(uint64_t value, int bytes, std::string* out) {
  for (int i = 0; i < bytes; ++i) out->push_back(static_cast<char>(value >> (8 * i)));
}

uint64_t GetNumber(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    value |= uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  return value;
}

absl::Status WriteAll(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return absl::UnavailableError("the other end is gone");
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status ReadSome(int fd, size_t count, const std::function<absl::Status()>& go_on,
                      std::string* out) {
  while (count > 0) {
    while (go_on != nullptr) {
      pollfd poll_fd{fd, POLLIN, 0};
      // An answer that is there has come in time, however late it is looked at.
      if (poll(&poll_fd, 1, kPollMilliseconds) > 0) break;
      WINNOW_RETURN_IF_ERROR(go_on());
    }
    char buffer[1 << 16];
    const ssize_t got = read(fd, buffer, std::min(count, sizeof(buffer)));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return absl::UnavailableError("the other end is gone");
    out->append(buffer, static_cast<size_t>(got));
    count -= static_cast<size_t>(got);
    // A worker that sends a little at a time is asked about between the parts.
    if (count > 0 && go_on != nullptr) WINNOW_RETURN_IF_ERROR(go_on());
  }
  return absl::OkStatus();
}

// Nothing but what EncodeVocabulary wrote; false otherwise.
bool DecodeVocabulary(std::string_view bytes, GrammarVocabulary* vocabulary) {
  const auto number = [&bytes](uint64_t* value) {
    if (bytes.size() < 4) return false;
    *value = GetNumber(bytes.substr(0, 4));
    bytes.remove_prefix(4);
    return true;
  };
  uint64_t count = 0;
  if (!number(&count)) return false;
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t size = 0;
    if (!number(&size) || size > bytes.size()) return false;
    vocabulary->tokens.emplace_back(bytes.substr(0, size));
    bytes.remove_prefix(size);
  }
  while (!bytes.empty()) {
    uint64_t id = 0;
    if (!number(&id)) return false;
    vocabulary->end_tokens.push_back(static_cast<int32_t>(id));
  }
  return true;
}

}  // namespace

std::string EncodeVocabulary(const GrammarVocabulary& vocabulary) {
  std::string out;
  PutNumber(vocabulary.tokens.size(), 4, &out);
  for (const std::string& token : vocabulary.tokens) {
    PutNumber(token.size(), 4, &out);
    out += token;
  }
  for (const int32_t id : vocabulary.end_tokens) PutNumber(static_cast<uint32_t>(id), 4, &out);
  return out;
}

absl::Status WriteGrammarFrame(int fd, uint8_t tag, std::string_view bytes) {
  std::string head(1, static_cast<char>(tag));
  PutNumber(bytes.size(), 8, &head);
  WINNOW_RETURN_IF_ERROR(WriteAll(fd, head));
  return WriteAll(fd, bytes);
}

absl::Status ReadGrammarFrame(int fd, size_t most, const std::function<absl::Status()>& go_on,
                              GrammarFrame* frame) {
  std::string head;
  WINNOW_RETURN_IF_ERROR(ReadSome(fd, kHeadBytes, go_on, &head));
  const uint64_t size = GetNumber(std::string_view(head).substr(1));
  if (size > most) {
    return absl::ResourceExhaustedError(
        Concat("has ", size, " bytes, at most ", most, " are taken"));
  }
  frame->tag = static_cast<uint8_t>(head[0]);
  frame->bytes.clear();
  return ReadSome(fd, size, go_on, &frame->bytes);
}

int RunGrammarWorker(int in, int out) {
  constexpr size_t kAny = std::numeric_limits<size_t>::max();
  GrammarFrame frame;
  GrammarVocabulary vocabulary;
  if (!ReadGrammarFrame(in, kAny, nullptr, &frame).ok() || frame.tag != kVocabularyTag ||
      !DecodeVocabulary(frame.bytes, &vocabulary)) {
    return 2;
  }
  const auto library = GrammarLibrary::Make(vocabulary);
  vocabulary = {};
  while (ReadGrammarFrame(in, kAny, nullptr, &frame).ok()) {
    if (frame.bytes.empty()) return 2;
    const GrammarSource source{static_cast<GrammarKind>(frame.tag), frame.bytes.substr(1),
                               frame.bytes[0] != 0};
    const absl::StatusOr<std::string> compiled =
        library.ok() ? (*library)->Compile(source) : library.status();
    const absl::Status sent =
        compiled.ok() ? WriteGrammarFrame(out, 0, *compiled)
                      : WriteGrammarFrame(out, static_cast<uint8_t>(compiled.status().code()),
                                          std::string(compiled.status().message()));
    if (!sent.ok()) return 1;
  }
  return 0;
}

}  // namespace winnow::engine
