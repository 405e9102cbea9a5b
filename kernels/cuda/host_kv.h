// The CUDA backend's part of KV in shared memory (SharedKv of backend.h): a row cache for each pool, and
// two staging areas that layers' KV is brought to for dense attention (staging.h).
#ifndef WINNOW_KERNELS_CUDA_HOST_KV_H_
#define WINNOW_KERNELS_CUDA_HOST_KV_H_

#include <cuda_runtime_api.h>

#include <span>
#include <vector>

#include "kernels/cuda/row_cache.h"
#include "kernels/cuda/staging.h"
#include "kernels/kv_ops.h"
#include "kernels/tensor.h"

namespace winnow::kernels::cuda {

class CudaBackend;
class HostKv;

// One layer's KV.
struct HostPool {
  HostKv* kv = nullptr;
  int32_t index = 0;  // among those of `kv`
  DeviceRowCache cache;
  bool used = false;  // since the cache was emptied
};

class HostKv final : public SharedKv {
 public:
  ~HostKv() override;
  SharedKvSizes sizes() const override;
  void TakeReads(std::span<SharedKvReads> of_rows) override;
  void ForgetRows(std::span<const int32_t> blocks) override;
  void ForgetStaged() override { staging_.WrittenAnywhere(); }

  const SharedKvShape& shape() const { return shape_; }
  SharedKvReads* reads() const { return reads_; }  // [max_batch_tokens], the device's
  std::byte* area(int i) const {
    return static_cast<std::byte*>(areas_.data()) + i * (areas_.size_bytes() / 2);
  }
  Staging& staging() { return staging_; }

 private:
  friend class CudaBackend;
  HostKv(CudaBackend& backend, const SharedKvShape& shape);
  cudaError_t MakeEvents();

  CudaBackend& backend_;
  const SharedKvShape shape_;
  Buffer memory_, areas_;
  Staging staging_;
  cudaEvent_t asked_ =
      nullptr;  // what the main stream was asked for before blocks are brought ahead
  cudaEvent_t brought_ = nullptr;  // what was brought ahead is there
  SharedKvReads* reads_ = nullptr;
  std::vector<HostPool> pools_;
};

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_HOST_KV_H_
