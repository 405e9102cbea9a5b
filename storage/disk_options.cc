#include "storage/disk_options.h"

#include "absl/strings/str_cat.h"
#include "storage/format.h"

namespace winnow::storage {

absl::Status DiskStoreOptions::Validate() const {
  const auto refuse = [](const std::string& what) { return absl::InvalidArgumentError(what); };
  if (directory.empty()) return refuse("store directory is empty");
  if (segment_bytes % kPageBytes != 0 || segment_bytes < 16 * kPageBytes ||
      segment_bytes > uint64_t{4} << 30) {
    return refuse(absl::StrCat("segment_bytes ", segment_bytes,
                               " is not a multiple of 4096 between 64 KiB and 4 GiB"));
  }
  if (capacity_bytes < 4 * segment_bytes) {
    return refuse(absl::StrCat("store capacity ", capacity_bytes, " is less than four segments of ",
                               segment_bytes, " bytes"));
  }
  if (staging_bytes < uint64_t{1} << 20) return refuse("staging_bytes is less than 1 MiB");
  if (operations_max == 0 || operations_max > 1u << 20) {
    return refuse("operations_max is not between 1 and 1048576");
  }
  if (read_deadline_ns <= 0 || write_deadline_ns <= 0 || open_stall_ns <= 0 ||
      close_limit_ns <= 0) {
    return refuse("a deadline is not positive");
  }
  if (io.depth == 0 || io.depth > 4096) return refuse("I/O depth is not between 1 and 4096");
  if (io.threads == 0 || io.threads > 256) return refuse("I/O threads are not between 1 and 256");
  return absl::OkStatus();
}

}  // namespace winnow::storage
