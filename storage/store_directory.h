// A store's directory, made and locked: one process owns it at a time.
#ifndef WINNOW_STORAGE_STORE_DIRECTORY_H_
#define WINNOW_STORAGE_STORE_DIRECTORY_H_

#include "absl/status/statusor.h"
#include "storage/disk_environment.h"
#include "storage/file_system.h"

namespace winnow::storage {

struct StoreDirectory {
  File lock;       // flock, which the kernel gives back with the last close
  File directory;  // to sync new files' names with
};

// Creates the directory (0700) if it is missing. FailedPrecondition: another process owns it. PermissionDenied: others may
// write it, and the options are strict (otherwise that is a warning, because a checksum is not a signature: whoever can
// write the directory can forge blocks). Others: the system's.
absl::StatusOr<StoreDirectory> OwnStoreDirectory(DiskEnvironment& env);

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_STORE_DIRECTORY_H_
