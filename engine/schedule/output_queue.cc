#include "engine/schedule/output_queue.h"

#include <utility>

#include "kernels/check.h"

namespace winnow::engine {

OutputQueue::OutputQueue(size_t capacity_events, std::function<void()> on_event,
                         std::function<void()> on_room)
    : capacity_events_(capacity_events),
      on_event_(std::move(on_event)),
      on_room_(std::move(on_room)) {
  WINNOW_CHECK(capacity_events_ >= 1);
}

void OutputQueue::Push(OutputEvent event) {
  const bool last = event.finish != FinishReason::kNone;
  std::function<void()> dropped_on_room;  // destroyed without the lock: it may own the reader
  {
    const MutexLock lock(mutex_);
    WINNOW_CHECK(!ended_);
    WINNOW_CHECK(last || events_.size() < capacity_events_);
    events_.push_back(std::move(event));
    ended_ = last;
    if (last) dropped_on_room = std::move(on_room_);
    if (last) on_room_ = nullptr;
  }
  if (!last) {
    if (on_event_) on_event_();
    return;
  }
  const std::function<void()> on_event = std::exchange(on_event_, nullptr);
  if (on_event) on_event();
}

bool OutputQueue::HasRoom() const {
  const MutexLock lock(mutex_);
  return events_.size() < capacity_events_;
}

std::optional<OutputEvent> OutputQueue::Pop() {
  std::optional<OutputEvent> event;
  std::function<void()> on_room;
  {
    const MutexLock lock(mutex_);
    if (events_.empty()) return std::nullopt;
    if (events_.size() == capacity_events_) on_room = on_room_;
    event = std::move(events_.front());
    events_.pop_front();
  }
  if (on_room) on_room();
  return event;
}

}  // namespace winnow::engine
