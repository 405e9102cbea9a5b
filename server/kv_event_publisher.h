// KV events on ZMQ, as vLLM publishes them and llm-d, Dynamo and Ray read them (docs/router.md has
// the format).
//
//   PUB     [topic][number, 8 bytes big-endian][msgpack batch], as batches come
//   ROUTER  a reader asks ["", number]; it gets every batch that is kept from there on, and then an end marker
//
// Events are of all tenants: the first block of a chain has its tenant's salt among the extra keys,
// an opaque one. Nobody waits for readers: ZMQ drops what one does not take, and its numbers show
// the gap, which the ROUTER socket mends.
//
// Threads: two of its own, one for each socket.
#ifndef WINNOW_SERVER_KV_EVENT_PUBLISHER_H_
#define WINNOW_SERVER_KV_EVENT_PUBLISHER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/kv/kv_event_log.h"

namespace winnow::server {

class KvEventPublisher {
 public:
  struct Options {
    std::string address;  // HOST:PORT; port 0: any free one
    std::string replay;   // the same; "": none
    std::string topic;
  };

  // `log` must outlive the publisher. Unavailable: an address is taken or cannot be bound.
  static absl::StatusOr<std::unique_ptr<KvEventPublisher>> Start(const Options& options,
                                                                 const engine::KvEventLog& log);
  // Sends first all that is in the log.
  ~KvEventPublisher();

  int port() const;
  int replay_port() const;  // 0: none
  // Batches that were not published, because the log kept them no longer.
  uint64_t missed() const;

 private:
  class Impl;
  explicit KvEventPublisher(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The batch in msgpack: [seconds, [event, ...], rank 0], events as maps.
std::string EncodeKvEventBatch(const engine::KvEventBatch& batch);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_KV_EVENT_PUBLISHER_H_
