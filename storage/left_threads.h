// Threads that are left to a disk that hangs.
//
// Closing or opening a store waits for a disk only so long, then leaves the thread that waits, with all that it uses. Such a
// thread may wake up at any time, inside RocksDB. When a process ends, destructors of static objects run, RocksDB's too, and a
// thread that wakes up while they run crashes. So a process that has left a thread ends by _exit(), without destructors.
#ifndef WINNOW_STORAGE_LEFT_THREADS_H_
#define WINNOW_STORAGE_LEFT_THREADS_H_

#include <thread>

namespace winnow::storage {

// Detaches the thread and remembers that one was left. Any thread may call it.
void LeaveThread(std::thread thread);

// Ends the process with that code at once if a thread was ever left; else returns. Writes out no buffers: the caller has.
void ExitNowIfThreadsLeft(int exit_code);

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_LEFT_THREADS_H_
