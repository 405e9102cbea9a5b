// Mapping. Half a warp is one row, or a warp where heads are wider than 128: a lane holds eight channels, the smallest and the
// largest are found by exchanges among them, and each lane writes its four bytes of codes. A
// block takes 64 tokens of one head.
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/int4_keys.h"
#include "kernels/cuda/kv_rows.cuh"
#include "kernels/cuda/launch.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTokensPerBlock = 64;

struct Args {
  const DeviceKeySpan* spans;
  const uint8_t* pool;
  uint8_t* int4_keys;
  FastDivider block_tokens;
  int64_t block_bytes, head_bytes, row_bytes, key_bytes;
  int32_t head_dim, kv_heads;
};

// kLanes: of a row.
template <DType kKv, int kLanes>
__global__ void __launch_bounds__(kThreads) QuantizeKernel(const Args args) {
  const DeviceKeySpan span = args.spans[blockIdx.z];
  const int32_t head = blockIdx.y;
  const int lane = threadIdx.x % kLanes;
  const bool holds = lane * 8 < args.head_dim;
  for (int i = threadIdx.x / kLanes; i < kTokensPerBlock; i += kThreads / kLanes) {
    const int32_t token =
        span.tokens.first + static_cast<int32_t>(blockIdx.x) * kTokensPerBlock + i;
    const bool inside = token < span.tokens.last;
    const int32_t block = inside ? args.block_tokens.Divide(token) : 0;
    const int32_t in_block = token - block * args.block_tokens.divisor();
    float values[8] = {};
    if (inside && holds) {
      LoadKeys8<kKv>(args.pool + span.block_table[block] * args.block_bytes +
                         head * args.head_bytes + in_block * args.row_bytes,
                     args.head_dim, lane * 8, values);
    }
    float low = INFINITY, high = -INFINITY;
    if (holds) {
#pragma unroll
      for (const float value : values) {
        low = fminf(low, value);
        high = fmaxf(high, value);
      }
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      low = fminf(low, __shfl_xor_sync(kFullMask, low, offset));
      high = fmaxf(high, __shfl_xor_sync(kFullMask, high, offset));
    }
    const uint16_t zero_bits = RoundBf16Down(__fadd_rn(low, 0.0f));  // 0 for -0
    const float zero = WidenBf16(zero_bits);
    const float range = __fsub_rn(high, zero);
    const bool varies = range > 0;
    const float least = __fdiv_rn(range, 15.0f);
    const uint16_t scale_bits = varies ? RoundBf16Up(fmaxf(least, 0x1p-100f)) : 0;
    const float inverse = varies ? __fdiv_rn(1.0f, WidenBf16(scale_bits)) : 0.0f;
    uint32_t codes = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float step = __fmul_rn(__fsub_rn(values[c], zero), inverse);
      codes |= static_cast<uint32_t>(rintf(fminf(fmaxf(step, 0.0f), 15.0f))) << (4 * c);
    }
    if (!inside) continue;
    auto* key = reinterpret_cast<uint32_t*>(
        args.int4_keys +
        ((int64_t{span.index_table[block]} * args.kv_heads + head) * args.block_tokens.divisor() +
         in_block) *
            args.key_bytes);
    if (holds) key[lane] = codes;
    if (lane == 0) {
      key[args.head_dim / 8] = scale_bits | static_cast<uint32_t>(zero_bits) << 16;
    }
  }
}

}  // namespace

cudaError_t QuantizeKeys(const DeviceKeySpan* spans, int32_t num_spans, int32_t max_span_tokens,
                         const void* pool, const KvLayout& layout, void* int4_keys, Stream stream) {
  if (!HasKvRows(layout) || layout.head_dim % 8 != 0 || layout.head_dim > 256 ||
      layout.head_dim < 8 || num_spans < 0 || num_spans > 65535) {
    return cudaErrorInvalidValue;
  }
  if (num_spans == 0 || max_span_tokens <= 0) return cudaSuccess;
  const Args args{spans,
                  static_cast<const uint8_t*>(pool),
                  static_cast<uint8_t*>(int4_keys),
                  FastDivider(layout.block_tokens),
                  static_cast<int64_t>(layout.BlockBytes()),
                  static_cast<int64_t>(layout.HeadBytes()),
                  static_cast<int64_t>(layout.RowBytes()),
                  static_cast<int64_t>(Int4KeyBytes(layout.head_dim)),
                  layout.head_dim,
                  layout.kv_heads};
  const dim3 grid(static_cast<unsigned>(CeilDiv(max_span_tokens, kTokensPerBlock)), layout.kv_heads,
                  num_spans);
  return ForKvType(layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    const auto kernel = layout.head_dim <= 128 ? QuantizeKernel<kKv, 16> : QuantizeKernel<kKv, 32>;
    return LaunchBehind(kernel, grid, kThreads, 0, stream, args);
  });
}

}  // namespace winnow::kernels::cuda
