#include "engine/schedule/engine_mailbox.h"

#include <utility>

namespace winnow::engine {

bool EngineMailbox::Post(Task task) {
  const MutexLock lock(mutex_);
  if (closed_ || tasks_.size() >= capacity_) return false;
  tasks_.push_back(std::move(task));
  return true;
}

std::vector<EngineMailbox::Answer> EngineMailbox::Run(PrefixTable& prefixes) {
  std::vector<Task> tasks;
  {
    const MutexLock lock(mutex_);
    tasks.swap(tasks_);
  }
  std::vector<Answer> answers;
  for (const Task& task : tasks) {
    if (Answer answer = task(&prefixes)) answers.push_back(std::move(answer));
  }
  return answers;
}

void EngineMailbox::Close() {
  std::vector<Task> tasks;
  {
    const MutexLock lock(mutex_);
    closed_ = true;
    tasks.swap(tasks_);
  }
  for (const Task& task : tasks) {
    if (const Answer answer = task(nullptr)) answer();
  }
}

}  // namespace winnow::engine
