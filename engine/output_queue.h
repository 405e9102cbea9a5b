// One request's way back: the engine pushes events, the service pops them. Bounded: when a reader is
// slow, the queue is full, the engine plans that sequence no more until there is room, and others go on.
#ifndef WINNOW_ENGINE_OUTPUT_QUEUE_H_
#define WINNOW_ENGINE_OUTPUT_QUEUE_H_

#include <deque>
#include <functional>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "engine/request.h"

namespace winnow::engine {

class OutputQueue {
 public:
  // `on_event` is called (without the lock) on the engine thread after each push; it must only
  // schedule work. `on_room` is called on the reader's thread when a full queue gets room again: it
  // wakes the engine. Either may be empty.
  OutputQueue(size_t capacity_events, std::function<void()> on_event, std::function<void()> on_room);

  // Engine thread. The last event (finish set) is taken even when full, so that an end is never lost.
  void Push(OutputEvent event);
  bool HasRoom() const;  // engine thread

  std::optional<OutputEvent> Pop();  // reader's thread

 private:
  const size_t capacity_events_;
  const std::function<void()> on_event_;
  const std::function<void()> on_room_;
  mutable absl::Mutex mutex_;
  std::deque<OutputEvent> events_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_OUTPUT_QUEUE_H_
