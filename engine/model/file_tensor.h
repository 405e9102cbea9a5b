// Tensors of a model directory's files, found by name and checked: for matrices that lie in several of them.
#ifndef WINNOW_ENGINE_MODEL_FILE_TENSOR_H_
#define WINNOW_ENGINE_MODEL_FILE_TENSOR_H_

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/model/safetensors.h"

namespace winnow::engine {

struct FileTensor {
  const SafetensorsFile* file = nullptr;
  SafetensorsEntry entry;
  const std::byte* data() const { return file->Data(entry).data(); }
};
// A tensor by its name, which is then known to be part of the model; absent if there is none.
using TakeTensor = std::function<std::optional<FileTensor>(const std::string& name)>;

// InvalidArgument with file, tensor and `what`.
absl::Status WrongTensor(const FileTensor& tensor, std::string_view what);
// NotFound: `file` lacks the tensor `name`.
absl::Status MissingTensor(const SafetensorsFile& file, std::string_view name);

// Whether it has that shape and one of those types; InvalidArgument says what was expected.
absl::Status CheckForm(const FileTensor& tensor, const std::vector<uint64_t>& shape,
                       std::initializer_list<std::string_view> dtypes);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_FILE_TENSOR_H_
