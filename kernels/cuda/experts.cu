// Mapping. A warp routes a row: lane l has experts l, l + 32, ..., and finds each slot's expert by two reductions: the largest of
// what is left, and the lowest of the experts that have it. A block copies a row, or adds up a piece of one. Tiles: one block counts
// slots by expert and gives each expert as many tiles as they take, where there are few slots the same that routes them; the tiles'
// rows are made by as many warps as the most tiles would need, of which those without a tile end at once.
#include "kernels/cuda/experts.h"

#include <algorithm>

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_order.cuh"
#include "kernels/cuda/rounded_rows.cuh"
#include "kernels/cuda/silu.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRouteWarps = 4;
constexpr int kWarp = 32;

struct Routing {
  const float* logits;
  int64_t logits_stride;
  int32_t rows, experts, per_token;
  int16_t sigmoid, normalized;
  const float* correction;
  float* weights;
  int64_t weights_stride;
  float scale;
  int32_t unused;
};

__device__ __forceinline__ uint32_t ChoiceKey(float value) {
  return KeyOf(fmaxf(-INFINITY, value));  // of NaN that of minus infinity
}

// A row's experts and their weights, by a warp, whose lanes have up to kMine experts each.
template <int kMine>
__device__ __forceinline__ void RouteRow(const Routing& routing, int32_t row, int32_t lane,
                                         int32_t* ids) {
  const float* const logits = routing.logits + row * routing.logits_stride;
  float* const weights = routing.weights + row * routing.weights_stride;
  const int32_t experts = routing.experts, per_token = routing.per_token;
  const bool sigmoid = routing.sigmoid != 0, corrected = routing.correction != nullptr;
  uint32_t keys[kMine], largest_key = 0;  // 0: of no logit; taken, or no expert
  float mine[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int32_t e = lane + i * kWarp;
    mine[i] = e < experts ? logits[e] : -INFINITY;
    keys[i] = e < experts ? ChoiceKey(mine[i]) : 0;
    largest_key = max(largest_key, keys[i]);
  }
  const float largest = FloatOfKey(__reduce_max_sync(kFullMask, largest_key));
  const auto score = [&](float logit) {
    return sigmoid ? 1.0f / (1.0f + expf(-logit)) : expf(logit - largest);
  };
  float all = 0.0f;
  bool broken = false;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    if (lane + i * kWarp >= experts) continue;
    broken |= !(mine[i] < INFINITY);
    all += score(mine[i]);
  }
  all = WarpSum(all);
  if (__any_sync(kFullMask, broken)) all = NAN;
  if (corrected) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int32_t e = lane + i * kWarp;
      if (e >= experts) continue;
      const float of_expert = sigmoid ? score(mine[i]) : score(mine[i]) / all;
      keys[i] = ChoiceKey(__fadd_rn(of_expert, routing.correction[e]));
    }
  }

  float chosen = 0.0f;
  for (int32_t slot = 0; slot < per_token; ++slot) {
    uint32_t best = 0;
    int32_t id = experts;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (keys[i] <= best) continue;
      best = keys[i];
      id = lane + i * kWarp;
    }
    const uint32_t of_all = __reduce_max_sync(kFullMask, best);
    const auto taken = static_cast<int32_t>(
        __reduce_min_sync(kFullMask, static_cast<uint32_t>(best == of_all ? id : experts)));
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (lane + i * kWarp == taken) keys[i] = 0;
    }
    const float of_slot = score(corrected ? logits[taken] : FloatOfKey(of_all));
    chosen += of_slot;
    if (lane == 0) {
      ids[slot] = taken;
      weights[slot] = of_slot;
    }
  }
  float sum = sigmoid ? 1.0f : all;
  if (routing.normalized != 0) sum = sigmoid ? chosen + kLeastSigmoids : chosen;
  if (isnan(all)) sum = all;
  __syncwarp();
  for (int32_t slot = lane; slot < per_token; slot += kWarp) {
    weights[slot] = routing.scale * (weights[slot] / sum);
  }
}

