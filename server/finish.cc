#include "server/finish.h"

#include <cstdio>
#include <iostream>

#include "server/commands.h"
#include "storage/left_threads.h"

namespace winnow::server {

int Finish(int exit_code) {
  std::cout.flush();
  const bool written = std::fflush(stdout) == 0 && !std::ferror(stdout) && std::cout.good();
  if (exit_code == kExitOk && !written) {
    std::fprintf(stderr, "winnow: standard output took no more\n");
    exit_code = kExitFailure;
  }
  storage::ExitNowIfThreadsLeft(exit_code);
  return exit_code;
}

}  // namespace winnow::server
