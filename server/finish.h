// The end of a command's process.
#ifndef WINNOW_SERVER_FINISH_H_
#define WINNOW_SERVER_FINISH_H_

namespace winnow::server {

// Writes out standard output and returns the exit code for main: failure where the command succeeded and its output could not be
// written. Ends the process itself, with that code, where threads were left to a disk that hangs (storage/left_threads.h).
int Finish(int exit_code);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_FINISH_H_
