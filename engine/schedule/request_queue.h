// The bounded hand-over from the service's threads to the engine thread, and the one place where
// both meet: requests and cancellations in, the engine woken.
//
// Each tenant has a share of it. A tenant may take every place while nobody else wants one; beyond the
// capacity there is half as much again, for tenants that have little waiting: at least one request, and at
// most the capacity divided by twice the number of tenants that wait. So a tenant that floods the queue
// fills it against itself and not against others.
//
// Bounded are the requests that wait, wherever they wait: here, or taken over by the engine and not
// yet admitted, or preempted. The engine says when that number changes.
#ifndef WINNOW_ENGINE_SCHEDULE_REQUEST_QUEUE_H_
#define WINNOW_ENGINE_SCHEDULE_REQUEST_QUEUE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "engine/base/mutex.h"
#include "engine/schedule/output_queue.h"
#include "engine/schedule/request.h"

namespace winnow::engine {

struct Submission {
  Request request;
  std::shared_ptr<OutputQueue> output;
};

class RequestQueue {
 public:
  // What one tenant may fill alone. REQUIRES: both at least 1.
  RequestQueue(int32_t capacity_requests, int64_t capacity_tokens);

  // ---- any thread ----

  // All of a group are taken, or none; they are of one tenant. ResourceExhausted: with the numbers; its tenant's
  // tenant_waiting_tokens begin the message with "the tenant's quota of waiting_tokens". Unavailable: closed,
  // with the reason given to Close. What is larger than the capacity alone is taken when no other
  // waits: the bound is of what piles up.
  absl::Status Push(std::vector<Submission> group);
  absl::Status Push(Submission submission);
  // Push's answer to so many requests of a token each; a refusal counts as Push's.
  absl::Status CheckRoom(const std::string& tenant, int32_t requests);
  void Cancel(RequestId id);  // at most once per accepted request, which bounds the list
  void Wake();
  void Close(std::string reason);  // the first reason stays

  struct Counts {
    int32_t waiting_requests = 0;
    int64_t waiting_tokens = 0;
    uint64_t accepted = 0;
    uint64_t accepted_tokens = 0;
    uint64_t rejected = 0;
  };
  Counts counts() const;

  // ---- engine thread ----

  // Moves out everything that came since the last call, in order. A cancellation never comes before
  // the request it means. Both vectors are appended to.
  void Drain(std::vector<Submission>* submissions, std::vector<RequestId>* cancellations);
  // Until there is something to drain, Wake was called since the last Wait, or `max` has passed.
  void Wait(Duration max);
  // Requests of a tenant that no longer wait (negative) or wait again (positive), with their prompt
  // tokens.
  void AdjustWaiting(const std::string& tenant, int32_t requests, int64_t tokens);

 private:
  struct Waiting {
    int32_t requests = 0;
    int64_t tokens = 0;
  };
  absl::Status Refusal(const Waiting& own, int32_t requests, int64_t tokens) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return woken_ || !submissions_.empty() || !cancellations_.empty();
  }

  const int32_t capacity_requests_;
  const int64_t capacity_tokens_;
  mutable Mutex mutex_;
  CondVar news_;  // the engine thread waits
  std::vector<Submission> submissions_ ABSL_GUARDED_BY(mutex_);
  std::vector<RequestId> cancellations_ ABSL_GUARDED_BY(mutex_);
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::string closed_reason_ ABSL_GUARDED_BY(mutex_);
  Counts counts_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, Waiting> tenants_ ABSL_GUARDED_BY(mutex_);  // that wait
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_REQUEST_QUEUE_H_
