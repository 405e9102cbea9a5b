// Mapping. A block is a row (RmsNormHeads: of a head; RopeAndWriteKv: of a KV head and its group), its
// threads go over the row; each value is read once, or a second time from L1. What is normed or gated
// for a product is written in the order in which the product reads it (matmul.h): a thread makes 16
// bytes of that order at a time, and RmsNorm goes over a row in the same order, so that its sum has the
// same bits either way.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kv_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/layer_ops.h"
#include "kernels/cuda/matmul_order.cuh"
#include "kernels/cuda/rounded_rows.cuh"
#include "kernels/cuda/silu.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Eight values that are 16 bytes of a product's left operand: pairs 8 columns apart, of columns that
// begin at Column(place).
constexpr int kPlaceValues = 8;
__host__ __device__ constexpr int32_t PlacesOf(int64_t cols) {
  return static_cast<int32_t>((cols + kOrderedSlice - 1) / kOrderedSlice * (kOrderedSlice / 8));
}
__device__ __forceinline__ int32_t Column(int32_t place, int i) {
  return place / 4 * kOrderedSlice + i / 2 * 8 + place % 4 * 2 + i % 2;
}
__device__ __forceinline__ void PutPlace(uint4* ordered, bool panels, int32_t places, int64_t row,
                                         int32_t place, const float (&values)[kPlaceValues]) {
  const uint32_t pairs[4] = {PackBf16(values[0], values[1]), PackBf16(values[2], values[3]),
                             PackBf16(values[4], values[5]), PackBf16(values[6], values[7])};
  PutOrdered(ordered, panels, places / 4, row, place / 4, place % 4, pairs);
}

constexpr int kNormThreads = 512;

