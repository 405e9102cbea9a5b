#include "engine/text/jinja/template.h"

#include <algorithm>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/text/jinja/parser.h"
#include "engine/text/jinja/resolver.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine::jinja {

absl::StatusOr<std::shared_ptr<const SyntaxTree>> ParseTemplate(std::string_view source,
                                                                const Limits& limits) {
  if (source.size() > limits.template_bytes_max) {
    return absl::InvalidArgumentError(Concat("line 1: the template has ", source.size(),
                                             " bytes, may have at most ",
                                             limits.template_bytes_max));
  }
  if (const size_t bad = FindInvalidUtf8(source); bad != source.npos) {
    const auto line =
        std::count(source.begin(), source.begin() + static_cast<std::ptrdiff_t>(bad), '\n') + 1;
    return absl::InvalidArgumentError(Concat("line ", line, ": not UTF-8"));
  }
  WINNOW_ASSIGN_OR_RETURN(SyntaxTree tree, Parse(source));
  auto shared = std::make_shared<SyntaxTree>(std::move(tree));
  WINNOW_RETURN_IF_ERROR(Resolve(shared.get()));
  return std::shared_ptr<const SyntaxTree>(std::move(shared));
}

}  // namespace winnow::engine::jinja
