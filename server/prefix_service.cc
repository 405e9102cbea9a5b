#include "server/prefix_service.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <utility>

#include "kernels/check.h"
#include "server/executor.h"
#include "server/grpc_call.h"
#include "server/status.h"
#include "server/strings.h"
#include "winnow/v1/prefix.grpc.pb.h"

namespace winnow::server {
namespace {

constexpr size_t kMaxPrefixNameBytes = 128;
constexpr int64_t kMaxTtlSeconds = 31536000;
// Answers of the engine thread that are not written down yet, and orders on their way to it.
constexpr int kMaxOrders = 512;

bool IsPrefixName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxPrefixNameBytes &&
         name.find_first_not_of(
             "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == name.npos;
}

void CheckName(std::string_view name, Violations& violations) {
  if (!IsPrefixName(name)) violations.Add("name", "must be 1 to 128 of [A-Za-z0-9._-]");
}

void CheckTtl(int64_t seconds, Violations& violations) {
  if (seconds < 0 || seconds > kMaxTtlSeconds) {
    violations.Add("ttl_seconds", "must be 0 to 31536000");
  }
}

v1::Prefix ToProto(const engine::PrefixInfo& info) {
  v1::Prefix out;
  out.set_name(info.name);
  out.set_tokens(info.tokens);
  out.set_blocks(info.blocks);
  if (info.swept) {
    out.set_fast_blocks(info.fast_blocks);
    out.set_stored_blocks(info.stored_blocks);
    out.set_pinned_blocks(info.pinned_blocks);
  }
  out.set_pinned(info.pinned);
  if (info.left.has_value()) {
    out.set_expires_in_seconds(std::chrono::duration<double>(*info.left).count());
  }
  return out;
}

// The table's answer in the words of prefix.proto.
absl::Status FromTable(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kNotFound:
      return ErrorWithReason(status.code(), "PREFIX_NOT_FOUND", "no such prefix");
    case absl::StatusCode::kFailedPrecondition:
      return ErrorWithReason(status.code(), "PREFIX_CACHE_OFF",
                             "the server keeps no prefixes: it runs with --prefix-cache off");
    case absl::StatusCode::kResourceExhausted:
      return ErrorWithReason(status.code(), "TOO_MANY_PREFIXES", ToStd(status.message()));
    case absl::StatusCode::kInvalidArgument:
      return InvalidField("prompt", ToStd(status.message()));
    default:
      return status;
  }
}

absl::Status Stopped() {
  return ErrorWithReason(absl::StatusCode::kUnavailable, "DRAINING", "the server has stopped");
}

}  // namespace

using V1 = v1::PrefixService;
using RawService = V1::WithRawCallbackMethod_PutPrefix<V1::WithRawCallbackMethod_ListPrefixes<
    V1::WithRawCallbackMethod_PinPrefix<V1::WithRawCallbackMethod_DeletePrefix<V1::Service>>>>;

class PrefixService::Impl final : public RawService {
 public:
  using PrefixResult = absl::StatusOr<engine::PrefixInfo>;
  using Order = std::function<PrefixResult(engine::PrefixTable&)>;
  using Done = std::function<void(PrefixResult)>;

  Impl(Generator& generator, engine::Engine& engine, const GrpcCallers& callers,
       std::optional<PrefixFile> file)
      : generator_(generator), engine_(engine), callers_(callers), file_(std::move(file)) {}