// What a norm multiplies with, from each thread's sum of squares: added up in a fixed tree.
template <int kBlockThreads>
__device__ __forceinline__ float NormScale(float squares, int32_t cols, float eps) {
  __shared__ float sums[kBlockThreads / 32];
  squares = WarpSum(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0.0f;
#pragma unroll
  for (int w = 0; w < kBlockThreads / 32; ++w) squares += sums[w];
  return 1.0f / sqrtf(squares / static_cast<float>(cols) + eps);
}

// The places that rows of a norm go to.
struct PlainRows {
  float* out;
  int64_t stride;
};
struct AddedRows {
  float* out;
  int64_t stride;
};
struct OrderedRows {
  uint4* ordered;
  bool panels;
  bool unused[7];
};

// Places of a group, which are half a warp's (matmul_int8.h).
constexpr int kGroupPlaces = kGroupValues / kPlaceValues;
static_assert(kGroupPlaces == 16 && kOrderedSlice == 32);
// Half a warp's values of a group; `place`: of the row. All sixteen lanes are here.
__device__ __forceinline__ void RoundPlace(const RoundedRows& to, int64_t row, int32_t place,
                                           const float (&values)[kPlaceValues]) {
  uint32_t largest_bits = 0;
#pragma unroll
  for (int i = 0; i < kPlaceValues; ++i) {
    largest_bits = max(largest_bits, MagnitudeBits(values[i]));
  }
  const Rounding rounding(
      __reduce_max_sync(0xffffu << (threadIdx.x % 32 / kGroupPlaces * kGroupPlaces), largest_bits));
  const int32_t group = place / kGroupPlaces;
#pragma unroll
  for (int i = 0; i < kPlaceValues; i += 2) {
    const int column = Column(place, i) - group * kGroupValues;
    const uint32_t pair = rounding.Of(values[i]) | rounding.Of(values[i + 1]) << 8;
    *reinterpret_cast<uint16_t*>(FourOf(to, row, group, column / 4) + column % 4) =
        static_cast<uint16_t>(pair);
  }
  if (place % kGroupPlaces == 0) to.Scale(row, group) = rounding.scale;
}

// A row of x to a row of `out`.
template <typename Rows>
__global__ void __launch_bounds__(kNormThreads)
    RmsNormKernel(const float* x, int64_t x_stride, const float* weight, float eps,
                  const __grid_constant__ Rows out, int32_t cols) {
  constexpr bool kRounded = std::is_same_v<Rows, RoundedRows>;
  constexpr int kHeld = 2;  // places of a thread that stay in registers
  LetNextStart();
  const int32_t places = PlacesOf(cols);
  const int32_t written =
      kRounded ? (places + kGroupPlaces - 1) / kGroupPlaces * kGroupPlaces : places;
  float weights[kHeld][kPlaceValues], held[kHeld][kPlaceValues];
  const auto load = [&](const float* from, int32_t place, float(&to)[kPlaceValues]) {
#pragma unroll
    for (int i = 0; i < kPlaceValues; ++i) {
      const int32_t column = Column(place, i);
      to[i] = place < places && column < cols ? from[column] : 0.0f;
    }
  };
  const auto my_place = [](int h) { return static_cast<int32_t>(threadIdx.x) + h * kNormThreads; };
#pragma unroll
  for (int h = 0; h < kHeld; ++h) load(weight, my_place(h), weights[h]);
  WaitForEarlier();
  x += blockIdx.x * x_stride;
#pragma unroll
  for (int h = 0; h < kHeld; ++h) load(x, my_place(h), held[h]);
  float squares = 0.0f;
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
#pragma unroll
    for (int i = 0; i < kPlaceValues; ++i) squares = fmaf(held[h][i], held[h][i], squares);
  }
  for (int32_t place = my_place(kHeld); place < places; place += kNormThreads) {
    float values[kPlaceValues];
    load(x, place, values);
#pragma unroll
    for (int i = 0; i < kPlaceValues; ++i) squares = fmaf(values[i], values[i], squares);
  }
  const float scale = NormScale<kNormThreads>(squares, cols, eps);
  const auto put = [&](int32_t place, float(&values)[kPlaceValues],
                       const float(&of_weight)[kPlaceValues]) {
    if (place >= written) return;
#pragma unroll
    for (int i = 0; i < kPlaceValues; ++i) {
      values[i] = __fmul_rn(__fmul_rn(values[i], scale), of_weight[i]);
      if constexpr (std::is_same_v<Rows, PlainRows>) {
        const int32_t column = Column(place, i);
        if (column < cols) out.out[blockIdx.x * out.stride + column] = values[i];
      }
      if constexpr (std::is_same_v<Rows, AddedRows>) {
        const int32_t column = Column(place, i);
        if (column >= cols) continue;
        float& sum = out.out[blockIdx.x * out.stride + column];
        sum = __fadd_rn(sum, values[i]);
      }
    }
    if constexpr (std::is_same_v<Rows, OrderedRows>) {
      PutPlace(out.ordered, out.panels, places, blockIdx.x, place, values);
    }
    if constexpr (kRounded) RoundPlace(out, blockIdx.x, place, values);
  };
#pragma unroll
  for (int h = 0; h < kHeld; ++h) put(my_place(h), held[h], weights[h]);
  for (int32_t place = my_place(kHeld); place < written; place += kNormThreads) {
    float values[kPlaceValues], of_weight[kPlaceValues];
    load(x, place, values);
    load(weight, place, of_weight);
    put(place, values, of_weight);
  }
}

// A block is a head of a row, in place.
__global__ void __launch_bounds__(kThreads)
    RmsNormHeadsKernel(float* x, int64_t x_stride, const float* weight, float eps, int32_t cols) {
  LetNextStart();
  WaitForEarlier();
  x += blockIdx.x * x_stride + int64_t{blockIdx.y} * cols;
  float squares = 0.0f;
  for (int32_t i = threadIdx.x; i < cols; i += kThreads) squares = fmaf(x[i], x[i], squares);
  const float scale = NormScale<kThreads>(squares, cols, eps);
  for (int32_t i = threadIdx.x; i < cols; i += kThreads) x[i] = x[i] * scale * weight[i];
}

