#include "engine/grammar/grammar_compiler.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/grammar/grammar_worker.h"
#include "engine/text/tokenizer.h"

namespace winnow::engine {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr size_t kRefusalBytes = 4 << 10;  // what a refusal counts for in the cache, at least

std::string KeyOf(const GrammarSource& source) {
  std::string key(1, static_cast<char>(source.kind));
  key.push_back(source.closed ? 1 : 0);
  return key + source.text;
}

// A process's; 0 if it is not there any more.
size_t ResidentBytes(pid_t pid) {
  const std::string path = Concat("/proc/", pid, "/statm");
  FILE* const file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return 0;
  long size = 0, resident = 0;
  const int fields = std::fscanf(file, "%ld %ld", &size, &resident);
  std::fclose(file);
  return fields == 2 ? static_cast<size_t>(resident) * static_cast<size_t>(sysconf(_SC_PAGESIZE))
                     : 0;
}

}  // namespace

GrammarVocabulary MakeGrammarVocabulary(const Tokenizer& tokenizer, int32_t width,
                                        const std::vector<int32_t>& end_tokens) {
  GrammarVocabulary vocabulary;
  vocabulary.tokens.resize(static_cast<size_t>(width));
  for (int32_t id = 0; id < std::min(width, tokenizer.vocab_size()); ++id) {
    // A byte that no text has keeps control tokens out of texts, and leaves them to grammars that ask for them by id:
    // xgrammar takes tokens without bytes for ones that are never drawn.
    vocabulary.tokens[static_cast<size_t>(id)] =
        tokenizer.IsSpecial(id) ? Concat("\xff", tokenizer.IdToToken(id)) : tokenizer.BytesOf(id);
  }
  for (const int32_t id : end_tokens) {
    if (id < 0 || id >= width) continue;
    vocabulary.tokens[static_cast<size_t>(id)].clear();
    vocabulary.end_tokens.push_back(id);
  }
  return vocabulary;
}

