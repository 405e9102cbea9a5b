// One request's way back: the engine pushes events, the service pops them. Bounded: when a reader
// is slow, the queue is full, the engine plans that sequence no more until there is room, and
// others go on.
//
// Life: made by the service, handed to Engine::Submit, shared until the last event. If Submit
// returned OK, exactly one event with `finish` set is pushed, as the last one, whatever happens.
// After it both callbacks are dropped, so they may hold the owner of the queue alive without a
// cycle that stays.
#ifndef WINNOW_ENGINE_SCHEDULE_OUTPUT_QUEUE_H_
#define WINNOW_ENGINE_SCHEDULE_OUTPUT_QUEUE_H_

#include <deque>
#include <functional>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "engine/base/mutex.h"
#include "engine/schedule/request.h"

namespace winnow::engine {

class OutputQueue {
 public:
  // `on_event` is called on the engine thread after each push, without the lock: it may pop, and
  // must only schedule work. The reader may have popped the very event before `on_event` runs, the
  // last one too: what `on_event` touches must be kept alive by what it captured. `on_room` is
  // called on the reader's thread, without the lock, when a full queue gets room again: it should
  // call Engine::Wake. Either may be empty. REQUIRES: capacity_events >= 1.
  OutputQueue(size_t capacity_events, std::function<void()> on_event,
              std::function<void()> on_room);

  // Engine thread. REQUIRES: HasRoom(), or event.finish set: the last event is taken even when
  // full, so that an end is never lost. Nothing may be pushed after it.
  void Push(OutputEvent event);
  bool HasRoom() const;

  // Reader's thread. Nothing when the queue is empty.
  std::optional<OutputEvent> Pop();

 private:
  const size_t capacity_events_;
  mutable Mutex mutex_;
  std::deque<OutputEvent> events_ ABSL_GUARDED_BY(mutex_);
  std::function<void()> on_event_;  // engine thread only
  std::function<void()> on_room_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_OUTPUT_QUEUE_H_