__global__ void RopeTableKernel(const int32_t* positions, const float* inv_freq, int32_t half,
                                float scale, const float* factors, float* cos_sin, int64_t stride) {
  LetNextStart();
  WaitForEarlier();
  const auto position = static_cast<float>(positions[blockIdx.x]);
  const float factor = factors == nullptr ? 1.0f : factors[blockIdx.x];
  float* row = cos_sin + blockIdx.x * stride;
  for (int32_t j = threadIdx.x; j < half; j += blockDim.x) {
    const float angle = __fmul_rn(position, inv_freq[j]);
    const float by = inv_freq[j] == 0 ? 1 : scale;
    row[j] = static_cast<float>(cos(static_cast<double>(angle))) * by * factor;
    row[half + j] = static_cast<float>(sin(static_cast<double>(angle))) * by * factor;
  }
}

__global__ void __launch_bounds__(kThreads)
    RopeKernel(float* x, int64_t x_stride, int32_t cols, int32_t head_dim, const float* cos_sin,
               int64_t table_stride) {
  LetNextStart();
  WaitForEarlier();
  const int32_t half = head_dim / 2;
  const float* table = cos_sin + blockIdx.x * table_stride;
  float* row = x + blockIdx.x * x_stride;
  for (int32_t i = threadIdx.x; i < cols / 2; i += kThreads) {
    const int32_t j = i % half;
    float* pair = row + i / half * head_dim + j;
    const float2 rotated = Rotated(pair[0], pair[half], table[j], table[half + j]);
    pair[0] = rotated.x;
    pair[half] = rotated.y;
  }
}

enum class MlpGate { kSilu, kGelu, kClampedSwiglu };

// `by`: of kClampedSwiglu.
template <MlpGate kGate>
__global__ void __launch_bounds__(kThreads)
    GateKernel(const float* gate_up, int64_t from_stride, float* out, int64_t out_stride,
               int32_t cols, ClampedSwiglu by) {
  LetNextStart();
  WaitForEarlier();
  const float* gate = gate_up + blockIdx.y * from_stride;
  for (int32_t i = blockIdx.x * kThreads + threadIdx.x; i < cols; i += gridDim.x * kThreads) {
    const float up = gate[cols + i];
    out[blockIdx.y * out_stride + i] = kGate == MlpGate::kGelu   ? GeluTanhOf(gate[i], up)
                                       : kGate == MlpGate::kSilu ? SiluOf(gate[i], up)
                                                                 : ClampedSwigluOf(gate[i], up, by);
  }
}

constexpr int kSiluThreads = 64;  // few, so that many multiprocessors take part in a single row

__global__ void __launch_bounds__(kSiluThreads)
    SiluMulOrderedKernel(const float* gate_up, int64_t from_stride, uint4* ordered, bool panels,
                         int64_t first_row, int32_t cols) {
  LetNextStart();
  const auto place = static_cast<int32_t>(blockIdx.x * kSiluThreads + threadIdx.x);
  const int32_t places = PlacesOf(cols);
  WaitForEarlier();
  if (place >= places) return;
  const float* gate = gate_up + blockIdx.y * from_stride;
  float gates[kPlaceValues], values[kPlaceValues];
#pragma unroll
  for (int i = 0; i < kPlaceValues; ++i) {
    const int32_t column = Column(place, i);
    gates[i] = column < cols ? gate[column] : 0.0f;
    values[i] = column < cols ? gate[cols + column] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kPlaceValues; ++i) values[i] = SiluOf(gates[i], values[i]);
  PutPlace(ordered, panels, places, first_row + blockIdx.y, place, values);
}

template <typename Load>
__device__ __forceinline__ void Embed(Load load, const int32_t* ids, float scale, float* out,
                                      int64_t stride, int32_t cols) {
  const int64_t from = int64_t{ids[blockIdx.x]} * cols;
  for (int32_t i = threadIdx.x; i < cols; i += kThreads) {
    out[blockIdx.x * stride + i] = load(from + i) * scale;
  }
}
__global__ void __launch_bounds__(kThreads)
    EmbedKernel(const void* table, DType dtype, const int32_t* ids, float scale, float* out,
                int64_t stride, int32_t cols) {
  LetNextStart();
  WaitForEarlier();
  if (dtype == DType::kF32) {
    Embed([&](int64_t i) { return static_cast<const float*>(table)[i]; }, ids, scale, out, stride,
          cols);
  } else if (dtype == DType::kBF16) {
    Embed([&](int64_t i) { return WidenBf16(static_cast<const uint16_t*>(table)[i]); }, ids, scale,
          out, stride, cols);
  } else {
    Embed([&](int64_t i) { return WidenF16(static_cast<const uint16_t*>(table)[i]); }, ids, scale,
          out, stride, cols);
  }
}

