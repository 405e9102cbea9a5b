// The calls on names rather than on bytes: open, rename, unlink and the like. They are rare, short
// and synchronous; reads, writes and syncs of data go through ring.h. Virtual so that tests can
// fail the Nth of them.
#ifndef WINNOW_STORAGE_FILE_SYSTEM_H_
#define WINNOW_STORAGE_FILE_SYSTEM_H_

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace winnow::storage {

// Status of a failed system call: message "<what>: <strerror>", code as absl maps errno.
absl::Status ErrnoStatus(int error, const std::string& what);

// Owns a file descriptor.
class File {
 public:
  File() = default;
  explicit File(int fd) : fd_(fd) {}
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&& other) noexcept {
    if (this != &other) {
      Close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~File() { Close(); }
  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  void Close();

 private:
  int fd_ = -1;
};

// Stateless; safe from any thread.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  struct OpenOptions {
    bool create = false;     // fails if the file exists
    bool direct = false;     // O_DIRECT
    bool read_only = false;  // otherwise read and write
    bool directory = false;
  };
  virtual absl::StatusOr<File> Open(const std::string& path, const OpenOptions& options);
  virtual absl::Status Truncate(const File& file, uint64_t bytes);
  // All bytes or an error; these wait for the disk.
  virtual absl::Status ReadAt(const File& file, uint64_t offset, std::span<std::byte> into);
  virtual absl::Status WriteAt(const File& file, uint64_t offset, std::span<const std::byte> bytes);
  virtual absl::Status Datasync(const File& file);
  virtual absl::Status Rename(const std::string& from, const std::string& to);
  virtual absl::Status Unlink(const std::string& path);
  virtual absl::Status MakeDirectory(const std::string& path);  // 0700; fine if it exists
  virtual absl::Status RemoveTree(const std::string& path);     // fine if it does not exist
  virtual absl::Status SyncDirectory(const std::string& path);
  virtual absl::StatusOr<std::vector<std::string>> List(const std::string& path);  // names, sorted
  virtual absl::StatusOr<uint64_t> FileBytes(const std::string& path);  // length; NotFound
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_FILE_SYSTEM_H_
