// The end of `winnow serve`: it waits for what ends it, and then goes without losing a call that it has taken.
#ifndef WINNOW_SERVER_DRAIN_H_
#define WINNOW_SERVER_DRAIN_H_

#include <atomic>
#include <functional>
#include <thread>

#include "engine/schedule/engine.h"
#include "server/config.h"
#include "server/generator.h"
#include "server/grpc_server.h"
#include "server/http/api.h"
#include "server/http/http_server.h"
#include "server/log.h"
#include "server/signals.h"
#include "server/vllm/vllm_service.h"

namespace winnow::server {

// The front ends that serve clients: gRPC always, HTTP unless it is off.
struct FrontEnds {
  GrpcServer& grpc;
  HttpApi& api;
  HttpServer* http;   // null: off
  VllmService* vllm;  // null: this build has none

  int http_port() const { return http == nullptr ? 0 : http->port(); }

  // gRPC's health comes last, because its watchers hear of it at once: what they ask elsewhere says the same.
  void SetServing(bool serving) {
    api.SetServing(serving);
    if (vllm != nullptr) vllm->SetServing(serving);
    grpc.SetServing(serving);
  }
  void BeginDrain() {
    if (vllm != nullptr) vllm->SetServing(false);
    api.BeginDrain();
    if (http != nullptr) http->BeginDrain();
    grpc.BeginDrain();
  }
};

// Waits for a signal or the engine's failure, then drains: health says NOT_SERVING at once, new
// calls are refused after the delay, running ones may end within the grace, the rest is cut. A second
// signal exits without ceremony. SIGHUP calls `reload`. `leaving`: set for the delay, if there is one. Returns the exit code.
int WaitAndDrain(const ServeConfig& config, Log& log, Signals& signals, engine::Engine& engine,
                 std::jthread& engine_thread, Generator& generator, FrontEnds& front_ends,
                 const std::atomic<bool>& listener_failed, const std::atomic<bool>& drain_asked,
                 std::atomic<bool>& leaving, const std::function<void()>& reload);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_DRAIN_H_
