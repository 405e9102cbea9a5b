#include "storage/store_directory.h"

#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "storage/check.h"

namespace winnow::storage {
namespace {

absl::Status CheckOwner(DiskEnvironment& env) {
  const DiskStoreOptions& options = env.options();
  struct stat info = {};
  if (::stat(options.directory.c_str(), &info) != 0) {
    return ErrnoStatus(errno, "stat " + options.directory);
  }
  std::string what;
  if (info.st_uid != ::geteuid()) {
    what = absl::StrCat("belongs to user ", info.st_uid, " and not to ", ::geteuid());
  } else if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    what = absl::StrFormat("has mode %04o", info.st_mode & 07777);
  } else {
    return absl::OkStatus();
  }
  const std::string line = absl::StrCat("store ", options.directory, ": the directory ", what,
                                        ": others can put blocks into it");
  if (options.strict) return absl::PermissionDeniedError(line);
  env.Warn(line);
  return absl::OkStatus();
}

absl::StatusOr<File> Lock(DiskEnvironment& env) {
  const std::string path = env.options().directory + "/LOCK";
  absl::StatusOr<File> file = env.files()->Open(path, {});
  if (absl::IsNotFound(file.status())) file = env.files()->Open(path, {.create = true});
  WINNOW_RETURN_IF_ERROR(file.status());
  char owner[128] = {};
  if (::flock(file->fd(), LOCK_EX | LOCK_NB) != 0) {
    const ssize_t length = ::pread(file->fd(), owner, sizeof owner - 1, 0);
    return absl::FailedPreconditionError(
        absl::StrCat("store ", env.options().directory, " is in use by another process (",
                     std::string(owner, length > 0 ? length : 0), ")"));
  }
  char host[64] = {};
  (void)::gethostname(host, sizeof host - 1);
  const std::string text = absl::StrCat("pid ", ::getpid(), " on ", host);
  // For the message above only; the lock itself is the kernel's.
  if (::ftruncate(file->fd(), 0) == 0) (void)!::pwrite(file->fd(), text.data(), text.size(), 0);
  return file;
}

}  // namespace

absl::StatusOr<StoreDirectory> OwnStoreDirectory(DiskEnvironment& env) {
  const std::string& path = env.options().directory;
  WINNOW_RETURN_IF_ERROR(env.files()->MakeDirectory(path));
  WINNOW_RETURN_IF_ERROR(CheckOwner(env));
  absl::StatusOr<File> lock = Lock(env);
  WINNOW_RETURN_IF_ERROR(lock.status());
  absl::StatusOr<File> directory = env.files()->Open(path, {.directory = true});
  WINNOW_RETURN_IF_ERROR(directory.status());
  return StoreDirectory{*std::move(lock), *std::move(directory)};
}

}  // namespace winnow::storage
