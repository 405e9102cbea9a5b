#include "engine/base/replace_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "engine/base/concat.h"
#include "engine/base/status_macros.h"

namespace winnow::engine {
namespace {

absl::Status Failed(const char* call, const std::string& path) {
  return absl::ErrnoToStatus(errno, Concat(path, ": ", call));
}

absl::Status WriteWhole(int fd, std::string_view text, const std::string& path) {
  while (!text.empty()) {
    const ssize_t count = write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return Failed("write", path);
    text.remove_prefix(static_cast<size_t>(count));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ReplaceFile(const std::string& path, std::string_view text, Sync sync) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error && !folder.empty()) {
    return absl::ErrnoToStatus(error.value(), Concat(folder.string(), ": mkdir"));
  }
  std::string temporary = path + ".XXXXXX";
  const int fd = mkostemp(temporary.data(), O_CLOEXEC);
  if (fd < 0) return Failed("open", temporary);
  absl::Cleanup remove = [&] { unlink(temporary.c_str()); };
  absl::Status status = WriteWhole(fd, text, temporary);
  if (status.ok() && sync == Sync::kYes && fsync(fd) != 0) status = Failed("fsync", temporary);
  if (close(fd) != 0 && status.ok()) status = Failed("close", temporary);
  WINNOW_RETURN_IF_ERROR(status);
  if (rename(temporary.c_str(), path.c_str()) != 0) return Failed("rename", path);
  std::move(remove).Cancel();
  if (sync == Sync::kNo) return absl::OkStatus();

  const std::string at = folder.empty() ? "." : folder.string();
  const int folder_fd = open(at.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_fd < 0) return Failed("open", at);
  const absl::Cleanup close_it = [folder_fd] { close(folder_fd); };
  return fsync(folder_fd) == 0 ? absl::OkStatus() : Failed("fsync", at);
}

}  // namespace winnow::engine
