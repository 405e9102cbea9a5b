#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <atomic>
#include <string_view>
#include <utility>

#include "kernels/check.h"
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/dense_attention.h"
#include "kernels/cuda/pinned_memory.h"
#include "kernels/cuda/row_attention.h"
#include "kernels/cuda/row_cache.h"
#include "kernels/cuda/row_gather.h"
#include "kernels/cuda/timeline.h"

namespace winnow::kernels {

std::unique_ptr<Backend> MakeCudaBackend(bool graphs, std::string* why) {
  return cuda::CudaBackend::Create(0, why, graphs);
}

void LetCudaKernelsStartEarly(bool let) { cuda::kernels_start_early = let; }

namespace cuda {
namespace {

// Of the device's memory, left to workspaces.
constexpr int64_t kReserveBytes = int64_t{1} << 30;
constexpr size_t kLeastStagingBytes = size_t{8} << 20;
// From here on memory is pinned in pieces, by several threads.
constexpr size_t kLeastPinnedBytes = size_t{1} << 30;
// Copies that a kernel does together: so many at least, cut into units of a power of two from the one size
// to the other; larger ones are the copy engine's, which needs no multiprocessor.
constexpr size_t kLeastTogether = 8;
constexpr size_t kLeastUnitBytes = 256;
constexpr size_t kTogetherBytes = 4096;
constexpr size_t kMostPartBytes = size_t{128} << 10;

// A bit for each device on which a backend of this process has kernels whose blocks wait for each other without a
// cooperative launch: one backend of a device at a time.
std::atomic<uint64_t> waited_on = 0;

bool BeAlone(int device) {
  int shared = 0;  // with other processes, whose kernels run at the same time
  if (device >= 64 ||
      cudaDeviceGetAttribute(&shared, cudaDevAttrMpsEnabled, device) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  const uint64_t bit = uint64_t{1} << device;
  return shared == 0 && (waited_on.fetch_or(bit) & bit) == 0;
}

std::string VersionOf(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

// ---- the device ----

std::unique_ptr<CudaBackend> CudaBackend::Create(int device, std::string* why, bool graphs) {
  int driver = 0, runtime = 0, devices = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  cudaError_t error = cudaGetDeviceCount(&devices);
  if (driver == 0) {
    *why = "there is no NVIDIA driver here";
    return nullptr;
  }
  if (error == cudaErrorInsufficientDriver) {
    *why = "the NVIDIA driver is of CUDA " + VersionOf(driver) + ", and this program needs " +
           VersionOf(runtime);
    return nullptr;
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && devices <= device)) {
    *why = "there is no CUDA device here";
    return nullptr;
  }
  cudaDeviceProp properties{};
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) {
    *why = std::string("the CUDA device cannot be used: ") + cudaGetErrorString(error);
    return nullptr;
  }
  const std::string capability =
      std::to_string(properties.major) + "." + std::to_string(properties.minor);
  if (properties.major < 8) {
    *why = std::string("the ") + properties.name + " has compute capability " + capability +
           ", and this program needs 8.0";
    return nullptr;
  }
  std::unique_ptr<CudaBackend> backend(new CudaBackend);
  backend->device_ = device;
  backend->alone_ = BeAlone(device);
  backend->name_ = std::string("cuda (") + properties.name + ", compute capability " + capability +
                   ", CUDA " + VersionOf(runtime) + ")";
  backend->arithmetic_ = "cuda " + capability + " " + WINNOW_CUDA_ARITHMETIC;
  backend->Good(UseDevice(device), "cudaSetDevice");
  std::unique_ptr<LoggedStream> launches;
  backend->Good(LoggedStream::Create(graphs, &launches), "cudaStreamCreate");
  backend->launches_ = std::move(launches);
  // Runs a kernel: a device whose code this program does not have says so here.
  Buffer trial = backend->Allocate(256);
  if (!backend->failed() && trial.data() == nullptr) backend->failure_ = "no memory is left on it";
  if (!backend->failed()) {
    backend->Good(cuda::StateMasses(static_cast<const float*>(trial.data()), 1, 16,
                                    static_cast<float*>(trial.data()) + 32, backend->stream()),
                  "a first kernel");
  }
  if (backend->failed() || !backend->Synchronize()) {
    *why = "the CUDA device cannot be used: " + backend->failure_;
    return nullptr;
  }
  return backend;
}

CudaBackend::~CudaBackend() {
  timeline::WriteAll();
  launches_.reset();  // waits
  if (ahead_stream_ != nullptr) cudaStreamDestroy(ahead_stream_);
  if (alone_) waited_on.fetch_and(~(uint64_t{1} << device_));
}

std::string CudaBackend::Refusal(const KvLayout& layout, int32_t num_heads) const {
  const int32_t d = layout.head_dim;
  if (layout.dtype != DType::kBF16 && !HasScales(layout.dtype)) {
    return std::string("KV in ") + DTypeName(layout.dtype) +
           " (bfloat16, int8 and float8_e4m3 only)";
  }
  if (d != 64 && d != 80 && d != 96 && d != 128 && d != kWideHeadDim) {
    return "a head dimension of " + std::to_string(d) + " (64, 80, 96, 128 and 256 only)";
  }
  if (d == kWideHeadDim && layout.dtype != DType::kBF16) {
    return "a head dimension of 256 with KV in " + std::string(DTypeName(layout.dtype)) +
           " (bfloat16 only)";
  }
  if (d == kWideHeadDim && !HasWideHeads()) {
    return "a head dimension of 256 on a device whose blocks have so little shared memory";
  }
  if (!HasKvRows(layout)) {
    return "blocks of " + std::to_string(layout.block_tokens) + " tokens with KV in " +
           DTypeName(layout.dtype) + " (multiples of 4 only)";
  }
  const int32_t group = num_heads / layout.kv_heads;
  if (group > kMaxHeadsPerKvHead) {
    return std::to_string(group) + " query heads per KV head (" +
           std::to_string(kMaxHeadsPerKvHead) + " at most)";
  }
  return {};
}

int64_t CudaBackend::AvailableBytes() const {
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) return 0;
  return std::max<int64_t>(0, static_cast<int64_t>(free) - kReserveBytes);
}

bool CudaBackend::Good(cudaError_t error, const char* what) {
  if (failed()) return false;
  if (error == cudaSuccess) return true;
  failure_ = std::string("CUDA, ") + what + ": " + cudaGetErrorString(error);
  return false;
}

Buffer CudaBackend::Allocate(size_t size_bytes) {
  void* data = nullptr;
  const size_t rounded = AlignUp(std::max<size_t>(size_bytes, 1), 256);
  if (cudaMalloc(&data, rounded) != cudaSuccess) {
    cudaGetLastError();  // no memory is an answer, not a failure
    return {};
  }
  if (!Good(cudaMemsetAsync(data, 0, rounded, stream()), "clearing memory")) {
    cudaFree(data);
    return {};
  }
  return Buffer(data, size_bytes, Behind([](void* p) { cudaFree(p); }));
}

Buffer CudaBackend::AllocateShared(size_t size_bytes) {
  const auto note = [this, size_bytes](void* data, std::function<void(void*)> release) {
    (*shared_)[static_cast<const std::byte*>(data)] = size_bytes;
    return Buffer(data, size_bytes,
                  Behind([shared = shared_, release = std::move(release)](void* p) {
                    shared->erase(static_cast<const std::byte*>(p));
                    release(p);
                  }));
  };
  if (size_bytes >= kLeastPinnedBytes) {
    auto pieces = std::make_shared<Buffer>(AllocatePinned(device_, size_bytes));
    if (pieces->data() == nullptr) return {};
    pinned_pieces_[static_cast<const std::byte*>(pieces->data())] = size_bytes;
    return note(pieces->data(), [pieces](void*) mutable { pieces.reset(); });
  }
  void* data = nullptr;
  const size_t rounded = AlignUp(std::max<size_t>(size_bytes, 1), 256);
  if (cudaHostAlloc(&data, rounded, cudaHostAllocDefault) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  std::memset(data, 0, rounded);
  return note(data, [](void* p) { cudaFreeHost(p); });
}

bool CudaBackend::IsShared(const std::byte* data, size_t size_bytes) const {
  auto memory = shared_->upper_bound(data);
  if (memory == shared_->begin()) return false;
  --memory;
  return data + size_bytes <= memory->first + memory->second;
}

bool CudaBackend::Synchronize() {
  SendSelections();
  selected_ = {};  // from here on the host may change it
  if (ahead_runs_) {
    // What it reads was staged, too.
    ahead_runs_ = false;
    Good(cudaStreamSynchronize(ahead_stream_), "a kernel");
  }
  static_cast<void>(stream());  // nothing is held back
  if (!Good(launches_->Synchronize(), "a kernel")) return false;
  TakeCounts();
  return true;
}

void CudaBackend::BeginPass() {
  if (!Synchronize()) return;
  ClearStaging();
  indexed_from_.clear();
}

size_t CudaBackend::InOnePiece(const void* host, size_t size_bytes) const {
  const auto* first = static_cast<const std::byte*>(host);
  auto pieces = pinned_pieces_.upper_bound(first);
  if (pieces == pinned_pieces_.begin()) return size_bytes;
  --pieces;
  const auto offset = static_cast<size_t>(first - pieces->first);
  if (offset >= pieces->second) return size_bytes;
  return std::min(size_bytes, kPinnedPieceBytes - offset % kPinnedPieceBytes);
}

void CudaBackend::SendToHost(const void* device, void* host, size_t size_bytes) {
  const auto* from = static_cast<const std::byte*>(device);
  auto* to = static_cast<std::byte*>(host);
  for (size_t at = 0; at < size_bytes;) {
    const size_t bytes = InOnePiece(to + at, size_bytes - at);
    Good(cudaMemcpyAsync(to + at, from + at, bytes, cudaMemcpyDeviceToHost, stream()),
         "a copy to the host");
    at += bytes;
  }
}

void CudaBackend::CopyToHost(const void* device, void* host, size_t size_bytes) {
  if (failed()) return;
  SendToHost(device, host, size_bytes);
  static_cast<void>(Synchronize());
}

void CudaBackend::CopyAllToHost(std::span<const CopyPart> parts) {
  if (failed()) return;
  if (!SendTogether(parts, /*to_device=*/false)) {
    for (const CopyPart& part : parts) SendToHost(part.device, part.host, part.size_bytes);
  }
  static_cast<void>(Synchronize());
}

// The runtime takes some microseconds for each copy, a kernel that reads and writes the host's memory as many
// for all of them. False: it is not for it, nothing was done.
bool CudaBackend::SendTogether(std::span<const CopyPart> parts, bool to_device) {
  if (failed() || parts.size() < kLeastTogether) return false;
  size_t total = 0, low_bits = kTogetherBytes;
  for (const CopyPart& part : parts) {
    if (!IsShared(part.host, part.size_bytes) || IsShared(part.device, part.size_bytes)) {
      return false;
    }
    total += part.size_bytes;
    low_bits |= part.size_bytes | reinterpret_cast<size_t>(part.host) |
                reinterpret_cast<size_t>(part.device);
  }
  // What all are made of.
  const size_t unit = low_bits & -low_bits;
  if (unit < kLeastUnitBytes || total / parts.size() > kMostPartBytes) return false;
  together_from_.clear();
  together_to_.clear();
  for (const CopyPart& part : parts) {
    for (size_t at = 0; at < part.size_bytes; at += unit) {
      together_from_.push_back((to_device ? part.host : part.device) + at);
      together_to_.push_back((to_device ? part.device : part.host) + at);
    }
  }
  const auto count = static_cast<int32_t>(together_from_.size());
  if (!BeginStaging(2 * together_from_.size() * sizeof(void*) + 256)) return true;
  const std::byte* const* from = Stage(std::span<const std::byte* const>(together_from_));
  std::byte* const* to = Stage(std::span<std::byte* const>(together_to_));
  const int32_t* of_rows = Stage(std::span(&count, 1));
  if (EndStaging()) {
    Good(GatherRows(from, to, of_rows, static_cast<int32_t>(unit), kBringBlocks, stream()),
         "many copies");
  }
  return true;
}

void CudaBackend::SendToDevice(const void* host, void* device, size_t size_bytes) {
  if (failed() || CopyIntoHostPool(host, device, size_bytes)) return;
  const auto* from = static_cast<const std::byte*>(host);
  auto* to = static_cast<std::byte*>(device);
  for (size_t at = 0; at < size_bytes;) {
    const size_t bytes = InOnePiece(from + at, size_bytes - at);
    Good(cudaMemcpyAsync(to + at, from + at, bytes, cudaMemcpyHostToDevice, stream()),
         "a copy to the device");
    at += bytes;
  }
}

void CudaBackend::CopyToDevice(const void* host, void* device, size_t size_bytes) {
  SendToDevice(host, device, size_bytes);
  static_cast<void>(Synchronize());
}

void CudaBackend::CopyAllToDevice(std::span<const CopyPart> parts) {
  if (!SendTogether(parts, /*to_device=*/true)) {
    for (const CopyPart& part : parts) SendToDevice(part.host, part.device, part.size_bytes);
  }
  static_cast<void>(Synchronize());
}

bool CudaBackend::TryGrow(Workspace& workspace, size_t size_bytes) {
  if (failed()) return false;
  if (size_bytes <= workspace.memory.size_bytes()) return true;
  if (!Synchronize()) return false;
  workspace.memory = Buffer();
  workspace.shape = {};
  workspace.memory = Allocate(size_bytes + size_bytes / 4);
  if (workspace.memory.data() == nullptr) workspace.memory = Allocate(size_bytes);
  return workspace.memory.data() != nullptr;
}

bool CudaBackend::Grow(Workspace& workspace, size_t size_bytes, const char* what) {
  if (!TryGrow(workspace, size_bytes) && !failed()) {
    failure_ = std::string("no memory on the device for ") + what + ": " +
               std::to_string(size_bytes) + " bytes";
  }
  return !failed();
}

bool CudaBackend::Prepare(Workspace& workspace, size_t size_bytes, const ZeroedPart& part,
                          const std::array<int64_t, 8>& shape, const char* what) {
  if (!Grow(workspace, size_bytes, what)) return false;
  if (workspace.shape == shape) return true;
  workspace.shape = shape;
  return Good(cudaMemsetAsync(workspace.data() + part.offset, 0, part.size_bytes, stream()), what);
}

// ---- descriptors ----

bool CudaBackend::BeginStaging(size_t size_bytes) {
  if (failed()) return false;
  staging_begin_ = staging_end_ = AlignUp(staging_end_, 256);
  if (staging_end_ + size_bytes <= pinned_.size_bytes()) return true;
  // Everything that was staged has been used; tables are sent again.
  const Selection selected = selected_;
  if (!Synchronize()) return false;
  selected_ = selected;  // no host has looked at it
  ClearStaging();
  if (size_bytes <= pinned_.size_bytes()) return true;
  const size_t wanted = std::max(kLeastStagingBytes, 2 * size_bytes);
  pinned_ = Buffer();
  staged_ = Buffer();
  pinned_ = AllocateShared(wanted);
  staged_ = Allocate(wanted);
  if ((pinned_.data() == nullptr || staged_.data() == nullptr) && !failed()) {
    failure_ = "no memory for descriptors: " + std::to_string(wanted) + " bytes";
  }
  return !failed();
}

void CudaBackend::ClearStaging() {
  staging_begin_ = staging_end_ = 0;
  tables_.clear();
  staged_values_.clear();
}

std::byte* CudaBackend::StageBytes(const void* values, size_t size_bytes, size_t alignment) {
  // A step says the same of each of its layers: what is there already is not sent again.
  const std::string_view bytes(static_cast<const char*>(values), size_bytes);
  const size_t hash = std::hash<std::string_view>()(bytes);
  const auto [first, last] = staged_values_.equal_range(hash);
  for (auto staged = first; staged != last; ++staged) {
    const auto [offset, size] = staged->second;
    if (size == size_bytes &&
        std::memcmp(static_cast<std::byte*>(pinned_.data()) + offset, values, size) == 0) {
      return static_cast<std::byte*>(staged_.data()) + offset;
    }
  }
  staging_end_ = AlignUp(staging_end_, std::max<size_t>(alignment, 16));
  WINNOW_CHECK(staging_end_ + size_bytes <= pinned_.size_bytes());
  if (size_bytes > 0) {
    std::memcpy(static_cast<std::byte*>(pinned_.data()) + staging_end_, values, size_bytes);
  }
  std::byte* on_device = static_cast<std::byte*>(staged_.data()) + staging_end_;
  if (size_bytes > 0) staged_values_.emplace(hash, std::pair(staging_end_, size_bytes));
  staging_end_ += size_bytes;
  return on_device;
}

bool CudaBackend::EndStaging() {
  if (staging_end_ == staging_begin_) return !failed();
  return Good(cudaMemcpyAsync(static_cast<std::byte*>(staged_.data()) + staging_begin_,
                              static_cast<std::byte*>(pinned_.data()) + staging_begin_,
                              staging_end_ - staging_begin_, cudaMemcpyHostToDevice, stream()),
              "descriptors");
}

const int32_t* CudaBackend::StageTable(std::span<const int32_t> table, int64_t blocks) {
  if (blocks == 0) return nullptr;
  WINNOW_CHECK(blocks <= static_cast<int64_t>(table.size()));
  StagedTable& staged = tables_[table.data()];
  if (staged.on_device == nullptr || staged.blocks < blocks) {
    const size_t behind = staging_end_;
    staged = {Stage(table.first(blocks)), blocks};
    if (staging_end_ != behind) staging_end_ += TableRoom(blocks) - static_cast<size_t>(blocks) * 4;
  }
  return staged.on_device;
}

bool CudaBackend::IsSettled(const RetrievalQuery& query) const {
  const auto indexed = indexed_from_.find(query.block_table.data());
  return indexed != indexed_from_.end() && query.mid.last <= indexed->second;
}

const DeviceQuery* CudaBackend::StageQueries(std::span<const RetrievalQuery> queries,
                                             int32_t block_tokens, size_t more_bytes) {
  size_t bytes = queries.size() * sizeof(DeviceQuery) + 256 + more_bytes;
  for (const RetrievalQuery& query : queries) {
    bytes += TableBytes(BlocksOf(int64_t{query.position} + 1, block_tokens));
  }
  if (!BeginStaging(bytes)) return nullptr;
  queries_.clear();
  for (const RetrievalQuery& query : queries) {
    queries_.push_back(
        {StageTable(query.block_table, BlocksOf(int64_t{query.position} + 1, block_tokens)),
         query.row, query.position, query.mid, query.k, query.least_key, IsSettled(query) ? 1 : 0});
  }
  return Stage(std::span<const DeviceQuery>(queries_));
}

const DeviceKeySpan* CudaBackend::StageSpans(std::span<const KeySpan> spans, const KvLayout& layout,
                                             int32_t* max_tokens) {
  size_t bytes = spans.size() * sizeof(DeviceKeySpan) + 256;
  *max_tokens = 0;
  for (const KeySpan& span : spans) {
    bytes += 2 * TableBytes(BlocksOf(span.tokens.last, layout.block_tokens));
    *max_tokens = std::max(*max_tokens, span.tokens.size());
  }
  if (!BeginStaging(bytes)) return nullptr;
  spans_.clear();
  for (const KeySpan& span : spans) {
    const auto index_table = span.index_table.empty() ? span.block_table : span.index_table;
    const auto [indexed, is_new] = indexed_from_.try_emplace(index_table.data(), span.tokens.first);
    if (!is_new) indexed->second = std::min(indexed->second, span.tokens.first);
    const int64_t blocks = BlocksOf(span.tokens.last, layout.block_tokens);
    spans_.push_back(
        {StageTable(span.block_table, blocks), span.tokens, StageTable(index_table, blocks)});
  }
  const DeviceKeySpan* on_device = Stage(std::span<const DeviceKeySpan>(spans_));
  return EndStaging() ? on_device : nullptr;
}

const DeviceChunk* CudaBackend::StageChunks(std::span<const AttentionChunk> chunks,
                                            const KvLayout& layout) {
  const auto blocks_of = [&layout](const AttentionChunk& chunk) {
    return BlocksOf(int64_t{chunk.position} + chunk.num_tokens, layout.block_tokens);
  };
  size_t bytes = chunks.size() * sizeof(DeviceChunk) + 256;
  for (const AttentionChunk& chunk : chunks) bytes += TableBytes(blocks_of(chunk));
  if (!BeginStaging(bytes)) return nullptr;
  chunks_.clear();
  for (const AttentionChunk& chunk : chunks) {
    chunks_.push_back({StageTable(chunk.block_table, blocks_of(chunk)), chunk.first_row,
                       chunk.num_tokens, chunk.position, chunk.window});
  }
  const DeviceChunk* on_device = Stage(std::span<const DeviceChunk>(chunks_));
  return EndStaging() ? on_device : nullptr;
}

const RowList* CudaBackend::StageLists(std::span<const RowList> lists) {
  // The addresses lie in shared memory, list after list: one copy takes them all.
  const std::byte* const* first = nullptr;
  const std::byte* const* last = nullptr;
  for (const RowList& list : lists) {
    if (list.count == 0) continue;
    if (first == nullptr || list.rows < first) first = list.rows;
    if (last == nullptr || list.rows + list.count > last) last = list.rows + list.count;
  }
  const size_t bytes = static_cast<size_t>(last - first) * sizeof(first[0]);
  if (!Grow(addresses_, std::max<size_t>(bytes, 1), "addresses of rows")) return nullptr;
  if (bytes > 0 &&
      !Good(cudaMemcpyAsync(addresses_.data(), first, bytes, cudaMemcpyHostToDevice, stream()),
            "addresses of rows")) {
    return nullptr;
  }
  lists_.assign(lists.begin(), lists.end());
  for (RowList& list : lists_) {
    list.rows = list.count == 0 ? nullptr
                                : reinterpret_cast<const std::byte* const*>(addresses_.data()) +
                                      (list.rows - first);
  }
  return Stage(std::span<const RowList>(lists_));
}

}  // namespace cuda
}  // namespace winnow::kernels
