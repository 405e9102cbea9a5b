#include "server/inference_service.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <random>

#include "tests/unit/server/test_server.h"
#include "tests/unit/test_seed.h"

namespace winnow::server {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// A sanitizer on a busy machine is slow; no test's verdict should hang on that.
constexpr absl::Duration kPatience = absl::Seconds(120);

// Waits, bounded, for something that other threads do; no fixed sleep decides a test's result.
bool Eventually(const std::function<bool()>& condition) {
  for (const absl::Time end = absl::Now() + kPatience; absl::Now() < end;) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

// Until no call is open, no sequence runs or waits and no block is held. A client that gives a call
// up hears of its end at once; the server and then its engine hear of it later, in any order.
bool NothingIsLeft(TestServer& server) {
  return Eventually([&] {
    const engine::EngineStats stats = server.engine().stats();
    return server.generator().calls() == 0 && stats.running == 0 && stats.waiting == 0 &&
           stats.blocks_used == 0;
  });
}

// A client that takes the first message of a stream and then nothing, until it is told to. Its
// sequence cannot end before: log-probabilities make messages of some kilobytes, which fill the
// stream's window, and Patient's queue of events is short.
class SlowReader {
 public:
  SlowReader(TestServer& server, int32_t tokens) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 1024);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    stub_ = v1::InferenceService::NewStub(server.Channel(arguments));
    v1::GenerateRequest request = CountingRequest("A story", tokens);
    request.set_top_logprobs(20);
    reader_ = stub_->Generate(&context_, request);
    v1::GenerateResponse response;
    EXPECT_TRUE(reader_->Read(&response));
  }

  void Cancel() { context_.TryCancel(); }

  grpc::Status ReadTheRest() {
    v1::GenerateResponse response;
    while (reader_->Read(&response)) {
    }
    return reader_->Finish();
  }

 private:
  std::unique_ptr<v1::InferenceService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader_;
};

// Of a server that never gives up on a slow reader, unless the test moves its clock.
TestServerOptions Patient() {
  TestServerOptions options;
  options.engine.slow_reader_timeout = std::chrono::hours(1);
  options.generator.slow_reader_timeout = std::chrono::hours(1);
  options.generator.queue_events = 4;
  return options;
}

TEST(InferenceService, StreamsTextAndTokensThatBelongTogether) {
  TestServer server;
  const Answer answer = Generate(*server.Stub(), CountingRequest("The capital of", 40));
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.ids[0].size(), 40u);
  EXPECT_GT(answer.messages, 1);
  ASSERT_EQ(answer.finish.size(), 1u);
  EXPECT_EQ(answer.finish[0].reason(), v1::FINISH_REASON_MAX_TOKENS);
  EXPECT_EQ(answer.text[0], Needle().tokenizer->Decode(answer.ids[0], true));
  const v1::Usage& usage = answer.finish[0].usage();
  EXPECT_EQ(usage.generated_tokens(), 40);
  EXPECT_GT(usage.prompt_tokens(), 0);
  EXPECT_EQ(usage.cached_tokens(), 0);
  EXPECT_GT(usage.kv_dense_bytes(), 0u);
  EXPECT_EQ(usage.kv_read_bytes().fast(), usage.kv_dense_bytes());  // dense attention
  EXPECT_GT(usage.time_to_first_token_seconds(), 0);
  EXPECT_GE(usage.total_seconds(), usage.time_to_first_token_seconds());
  EXPECT_THAT(answer.request_id, ::testing::MatchesRegex("[0-9a-f]{8}-[0-9]+"));
}

