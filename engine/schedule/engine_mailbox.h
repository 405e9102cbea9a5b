// Questions and orders to the engine thread from other threads, beside requests: each is a function that the engine thread
// calls between two steps, with state that nobody else may touch.
//
// Bounded: a mailbox that is full takes nothing. Each task that was taken is called exactly once: with null where the
// engine has stopped before. A task returns its answer, which is called once the engine's statistics show what the task did.
#ifndef WINNOW_ENGINE_SCHEDULE_ENGINE_MAILBOX_H_
#define WINNOW_ENGINE_SCHEDULE_ENGINE_MAILBOX_H_

#include <cstddef>
#include <functional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "engine/base/mutex.h"

namespace winnow::engine {

class PrefixTable;

class EngineMailbox {
 public:
  using Answer = std::function<void()>;  // may be empty
  using Task = std::function<Answer(PrefixTable*)>;

  explicit EngineMailbox(size_t capacity) : capacity_(capacity) {}

  // Any thread. False: full or closed, and the task is not called.
  [[nodiscard]] bool Post(Task task);

  // Engine thread: calls what came before. The caller calls the answers.
  std::vector<Answer> Run(PrefixTable& prefixes);
  // Engine thread: calls what is left with null, and its answers, and takes nothing any more.
  void Close();

 private:
  const size_t capacity_;
  Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Task> tasks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_ENGINE_MAILBOX_H_
