// How a command's process ends.
#ifndef WINNOW_SERVER_FINISH_H_
#define WINNOW_SERVER_FINISH_H_

namespace winnow::server {

// What main returns once a command has ended with that code: an answer that nobody got is no success. Does not return where
// threads were left to a disk that hangs (storage/left_threads.h).
int Finish(int exit_code);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_FINISH_H_
