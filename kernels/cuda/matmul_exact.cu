// Mapping, kExact: W as [in / 4][out] groups of four values. An element of y is one chain of additions, which takes its time however
// many units there are; so a thread has an output and the chains of four rows, a warp 32 outputs, and a block up to 16 rows. Both
// operands come through a ring in shared memory, which a fifth warp fills; all lanes read x at once.
//
// A router's product, 128 outputs of 2048 values, bfloat16, in a step (H200, us; 2026-11-29):            1 row   8 rows
//   a block of 128 outputs and 16 rows, W read where it is used                                          54      250
//   a ring filled by those who multiply, blocks of as many warps as rows need                            39       35
//   the same, always four warps, that read the next two groups while they add two                        24       17
//   as it is, without the barriers between reads and additions                                           17       19
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

constexpr int kExactRows = 4;  // of a thread
constexpr int kExactWarps = 4;
constexpr int kExactThreads = (kExactWarps + 1) * kLanes;
constexpr int kExactBlockRows = kExactWarps * kExactRows;
constexpr int kExactGroups = 32;  // of a stage of the ring
constexpr int kExactDepth = kExactGroups * 4;
constexpr int kExactStages = 4;

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

// Reads from shared memory, in this order among others.
__device__ __forceinline__ void LoadGroup(uint32_t at, Group<DType::kF32>& group) {
  float values[4];
  LoadShared(at, values);
  group.v = make_float4(values[0], values[1], values[2], values[3]);
}
template <DType kStorage>
__device__ __forceinline__ void LoadGroup(uint32_t at, Group<kStorage>& group) {
  const float2 words = LoadSharedPair(at);
  group.v = make_uint2(__float_as_uint(words.x), __float_as_uint(words.y));
}

template <DType kStorage>
struct ExactStage {
  Group<kStorage> w[kExactGroups][kLanes];
  float4 x[kExactBlockRows][kExactGroups];
};

// A barrier of the whole block, which warps with different work reach in different places: __syncthreads() must be one place, and
// of bar.sync compute-sanitizer's synccheck says the same.
__device__ __forceinline__ void MeetAll() {
  asm volatile("barrier.sync 1, %0;" ::"n"(kExactThreads) : "memory");
}