TEST(InferenceService, UsageSaysWhatRetrievalReadAndAddsUp) {
  TestServer server;
  const auto stub = server.Stub();
  std::string words = "A story";
  while (words.size() < 1500) words += " about a tree";
  v1::GenerateRequest request = CountingRequest(words, 20);
  const v1::Usage dense = Generate(*stub, request).finish.at(0).usage();
  EXPECT_EQ(dense.kv_read_bytes().fast(), dense.kv_dense_bytes());
  EXPECT_EQ(dense.attended_rows(), dense.dense_rows());
  EXPECT_EQ(dense.retrieval().candidate_rows(), 0u);
  EXPECT_FALSE(dense.retrieval().has_kept());
  EXPECT_FALSE(dense.retrieval().has_coverage());
  for (const char* policy :
       {"window:sink=8,window=32,from=0", "oracle:k=16,sink=8,window=32,from=0",
        "quest:k=16,sink=8,window=32,from=0", "lsh:k=16,sink=8,window=32,from=0"}) {
    SCOPED_TRACE(policy);
    request.set_policy(policy);
    const Answer answer = Generate(*stub, request);
    ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
    const v1::Usage& usage = answer.finish.at(0).usage();
    const v1::RetrievalUsage& retrieval = usage.retrieval();
    // The same steps as the dense run's, of which less was read.
    EXPECT_EQ(usage.kv_dense_bytes(), dense.kv_dense_bytes());
    EXPECT_EQ(usage.dense_rows(), dense.dense_rows());
    EXPECT_LT(usage.kv_read_bytes().fast(), usage.kv_dense_bytes());
    EXPECT_EQ(usage.kv_read_bytes().fast() * usage.dense_rows(),
              usage.kv_dense_bytes() * usage.attended_rows());
    // Read is what dense reads, less the mid tokens that were not chosen.
    EXPECT_EQ(usage.dense_rows() - usage.attended_rows(),
              retrieval.candidate_rows() - retrieval.selected_rows());
    EXPECT_NEAR(retrieval.kept() * retrieval.candidate_rows(), retrieval.selected_rows(), 0.5);
    EXPECT_GT(retrieval.probes(), 0u);
    EXPECT_GT(retrieval.coverage(), 0);
    EXPECT_LE(retrieval.coverage(), 1.0001);
    EXPECT_GE(retrieval.iou(), 0);
    EXPECT_LE(retrieval.iou(), 1);
    if (policy[0] == 'o') {
      EXPECT_NEAR(retrieval.iou(), 1, 1e-3);
    }
    EXPECT_EQ(retrieval.tail_estimates(), 0u);
  }
  EXPECT_GT(server.Metric("winnow_retrieval_candidate_rows_total"), 0);
  EXPECT_EQ(server.Metric("winnow_retrieval_kept_ratio_count"), 4);
  EXPECT_GT(server.Metric("winnow_retrieval_coverage_ratio_count"), 0);
  EXPECT_GT(server.Metric("winnow_step_attended_rows_count"), 0);
}

TEST(InferenceService, AContextBelowFromIsDense) {
  TestServer server;
  const auto stub = server.Stub();
  v1::GenerateRequest request = CountingRequest("A story about a tree and what became of it", 60);
  const Answer dense = Generate(*stub, request);
  request.set_policy("lsh:k=4,sink=2,window=8,from=900");
  const Answer below = Generate(*stub, request);
  EXPECT_EQ(below.ids, dense.ids);
  EXPECT_EQ(below.finish.at(0).usage().kv_read_bytes().fast(),
            dense.finish.at(0).usage().kv_dense_bytes());
  request.set_policy("lsh:k=4,sink=2,window=8,from=0");
  EXPECT_LT(Generate(*stub, request).finish.at(0).usage().kv_read_bytes().fast(),
            dense.finish.at(0).usage().kv_dense_bytes());
}

TEST(InferenceService, ChoicesComeWithTheirIndexAndTheFirstIsTheOneAlone) {
  TestServer server;
  const auto stub = server.Stub();
  v1::GenerateRequest request = CountingRequest("Once upon a time", 24);
  request.mutable_sampling()->set_temperature(1);
  request.mutable_sampling()->set_seed(7);
  const Answer alone = Generate(*stub, request);
  request.set_n(4);
  const Answer four = Generate(*stub, request);
  ASSERT_TRUE(alone.status.ok() && four.status.ok());
  EXPECT_EQ(four.finish.size(), 4u);
  EXPECT_EQ(four.ids[0], alone.ids[0]);
  EXPECT_NE(four.ids[1], four.ids[0]);
  for (const auto& ids : four.ids) EXPECT_EQ(ids.size(), 24u);
}

TEST(InferenceService, TheSameTokensAloneAndAmongOthers) {
  TestServer server;
  const auto stub = server.Stub();
  std::vector<v1::GenerateRequest> requests;
  std::vector<std::vector<int32_t>> alone;
  for (int i = 0; i < 8; ++i) {
    requests.push_back(CountingRequest("Number " + std::to_string(i * 37), 20 + i));
    if (i % 2 == 1) {
      requests.back().mutable_sampling()->set_temperature(0.8f);
      requests.back().mutable_sampling()->set_seed(i);
    }
    alone.push_back(Generate(*stub, requests.back()).ids[0]);
  }
  std::vector<std::future<Answer>> together;
  for (const auto& request : requests) {
    together.push_back(
        std::async(std::launch::async, [&stub, &request] { return Generate(*stub, request); }));
  }
  for (size_t i = 0; i < together.size(); ++i) EXPECT_EQ(together[i].get().ids[0], alone[i]) << i;
}

