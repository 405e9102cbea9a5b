// Mapping. A warp routes a row: lane l has experts l, l + 32, ..., and finds each slot's expert by a reduction over its own
// that are left. A block copies a row, or adds up a piece of one.
#include "kernels/cuda/experts.h"

#include <algorithm>

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/experts.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRouteWarps = 4;
constexpr int kWarp = 32;
static_assert(kExpertsMax <= kWarp * 32);  // a lane's experts are the bits of a word

__global__ void __launch_bounds__(kRouteWarps* kWarp)
    RouteKernel(const float* logits, int64_t stride, int32_t rows, int32_t experts,
                int32_t per_token, bool normalize, int32_t* ids, float* weights,
                int64_t weights_stride) {
  LetNextStart();
  WaitForEarlier();
  const int32_t lane = threadIdx.x % kWarp;
  const int32_t row = blockIdx.x * kRouteWarps + threadIdx.x / kWarp;
  if (row >= rows) return;
  logits += row * stride;
  ids += int64_t{row} * per_token;
  weights += row * weights_stride;
  // fmaxf passes over a NaN.
  float largest = -INFINITY;
  for (int32_t e = lane; e < experts; e += kWarp) largest = fmaxf(largest, logits[e]);
  largest = WarpMax(largest);
  const auto mass = [&](int32_t e) { return expf(logits[e] - largest); };
  float all = 0.0f;
  for (int32_t e = lane; e < experts; e += kWarp) all += mass(e);
  all = WarpSum(all);

  uint32_t taken = 0;
  float chosen = 0.0f;
  for (int32_t slot = 0; slot < per_token; ++slot) {
    float best = -INFINITY;
    int32_t id = experts;
    for (int32_t e = lane, i = 0; e < experts; e += kWarp, ++i) {
      const float key = fmaxf(-INFINITY, logits[e]);
      if ((taken >> i & 1) != 0 || (id < experts && key <= best)) continue;
      best = key;
      id = e;
    }
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(kFullMask, best, distance);
      const int32_t other_id = __shfl_xor_sync(kFullMask, id, distance);
      // A lane without experts that are left has the id `experts`, which is above all others.
      const bool none = id == experts, takes = other > best || (other == best && other_id < id);
      if (other_id < experts && (none || takes)) {
        best = other;
        id = other_id;
      }
    }
    if (id % kWarp == lane) taken |= 1u << (id / kWarp);
    const float of_slot = mass(id);
    chosen += of_slot;
    if (lane == 0) {
      ids[slot] = id;
      weights[slot] = of_slot;
    }
  }
  const float sum = isnan(all) || !normalize ? all : chosen;
  __syncwarp();
  for (int32_t slot = lane; slot < per_token; slot += kWarp) weights[slot] /= sum;
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
              int64_t weights_stride, int32_t per_token, float* y, int64_t y_stride, int32_t cols) {
  LetNextStart();
  WaitForEarlier();
  const int32_t column = blockIdx.y * kThreads + threadIdx.x;
  if (column >= cols) return;
  places += int64_t{blockIdx.x} * per_token;
  weights += blockIdx.x * weights_stride;
  float sum = 0.0f;
  for (int32_t slot = 0; slot < per_token; ++slot) {
    const float product = __fmul_rn(weights[slot], x[places[slot] * x_stride + column]);
    sum = slot == 0 ? product : __fadd_rn(sum, product);
  }
  float* to = y + blockIdx.x * y_stride + column;
  *to = __fadd_rn(*to, sum);
}

}  // namespace

cudaError_t RouteExperts(const DeviceMatrix& logits, bool normalize, int32_t* ids,
                         const DeviceMatrix& weights, Stream stream) {
  const int64_t experts = logits.cols, per_token = weights.cols;
  if (logits.rows > INT32_MAX || experts > kExpertsMax || per_token < 1 || per_token > experts ||
      weights.rows < logits.rows) {
    return cudaErrorInvalidValue;
  }
  if (logits.rows == 0) return cudaSuccess;
  return Launch(RouteKernel, static_cast<unsigned>(CeilDiv(logits.rows, kRouteWarps)),
                kRouteWarps * kWarp, 0, stream, false, logits.data, logits.stride,
                static_cast<int32_t>(logits.rows), static_cast<int32_t>(experts),
                static_cast<int32_t>(per_token), normalize, ids, weights.data, weights.stride);
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

cudaError_t AddExpertRows(const DeviceMatrix& x, const int32_t* places, const DeviceMatrix& weights,
                          const DeviceMatrix& y, Stream stream) {
  const int64_t pieces = CeilDiv(y.cols, kThreads);
  if (weights.rows > INT32_MAX || pieces > 65535 || x.cols != y.cols || y.rows < weights.rows) {
    return cudaErrorInvalidValue;
  }
  if (weights.rows == 0 || y.cols == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(weights.rows), static_cast<unsigned>(pieces));
  return Launch(AddKernel, grid, kThreads, 0, stream, false, x.data, x.stride, places, weights.data,
                weights.stride, static_cast<int32_t>(weights.cols), y.data, y.stride,
                static_cast<int32_t>(y.cols));
}

}  // namespace winnow::kernels::cuda
