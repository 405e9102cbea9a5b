#ifndef WINNOW_TESTS_UNIT_FILE_SIZE_LIMIT_H_
#define WINNOW_TESTS_UNIT_FILE_SIZE_LIMIT_H_

#include <sys/resource.h>

#include <csignal>
#include <cstdlib>

namespace winnow {

// While it lives, writing past `bytes` of any file fails in this process (EFBIG): what stands for a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    if (getrlimit(RLIMIT_FSIZE, &before_) != 0) std::abort();
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) std::abort();
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  void (*const handler_)(int);
  rlimit before_ = {};
};

}  // namespace winnow

#endif  // WINNOW_TESTS_UNIT_FILE_SIZE_LIMIT_H_
