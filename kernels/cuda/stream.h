// Where launchers ask for their kernels. To tests and benchmarks a Stream is a CUDA stream. In the backend it
// is one whose launches go through a log (launch_log.h) and become graphs where they repeat themselves: they may
// be held back, but whatever else wants the CUDA stream (a copy, an event, a library) gets it by the conversion
// below, behind all that was launched before.
#ifndef WINNOW_KERNELS_CUDA_STREAM_H_
#define WINNOW_KERNELS_CUDA_STREAM_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>

#include "kernels/cuda/launch_log.h"

namespace winnow::kernels::cuda {

// A launch in bytes: this, `num_params` offsets of the kernel's parameters (uint32_t, from this one's first
// byte on), and the parameters. What is between them is zero.
struct KernelLaunch {
  static constexpr uint32_t kStartsEarly = 1;  // launch.cuh
  static constexpr uint32_t kCooperative = 2;

  const void* kernel = nullptr;
  uint32_t grid[3] = {1, 1, 1};
  uint32_t threads = 0;
  uint32_t shared_bytes = 0;
  uint32_t cluster_blocks = 1;
  uint32_t flags = 0;
  uint32_t num_params = 0;

  const uint32_t* offsets() const { return reinterpret_cast<const uint32_t*>(this + 1); }
};
static_assert(std::has_unique_object_representations_v<KernelLaunch>);

// The device that this thread's launches go to. Asked of the driver once, which takes as long as all else that a
// launcher does: whoever changes it does so here.
int DeviceOfThread();
cudaError_t UseDevice(int device);

// What the driver is asked about a kernel on that device, once. AllowShared: that it may have
// so much dynamic shared memory. BlocksPerMultiprocessor: how many of its blocks run at once there.
cudaError_t AllowShared(const void* kernel, size_t shared_bytes);
cudaError_t BlocksPerMultiprocessor(const void* kernel, unsigned threads, size_t shared_bytes,
                                    int* blocks);

class LoggedStream;

// A value, as cheap as a pointer.
class Stream {
 public:
  Stream(cudaStream_t stream) : stream_(stream) {}  // NOLINT: a stream is what it stands for
  explicit Stream(LoggedStream& log) : log_(&log) {}

  // Behind all that was launched here before.
  operator cudaStream_t() const;  // NOLINT: for <<<>>> and the runtime's functions
  cudaError_t Launch(LaunchBytes launch) const;

 private:
  cudaStream_t stream_ = nullptr;
  LoggedStream* log_ = nullptr;
};

// A CUDA stream of its own, which does not wait for others.
class LoggedStream {
 public:
  // Without `graphs` every launch goes at once.
  static cudaError_t Create(bool graphs, std::unique_ptr<LoggedStream>* stream);
  ~LoggedStream();  // waits for the device
  LoggedStream(const LoggedStream&) = delete;
  LoggedStream& operator=(const LoggedStream&) = delete;

  // What was held back may fail in a later call, or in this one.
  cudaError_t Launch(LaunchBytes launch);
  cudaError_t EndRun();
  cudaStream_t raw() const { return device_.stream; }
  // The device has done all that it was asked for; meanwhile graphs are made.
  cudaError_t Synchronize();
  const LaunchCounts& counts() const { return log_.counts(); }

 private:
  class Graph;
  struct Device final : LaunchDevice {
    bool Launch(LaunchBytes launch) override;
    std::unique_ptr<LaunchGraph> MakeGraph(std::span<const LaunchBytes> launches) override;
    bool Good(cudaError_t result);

    cudaStream_t stream = nullptr;
    cudaStream_t recorder = nullptr;  // on which graphs are captured; null: none are made
    cudaError_t error = cudaSuccess;  // the first
  };

  LoggedStream() = default;

  Device device_;
  LaunchLog log_{device_};
};

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_STREAM_H_
