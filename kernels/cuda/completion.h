// Completion (kernels/completion.h) on the device: what the mid tokens that were not chosen are
// estimated to give, from summaries of log-features (kernels/feature_map.h).
//
//   key map, query map   folded as feature_map.h says, float32; PackFeatureMap makes them
//   summaries            as retrieval.h's Summary: per KV head SummaryFloats(F, d) floats
//   d 64, 80, 96 or 128; inner width and F up to 128, multiples of 4; G up to 32
//
// Order. Tokens enter a summary one after the other in ascending order, so its bits do not depend
// on how many entered at a time. The chosen tokens' terms are added in ascending order within at
// most 16 splits whose borders follow from their number, and the splits in order. Exponentials are
// the device's, so summaries agree with the CPU's to rounding, not to the bit.
//
// Cost of a step, per KV head: FeatureMapFlops of the chosen tokens, entering tokens and queries on
// the float32 units (98 KFLOP per token at d 128); the maps' weights come from L2 once per 32
// vectors. The slowest part of the path by far: see kernels/README.md.
#ifndef WINNOW_KERNELS_CUDA_COMPLETION_H_
#define WINNOW_KERNELS_CUDA_COMPLETION_H_

#include "kernels/cuda/device_types.h"

namespace winnow::kernels::cuda {

// g = gate_up[:, :u]' x + .., p = gate_up[:, u:]' x + ..; z = gelu(g) p; out' (x, z) + bias.
struct DeviceFeatureMap {
  const float* gate_up = nullptr;       // [kv_heads][d][2u]
  const float* gate_up_bias = nullptr;  // [kv_heads][2u]
  const float* out = nullptr;           // [kv_heads][d + u][F]
  const float* out_bias = nullptr;      // [kv_heads][F]
  int32_t kv_heads = 0, head_dim = 0, inner = 0, features = 0;
};

// As PackEncoder: `host` is copied to `device` by the caller. features 0 if the shape is refused: another
// than those above, or more than a block's shared memory on this device.
size_t PackedFeatureMapBytes(const FeatureMapWeights& weights);
DeviceFeatureMap PackFeatureMap(const FeatureMapWeights& weights, void* host, void* device);

// Tokens that enter a summary. With `clear` it is made that of no tokens first.
struct DeviceExtension {
  const int32_t* block_table = nullptr;
  float* summary = nullptr;  // [Hkv][SummaryFloats(F, d)]
  TokenRange tokens;
  int32_t clear = 0, unused = 0;
};

// The workspace holds the log-features of all entering tokens, 4 F bytes for each and each head, and from 128 tokens
// on what each 64 of them add: as much again at d 64, twice as much at d 128.
size_t ExtendSummariesWorkspaceBytes(int32_t num_extensions, int32_t max_tokens,
                                     const DeviceFeatureMap& key_map);
[[nodiscard]] cudaError_t ExtendSummaries(const DeviceExtension* extensions, int32_t num_extensions,
                                          int32_t max_tokens, const void* pool,
                                          const KvLayout& layout, const DeviceFeatureMap& key_map,
                                          void* workspace, cudaStream_t stream);

struct CompletionShape {
  int32_t num_queries = 0;
  int32_t group = 0;
  KvLayout layout;
  int32_t max_chosen = 0;  // no list has more chosen rows
};

size_t CompleteStatesWorkspaceBytes(const CompletionShape& shape, const DeviceFeatureMap& key_map);

// Merges into states [num_queries][H][d + 2] what summaries[i] less the chosen rows of lists
// [num_queries][Hkv] gives. summaries[i] (device pointers in device memory) is of query i's mid;
// where a mid is empty or all of it is chosen, states keep their bits.
[[nodiscard]] cudaError_t CompleteStates(const CompletionShape& shape, const float* q,
                                         int64_t q_stride, const DeviceQuery* queries,
                                         const RowList* lists, const float* const* summaries,
                                         const DeviceFeatureMap& key_map,
                                         const DeviceFeatureMap& query_map, float* states,
                                         void* workspace, cudaStream_t stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_COMPLETION_H_