// Experts of a lane that a kernel is made for.
constexpr int kFewOfLane = 4, kManyOfLane = 8, kMostOfLane = kExpertsMax / kWarp;
template <typename Kernel>
Kernel ForExperts(int64_t experts, Kernel few, Kernel many, Kernel most) {
  if (experts <= int64_t{kFewOfLane} * kWarp) return few;
  return experts <= int64_t{kManyOfLane} * kWarp ? many : most;
}

template <int kMine>
__global__ void __launch_bounds__(kRouteWarps* kWarp)
    RouteKernel(const __grid_constant__ Routing routing, int32_t* ids) {
  LetNextStart();
  WaitForEarlier();
  const int32_t lane = threadIdx.x % kWarp;
  const int32_t row = blockIdx.x * kRouteWarps + threadIdx.x / kWarp;
  if (row >= routing.rows) return;
  RouteRow<kMine>(routing, row, lane, ids + int64_t{row} * routing.per_token);
}

// Tiles and places of slots, by one block. A thread has an expert, and slots.
constexpr int kPlaceThreads = kExpertsMax;

// Finders of the matrices of a thread's expert, read before others' results are there.
struct OfThread {
  const void *gate_up = nullptr, *down = nullptr;

  __device__ __forceinline__ OfThread(const void* const* all_gate_up, const void* const* all_down,
                                      int32_t experts) {
    if (static_cast<int32_t>(threadIdx.x) < experts) {
      gate_up = all_gate_up[threadIdx.x];
      down = all_down[threadIdx.x];
    }
  }
};

__device__ __forceinline__ void PlaceSlots(const int32_t* ids, int32_t slots, int32_t per_token,
                                           const OfThread& of_thread, const ExpertTiles& tiles) {
  constexpr int kWarps = kPlaceThreads / kWarp;
  __shared__ int32_t of_expert[kExpertsMax], first_tile[kExpertsMax];
  __shared__ uint32_t scan[kWarps];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  of_expert[thread] = 0;
  __syncthreads();
  // A slot's number among its expert's, in whichever order they come.
  for (int32_t slot = thread; slot < slots; slot += kPlaceThreads) {
    tiles.place_of_slot[slot] = atomicAdd(&of_expert[ids[slot]], 1);
  }
  __syncthreads();
  const int32_t mine = (of_expert[thread] + tiles.tile_rows - 1) / tiles.tile_rows;
  uint32_t count;
  const auto first =
      static_cast<int32_t>(BlockExclusiveScan<kWarps>(static_cast<uint32_t>(mine), scan, &count));
  first_tile[thread] = first;
  for (int32_t tile = first; tile < first + mine; ++tile) {
    tiles.expert[tile] = thread;
    tiles.gate_up[tile] = of_thread.gate_up;
    tiles.down[tile] = of_thread.down;
  }
  const int32_t places = static_cast<int32_t>(count) * tiles.tile_rows;
  for (int32_t place = thread; place < places; place += kPlaceThreads) {
    tiles.row_of_place[place] = -1;
  }
  __syncthreads();
  for (int32_t slot = thread; slot < slots; slot += kPlaceThreads) {
    const int32_t place = first_tile[ids[slot]] * tiles.tile_rows + tiles.place_of_slot[slot];
    tiles.place_of_slot[slot] = place;
    tiles.row_of_place[place] = slot / per_token;
  }
  __syncthreads();
  if (thread == 0) {
    __threadfence();
    *reinterpret_cast<volatile int32_t*>(tiles.count) = static_cast<int32_t>(count);
  }
}

template <int kMine>
__global__ void __launch_bounds__(kPlaceThreads, 1)
    RouteToTilesKernel(const __grid_constant__ Routing routing, const void* const* gate_up,
                       const void* const* down, const __grid_constant__ ExpertTiles tiles) {
  __shared__ int32_t ids[kRoutedTogether];
  const OfThread of_thread(gate_up, down, routing.experts);
  WaitForEarlier();
  LetNextStart();  // not sooner: the products find the count that the layer before left (ExpertTiles)
  const auto thread = static_cast<int32_t>(threadIdx.x);
  for (int32_t row = thread / kWarp; row < routing.rows; row += kPlaceThreads / kWarp) {
    RouteRow<kMine>(routing, row, thread % kWarp, ids + row * routing.per_token);
  }
  __syncthreads();
  PlaceSlots(ids, routing.rows * routing.per_token, routing.per_token, of_thread, tiles);
}

