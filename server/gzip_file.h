// Whole files of text, compressed or not. The one place that sees zlib.
#ifndef WINNOW_SERVER_GZIP_FILE_H_
#define WINNOW_SERVER_GZIP_FILE_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace winnow::server {

// The contents of `path`, unpacked if they are gzip's (by their first bytes, not by the name).
// NotFound, PermissionDenied, ...: as the system says. InvalidArgument: damaged, or more than
// `max_bytes` once unpacked.
absl::StatusOr<std::string> ReadMaybeGzipped(const std::string& path, size_t max_bytes);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_GZIP_FILE_H_
