#include "kernels/cuda/stream.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <unordered_map>

#include "kernels/check.h"

namespace winnow::kernels::cuda {
namespace {

constexpr uint32_t kMostParams = 32;

cudaError_t LaunchNow(LaunchBytes bytes, cudaStream_t stream) {
  const auto& launch = *reinterpret_cast<const KernelLaunch*>(bytes.data());
  WINNOW_CHECK(launch.num_params <= kMostParams);
  std::array<cudaLaunchAttribute, 3> attributes = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
  config.blockDim = {launch.threads, 1, 1};
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = stream;
  config.attrs = attributes.data();
  if ((launch.flags & KernelLaunch::kStartsEarly) != 0) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if ((launch.flags & KernelLaunch::kCooperative) != 0) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  if (launch.cluster_blocks > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {launch.cluster_blocks, 1, 1};
  }
  std::array<void*, kMostParams> params = {};
  for (uint32_t i = 0; i < launch.num_params; ++i) {
    params[i] = const_cast<std::byte*>(bytes.data() + launch.offsets()[i]);
  }
  return cudaLaunchKernelExC(&config, launch.kernel, params.data());
}

// Every kernel may have so much shared memory without being allowed it: its variables, and dynamic.
constexpr size_t kAlwaysAllowedBytes = 48 * 1024;

// A kernel on a device, for the whole process: what it is allowed on one thread holds on all. The driver is
// never told a number below what is allowed already: that would take the rest away.
struct Known {
  bool has_allowed_bytes = false;
  size_t allowed_bytes = 0;  // of dynamic shared memory
  unsigned threads = 0;      // the last that was asked about; 0: none was
  size_t shared_bytes = 0;
  int blocks = 0;
};
std::mutex known_mutex;
std::map<int, std::unordered_map<const void*, Known>> known_by_device;

// REQUIRES: known_mutex is held.
cudaError_t Allow(Known& known, const void* kernel, size_t shared_bytes) {
  if (!known.has_allowed_bytes) {
    cudaFuncAttributes attributes = {};
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
        error != cudaSuccess) {
      return error;
    }
    known.allowed_bytes =
        kAlwaysAllowedBytes - std::min(kAlwaysAllowedBytes, attributes.sharedSizeBytes);
    known.has_allowed_bytes = true;
  }
  if (shared_bytes <= known.allowed_bytes) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error == cudaSuccess) known.allowed_bytes = shared_bytes;
  return error;
}

thread_local int device_of_thread = -1;  // not known

}  // namespace

int DeviceOfThread() {
  if (device_of_thread < 0 && cudaGetDevice(&device_of_thread) != cudaSuccess) {
    cudaGetLastError();  // what is asked next says so
    device_of_thread = -1;
  }
  return device_of_thread;
}

cudaError_t UseDevice(int device) {
  device_of_thread = -1;
  return cudaSetDevice(device);
}

cudaError_t AllowShared(const void* kernel, size_t shared_bytes) {
  if (shared_bytes == 0) return cudaSuccess;
  const std::lock_guard lock(known_mutex);
  return Allow(known_by_device[DeviceOfThread()][kernel], kernel, shared_bytes);
}

cudaError_t BlocksPerMultiprocessor(const void* kernel, unsigned threads, size_t shared_bytes,
                                    int* blocks) {
  const std::lock_guard lock(known_mutex);
  Known& known = known_by_device[DeviceOfThread()][kernel];
  if (const cudaError_t error = Allow(known, kernel, shared_bytes); error != cudaSuccess) {
    return error;
  }
  if (known.threads != threads || known.shared_bytes != shared_bytes) {
    if (const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &known.blocks, kernel, static_cast<int>(threads), shared_bytes);
        error != cudaSuccess) {
      known.threads = 0;
      return error;
    }
    known.threads = threads;
    known.shared_bytes = shared_bytes;
  }
  *blocks = known.blocks;
  return cudaSuccess;
}

