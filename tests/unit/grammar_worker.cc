// The process that compiles grammars for unit tests, as `winnow grammar-worker` does for servers.
#include <unistd.h>

#include "engine/grammar/grammar_worker.h"

int main() { return winnow::engine::RunGrammarWorker(STDIN_FILENO, STDOUT_FILENO); }
