#include "tests/unit/test_paths.h"

namespace winnow {

std::string SourcePath(std::string_view path) {
  return std::string(WINNOW_SOURCE_DIR "/").append(path);
}

std::string GrammarWorkerPath() { return WINNOW_GRAMMAR_WORKER; }

}  // namespace winnow
