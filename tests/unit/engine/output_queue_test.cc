#include "engine/schedule/output_queue.h"

#include <memory>
#include <thread>
#include <utility>

#include "gtest/gtest.h"

namespace winnow::engine {
namespace {

OutputEvent Text(std::string text) {
  OutputEvent event;
  event.text = std::move(text);
  return event;
}

OutputEvent Last() {
  OutputEvent event;
  event.finish = FinishReason::kMaxTokens;
  return event;
}

TEST(OutputQueueTest, EventsComeInOrder) {
  OutputQueue queue(4, nullptr, nullptr);
  queue.Push(Text("a"));
  queue.Push(Text("b"));
  EXPECT_EQ(queue.Pop()->text, "a");
  EXPECT_EQ(queue.Pop()->text, "b");
  EXPECT_FALSE(queue.Pop().has_value());
}

TEST(OutputQueueTest, HasNoRoomWhenFull) {
  OutputQueue queue(2, nullptr, nullptr);
  queue.Push(Text("a"));
  EXPECT_TRUE(queue.HasRoom());
  queue.Push(Text("b"));
  EXPECT_FALSE(queue.HasRoom());
}

TEST(OutputQueueTest, TheLastEventIsTakenEvenWhenFull) {
  OutputQueue queue(1, nullptr, nullptr);
  queue.Push(Text("a"));
  queue.Push(Last());
  EXPECT_EQ(queue.Pop()->text, "a");
  EXPECT_EQ(queue.Pop()->finish, FinishReason::kMaxTokens);
}

TEST(OutputQueueTest, TellsTheReaderOfEveryEventAndTheEngineOfRoom) {
  int events = 0;
  int rooms = 0;
  OutputQueue queue(
      2, [&events] { ++events; }, [&rooms] { ++rooms; });
  queue.Push(Text("a"));
  queue.Pop();
  EXPECT_EQ(rooms, 0);  // it was never full
  queue.Push(Text("b"));
  queue.Push(Text("c"));
  queue.Pop();
  EXPECT_EQ(rooms, 1);
  queue.Pop();
  EXPECT_EQ(rooms, 1);
  EXPECT_EQ(events, 3);
}

TEST(OutputQueueTest, TheCallbackMayPop) {
  std::unique_ptr<OutputQueue> queue;
  std::string text;
  queue = std::make_unique<OutputQueue>(
      1, [&] { text += queue->Pop()->text; }, nullptr);
  queue->Push(Text("a"));
  queue->Push(Text("b"));
  EXPECT_EQ(text, "ab");
}

TEST(OutputQueueTest, AReaderThatItsCallbacksOwnIsFreedAfterTheLastEvent) {
  struct Reader {
    std::shared_ptr<OutputQueue> queue;
  };
  auto reader = std::make_shared<Reader>();
  const std::weak_ptr<Reader> watch = reader;
  reader->queue = std::make_shared<OutputQueue>(
      1, [reader] {}, [reader] {});
  const std::shared_ptr<OutputQueue> engines = reader->queue;
  reader.reset();
  engines->Push(Text("a"));
  EXPECT_FALSE(watch.expired());
  engines->Push(Last());
  EXPECT_TRUE(watch.expired());
}

TEST(OutputQueueDeathTest, AnEventAfterTheLastIsABug) {
  OutputQueue queue(4, nullptr, nullptr);
  queue.Push(Last());
  EXPECT_DEATH(queue.Push(Text("late")), "CHECK failed");
}

TEST(OutputQueueTest, NothingIsLostBetweenTwoThreads) {
  static constexpr int kEvents = 5000;
  OutputQueue queue(3, nullptr, nullptr);
  std::thread reader([&queue] {
    int next = 0;
    while (true) {
      std::optional<OutputEvent> event = queue.Pop();
      if (!event.has_value()) {
        std::this_thread::yield();
        continue;
      }
      if (event->finish != FinishReason::kNone) break;
      EXPECT_EQ(event->text, std::to_string(next++));
    }
    EXPECT_EQ(next, kEvents);
  });
  for (int i = 0; i < kEvents;) {
    if (queue.HasRoom()) {
      queue.Push(Text(std::to_string(i++)));
    } else {
      std::this_thread::yield();
    }
  }
  queue.Push(Last());
  reader.join();
}

}  // namespace
}  // namespace winnow::engine
