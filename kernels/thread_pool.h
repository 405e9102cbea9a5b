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
//
// A thread that has run out of items, and one that spins, asks meanwhile for the memory that it was told of (Ahead), a
// KiB at a time: what it will read first in the loop after, if that is one in which each thread begins with its own item.
#ifndef WINNOW_KERNELS_THREAD_POOL_H_
#define WINNOW_KERNELS_THREAD_POOL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
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
    Run(count, CallOf<Body>(), const_cast<void*>(static_cast<const void*>(&body)));
  }

  // Bytes that a thread may ask for ahead; they are not read, and need not exist.
  struct Ahead {
    const std::byte* from = nullptr;
    size_t bytes = 0;
  };
  // Does the same, but thread t begins with item t, unless another has nothing else left to do before it comes. Up to the next call of
  // this function a thread without work asks for ahead[t]; `ahead`: [num_threads()], or empty.
  template <typename Body>
  void ParallelForOwnFirst(int64_t count, std::span<const Ahead> ahead, Body&& body) {
    ahead_given_ = ahead;
    own_first_ = num_threads_ <= kOwnersMax;
    Run(count, CallOf<Body>(), const_cast<void*>(static_cast<const void*>(&body)));
    own_first_ = false;
    ahead_given_ = {};
  }

 private:
  using Trampoline = void (*)(void* context, int64_t item, int thread);
  static constexpr int kOwnersMax = 64;

  template <typename Body>
  static Trampoline CallOf() {
    using Type = std::remove_reference_t<Body>;
    return [](void* context, int64_t item, int thread) {
      (*static_cast<Type*>(context))(item, thread);
    };
  }

  // Bytes that a thread has left to ask for.
  class Asking {
   public:
    // Begins anew where `ahead` is another.
    void Set(const Ahead& ahead);
    // Asks for the next KiB, or pauses.
    void Next();

   private:
    Ahead of_;
    size_t asked_ = 0;
  };

  void Run(int64_t count, Trampoline call, void* context);
  void WorkItems(int thread);
  void WorkerMain(int thread);
  bool TryJoin();

  const int num_threads_;

  // The loop being run. Written by the caller while the gate is shut and nobody is inside.
  Trampoline call_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  bool own_first_ = false;
  std::span<const Ahead> ahead_given_;  // with the loop
  std::vector<Ahead> ahead_;            // [num_threads], of the last loop that was given any
  Asking asking_;                       // of the calling thread
  alignas(64) std::atomic<int64_t> next_item_{0};
  // The threads' own items that somebody has taken, a bit each.
  alignas(64) std::atomic<uint64_t> owned_{0};
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
