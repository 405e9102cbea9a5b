// What a client is told of a request that ended without an answer.
#ifndef WINNOW_SERVER_END_STATUS_H_
#define WINNOW_SERVER_END_STATUS_H_

#include "absl/status/status.h"
#include "engine/schedule/request.h"

namespace winnow::server {

// The status, with its reason (proto/winnow/v1/inference.proto lists them). `engine_failed`: the
// model has failed, for all requests; where it has not, UNAVAILABLE means this request's store.
// REQUIRES: the event is a last one, and no answer.
absl::Status StatusOfEnd(const engine::OutputEvent& event, bool engine_failed);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_END_STATUS_H_
