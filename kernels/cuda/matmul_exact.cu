// Mapping, kExact: W as [in / 4][out] groups of four values; a thread is an output, a block 128 of
// them and up to 16 rows, whose x lies in shared memory and is read by all lanes at once.
#include <algorithm>

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_parts.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float ValueAt(const void* values, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(values)[i];
  const uint16_t bits = static_cast<const uint16_t*>(values)[i];
  return dtype == DType::kBF16 ? WidenBf16(bits) : WidenF16(bits);
}

__global__ void __launch_bounds__(kThreads)
    PackTensorKernel(const void* source, DType dtype, int64_t first_row, int64_t count, int32_t in,
                     int32_t slices, uint16_t* to) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t output = first_row + i / in;
    const auto column = static_cast<int32_t>(i % in);
    const int64_t tile = output / 16 * slices + column / kOrderedSlice;
    const int64_t piece =
        tile * kWTilePieces + WPiece(static_cast<int>(output % 16), column % kOrderedSlice / 8);
    to[piece * 8 + column % 8] = RoundBf16(ValueAt(source, dtype, i));
  }
}

template <typename Stored>
__global__ void __launch_bounds__(kThreads)
    PackExactKernel(const void* source, DType dtype, int64_t first_row, int64_t count, int32_t in,
                    int64_t out, Stored* to) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t output = first_row + i / in, column = i % in;
    Stored* at = to + (column / 4 * out + output) * 4 + column % 4;
    if constexpr (sizeof(Stored) == 4) {
      *at = ValueAt(source, dtype, i);
    } else {
      *at = static_cast<const uint16_t*>(source)[i];
    }
  }
}

constexpr int kExactThreads = 128;
constexpr int kExactDepth = 256;  // inner values of x in shared memory at a time

template <DType kStorage>
struct Group;  // four values
template <>
struct Group<DType::kF32> {
  float4 v;
  __device__ void Widen(float (&to)[4]) const {
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
};
template <>
struct Group<DType::kBF16> {
  uint2 v;
  __device__ void Widen(float (&to)[4]) const {
    to[0] = WidenLow(v.x), to[1] = WidenHigh(v.x), to[2] = WidenLow(v.y), to[3] = WidenHigh(v.y);
  }
};
template <>
struct Group<DType::kF16> {
  uint2 v;
  __device__ void Widen(float (&to)[4]) const {
    to[0] = WidenF16(static_cast<uint16_t>(v.x)),
    to[1] = WidenF16(static_cast<uint16_t>(v.x >> 16));
    to[2] = WidenF16(static_cast<uint16_t>(v.y)),
    to[3] = WidenF16(static_cast<uint16_t>(v.y >> 16));
  }
};

template <DType kStorage, int kRows>
__global__ void __launch_bounds__(kExactThreads)
    ExactKernel(const __grid_constant__ MatmulArgs args, const Group<kStorage>* w, int32_t in,
                int32_t out) {
  __shared__ float4 x[kRows][kExactDepth / 4];
  const int32_t output =
      static_cast<int32_t>(blockIdx.x) * kExactThreads + static_cast<int32_t>(threadIdx.x);
  const int64_t first_row = int64_t{blockIdx.y} * kRows;
  const int rows = static_cast<int>(min(int64_t{kRows}, args.m - first_row));
  float sums[kRows] = {};
  for (int32_t depth = 0; depth < in; depth += kExactDepth) {
    __syncthreads();
    auto* values = reinterpret_cast<float*>(x);
    for (int i = threadIdx.x; i < kRows * kExactDepth; i += kExactThreads) {
      const int row = i / kExactDepth;
      const int32_t column = depth + i % kExactDepth;
      values[i] =
          row < rows && column < in ? args.x[(first_row + row) * args.x_stride + column] : 0.0f;
    }
    __syncthreads();
    if (output >= out) continue;
    const int32_t count = min(kExactDepth, in - depth);
    const Group<kStorage>* group = w + int64_t{depth / 4} * out + output;
    for (int32_t k = 0; k < count / 4; ++k) {
      float weights[4];
      group[int64_t{k} * out].Widen(weights);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 of_x = x[r][k];
        sums[r] = __fmaf_rn(of_x.x, weights[0], sums[r]);
        sums[r] = __fmaf_rn(of_x.y, weights[1], sums[r]);
        sums[r] = __fmaf_rn(of_x.z, weights[2], sums[r]);
        sums[r] = __fmaf_rn(of_x.w, weights[3], sums[r]);
      }
    }
    if (count % 4 != 0) {  // only the last depth: nothing may be added past the last value
      float weights[4];
      group[int64_t{count / 4} * out].Widen(weights);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 v = x[r][count / 4];
        sums[r] = __fmaf_rn(v.x, weights[0], sums[r]);
        if (count % 4 > 1) sums[r] = __fmaf_rn(v.y, weights[1], sums[r]);
        if (count % 4 > 2) sums[r] = __fmaf_rn(v.z, weights[2], sums[r]);
      }
    }
  }
  if (output >= out) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r < rows) {
      Finish(sums[r], output, static_cast<int32_t>(first_row) + r, args.bias, args.accumulate,
             args.y, args.y_stride);
    }
  }
}