__global__ void __launch_bounds__(kThreads)
    WriteKvKernel(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                  const DeviceChunk* chunks, uint16_t* pool, const FastDivider block_tokens,
                  int64_t block_values, int64_t head_values, int32_t kv_heads, int32_t head_dim) {
  const DeviceChunk chunk = chunks[blockIdx.y];
  const auto i = static_cast<int32_t>(blockIdx.x);
  if (i >= chunk.num_tokens) return;
  const int32_t position = chunk.position + i, block = block_tokens.Divide(position);
  uint16_t* token = pool + chunk.block_table[block] * block_values +
                    int64_t{position - block * block_tokens.divisor()} * 2 * head_dim;
  const float* from_k = k + (chunk.first_row + i) * k_stride;
  const float* from_v = v + (chunk.first_row + i) * v_stride;
  for (int32_t j = threadIdx.x; j < kv_heads * head_dim; j += kThreads) {
    uint16_t* row = token + j / head_dim * head_values;
    row[j % head_dim] = RoundBf16(from_k[j]);
    row[head_dim + j % head_dim] = RoundBf16(from_v[j]);
  }
}

// For 8-bit types. A warp is a token's row of one KV head.
template <DType kKv>
__global__ void __launch_bounds__(kThreads)
    WriteCodesKernel(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                     const DeviceChunk* chunks, uint8_t* pool, const FastDivider block_tokens,
                     int64_t block_bytes, int64_t head_bytes, int32_t kv_heads, int32_t head_dim) {
  const DeviceChunk chunk = chunks[blockIdx.y];
  const int32_t of_chunk =
      static_cast<int32_t>(blockIdx.x) * (kThreads / 32) + static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t i = of_chunk / kv_heads, head = of_chunk % kv_heads;
  if (i >= chunk.num_tokens) return;
  const int32_t position = chunk.position + i, block = block_tokens.Divide(position);
  uint8_t* row = pool + chunk.block_table[block] * block_bytes + head * head_bytes +
                 int64_t{position - block * block_tokens.divisor()} * KvRowBytes<kKv>(head_dim);
  const float* from_k = k + (chunk.first_row + i) * k_stride + int64_t{head} * head_dim;
  const float* from_v = v + (chunk.first_row + i) * v_stride + int64_t{head} * head_dim;
  WriteCodes<kKv>(row, head_dim, 0, [&](int32_t c) { return from_k[c]; });
  WriteCodes<kKv>(row, head_dim, 1, [&](int32_t c) { return from_v[c]; });
}

struct RopeAndWriteArgs {
  float* q;
  const float *k, *v, *q_cos_sin, *cos_sin;
  int64_t q_stride, k_stride, v_stride, q_table_stride, table_stride;
  const DeviceChunk* chunks;
  uint8_t* pool;
  FastDivider block_tokens;
  int64_t block_bytes, head_bytes;
  int32_t group, head_dim;
};

// A block is a token and a KV head: its group's queries, its key, its value.
constexpr int kRopeThreads = 128;

