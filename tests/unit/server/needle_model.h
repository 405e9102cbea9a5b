// The small trained model of the project, loaded once for all tests of this binary.
#ifndef WINNOW_TESTS_UNIT_SERVER_NEEDLE_MODEL_H_
#define WINNOW_TESTS_UNIT_SERVER_NEEDLE_MODEL_H_

#include <memory>
#include <string>

#include "engine/model_loader.h"
#include "server/validate.h"
#include "tests/unit/test_paths.h"

namespace winnow::server {

inline std::string NeedleDir() { return SourcePath("models/needle-5m"); }

// With room for a few sequences of a context that is short enough to be filled by a test.
inline constexpr int32_t kNeedleContext = 1024;

inline engine::LoadedModel& Needle() {
  static engine::LoadedModel& model = *[] {
    engine::ModelOptions options;
    options.max_context = kNeedleContext;
    options.num_threads = 1;
    options.max_batch_tokens = 256;
    options.max_batch_logits = 32;
    options.kv_bytes = 24 << 20;
    options.retrieval.artifact = "none";
    options.retrieval.index = "quest,lsh";
    options.retrieval.probe_interval = 4;
    auto loaded = engine::LoadModel(NeedleDir(), options);
    if (!loaded.ok()) {
      fprintf(stderr, "%s\n", std::string(loaded.status().message()).c_str());
      abort();
    }
    return loaded->release();
  }();
  return model;
}

inline RequestLimits NeedleLimits() {
  RequestLimits limits;
  limits.vocab_size = Needle().decoder->vocab_size();
  limits.max_context = kNeedleContext;
  limits.max_prompt_bytes = 16384;
  limits.default_max_tokens = 64;
  limits.check_policy = [](const engine::AttentionPolicy& policy) {
    return Needle().decoder->CheckPolicy(policy);
  };
  limits.eos_token_ids = Needle().config.eos_token_ids;
  return limits;
}

}  // namespace winnow::server

#endif  // WINNOW_TESTS_UNIT_SERVER_NEEDLE_MODEL_H_
