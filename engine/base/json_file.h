// Small JSON files of a model directory, read with bounds and with errors that name the file.
//
// Everything here is a pure function; nothing is kept.
#ifndef WINNOW_ENGINE_BASE_JSON_FILE_H_
#define WINNOW_ENGINE_BASE_JSON_FILE_H_

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace winnow::engine {

// InvalidArgument, with its target, if `path` is a symbolic link that leads nowhere. Such a file is
// not absent: somebody put it there, and a default in its place would be a silent change.
absl::Status CheckLink(const std::string& path);

// The whole of a regular file of at most `max_bytes`.
// NotFound, PermissionDenied: as the system says. InvalidArgument: not a regular file, too large, or a
// link that leads nowhere.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path, size_t max_bytes);

// `text` as a JSON object; `name` stands for it in errors. InvalidArgument: not JSON (with the byte
// where it breaks), nested deeper than 64, or not an object. Costs at most about 40 bytes of memory
// per byte of text: callers bound the text.
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, std::string_view name);

// Calls `read` with the object of each line that is not empty, and "NAME:LINE". Stops at the first
// error, which is ParseJsonObject's or `read`'s.
absl::Status ForEachJsonLine(std::string_view lines, std::string_view name,
                             const std::function<absl::Status(const nlohmann::json& object,
                                                              const std::string& place)>& read);

// Both of the first two, with the path as the name.
absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path, size_t max_bytes);

// `value` as it stands in the file, cut short for a message.
std::string ShortDump(const nlohmann::json& value);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_BASE_JSON_FILE_H_