template <DType kStorage>
__global__ void __launch_bounds__(kExactThreads)
    ExactKernel(const __grid_constant__ MatmulArgs args, const Group<kStorage>* w, int32_t in,
                int32_t out) {
  using Stage = ExactStage<kStorage>;
  extern __shared__ uint4 dynamic[];
  auto* const ring = reinterpret_cast<Stage*>(dynamic);  // [kExactStages]
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / kLanes, lane = thread % kLanes;
  const int32_t output = static_cast<int32_t>(blockIdx.x) * kLanes + lane;
  const int64_t first_row = int64_t{blockIdx.y} * kExactBlockRows;
  const auto rows = static_cast<int32_t>(min(int64_t{kExactBlockRows}, args.m - first_row));
  const int32_t stages = (in + kExactDepth - 1) / kExactDepth;

  if (warp == kExactWarps) {
    // Copies. Outputs and inner values that do not exist are zeros, and rows nobody's.
    const auto copy_w = [&](int32_t stage) {
      Stage& to = ring[stage % kExactStages];
      const Group<kStorage>* from = w + int64_t{stage} * kExactGroups * out + output;
#pragma unroll 8
      for (int32_t k = 0; k < kExactGroups; ++k, from += out) {
        const bool exists = output < out && (stage * kExactGroups + k) * 4 < in;
        CopyAsync<sizeof(Group<kStorage>)>(SharedAddress(&to.w[k][lane]), exists ? from : w,
                                           exists);
      }
    };
    const auto copy_x = [&](int32_t stage) {
      auto* const to = reinterpret_cast<float*>(ring[stage % kExactStages].x) + lane;
      for (int32_t row = 0; row < rows; ++row) {
        const float* const from = args.x + (first_row + row) * args.x_stride;
#pragma unroll
        for (int32_t i = 0; i < kExactDepth; i += kLanes) {
          const int32_t column = stage * kExactDepth + i + lane;
          const bool exists = column < in;
          CopyAsync<sizeof(float)>(SharedAddress(to + row * kExactDepth + i),
                                   exists ? from + column : from, exists);
        }
      }
      CommitCopies();
    };
    for (int32_t s = 0; s < kExactStages - 1; ++s) copy_w(s);
    WaitForEarlier();
    LetNextStart();
    for (int32_t s = 0; s < kExactStages - 1; ++s) copy_x(s);
    for (int32_t stage = 0; stage < stages; ++stage) {
      WaitForCopies<kExactStages - 2>();
      MeetAll();  // this stage is here, and the one before has been read
      copy_w(stage + kExactStages - 1);
      copy_x(stage + kExactStages - 1);
    }
    return;
  }
  WaitForEarlier();
  LetNextStart();

  struct Values {
    Group<kStorage> w;
    float x[kExactRows][4];
  };
  float sums[kExactRows] = {};
  const auto add = [&](const Values& values, int count) {
    float weights[4];
    values.w.Widen(weights);
#pragma unroll
    for (int r = 0; r < kExactRows; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < count) sums[r] = __fmaf_rn(values.x[r][i], weights[i], sums[r]);
      }
    }
  };
  for (int32_t stage = 0; stage < stages; ++stage) {
    MeetAll();
    if (warp * kExactRows >= rows) continue;
    const Stage& here = ring[stage % kExactStages];
    const uint32_t w_at = SharedAddress(&here.w[0][lane]);
    const uint32_t x_at = SharedAddress(here.x[warp * kExactRows]);
    const auto load = [&](int32_t k, Values& to) {
      LoadGroup(w_at + k * static_cast<int>(sizeof here.w[0]), to.w);
#pragma unroll
      for (int r = 0; r < kExactRows; ++r) {
        LoadShared(x_at + (r * kExactGroups + k) * static_cast<int>(sizeof(float4)), to.x[r]);
      }
    };
    const int32_t count = min(kExactDepth, in - stage * kExactDepth);
    if (count == kExactDepth) {
      // Four groups are read while four are added; the barrier keeps each read from being put where it is used.
      constexpr int kAtOnce = 4;
      Values values[2][kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) load(i, values[0][i]);
#pragma unroll
      for (int32_t k = 0; k < kExactGroups; k += kAtOnce) {
        const int now = k / kAtOnce % 2;
        if (k + kAtOnce < kExactGroups) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) load(k + kAtOnce + i, values[1 - now][i]);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) add(values[now][i], 4);
      }
    } else {
      Values values;
      for (int32_t k = 0; k < count / 4; ++k) {
        load(k, values);
        add(values, 4);
      }
      if (count % 4 != 0) {  // nothing may be added past the last value
        load(count / 4, values);
        add(values, count % 4);
      }
    }
  }
  if (output >= out) return;
#pragma unroll
  for (int r = 0; r < kExactRows; ++r) {
    const int32_t row = warp * kExactRows + r;
    if (row < rows) {
      Finish(sums[r], output, static_cast<int32_t>(first_row) + row, args.bias, args.accumulate,
             args.y, args.y_stride);
    }
  }
}

template <DType kStorage>
cudaError_t Exact(const MatmulArgs& args, const DeviceWeights& w, Stream stream) {
  const int64_t row_blocks = CeilDiv(args.m, kExactBlockRows);
  if (row_blocks > 65535) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(CeilDiv(w.out, kLanes)), static_cast<unsigned>(row_blocks));
  return LaunchAs({.starts_early = !args.new_weights}, ExactKernel<kStorage>, grid, kExactThreads,
                  sizeof(ExactStage<kStorage>) * kExactStages, stream, args,
                  static_cast<const Group<kStorage>*>(w.data), static_cast<int32_t>(w.in),
                  static_cast<int32_t>(w.out));
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
