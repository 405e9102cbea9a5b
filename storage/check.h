// WINNOW_CHECK for storage's own bugs, and early return on error. Included by storage's .cc files
// only: engine and kernels have macros of these names in headers of theirs, which storage may not
// see.
#ifndef WINNOW_STORAGE_CHECK_H_
#define WINNOW_STORAGE_CHECK_H_

#include <cstdio>
#include <cstdlib>

#include "absl/status/status.h"

namespace winnow::storage {
[[noreturn]] inline void CheckFailed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "CHECK failed: %s at %s:%d\n", condition, file, line);
  std::abort();
}
}  // namespace winnow::storage

#define WINNOW_CHECK(condition)                                                       \
  do {                                                                                \
    if (!(condition)) ::winnow::storage::CheckFailed(#condition, __FILE__, __LINE__); \
  } while (false)

#define WINNOW_RETURN_IF_ERROR(expr)                                                      \
  do {                                                                                    \
    if (::absl::Status winnow_status = (expr); !winnow_status.ok()) return winnow_status; \
  } while (false)

#endif  // WINNOW_STORAGE_CHECK_H_
