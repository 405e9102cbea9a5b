#include "engine/base/json_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "absl/cleanup/cleanup.h"
#include "engine/base/concat.h"
#include "engine/base/status_macros.h"

namespace winnow::engine {
namespace {

constexpr int kDepthMax = 64;

}  // namespace

absl::Status CheckLink(const std::string& path) {
  struct stat info = {};
  if (stat(path.c_str(), &info) == 0 || errno != ENOENT) return absl::OkStatus();
  std::error_code error;
  const std::filesystem::path target = std::filesystem::read_symlink(path, error);
  if (error) return absl::OkStatus();  // absent, or no link
  return absl::InvalidArgumentError(
      Concat(path, ": a link to ", target.string(), ", which does not exist"));
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& path, size_t max_bytes) {
  // O_NONBLOCK: opening a FIFO must not hang the start.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    WINNOW_RETURN_IF_ERROR(CheckLink(path));
    return absl::ErrnoToStatus(error, path);
  }
  const absl::Cleanup closer = [fd] { close(fd); };

  struct stat info = {};
  if (fstat(fd, &info) != 0) return absl::ErrnoToStatus(errno, path);
  if (!S_ISREG(info.st_mode))
    return absl::InvalidArgumentError(Concat(path, ": not a regular file"));
  if (static_cast<uint64_t>(info.st_size) > max_bytes) {
    return absl::InvalidArgumentError(
        Concat(path, ": ", info.st_size, " bytes, more than the ", max_bytes, " allowed"));
  }
  std::string text(info.st_size, '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = read(fd, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return absl::ErrnoToStatus(errno, path);
    if (count == 0) break;  // it shrank meanwhile; what is there gets parsed
    done += count;
  }
  text.resize(done);
  return text;
}

absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, std::string_view name) {
  using Json = nlohmann::json;
  // The parser takes a NUL for the end of the text and would ignore what follows.
  if (const size_t nul = text.find('\0'); nul != text.npos) {
    return absl::InvalidArgumentError(Concat(name, ": a NUL byte at byte ", nul));
  }
  bool too_deep = false;
  const auto limit_depth = [&too_deep](int depth, Json::parse_event_t, Json&) {
    too_deep = too_deep || depth > kDepthMax;
    return !too_deep;  // false drops the value: nothing deeper is kept
  };
  try {
    Json json = Json::parse(text, limit_depth);
    if (too_deep) {
      return absl::InvalidArgumentError(Concat(name, ": nested deeper than ", kDepthMax));
    }
    if (!json.is_object()) {
      return absl::InvalidArgumentError(Concat(name, ": not a JSON object"));
    }
    return json;
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(Concat(name, ": ", error.what()));
  }
}

absl::Status ForEachJsonLine(std::string_view lines, std::string_view name,
                             const std::function<absl::Status(const nlohmann::json& object,
                                                              const std::string& place)>& read) {
  int number = 0;
  for (size_t begin = 0; begin < lines.size();) {
    const size_t end = std::min(lines.find('\n', begin), lines.size());
    const std::string_view line = lines.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string place = Concat(name, ":", number);
    WINNOW_ASSIGN_OR_RETURN(const nlohmann::json object, ParseJsonObject(line, place));
    WINNOW_RETURN_IF_ERROR(read(object, place));
  }
  return absl::OkStatus();
}

absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path, size_t max_bytes) {
  WINNOW_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path, max_bytes));
  return ParseJsonObject(text, path);
}

std::string ShortDump(const nlohmann::json& value) {
  constexpr size_t kCharsMax = 80;
  std::string text =
      value.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kCharsMax) text = text.substr(0, kCharsMax) + "...";
  return text;
}

}  // namespace winnow::engine
