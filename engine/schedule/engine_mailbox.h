// Questions and orders to the engine thread from other threads, beside requests: each is a function that the engine thread
// calls between two steps, with state that nobody else may touch.
//
// Bounded: a mailbox that is full takes nothing. Each task that was taken is called exactly once: with null where the
// engine has stopped before.
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
  using Task = std::function<void(PrefixTable*)>;

  explicit EngineMailbox(size_t capacity) : capacity_(capacity) {}

  // Any thread. False: full or closed, and the task is not called.
  [[nodiscard]] bool Post(Task task);

  // Engine thread: calls what came before. True if there was something.
  bool Run(PrefixTable& prefixes);
  // Engine thread: calls what is left with null, and takes nothing any more.
  void Close();

 private:
  const size_t capacity_;
  Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Task> tasks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_ENGINE_MAILBOX_H_
