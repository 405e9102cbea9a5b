#include "server/inference_service.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <algorithm>
#include <array>
#include <deque>
#include <iterator>
#include <set>
#include <thread>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "absl/strings/cord.h"
#include "engine/base/mutex.h"
#include "server/grpc_call.h"
#include "server/status.h"
#include "server/strings.h"
#include "winnow/v1/inference.grpc.pb.h"

namespace winnow::server {
namespace {

constexpr char kRequestIdKey[] = "x-winnow-request-id";

// winnow.v1's own messages.
class OwnCodec final : public GenerateCodec {
 public:
  absl::Status Read(const grpc::ByteBuffer& bytes, v1::GenerateRequest& message,
                    CallInfo& info) override {
    return ParseBuffer(bytes, message);
  }
  std::vector<grpc::ByteBuffer> Write(v1::GenerateResponse message) override {
    return {SerializeBuffer(message)};
  }
};

class GenerateReactor;

// Cancels streams whose write does not complete. One thread for all of them: a timer for each write
// would cost more than the write. Only streams that have written are here, in parts with a lock each, and no
// lock is held while streams are looked at: a flood of calls must not queue up behind it.
class StuckStreams {
 public:
  StuckStreams(const engine::Clock& clock, engine::Duration timeout)
      : clock_(clock), timeout_(timeout), thread_([this] { Watch(); }) {}
  ~StuckStreams() {
    {
      const engine::MutexLock lock(mutex_);
      stopping_ = true;
    }
    stop_.NotifyAll();
    thread_.join();
  }

  const engine::Clock& clock() const { return clock_; }
  void Add(const std::shared_ptr<GenerateReactor>& stream) {
    Part& part = PartOf(stream);
    absl::MutexLock lock(&part.mutex);
    part.streams.insert(stream);
  }
  void Remove(const std::shared_ptr<GenerateReactor>& stream) {
    Part& part = PartOf(stream);
    absl::MutexLock lock(&part.mutex);
    part.streams.erase(stream);
  }

 private:
  struct Part {
    absl::Mutex mutex;
    absl::flat_hash_set<std::shared_ptr<GenerateReactor>> streams ABSL_GUARDED_BY(mutex);
  };
  Part& PartOf(const std::shared_ptr<GenerateReactor>& stream) {
    return parts_[absl::HashOf(stream.get()) % parts_.size()];
  }
  void Watch();

