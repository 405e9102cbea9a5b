// W8A8 and W4A8 (matmul_int8.h): packing, rounding, and the product on any device, also for tests: a warp is 16 outputs and 32 rows. Hopper's products
// are in matmul_int8_wgmma.cu.
#include <algorithm>

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_int8_parts.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;
constexpr int kBlockBytes = 34;  // of kI8x128: a scale, 32 integers
constexpr int kPlainRows = 32;   // of a warp of Int8PlainKernel
constexpr int kRowTiles = kPlainRows / 8;
constexpr int64_t kMostRows = int64_t{65535} * kPlainRows;

// ---- packing ----

// Puts a group of an output in its panel: `blocks` of `values` integers, the output being its panel's `line`-th.
__device__ __forceinline__ void PackGroup(const uint8_t* blocks, int32_t values, float scale,
                                          uint8_t* panel, int line) {
  for (int32_t column = 0; column < values; ++column) {
    panel[line * kGroupValues + ((column / 16) ^ (line % 8)) * 16 + column % 16] =
        blocks[column / 32 * kBlockBytes + 2 + column % 32];
  }
  reinterpret_cast<float*>(panel + kIntegerBytes + WScalesAt(line / 16, line % 8))[line % 16 / 8] =
      scale;
}
// PackGroup in 4 bits.
__device__ __forceinline__ void PackGroupOfFourBits(const uint8_t* blocks, int32_t values,
                                                    float scale, uint8_t* panel, int line) {
  uint8_t* const tile = panel + line / kFourBitTileOutputs * kFourBitTileBytes;
  const auto integer = [&](int32_t column) {
    return column < values ? blocks[column / 32 * kBlockBytes + 2 + column % 32] & 15u : 0u;
  };
  for (int slice = 0; slice < kGroupSlices; ++slice) {
    for (int c = 0; c < 4; ++c) {
      uint32_t word = 0;
      for (int b = 0; b < 4; ++b) {
        const int32_t column = slice * 32 + c * 4 + b;
        word |= (integer(column) << 4 | integer(column + 16)) << (8 * b);
      }
      *reinterpret_cast<uint32_t*>(
          tile + FourBitWordAt(line % 8 * 4 + c, slice * 2 + line % 16 / 8)) = word;
    }
  }
  reinterpret_cast<float*>(tile + kFourBitScalesAt)[line % 8 * 2 + line % 16 / 8] =
      scale / kFourBitUnit;
}

// A thread is a group of an output.
template <int32_t kBits>
__global__ void __launch_bounds__(kThreads)
    PackInt8Kernel(const uint8_t* rows, int64_t row_bytes, int64_t first_row, int64_t count,
                   int32_t in, int32_t groups, uint8_t* to) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / groups, output = first_row + row;
    const auto group = static_cast<int32_t>(i - row * groups);
    const uint8_t* blocks =
        rows + row * row_bytes + int64_t{group} * (kGroupValues / 32) * kBlockBytes;
    uint8_t* panel = to + (output / kPanelRows * groups + group) * WPanelBytes(kBits);
    const auto line = static_cast<int>(output % kPanelRows);
    const int32_t values = min(kGroupValues, in - group * kGroupValues);
    const float scale = WidenF16(static_cast<uint16_t>(blocks[0] | blocks[1] << 8));
    if constexpr (kBits == 4) {
      PackGroupOfFourBits(blocks, values, scale, panel, line);
    } else {
      PackGroup(blocks, values, scale, panel, line);
    }
  }
}

// ---- widening ----

