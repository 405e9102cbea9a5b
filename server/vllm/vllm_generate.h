// vllm.grpc.engine's Generate in terms of winnow's: its request becomes a winnow.v1 message and
// goes through the same validator as all others; what comes back becomes chunks and, for each
// choice, one message that is complete.
//
// Options that winnow does not have are InvalidArgument and named: log-probabilities of
// the prompt, truncated prompts, constraints, images, KV that another server made, ranks of data
// parallelism. Numbers that proto3 cannot tell from absent ones (top_p 0, n 0) are absent: the
// server's default holds.
#ifndef WINNOW_SERVER_VLLM_VLLM_GENERATE_H_
#define WINNOW_SERVER_VLLM_VLLM_GENERATE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_map.h"
#include "absl/synchronization/mutex.h"
#include "server/inference_service.h"

namespace winnow::server {

// Open calls by what their clients call them, so that Abort finds them. A name is a tenant's own.
// Any thread.
class OpenRequests {
 public:
  void Add(const std::string& tenant, const std::string& name,
           const std::shared_ptr<Generation>& generation);
  void Remove(const std::string& tenant, const std::string& name,
              const std::weak_ptr<Generation>& generation);
  // Cancels all that have the name; how many there were.
  int Abort(const std::string& tenant, const std::string& name);

 private:
  using Key = std::pair<std::string, std::string>;
  absl::Mutex mutex_;
  // Nobody keeps clients from using a name twice.
  absl::btree_multimap<Key, std::weak_ptr<Generation>> open_ ABSL_GUARDED_BY(mutex_);
};

// Both must outlive the codec. `end_tokens`: the model's own, which are no match of what the client
// asked to stop at.
std::unique_ptr<GenerateCodec> MakeVllmGenerateCodec(OpenRequests& open,
                                                     const std::vector<int32_t>& end_tokens);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_VLLM_VLLM_GENERATE_H_