template <DType kStorage, int kRows>
cudaError_t LaunchExact(const MatmulArgs& args, const DeviceWeights& w, Stream stream) {
  const int64_t row_blocks = CeilDiv(args.m, kRows);
  if (row_blocks > 65535) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(CeilDiv(w.out, kExactThreads)),
                  static_cast<unsigned>(row_blocks));
  return LaunchBehind(ExactKernel<kStorage, kRows>, grid, kExactThreads, 0, stream, args,
                      static_cast<const Group<kStorage>*>(w.data), static_cast<int32_t>(w.in),
                      static_cast<int32_t>(w.out));
}

template <DType kStorage>
cudaError_t Exact(const MatmulArgs& args, const DeviceWeights& w, Stream stream) {
  if (args.m == 1) return LaunchExact<kStorage, 1>(args, w, stream);
  if (args.m <= 4) return LaunchExact<kStorage, 4>(args, w, stream);
  return LaunchExact<kStorage, 16>(args, w, stream);
}

}  // namespace

size_t PackedMatrixBytes(int64_t out, int64_t in, DeviceWeights::Way way, DType storage) {
  if (way == DeviceWeights::Way::kTensor) {
    return static_cast<size_t>(CeilDiv(out, 16) * SlicesOf(in)) * kWTileBytes;
  }
  return static_cast<size_t>(CeilDiv(in, 4) * 4 * out) * DTypeBytes(storage);
}

cudaError_t PackRows(const void* source, DType dtype, int64_t first_row, int64_t rows,
                     const DeviceWeights& packed, Stream stream) {
  if (packed.in < 1 || packed.in > 0x7fffffff || packed.out > 0x7fffffff || first_row < 0 ||
      first_row + rows > packed.out) {
    return cudaErrorInvalidValue;
  }
  if (rows <= 0) return cudaSuccess;
  const int64_t count = rows * packed.in;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(CeilDiv(count, kThreads), 8192));
  const auto in = static_cast<int32_t>(packed.in);
  void* data = const_cast<void*>(packed.data);
  if (packed.way == DeviceWeights::Way::kTensor) {
    PackTensorKernel<<<blocks, kThreads, 0, stream>>>(source, dtype, first_row, count, in,
                                                      SlicesOf(in), static_cast<uint16_t*>(data));
  } else if (packed.storage == DType::kF32) {
    PackExactKernel<<<blocks, kThreads, 0, stream>>>(source, dtype, first_row, count, in,
                                                     packed.out, static_cast<float*>(data));
  } else {
    if (dtype != packed.storage) return cudaErrorInvalidValue;
    PackExactKernel<<<blocks, kThreads, 0, stream>>>(source, dtype, first_row, count, in,
                                                     packed.out, static_cast<uint16_t*>(data));
  }
  return cudaGetLastError();
}

cudaError_t MatmulExact(const MatmulArgs& args, const DeviceWeights& w, Stream stream) {
  switch (w.storage) {
    case DType::kF32:
      return Exact<DType::kF32>(args, w, stream);
    case DType::kBF16:
      return Exact<DType::kBF16>(args, w, stream);
    case DType::kF16:
      return Exact<DType::kF16>(args, w, stream);
    case DType::kI8:
    case DType::kF8:
      break;  // types of KV alone
  }
  return cudaErrorInvalidValue;
}

}  // namespace winnow::kernels::cuda