// A block is a panel; a thread a word of four bits.
constexpr int kWidenThreads = kIntegerBytes / 8;
__global__ void __launch_bounds__(kWidenThreads)
    WidenInt4Kernel(const uint8_t* w, int32_t groups, int64_t first_panel, uint8_t* to) {
  LetNextStart();
  WaitForEarlier();
  const int64_t at = int64_t{blockIdx.x};
  const uint8_t* const from = w + (first_panel * groups + at) * kFourBitPanelBytes;
  uint8_t* const panel = to + at * kRoundedPanelBytes;
  const int thread = static_cast<int>(threadIdx.x);
  const int tile = thread / (8 * kLanes), place = thread % (8 * kLanes);
  const int i = place / (4 * kLanes) * 4 + place % 4, lane = place / 4 % kLanes;
  const uint8_t* const of_tile = from + tile * kFourBitTileBytes;
  const uint32_t word = reinterpret_cast<const uint32_t*>(of_tile)[place];
  const int line = tile * 16 + i % 2 * 8 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t bits = half == 0 ? word >> 4 : word;
    uint32_t wide = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int value = static_cast<int>(bits << (28 - 8 * b)) >> 28;
      wide |= (static_cast<uint32_t>(value) & 255u) << (8 * b);
    }
    const int piece = i / 2 * 2 + half;  // 16 columns
    *reinterpret_cast<uint32_t*>(panel + line * kGroupValues + (piece ^ (line % 8)) * 16 +
                                 lane % 4 * 4) = wide;
  }
  if (place < kFourBitTileOutputs) {
    reinterpret_cast<float*>(panel + kIntegerBytes)[tile * kFourBitTileOutputs + place] =
        reinterpret_cast<const float*>(of_tile + kFourBitScalesAt)[place] * kFourBitUnit;
  }
}

// ---- rounding ----

// A warp is a group of a row. kSilu: x is gates, then ups.
template <bool kSilu>
__global__ void __launch_bounds__(kThreads)
    RoundKernel(const float* x, int64_t x_stride, int32_t cols,
                const __grid_constant__ RoundedRows to, int64_t first_row) {
  LetNextStart();
  WaitForEarlier();
  const int lane = threadIdx.x % kLanes;
  const int32_t group =
      static_cast<int32_t>(blockIdx.x) * kWarps + static_cast<int32_t>(threadIdx.x) / kLanes;
  if (group >= to.groups) return;
  const float* from = x + int64_t{blockIdx.y} * x_stride;
  float values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t column = group * kGroupValues + lane * 4 + i;
    values[i] = column >= cols ? 0.0f
                : kSilu        ? SiluOf(from[column], from[cols + column])
                               : from[column];
  }
  PutGroup(to, first_row + blockIdx.y, group, lane, values);
}

