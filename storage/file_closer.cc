#include "storage/file_closer.h"

#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "storage/mutex.h"

namespace winnow::storage {

struct FileCloser::State {
  Mutex mutex;
  CondVar changed;
  std::vector<File> files ABSL_GUARDED_BY(mutex);
  size_t pending ABSL_GUARDED_BY(mutex) = 0;
  bool ends ABSL_GUARDED_BY(mutex) = false;

  void Run() {
    std::vector<File> now;
    while (true) {
      {
        const MutexLock lock(mutex);
        pending -= now.size();
        if (pending == 0) changed.NotifyAll();
        now.clear();  // closed below already
        while (files.empty() && !ends) changed.Wait(mutex);
        if (files.empty()) return;
        now.swap(files);
      }
      for (File& file : now) file.Close();
    }
  }
};

FileCloser::FileCloser() : state_(std::make_shared<State>()) {}

FileCloser::~FileCloser() {
  const auto until = std::chrono::steady_clock::now() + limit_;
  const MutexLock lock(state_->mutex);
  state_->ends = true;
  state_->changed.NotifyAll();
  while (state_->pending > 0 && state_->changed.WaitUntil(state_->mutex, until)) {
  }
}

void FileCloser::Close(File file) {
  if (!std::exchange(started_, true)) {
    std::thread([state = state_] { state->Run(); }).detach();
  }
  const MutexLock lock(state_->mutex);
  state_->files.push_back(std::move(file));
  ++state_->pending;
  state_->changed.NotifyAll();
}

size_t FileCloser::pending() const {
  const MutexLock lock(state_->mutex);
  return state_->pending;
}

}  // namespace winnow::storage