TEST(InferenceService, LogProbabilitiesComeWhenAskedFor) {
  TestServer server;
  v1::GenerateRequest request = CountingRequest("The", 5);
  request.set_top_logprobs(3);
  grpc::ClientContext context;
  const auto stub = server.Stub();
  auto reader = stub->Generate(&context, request);
  v1::GenerateResponse response;
  int tokens = 0;
  while (reader->Read(&response)) {
    for (const v1::Token& token : response.tokens()) {
      ++tokens;
      ASSERT_TRUE(token.has_logprob());
      EXPECT_LE(token.logprob(), 0);
      ASSERT_EQ(token.top_size(), 3);
      EXPECT_EQ(token.top(0).id(), token.id());  // greedy
      EXPECT_EQ(token.top(0).logprob(), token.logprob());
      EXPECT_GE(token.top(0).logprob(), token.top(1).logprob());
      EXPECT_GE(token.top(1).logprob(), token.top(2).logprob());
    }
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(tokens, 5);
  request.clear_top_logprobs();
  grpc::ClientContext plain;
  auto without = stub->Generate(&plain, request);
  ASSERT_TRUE(without->Read(&response));
  EXPECT_FALSE(response.tokens(0).has_logprob());
  EXPECT_EQ(response.tokens(0).top_size(), 0);
}

// A prompt whose later part the model itself has said: its scores are what it said then.
TEST(InferenceService, APromptIsScoredAsItsTokensWereDrawn) {
  TestServer server;
  const auto stub = server.Stub();
  v1::GenerateRequest request = CountingRequest("The", 600);
  request.set_top_logprobs(20);
  std::vector<v1::Token> drawn;
  grpc::ClientContext drawing;
  const auto draws = stub->Generate(&drawing, request);
  v1::GenerateResponse response;
  while (draws->Read(&response)) {
    drawn.insert(drawn.end(), response.tokens().begin(), response.tokens().end());
  }
  ASSERT_TRUE(draws->Finish().ok());
  const int32_t first = 5;
  v1::TokenPrompt& prompt = *request.mutable_tokens();
  prompt.add_ids(first);
  for (const v1::Token& token : drawn) prompt.add_ids(token.id());
  request.mutable_stopping()->set_max_tokens(3);
  request.clear_top_logprobs();
  request.set_prompt_logprobs(20);
  request.set_n(2);

  const auto score = [&] {
    std::vector<v1::PromptToken> scored;
    std::vector<int> tokens(2);
    int messages = 0;
    grpc::ClientContext context;
    const auto reader = stub->Generate(&context, request);
    while (reader->Read(&response)) {
      if (response.prompt_tokens_size() > 0) {
        EXPECT_EQ(response.choice(), 0);
        EXPECT_EQ(tokens[0], 0) << "before the choice's first token";
        ++messages;
      }
      tokens[response.choice()] += response.tokens_size();
      for (const v1::Token& token : response.tokens()) EXPECT_FALSE(token.has_logprob());
      scored.insert(scored.end(), response.prompt_tokens().begin(), response.prompt_tokens().end());
    }
    EXPECT_TRUE(reader->Finish().ok());
    EXPECT_EQ(tokens, (std::vector{3, 3}));
    EXPECT_GE(messages, 2);
    return scored;
  };
  const std::vector<v1::PromptToken> scored = score();
  ASSERT_EQ(scored.size(), drawn.size() + 1);
  EXPECT_EQ(scored[0].id(), first);
  EXPECT_FALSE(scored[0].has_logprob());
  EXPECT_EQ(scored[0].rank(), 0);
  for (size_t i = 1; i < scored.size(); ++i) {
    ASSERT_EQ(scored[i].id(), drawn[i - 1].id());
    ASSERT_EQ(scored[i].top_size(), 20);
    ASSERT_GE(scored[i].rank(), 1);
    if (scored[i].rank() > 20) continue;
    const v1::TokenLogprob& same = scored[i].top(scored[i].rank() - 1);
    ASSERT_EQ(same.id(), scored[i].id());
    ASSERT_EQ(same.logprob(), scored[i].logprob());
    ASSERT_FALSE(same.text().empty());
  }
  // Again, when all of it is cached, and from a prompt that has the same beginning as that of the drawing.
  const std::vector<v1::PromptToken> again = score();
  for (size_t i = 0; i < scored.size(); ++i) {
    ASSERT_EQ(again[i].SerializeAsString(), scored[i].SerializeAsString());
  }
  v1::TokenizeRequest tokenize;
  tokenize.mutable_text()->set_text(std::string("The"));
  v1::TokenizeResponse ids;
  grpc::ClientContext tokenizing;
  ASSERT_TRUE(stub->Tokenize(&tokenizing, tokenize, &ids).ok());
  prompt.clear_ids();
  prompt.mutable_ids()->MergeFrom(ids.ids());
  for (const v1::Token& token : drawn) prompt.add_ids(token.id());
  const std::vector<v1::PromptToken> said = score();
  ASSERT_EQ(said.size(), ids.ids_size() + drawn.size());
  for (size_t i = 0; i < drawn.size(); ++i) {
    const v1::PromptToken& token = said[ids.ids_size() + i];
    ASSERT_EQ(token.rank(), 1) << "greedy";
    ASSERT_EQ(token.logprob(), drawn[i].logprob());
    for (int j = 0; j < 20; ++j) ASSERT_EQ(token.top(j).logprob(), drawn[i].top(j).logprob());
  }
}

TEST(InferenceService, StopStringEndsTheTextBeforeItself) {
  TestServer server;
  const auto stub = server.Stub();
  const Answer whole = Generate(*stub, CountingRequest("The capital of", 40));
  ASSERT_GT(whole.text[0].size(), 12u);
  const std::string stop = whole.text[0].substr(8, 3);
  v1::GenerateRequest request = CountingRequest("The capital of", 40);
  request.mutable_stopping()->add_stop_strings(stop);
  const Answer cut = Generate(*stub, request);
  ASSERT_TRUE(cut.status.ok()) << cut.status.error_message();
  EXPECT_EQ(cut.finish[0].reason(), v1::FINISH_REASON_STOP_STRING);
  EXPECT_EQ(cut.finish[0].stop_string(), stop);
  EXPECT_EQ(cut.text[0], whole.text[0].substr(0, whole.text[0].find(stop)));
}

TEST(InferenceService, StopTokenIsNamed) {
  TestServer server;
  const auto stub = server.Stub();
  const Answer whole = Generate(*stub, CountingRequest("The capital of", 10));
  v1::GenerateRequest request = CountingRequest("The capital of", 10);
  request.mutable_stopping()->add_stop_token_ids(whole.ids[0][4]);
  const Answer cut = Generate(*stub, request);
  EXPECT_EQ(cut.finish[0].reason(), v1::FINISH_REASON_STOP_TOKEN);
  EXPECT_TRUE(cut.finish[0].has_stop_token_id());
  EXPECT_EQ(cut.finish[0].stop_token_id(), whole.ids[0][4]);
  EXPECT_LE(cut.ids[0].size(), 5u);
}

TEST(InferenceService, BadFieldIsInvalidArgumentBeforeTheQueue) {
  TestServer server;
  v1::GenerateRequest request = CountingRequest("x", 1);
  request.mutable_sampling()->set_top_p(-1);
  const Answer answer = Generate(*server.Stub(), request);
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(answer.reason(), "INVALID_FIELD");
  EXPECT_THAT(answer.status.error_message(), HasSubstr("sampling.top_p"));
  EXPECT_EQ(server.engine().stats().accepted + server.engine().stats().rejected, 0u);
  EXPECT_EQ(server.Metric("winnow_requests_total{outcome=\"invalid\"}"), 1);
}

TEST(InferenceService, InvalidUtf8IsInvalidArgumentWithItsPath) {
  TestServer server;
  // Bytes that a proper client library would not send: {chat {messages {role "user", content ff}}}.
  const std::string bytes("\x1a\x0b\x0a\x09\x0a\x04user\x12\x01\xff", 13);
  grpc::GenericStub stub(server.Channel());
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  grpc::Slice slice(bytes);
  const grpc::ByteBuffer buffer(&slice, 1);
  auto call =
      stub.PrepareUnaryCall(&context, "/winnow.v1.InferenceService/Generate", buffer, &queue);
  call->StartCall();
  grpc::ByteBuffer response;
  grpc::Status status;
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_THAT(status.error_message(),
              HasSubstr("chat.messages[0].content: is not UTF-8 at byte 0"));
  queue.Shutdown();
}

TEST(InferenceService, TokenizeAndDetokenizeAreInverse) {
  TestServer server;
  const auto stub = server.Stub();
  v1::TokenizeRequest request;
  request.mutable_text()->set_text("Hello w\xc3\xb6rld");
  request.mutable_text()->set_add_special_tokens(false);
  v1::TokenizeResponse tokens;
  grpc::ClientContext first;
  ASSERT_TRUE(stub->Tokenize(&first, request, &tokens).ok());
  v1::DetokenizeRequest back;
  *back.mutable_ids() = tokens.ids();
  v1::DetokenizeResponse text;
  grpc::ClientContext second;
  ASSERT_TRUE(stub->Detokenize(&second, back, &text).ok());
  EXPECT_EQ(text.text(), "Hello w\xc3\xb6rld");

  back.add_ids(1 << 20);
  grpc::ClientContext third;
  const grpc::Status bad = stub->Detokenize(&third, back, &text);
  EXPECT_EQ(bad.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(bad.error_message(), HasSubstr("ids["));
}

TEST(InferenceService, GetModelAnswers) {
  TestServer server;
  grpc::ClientContext context;
  v1::GetModelResponse model;
  ASSERT_TRUE(server.Stub()->GetModel(&context, {}, &model).ok());
  EXPECT_EQ(model.name(), "needle");
}

TEST(InferenceService, CancelledStreamFreesItsBlocks) {
  TestServer server(Patient());
  SlowReader stream(server, 900);
  EXPECT_TRUE(Eventually([&] { return server.engine().stats().blocks_used > 0; }));
  stream.Cancel();
  EXPECT_EQ(stream.ReadTheRest().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(NothingIsLeft(server));
  EXPECT_EQ(server.Metric("winnow_requests_total{outcome=\"cancelled\"}"), 1);
}

TEST(InferenceService, DeadlineEndsARunningStream) {
  TestServer server;
  const auto stub = server.Stub();
  v1::GenerateRequest request = CountingRequest("A long story", 900);
  request.set_n(8);  // long enough on any machine
  Answer answer;
  // On a busy machine a deadline may pass before the first token: then a longer one.
  for (int64_t ms = 150; answer.messages == 0 && ms < 60'000; ms *= 2) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(ms));
    answer = Generate(*stub, request, context);
    EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  EXPECT_GT(answer.messages, 0);
  EXPECT_TRUE(NothingIsLeft(server));
  // The client's own timer may end the call first, by more than the slack on a busy machine.
  EXPECT_GE(server.Metric("winnow_requests_total{outcome=\"deadline\"}") +
                server.Metric("winnow_requests_total{outcome=\"cancelled\"}"),
            1);
  EXPECT_EQ(server.Metric("winnow_requests_total{outcome=\"ok\"}"), 0);
}

TEST(InferenceService, FullQueueIsResourceExhaustedWithRetryInfo) {
  TestServerOptions options = Patient();
  options.engine.max_running = 1;
  options.engine.queue_requests = 2;
  TestServer server(options);
  // One runs and two wait, in turns while each fills its queue of events; none of them can end.
  SlowReader first(server, 900), second(server, 900), third(server, 900);
  ASSERT_TRUE(Eventually([&] { return server.engine().stats().waiting == 2; }))
      << server.log_text();
  const Answer answer = Generate(*server.Stub(), CountingRequest("One too many", 5));
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(answer.reason(), "QUEUE_FULL");
  // Whatever is in it: the message is not looked at.
  EXPECT_EQ(Generate(*server.Stub(), v1::GenerateRequest()).reason(), "QUEUE_FULL");
  google::rpc::RetryInfo retry;
  bool found = false;
  const google::rpc::Status details = answer.details();
  for (const auto& any : details.details()) found |= any.UnpackTo(&retry);
  EXPECT_TRUE(found);
  EXPECT_GT(retry.retry_delay().seconds() * 1000000000 + retry.retry_delay().nanos(), 0);
  for (SlowReader* stream : {&first, &second, &third}) {
    stream->Cancel();
    stream->ReadTheRest();
  }
  EXPECT_TRUE(NothingIsLeft(server));
  EXPECT_EQ(server.Metric("winnow_requests_total{outcome=\"rejected\"}"), 2);
}

TEST(InferenceService, ChoicesAreTakenAllOrNone) {
  TestServerOptions options = Patient();
  options.engine.max_running = 1;
  options.engine.queue_requests = 3;
  TestServer server(options);
  {
    SlowReader runs(server, 900), waits(server, 900);
    ASSERT_TRUE(Eventually([&] { return server.engine().stats().waiting == 1; }));
    v1::GenerateRequest request = CountingRequest("A story", 5);
    request.set_n(3);
    const Answer answer = Generate(*server.Stub(), request);
    EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(server.engine().stats().accepted, 2u);
    EXPECT_EQ(server.engine().stats().rejected, 3u);
    for (SlowReader* stream : {&runs, &waits}) {
      stream->Cancel();
      stream->ReadTheRest();
    }
  }
  EXPECT_TRUE(NothingIsLeft(server));
  // More than the queue ever holds, and nobody is in the way: or trying again would be no use.
  v1::GenerateRequest request = CountingRequest("A story", 5);
  request.set_n(8);
  const Answer answer = Generate(*server.Stub(), request);
  EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.finish.size(), 8u);
}

TEST(InferenceService, MessagesThatWaitToBeTokenizedAreBoundedByTheirBytes) {
  TestServerOptions options;
  options.generator.tokenize_threads = 1;
  options.generator.max_tokenizing_bytes = 1000;
  TestServer server(options);
  const auto stub = server.Stub();
  std::promise<void> go_on;
  ASSERT_TRUE(server.generator().PostTokenizing(1, [&] { go_on.get_future().wait(); }));
  ASSERT_TRUE(server.generator().PostTokenizing(900, [] {}));
  const v1::GenerateRequest request = CountingRequest(std::string(200, 'a'), 2);
  v1::TokenizeRequest tokenize;
  tokenize.mutable_text()->set_text(std::string(200, 'a'));
  v1::TokenizeResponse tokens;
  // Taken, they would wait for good.
  grpc::ClientContext first, second;
  for (grpc::ClientContext* context : {&first, &second}) {
    context->set_deadline(absl::ToChronoTime(absl::Now() + kPatience / 4));
  }
  EXPECT_EQ(Generate(*stub, request, first).reason(), "QUEUE_FULL");
  EXPECT_EQ(stub->Tokenize(&second, tokenize, &tokens).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  go_on.set_value();
  EXPECT_TRUE(Eventually([&] { return Generate(*stub, request).status.ok(); }));
  // Larger than all that may wait, and alone.
  EXPECT_TRUE(Eventually(
      [&] { return Generate(*stub, CountingRequest(std::string(1500, 'a'), 2)).status.ok(); }));
}

TEST(InferenceService, SlowReaderLosesItsRequestAndOthersGoOn) {
  TestServerOptions options = Patient();
  options.engine.slow_reader_timeout = std::chrono::minutes(10);
  options.generator.slow_reader_timeout = std::chrono::hours(10'000);  // it is the engine that acts
  TestServer server(options);
  SlowReader slow(server, 900);
  EXPECT_TRUE(Generate(*server.Stub(), CountingRequest("Another", 50)).status.ok());
  EXPECT_TRUE(Eventually([&] { return server.engine().stats().paused == 1; }));
  EXPECT_GT(server.engine().stats().blocks_used, 0);
  // The clock moves until it works, because that pause may have been a passing one.
  EXPECT_TRUE(Eventually([&] {
    server.Advance(std::chrono::minutes(11));
    return server.engine().stats().blocks_used == 0;
  }));
  const grpc::Status status = slow.ReadTheRest();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_THAT(status.error_details(), HasSubstr("SLOW_READER"));
  EXPECT_TRUE(server.generator().WaitIdle(kPatience));
  EXPECT_EQ(server.Metric("winnow_requests_total{outcome=\"slow_reader\"}"), 1);
}

TEST(InferenceService, StreamThatIsNeverReadIsGivenUpAlsoWhenItsSequenceIsFinished) {
  TestServerOptions options = Patient();
  options.generator.slow_reader_timeout = std::chrono::minutes(10);
  options.generator.queue_events = 1000;  // the engine never has to pause
  TestServer server(options);
  SlowReader slow(server, 800);
  const auto max_tokens = static_cast<size_t>(engine::FinishReason::kMaxTokens);
  EXPECT_TRUE(Eventually([&] { return server.engine().stats().finished[max_tokens] == 1; }));
  EXPECT_EQ(server.generator().calls(), 1u);
  // The clock moves until it works, because the write that is under way may still come to an end.
  EXPECT_TRUE(Eventually([&] {
    server.Advance(std::chrono::minutes(11));
    return server.generator().calls() == 0;
  }));
  EXPECT_EQ(server.engine().stats().blocks_used, 0);
  EXPECT_EQ(server.Metric("winnow_requests_total{outcome=\"slow_reader\"}"), 1);
  EXPECT_EQ(slow.ReadTheRest().error_code(), grpc::StatusCode::CANCELLED);
}

TEST(InferenceService, DrainRefusesNewCallsAndFinishesRunningOnes) {
  TestServer server;
  const auto stub = server.Stub();
  grpc::ClientContext context;
  auto reader = stub->Generate(&context, CountingRequest("A long story", 300));
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  server.server().BeginDrain();
  server.engine().BeginDrain();
  const auto health = grpc::health::v1::Health::NewStub(server.Channel());
  grpc::ClientContext check;
  grpc::health::v1::HealthCheckResponse serving;
  ASSERT_TRUE(health->Check(&check, {}, &serving).ok());
  EXPECT_EQ(serving.status(), grpc::health::v1::HealthCheckResponse::NOT_SERVING);
  const Answer refused = Generate(*stub, CountingRequest("Too late", 5));
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(refused.reason(), "DRAINING");
  int tokens = response.tokens_size();
  while (reader->Read(&response)) tokens += response.tokens_size();
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(tokens, 300);
}

TEST(InferenceService, StreamsThatOutliveTheGraceEndUnavailable) {
  TestServer server(Patient());
  SlowReader stream(server, 900);
  server.engine().BeginDrain();
  server.StopEngine();
  const grpc::Status status = stream.ReadTheRest();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  EXPECT_TRUE(server.generator().WaitIdle(kPatience));
}

TEST(InferenceService, MessageLargerThanTheLimitIsRefusedByGrpc) {
  TestServerOptions options;
  options.max_message_bytes = 4096;
  TestServer server(options);
  const Answer answer = Generate(*server.Stub(), CountingRequest(std::string(8192, 'a'), 5));
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST(InferenceService, TenantMetadataIsCheckedAndLogged) {
  TestServer server;
  const auto stub = server.Stub();
  {
    grpc::ClientContext context;
    context.AddMetadata("x-winnow-tenant", "team-7");
    EXPECT_TRUE(Generate(*stub, CountingRequest("x", 1), context).status.ok());
  }
  for (const auto& bad : {std::string("no spaces"), std::string(65, 'x')}) {
    grpc::ClientContext context;
    context.AddMetadata("x-winnow-tenant", bad);
    const Answer answer = Generate(*stub, CountingRequest("x", 1), context);
    EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(answer.reason(), "INVALID_METADATA");
  }
  grpc::ClientContext twice;
  twice.AddMetadata("x-winnow-tenant", "a");
  twice.AddMetadata("x-winnow-tenant", "b");
  EXPECT_EQ(Generate(*stub, CountingRequest("x", 1), twice).reason(), "INVALID_METADATA");
  ASSERT_TRUE(server.generator().WaitIdle(kPatience));
  EXPECT_THAT(server.log_text(), HasSubstr("\"tenant\":\"team-7\""));
}

TEST(InferenceService, RequestLineHasCountsButNeverPromptOrAnswer) {
  TestServer server;
  v1::GenerateRequest request = CountingRequest("my secret prompt", 12);
  request.mutable_stopping()->add_stop_strings("secretstop");
  const Answer answer = Generate(*server.Stub(), request);
  v1::GenerateRequest bad = request;
  bad.set_policy("secretpolicy");
  Generate(*server.Stub(), bad);
  ASSERT_TRUE(server.generator().WaitIdle(kPatience));
  const std::string log = server.log_text();
  EXPECT_THAT(log, HasSubstr("\"event\":\"request\""));
  EXPECT_THAT(log, HasSubstr("\"id\":\"" + answer.request_id + "\""));
  EXPECT_THAT(log, HasSubstr("\"generated_tokens\":12"));
  EXPECT_THAT(log, HasSubstr("\"finish\":\"MAX_TOKENS\""));
  EXPECT_THAT(log, Not(HasSubstr("secret")));
  EXPECT_THAT(log, Not(HasSubstr(answer.text[0])));
}

// Names of services, read from the reflection service as a client would.
std::string ReflectedServices(TestServer& server, grpc::Status* status) {
  grpc::GenericStub stub(server.Channel());
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  // ServerReflectionRequest{list_services: "*"}
  grpc::Slice slice(std::string("\x3a\x01*", 3));
  auto stream = stub.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  void* tag = nullptr;
  bool ok = false;
  stream->StartCall(nullptr);
  queue.Next(&tag, &ok);
  stream->WriteLast(grpc::ByteBuffer(&slice, 1), {}, nullptr);
  queue.Next(&tag, &ok);
  grpc::ByteBuffer bytes;
  stream->Read(&bytes, nullptr);
  queue.Next(&tag, &ok);
  std::string text;
  grpc::Slice answer;
  if (ok && bytes.DumpToSingleSlice(&answer).ok()) {
    text.assign(reinterpret_cast<const char*>(answer.begin()), answer.size());
  }
  stream->Finish(status, nullptr);
  queue.Next(&tag, &ok);
  queue.Shutdown();
  return text;
}

TEST(InferenceService, ReflectionIsOffUnlessAskedFor) {
  grpc::Status status;
  {
    TestServerOptions options;
    options.config.reflection = true;
    TestServer server(options);
    const std::string services = ReflectedServices(server, &status);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_THAT(services, HasSubstr("winnow.v1.InferenceService"));
    EXPECT_THAT(services, HasSubstr("grpc.health.v1.Health"));
    EXPECT_THAT(services, Not(HasSubstr("channelz")));
  }
  TestServer server;
  ReflectedServices(server, &status);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST(InferenceService, SecondServerOnThePortIsRefused) {
  TestServer first;
  TestServer other;
  InferenceService service(other.generator(), {});
  ServeConfig config;
  config.listen = first.address();
  EXPECT_EQ(GrpcServer::Start(config, 1 << 20, service).status().code(),
            absl::StatusCode::kUnavailable);
}

// Cancels, deadlines and disconnects at random; afterwards nothing is left and whoever finished has
// the tokens that he has alone.
TEST(InferenceService, RandomCancelsLeaveNothingBehind) {
  TestServer server;
  const auto stub = server.Stub();
  std::vector<v1::GenerateRequest> requests;
  std::vector<std::vector<int32_t>> alone;
  for (int i = 0; i < 4; ++i) {
    requests.push_back(CountingRequest("Story " + std::to_string(i), 10 + 10 * i));
    alone.push_back(Generate(*stub, requests.back()).ids[0]);
  }
  const uint64_t seed = TestSeed();
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(seed));
  std::atomic<int> finished = 0;
  std::vector<std::thread> clients;
  for (int c = 0; c < 8; ++c) {
    clients.emplace_back([&, c] {
      std::mt19937 random(seed + c);
      for (int i = 0; i < 12; ++i) {
        const size_t which = random() % requests.size();
        grpc::ClientContext context;
        if (random() % 4 == 0) {
          context.set_deadline(std::chrono::system_clock::now() +
                               std::chrono::milliseconds(random() % 60));
        }
        const int cancel_after = random() % 2 ? static_cast<int>(random() % 10) : -1;
        auto reader = stub->Generate(&context, requests[which]);
        v1::GenerateResponse response;
        std::vector<int32_t> ids;
        for (int messages = 0; reader->Read(&response); ++messages) {
          for (const v1::Token& token : response.tokens()) ids.push_back(token.id());
          if (messages == cancel_after) context.TryCancel();
        }
        if (reader->Finish().ok()) {
          EXPECT_EQ(ids, alone[which]);
          ++finished;
        }
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_GT(finished.load(), 0);
  // On the same connection, so the server has read all that the clients sent when it is answered.
  EXPECT_EQ(Generate(*stub, requests[0]).ids[0], alone[0]);
  EXPECT_TRUE(NothingIsLeft(server));
  EXPECT_EQ(server.Metric("winnow_kv_blocks_used"), 0);
}

}  // namespace
}  // namespace winnow::server
