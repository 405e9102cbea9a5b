// Makes the plan of a model's KV (engine/kv/kv_plan.h). Sizes and placements are decided here and nowhere else: the
// decoder allocates by the plan, CheckMemory counts by it, `serve` logs it and `winnow plan` prints it.
#ifndef WINNOW_ENGINE_KV_PLANNING_H_
#define WINNOW_ENGINE_KV_PLANNING_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "engine/decoder_options.h"
#include "engine/kv/kv_plan.h"
#include "engine/model/model_config.h"

namespace winnow::engine {

// InvalidArgument: an option out of range, or memory that is too little for what one step needs, by the option's name.
absl::StatusOr<KvPlan> PlanKv(const ModelConfig& config, const DecoderOptions& options);

// Where KV lies in the host's memory, layers before this one stay on the device: the default policy leaves them dense.
int32_t FirstSharedLayer();
// Blocks that memory of such options holds, with those in the store, before any bound of numbers.
int64_t NumKvBlocks(const ModelConfig& config, const DecoderOptions& options);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_PLANNING_H_
