// KV in pinned host memory: what operations do with a pool that lies there.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "kernels/check.h"
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/host_kv.h"
#include "kernels/cuda/layer_ops.h"
#include "kernels/cuda/pinned_memory.h"
#include "kernels/cuda/row_attention.h"
#include "kernels/cuda/row_gather.h"

namespace winnow::kernels::cuda {
namespace {

int64_t RowsOf(const SharedKvShape& shape) {
  return int64_t{shape.num_blocks} * shape.layout.kv_heads * shape.layout.block_tokens;
}
size_t SlotBytes(const SharedKvShape& shape) {
  return static_cast<size_t>(SlotRowBytes(static_cast<int64_t>(shape.layout.RowBytes())));
}
// Of one pool. More than it has rows would never be used.
int64_t SlotsOf(const SharedKvShape& shape) {
  const size_t each = SlotBytes(shape) + kRowCacheSlotBytes;
  const size_t slots = shape.cache_bytes / static_cast<size_t>(shape.num_pools) / each;
  return std::min(static_cast<int64_t>(slots), RowsOf(shape));
}
int32_t StagingBlocks(const SharedKvShape& shape) {
  const int64_t blocks = CeilDiv(shape.max_context, shape.layout.block_tokens);
  return static_cast<int32_t>(std::min<int64_t>(blocks, shape.num_blocks));
}

// Where the parts of HostKv's memory lie. There are none of frames: rows have no cache.
struct Plan {
  explicit Plan(const SharedKvShape& shape) {
    if (shape.of_frames) return;
    const auto pools = static_cast<size_t>(shape.num_pools);
    const auto slots = static_cast<size_t>(SlotsOf(shape));
    row_part = AlignUp(slots * SlotBytes(shape), 256);
    slot_part = AlignUp(slots * sizeof(RowCacheSlot), 256);
    map_part = AlignUp(static_cast<size_t>(RowsOf(shape)) * 4, 256);
    slots_at = pools * row_part;
    maps_at = slots_at + pools * slot_part;
    states_at = maps_at + pools * map_part;
    reads_at = states_at + AlignUp(pools * sizeof(RowCacheState), 256);
    size_bytes = reads_at + AlignUp(shape.max_batch_tokens * sizeof(SharedKvReads), 256);
  }
  size_t row_part = 0, slot_part = 0, map_part = 0;  // of one pool
  size_t slots_at = 0, maps_at = 0, states_at = 0, reads_at = 0, size_bytes = 0;
};

SharedKvSizes SizesOf(const SharedKvShape& shape) {
  if (shape.num_pools == 0) return {};
  const Plan plan(shape);
  SharedKvSizes sizes;
  sizes.cache_bytes = plan.maps_at;
  sizes.table_bytes = plan.size_bytes - plan.maps_at;
  sizes.staging_bytes = size_t{2} * StagingBlocks(shape) * shape.layout.BlockBytes();
  sizes.cache_rows = SlotsOf(shape) * shape.num_pools;
  return sizes;
}

constexpr char kBringing[] = "KV from the host";

}  // namespace

HostKv::HostKv(CudaBackend& backend, const SharedKvShape& shape)
    : backend_(backend),
      shape_(shape),
      staging_(shape.layout.block_tokens, StagingBlocks(shape), shape.num_pools, shape.num_blocks) {
}

HostKv::~HostKv() {
  // Nothing that still runs may read what goes now.
  static_cast<void>(backend_.Synchronize());
  for (const cudaEvent_t event : {asked_, brought_}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  for (const HostPool& pool : pools_) backend_.host_pools_.erase(pool.cache.pool);
}

SharedKvSizes HostKv::sizes() const { return SizesOf(shape_); }

void HostKv::TakeReads(std::span<SharedKvReads> of_rows) {
  WINNOW_CHECK(static_cast<int64_t>(of_rows.size()) <= shape_.max_batch_tokens);
  if (backend_.failed() || of_rows.empty()) return;
  if (shape_.of_frames) {
    std::fill(of_rows.begin(), of_rows.end(), SharedKvReads());
    return;
  }
  if (backend_.Good(cudaMemcpyAsync(of_rows.data(), reads_, of_rows.size_bytes(),
                                    cudaMemcpyDeviceToHost, backend_.stream()),
                    "counts of rows")) {
    backend_.Good(cudaMemsetAsync(reads_, 0, of_rows.size_bytes(), backend_.stream()),
                  "counts of rows");
  }
}

void HostKv::ForgetRows(std::span<const int32_t> blocks) {
  staging_.WrittenAnywhere();
  if (blocks.empty() || SlotsOf(shape_) == 0 || !backend_.BeginStaging(blocks.size_bytes() + 256)) {
    return;
  }
  const int32_t* on_device = backend_.Stage(blocks);
  if (!backend_.EndStaging()) return;
  for (const HostPool& pool : pools_) {
    // Empty since it was made, or emptied.
    if (!pool.used) continue;
    backend_.Good(cuda::ForgetRows(on_device, static_cast<int32_t>(blocks.size()), pool.cache,
                                   shape_.layout, backend_.stream()),
                  "the row cache");
  }
}

SharedKvSizes CudaBackend::SizeSharedKv(const SharedKvShape& shape) const { return SizesOf(shape); }

std::unique_ptr<SharedKv> CudaBackend::ShareKv(const SharedKvShape& shape,
                                               std::span<std::byte* const> pools,
                                               std::string* why) {
  WINNOW_CHECK(shape.num_pools > 0 && static_cast<int32_t>(pools.size()) == shape.num_pools);
  WINNOW_CHECK(!shape.of_frames || (shape.num_pools == 1 && shape.cache_bytes == 0));
  if (RowsOf(shape) > INT32_MAX && !shape.of_frames) {
    *why = std::to_string(RowsOf(shape)) + " rows in a layer, and " + std::to_string(INT32_MAX) +
           " are the most that it numbers";
    return nullptr;
  }
  const SharedKvSizes sizes = SizesOf(shape);
  std::unique_ptr<HostKv> kv(new HostKv(*this, shape));
  const Plan plan(shape);
  if (!shape.of_frames) kv->memory_ = Allocate(plan.size_bytes);
  if (shape.of_frames || kv->memory_.data() != nullptr) {
    kv->areas_ = Allocate(sizes.staging_bytes);
  }
  if (kv->areas_.data() == nullptr) {
    *why = failed() ? failure_
                    : "no memory on the device: " + std::to_string(sizes.cache_bytes) +
                          " bytes for the row cache, " + std::to_string(sizes.table_bytes) +
                          " for the table of rows and " + std::to_string(sizes.staging_bytes) +
                          " for two layers of the longest sequence";
    return nullptr;
  }
  if (ahead_stream_ == nullptr) {
    Good(cudaStreamCreateWithFlags(&ahead_stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  Good(kv->MakeEvents(), "cudaEventCreate");
  auto* memory = static_cast<std::byte*>(kv->memory_.data());
  kv->reads_ = reinterpret_cast<SharedKvReads*>(memory + plan.reads_at);
  for (size_t i = 0; i < pools.size(); ++i) {
    DeviceRowCache cache;
    cache.pool = pools[i];
    cache.rows = memory + i * plan.row_part;
    cache.slots = reinterpret_cast<RowCacheSlot*>(memory + plan.slots_at + i * plan.slot_part);
    cache.slot_of_row = reinterpret_cast<int32_t*>(memory + plan.maps_at + i * plan.map_part);
    cache.state = reinterpret_cast<RowCacheState*>(memory + plan.states_at) + i;
    cache.num_slots = static_cast<int32_t>(SlotsOf(shape));
    cache.row_bytes = static_cast<int32_t>(shape.layout.RowBytes());
    kv->pools_.push_back({kv.get(), static_cast<int32_t>(i), cache});
  }
  for (HostPool& pool : kv->pools_) {
    const bool is_new = host_pools_.emplace(pool.cache.pool, &pool).second;
    WINNOW_CHECK(is_new);
    Forget(pool);
  }
  if (!Synchronize()) {
    *why = failure_;
    return nullptr;
  }
  return kv;
}

// Empties the pool's cache.
void CudaBackend::Forget(HostPool& pool) {
  const DeviceRowCache& cache = pool.cache;
  pool.used = false;
  if (pool.kv->shape().of_frames) return;
  const std::vector<RowCacheSlot> free_slots(cache.num_slots, kFreeSlot);
  const RowCacheState state;
  const SharedKvShape& shape = pool.kv->shape();
  Good(cudaMemsetAsync(cache.slot_of_row, 0xff, static_cast<size_t>(RowsOf(shape)) * 4, stream()),
       "the row cache");
  Good(cudaMemcpyAsync(cache.slots, free_slots.data(), free_slots.size() * sizeof(RowCacheSlot),
                       cudaMemcpyHostToDevice, stream()),
       "the row cache");
  Good(cudaMemcpyAsync(cache.state, &state, sizeof state, cudaMemcpyHostToDevice, stream()),
       "the row cache");
  static_cast<void>(Synchronize());  // the sources go
}

HostPool* CudaBackend::HostPoolOf(const void* pool) const {
  if (host_pools_.empty()) return nullptr;
  const auto found = host_pools_.find(pool);
  return found == host_pools_.end() ? nullptr : found->second;
}

bool CudaBackend::CopyIntoHostPool(const void* host, void* pool, size_t size_bytes) {
  if (host_pools_.empty()) return false;
  auto* first = static_cast<std::byte*>(pool);
  for (const auto& [address, host_pool] : host_pools_) {
    const SharedKvShape& shape = host_pool->kv->shape();
    const size_t bytes = shape.num_blocks * shape.layout.BlockBytes();
    const auto* begin = static_cast<const std::byte*>(address);
    if (first < begin || first >= begin + bytes) continue;
    WINNOW_CHECK(first + size_bytes <= begin + bytes);
    if (!Synchronize()) return true;
    CopyInParallel(pool, host, size_bytes);
    host_pool->kv->staging().WrittenAnywhere();
    if (host_pool->used) Forget(*host_pool);
    return true;
  }
  return false;
}

void CudaBackend::WriteHostKv(HostPool& pool, const Tensor& k, const Tensor& v,
                              std::span<const AttentionChunk> chunks, const KvLayout& layout) {
  pool.used = true;
  pool.kv->staging().Written(pool.index, chunks);
  int32_t most = 0;
  for (const AttentionChunk& chunk : chunks) most = std::max(most, chunk.num_tokens);
  const DeviceChunk* on_device = StageChunks(chunks, layout);
  if (on_device == nullptr) return;
  const auto matrix = [](const Tensor& tensor) {
    return DeviceMatrix{static_cast<float*>(tensor.data), tensor.rows, tensor.cols, tensor.stride};
  };
  Good(WriteKvThrough(matrix(k), matrix(v), on_device, static_cast<int32_t>(chunks.size()), most,
                      pool.cache, layout, stream()),
       "writing KV to the host");
}

// Rows that are missing are fetched first: the order of summation is the list's, so attention over those
// that are there cannot go ahead of the others without showing in the bits.
void CudaBackend::AttendInHostPool(HostPool& pool, const AttendRowsArgs& args,
                                   const AttentionOutput& output) {
  WINNOW_CHECK(!pool.kv->shape().of_frames);
  const std::span<const RetrievalQuery> queries = args.queries;
  const KvLayout& layout = args.rows.layout;
  const Selection& chosen = args.rows.chosen;
  pool.used = true;
  const DeviceQuery* on_device = StageQueries(queries, layout.block_tokens);
  if (on_device == nullptr || !EndStaging()) return;
  const Selection selection = SelectionToRead(chosen, queries.size());
  RowAttentionShape shape{static_cast<int32_t>(queries.size()), GroupOf(args.q, layout), layout};
  const int32_t max_rows = RoundUp(MostAnchors(queries) + chosen.capacity, 128);  // of a list
  shape.max_rows = max_rows;
  const size_t lists = queries.size() * layout.kv_heads;
  const size_t lists_bytes = AlignUp(lists * sizeof(RowList), 256);
  if (failed() || !PrepareRows(shape) ||
      !Grow(fetched_, lists_bytes + lists * max_rows * sizeof(void*), "addresses of rows")) {
    return;
  }
  auto* of_lists = reinterpret_cast<RowList*>(fetched_.data());
  if (Good(FetchRows(on_device, shape.num_queries, selection, pool.cache, layout, max_rows,
                     reinterpret_cast<const std::byte**>(fetched_.data() + lists_bytes), of_lists,
                     pool.kv->reads(), stream()),
           "rows from the host")) {
    Good(cuda::AttendRows(shape, args.q.f32(), args.q.stride, on_device, of_lists, args.scale,
                          output, rows_.data(), stream()),
         "attention over rows");
  }
}

// ---- dense attention ----

cudaError_t HostKv::MakeEvents() {
  for (cudaEvent_t* event : {&asked_, &brought_}) {
    if (const cudaError_t error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
        error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

// What Staging asks for, of one call of Attend: its attention is that of a pool on the device.
class CudaBackend::AttendStreams final : public StagingStreams {
 public:
  AttendStreams(CudaBackend& backend, HostKv& kv, const Tensor& q, const KvLayout& layout,
                float scale, const Tensor& out)
      : backend_(backend), kv_(kv), q_(q), layout_(layout), scale_(scale), out_(out) {}

  bool WaitForAhead() override {
    return backend_.Good(cudaStreamWaitEvent(backend_.stream(), kv_.brought_, 0), kBringing);
  }
  bool Bring(int32_t pool, std::span<const BlockMove> moves, int area) override {
    const BlockMove* on_device = Send(moves);
    return on_device != nullptr &&
           Copy(pool, on_device, moves.size(), area, kBringBlocks, backend_.stream());
  }
  bool BringAhead(int32_t pool, std::span<const BlockMove> moves, int area) override {
    const BlockMove* on_device = Send(moves);  // on the main stream, as all descriptors
    if (on_device == nullptr) return false;
    cudaStream_t ahead = backend_.ahead_stream_;
    backend_.ahead_runs_ = true;
    return backend_.Good(cudaEventRecord(kv_.asked_, backend_.stream()), kBringing) &&
           backend_.Good(cudaStreamWaitEvent(ahead, kv_.asked_, 0), kBringing) &&
           Copy(pool, on_device, moves.size(), area, kGatherBlocks, ahead) &&
           backend_.Good(cudaEventRecord(kv_.brought_, ahead), kBringing);
  }
  bool Attend(std::span<const AttentionChunk> chunks, int area) override {
    for (const AttentionChunk& chunk : chunks) {
      backend_.tables_.erase(chunk.block_table.data());  // others lay there before
    }
    backend_.AttendDevice(q_, chunks, kv_.area(area), layout_, scale_, out_);
    return !backend_.failed();
  }

 private:
  const BlockMove* Send(std::span<const BlockMove> moves) {
    if (!backend_.BeginStaging(moves.size_bytes() + 256)) return nullptr;
    const BlockMove* on_device = backend_.Stage(moves);
    return backend_.EndStaging() ? on_device : nullptr;
  }
  bool Copy(int32_t pool, const BlockMove* moves, size_t count, int area, int32_t blocks,
            cudaStream_t stream) {
    return backend_.Good(
        BringBlocks(kv_.pools_[pool].cache.pool, moves, static_cast<int32_t>(count),
                    static_cast<int64_t>(kv_.shape().layout.BlockBytes()), kv_.area(area), blocks,
                    stream),
        kBringing);
  }

  CudaBackend& backend_;
  HostKv& kv_;
  const Tensor& q_;
  const KvLayout& layout_;
  const float scale_;
  const Tensor& out_;
};

void CudaBackend::AttendHost(const HostPool& pool, const Tensor& q,
                             std::span<const AttentionChunk> chunks, const KvLayout& layout,
                             float scale, const Tensor& out) {
  if (failed()) return;
  AttendStreams streams(*this, *pool.kv, q, layout, scale, out);
  static_cast<void>(pool.kv->staging().Attend(streams, pool.index, chunks));
}

}  // namespace winnow::kernels::cuda