  grpc::ServerUnaryReactor* PutPrefix(grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListPrefixes(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* PinPrefix(grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* DeletePrefix(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* response) override;

  // Lets the engine thread do it, writes down what there is then if it `changes` something, and says so on the service's
  // thread. Once, in any case.
  void Ask(Order order, Done done, bool changes) {
    if (orders_.fetch_add(1) >= kMaxOrders) {
      --orders_;
      return done(generator_.Busy());
    }
    const bool posted =
        engine_.Post([this, order = std::move(order), done, changes](engine::PrefixTable* table) {
          if (table == nullptr) return Finish(Stopped(), std::nullopt, done);
          PrefixResult result = order(*table);
          std::optional<std::vector<engine::SavedPrefix>> all;
          if (result.ok() && changes && file_.has_value()) all = table->Save();
          Finish(std::move(result), std::move(all), done);
        });
    if (posted) return;
    --orders_;
    done(generator_.Busy());
  }

  absl::Status CheckCache() const {
    return engine_.prefix_model().has_value() ? absl::OkStatus()
                                              : FromTable(absl::FailedPreconditionError(""));
  }
  Generator& generator() { return generator_; }
  const GrpcCallers& callers() const { return callers_; }

 private:
  class PutCall;

  void Finish(PrefixResult result, std::optional<std::vector<engine::SavedPrefix>> all,
              const Done& done) {
    const bool posted =
        writer_.Post([this, result = std::move(result), all = std::move(all), done] {
          absl::Status status = result.status();
          if (all.has_value()) {
            if (!file_->Save(*all).ok()) {
              status = ErrorWithReason(absl::StatusCode::kUnavailable, "STORE_FAILED",
                                       "the prefix holds until the server ends; it could not be "
                                       "written beside the store");
            }
          } else {
            status = FromTable(status);
          }
          --orders_;
          done(status.ok() ? result : PrefixResult(status));
        });
    WINNOW_CHECK(posted);  // orders_ bounds them
  }

  // A call that only asks the engine thread. Null: it has ended with what is wrong.
  template <typename Request, typename Check>
  std::shared_ptr<Request> Read(grpc::CallbackServerContext* context, const grpc::ByteBuffer& bytes,
                                grpc::ServerUnaryReactor* reactor, std::string* tenant,
                                const Check& check) {
    auto request = std::make_shared<Request>();
    absl::StatusOr<std::string> caller = callers_.TenantOf(*context);
    absl::Status status = caller.status();
    if (status.ok()) status = CheckCache();
    if (status.ok()) status = ParseBuffer(bytes, *request);
    if (status.ok()) {
      Violations violations;
      check(*request, violations);
      status = violations.ToStatus();
    }
    if (status.ok()) {
      *tenant = *std::move(caller);
      return request;
    }
    reactor->Finish(ToGrpcStatus(status));
    return nullptr;
  }

  Generator& generator_;
  engine::Engine& engine_;
  const GrpcCallers& callers_;
  const std::optional<PrefixFile> file_;
  std::atomic<int> orders_ = 0;
  Executor writer_{1, kMaxOrders + 1};  // last: joined while the rest is there
};

// PutPrefix: ids, then a generation of one token, then the name.
class PrefixService::Impl::PutCall final : public grpc::ServerUnaryReactor,
                                           public std::enable_shared_from_this<PutCall> {
 public:
  static PutCall* Start(Impl& service, grpc::CallbackServerContext& context,
                        const grpc::ByteBuffer& bytes, grpc::ByteBuffer* response) {
    auto call = std::make_shared<PutCall>(service, context, response);
    call->self_ = call;
    if (absl::Status status = call->Begin(bytes); !status.ok()) call->End(status);
    return call.get();
  }

  PutCall(Impl& service, grpc::CallbackServerContext& context, grpc::ByteBuffer* response)
      : service_(service), context_(context), response_(response) {}

  void OnCancel() override {
    std::shared_ptr<Generation> generation;
    {
      absl::MutexLock lock(&mutex_);
      cancelled_ = true;
      generation = generation_;
    }
    if (generation != nullptr) generation->Cancel();
  }

  void OnDone() override {
    const std::shared_ptr<PutCall> self = std::move(self_);
    std::shared_ptr<Generation> generation;
    {
      absl::MutexLock lock(&mutex_);
      generation = std::move(generation_);
    }
    if (generation != nullptr) generation->Close();
  }

 private:
  absl::Status Begin(const grpc::ByteBuffer& bytes) {
    absl::StatusOr<std::string> tenant = service_.callers().TenantOf(context_);
    if (!tenant.ok()) return tenant.status();
    tenant_ = *std::move(tenant);
    if (absl::Status status = service_.CheckCache(); !status.ok()) return status;
    if (absl::Status status = ParseBuffer(bytes, request_); !status.ok()) return status;
    Violations violations;
    CheckName(request_.name(), violations);
    CheckTtl(request_.ttl_seconds(), violations);
    if (request_.prompt_case() == v1::PutPrefixRequest::PROMPT_NOT_SET) {
      violations.Add("prompt", "one of text, tokens and chat must be set");
    }
    if (absl::Status status = violations.ToStatus(); !status.ok()) return status;
    if (request_.has_tokens()) {
      Generate();
      return absl::OkStatus();
    }
    v1::TokenizeRequest prompt;
    if (request_.has_text()) *prompt.mutable_text() = request_.text();
    if (request_.has_chat()) {
      *prompt.mutable_chat() = request_.chat();
      if (!prompt.chat().has_add_generation_prompt()) {
        prompt.mutable_chat()->set_add_generation_prompt(false);
      }
    }
    const Validator& validator = service_.generator().validator();
    if (absl::Status status = validator.CheckTokenize(prompt); !status.ok()) return status;
    auto work = std::make_shared<v1::TokenizeRequest>(std::move(prompt));
    const bool posted = service_.generator().PostTokenizing(
        bytes.Length(),
        [self = shared_from_this(), work, &validator] {
          absl::StatusOr<std::vector<int32_t>> ids = validator.TokenizePrompt(*work);
          if (!ids.ok()) return self->End(ids.status());
          self->request_.mutable_tokens()->mutable_ids()->Assign(ids->begin(), ids->end());
          self->Generate();
        },
        tenant_);
    return posted ? absl::OkStatus() : service_.generator().Busy();
  }

  // The request has its ids.
  void Generate() {
    v1::GenerateRequest message;
    *message.mutable_tokens() = request_.tokens();
    message.mutable_stopping()->set_max_tokens(1);
    message.mutable_stopping()->set_ignore_eos(true);
    message.mutable_sampling()->set_temperature(0);
    message.set_policy("dense");
    CallInfo info;
    info.transport = "grpc";
    info.tenant = tenant_;
    info.deadline = DeadlineOf(context_, service_.generator().clock());
    info.traceparent = TraceParentOf(context_);
    auto generation = service_.generator().Start(std::move(message), std::move(info),
                                                 [self = shared_from_this()] { self->Pump(); });
    bool cancelled = false;
    {
      absl::MutexLock lock(&mutex_);
      generation_ = generation;
      cancelled = cancelled_;
    }
    if (cancelled) generation->Cancel();
    Pump();
  }

  void Pump() {
    std::optional<absl::Status> end;
    {
      absl::MutexLock lock(&mutex_);
      if (generation_ == nullptr || ended_) return;
      while (!end.has_value()) {
        Generation::Item item = generation_->Take();
        if (auto* message = std::get_if<v1::GenerateResponse>(&item)) {
          if (message->has_finish()) usage_ = message->finish().usage();
        } else if (auto* last = std::get_if<Generation::End>(&item)) {
          end = std::move(last->status);
        } else {
          return;
        }
      }
      ended_ = true;
    }
    if (!end->ok()) return End(*end);
    service_.Ask(
        [self = shared_from_this()](engine::PrefixTable& table) {
          const v1::PutPrefixRequest& request = self->request_;
          const auto& ids = request.tokens().ids();
          return table.Put(
              self->tenant_, request.name(), {ids.data(), static_cast<size_t>(ids.size())},
              request.pinned(),
              request.ttl_seconds() == 0
                  ? std::nullopt
                  : std::optional<engine::Duration>(std::chrono::seconds(request.ttl_seconds())));
        },
        [self = shared_from_this()](PrefixResult result) {
          if (!result.ok()) return self->End(result.status());
          v1::PutPrefixResponse answer;
          *answer.mutable_prefix() = ToProto(*result);
          *answer.mutable_usage() = self->usage_;
          *self->response_ = SerializeBuffer(answer);
          self->End(absl::OkStatus());
        },
        /*changes=*/true);
  }

  void End(const absl::Status& status) { Finish(ToGrpcStatus(status)); }

  Impl& service_;
  grpc::CallbackServerContext& context_;
  grpc::ByteBuffer* const response_;
  std::shared_ptr<PutCall> self_;  // until OnDone
  std::string tenant_;
  v1::PutPrefixRequest request_;
  v1::Usage usage_;
  absl::Mutex mutex_;
  std::shared_ptr<Generation> generation_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

grpc::ServerUnaryReactor* PrefixService::Impl::PutPrefix(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request,
                                                         grpc::ByteBuffer* response) {
  return PutCall::Start(*this, *context, *request, response);
}

grpc::ServerUnaryReactor* PrefixService::Impl::ListPrefixes(grpc::CallbackServerContext* context,
                                                            const grpc::ByteBuffer* bytes,
                                                            grpc::ByteBuffer* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  std::string tenant;
  const auto request = Read<v1::ListPrefixesRequest>(
      context, *bytes, reactor, &tenant,
      [](const v1::ListPrefixesRequest& message, Violations& violations) {
        if (!message.name().empty()) CheckName(message.name(), violations);
      });
  if (request == nullptr) return reactor;
  auto found = std::make_shared<std::vector<engine::PrefixInfo>>();
  Ask(
      [found, tenant](engine::PrefixTable& table) -> PrefixResult {
        *found = table.List(tenant);
        return engine::PrefixInfo();
      },
      [=](const PrefixResult& result) {
        v1::ListPrefixesResponse answer;
        for (const engine::PrefixInfo& info : *found) {
          if (request->name().empty() || request->name() == info.name) {
            *answer.add_prefixes() = ToProto(info);
          }
        }
        if (result.ok()) *response = SerializeBuffer(answer);
        reactor->Finish(ToGrpcStatus(result.status()));
      },
      /*changes=*/false);
  return reactor;
}

grpc::ServerUnaryReactor* PrefixService::Impl::PinPrefix(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* bytes,
                                                         grpc::ByteBuffer* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  std::string tenant;
  const auto request =
      Read<v1::PinPrefixRequest>(context, *bytes, reactor, &tenant,
                                 [](const v1::PinPrefixRequest& message, Violations& violations) {
                                   CheckName(message.name(), violations);
                                   CheckTtl(message.ttl_seconds(), violations);
                                 });
  if (request == nullptr) return reactor;
  Ask(
      [request, tenant](engine::PrefixTable& table) {
        std::optional<bool> pinned;
        if (request->has_pinned()) pinned = request->pinned();
        std::optional<engine::Duration> ttl;
        if (request->has_ttl_seconds()) ttl = std::chrono::seconds(request->ttl_seconds());
        return table.Change(tenant, request->name(), pinned, ttl);
      },
      [reactor, response](const PrefixResult& result) {
        if (result.ok()) {
          v1::PinPrefixResponse answer;
          *answer.mutable_prefix() = ToProto(*result);
          *response = SerializeBuffer(answer);
        }
        reactor->Finish(ToGrpcStatus(result.status()));
      },
      /*changes=*/true);
  return reactor;
}

grpc::ServerUnaryReactor* PrefixService::Impl::DeletePrefix(grpc::CallbackServerContext* context,
                                                            const grpc::ByteBuffer* bytes,
                                                            grpc::ByteBuffer* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  std::string tenant;
  const auto request = Read<v1::DeletePrefixRequest>(
      context, *bytes, reactor, &tenant,
      [](const v1::DeletePrefixRequest& message, Violations& violations) {
        CheckName(message.name(), violations);
      });
  if (request == nullptr) return reactor;
  Ask(
      [request, tenant](engine::PrefixTable& table) -> PrefixResult {
        const absl::Status status = table.Delete(tenant, request->name());
        return status.ok() ? PrefixResult(engine::PrefixInfo()) : PrefixResult(status);
      },
      [reactor, response](const PrefixResult& result) {
        if (result.ok()) *response = SerializeBuffer(v1::DeletePrefixResponse());
        reactor->Finish(ToGrpcStatus(result.status()));
      },
      /*changes=*/true);
  return reactor;
}

PrefixService::PrefixService(Generator& generator, engine::Engine& engine,
                             const GrpcCallers& callers, std::optional<PrefixFile> file)
    : impl_(std::make_unique<Impl>(generator, engine, callers, std::move(file))) {}
PrefixService::~PrefixService() = default;

grpc::Service& PrefixService::service() { return *impl_; }

}  // namespace winnow::server
