// Finds out which variable each name means, by the rules of Jinja's compiler.
//
// Jinja turns a template into a Python function: every scope has its own variables, which are
// loaded from the enclosing scope or from the context when the scope is entered. A name that a
// scope sets anywhere belongs to that scope everywhere in it. Doing the same here, before the
// first rendering, gives the same answers in the odd cases, and variables by number.
#ifndef WINNOW_ENGINE_TEXT_JINJA_RESOLVER_H_
#define WINNOW_ENGINE_TEXT_JINJA_RESOLVER_H_

#include "absl/status/status.h"
#include "engine/text/jinja/syntax_tree.h"

namespace winnow::engine::jinja {

// Fills in the variables and scopes of `tree`, and checks the names of filters and tests.
// InvalidArgument: "line N: ...".
absl::Status Resolve(SyntaxTree* tree);

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_RESOLVER_H_
