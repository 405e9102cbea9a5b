// Small files that are replaced as a whole.
#ifndef WINNOW_ENGINE_BASE_REPLACE_FILE_H_
#define WINNOW_ENGINE_BASE_REPLACE_FILE_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace winnow::engine {

enum class Sync {
  kNo,   // a crash of the machine may leave the file empty or cut: for what can be made again
  kYes,  // text and name are on the disk when the call returns
};

// Makes `text` the file at `path`, for its owner alone. Whoever reads meanwhile, and whoever comes after a failure, finds
// what was there before or all of the text. Folders that are missing are made. Any thread; of two calls for one path
// one wins. Errors are the system's, with the path and the call that failed.
absl::Status ReplaceFile(const std::string& path, std::string_view text, Sync sync);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_BASE_REPLACE_FILE_H_
