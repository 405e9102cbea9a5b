#include "server/prefix_service.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <utility>

#include "server/grpc_call.h"
#include "server/status.h"
#include "winnow/v1/prefix.grpc.pb.h"

namespace winnow::server {

using V1 = v1::PrefixService;
using RawService = V1::WithRawCallbackMethod_PutPrefix<V1::WithRawCallbackMethod_ListPrefixes<
    V1::WithRawCallbackMethod_PinPrefix<V1::WithRawCallbackMethod_DeletePrefix<V1::Service>>>>;

namespace {

class PutReactor final : public grpc::ServerUnaryReactor {
 public:
  // Nothing of gRPC's comes before the method that calls this has returned, so `put_` is set in time.
  void Start(PrefixCalls& calls, v1::PutPrefixRequest request, CallInfo info, size_t bytes,
             grpc::ByteBuffer* response) {
    put_ = calls.StartPut(std::move(request), std::move(info), bytes,
                          [this, response](absl::StatusOr<v1::PutPrefixResponse> result) {
                            if (result.ok()) *response = SerializeBuffer(*result);
                            Finish(ToGrpcStatus(result.status()));
                          });
  }
  void OnCancel() override { put_->Cancel(); }
  void OnDone() override {
    put_->Close();
    delete this;
  }

 private:
  std::shared_ptr<PrefixCalls::Put> put_;
};

}  // namespace

class PrefixService::Impl final : public RawService {
 public:
  Impl(PrefixCalls& calls, const GrpcCallers& callers) : calls_(calls), callers_(callers) {}

  grpc::ServerUnaryReactor* PutPrefix(grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* bytes,
                                      grpc::ByteBuffer* response) override {
    CallInfo info;
    info.transport = "grpc";
    info.refused = callers_.Identify(*context, info);
    info.deadline = DeadlineOf(*context, calls_.generator().clock());
    info.traceparent = TraceParentOf(*context);
    v1::PutPrefixRequest request;
    if (info.refused.ok()) info.refused = ParseBuffer(*bytes, request);
    auto* const reactor = new PutReactor;
    reactor->Start(calls_, std::move(request), std::move(info), bytes->Length(), response);
    return reactor;
  }
  grpc::ServerUnaryReactor* ListPrefixes(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* bytes,
                                         grpc::ByteBuffer* response) override {
    return Call<v1::ListPrefixesRequest, v1::ListPrefixesResponse>(context, *bytes, response,
                                                                   &PrefixCalls::List);
  }
  grpc::ServerUnaryReactor* PinPrefix(grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* bytes,
                                      grpc::ByteBuffer* response) override {
    return Call<v1::PinPrefixRequest, v1::PinPrefixResponse>(context, *bytes, response,
                                                             &PrefixCalls::Pin);
  }
  grpc::ServerUnaryReactor* DeletePrefix(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* bytes,
                                         grpc::ByteBuffer* response) override {
    return Call<v1::DeletePrefixRequest, v1::DeletePrefixResponse>(context, *bytes, response,
                                                                   &PrefixCalls::Delete);
  }

 private:
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Call(grpc::CallbackServerContext* context,
                                 const grpc::ByteBuffer& bytes, grpc::ByteBuffer* response,
                                 void (PrefixCalls::*call)(const CallInfo&, const Request&,
                                                           PrefixCalls::Answer<Response>)) {
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    CallInfo info;
    absl::Status status = callers_.Identify(*context, info);
    Request request;
    if (status.ok()) status = ParseBuffer(bytes, request);
    if (!status.ok()) {
      reactor->Finish(ToGrpcStatus(status));
      return reactor;
    }
    (calls_.*call)(info, request, [reactor, response](absl::StatusOr<Response> result) {
      if (result.ok()) *response = SerializeBuffer(*result);
      reactor->Finish(ToGrpcStatus(result.status()));
    });
    return reactor;
  }

  PrefixCalls& calls_;
  const GrpcCallers& callers_;
};

PrefixService::PrefixService(PrefixCalls& calls, const GrpcCallers& callers)
    : impl_(std::make_unique<Impl>(calls, callers)) {}
PrefixService::~PrefixService() = default;

grpc::Service& PrefixService::service() { return *impl_; }

}  // namespace winnow::server