  const engine::Clock& clock_;
  const engine::Duration timeout_;
  std::array<Part, 16> parts_;
  engine::Mutex mutex_;
  engine::CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// A call that ends before there is anything to do: it was reset before its message came.
class EndedReactor final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  explicit EndedReactor(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

class GenerateReactor final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                              public std::enable_shared_from_this<GenerateReactor> {
 public:
  static GenerateReactor* Start(Generator& generator, const GrpcCallers& callers,
                                StuckStreams& stuck, grpc::CallbackServerContext& context,
                                const grpc::ByteBuffer& request,
                                std::unique_ptr<GenerateCodec> codec) {
    auto reactor = std::make_shared<GenerateReactor>(stuck, context, std::move(codec));
    reactor->self_ = reactor;
    CallInfo info;
    info.transport = "grpc";
    info.deadline = DeadlineOf(context, generator.clock());
    info.traceparent = TraceParentOf(context);
    if (!info.traceparent.empty()) context.AddInitialMetadata("traceparent", info.traceparent);
    v1::GenerateRequest message;
    info.refused = callers.Identify(context, info);
    const std::string tenant = info.tenant;
    if (info.refused.ok()) info.refused = reactor->codec_->Read(request, message, info);
    std::shared_ptr<Generation> generation =
        generator.Start(std::move(message), std::move(info), [reactor] { reactor->Pump(); });
    reactor->codec_->Started(generation, tenant);
    context.AddInitialMetadata(kRequestIdKey, generation->name());
    {
      absl::MutexLock lock(&reactor->mutex_);
      reactor->generation_ = std::move(generation);
    }
    // on_ready may have come before there was something to take from.
    reactor->Pump();
    return reactor.get();
  }

  GenerateReactor(StuckStreams& stuck, grpc::CallbackServerContext& context,
                  std::unique_ptr<GenerateCodec> codec)
      : stuck_(stuck), context_(context), codec_(std::move(codec)) {}

  void OnWriteDone(bool ok) override {
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
      // The stream is broken: OnCancel says so too, but perhaps later.
      if (!ok) generation_->Cancel();
    }
    Pump();
  }

  void OnCancel() override {
    std::shared_ptr<Generation> generation;
    {
      absl::MutexLock lock(&mutex_);
      generation = generation_;
    }
    generation->Cancel();
  }

  void OnDone() override {
    const std::shared_ptr<GenerateReactor> self = std::move(self_);
    if (listed_) stuck_.Remove(self);
    std::shared_ptr<Generation> generation;
    {
      absl::MutexLock lock(&mutex_);
      // The generation's on_ready holds the reactor: let go, or neither would ever be freed.
      generation = std::move(generation_);
    }
    generation->Close();
  }

  void CancelIfStuck(engine::TimePoint now, engine::Duration timeout) {
    absl::MutexLock lock(&mutex_);
    if (!writing_ || generation_ == nullptr || now - write_began_ < timeout) return;
    generation_->GiveUpOnReader();
    // Makes the write fail, and the end is told then. Under the lock, because the context lives
    // until OnDone has taken the generation; gRPC calls nothing of ours from inside.
    context_.TryCancel();
  }

 private:
  void Pump() {
    std::optional<absl::Status> end;
    {
      absl::MutexLock lock(&mutex_);
      if (writing_ || finished_ || generation_ == nullptr) return;
      while (outgoing_.empty() && !end.has_value()) {
        Generation::Item item = generation_->Take();
        if (auto* message = std::get_if<v1::GenerateResponse>(&item)) {
          std::vector<grpc::ByteBuffer> messages = codec_->Write(*std::move(message));
          std::move(messages.begin(), messages.end(), std::back_inserter(outgoing_));
        } else if (auto* last = std::get_if<Generation::End>(&item)) {
          end = codec_->End(std::move(last->status));
        } else {
          return;
        }
      }
      if (end.has_value()) {
        finished_ = true;
      } else {
        bytes_ = std::move(outgoing_.front());
        outgoing_.pop_front();
        writing_ = true;
        if (!std::exchange(listed_, true)) stuck_.Add(self_);
        write_began_ = stuck_.clock().Now();
      }
    }
    // Without the lock: gRPC may answer before these return. Nobody else gets here meanwhile.
    if (end.has_value()) {
      Finish(ToGrpcStatus(*end));
    } else {
      StartWrite(&bytes_);
    }
  }

  StuckStreams& stuck_;
  grpc::CallbackServerContext& context_;
  std::shared_ptr<GenerateReactor> self_;  // until OnDone
  bool listed_ = false;  // in stuck_; set before a write, and read when all are done
  const std::unique_ptr<GenerateCodec> codec_;  // called under mutex_ once the call has started
  absl::Mutex mutex_;
  std::shared_ptr<Generation> generation_ ABSL_GUARDED_BY(mutex_);  // until OnDone
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  engine::TimePoint write_began_ ABSL_GUARDED_BY(mutex_);
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<grpc::ByteBuffer> outgoing_ ABSL_GUARDED_BY(mutex_);  // made and not written yet
  grpc::ByteBuffer bytes_;                                         // of the write in flight
};

void StuckStreams::Watch() {
  const engine::Duration pause = std::clamp<engine::Duration>(
      timeout_ / 4, std::chrono::milliseconds(10), std::chrono::seconds(1));
  std::vector<std::shared_ptr<GenerateReactor>> streams;
  for (;;) {
    for (Part& part : parts_) {
      {
        absl::MutexLock lock(&part.mutex);
        streams.assign(part.streams.begin(), part.streams.end());
      }
      // One that is done meanwhile says so itself.
      for (const std::shared_ptr<GenerateReactor>& stream : streams) {
        stream->CancelIfStuck(clock_.Now(), timeout_);
      }
      streams.clear();
    }
    const engine::MutexLock lock(mutex_);
    // By the steady clock (health_monitor.cc says why).
    const auto until = std::chrono::steady_clock::now() + pause;
    while (!stopping_ && stop_.WaitUntil(mutex_, until)) {
    }
    if (stopping_) return;
  }
}

using V1 = v1::InferenceService;
using RawService = V1::WithRawCallbackMethod_Generate<V1::WithRawCallbackMethod_Tokenize<
    V1::WithRawCallbackMethod_Detokenize<V1::WithRawCallbackMethod_GetModel<V1::Service>>>>;

}  // namespace

class InferenceService::Impl final : public RawService {
 public:
  Impl(Generator& generator, v1::GetModelResponse model, std::shared_ptr<ApiKeys> keys)
      : generator_(generator),
        callers_(std::move(keys)),
        model_(std::move(model)),
        stuck_(generator.clock(), generator.options().slow_reader_timeout) {}

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request) override {
    return Generate(*context, *request, std::make_unique<OwnCodec>());
  }
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext& context,
                                                       const grpc::ByteBuffer& request,
                                                       std::unique_ptr<GenerateCodec> codec) {
    if (!request.Valid()) {
      const absl::Status status = ResetBeforeItsMessage();
      generator_.CountUnstarted("grpc", status);
      return new EndedReactor(ToGrpcStatus(status));
    }
    return GenerateReactor::Start(generator_, callers_, stuck_, context, request, std::move(codec));
  }

  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override {
    return Answer<v1::TokenizeRequest>(
        context, *request, response,
        [this](const v1::TokenizeRequest& message) {
          return generator_.validator().CheckTokenize(message);
        },
        [this](const v1::TokenizeRequest& message) -> absl::StatusOr<v1::TokenizeResponse> {
          absl::StatusOr<std::vector<int32_t>> ids = generator_.validator().TokenizePrompt(message);
          if (!ids.ok()) return ids.status();
          v1::TokenizeResponse answer;
          answer.mutable_ids()->Assign(ids->begin(), ids->end());
          return answer;
        });
  }

  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override {
    return Answer<v1::DetokenizeRequest>(
        context, *request, response,
        [this](const v1::DetokenizeRequest& message) {
          return generator_.validator().CheckDetokenize(message);
        },
        [this](const v1::DetokenizeRequest& message) -> absl::StatusOr<v1::DetokenizeResponse> {
          v1::DetokenizeResponse answer;
          answer.set_text(generator_.tokenizer().Decode(
              {message.ids().data(), static_cast<size_t>(message.ids_size())},
              !message.show_special_tokens()));
          return answer;
        });
  }

  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override {
    v1::GetModelRequest message;
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    absl::Status status = callers_.TenantOf(*context).status();
    if (status.ok()) status = ParseBuffer(*request, message);
    if (status.ok()) *response = SerializeBuffer(model_);
    reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }

