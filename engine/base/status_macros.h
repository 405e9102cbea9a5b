// Early return on error, the two macros that absl lacks in the packaged version (they first appear
// in its tag 20260526.0, under other names, so the prefix stays).
#ifndef WINNOW_ENGINE_BASE_STATUS_MACROS_H_
#define WINNOW_ENGINE_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define WINNOW_RETURN_IF_ERROR(expr)                                                      \
  do {                                                                                    \
    if (::absl::Status winnow_status = (expr); !winnow_status.ok()) return winnow_status; \
  } while (false)

#define WINNOW_CONCAT_INNER(a, b) a##b
#define WINNOW_CONCAT(a, b) WINNOW_CONCAT_INNER(a, b)

#define WINNOW_ASSIGN_OR_RETURN(lhs, expr) \
  WINNOW_ASSIGN_OR_RETURN_IMPL(WINNOW_CONCAT(winnow_statusor_, __LINE__), lhs, expr)

#define WINNOW_ASSIGN_OR_RETURN_IMPL(statusor, lhs, expr)  \
  auto statusor = (expr);                                  \
  if (!statusor.ok()) return std::move(statusor).status(); \
  lhs = std::move(statusor).value()

#endif  // WINNOW_ENGINE_BASE_STATUS_MACROS_H_
