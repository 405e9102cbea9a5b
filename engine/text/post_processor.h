// The `post_processor` of tokenizer.json: the tokens that are put around a text.
//
// Honoured: TemplateProcessing (its `single` template), ByteLevel (which concerns offsets only),
// Sequence of those. Every other kind is refused by name. Immutable after creation; any thread.
#ifndef WINNOW_ENGINE_TEXT_POST_PROCESSOR_H_
#define WINNOW_ENGINE_TEXT_POST_PROCESSOR_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/tokenizer_json.h"

namespace winnow::engine {

class PostProcessor {
 public:
  // `id_end`: ids of the template must lie below.
  static absl::StatusOr<PostProcessor> Make(const std::optional<JsonNode>& json, int32_t id_end);

  std::vector<int32_t> Apply(std::vector<int32_t> ids, bool add_special_tokens) const;

 private:
  struct Part {
    bool is_text;
    std::vector<int32_t> ids;  // of a part that is not the text
  };
  absl::Status Read(const JsonNode& json, int32_t id_end);
  std::optional<std::vector<Part>> template_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_POST_PROCESSOR_H_