template <DType kKv>
__global__ void __launch_bounds__(kRopeThreads)
    RopeAndWriteKvKernel(const __grid_constant__ RopeAndWriteArgs args) {
  LetNextStart();
  const DeviceChunk chunk = args.chunks[blockIdx.z];
  const auto i = static_cast<int32_t>(blockIdx.y), head = static_cast<int32_t>(blockIdx.x);
  if (i >= chunk.num_tokens) return WaitForEarlier();
  const int32_t position = chunk.position + i, block = args.block_tokens.Divide(position);
  uint8_t* of_row =
      args.pool + chunk.block_table[block] * args.block_bytes + head * args.head_bytes +
      int64_t{position - block * args.block_tokens.divisor()} * KvRowBytes<kKv>(args.head_dim);
  const int32_t half = args.head_dim / 2;
  const int64_t token = chunk.first_row + i;
  const float* q_table = args.q_cos_sin + token * args.q_table_stride;
  const float* table = args.cos_sin + token * args.table_stride;
  float* q = args.q + token * args.q_stride + int64_t{head} * args.group * args.head_dim;
  const float* k = args.k + token * args.k_stride + int64_t{head} * args.head_dim;
  const float* v = args.v + token * args.v_stride + int64_t{head} * args.head_dim;
  WaitForEarlier();
  const int32_t heads = HasScales(kKv) ? args.group : args.group + 1;
  auto* const row = reinterpret_cast<uint16_t*>(of_row);
  for (int32_t at = threadIdx.x; at < heads * half; at += kRopeThreads) {
    const int32_t of_group = at / half, j = at - of_group * half;
    if (of_group < args.group) {
      float* pair = q + of_group * args.head_dim + j;
      const float2 rotated = Rotated(pair[0], pair[half], q_table[j], q_table[half + j]);
      pair[0] = rotated.x;
      pair[half] = rotated.y;
    } else {
      const float2 rotated = Rotated(k[j], k[j + half], table[j], table[half + j]);
      row[j] = RoundBf16(rotated.x);
      row[j + half] = RoundBf16(rotated.y);
    }
  }
  if constexpr (HasScales(kKv)) {
    // The last two warps, which have the fewest queries.
    static_assert(kRopeThreads >= 64);
    const int part = kRopeThreads / 32 - 1 - static_cast<int>(threadIdx.x) / 32;
    if (part == 0) {
      WriteCodes<kKv>(of_row, args.head_dim, part,
                      [&](int32_t c) { return RotatedAt(k, table, half, c); });
    } else if (part == 1) {
      WriteCodes<kKv>(of_row, args.head_dim, part, [&](int32_t c) { return v[c]; });
    }
  } else {
    for (int32_t j = threadIdx.x; j < args.head_dim; j += kRopeThreads) {
      row[args.head_dim + j] = RoundBf16(v[j]);
    }
  }
}

bool TooMany(int64_t blocks) { return blocks > 0x7fffffff; }

template <typename Rows>
cudaError_t Norm(const DeviceMatrix& x, const float* weight, float eps, const Rows& out,
                 const Stream& stream) {
  return Launch(RmsNormKernel<Rows>, static_cast<unsigned>(x.rows), kNormThreads, 0, stream, false,
                x.data, x.stride, weight, eps, out, static_cast<int32_t>(x.cols));
}

}  // namespace

cudaError_t RmsNorm(const DeviceMatrix& x, const float* weight, float eps, const DeviceMatrix& out,
                    Stream stream) {
  if (TooMany(x.rows) || out.rows != x.rows || out.cols != x.cols) return cudaErrorInvalidValue;
  if (x.rows == 0) return cudaSuccess;
  return Norm(x, weight, eps, PlainRows{out.data, out.stride}, stream);
}

cudaError_t AddRmsNorm(const DeviceMatrix& x, const float* weight, float eps, const DeviceMatrix& y,
                       Stream stream) {
  if (TooMany(x.rows) || y.rows != x.rows || y.cols != x.cols) return cudaErrorInvalidValue;
  if (x.rows == 0) return cudaSuccess;
  return Norm(x, weight, eps, AddedRows{y.data, y.stride}, stream);
}

cudaError_t RmsNormOrdered(const DeviceMatrix& x, const float* weight, float eps, void* ordered,
                           Stream stream) {
  if (TooMany(x.rows)) return cudaErrorInvalidValue;
  if (x.rows == 0) return cudaSuccess;
  return Norm(x, weight, eps,
              OrderedRows{static_cast<uint4*>(ordered), OrderedInPanels(x.rows), {}}, stream);
}

cudaError_t RmsNormRounded(const DeviceMatrix& x, const float* weight, float eps, void* rounded,
                           Stream stream) {
  if (TooMany(x.rows)) return cudaErrorInvalidValue;
  if (x.rows == 0) return cudaSuccess;
  return Norm(x, weight, eps, RoundedRowsOf(rounded, x.cols), stream);
}

