// Translation of the reference's regular expressions (Oniguruma, Ruby syntax) into PCRE2's.
#ifndef WINNOW_ENGINE_TEXT_TOKENIZER_REGEX_SYNTAX_H_
#define WINNOW_ENGINE_TEXT_TOKENIZER_REGEX_SYNTAX_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace winnow::engine {

// A PCRE2 pattern (for PCRE2_UTF | PCRE2_UCP) that matches exactly what `pattern` matches in the
// reference. The subset is what tokenizers use: literals, classes, \s \d \p{general category},
// groups, lookaround, atomic groups, greedy, lazy and possessive quantifiers, (?i:...) over ASCII.
// Unimplemented, by name: everything else, because its meaning differs between the two or is not
// known to be equal. InvalidArgument: malformed.
absl::StatusOr<std::string> TranslateRegex(std::string_view pattern);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_TOKENIZER_REGEX_SYNTAX_H_
