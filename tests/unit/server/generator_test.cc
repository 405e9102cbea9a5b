#include "server/generator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/null_sink.h>

#include <fstream>
#include <variant>

#include "absl/synchronization/mutex.h"
#include "tests/unit/server/test_server.h"
#include "tests/unit/temp_dir.h"

namespace winnow::server {
namespace {

using ::testing::HasSubstr;

// Starts generations of one tenant and takes from them as a transport does.
class GeneratorQuotaTest : public ::testing::Test {
 protected:
  // A generation and what there was to take when `until` was met.
  struct Taken {
    std::shared_ptr<Generation> generation;
    bool begun = false;                  // a message came: it is with the engine, and has its quota
    bool finished = false;               // a message that ends the last choice came
    std::optional<absl::Status> status;  // of the end, once it was taken
  };

  void Serve(const std::string& limits) {
    const std::string path = dir_.File("tenants.yaml");
    std::ofstream(path) << "tenants: {one: {" << limits << "}}\n";
    auto table = TenantTable::Load(path, log_, clock_);
    ASSERT_TRUE(table.ok()) << table.status();
    TestServerOptions options;
    options.generator.tenants = *std::move(table);
    options.generator.queue_events = 4;  // a generation that is not read soon waits
    server_ = std::make_unique<TestServer>(options);
  }

  // Takes until `until` holds; the generation is not closed.
  Taken Take(int32_t tokens, const std::function<bool(const Taken&)>& until) {
    struct Ready {
      absl::Mutex mutex;
      bool ready = false;
    };
    auto ready = std::make_shared<Ready>();
    Taken taken;
    CallInfo info;
    info.transport = "test";
    info.tenant = "one";
    taken.generation =
        server_->generator().Start(CountingRequest("Once upon a time", tokens), info, [ready] {
          const absl::MutexLock lock(&ready->mutex);
          ready->ready = true;
        });
    const absl::Time limit = absl::Now() + absl::Seconds(60);
    while (!until(taken)) {
      Generation::Item item = taken.generation->Take();
      if (const auto* const message = std::get_if<v1::GenerateResponse>(&item)) {
        taken.begun = true;
        taken.finished |= message->has_finish();
      } else if (const auto* const end = std::get_if<Generation::End>(&item)) {
        taken.status = end->status;
        break;
      } else {
        const absl::MutexLock lock(&ready->mutex);
        if (!ready->mutex.AwaitWithDeadline(absl::Condition(&ready->ready), limit)) {
          ADD_FAILURE() << "nothing came";
          break;
        }
        ready->ready = false;
      }
    }
    return taken;
  }

  // The words of a refusal. REQUIRES: the request is refused.
  std::string Refusal(int32_t tokens) {
    const Taken refused = Take(tokens, [](const Taken&) { return false; });
    refused.generation->Close();
    return std::string(refused.status.value_or(absl::OkStatus()).message());
  }

  const TempDir dir_;
  MovableClock clock_;
  Log log_{"debug", "json", std::make_shared<spdlog::sinks::null_sink_mt>()};
  std::unique_ptr<TestServer> server_;
};

// A client that has its answer can ask again at once, though its transport closes the call later.
TEST_F(GeneratorQuotaTest, IsFreeOnceTheFinishIsTaken) {
  for (const char* limits : {"requests: 1", "running_tokens: 100"}) {
    SCOPED_TRACE(limits);
    Serve(limits);
    std::vector<Taken> open;
    for (int i = 0; i < 3; ++i) {
      open.push_back(Take(60, [](const Taken& taken) { return taken.finished; }));
      ASSERT_FALSE(open.back().status.has_value()) << *open.back().status;
    }
    // A request that is refused never binds, though its call is still open.
    open.push_back(Take(1 << 20, [](const Taken&) { return false; }));
    EXPECT_EQ(open.back().status.value_or(absl::OkStatus()).code(),
              absl::StatusCode::kInvalidArgument);
    open.push_back(Take(60, [](const Taken& taken) { return taken.finished; }));
    EXPECT_TRUE(open.back().finished);
    EXPECT_EQ(server_->generator().calls(), 5u);
    for (const Taken& taken : open) taken.generation->Close();
    EXPECT_EQ(server_->generator().calls(), 0u);
  }
}

TEST_F(GeneratorQuotaTest, IsHeldUntilThenAndGivenBackOnce) {
  for (const auto& [limits, name] : {std::pair("requests: 1", "quota of requests"),
                                     std::pair("running_tokens: 150", "quota of running_tokens")}) {
    SCOPED_TRACE(limits);
    Serve(limits);
    // It waits for a reader after Options::queue_events, far from its end.
    const Taken held = Take(100, [](const Taken& taken) { return taken.begun; });
    EXPECT_THAT(Refusal(100), HasSubstr(name));
    held.generation->Cancel();
    held.generation->Close();
    const Taken next = Take(100, [](const Taken& taken) { return taken.finished; });
    EXPECT_TRUE(next.finished);
    // Tokens and request that were given back with the finish are not given back again with the end.
    const Taken third = Take(100, [](const Taken& taken) { return taken.begun; });
    EXPECT_TRUE(std::holds_alternative<Generation::End>(next.generation->Take()));
    next.generation->Close();
    EXPECT_THAT(Refusal(100), HasSubstr(name));
    third.generation->Cancel();
    third.generation->Close();
  }
}

}  // namespace
}  // namespace winnow::server