__global__ void __launch_bounds__(kPlaceThreads, 1)
    PlaceSlotsKernel(const int32_t* ids, int32_t slots, int32_t per_token, int32_t experts,
                     const void* const* gate_up, const void* const* down,
                     const __grid_constant__ ExpertTiles tiles) {
  const OfThread of_thread(gate_up, down, experts);
  WaitForEarlier();
  LetNextStart();  // not sooner: the products find the count that the layer before left (ExpertTiles)
  PlaceSlots(ids, slots, per_token, of_thread, tiles);
}

// Source of a tile's row: a row of x, or zeros where its place has none; or what its place's gates and ups give.
template <bool kGates>
struct TileRow {
  const float* from;
  const float* bias = nullptr;
  int32_t cols;
  const ExpertGates& gates;

  __device__ __forceinline__ TileRow(const float* x, int64_t stride, const ExpertTiles& tiles,
                                     int32_t place, int32_t row_cols, const ExpertGates& of)
      : cols(row_cols), gates(of) {
    const int32_t row = kGates ? place : tiles.row_of_place[place];
    from = row < 0 ? nullptr : x + row * stride;
    if (kGates && gates.bias != nullptr) bias = gates.bias[tiles.expert[place / tiles.tile_rows]];
  }
  __device__ __forceinline__ float At(int32_t column) const {
    if (from == nullptr || column >= cols) return 0.0f;
    if constexpr (!kGates) return from[column];
    float gate = from[column], up = from[cols + column];
    if (bias != nullptr) {
      gate = __fadd_rn(gate, bias[column]);
      up = __fadd_rn(up, bias[cols + column]);
    }
    return gates.clamps != 0 ? ClampedSwigluOf(gate, up, gates.clamped) : SiluOf(gate, up);
  }
};

// A warp makes a slice of eight rows, a lane 16 bytes (matmul.h).
template <bool kGates>
__global__ void __launch_bounds__(kThreads)
    OrderTilesKernel(const float* x, int64_t stride, int32_t cols,
                     const __grid_constant__ ExpertTiles tiles,
                     const __grid_constant__ ExpertGates gates, uint4* to) {
  LetNextStart();
  WaitForEarlier();
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarp;
  const int32_t place = static_cast<int32_t>(blockIdx.x) * 8 + lane / 4;
  const auto slice = static_cast<int32_t>(blockIdx.y * (kThreads / kWarp) + threadIdx.x / kWarp);
  const int32_t slices = (cols + kOrderedSlice - 1) / kOrderedSlice;
  if (slice >= slices || place >= *tiles.count * tiles.tile_rows) return;
  const TileRow<kGates> row(x, stride, tiles, place, cols, gates);
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t column = slice * kOrderedSlice + i * 8 + lane % 4 * 2;
    pairs[i] = PackBf16(row.At(column), row.At(column + 1));
  }
  PutOrdered(to, TilesInPanels(tiles.tile_rows), slices, place, slice, lane % 4, pairs);
}

// A warp rounds a group of a row (rounded_rows.cuh).
template <bool kGates>
__global__ void __launch_bounds__(kThreads)
    RoundTilesKernel(const float* x, int64_t stride, int32_t cols,
                     const __grid_constant__ ExpertTiles tiles,
                     const __grid_constant__ ExpertGates gates,
                     const __grid_constant__ RoundedRows to) {
  LetNextStart();
  WaitForEarlier();
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarp;
  const auto place = static_cast<int32_t>(blockIdx.x);
  const auto group = static_cast<int32_t>(blockIdx.y * (kThreads / kWarp) + threadIdx.x / kWarp);
  if (group >= to.groups || place >= *tiles.count * tiles.tile_rows) return;
  const TileRow<kGates> row(x, stride, tiles, place, cols, gates);
  float values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = row.At(group * kGroupValues + lane * 4 + i);
  PutGroup(to, place, group, lane, values);
}

