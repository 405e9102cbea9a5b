// Tensors that calibrate recorded (safetensors: length of the header, JSON header, data). A test's
// reader: the one that checks what it is given is engine/model/safetensors.h, which this folder does not
// see.
#ifndef WINNOW_TESTS_UNIT_KERNELS_GOLDEN_TENSORS_H_
#define WINNOW_TESTS_UNIT_KERNELS_GOLDEN_TENSORS_H_

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/unit/test_paths.h"

namespace winnow::kernels {

// `name` is under tests/golden/. Throws, and so fails the test, if the file is not there.
inline std::string ReadGolden(const std::string& name) {
  std::ifstream file(SourcePath("tests/golden/" + name), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

class GoldenTensors {
 public:
  explicit GoldenTensors(const std::string& name) : file_(ReadGolden(name)) {
    uint64_t header_bytes = 0;
    const std::string prefix = file_.substr(0, 8);
    std::memcpy(&header_bytes, prefix.data(), prefix.size());
    header_ = nlohmann::json::parse(file_.substr(8, header_bytes));
    data_ = file_.data() + 8 + header_bytes;
  }
  GoldenTensors(const GoldenTensors&) = delete;  // data_ points into file_
  GoldenTensors& operator=(const GoldenTensors&) = delete;

  bool has(const std::string& name) const { return header_.contains(name); }
  std::vector<int32_t> shape(const std::string& name) const { return header_[name]["shape"]; }
  template <typename T>
  std::vector<T> values(const std::string& name) const {
    const size_t first = header_[name]["data_offsets"][0], last = header_[name]["data_offsets"][1];
    std::vector<T> values((last - first) / sizeof(T));
    std::memcpy(values.data(), data_ + first, last - first);
    return values;
  }

 private:
  const std::string file_;
  nlohmann::json header_;
  const char* data_ = nullptr;
};

}  // namespace winnow::kernels

#endif  // WINNOW_TESTS_UNIT_KERNELS_GOLDEN_TENSORS_H_
