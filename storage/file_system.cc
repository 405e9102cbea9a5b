#include "storage/file_system.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "storage/check.h"

namespace winnow::storage {

absl::Status ErrnoStatus(int error, const std::string& what) {
  return absl::ErrnoToStatus(error, what);
}

void File::Close() {
  // EINTR included, the descriptor is gone after close(2) on Linux; an error here says nothing that
  // the last fdatasync did not.
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

absl::StatusOr<File> FileSystem::Open(const std::string& path, const OpenOptions& options) {
  int flags = O_CLOEXEC | O_NOFOLLOW;
  flags |= options.read_only || options.directory ? O_RDONLY : O_RDWR;
  if (options.create) flags |= O_CREAT | O_EXCL;
  if (options.direct) flags |= O_DIRECT;
  if (options.directory) flags |= O_DIRECTORY;
  int fd;
  do {
    fd = ::open(path.c_str(), flags, 0600);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) return ErrnoStatus(errno, "open " + path);
  return File(fd);
}

absl::Status FileSystem::Truncate(const File& file, uint64_t bytes) {
  int rc;
  do {
    rc = ::ftruncate(file.fd(), static_cast<off_t>(bytes));
  } while (rc < 0 && errno == EINTR);
  return rc == 0 ? absl::OkStatus() : ErrnoStatus(errno, "ftruncate");
}

absl::Status FileSystem::ReadAt(const File& file, uint64_t offset, std::span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t n = ::pread(file.fd(), into.data(), into.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "pread");
    if (n == 0) return absl::DataLossError("pread: the file ends early");
    into = into.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
  return absl::OkStatus();
}

absl::Status FileSystem::WriteAt(const File& file, uint64_t offset,
                                 std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(file.fd(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ErrnoStatus(n < 0 ? errno : EIO, "pwrite");
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
  return absl::OkStatus();
}

absl::Status FileSystem::Datasync(const File& file) {
  return ::fdatasync(file.fd()) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "fdatasync");
}

absl::Status FileSystem::Rename(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return ErrnoStatus(errno, "rename " + from + " to " + to);
}

absl::Status FileSystem::Unlink(const std::string& path) {
  if (::unlink(path.c_str()) == 0) return absl::OkStatus();
  return ErrnoStatus(errno, "unlink " + path);
}

absl::Status FileSystem::MakeDirectory(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) == 0) return absl::OkStatus();
  struct stat status;
  const int error = errno;
  if (error == EEXIST && ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) {
    return absl::OkStatus();
  }
  return ErrnoStatus(error, "mkdir " + path);
}

absl::Status FileSystem::RemoveTree(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  return error ? ErrnoStatus(error.value(), "remove " + path) : absl::OkStatus();
}

absl::Status FileSystem::SyncDirectory(const std::string& path) {
  absl::StatusOr<File> directory = Open(path, {.directory = true});
  WINNOW_RETURN_IF_ERROR(directory.status());
  if (::fsync(directory->fd()) == 0) return absl::OkStatus();
  return ErrnoStatus(errno, "fsync " + path);
}

absl::StatusOr<std::vector<std::string>> FileSystem::List(const std::string& path) {
  std::error_code error;
  std::filesystem::directory_iterator it(path, error);
  std::vector<std::string> names;
  for (; !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (error) return ErrnoStatus(error.value(), "list " + path);
  std::sort(names.begin(), names.end());
  return names;
}

absl::StatusOr<uint64_t> FileSystem::FileBytes(const std::string& path) {
  struct stat status;
  if (::lstat(path.c_str(), &status) != 0) return ErrnoStatus(errno, "stat " + path);
  return static_cast<uint64_t>(status.st_size);
}

}  // namespace winnow::storage
