// EncodeKeys and EncodeQueries (backend.h) on the device, bit for bit as docs/artifact-format.md
// says and so as kernels/hash_encode.h: each sum is one chain of fused multiply-adds in ascending
// order of the input, in one register; silu is the text's arithmetic, operation by operation.
//
//   spans        [num_spans] DeviceKeySpan; their keys are read from `pool` (bf16 rows) and their
//                codes go to `codes`, one layer's pool (CodeLayout)
//   q            [rows][H*d] f32, rows `q_stride` floats apart
//   query_codes  [num_queries][H][bits / 8]
//
// Cost: 2 * in * out FLOPs per stage and vector on the float32 units (tensor cores add in another
// order). Weights are read once per tile of 8 vectors (few) or 32 (many), from L2.
#ifndef WINNOW_KERNELS_CUDA_HASH_ENCODE_H_
#define WINNOW_KERNELS_CUDA_HASH_ENCODE_H_

#include "kernels/cuda/device_types.h"
#include "kernels/cuda/layer_ops.h"
#include "kernels/cuda/row_cache.h"

namespace winnow::kernels::cuda {

inline constexpr int kMaxEncoderStages = 4;

// Weights in the kernels' order, in memory of the caller.
struct DeviceEncoder {
  struct Stage {
    const uint16_t* weight = nullptr;  // [kv_heads][ceil(in / 8)][out][8], zeros past `in`
    const float* bias = nullptr;       // [kv_heads][out]
    int32_t in = 0, out = 0;
  };
  Stage stages[kMaxEncoderStages];
  int32_t num_stages = 0;
  int32_t kv_heads = 0;
  int32_t queries_per_input = 1;
  int32_t unused = 0;
  int32_t bits() const { return stages[num_stages - 1].out / queries_per_input; }
};

// What an encoder takes on the device, and its packing on the host: `host` is packed bytes to be
// copied to `device`; the result points into `device`. Null stages (num_stages 0) if the shape is
// refused: more than kMaxEncoderStages stages, outputs that are no multiple of 32, or inputs wider than
// a block's shared memory on this device.
size_t PackedEncoderBytes(const EncoderWeights& weights);
DeviceEncoder PackEncoder(const EncoderWeights& weights, void* host, void* device);

[[nodiscard]] cudaError_t EncodeKeys(const DeviceEncoder& encoder, const DeviceKeySpan* spans,
                                     int32_t num_spans, int32_t max_span_tokens, const void* pool,
                                     const KvLayout& layout, void* codes,
                                     const CodeLayout& code_layout, Stream stream);

[[nodiscard]] cudaError_t EncodeQueries(const DeviceEncoder& encoder, const DeviceQuery* queries,
                                        int32_t num_queries, int32_t group, const float* q,
                                        int64_t q_stride, int32_t head_dim, void* query_codes,
                                        Stream stream);

// One token each of several sequences: RopeAndWriteKv of the chunks, EncodeKeys of their keys and
// EncodeQueries of their queries in one launch, with the same bits. With `cache`, whose pool it is, KV is written as
// WriteKvThrough does. REQUIRES: num_tokens 1 in each chunk;
// at most kTokenInputs inputs of the queries' encoder per KV head.
inline constexpr int32_t kTokenInputs = 8;
struct TokenArgs {
  DeviceMatrix q, k, v, q_cos_sin, cos_sin;
  const DeviceChunk* chunks = nullptr;
  int32_t num_tokens = 0;  // and chunks
  void* pool = nullptr;
  KvLayout layout;
  void* codes = nullptr;  // of keys, one layer's pool
  CodeLayout code_layout = {};
  void* query_codes = nullptr;  // [num_tokens][H][bits / 8]
  const DeviceRowCache* cache = nullptr;
};
[[nodiscard]] cudaError_t EncodeTokens(const TokenArgs& args, const DeviceEncoder& keys,
                                       const DeviceEncoder& queries, Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_HASH_ENCODE_H_
