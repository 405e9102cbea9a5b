// WINNOW_CHECK: for our own bugs only. What the world does to us is an absl::Status.
#ifndef WINNOW_KERNELS_CHECK_H_
#define WINNOW_KERNELS_CHECK_H_

namespace winnow::kernels {
// Prints "CHECK failed: <condition> at <file>:<line>" to stderr and aborts.
[[noreturn]] void CheckFailed(const char* condition, const char* file, int line);
}  // namespace winnow::kernels

#define WINNOW_CHECK(condition)                                                       \
  do {                                                                                \
    if (!(condition)) ::winnow::kernels::CheckFailed(#condition, __FILE__, __LINE__); \
  } while (false)

#endif  // WINNOW_KERNELS_CHECK_H_