cudaError_t RmsNormHeads(const DeviceMatrix& x, int32_t head_dim, const float* weight, float eps,
                         Stream stream) {
  if (TooMany(x.rows) || head_dim < 1 || x.cols % head_dim != 0 || x.cols / head_dim > 65535) {
    return cudaErrorInvalidValue;
  }
  if (x.rows == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(x.rows), static_cast<unsigned>(x.cols / head_dim));
  return Launch(RmsNormHeadsKernel, grid, kThreads, 0, stream, false, x.data, x.stride, weight, eps,
                head_dim);
}

cudaError_t RopeTable(const int32_t* positions, const float* inv_freq, int32_t half, float scale,
                      const float* factors, const DeviceMatrix& cos_sin, Stream stream) {
  if (TooMany(cos_sin.rows) || cos_sin.cols != 2 * half) return cudaErrorInvalidValue;
  if (cos_sin.rows == 0) return cudaSuccess;
  return Launch(RopeTableKernel, static_cast<unsigned>(cos_sin.rows), 64, 0, stream, false,
                positions, inv_freq, half, scale, factors, cos_sin.data, cos_sin.stride);
}

cudaError_t Rope(const DeviceMatrix& x, int32_t head_dim, const DeviceMatrix& cos_sin,
                 Stream stream) {
  if (TooMany(x.rows) || head_dim < 2 || head_dim % 2 != 0 || x.cols % head_dim != 0 ||
      cos_sin.cols != head_dim || cos_sin.rows < x.rows) {
    return cudaErrorInvalidValue;
  }
  if (x.rows == 0) return cudaSuccess;
  return Launch(RopeKernel, static_cast<unsigned>(x.rows), kThreads, 0, stream, false, x.data,
                x.stride, static_cast<int32_t>(x.cols), head_dim, cos_sin.data, cos_sin.stride);
}

namespace {

template <MlpGate kGate>
cudaError_t Gate(const DeviceMatrix& gate_up, const DeviceMatrix& out, const Stream& stream,
                 const ClampedSwiglu& by = {}) {
  if (gate_up.cols != 2 * out.cols || gate_up.rows != out.rows || out.rows > 65535) {
    return cudaErrorInvalidValue;
  }
  if (out.rows == 0 || out.cols == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(CeilDiv(out.cols, kThreads * 4)),
                  static_cast<unsigned>(out.rows));
  return Launch(GateKernel<kGate>, grid, kThreads, 0, stream, false, gate_up.data, gate_up.stride,
                out.data, out.stride, static_cast<int32_t>(out.cols), by);
}

}  // namespace

cudaError_t SiluMul(const DeviceMatrix& gate_up, const DeviceMatrix& out, Stream stream) {
  return Gate<MlpGate::kSilu>(gate_up, out, stream);
}
cudaError_t GeluTanhMul(const DeviceMatrix& gate_up, const DeviceMatrix& out, Stream stream) {
  return Gate<MlpGate::kGelu>(gate_up, out, stream);
}
cudaError_t ClampedSwigluMul(const DeviceMatrix& gate_up, const ClampedSwiglu& by,
                             const DeviceMatrix& out, Stream stream) {
  return Gate<MlpGate::kClampedSwiglu>(gate_up, out, stream, by);
}

