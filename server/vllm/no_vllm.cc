// Instead of the service, in a build whose protos could not be fetched (WINNOW_VLLM in
// CMakeLists.txt).
#include "server/vllm/vllm_service.h"

namespace winnow::server {

std::unique_ptr<VllmService> MakeVllmService(VllmModel, InferenceService&, Generator&,
                                             std::function<engine::EngineStats()>,
                                             const engine::KvEventLog*) {
  return nullptr;
}

}  // namespace winnow::server
