// vllm.grpc.engine.VllmEngine: the gRPC service by which routers speak to engines (docs/router.md),
// on the same port as winnow.v1. Its protos are another project's and fetched by the build; a build
// without them has no service, and says so.
//
// The service's calls are those of winnow.v1 in other words: Generate goes through the same
// validator, queue and limits. What the protos offer and winnow lacks ends with Unimplemented or
// InvalidArgument and is named.
#ifndef WINNOW_SERVER_VLLM_VLLM_SERVICE_H_
#define WINNOW_SERVER_VLLM_VLLM_SERVICE_H_

#include <functional>
#include <memory>
#include <string>

#include "engine/kv/kv_event_log.h"
#include "engine/schedule/engine_stats.h"
#include "server/inference_service.h"

namespace winnow::server {

inline constexpr char kVllmServiceName[] = "vllm.grpc.engine.VllmEngine";

// The served model, beside GetModel's description. It does not change.
struct VllmModel {
  v1::GetModelResponse description;
  // A model's directory, whose tokenizer is handed out; a GGUF file has none to hand out.
  std::string path;
  int32_t bos_token_id = -1;  // -1: none
  int32_t block_tokens = 0;
  int32_t max_running = 0;
};

class VllmService {
 public:
  virtual ~VllmService() = default;

  // To be registered with the server of the inference service, which must be shut down before this
  // goes.
  virtual grpc::Service& service() = 0;

  // HealthCheck's answer; false until the first call.
  virtual void SetServing(bool serving) = 0;
};

// Null: the build had no protos. References must outlive the service; `stats` is called on any
// thread. `kv_events`: what SubscribeKvEvents tells; null: it is Unimplemented.
std::unique_ptr<VllmService> MakeVllmService(VllmModel model, InferenceService& inference,
                                             Generator& generator,
                                             std::function<engine::EngineStats()> stats,
                                             const engine::KvEventLog* kv_events);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_VLLM_VLLM_SERVICE_H_
