#include "engine/schedule/request_queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"

namespace winnow::engine {

RequestQueue::RequestQueue(int32_t capacity_requests, int64_t capacity_tokens)
    : capacity_requests_(capacity_requests), capacity_tokens_(capacity_tokens) {
  WINNOW_CHECK(capacity_requests_ >= 1);
  WINNOW_CHECK(capacity_tokens_ >= 1);
  submissions_.reserve(capacity_requests_);
}

absl::Status RequestQueue::Push(Submission submission) {
  std::vector<Submission> group;
  group.push_back(std::move(submission));
  return Push(std::move(group));
}

// `own`: what waits of the tenant already.
absl::Status RequestQueue::Refusal(const Waiting& own, int32_t requests, int64_t tokens) const {
  if (counts_.waiting_requests == 0) return absl::OkStatus();
  const int64_t all_requests = int64_t{counts_.waiting_requests} + requests;
  const int64_t all_tokens = counts_.waiting_tokens + tokens;
  if (all_requests <= capacity_requests_ && all_tokens <= capacity_tokens_) {
    return absl::OkStatus();
  }
  const auto tenants = static_cast<int64_t>(tenants_.size()) + (own.requests == 0 ? 1 : 0);
  const int64_t share_requests = capacity_requests_ / (2 * tenants);
  const int64_t share_tokens = capacity_tokens_ / (2 * tenants);
  const bool little = own.requests == 0 || (own.requests + requests <= share_requests &&
                                            own.tokens + tokens <= share_tokens);
  if (little && all_requests <= int64_t{capacity_requests_} + (capacity_requests_ + 1) / 2 &&
      all_tokens <= capacity_tokens_ + (capacity_tokens_ + 1) / 2) {
    return absl::OkStatus();
  }
  const std::string of_tenant =
      tenants > 1 ? absl::StrCat(", ", own.requests, " of this tenant") : "";
  if (all_requests > capacity_requests_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the queue is full: ", counts_.waiting_requests, " requests wait", of_tenant,
                     " of at most ", capacity_requests_,
                     requests > 1 ? absl::StrCat(", and these are ", requests) : ""));
  }
  return absl::ResourceExhaustedError(absl::StrCat("the queue is full: ", counts_.waiting_tokens,
                                                   " prompt tokens wait, ", tokens,
                                                   " more would exceed ", capacity_tokens_));
}

absl::Status RequestQueue::Push(std::vector<Submission> group) {
  const auto requests = static_cast<int32_t>(group.size());
  int64_t tokens = 0;
  for (const Submission& submission : group) {
    tokens += static_cast<int64_t>(submission.request.prompt.size());
  }
  const MutexLock lock(mutex_);
  const std::string& tenant = group.front().request.tenant;
  const auto own = tenants_.find(tenant);
  const Waiting waits = own == tenants_.end() ? Waiting() : own->second;
  const int64_t quota = group.front().request.tenant_waiting_tokens;
  absl::Status refusal =
      closed_ ? absl::UnavailableError(closed_reason_) : Refusal(waits, requests, tokens);
  if (refusal.ok() && quota > 0 && waits.tokens + tokens > quota) {
    refusal = absl::ResourceExhaustedError(
        absl::StrCat("the tenant's quota of waiting_tokens: ", waits.tokens, " wait, ", tokens,
                     " more would exceed ", quota));
  }
  if (!refusal.ok()) {
    counts_.rejected += requests;
    return refusal;
  }
  Waiting& waiting = tenants_[tenant];
  waiting.requests += requests;
  waiting.tokens += tokens;
  counts_.waiting_requests += requests;
  counts_.waiting_tokens += tokens;
  counts_.accepted += requests;
  counts_.accepted_tokens += tokens;
  std::move(group.begin(), group.end(), std::back_inserter(submissions_));
  news_.NotifyOne();
  return absl::OkStatus();
}

absl::Status RequestQueue::CheckRoom(const std::string& tenant, int32_t requests) {
  const MutexLock lock(mutex_);
  if (closed_) return absl::OkStatus();  // Push has the reason
  const auto own = tenants_.find(tenant);
  absl::Status refusal =
      Refusal(own == tenants_.end() ? Waiting() : own->second, requests, requests);
  if (!refusal.ok()) counts_.rejected += requests;
  return refusal;
}

void RequestQueue::Cancel(RequestId id) {
  const MutexLock lock(mutex_);
  cancellations_.push_back(id);
  news_.NotifyOne();
}

void RequestQueue::Wake() {
  const MutexLock lock(mutex_);
  woken_ = true;
  news_.NotifyOne();
}

void RequestQueue::Close(std::string reason) {
  const MutexLock lock(mutex_);
  woken_ = true;
  news_.NotifyOne();
  if (closed_) return;
  closed_ = true;
  closed_reason_ = std::move(reason);
}

RequestQueue::Counts RequestQueue::counts() const {
  const MutexLock lock(mutex_);
  return counts_;
}

void RequestQueue::Drain(std::vector<Submission>* submissions,
                         std::vector<RequestId>* cancellations) {
  const MutexLock lock(mutex_);
  std::move(submissions_.begin(), submissions_.end(), std::back_inserter(*submissions));
  cancellations->insert(cancellations->end(), cancellations_.begin(), cancellations_.end());
  submissions_.clear();
  cancellations_.clear();
}

void RequestQueue::Wait(Duration max) {
  const TimePoint deadline = std::chrono::steady_clock::now() + max;
  const MutexLock lock(mutex_);
  while (!HasNews() && news_.WaitUntil(mutex_, deadline)) {
  }
  woken_ = false;
}

void RequestQueue::AdjustWaiting(const std::string& tenant, int32_t requests, int64_t tokens) {
  const MutexLock lock(mutex_);
  Waiting& waiting = tenants_[tenant];
  waiting.requests += requests;
  waiting.tokens += tokens;
  WINNOW_CHECK(waiting.requests >= 0 && waiting.tokens >= 0);
  if (waiting.requests == 0) tenants_.erase(tenant);
  counts_.waiting_requests += requests;
  counts_.waiting_tokens += tokens;
  WINNOW_CHECK(counts_.waiting_requests >= 0);
  WINNOW_CHECK(counts_.waiting_tokens >= 0);
}

}  // namespace winnow::engine