struct GrammarCompiler::Worker {
  Worker(pid_t process, int socket_fd) : pid(process), fd(socket_fd) {}
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker() {
    close(fd);
    kill(pid, SIGKILL);
    while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  const pid_t pid;
  const int fd;
  size_t idle_bytes = 0;  // resident when it was ready; 0: it has compiled nothing yet
};

GrammarCompiler::GrammarCompiler(GrammarCompilerOptions options, GrammarVocabulary vocabulary)
    : options_(std::move(options)), vocabulary_(std::move(vocabulary)) {}

GrammarCompiler::~GrammarCompiler() = default;

absl::StatusOr<std::shared_ptr<const Grammar>> GrammarCompiler::Compile(
    const GrammarSource& source) {
  const std::string key = KeyOf(source);
  if (auto cached = FromCache(key)) return *std::move(cached);
  const MutexLock lock(worker_mutex_);
  // A call that went before may have had the same one.
  if (auto cached = FromCache(key)) return *std::move(cached);
  absl::StatusOr<std::shared_ptr<const Grammar>> grammar = CompileNow(source);
  if (grammar.ok()) {
    Keep({key, *grammar, absl::OkStatus(), (*grammar)->size_bytes() + key.size()});
  } else if (absl::IsInvalidArgument(grammar.status())) {
    Keep({key, nullptr, grammar.status(), kRefusalBytes + key.size()});
  }
  return grammar;
}

size_t GrammarCompiler::cached_bytes() const {
  const MutexLock lock(cache_mutex_);
  return cached_bytes_;
}

std::optional<absl::StatusOr<std::shared_ptr<const Grammar>>> GrammarCompiler::FromCache(
    const std::string& key) {
  const MutexLock lock(cache_mutex_);
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return std::nullopt;
  cache_.splice(cache_.begin(), cache_, found->second);
  if (found->second->grammar == nullptr) return found->second->refused;
  return found->second->grammar;
}

void GrammarCompiler::Keep(Cached cached) {
  const MutexLock lock(cache_mutex_);
  if (cached.bytes > options_.cache_bytes || by_key_.contains(cached.key)) return;
  cached_bytes_ += cached.bytes;
  cache_.push_front(std::move(cached));
  by_key_[cache_.front().key] = cache_.begin();
  while (cached_bytes_ > options_.cache_bytes) {
    cached_bytes_ -= cache_.back().bytes;
    by_key_.erase(cache_.back().key);
    cache_.pop_back();
  }
}

absl::Status GrammarCompiler::Start() {
  if (library_ == nullptr) {
    WINNOW_ASSIGN_OR_RETURN(library_, GrammarLibrary::Make(vocabulary_));
    encoded_vocabulary_ = EncodeVocabulary(vocabulary_);
    vocabulary_ = {};
  }
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
    return absl::UnavailableError(Concat("no socket for grammars: ", std::strerror(errno)));
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, fds[1], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, fds[1], STDOUT_FILENO);
  posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
  std::vector<char*> arguments = {const_cast<char*>(options_.program.c_str())};
  for (const std::string& argument : options_.arguments) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  pid_t pid = 0;
  const int error =
      posix_spawn(&pid, options_.program.c_str(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(fds[1]);
  if (error != 0) {
    close(fds[0]);
    return absl::UnavailableError(
        Concat("cannot start ", options_.program, " for grammars: ", std::strerror(error)));
  }
  worker_ = std::make_unique<Worker>(pid, fds[0]);
  return WriteGrammarFrame(worker_->fd, kVocabularyTag, encoded_vocabulary_);
}

absl::StatusOr<std::shared_ptr<const Grammar>> GrammarCompiler::CompileNow(
    const GrammarSource& source) {
  if (worker_ == nullptr) {
    if (absl::Status started = Start(); !started.ok()) {
      worker_.reset();
      return started;
    }
  }
  const bool first = worker_->idle_bytes == 0;
  const SteadyClock::time_point begun = SteadyClock::now();
  const auto limit =
      options_.compile_time + (first ? options_.start_time : std::chrono::milliseconds(0));
  const auto within_memory = [&]() -> absl::Status {
    if (ResidentBytes(worker_->pid) > worker_->idle_bytes + options_.worker_bytes) {
      return absl::InvalidArgumentError(
          Concat("takes more than ", options_.worker_bytes >> 20, " MiB of memory to compile"));
    }
    return absl::OkStatus();
  };
  const auto within_bounds = [&]() -> absl::Status {
    if (SteadyClock::now() - begun > limit) {
      return absl::InvalidArgumentError(
          Concat("takes longer than ", options_.compile_time.count() / 1000, " s to compile"));
    }
    return within_memory();
  };
  GrammarFrame frame;
  absl::Status status =
      WriteGrammarFrame(worker_->fd, static_cast<uint8_t>(source.kind),
                        Concat(std::string(1, source.closed ? '\1' : '\0'), source.text));
  if (status.ok()) {
    status = ReadGrammarFrame(worker_->fd, options_.compiled_bytes, within_bounds, &frame);
  }
  // A worker that answers at once was not asked while it compiled, and would keep the memory that it took.
  if (status.ok()) status = within_memory();
  if (!status.ok()) {
    worker_.reset();  // whatever it does, nobody waits for it
    if (absl::IsUnavailable(status) && first) {
      return absl::UnavailableError("the process that compiles grammars ended");
    }
    if (absl::IsUnavailable(status)) {
      return absl::InvalidArgumentError("broke the process that compiled it");
    }
    if (absl::IsResourceExhausted(status)) {
      return absl::InvalidArgumentError(
          Concat("is too large when compiled: ", std::string(status.message())));
    }
    return status;
  }
  if (first) worker_->idle_bytes = std::max<size_t>(ResidentBytes(worker_->pid), 1);
  if (frame.tag != 0) {
    const auto code = static_cast<absl::StatusCode>(frame.tag);
    return absl::Status(
        code == absl::StatusCode::kResourceExhausted ? absl::StatusCode::kInvalidArgument : code,
        frame.bytes);
  }
  return library_->Load(frame.bytes);
}

}  // namespace winnow::engine
