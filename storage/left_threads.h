// Threads that are left to a disk that hangs.
//
// Whoever cannot wait for such a thread leaves it, with all that it uses, and goes on. It may wake up at any time, and is in a
// library then: RocksDB, of which it opens or closes an index. When a process ends, destructors of static objects run, that
// library's too, and a thread that wakes up meanwhile finds nothing of what it calls. So a process that has left threads ends
// without them.
#ifndef WINNOW_STORAGE_LEFT_THREADS_H_
#define WINNOW_STORAGE_LEFT_THREADS_H_

#include <thread>

namespace winnow::storage {

// Nobody will join it. Any thread.
void LeaveThread(std::thread thread);

// Ends the process with that code at once if a thread was ever left; else returns. What is buffered has to be written before.
void ExitNowIfThreadsLeft(int exit_code);

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_LEFT_THREADS_H_