Stream::operator cudaStream_t() const {
  if (log_ == nullptr) return stream_;
  // An error stays with the stream, and the device has failed in what is asked of it next.
  static_cast<void>(log_->EndRun());
  return log_->raw();
}

cudaError_t Stream::Launch(LaunchBytes launch) const {
  return log_ == nullptr ? LaunchNow(launch, stream_) : log_->Launch(launch);
}

// ---- the log's device ----

class LoggedStream::Graph final : public LaunchGraph {
 public:
  Graph(cudaGraphExec_t graph, Device& device) : graph_(graph), device_(device) {}
  ~Graph() override { cudaGraphExecDestroy(graph_); }
  bool Launch() override { return device_.Good(cudaGraphLaunch(graph_, device_.stream)); }

 private:
  cudaGraphExec_t graph_;
  Device& device_;
};

bool LoggedStream::Device::Good(cudaError_t result) {
  if (error == cudaSuccess) error = result;
  return error == cudaSuccess;
}

bool LoggedStream::Device::Launch(LaunchBytes launch) { return Good(LaunchNow(launch, stream)); }

std::unique_ptr<LaunchGraph> LoggedStream::Device::MakeGraph(
    std::span<const LaunchBytes> launches) {
  if (recorder == nullptr || error != cudaSuccess) return nullptr;
  cudaError_t result = cudaStreamBeginCapture(recorder, cudaStreamCaptureModeRelaxed);
  if (result != cudaSuccess) {
    Good(result);
    return nullptr;
  }
  for (const LaunchBytes launch : launches) {
    if (result == cudaSuccess) result = LaunchNow(launch, recorder);
  }
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(recorder, &graph);
  if (result == cudaSuccess) result = ended;
  cudaGraphExec_t made = nullptr;
  if (result == cudaSuccess) result = cudaGraphInstantiate(&made, graph, 0);
  if (graph != nullptr) cudaGraphDestroy(graph);
  if (result == cudaSuccess) result = cudaGraphUpload(made, stream);
  if (result == cudaErrorMemoryAllocation) {
    // Steps go on without it, as they were before.
    cudaGetLastError();
    if (made != nullptr) cudaGraphExecDestroy(made);
    return nullptr;
  }
  if (!Good(result)) return nullptr;
  return std::make_unique<Graph>(made, *this);
}

// ---- the stream ----

cudaError_t LoggedStream::Create(bool graphs, std::unique_ptr<LoggedStream>* stream) {
  stream->reset(new LoggedStream);
  Device& device = (*stream)->device_;
  cudaError_t error = cudaStreamCreateWithFlags(&device.stream, cudaStreamNonBlocking);
  if (error == cudaSuccess && graphs) {
    error = cudaStreamCreateWithFlags(&device.recorder, cudaStreamNonBlocking);
  }
  return error;
}

LoggedStream::~LoggedStream() {
  if (device_.stream != nullptr) {
    cudaStreamSynchronize(device_.stream);
    cudaStreamDestroy(device_.stream);
  }
  if (device_.recorder != nullptr) cudaStreamDestroy(device_.recorder);
}

cudaError_t LoggedStream::Launch(LaunchBytes launch) {
  if (device_.recorder == nullptr) {
    static_cast<void>(device_.Launch(launch));
  } else {
    static_cast<void>(log_.Launch(launch));
  }
  return device_.error;
}

cudaError_t LoggedStream::EndRun() {
  static_cast<void>(log_.EndRun());
  return device_.error;
}

cudaError_t LoggedStream::Synchronize() {
  if (EndRun() != cudaSuccess) return device_.error;
  log_.EndPass();
  static_cast<void>(device_.Good(cudaStreamSynchronize(device_.stream)));
  if (device_.error == cudaSuccess) log_.Waited();
  return device_.error;
}

}  // namespace winnow::kernels::cuda
