#include "engine/model/file_tensor.h"

#include <algorithm>

#include "absl/strings/str_join.h"
#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "fmt/format.h"
#include "fmt/ranges.h"

namespace winnow::engine {

absl::Status WrongTensor(const FileTensor& tensor, std::string_view what) {
  return absl::InvalidArgumentError(Concat(TensorPlace(*tensor.file, tensor.entry), what));
}

absl::Status MissingTensor(const SafetensorsFile& file, std::string_view name) {
  return absl::NotFoundError(Concat(file.path(), ": tensor ", ShortDump(name), " is missing"));
}

absl::Status CheckForm(const FileTensor& tensor, const std::vector<uint64_t>& shape,
                       std::initializer_list<std::string_view> dtypes) {
  const SafetensorsEntry& entry = tensor.entry;
  if (std::find(dtypes.begin(), dtypes.end(), entry.dtype) == dtypes.end()) {
    return WrongTensor(tensor, Concat("dtype ", entry.dtype, ", expected ",
                                      fmt::format("{}", fmt::join(dtypes, " or "))));
  }
  if (!std::equal(shape.begin(), shape.end(), entry.shape.begin(), entry.shape.end())) {
    return WrongTensor(tensor, Concat("shape [", absl::StrJoin(entry.shape, ", "), "], expected [",
                                      absl::StrJoin(shape, ", "), "] by config.json"));
  }
  return absl::OkStatus();
}

}  // namespace winnow::engine