template <bool kGates>
cudaError_t Order(const DeviceMatrix& x, int64_t cols, const ExpertTiles& tiles,
                  const ExpertGates& gates, bool rounded, void* to, const Stream& stream) {
  const int64_t places = tiles.most * tiles.tile_rows;
  const int64_t pieces = CeilDiv(cols, rounded ? kGroupValues : kOrderedSlice);
  const int64_t blocks = CeilDiv(pieces, kThreads / kWarp);  // for the same rows
  if (cols < 1 || blocks > 65535 || places < 1 || places > INT32_MAX) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(rounded ? places : places / 8),
                  static_cast<unsigned>(blocks));
  const auto width = static_cast<int32_t>(cols);
  if (rounded) {
    return Launch(RoundTilesKernel<kGates>, grid, kThreads, 0, stream, false, x.data, x.stride,
                  width, tiles, gates, RoundedRowsOf(to, cols));
  }
  return Launch(OrderTilesKernel<kGates>, grid, kThreads, 0, stream, false, x.data, x.stride, width,
                tiles, gates, static_cast<uint4*>(to));
}

__global__ void __launch_bounds__(kThreads)
    GatherKernel(const float* x, int64_t x_stride, const int32_t* rows, float* out,
                 int64_t out_stride, int32_t cols) {
  LetNextStart();
  WaitForEarlier();
  const float* from = x + rows[blockIdx.x] * x_stride;
  float* to = out + blockIdx.x * out_stride;
  const bool fours = (cols | x_stride | out_stride) % 4 == 0 &&
                     (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out)) % 16 == 0;
  if (fours) {
    for (int32_t i = threadIdx.x; i < cols / 4; i += kThreads) {
      reinterpret_cast<float4*>(to)[i] = reinterpret_cast<const float4*>(from)[i];
    }
  } else {
    for (int32_t i = threadIdx.x; i < cols; i += kThreads) to[i] = from[i];
  }
}

__global__ void __launch_bounds__(kThreads)
    AddKernel(const float* x, int64_t x_stride, const int32_t* places, const float* weights,
              int64_t weights_stride, int32_t per_token, float* y, int64_t y_stride, int32_t cols,
              const float* const* bias, const int32_t* expert, int32_t tile_rows, int32_t* count) {
  LetNextStart();
  WaitForEarlier();
  if (count != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *count = 0;
  const int32_t column = blockIdx.y * kThreads + threadIdx.x;
  if (column >= cols) return;
  places += int64_t{blockIdx.x} * per_token;
  weights += blockIdx.x * weights_stride;
  float sum = 0.0f;
  for (int32_t slot = 0; slot < per_token; ++slot) {
    const int32_t place = places[slot];
    float value = x[place * x_stride + column];
    if (bias != nullptr) value = __fadd_rn(value, bias[expert[place / tile_rows]][column]);
    const float product = __fmul_rn(weights[slot], value);
    sum = slot == 0 ? product : __fadd_rn(sum, product);
  }
  float* to = y + blockIdx.x * y_stride + column;
  *to = __fadd_rn(*to, sum);
}

bool IsRefused(const DeviceMatrix& logits, const DeviceMatrix& weights) {
  return logits.rows > INT32_MAX || logits.cols > kExpertsMax || weights.cols < 1 ||
         weights.cols > logits.cols || weights.rows < logits.rows;
}

Routing RoutingOf(const DeviceMatrix& logits, const ExpertRouting& by,
                  const DeviceMatrix& weights) {
  return {logits.data,
          logits.stride,
          static_cast<int32_t>(logits.rows),
          static_cast<int32_t>(logits.cols),
          static_cast<int32_t>(weights.cols),
          by.scores == ExpertRouting::Scores::kSigmoid,
          by.normalized,
          by.correction,
          weights.data,
          weights.stride,
          by.scale,
          0};
}

}  // namespace

cudaError_t RouteExperts(const DeviceMatrix& logits, const ExpertRouting& routing, int32_t* ids,
                         const DeviceMatrix& weights, Stream stream) {
  if (IsRefused(logits, weights)) return cudaErrorInvalidValue;
  if (logits.rows == 0) return cudaSuccess;
  return Launch(ForExperts(logits.cols, RouteKernel<kFewOfLane>, RouteKernel<kManyOfLane>,
                           RouteKernel<kMostOfLane>),
                static_cast<unsigned>(CeilDiv(logits.rows, kRouteWarps)), kRouteWarps * kWarp, 0,
                stream, false, RoutingOf(logits, routing, weights), ids);
}

