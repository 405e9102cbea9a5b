#include "engine/schedule/request_queue.h"

#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace winnow::engine {
namespace {

constexpr Duration kLong = std::chrono::seconds(60);

Submission Of(RequestId id, int32_t tokens) {
  Submission submission;
  submission.request.id = id;
  submission.request.prompt.resize(tokens, 1);
  return submission;
}

std::vector<RequestId> DrainIds(RequestQueue& queue) {
  std::vector<Submission> submissions;
  std::vector<RequestId> cancellations;
  queue.Drain(&submissions, &cancellations);
  std::vector<RequestId> ids;
  for (const Submission& submission : submissions) ids.push_back(submission.request.id);
  return ids;
}

TEST(RequestQueueTest, RequestsComeOutInOrder) {
  RequestQueue queue(4, 100);
  for (RequestId id = 1; id <= 3; ++id) ASSERT_TRUE(queue.Push(Of(id, 1)).ok());
  EXPECT_EQ(DrainIds(queue), (std::vector<RequestId>{1, 2, 3}));
  EXPECT_TRUE(DrainIds(queue).empty());
}

TEST(RequestQueueTest, IsBoundedByRequests) {
  RequestQueue queue(2, 100);
  ASSERT_TRUE(queue.Push(Of(1, 1)).ok());
  ASSERT_TRUE(queue.Push(Of(2, 1)).ok());
  EXPECT_EQ(queue.Push(Of(3, 1)).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(queue.counts().rejected, 1u);
}

TEST(RequestQueueTest, IsBoundedByTokens) {
  RequestQueue queue(10, 100);
  ASSERT_TRUE(queue.Push(Of(1, 60)).ok());
  EXPECT_EQ(queue.Push(Of(2, 41)).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(queue.Push(Of(3, 40)).ok());
}

TEST(RequestQueueTest, ATenantsQuotaBoundsItsWaitingTokensAndNobodyElses) {
  RequestQueue queue(10, 1000);
  const auto of = [](RequestId id, int32_t tokens, const char* tenant, int64_t quota) {
    Submission submission = Of(id, tokens);
    submission.request.tenant = tenant;
    submission.request.tenant_waiting_tokens = quota;
    return submission;
  };
  ASSERT_TRUE(queue.Push(of(1, 60, "a", 100)).ok());
  const absl::Status refused = queue.Push(of(2, 41, "a", 100));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.message().find("the tenant's quota of waiting_tokens: 60 wait, 41"), 0u)
      << refused;
  EXPECT_TRUE(queue.Push(of(3, 40, "a", 100)).ok());
  EXPECT_TRUE(queue.Push(of(4, 500, "b", 0)).ok());
  EXPECT_FALSE(queue.Push(of(5, 200, "c", 100)).ok()) << "also one alone";
  queue.AdjustWaiting("a", -1, -60);
  EXPECT_TRUE(queue.Push(of(6, 60, "a", 100)).ok());
}

TEST(RequestQueueTest, CheckRoomSaysWhatPushWould) {
  RequestQueue queue(4, 1000);
  EXPECT_TRUE(queue.CheckRoom("", 4).ok());
  for (RequestId id = 1; id <= 3; ++id) ASSERT_TRUE(queue.Push(Of(id, 1)).ok());
  EXPECT_TRUE(queue.CheckRoom("", 1).ok());
  EXPECT_EQ(queue.CheckRoom("", 2).code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(queue.Push(Of(4, 1)).ok());
  EXPECT_FALSE(queue.CheckRoom("", 1).ok());
  EXPECT_TRUE(queue.CheckRoom("another", 1).ok())
      << "half as much again is for tenants with little";
  EXPECT_EQ(queue.counts().rejected, 3u);
  EXPECT_EQ(queue.counts().waiting_requests, 4) << "asking takes no room";
  queue.Close("draining");
  EXPECT_TRUE(queue.CheckRoom("", 1).ok()) << "Push has the reason";
}

TEST(RequestQueueTest, APromptBeyondTheBoundIsTakenWhenNobodyWaits) {
  RequestQueue queue(10, 100);
  EXPECT_TRUE(queue.Push(Of(1, 500)).ok());
  EXPECT_FALSE(queue.Push(Of(2, 1)).ok());
}

TEST(RequestQueueTest, OfAGroupAllAreTakenOrNone) {
  const auto group = [](RequestId first, int count, int32_t tokens) {
    std::vector<Submission> submissions;
    for (int i = 0; i < count; ++i) submissions.push_back(Of(first + i, tokens));
    return submissions;
  };
  RequestQueue queue(3, 100);
  ASSERT_TRUE(queue.Push(Of(1, 10)).ok());
  EXPECT_EQ(queue.Push(group(2, 3, 1)).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(queue.Push(group(2, 2, 46)).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(queue.counts().waiting_requests, 1);
  EXPECT_EQ(queue.counts().waiting_tokens, 10);
  EXPECT_EQ(queue.counts().rejected, 5u);
  EXPECT_TRUE(queue.Push(group(2, 2, 45)).ok());
  EXPECT_EQ(queue.counts().waiting_requests, 3);
  EXPECT_EQ(queue.counts().waiting_tokens, 100);
  EXPECT_EQ(DrainIds(queue), (std::vector<RequestId>{1, 2, 3}));
}

// Or it could never be taken, however often it is tried again.
TEST(RequestQueueTest, AGroupBeyondTheBoundsIsTakenWhenNobodyWaits) {
  RequestQueue queue(2, 100);
  std::vector<Submission> group;
  for (RequestId id = 1; id <= 4; ++id) group.push_back(Of(id, 60));
  EXPECT_TRUE(queue.Push(std::move(group)).ok());
  EXPECT_EQ(queue.counts().waiting_requests, 4);
  EXPECT_FALSE(queue.Push(Of(5, 1)).ok());
}

Submission Of(RequestId id, int32_t tokens, const std::string& tenant) {
  Submission submission = Of(id, tokens);
  submission.request.tenant = tenant;
  return submission;
}

TEST(RequestQueueTest, ATenantMayFillItAndOthersStillGetIn) {
  for (const int32_t tokens : {1, 100}) {  // bounded by requests, then by tokens
    RequestQueue queue(tokens == 1 ? 8 : 1000, tokens == 1 ? 1000 : 800);
    RequestId id = 0;
    int heavy = 0;
    for (int i = 0; i < 80; ++i) heavy += queue.Push(Of(++id, tokens, "heavy")).ok();
    EXPECT_EQ(heavy, 8) << "every place, as long as nobody else wants one";
    int light = 0;
    for (int i = 0; i < 80; ++i) {
      light += queue.Push(Of(++id, tokens, "light")).ok();
      EXPECT_FALSE(queue.Push(Of(++id, tokens, "heavy")).ok()) << "not beyond the capacity";
    }
    EXPECT_EQ(light, 2);  // 8 places / (2 * 2 tenants)
    EXPECT_TRUE(queue.Push(Of(++id, tokens, "another")).ok());
    // Names alone do not make the queue longer than half as much again.
    int others = 0;
    for (int i = 0; i < 80; ++i) {
      others += queue.Push(Of(++id, tokens, "other" + std::to_string(i))).ok();
    }
    EXPECT_EQ(heavy + light + 1 + others, 12);
    // What no longer waits makes room, and of the heavy tenant only up to the capacity.
    queue.AdjustWaiting("heavy", -7, -7 * tokens);
    heavy = 0;
    for (int i = 0; i < 80; ++i) heavy += queue.Push(Of(++id, tokens, "heavy")).ok();
    EXPECT_EQ(heavy, 3);
  }
}

TEST(RequestQueueTest, ALargePromptOfATenantWithNothingWaitingGetsIn) {
  RequestQueue queue(100, 1000);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(queue.Push(Of(i, 100, "heavy")).ok());
  EXPECT_TRUE(queue.Push(Of(20, 400, "light")).ok()) << "more than its share, but its only one";
  EXPECT_FALSE(queue.Push(Of(21, 1, "light")).ok());
  EXPECT_FALSE(queue.Push(Of(22, 400, "another")).ok()) << "more than half as much again";
}

TEST(RequestQueueTest, WhatTheEngineTookOverStillWaitsUntilItSaysSo) {
  RequestQueue queue(1, 100);
  ASSERT_TRUE(queue.Push(Of(1, 7)).ok());
  DrainIds(queue);
  EXPECT_FALSE(queue.Push(Of(2, 1)).ok());
  EXPECT_EQ(queue.counts().waiting_tokens, 7);
  queue.AdjustWaiting("", -1, -7);
  EXPECT_TRUE(queue.Push(Of(3, 1)).ok());
}

TEST(RequestQueueTest, RefusesWithTheReasonOnceClosed) {
  RequestQueue queue(4, 100);
  queue.Close("draining");
  queue.Close("a later reason");
  const absl::Status status = queue.Push(Of(1, 1));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "draining");
}

TEST(RequestQueueTest, ACancellationNeverComesBeforeItsRequest) {
  RequestQueue queue(1000, 1000);
  std::thread client([&queue] {
    for (RequestId id = 0; id < 500; ++id) {
      ASSERT_TRUE(queue.Push(Of(id, 1)).ok());
      queue.Cancel(id);
    }
  });
  std::vector<Submission> submissions;
  std::vector<RequestId> cancellations;
  while (cancellations.size() < 500) {
    queue.Drain(&submissions, &cancellations);
    ASSERT_GE(submissions.size(), cancellations.size());
  }
  client.join();
}

TEST(RequestQueueTest, EveryKindOfNewsEndsAWait) {
  const std::vector<void (*)(RequestQueue&)> news = {
      [](RequestQueue& queue) { ASSERT_TRUE(queue.Push(Of(1, 1)).ok()); },
      [](RequestQueue& queue) { queue.Cancel(1); },
      [](RequestQueue& queue) { queue.Wake(); },
      [](RequestQueue& queue) { queue.Close("closed"); },
  };
  for (const auto& tell : news) {
    RequestQueue queue(4, 100);
    const auto begin = std::chrono::steady_clock::now();
    std::thread other([&] { tell(queue); });
    queue.Wait(kLong);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kLong / 2);
    other.join();
  }
}

TEST(RequestQueueTest, AWakeBeforeTheWaitIsNotLost) {
  RequestQueue queue(4, 100);
  queue.Wake();
  const auto begin = std::chrono::steady_clock::now();
  queue.Wait(kLong);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kLong / 2);
}

TEST(RequestQueueTest, ManyThreadsLoseNothing) {
  constexpr int kThreads = 4;
  constexpr int kEach = 500;
  RequestQueue queue(64, 1'000'000);

  std::vector<std::thread> clients;
  for (int t = 0; t < kThreads; ++t) {
    clients.emplace_back([&queue, t] {
      for (int i = 0; i < kEach;) {
        if (queue.Push(Of(t * kEach + i, 2)).ok()) {
          ++i;
        } else {
          std::this_thread::yield();
        }
      }
    });
  }
  std::vector<bool> seen(kThreads * kEach, false);
  int total = 0;
  while (total < kThreads * kEach) {
    const std::vector<RequestId> ids = DrainIds(queue);
    for (const RequestId id : ids) {
      EXPECT_FALSE(seen[id]);
      seen[id] = true;
    }
    total += static_cast<int>(ids.size());
    const auto count = static_cast<int32_t>(ids.size());
    if (count > 0) queue.AdjustWaiting("", -count, -2 * count);
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(queue.counts().waiting_requests, 0);
  EXPECT_EQ(queue.counts().waiting_tokens, 0);
  EXPECT_EQ(queue.counts().accepted, static_cast<uint64_t>(kThreads * kEach));
}

}  // namespace
}  // namespace winnow::engine
