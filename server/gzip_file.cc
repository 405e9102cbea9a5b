#include "server/gzip_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "server/strings.h"

namespace winnow::server {

absl::StatusOr<std::string> ReadMaybeGzipped(const std::string& path, size_t max_bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, path);
  struct stat info = {};
  if (fstat(fd, &info) == 0 && S_ISDIR(info.st_mode)) {
    close(fd);
    return absl::InvalidArgumentError(Concat(path, ": is a directory"));
  }
  gzFile file = gzdopen(fd, "rb");  // owns fd from here on
  if (file == nullptr) {
    close(fd);
    return absl::ResourceExhaustedError(Concat(path, ": no memory to unpack it"));
  }
  const absl::Cleanup closer = [file] { gzclose_r(file); };

  std::string contents;
  std::vector<char> piece(1 << 20);
  while (true) {
    const int count = gzread(file, piece.data(), static_cast<unsigned>(piece.size()));
    if (count < 0) {
      int error = 0;
      const char* message = gzerror(file, &error);
      if (error == Z_ERRNO) return absl::ErrnoToStatus(errno, path);
      return absl::InvalidArgumentError(Concat(path, ": damaged: ", std::string(message)));
    }
    if (count == 0) break;
    if (contents.size() + count > max_bytes) {
      return absl::InvalidArgumentError(Concat(path, ": more than ", max_bytes, " bytes of text"));
    }
    contents.append(piece.data(), count);
  }
  // A file cut short ends without an error from gzread: the state tells.
  int error = 0;
  gzerror(file, &error);
  if (error == Z_BUF_ERROR) return absl::InvalidArgumentError(Concat(path, ": ends too early"));
  return contents;
}

}  // namespace winnow::server
