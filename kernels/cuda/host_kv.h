// The CUDA backend's part of KV in shared memory (SharedKv of backend.h): a row cache for each pool, and
// the staging area that a layer's KV is brought to for dense attention.
#ifndef WINNOW_KERNELS_CUDA_HOST_KV_H_
#define WINNOW_KERNELS_CUDA_HOST_KV_H_

#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/row_cache.h"

namespace winnow::kernels::cuda {

class CudaBackend;
class HostKv;

// One layer's KV.
struct HostPool {
  HostKv* kv = nullptr;
  DeviceRowCache cache;
  bool used = false;  // since the cache was emptied
};

class HostKv final : public SharedKv {
 public:
  ~HostKv() override;
  SharedKvSizes sizes() const override;
  void TakeReads(std::span<SharedKvReads> of_rows) override;

  const SharedKvShape& shape() const { return shape_; }
  SharedKvReads* reads() const { return reads_; }  // [max_batch_tokens], the device's
  std::byte* staging() const { return static_cast<std::byte*>(staging_.data()); }
  // Tables of blocks of the staging area: 0, 1, 2, ...
  std::span<const int32_t> identity() const { return identity_; }

 private:
  friend class CudaBackend;
  HostKv(CudaBackend& backend, const SharedKvShape& shape) : backend_(backend), shape_(shape) {}

  CudaBackend& backend_;
  const SharedKvShape shape_;
  Buffer memory_, staging_;
  SharedKvReads* reads_ = nullptr;
  std::vector<int32_t> identity_;
  std::vector<HostPool> pools_;
};

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_HOST_KV_H_
