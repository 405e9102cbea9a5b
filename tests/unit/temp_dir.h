#ifndef WINNOW_TESTS_UNIT_TEMP_DIR_H_
#define WINNOW_TESTS_UNIT_TEMP_DIR_H_

#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

namespace winnow {

// A fresh folder that goes with its object. Fixed names collide: CTest runs every test as a process, several at a time.
class TempDir {
 public:
  explicit TempDir(const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    path_ = (parent / "winnow-test-XXXXXX").string();
    if (::mkdtemp(path_.data()) == nullptr) std::abort();
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string File(std::string_view name) const { return path_ + "/" + std::string(name); }

 private:
  std::string path_;
};

}  // namespace winnow

#endif  // WINNOW_TESTS_UNIT_TEMP_DIR_H_
