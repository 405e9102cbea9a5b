// Any bytes as a request's body, and as a schema. Of a body that is a JSON object each member is found by its name and
// parses to what the whole has there; a schema is good or refused.
//
// Sources: server/ordered_json.cc engine/grammar/grammar_check.cc engine/text/unicode/unicode_text.cc kernels/check.cc
// Sources: engine/text/unicode/unicode_tables.cc
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/grammar/grammar_check.h"
#include "kernels/check.h"
#include "server/ordered_json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  using winnow::engine::GrammarKind;
  for (const GrammarKind kind : {GrammarKind::kJsonSchema, GrammarKind::kStructuralTag}) {
    const absl::Status status = winnow::engine::CheckGrammarSource({kind, text});
    WINNOW_CHECK(status.ok() || absl::IsInvalidArgument(status));
  }
  const absl::StatusOr<nlohmann::ordered_json> whole = winnow::server::ParseOrdered(text);
  if (!whole.ok() || !whole->is_object()) return 0;
  for (const auto& [name, value] : whole->items()) {
    const absl::StatusOr<nlohmann::ordered_json> own =
        winnow::server::ParseOrdered(winnow::server::TextOfMember(text, name));
    WINNOW_CHECK(own.ok() && *own == value);
  }
  return 0;
}
