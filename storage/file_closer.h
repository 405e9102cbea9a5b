// Closes files on a thread of its own. The last close of a deleted file gives its room back to the file
// system, which takes some 5 ms for 64 MiB: too long for a thread that serves.
#ifndef WINNOW_STORAGE_FILE_CLOSER_H_
#define WINNOW_STORAGE_FILE_CLOSER_H_

#include <chrono>
#include <cstddef>
#include <memory>

#include "storage/file_system.h"

namespace winnow::storage {

// One caller; the thread starts with the first file.
class FileCloser {
 public:
  FileCloser();
  // Waits for the files, but no longer than the limit: a disk that hangs keeps that thread, not this one.
  ~FileCloser();
  FileCloser(const FileCloser&) = delete;
  FileCloser& operator=(const FileCloser&) = delete;

  void Close(File file);
  size_t pending() const;  // not closed yet
  void set_limit(std::chrono::nanoseconds limit) { limit_ = limit; }

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::chrono::nanoseconds limit_ = std::chrono::seconds(5);
  bool started_ = false;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_FILE_CLOSER_H_
