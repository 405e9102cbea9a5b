#include "storage/left_threads.h"

#include <unistd.h>

#include <atomic>

namespace winnow::storage {
namespace {

std::atomic<bool> threads_left = false;

}  // namespace

void LeaveThread(std::thread thread) {
  threads_left = true;
  thread.detach();
}

void ExitNowIfThreadsLeft(int exit_code) {
  if (threads_left) _exit(exit_code);
}

}  // namespace winnow::storage
