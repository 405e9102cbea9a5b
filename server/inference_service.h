// winnow.v1.InferenceService over gRPC: bytes in and out, everything else is the generator's.
//
// Life of a Generate stream (GenerateReactor in the .cc):
//   1. gRPC calls Generate with the request's bytes. They are parsed here, not by gRPC, so that a
//      bad string is INVALID_ARGUMENT with its path (server/wire.h). A reactor starts a generation.
//   2. The generation calls on_ready on its delivering thread. Pump takes one item: a message is
//      written, the end finishes the stream. At most one write is in flight: while it is, nothing
//      is taken, the generation's bounded queues fill, and the engine pauses the sequence.
//   3. OnWriteDone pumps again.
//   4. OnCancel (the client went, the deadline passed, the server was shut down) cancels the
//      generation, whose end then finishes the stream.
//      A write that does not complete within the slow reader's timeout cancels the stream, too: the
//      engine has no say in one whose sequences are finished.
//   5. OnDone closes the generation. The reactor lives until the engine has let go of it, too.
//
// Threads: gRPC's polling threads parse, check and write; tokenising, which takes milliseconds for
// a long prompt, runs on the generator's tokenising threads, for Tokenize and Detokenize as well.
#ifndef WINNOW_SERVER_INFERENCE_SERVICE_H_
#define WINNOW_SERVER_INFERENCE_SERVICE_H_

#include <grpcpp/support/byte_buffer.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/generator.h"
#include "server/grpc_callers.h"

namespace grpc {
class CallbackServerContext;
class Service;
template <typename Message>
class ServerWriteReactor;
}  // namespace grpc

namespace winnow::server {

// How another service's Generate looks on the wire. One object for one call; one thread at a time.
class GenerateCodec {
 public:
  virtual ~GenerateCodec() = default;
  // First, once. What cannot be read or honoured ends the call with this status. May set
  // `info.client_request_id`.
  virtual absl::Status Read(const grpc::ByteBuffer& bytes, v1::GenerateRequest& message,
                            CallInfo& info) = 0;
  // The call has a generation, also where it was refused. To keep it alive from here would be a circle.
  virtual void Started(const std::shared_ptr<Generation>& generation, const std::string& tenant) {}
  // The messages that tell it to the client; may be none.
  virtual std::vector<grpc::ByteBuffer> Write(v1::GenerateResponse message) = 0;
  // The call's end: the same status, perhaps in the client's words.
  virtual absl::Status End(absl::Status status) { return status; }
};

class InferenceService {
 public:
  // `generator` must outlive the service; `model` is what GetModel answers. `keys` may be null: nobody is
  // asked for one.
  InferenceService(Generator& generator, v1::GetModelResponse model,
                   std::shared_ptr<ApiKeys> keys = nullptr);
  ~InferenceService();

  // To be registered with one server, which must be shut down before the service is destroyed.
  grpc::Service& service();
  // The tenants of calls, for other services of the same server, too.
  GrpcCallers& callers();

  // A call of another service on the same server that generates: everything but the messages is as in Generate.
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext& context,
                                                       const grpc::ByteBuffer& request,
                                                       std::unique_ptr<GenerateCodec> codec);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_INFERENCE_SERVICE_H_
