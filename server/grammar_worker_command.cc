// `winnow grammar-worker`: what `serve` starts to compile grammars. Nobody calls it by hand.
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "CLI/CLI.hpp"
#include "engine/grammar/grammar_worker.h"
#include "server/commands.h"

namespace winnow::server {

void AddGrammarWorkerCommand(CLI::App& app, int* exit_code) {
  CLI::App* command =
      app.add_subcommand("grammar-worker", "Compile grammars for a server, over standard input");
  command->group("");  // not in --help
  command->callback([exit_code] {
    // It goes when the thread does that started it, and before the server does when memory runs out.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (const int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC); fd >= 0) {
      [[maybe_unused]] const ssize_t written = write(fd, "1000", 4);
      close(fd);
    }
    *exit_code = engine::RunGrammarWorker(STDIN_FILENO, STDOUT_FILENO);
  });
}

}  // namespace winnow::server
