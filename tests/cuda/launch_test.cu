#include "kernels/cuda/launch.cuh"

#include "gtest/gtest.h"
#include "tests/cuda/cuda_testing.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int kVariableBytes = 18 * 1024;

// A kernel of its own for each size, because what a kernel is allowed once it may have for good. Sends `in` through values
// `variable` and `last` of both kinds of shared memory. (Of an array whose indexes it knows the compiler keeps those alone.)
template <int kDynamicBytes>
__global__ void ThroughSharedKernel(int in, int variable, int last, int* out) {
  __shared__ int variables[kVariableBytes / 4];
  extern __shared__ int dynamic[];
  variables[variable] = in;
  dynamic[last] = in;
  __syncthreads();
  *out = variables[variable] + dynamic[last];
}

template <int kDynamicBytes>
void ExpectRuns() {
  const DeviceArray<int> out(1);
  WINNOW_CUDA_OK(LaunchBehind(ThroughSharedKernel<kDynamicBytes>, dim3(1), 1, kDynamicBytes,
                              static_cast<cudaStream_t>(nullptr), kDynamicBytes,
                              kVariableBytes / 4 - 1, kDynamicBytes / 4 - 1, out.data()));
  EXPECT_EQ(out.Get()[0], 2 * kDynamicBytes);
}

using CudaLaunchTest = CudaTest;

// The driver gives 48 KiB unasked, of which a kernel's variables are a part.
TEST_F(CudaLaunchTest, AKernelHasTheSharedMemoryThatItIsLaunchedWith) {
  ExpectRuns<4>();
  ExpectRuns<30 * 1024>();
  ExpectRuns<30 * 1024 + 4>();
  ExpectRuns<32 * 1024>();
  ExpectRuns<48 * 1024>();
  ExpectRuns<48 * 1024 + 4>();
}

}  // namespace
}  // namespace winnow::kernels::cuda
