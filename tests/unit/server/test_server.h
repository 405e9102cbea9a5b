// A whole server in the test's process: engine thread, generator, gRPC on a free port of loopback,
// with the project's small trained model. And a client's stub.
#ifndef WINNOW_TESTS_UNIT_SERVER_TEST_SERVER_H_
#define WINNOW_TESTS_UNIT_SERVER_TEST_SERVER_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>

#include <chrono>
#include <memory>
#include <sstream>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "engine/schedule/engine.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/credentials.h"
#include "server/generator.h"
#include "server/grpc_server.h"
#include "server/inference_service.h"
#include "server/log.h"
#include "server/metrics.h"
#include "tests/unit/server/movable_clock.h"
#include "tests/unit/server/needle_model.h"
#include "winnow/v1/inference.grpc.pb.h"

namespace winnow::server {

struct TestServerOptions {
  engine::EngineOptions engine;
  Generator::Options generator;
  ServeConfig config;
  int64_t max_message_bytes = 1 << 20;

  TestServerOptions() {
    engine.max_running = 16;
    engine.step_tokens = 256;
    config.listen = "127.0.0.1:0";
  }
};

class TestServer {
 public:
  explicit TestServer(const TestServerOptions& options = {})
      : log_("debug", "json", std::make_shared<spdlog::sinks::ostream_sink_mt>(log_text_)),
        metrics_({"1.2.3", "needle", "bf16", "bf16", "cpu", 4096}, clock_),
        engine_(Checked(engine::Engine::Create(options.engine, *Needle().decoder,
                                               *Needle().tokenizer, clock_, &metrics_))),
        validator_(NeedleLimits(), *Needle().tokenizer, Needle().chat_template),
        generator_(options.generator, *engine_, validator_, *Needle().tokenizer, metrics_, log_,
                   clock_),
        service_(generator_, Model()),
        server_(Checked(GrpcServer::Start(options.config, options.max_message_bytes, service_))) {
    metrics_.Attach(*engine_);
    engine_thread_ = std::jthread([this](std::stop_token stop) { engine_->Run(stop); });
  }

  // As serve does: streams end, then the engine, then the server.
  ~TestServer() {
    engine_->BeginDrain();
    StopEngine();
    server_->Shutdown(absl::Seconds(5));
    metrics_.Detach();
  }

  // For good: what it has ends, and it takes nothing any more.
  void StopEngine() {
    if (!engine_thread_.joinable()) return;
    engine_thread_.request_stop();
    engine_thread_.join();
  }
  void Advance(engine::Duration by) { clock_.Advance(by); }

  std::string address() const { return "127.0.0.1:" + std::to_string(server_->port()); }

  std::shared_ptr<grpc::Channel> Channel(const grpc::ChannelArguments& arguments = {}) const {
    return grpc::CreateCustomChannel(address(), *MakeChannelCredentials({}), arguments);
  }
  std::unique_ptr<v1::InferenceService::Stub> Stub() const {
    return v1::InferenceService::NewStub(Channel());
  }

  engine::Engine& engine() { return *engine_; }
  Generator& generator() { return generator_; }
  GrpcServer& server() { return *server_; }
  Metrics& metrics() { return metrics_; }
  std::string log_text() const { return log_text_.str(); }  // when nothing is being logged

  // The value of a series in /metrics; fails the test if it is not there.
  double Metric(const std::string& series) const {
    const std::string text = "\n" + metrics_.Text();
    const size_t at = text.find("\n" + series + " ");
    if (at == text.npos) {
      ADD_FAILURE() << "no series " << series;
      return -1;
    }
    return std::stod(text.substr(at + series.size() + 2));
  }

 private:
  template <typename T>
  static T Checked(absl::StatusOr<T> value) {
    if (!value.ok()) {
      fprintf(stderr, "%s\n", std::string(value.status().message()).c_str());
      abort();
    }
    return *std::move(value);
  }

  static v1::GetModelResponse Model() {
    v1::GetModelResponse model;
    model.set_name("needle");
    return model;
  }

  std::ostringstream log_text_;
  MovableClock clock_;
  Log log_;
  Metrics metrics_;
  std::unique_ptr<engine::Engine> engine_;
  Validator validator_;
  Generator generator_;
  InferenceService service_;
  std::unique_ptr<GrpcServer> server_;
  std::jthread engine_thread_;
};

// A request that generates exactly `tokens` tokens.
inline v1::GenerateRequest CountingRequest(const std::string& text, int32_t tokens) {
  v1::GenerateRequest request;
  request.mutable_text()->set_text(text);
  request.mutable_stopping()->set_max_tokens(tokens);
  request.mutable_stopping()->set_ignore_eos(true);
  return request;
}

struct Answer {
  grpc::Status status;
  std::vector<std::string> text;          // by choice
  std::vector<std::vector<int32_t>> ids;  // by choice
  std::vector<v1::Finish> finish;         // in the order in which they came
  int messages = 0;
  std::string request_id;

  google::rpc::Status details() const {
    google::rpc::Status rpc;
    rpc.ParseFromString(status.error_details());
    return rpc;
  }
  std::string reason() const {
    google::rpc::ErrorInfo info;
    const google::rpc::Status rpc = details();
    for (const auto& any : rpc.details()) {
      if (any.UnpackTo(&info)) return info.reason();
    }
    return "";
  }
};

inline Answer Generate(v1::InferenceService::Stub& stub, const v1::GenerateRequest& request,
                       grpc::ClientContext& context) {
  Answer answer;
  const size_t n = std::max(request.n(), 1);
  answer.text.resize(n);
  answer.ids.resize(n);
  auto reader = stub.Generate(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    ++answer.messages;
    answer.text.at(response.choice()) += response.text();
    for (const v1::Token& token : response.tokens()) {
      answer.ids.at(response.choice()).push_back(token.id());
    }
    if (response.has_finish()) answer.finish.push_back(response.finish());
  }
  answer.status = reader->Finish();
  const auto& metadata = context.GetServerInitialMetadata();
  if (const auto it = metadata.find("x-winnow-request-id"); it != metadata.end()) {
    answer.request_id = std::string(it->second.data(), it->second.size());
  }
  return answer;
}

inline Answer Generate(v1::InferenceService::Stub& stub, const v1::GenerateRequest& request) {
  grpc::ClientContext context;
  return Generate(stub, request, context);
}

}  // namespace winnow::server

#endif  // WINNOW_TESTS_UNIT_SERVER_TEST_SERVER_H_
