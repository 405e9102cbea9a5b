// The CUDA backend's part of KV in shared memory (SharedKv of backend.h): a row cache for each pool, and
// two staging areas that layers' KV is brought to for dense attention: while one is attended to, the other
// is filled on a second stream, with what the next call is expected to want.
#ifndef WINNOW_KERNELS_CUDA_HOST_KV_H_
#define WINNOW_KERNELS_CUDA_HOST_KV_H_

#include <cuda_runtime_api.h>

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
  std::byte* staging(int area) const {
    return static_cast<std::byte*>(staging_.data()) + area * (staging_.size_bytes() / 2);
  }
  // Tables of blocks of a staging area: 0, 1, 2, ...
  std::span<const int32_t> identity() const { return identity_; }

 private:
  friend class CudaBackend;
  HostKv(CudaBackend& backend, const SharedKvShape& shape) : backend_(backend), shape_(shape) {}
  cudaError_t MakeEvents();
  // The chunks' tokens are written: what was brought of their blocks is void.
  void Void(const HostPool& pool, std::span<const AttentionChunk> chunks);
  void VoidAll() { ahead_.pool = nullptr; }

  CudaBackend& backend_;
  const SharedKvShape shape_;
  Buffer memory_, staging_;
  cudaEvent_t free_[2] = {};      // the area's last attention is over
  cudaEvent_t listed_ = nullptr;  // the list of blocks to bring is on the device
  int area_ = 0;                  // of the last attention
  // What was brought for a call to come.
  struct Ahead {
    const HostPool* pool = nullptr;  // null: nothing
    int area = 0;
    cudaEvent_t done = nullptr;
    std::vector<int32_t> blocks;  // by place in the area; -1: nothing
  };
  Ahead ahead_;
  SharedKvReads* reads_ = nullptr;
  std::vector<int32_t> identity_;
  std::vector<HostPool> pools_;
};

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_HOST_KV_H_
