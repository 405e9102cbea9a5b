// Threads that share one loop at a time: the calling thread and num_threads - 1 workers.
//
// Life cycle: workers start in the constructor and end in the destructor. ParallelFor is called
// from one thread at a time and never from inside a body; when it returns, no worker touches the
// body any more. Which thread runs which item is left to chance: a body must write only what its
// item owns (plus scratch of its `thread`), so that no result depends on the number of threads.
//
// Between calls a worker spins for some tens of microseconds, because the calls of a decode step
// come that close together, and then sleeps on a futex. ParallelFor waits only for workers that
// joined it: one that is still asleep, or that the system gave no processor, delays nobody.
#ifndef WINNOW_KERNELS_THREAD_POOL_H_
#define WINNOW_KERNELS_THREAD_POOL_H_

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace winnow::kernels {

class ThreadPool {
 public:
  // REQUIRES: num_threads >= 1.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls body(item, thread) once for each item in [0, count), with 0 <= thread < num_threads().
  // Items are handed out in ascending order. The body must not throw.
  template <typename Body>
  void ParallelFor(int64_t count, Body&& body) {
    using Type = std::remove_reference_t<Body>;
    Run(
        count,
        [](void* context, int64_t item, int thread) {
          (*static_cast<Type*>(context))(item, thread);
        },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  using Trampoline = void (*)(void* context, int64_t item, int thread);

  void Run(int64_t count, Trampoline call, void* context);
  void WorkItems(int thread);
  void WorkerMain(int thread);
  bool TryJoin();

  const int num_threads_;

  // The loop being run. Written by the caller while the gate is shut and nobody is inside.
  Trampoline call_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  alignas(64) std::atomic<int64_t> next_item_{0};
  // kOpen, plus the number of workers inside.
  alignas(64) std::atomic<uint32_t> gate_{0};
  // Counts loops; workers wait for it to change.
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::jthread> workers_;
};

// The processors this process may use: its affinity mask, and not more than its cgroup's quota.
int UsableProcessors();

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_THREAD_POOL_H_