template <bool kSilu>
cudaError_t Round(const DeviceMatrix& x, int64_t cols, void* rounded, const Stream& stream) {
  constexpr int64_t kRows = 32768;  // of a grid
  const RoundedRows to = RoundedRowsOf(rounded, cols);
  for (int64_t first = 0; first < x.rows; first += kRows) {
    const dim3 grid(static_cast<unsigned>(CeilDiv(to.groups, kWarps)),
                    static_cast<unsigned>(std::min(kRows, x.rows - first)));
    if (const cudaError_t error =
            Launch(RoundKernel<kSilu>, grid, kThreads, 0, stream, false, x.data + first * x.stride,
                   x.stride, static_cast<int32_t>(cols), to, first);
        error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

// ---- products ----

// A lane's word of the i-th 16 bytes of a row of a panel.
__device__ __forceinline__ uint32_t WordOf(const uint8_t* panel, int row, int i, int c) {
  return *reinterpret_cast<const uint32_t*>(panel + row * kGroupValues + (i ^ (row % 8)) * 16 +
                                            c * 4);
}

// Sums of a warp's rows, from `first_row` on.
__device__ __forceinline__ void FinishTile(const Operands& args, int32_t tile, int32_t first_row,
                                           const float (&sums)[kRowTiles][4]) {
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int32_t output = tile * 16 + lane / 4 + e / 2 * 8;
      const int32_t row = first_row + i * 8 + lane % 4 * 2 + e % 2;
      if (output < args.out && row < args.m) {
        Finish(sums[i][e], output, row, args.bias, args.accumulate, args.y, args.y_stride);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    Int8PlainKernel(const __grid_constant__ Int8Operands operands) {
  const Operands& args = operands.product;
  const int lane = threadIdx.x % kLanes, c = lane % 4;
  const int32_t tile =
      static_cast<int32_t>(blockIdx.x) * kWarps + static_cast<int32_t>(threadIdx.x) / kLanes;
  const int32_t first_row = static_cast<int32_t>(blockIdx.y) * kPlainRows;
  if (tile * 16 >= args.out) return;
  const auto* const x = reinterpret_cast<const uint8_t*>(args.x);
  float sums[kRowTiles][4] = {};
  for (int32_t group = 0; group < operands.groups; ++group) {
    const uint8_t* const of_w =
        operands.w + (int64_t{tile / 4} * operands.groups + group) * kRoundedPanelBytes;
    const float2 scales =
        *reinterpret_cast<const float2*>(of_w + kIntegerBytes + WScalesAt(tile % 4, lane / 4));
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      // Past the last row that is read again: those sums are nobody's.
      const int32_t row = min(first_row + i * 8 + lane / 4, args.m - 1);
      const uint8_t* const panel =
          x + (int64_t{row / kPanelRows} * operands.groups + group) * kRoundedPanelBytes;
      int32_t products[4] = {};
#pragma unroll
      for (int s = 0; s < kGroupSlices; ++s) {
        const int output = tile % 4 * 16 + lane / 4;
        const uint32_t w[4] = {WordOf(of_w, output, 2 * s, c), WordOf(of_w, output + 8, 2 * s, c),
                               WordOf(of_w, output, 2 * s + 1, c),
                               WordOf(of_w, output + 8, 2 * s + 1, c)};
        MultiplyAdd16x8x32(products, w, WordOf(panel, row % kPanelRows, 2 * s, c),
                           WordOf(panel, row % kPanelRows, 2 * s + 1, c));
      }
      // Those of eight rows, which lie in one panel.
      AddGroup(products, scales,
               reinterpret_cast<const float2*>(panel + kIntegerBytes)[row % kPanelRows / 8 * 4 + c],
               sums[i]);
    }
  }
  FinishTile(args, tile, first_row, sums);
}

cudaError_t MultiplyPlainly(const Int8Operands& operands, const Stream& stream) {
  const Operands& args = operands.product;
  const dim3 grid(static_cast<unsigned>(CeilDiv(CeilDiv(args.out, 16), kWarps)),
                  static_cast<unsigned>(CeilDiv(args.m, kPlainRows)));
  return LaunchBehind(Int8PlainKernel, grid, kThreads, 0, stream, operands);
}

Int8Operands OperandsOf(const MatmulArgs& args, const DeviceWeights& w, const void* rounded) {
  Operands product = {};
  product.x = static_cast<const uint4*>(rounded);
  product.out = static_cast<int32_t>(w.out);
  product.m = static_cast<int32_t>(args.m);
  product.y = args.y;
  product.y_stride = args.y_stride;
  product.bias = args.bias;
  product.accumulate = args.accumulate;
  product.new_weights = args.new_weights;
  return {product, static_cast<const uint8_t*>(w.data), GroupsOf(w.in), w.integer_bits};
}

bool IsInt8(const DeviceWeights& w) {
  return w.way == DeviceWeights::Way::kInt8 && w.out >= 1 && w.in >= 1;
}

}  // namespace

size_t Int8WeightBytes(int64_t out, int64_t in, int32_t integer_bits) {
  return static_cast<size_t>(CeilDiv(out, kPanelRows) * GroupsOf(in)) * WPanelBytes(integer_bits);
}

cudaError_t PackInt8(const std::byte* source, int64_t first_row, int64_t rows,
                     const DeviceWeights& packed, Stream stream) {
  if (!IsInt8(packed) || packed.in % 32 != 0 || first_row < 0 || first_row + rows > packed.out) {
    return cudaErrorInvalidValue;
  }
  if (rows <= 0) return cudaSuccess;
  const int32_t groups = GroupsOf(packed.in);
  const int64_t count = rows * groups;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(CeilDiv(count, kThreads), 8192));
  const auto kernel = packed.integer_bits == 4 ? PackInt8Kernel<4> : PackInt8Kernel<8>;
  return LaunchBehind(kernel, blocks, kThreads, 0, stream, reinterpret_cast<const uint8_t*>(source),
                      packed.in / 32 * kBlockBytes, first_row, count,
                      static_cast<int32_t>(packed.in), groups,
                      static_cast<uint8_t*>(const_cast<void*>(packed.data)));
}

cudaError_t WidenInt4(const DeviceWeights& w, int64_t first_output, int64_t outputs, void* to,
                      Stream stream) {
  const int64_t panels = CeilDiv(outputs, kPanelRows) * GroupsOf(w.in);
  if (!IsInt8(w) || w.integer_bits != 4 || first_output < 0 || first_output % kPanelRows != 0 ||
      outputs < 1 || first_output + outputs > w.out || panels > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  return Launch(WidenInt4Kernel, static_cast<unsigned>(panels), kWidenThreads, 0, stream, false,
                static_cast<const uint8_t*>(w.data), GroupsOf(w.in), first_output / kPanelRows,
                static_cast<uint8_t*>(to));
}

bool MultipliesAsItLies(int64_t m, const DeviceWeights& w) {
  return w.integer_bits == 8 || (m <= kFourBitRows && HasInt8GroupMatmul());
}

size_t RoundedBytes(int64_t m, int64_t in) {
  return static_cast<size_t>(CeilDiv(m, kPanelRows) * GroupsOf(in)) * kRoundedPanelBytes;
}

cudaError_t RoundRows(const DeviceMatrix& x, void* rounded, Stream stream) {
  return Round<false>(x, x.cols, rounded, stream);
}

cudaError_t SiluMulRounded(const DeviceMatrix& gate_up, void* rounded, Stream stream) {
  if (gate_up.cols % 2 != 0) return cudaErrorInvalidValue;
  return Round<true>(gate_up, gate_up.cols / 2, rounded, stream);
}

cudaError_t MatmulRounded(const MatmulArgs& args, const DeviceWeights& w, const void* rounded,
                          Stream stream) {
  if (!IsInt8(w) || args.m < 0 || args.m > kMostRows) return cudaErrorInvalidValue;
  if (args.m == 0) return cudaSuccess;
  if (!MultipliesAsItLies(args.m, w) || (args.portable && w.integer_bits != 8)) {
    return cudaErrorInvalidValue;
  }
  const Int8Operands operands = OperandsOf(args, w, rounded);
  if (w.integer_bits == 4 && StreamsInt4(args.m, w.in)) return MatmulInt4Stream(operands, stream);
  if (!args.portable && HasInt8GroupMatmul()) return MatmulInt8ByGroups(operands, stream);
  return MultiplyPlainly(operands, stream);
}

cudaError_t MatmulRoundedTiles(const MatmulArgs& args, const DeviceWeights& w, const void* rounded,
                               const RowTiles& rows, int32_t tile_rows, Stream stream) {
  if (!IsInt8(w) || !HasInt8GroupMatmul() || !MultipliesAsItLies(tile_rows, w)) {
    return cudaErrorInvalidValue;
  }
  Int8Operands operands = OperandsOf(args, w, rounded);
  operands.of_rows = rows;
  return MatmulInt8OfTiles(operands, tile_rows, stream);
}

bool GatesRounded(int64_t m, const DeviceWeights& w) {
  return IsInt8(w) && w.integer_bits == 8 && m > kMatmulBatchRows && m <= kMostRows &&
         w.out % (2 * kGroupValues) == 0 && HasInt8GroupMatmul();
}

cudaError_t MatmulRoundedGated(const MatmulArgs& args, const DeviceWeights& w, const void* rounded,
                               void* gated, Stream stream) {
  if (args.portable || args.accumulate || !GatesRounded(args.m, w)) return cudaErrorInvalidValue;
  Int8Operands operands = OperandsOf(args, w, rounded);
  operands.gated = RoundedRowsOf(gated, w.out / 2);
  return MatmulInt8ByGroups(operands, stream);
}

}  // namespace winnow::kernels::cuda