cudaError_t SiluMulOrdered(const DeviceMatrix& gate_up, void* ordered, Stream stream) {
  if (gate_up.cols % 2 != 0) return cudaErrorInvalidValue;
  const auto cols = static_cast<int32_t>(gate_up.cols / 2);
  constexpr int64_t kRows = 65535;  // of a grid
  for (int64_t first = 0; first < gate_up.rows && cols > 0; first += kRows) {
    const dim3 grid(static_cast<unsigned>(CeilDiv(PlacesOf(cols), kSiluThreads)),
                    static_cast<unsigned>(std::min(kRows, gate_up.rows - first)));
    const cudaError_t error =
        Launch(SiluMulOrderedKernel, grid, kSiluThreads, 0, stream, false,
               gate_up.data + first * gate_up.stride, gate_up.stride, static_cast<uint4*>(ordered),
               OrderedInPanels(gate_up.rows), first, cols);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t EmbedRows(const void* table, DType dtype, const int32_t* ids, float scale,
                      const DeviceMatrix& out, Stream stream) {
  if (TooMany(out.rows)) return cudaErrorInvalidValue;
  if (out.rows == 0) return cudaSuccess;
  return Launch(EmbedKernel, static_cast<unsigned>(out.rows), kThreads, 0, stream, false, table,
                dtype, ids, scale, out.data, out.stride, static_cast<int32_t>(out.cols));
}

cudaError_t WriteKv(const DeviceMatrix& k, const DeviceMatrix& v, const DeviceChunk* chunks,
                    int32_t num_chunks, int32_t max_chunk_tokens, void* pool,
                    const KvLayout& layout, Stream stream) {
  if (!HasKvRows(layout) || num_chunks < 0 || num_chunks > 65535 ||
      k.cols != int64_t{layout.kv_heads} * layout.head_dim || v.cols != k.cols) {
    return cudaErrorInvalidValue;
  }
  if (num_chunks == 0 || max_chunk_tokens <= 0) return cudaSuccess;
  if (layout.dtype == DType::kBF16) {
    return LaunchBehind(
        WriteKvKernel, dim3(max_chunk_tokens, num_chunks), kThreads, 0, stream, k.data, k.stride,
        v.data, v.stride, chunks, static_cast<uint16_t*>(pool), FastDivider(layout.block_tokens),
        static_cast<int64_t>(layout.BlockBytes() / 2), static_cast<int64_t>(layout.HeadBytes() / 2),
        layout.kv_heads, layout.head_dim);
  }
  const auto kernel =
      layout.dtype == DType::kI8 ? WriteCodesKernel<DType::kI8> : WriteCodesKernel<DType::kF8>;
  const int64_t blocks = CeilDiv(int64_t{max_chunk_tokens} * layout.kv_heads, kThreads / 32);
  return LaunchBehind(kernel, dim3(static_cast<unsigned>(blocks), num_chunks), kThreads, 0, stream,
                      k.data, k.stride, v.data, v.stride, chunks, static_cast<uint8_t*>(pool),
                      FastDivider(layout.block_tokens), static_cast<int64_t>(layout.BlockBytes()),
                      static_cast<int64_t>(layout.HeadBytes()), layout.kv_heads, layout.head_dim);
}

cudaError_t RopeAndWriteKv(const DeviceMatrix& q, const DeviceMatrix& k, const DeviceMatrix& v,
                           const DeviceMatrix& q_cos_sin, const DeviceMatrix& cos_sin,
                           const DeviceChunk* chunks, int32_t num_chunks, int32_t max_chunk_tokens,
                           void* pool, const KvLayout& layout, Stream stream) {
  const int64_t kv_width = int64_t{layout.kv_heads} * layout.head_dim;
  if (!HasKvRows(layout) || num_chunks < 0 || num_chunks > 65535 || layout.kv_heads < 1 ||
      layout.head_dim % 2 != 0 || k.cols != kv_width || v.cols != kv_width ||
      q.cols % kv_width != 0 || q_cos_sin.cols != layout.head_dim ||
      cos_sin.cols != layout.head_dim) {
    return cudaErrorInvalidValue;
  }
  if (num_chunks == 0 || max_chunk_tokens <= 0) return cudaSuccess;
  if (max_chunk_tokens > 65535) return cudaErrorInvalidValue;
  const RopeAndWriteArgs args{q.data,
                              k.data,
                              v.data,
                              q_cos_sin.data,
                              cos_sin.data,
                              q.stride,
                              k.stride,
                              v.stride,
                              q_cos_sin.stride,
                              cos_sin.stride,
                              chunks,
                              static_cast<uint8_t*>(pool),
                              FastDivider(layout.block_tokens),
                              static_cast<int64_t>(layout.BlockBytes()),
                              static_cast<int64_t>(layout.HeadBytes()),
                              static_cast<int32_t>(q.cols / kv_width),
                              layout.head_dim};
  return ForKvType(layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    return Launch(RopeAndWriteKvKernel<kKv>,
                  dim3(static_cast<unsigned>(layout.kv_heads),
                       static_cast<unsigned>(max_chunk_tokens), static_cast<unsigned>(num_chunks)),
                  kRopeThreads, 0, stream, false, args);
  });
}

}  // namespace winnow::kernels::cuda
