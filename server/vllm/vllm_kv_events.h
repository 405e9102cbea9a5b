// KV events over gRPC: SubscribeKvEvents of vllm.grpc.engine.
//
// A subscriber hears of blocks of its own salt alone (its tenant's or its trust domain's), as if there were no others:
// events have none, because a router knows a request by its tokens, and what it asks for under this tenant will find
// them. Batches that are about others are empty, and keep the numbers without gaps.
//
// Start 0 gives a snapshot of what is stored (nothing, before the first block) and then every
// batch; another start resumes, and is OutOfRange where batches from there on are not kept any
// more. A subscriber that falls behind what is kept ends with DataLoss and asks anew. The engine's
// load rides on each batch, and comes by itself every second.
//
// Threads: one of its own wakes with the log and writes to every stream that has taken its last
// message. A stream that takes nothing for the slow reader's timeout ends.
#ifndef WINNOW_SERVER_VLLM_VLLM_KV_EVENTS_H_
#define WINNOW_SERVER_VLLM_VLLM_KV_EVENTS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "engine/base/clock.h"
#include "engine/kv/kv_event_log.h"
#include "server/vllm/load_meter.h"

namespace grpc {
class CallbackServerContext;
template <typename Message>
class ServerWriteReactor;
}  // namespace grpc
namespace smg::grpc::common {
class KvEventBatch;
class SubscribeKvEventsRequest;
}  // namespace smg::grpc::common

namespace winnow::server {

// Ends the call with this.
::grpc::ServerWriteReactor<smg::grpc::common::KvEventBatch>* RefuseKvEvents(
    const absl::Status& status);

class KvEventStreams {
 public:
  class Impl;  // the .cc's
  // All references must outlive the streams. REQUIRES at the end: no call is open (its server is
  // shut down).
  KvEventStreams(const engine::KvEventLog& log, LoadMeter& load, const engine::Clock& clock,
                 engine::Duration slow_reader_timeout);
  ~KvEventStreams();

  // ResourceExhausted: too many are open. OutOfRange: `request` resumes from what is not kept.
  ::grpc::ServerWriteReactor<smg::grpc::common::KvEventBatch>* Start(
      ::grpc::CallbackServerContext& context, const engine::Digest& salt,
      const smg::grpc::common::SubscribeKvEventsRequest& request);

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_VLLM_VLLM_KV_EVENTS_H_
