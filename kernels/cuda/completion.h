// Completion (kernels/completion.h) on the device: what the mid tokens that were not chosen are
// estimated to give, from summaries of log-features (kernels/feature_map.h).
//
//   key map, query map   folded as feature_map.h says; PackFeatureMap makes them
//   summaries            as retrieval.h's Summary: per KV head SummaryFloats(F, d) floats
//   d 64, 80, 96 or 128; inner width and F up to 128, F a multiple of 4; G up to 32
//
// Log-features come from the tensor cores: inputs are bfloat16 as they are, weights and z two bfloat16 each, sums float32.
// So they agree with the reference to about 2^-16 of the terms' size, as plain tf32 would not, and a token's are the same
// bits wherever it is mapped: what is subtracted of a chosen token is what it brought when it entered.
//
// Order. Tokens enter a summary one after the other in ascending order, so its bits do not depend
// on how many entered at a time. The chosen tokens' terms are added in ascending order, 16 at a time, within
// at most 32 splits whose borders follow from their number, and the splits in order. Exponentials are
// the device's, so summaries agree with the CPU's to rounding, not to the bit.
//
// Cost of a step, per KV head: 2.2 times the FeatureMapFlops of the chosen tokens, entering tokens and queries, as bfloat16 on
// the tensor cores; the maps' weights come from L2 once per 64 tokens.
#ifndef WINNOW_KERNELS_CUDA_COMPLETION_H_
#define WINNOW_KERNELS_CUDA_COMPLETION_H_

#include <vector_types.h>

#include "kernels/cuda/device_types.h"

namespace winnow::kernels::cuda {

// g = gate' x + .., p = up' x + ..; z = gelu(g) p; out' (x, z) + bias.
//
// Matrices lie as fragments of the matrix instruction, 16 inputs by 8 outputs, a lane's share 16 bytes: four weights
// rounded to bfloat16, and what that lost of them, rounded again. Inner width and F are padded with zeros.
struct DeviceFeatureMap {
  const uint4* gate_up = nullptr;       // [kv_heads][InnerTiles][gate, up][InputSteps][32]
  const float* gate_up_bias = nullptr;  // [kv_heads][gate, up][InnerTiles * 8]
  const uint4* out = nullptr;           // [kv_heads][FeatureTiles][InputSteps + InnerSteps][32]
  const float* out_bias = nullptr;      // [kv_heads][FeatureTiles * 8]
  int32_t kv_heads = 0, head_dim = 0, inner = 0, features = 0;

  __host__ __device__ int32_t InputSteps() const { return head_dim / 16; }
  __host__ __device__ int32_t InnerSteps() const { return (inner + 15) / 16; }
  __host__ __device__ int32_t InnerTiles() const { return 2 * InnerSteps(); }
  __host__ __device__ int32_t FeatureTiles() const { return (features + 7) / 8; }
  // Of a head.
  __host__ __device__ int32_t GateUpFragments() const { return InnerTiles() * 2 * InputSteps(); }
  __host__ __device__ int32_t OutFragments() const {
    return FeatureTiles() * (InputSteps() + InnerSteps());
  }
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
                                          void* workspace, Stream stream);

struct CompletionShape {
  int32_t num_queries = 0;
  int32_t group = 0;
  KvLayout layout;
  int32_t max_chosen = 0;  // no query and head has more chosen rows
};

// The rows that were chosen: of lists [num_queries][Hkv], or where `lists` is null of `chosen`, whose tokens' rows lie
// in `pool` where the queries' tables say.
struct ChosenRows {
  const RowList* lists = nullptr;
  Selection chosen = {};
  const void* pool = nullptr;
};

size_t CompleteStatesWorkspaceBytes(const CompletionShape& shape, const DeviceFeatureMap& key_map);
ZeroedPart CompleteStatesZeroedPart(const CompletionShape& shape, const DeviceFeatureMap& key_map);

// Merges into states [num_queries][H][d + 2] what summaries[i] less the chosen rows gives. summaries[i]
// (device pointers in device memory) is of query i's mid; where a mid is empty or all of it is chosen,
// states keep their bits.
[[nodiscard]] cudaError_t CompleteStates(const CompletionShape& shape, const float* q,
                                         int64_t q_stride, const DeviceQuery* queries,
                                         const ChosenRows& rows, const float* const* summaries,
                                         const DeviceFeatureMap& key_map,
                                         const DeviceFeatureMap& query_map, float* states,
                                         void* workspace, Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_COMPLETION_H_
