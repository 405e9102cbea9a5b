// absl::Mutex and absl::CondVar as ThreadSanitizer can see them. Linked into programs of the tsan
// preset only.
//
// The packaged Abseil is not instrumented, and its mutex is made of futexes and atomics in its own
// library: to ThreadSanitizer it synchronises nothing, and everything that it guards looks like a
// race. The definitions here stand before the library's when the program is loaded (so gRPC gets
// them, too) and are made of pthreads, which the sanitizer knows. They are slower, and reader locks
// exclude each other; what is correct with the real ones must be correct with these.
#include <errno.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace absl {
ABSL_NAMESPACE_BEGIN
namespace {

// Made when a mutex is first locked, because absl::Mutex must be usable as a zeroed constant.
struct State {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t changed = PTHREAD_COND_INITIALIZER;  // something that was guarded may have changed
  int waiters = 0;                                    // of `changed`
};

// The one word that both classes have.
static_assert(sizeof(Mutex) == sizeof(std::atomic<intptr_t>));
static_assert(sizeof(CondVar) == sizeof(std::atomic<intptr_t>));

template <typename T>
T* Lazy(const void* object) {
  auto* word = reinterpret_cast<std::atomic<intptr_t>*>(const_cast<void*>(object));
  intptr_t value = word->load(std::memory_order_acquire);
  if (value == 0) {
    auto* made = new T;
    if (word->compare_exchange_strong(value, reinterpret_cast<intptr_t>(made))) return made;
    delete made;
  }
  return reinterpret_cast<T*>(value);
}

State& Of(const Mutex* mutex) { return *Lazy<State>(mutex); }

struct Waiting {
  pthread_cond_t signalled = PTHREAD_COND_INITIALIZER;
};

void WakeWaiters(State& state) {
  if (state.waiters > 0) pthread_cond_broadcast(&state.changed);
}

// False if the deadline passed.
bool WaitOnce(pthread_cond_t* condition, State& state, Time deadline) {
  if (deadline == InfiniteFuture()) {
    pthread_cond_wait(condition, &state.mutex);
    return true;
  }
  const timespec until = ToTimespec(deadline);
  return pthread_cond_timedwait(condition, &state.mutex, &until) != ETIMEDOUT;
}

// REQUIRES: the mutex is held. Whether the condition holds at the end.
bool AwaitUntil(State& state, const Condition& condition, Time deadline) {
  while (!condition.Eval()) {
    // Who waits lets go of the mutex, and what it did before may be what others wait for.
    WakeWaiters(state);
    ++state.waiters;
    const bool in_time = WaitOnce(&state.changed, state, deadline);
    --state.waiters;
    if (!in_time) return condition.Eval();
  }
  return true;
}

Time After(Duration timeout) {
  return timeout == InfiniteDuration() ? InfiniteFuture() : Now() + timeout;
}

}  // namespace

Mutex::~Mutex() {
  auto* state = reinterpret_cast<State*>(
      reinterpret_cast<std::atomic<intptr_t>*>(this)->load(std::memory_order_acquire));
  if (state == nullptr) return;
  // After whoever held it last. Who destroys it may know that by a count that the sanitizer does not see, as gRPC does;
  // what the mutex guards is watched all the same.
  pthread_mutex_lock(&state->mutex);
  pthread_mutex_unlock(&state->mutex);
  pthread_cond_destroy(&state->changed);
  pthread_mutex_destroy(&state->mutex);
  delete state;
}

void Mutex::Lock() { pthread_mutex_lock(&Of(this).mutex); }
void Mutex::Unlock() {
  State& state = Of(this);
  WakeWaiters(state);
  pthread_mutex_unlock(&state.mutex);
}
bool Mutex::TryLock() { return pthread_mutex_trylock(&Of(this).mutex) == 0; }
void Mutex::AssertHeld() const {}
void Mutex::AssertNotHeld() const {}
void Mutex::AssertReaderHeld() const {}
void Mutex::ReaderLock() { Lock(); }
void Mutex::ReaderUnlock() { Unlock(); }
bool Mutex::ReaderTryLock() { return TryLock(); }

void Mutex::Await(const Condition& condition) { AwaitUntil(Of(this), condition, InfiniteFuture()); }
bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  return AwaitUntil(Of(this), condition, After(timeout));
}
bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  return AwaitUntil(Of(this), condition, deadline);
}
void Mutex::LockWhen(const Condition& condition) {
  Lock();
  Await(condition);
}
bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  Lock();
  return AwaitWithTimeout(condition, timeout);
}
bool Mutex::LockWhenWithDeadline(const Condition& condition, Time deadline) {
  Lock();
  return AwaitWithDeadline(condition, deadline);
}
void Mutex::ReaderLockWhen(const Condition& condition) { LockWhen(condition); }
bool Mutex::ReaderLockWhenWithTimeout(const Condition& condition, Duration timeout) {
  return LockWhenWithTimeout(condition, timeout);
}
bool Mutex::ReaderLockWhenWithDeadline(const Condition& condition, Time deadline) {
  return LockWhenWithDeadline(condition, deadline);
}
void Mutex::EnableDebugLog(const char*) {}
void Mutex::EnableInvariantDebugging(void (*)(void*), void*) {}
void Mutex::ForgetDeadlockInfo() {}
void Mutex::InternalAttemptToUseMutexInFatalSignalHandler() {}

CondVar::~CondVar() {
  auto* state = reinterpret_cast<Waiting*>(
      reinterpret_cast<std::atomic<intptr_t>*>(this)->load(std::memory_order_acquire));
  if (state == nullptr) return;
  pthread_cond_destroy(&state->signalled);
  delete state;
}
void CondVar::Wait(Mutex* mutex) { WaitWithDeadline(mutex, InfiniteFuture()); }
bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  return WaitWithDeadline(mutex, After(timeout));
}
bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  State& state = Of(mutex);
  WakeWaiters(state);
  return !WaitOnce(&Lazy<Waiting>(this)->signalled, state, deadline);
}
void CondVar::Signal() { pthread_cond_signal(&Lazy<Waiting>(this)->signalled); }
void CondVar::SignalAll() { pthread_cond_broadcast(&Lazy<Waiting>(this)->signalled); }
void CondVar::EnableDebugLog(const char*) {}

ABSL_NAMESPACE_END
}  // namespace absl