cudaError_t RouteToTiles(const DeviceMatrix& logits, const ExpertRouting& routing,
                         const void* const* gate_up, const void* const* down, int32_t* ids,
                         const ExpertTiles& tiles, const DeviceMatrix& weights, Stream stream) {
  const int64_t slots = logits.rows * weights.cols;
  if (IsRefused(logits, weights) || slots < 1 || slots > INT32_MAX || tiles.tile_rows < 1 ||
      tiles.most < MostExpertTiles(slots, logits.cols, tiles.tile_rows)) {
    return cudaErrorInvalidValue;
  }
  if (slots <= kRoutedTogether) {
    return Launch(ForExperts(logits.cols, RouteToTilesKernel<kFewOfLane>,
                             RouteToTilesKernel<kManyOfLane>, RouteToTilesKernel<kMostOfLane>),
                  1, kPlaceThreads, 0, stream, false, RoutingOf(logits, routing, weights), gate_up,
                  down, tiles);
  }
  if (const cudaError_t error = RouteExperts(logits, routing, ids, weights, stream);
      error != cudaSuccess) {
    return error;
  }
  return Launch(PlaceSlotsKernel, 1, kPlaceThreads, 0, stream, false, ids,
                static_cast<int32_t>(slots), static_cast<int32_t>(weights.cols),
                static_cast<int32_t>(logits.cols), gate_up, down, tiles);
}

cudaError_t OrderTiles(const DeviceMatrix& x, const ExpertTiles& tiles, bool rounded, void* to,
                       Stream stream) {
  return Order<false>(x, x.cols, tiles, {}, rounded, to, stream);
}

cudaError_t GateTiles(const DeviceMatrix& gate_up, const ExpertTiles& tiles,
                      const ExpertGates& gates, bool rounded, void* to, Stream stream) {
  if (gate_up.cols % 2 != 0) return cudaErrorInvalidValue;
  return Order<true>(gate_up, gate_up.cols / 2, tiles, gates, rounded, to, stream);
}

cudaError_t GatherExpertRows(const DeviceMatrix& x, const int32_t* rows, const DeviceMatrix& out,
                             Stream stream) {
  if (out.rows > INT32_MAX || x.cols != out.cols || out.cols > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (out.rows == 0) return cudaSuccess;
  return Launch(GatherKernel, static_cast<unsigned>(out.rows), kThreads, 0, stream, false, x.data,
                x.stride, rows, out.data, out.stride, static_cast<int32_t>(out.cols));
}

namespace {

// `tiles`: whose count is set to 0, and whose experts `bias` is of; or null.
cudaError_t Add(const DeviceMatrix& x, const int32_t* places, const DeviceMatrix& weights,
                const DeviceMatrix& y, const float* const* bias, const ExpertTiles* tiles,
                const Stream& stream) {
  const int64_t pieces = CeilDiv(y.cols, kThreads);
  if (weights.rows > INT32_MAX || pieces > 65535 || x.cols != y.cols || y.rows < weights.rows) {
    return cudaErrorInvalidValue;
  }
  if (weights.rows == 0 || y.cols == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(weights.rows), static_cast<unsigned>(pieces));
  return Launch(AddKernel, grid, kThreads, 0, stream, false, x.data, x.stride, places, weights.data,
                weights.stride, static_cast<int32_t>(weights.cols), y.data, y.stride,
                static_cast<int32_t>(y.cols), bias, tiles == nullptr ? nullptr : tiles->expert,
                tiles == nullptr ? 1 : tiles->tile_rows, tiles == nullptr ? nullptr : tiles->count);
}

}  // namespace

cudaError_t AddExpertRows(const DeviceMatrix& x, const int32_t* places, const DeviceMatrix& weights,
                          const DeviceMatrix& y, Stream stream) {
  return Add(x, places, weights, y, nullptr, nullptr, stream);
}

cudaError_t AddTiles(const DeviceMatrix& x, const ExpertTiles& tiles, const float* const* bias,
                     const DeviceMatrix& weights, const DeviceMatrix& y, Stream stream) {
  return Add(x, tiles.place_of_slot, weights, y, bias, &tiles, stream);
}

}  // namespace winnow::kernels::cuda
