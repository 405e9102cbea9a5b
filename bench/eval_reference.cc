#include "bench/eval_reference.h"

#include <limits>

#include "absl/status/status.h"
#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/json_keys.h"
#include "engine/base/status_macros.h"
#include "nlohmann/json.hpp"

namespace winnow::bench {

std::string TextReferenceLines(const TextReference& reference) {
  std::string lines;
  for (size_t i = 0; i < reference.tokens.size(); ++i) {
    const nlohmann::ordered_json line = {{"token", reference.tokens[i]},
                                         {"loss", reference.losses[i]},
                                         {"likeliest", reference.likeliest[i]}};
    lines += line.dump() + "\n";
  }
  return lines;
}

absl::StatusOr<TextReference> ParseTextReference(std::string_view lines, std::string_view path) {
  TextReference reference;
  WINNOW_RETURN_IF_ERROR(engine::ForEachJsonLine(
      lines, path, [&](const nlohmann::json& object, const std::string& place) {
        constexpr int32_t kTokenMax = std::numeric_limits<int32_t>::max();
        engine::JsonKeys keys(object, place);
        const int64_t token = keys.Int("token", {}, 0, kTokenMax);
        const double loss = keys.Number("loss", {}, 0, std::numeric_limits<double>::max());
        const int64_t likeliest = keys.Int("likeliest", {}, 0, kTokenMax);
        reference.tokens.push_back(static_cast<int32_t>(token));
        reference.losses.push_back(loss);
        reference.likeliest.push_back(static_cast<int32_t>(likeliest));
        return keys.status();
      }));
  if (reference.tokens.empty()) {
    return absl::InvalidArgumentError(engine::Concat(path, ": has no line"));
  }
  return reference;
}

}  // namespace winnow::bench
