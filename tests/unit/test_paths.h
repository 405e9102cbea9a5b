// Paths for tests: of the project's files, and of programs that were built with them. Functions and not macros: but for
// test_paths.cc a compiler cache that one clone filled serves the others.
#ifndef WINNOW_TESTS_UNIT_TEST_PATHS_H_
#define WINNOW_TESTS_UNIT_TEST_PATHS_H_

#include <string>
#include <string_view>

namespace winnow {

// A file or folder of the project, by its path from the root.
std::string SourcePath(std::string_view path);

std::string GrammarWorkerPath();  // the program of grammar_worker.cc

}  // namespace winnow

#endif  // WINNOW_TESTS_UNIT_TEST_PATHS_H_