  GrpcCallers& callers() { return callers_; }

 private:
  // A unary call: parsed and checked here, worked on by a tokenising thread. gRPC keeps context and
  // response until Finish.
  template <typename Request, typename Check, typename Work>
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer& bytes, grpc::ByteBuffer* response,
                                   const Check& check, Work work) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    auto request = std::make_shared<Request>();
    const absl::StatusOr<std::string> tenant = callers_.TenantOf(*context);
    absl::Status status = tenant.status();
    if (status.ok()) status = ParseBuffer(bytes, *request);
    if (status.ok()) status = check(*request);
    if (status.ok()) {
      const bool posted = generator_.PostTokenizing(
          bytes.Length(),
          [reactor, context, response, request, work = std::move(work)] {
            if (context->IsCancelled()) {
              reactor->Finish(grpc::Status::CANCELLED);
              return;
            }
            auto answer = work(*request);
            if (answer.ok()) *response = SerializeBuffer(*answer);
            reactor->Finish(ToGrpcStatus(answer.status()));
          },
          *tenant);
      if (posted) return reactor;
      status = generator_.Busy();
    }
    reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }

  Generator& generator_;
  GrpcCallers callers_;
  const v1::GetModelResponse model_;
  StuckStreams stuck_;
};

InferenceService::InferenceService(Generator& generator, v1::GetModelResponse model,
                                   std::shared_ptr<ApiKeys> keys)
    : impl_(std::make_unique<Impl>(generator, std::move(model), std::move(keys))) {}
InferenceService::~InferenceService() = default;

grpc::Service& InferenceService::service() { return *impl_; }

GrpcCallers& InferenceService::callers() { return impl_->callers(); }
grpc::ServerWriteReactor<grpc::ByteBuffer>* InferenceService::Generate(
    grpc::CallbackServerContext& context, const grpc::ByteBuffer& request,
    std::unique_ptr<GenerateCodec> codec) {
  return impl_->Generate(context, request, std::move(codec));
}

}  // namespace winnow::server
