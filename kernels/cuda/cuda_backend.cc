#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"
#include "kernels/cuda/dense_attention.h"
#include "kernels/cuda/hamming_select.h"
#include "kernels/cuda/hash_encode.h"
#include "kernels/cuda/int4_keys.h"
#include "kernels/cuda/logit_select.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/page_bounds.h"
#include "kernels/cuda/row_attention.h"
#include "kernels/cuda/row_gather.h"
#include "kernels/cuda/top_p.h"
#include "kernels/host_matrix.h"

namespace winnow::kernels {

std::unique_ptr<Backend> MakeCudaBackend(std::string* why) {
  return cuda::CudaBackend::Create(0, why);
}

namespace cuda {
namespace {

// Of the device's memory, left to workspaces.
constexpr int64_t kReserveBytes = int64_t{1} << 30;
constexpr size_t kLeastStagingBytes = size_t{8} << 20;
// Weights on their way to be packed, and rows of the embedding on theirs.
constexpr size_t kPackBytes = size_t{64} << 20;
constexpr int64_t kEmbedRows = 512;
// Workspaces of calls that could be one: more queries than fit come in several launches.
constexpr size_t kWorkspaceBytes = size_t{256} << 20;
// Shapes grow in such steps, so that a sequence's next token does not make a new one.
constexpr int32_t kShapeTokens = 8192;
constexpr int32_t kExtendTokens = 8192;
// A chunk of so few queries leaves most of the device idle unless its keys are split.
constexpr int32_t kFewQueries = 8;

int32_t RoundUp(int32_t value, int32_t unit) {
  return static_cast<int32_t>(std::min<int64_t>(CeilDiv(value, unit) * unit, INT32_MAX));
}
// 0 tokens to a block: the kernel reads no tables.
constexpr int32_t kNoTables = 0;
int64_t BlocksOf(int64_t tokens, int32_t block_tokens) {
  return block_tokens == kNoTables ? 0 : CeilDiv(tokens, block_tokens);
}

DeviceMatrix MatrixOf(const Tensor& tensor) {
  return {static_cast<float*>(tensor.data), tensor.rows, tensor.cols, tensor.stride};
}

class CudaPackedMatrix final : public PackedMatrix {
 public:
  CudaPackedMatrix(const DeviceWeights& weights, Buffer memory)
      : weights_(weights), memory_(std::move(memory)) {}
  int64_t out_features() const override { return weights_.out; }
  int64_t in_features() const override { return weights_.in; }
  size_t size_bytes() const override { return memory_.size_bytes(); }
  const DeviceWeights& weights() const { return weights_; }

 private:
  DeviceWeights weights_;
  Buffer memory_;
};

class CudaPackedEncoder final : public PackedEncoder {
 public:
  CudaPackedEncoder(const DeviceEncoder& encoder, Buffer memory)
      : encoder_(encoder), memory_(std::move(memory)) {}
  int32_t bits() const override { return encoder_.bits(); }
  size_t size_bytes() const override { return memory_.size_bytes(); }
  const DeviceEncoder& encoder() const { return encoder_; }

 private:
  DeviceEncoder encoder_;
  Buffer memory_;
};

class CudaPackedFeatureMap final : public PackedFeatureMap {
 public:
  CudaPackedFeatureMap(const DeviceFeatureMap& map, Buffer memory)
      : map_(map), memory_(std::move(memory)) {}
  int32_t features() const override { return map_.features; }
  size_t size_bytes() const override { return memory_.size_bytes(); }
  const DeviceFeatureMap& map() const { return map_; }

 private:
  DeviceFeatureMap map_;
  Buffer memory_;
};

const DeviceEncoder& EncoderOf(const PackedEncoder& encoder) {
  return static_cast<const CudaPackedEncoder&>(encoder).encoder();
}
const DeviceFeatureMap& MapOf(const PackedFeatureMap& map) {
  return static_cast<const CudaPackedFeatureMap&>(map).map();
}

std::string VersionOf(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

int32_t GroupOf(const Tensor& q, const KvLayout& layout) {
  const int64_t heads = q.cols / layout.head_dim;
  WINNOW_CHECK(heads * layout.head_dim == q.cols && heads % layout.kv_heads == 0);
  return static_cast<int32_t>(heads / layout.kv_heads);
}

int32_t LastPosition(std::span<const RetrievalQuery> queries) {
  int32_t last = 0;
  for (const RetrievalQuery& query : queries) last = std::max(last, query.position);
  return last;
}

// Of any query: what it sees outside mid.
int32_t MostAnchors(std::span<const RetrievalQuery> queries) {
  int32_t most = 0;
  for (const RetrievalQuery& query : queries) {
    const int32_t seen = query.position + 1;
    const int32_t before = std::min(query.mid.first, seen);
    most = std::max(most, before + seen - std::clamp(query.mid.last, before, seen));
  }
  return most;
}

}  // namespace

// ---- the device ----

std::unique_ptr<CudaBackend> CudaBackend::Create(int device, std::string* why) {
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
  backend->name_ = std::string("cuda (") + properties.name + ", compute capability " + capability +
                   ", CUDA " + VersionOf(runtime) + ")";
  backend->arithmetic_ = "cuda " + capability;
  backend->Good(cudaSetDevice(device), "cudaSetDevice");
  backend->Good(cudaStreamCreateWithFlags(&backend->stream_, cudaStreamNonBlocking),
                "cudaStreamCreate");
  // Runs a kernel: a device whose code this program does not have says so here.
  Buffer trial = backend->Allocate(256);
  if (!backend->failed() && trial.data() == nullptr) backend->failure_ = "no memory is left on it";
  if (!backend->failed()) {
    backend->Good(cuda::StateMasses(static_cast<const float*>(trial.data()), 1, 16,
                                    static_cast<float*>(trial.data()) + 32, backend->stream_),
                  "a first kernel");
  }
  if (backend->failed() || !backend->Synchronize()) {
    *why = "the CUDA device cannot be used: " + backend->failure_;
    return nullptr;
  }
  return backend;
}

CudaBackend::~CudaBackend() {
  if (stream_ != nullptr) {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
}

std::string CudaBackend::Refusal(const KvLayout& layout, int32_t num_heads) const {
  const int32_t d = layout.head_dim;
  if (layout.dtype != DType::kBF16) {
    return std::string("KV in ") + DTypeName(layout.dtype) + " (bfloat16 only)";
  }
  if (d != 64 && d != 80 && d != 96 && d != 128) {
    return "a head dimension of " + std::to_string(d) + " (64, 80, 96 and 128 only)";
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
  if (!Good(cudaMemsetAsync(data, 0, rounded, stream_), "clearing memory")) {
    cudaFree(data);
    return {};
  }
  return Buffer(data, size_bytes, [](void* p) { cudaFree(p); });
}

Buffer CudaBackend::AllocateShared(size_t size_bytes) {
  void* data = nullptr;
  const size_t rounded = AlignUp(std::max<size_t>(size_bytes, 1), 256);
  if (cudaHostAlloc(&data, rounded, cudaHostAllocDefault) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  std::memset(data, 0, rounded);
  return Buffer(data, size_bytes, [](void* p) { cudaFreeHost(p); });
}

bool CudaBackend::Synchronize() {
  selected_ = {};  // from here on the host may change it
  return Good(cudaStreamSynchronize(stream_), "a kernel");
}

void CudaBackend::BeginPass() {
  if (!Synchronize()) return;
  staging_begin_ = staging_end_ = 0;
  tables_.clear();
}

void CudaBackend::CopyToHost(const void* device, void* host, size_t size_bytes) {
  if (failed()) return;
  Good(cudaMemcpyAsync(host, device, size_bytes, cudaMemcpyDeviceToHost, stream_),
       "a copy to the host");
  static_cast<void>(Synchronize());
}

void CudaBackend::CopyToDevice(const void* host, void* device, size_t size_bytes) {
  if (failed()) return;
  Good(cudaMemcpyAsync(device, host, size_bytes, cudaMemcpyHostToDevice, stream_),
       "a copy to the device");
  static_cast<void>(Synchronize());
}

bool CudaBackend::Grow(Workspace& workspace, size_t size_bytes, const char* what) {
  if (failed()) return false;
  if (size_bytes <= workspace.memory.size_bytes()) return true;
  if (!Synchronize()) return false;
  workspace.memory = Buffer();
  workspace.shape = {};
  workspace.memory = Allocate(size_bytes + size_bytes / 4);
  if (workspace.memory.data() == nullptr) workspace.memory = Allocate(size_bytes);
  if (workspace.memory.data() == nullptr && !failed()) {
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
  return Good(cudaMemsetAsync(workspace.data() + part.offset, 0, part.size_bytes, stream_), what);
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
  staging_begin_ = staging_end_ = 0;
  tables_.clear();
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

std::byte* CudaBackend::StageBytes(const void* values, size_t size_bytes, size_t alignment) {
  staging_end_ = AlignUp(staging_end_, std::max<size_t>(alignment, 16));
  WINNOW_CHECK(staging_end_ + size_bytes <= pinned_.size_bytes());
  if (size_bytes > 0) {
    std::memcpy(static_cast<std::byte*>(pinned_.data()) + staging_end_, values, size_bytes);
  }
  std::byte* on_device = static_cast<std::byte*>(staged_.data()) + staging_end_;
  staging_end_ += size_bytes;
  return on_device;
}

bool CudaBackend::EndStaging() {
  if (staging_end_ == staging_begin_) return !failed();
  return Good(cudaMemcpyAsync(static_cast<std::byte*>(staged_.data()) + staging_begin_,
                              static_cast<std::byte*>(pinned_.data()) + staging_begin_,
                              staging_end_ - staging_begin_, cudaMemcpyHostToDevice, stream_),
              "descriptors");
}

const int32_t* CudaBackend::StageTable(std::span<const int32_t> table, int64_t blocks) {
  if (blocks == 0) return nullptr;
  WINNOW_CHECK(blocks <= static_cast<int64_t>(table.size()));
  StagedTable& staged = tables_[table.data()];
  if (staged.on_device == nullptr || staged.blocks < blocks) {
    staged = {Stage(table.first(blocks)), blocks};
  }
  return staged.on_device;
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
         query.row, query.position, query.mid, query.k, 0});
  }
  return Stage(std::span<const DeviceQuery>(queries_));
}

const DeviceKeySpan* CudaBackend::StageSpans(std::span<const KeySpan> spans, const KvLayout& layout,
                                             int32_t* max_tokens) {
  size_t bytes = spans.size() * sizeof(DeviceKeySpan) + 256;
  *max_tokens = 0;
  for (const KeySpan& span : spans) {
    bytes += TableBytes(BlocksOf(span.tokens.last, layout.block_tokens));
    *max_tokens = std::max(*max_tokens, span.tokens.size());
  }
  if (!BeginStaging(bytes)) return nullptr;
  spans_.clear();
  for (const KeySpan& span : spans) {
    // All KV lies in the device's memory here, so an index has its blocks where KV has them.
    WINNOW_CHECK(span.index_table.empty() || span.index_table.data() == span.block_table.data());
    spans_.push_back({StageTable(span.block_table, BlocksOf(span.tokens.last, layout.block_tokens)),
                      span.tokens});
  }
  const DeviceKeySpan* on_device = Stage(std::span<const DeviceKeySpan>(spans_));
  return EndStaging() ? on_device : nullptr;
}

const RowList* CudaBackend::StageLists(std::span<const RowList> lists, int32_t* max_rows) {
  // The addresses lie in shared memory, list after list: one copy takes them all.
  const std::byte* const* first = nullptr;
  const std::byte* const* last = nullptr;
  *max_rows = 0;
  for (const RowList& list : lists) {
    *max_rows = std::max(*max_rows, list.count);
    if (list.count == 0) continue;
    if (first == nullptr || list.rows < first) first = list.rows;
    if (last == nullptr || list.rows + list.count > last) last = list.rows + list.count;
  }
  const size_t bytes = static_cast<size_t>(last - first) * sizeof(first[0]);
  if (!Grow(addresses_, std::max<size_t>(bytes, 1), "addresses of rows")) return nullptr;
  if (bytes > 0 &&
      !Good(cudaMemcpyAsync(addresses_.data(), first, bytes, cudaMemcpyHostToDevice, stream_),
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

// ---- products and what lies around attention ----

std::unique_ptr<PackedMatrix> CudaBackend::Pack(std::span<const HostMatrix> parts, DType compute) {
  WINNOW_CHECK(!parts.empty());
  DeviceWeights weights;
  weights.in = parts[0].cols;
  bool same = true;
  for (const HostMatrix& part : parts) {
    WINNOW_CHECK(part.cols == weights.in);
    WINNOW_CHECK(compute != DType::kF16 || part.dtype == DType::kF16);
    weights.out += part.rows;
    same = same && part.dtype == parts[0].dtype;
  }
  if (compute != DType::kBF16) {
    // Widening is exact, so weights stay as short as they are.
    weights.way = DeviceWeights::Way::kExact;
    weights.storage = same ? parts[0].dtype : DType::kF32;
  }
  if (failed()) return nullptr;
  Buffer memory =
      Allocate(PackedMatrixBytes(weights.out, weights.in, weights.way, weights.storage));
  if (memory.data() == nullptr) return nullptr;
  weights.data = memory.data();
  int64_t row = 0;
  for (const HostMatrix& part : parts) {
    const auto row_bytes = static_cast<size_t>(part.cols) * DTypeBytes(part.dtype);
    const int64_t at_once = std::max<int64_t>(1, static_cast<int64_t>(kPackBytes / row_bytes));
    for (int64_t first = 0; first < part.rows; first += at_once) {
      const int64_t count = std::min(at_once, part.rows - first);
      if (!Grow(pack_, count * row_bytes, "weights on their way")) return nullptr;
      Good(cudaMemcpyAsync(pack_.data(), RowOf(part, first), count * row_bytes,
                           cudaMemcpyHostToDevice, stream_),
           "weights");
      Good(PackRows(pack_.data(), part.dtype, row, count, weights, stream_), "weights");
      row += count;
    }
  }
  if (!Synchronize()) return nullptr;
  return std::make_unique<CudaPackedMatrix>(weights, std::move(memory));
}

void CudaBackend::Matmul(const Tensor& x, const PackedMatrix& w, const Tensor& y,
                         const MatmulEpilogue& epilogue) {
  const DeviceWeights& weights = static_cast<const CudaPackedMatrix&>(w).weights();
  WINNOW_CHECK(x.cols == weights.in && y.cols == weights.out && y.rows >= x.rows);
  if (!Grow(matmul_, MatmulWorkspaceBytes(x.rows, weights), "a matrix product")) return;
  Good(cuda::Matmul(
           {x.f32(), x.stride, x.rows, y.f32(), y.stride, epilogue.bias, epilogue.accumulate},
           weights, matmul_.data(), stream_),
       "a matrix product");
}

void CudaBackend::EmbedRows(const HostMatrix& table, std::span<const int32_t> ids,
                            const Tensor& out) {
  WINNOW_CHECK(out.cols == table.cols && out.rows >= static_cast<int64_t>(ids.size()));
  for (const int32_t id : ids) WINNOW_CHECK(id >= 0 && id < table.rows);
  // The table lies in the host's memory, at any address: its rows travel.
  const auto row_bytes = static_cast<size_t>(table.cols) * DTypeBytes(table.dtype);
  for (size_t first = 0; first < ids.size(); first += kEmbedRows) {
    const size_t count = std::min<size_t>(kEmbedRows, ids.size() - first);
    if (!BeginStaging(count * (AlignUp(row_bytes, 16) + 4) + 512)) return;
    const std::byte* rows = nullptr;
    numbers_.resize(count);
    // Rows one behind the other: none is padded but by its own width.
    staging_end_ = AlignUp(staging_end_, 16);
    rows = static_cast<std::byte*>(staged_.data()) + staging_end_;
    for (size_t i = 0; i < count; ++i) {
      std::memcpy(static_cast<std::byte*>(pinned_.data()) + staging_end_,
                  RowOf(table, ids[first + i]), row_bytes);
      staging_end_ += row_bytes;
      numbers_[i] = static_cast<int32_t>(i);
    }
    const int32_t* numbers = Stage(std::span<const int32_t>(numbers_));
    if (!EndStaging()) return;
    Good(cuda::EmbedRows(
             rows, table.dtype, numbers,
             MatrixOf(out.RowRange(static_cast<int64_t>(first), static_cast<int64_t>(count))),
             stream_),
         "embedding");
  }
}

void CudaBackend::RmsNorm(const Tensor& x, const float* weight, float eps, const Tensor& out) {
  if (failed()) return;
  Good(cuda::RmsNorm(MatrixOf(x), weight, eps, MatrixOf(out.RowRange(0, x.rows)), stream_),
       "a norm");
}

void CudaBackend::RmsNormHeads(const Tensor& x, int32_t head_dim, const float* weight, float eps) {
  if (failed()) return;
  Good(cuda::RmsNormHeads(MatrixOf(x), head_dim, weight, eps, stream_), "a norm of heads");
}

void CudaBackend::RopeTable(std::span<const int32_t> positions, std::span<const float> inv_freq,
                            float scale, const Tensor& cos_sin) {
  const auto rows = static_cast<int64_t>(positions.size());
  WINNOW_CHECK(cos_sin.rows >= rows);
  if (!BeginStaging(positions.size_bytes() + inv_freq.size_bytes() + 256)) return;
  const int32_t* of_positions = Stage(positions);
  const float* of_freq = Stage(inv_freq);
  if (!EndStaging()) return;
  Good(cuda::RopeTable(of_positions, of_freq, static_cast<int32_t>(inv_freq.size()), scale,
                       MatrixOf(cos_sin.RowRange(0, rows)), stream_),
       "the rotation table");
}

void CudaBackend::Rope(const Tensor& x, int32_t head_dim, const Tensor& cos_sin) {
  if (failed()) return;
  Good(cuda::Rope(MatrixOf(x), head_dim, MatrixOf(cos_sin), stream_), "rotation");
}

void CudaBackend::SiluMul(const Tensor& gate_up, const Tensor& out) {
  constexpr int64_t kRows = 32768;  // of a grid
  for (int64_t first = 0; first < gate_up.rows && !failed(); first += kRows) {
    const int64_t count = std::min(kRows, gate_up.rows - first);
    Good(cuda::SiluMul(MatrixOf(gate_up.RowRange(first, count)),
                       MatrixOf(out.RowRange(first, count)), stream_),
         "silu");
  }
}

void CudaBackend::WriteKv(const Tensor& k, const Tensor& v, std::span<const AttentionChunk> chunks,
                          void* pool, const KvLayout& layout) {
  size_t bytes = chunks.size() * sizeof(DeviceChunk) + 256;
  int32_t most = 0;
  for (const AttentionChunk& chunk : chunks) {
    bytes += TableBytes(BlocksOf(int64_t{chunk.position} + chunk.num_tokens, layout.block_tokens));
    most = std::max(most, chunk.num_tokens);
  }
  if (!BeginStaging(bytes)) return;
  chunks_.clear();
  for (const AttentionChunk& chunk : chunks) {
    chunks_.push_back(
        {StageTable(chunk.block_table,
                    BlocksOf(int64_t{chunk.position} + chunk.num_tokens, layout.block_tokens)),
         chunk.first_row, chunk.num_tokens, chunk.position, 0});
  }
  const DeviceChunk* on_device = Stage(std::span<const DeviceChunk>(chunks_));
  if (!EndStaging()) return;
  Good(cuda::WriteKv(MatrixOf(k), MatrixOf(v), on_device, static_cast<int32_t>(chunks.size()), most,
                     pool, layout, stream_),
       "writing KV");
}

// ---- dense attention ----

void CudaBackend::Attend(const Tensor& q, std::span<const AttentionChunk> chunks, const void* pool,
                         const KvLayout& layout, float scale, const Tensor& out) {
  few_.clear();
  many_.clear();
  for (const AttentionChunk& chunk : chunks) {
    (chunk.num_tokens <= kFewQueries ? few_ : many_).push_back(chunk);
  }
  AttendChunks(q, few_, /*few=*/true, pool, layout, scale, out);
  AttendChunks(q, many_, /*few=*/false, pool, layout, scale, out);
}

void CudaBackend::AttendChunks(const Tensor& q, std::span<const AttentionChunk> chunks, bool few,
                               const void* pool, const KvLayout& layout, float scale,
                               const Tensor& out) {
  const int32_t group = GroupOf(q, layout);
  for (size_t first = 0; first < chunks.size();) {
    DenseAttentionShape shape{0,     0,      0,
                              group, layout, few ? DenseWay::kSideBySide : DenseWay::kInTurn};
    size_t bytes = 256;
    while (first + shape.num_chunks < chunks.size() && shape.num_chunks < 1024) {
      const AttentionChunk& chunk = chunks[first + shape.num_chunks];
      DenseAttentionShape wider = shape;
      ++wider.num_chunks;
      wider.max_chunk_tokens = std::max(shape.max_chunk_tokens, chunk.num_tokens);
      wider.max_keys = std::max(shape.max_keys, chunk.position + chunk.num_tokens);
      if (shape.num_chunks > 0 && DenseAttentionWorkspaceBytes(wider) > kWorkspaceBytes) break;
      shape = wider;
      bytes += sizeof(DeviceChunk) + TableBytes(BlocksOf(int64_t{chunk.position} + chunk.num_tokens,
                                                         layout.block_tokens));
    }
    if (!BeginStaging(bytes)) return;
    chunks_.clear();
    for (int32_t i = 0; i < shape.num_chunks; ++i) {
      const AttentionChunk& chunk = chunks[first + i];
      chunks_.push_back(
          {StageTable(chunk.block_table,
                      BlocksOf(int64_t{chunk.position} + chunk.num_tokens, layout.block_tokens)),
           chunk.first_row, chunk.num_tokens, chunk.position, 0});
    }
    const DeviceChunk* on_device = Stage(std::span<const DeviceChunk>(chunks_));
    if (!EndStaging() || !Grow(dense_, DenseAttentionWorkspaceBytes(shape), "attention")) return;
    if (!Good(AttendDense(shape, q.f32(), q.stride, on_device, pool, scale, out.f32(), out.stride,
                          dense_.data(), stream_),
              "attention")) {
      return;
    }
    first += shape.num_chunks;
  }
}

// ---- indexes ----

std::unique_ptr<PackedEncoder> CudaBackend::PackEncoder(const EncoderWeights& weights) {
  if (failed()) return nullptr;
  const size_t bytes = PackedEncoderBytes(weights);
  Buffer memory = Allocate(bytes);
  if (memory.data() == nullptr) return nullptr;
  std::vector<std::byte> host(bytes);
  const DeviceEncoder encoder = cuda::PackEncoder(weights, host.data(), memory.data());
  if (encoder.num_stages == 0) return nullptr;
  CopyToDevice(host.data(), memory.data(), bytes);
  return std::make_unique<CudaPackedEncoder>(encoder, std::move(memory));
}

std::unique_ptr<PackedFeatureMap> CudaBackend::PackFeatureMap(const FeatureMapWeights& weights) {
  if (failed()) return nullptr;
  // As the kernels of completion.h take them.
  if (weights.out.out < 4 || weights.out.out > 128 || weights.out.out % 4 != 0 ||
      weights.gate.out > 128 || weights.stem.in > 128) {
    return nullptr;
  }
  const size_t bytes = PackedFeatureMapBytes(weights);
  Buffer memory = Allocate(bytes);
  if (memory.data() == nullptr) return nullptr;
  std::vector<std::byte> host(bytes);
  const DeviceFeatureMap map = cuda::PackFeatureMap(weights, host.data(), memory.data());
  CopyToDevice(host.data(), memory.data(), bytes);
  return std::make_unique<CudaPackedFeatureMap>(map, std::move(memory));
}

void CudaBackend::EncodeKeys(std::span<const KeySpan> spans, const void* pool,
                             const KvLayout& layout, const PackedEncoder& encoder, void* codes,
                             const CodeLayout& code_layout) {
  int32_t most = 0;
  const DeviceKeySpan* on_device = StageSpans(spans, layout, &most);
  if (on_device == nullptr) return;
  Good(cuda::EncodeKeys(EncoderOf(encoder), on_device, static_cast<int32_t>(spans.size()), most,
                        pool, layout, codes, code_layout, stream_),
       "codes of keys");
}

void CudaBackend::BoundKeys(std::span<const KeySpan> spans, const void* pool,
                            const KvLayout& layout, void* bounds) {
  int32_t most = 0;
  const DeviceKeySpan* on_device = StageSpans(spans, layout, &most);
  if (on_device == nullptr) return;
  Good(cuda::BoundKeys(on_device, static_cast<int32_t>(spans.size()), most, pool, layout, bounds,
                       stream_),
       "bounds of pages");
}

void CudaBackend::QuantizeKeys(std::span<const KeySpan> spans, const void* pool,
                               const KvLayout& layout, void* int4_keys) {
  int32_t most = 0;
  const DeviceKeySpan* on_device = StageSpans(spans, layout, &most);
  if (on_device == nullptr) return;
  Good(cuda::QuantizeKeys(on_device, static_cast<int32_t>(spans.size()), most, pool, layout,
                          int4_keys, stream_),
       "four-bit keys");
}

// ---- selection ----

Selection CudaBackend::SelectionOnDevice(const Selection& chosen, size_t queries) {
  const size_t lists = queries * chosen.kv_heads;
  const size_t counts_bytes = AlignUp(lists * 4, 256);
  if (!Grow(selection_, counts_bytes + lists * chosen.capacity * 4, "a selection")) return {};
  return {chosen.kv_heads, chosen.capacity, reinterpret_cast<int32_t*>(selection_.data()),
          reinterpret_cast<int32_t*>(selection_.data() + counts_bytes)};
}

void CudaBackend::CopySelection(const Selection& on_device, const Selection& chosen,
                                size_t queries) {
  const size_t lists = queries * chosen.kv_heads;
  Good(cudaMemcpyAsync(chosen.counts, on_device.counts, lists * 4, cudaMemcpyDeviceToHost, stream_),
       "a selection");
  Good(cudaMemcpyAsync(chosen.tokens, on_device.tokens, lists * chosen.capacity * 4,
                       cudaMemcpyDeviceToHost, stream_),
       "a selection");
  selected_ = chosen;
  selected_queries_ = queries;
}

Selection CudaBackend::SelectionToRead(const Selection& chosen, size_t queries) {
  const bool has = HasOnDevice(chosen, queries);
  const Selection selection = SelectionOnDevice(chosen, queries);
  if (has || failed()) return selection;
  const size_t lists = queries * chosen.kv_heads;
  Good(cudaMemcpyAsync(selection.counts, chosen.counts, lists * 4, cudaMemcpyHostToDevice, stream_),
       "a selection");
  Good(cudaMemcpyAsync(selection.tokens, chosen.tokens, lists * chosen.capacity * 4,
                       cudaMemcpyHostToDevice, stream_),
       "a selection");
  return selection;
}

bool CudaBackend::HasOnDevice(const Selection& chosen, size_t queries) const {
  return selected_.tokens != nullptr && selected_.tokens == chosen.tokens &&
         selected_.counts == chosen.counts && selected_.capacity == chosen.capacity &&
         selected_.kv_heads == chosen.kv_heads && selected_queries_ == queries;
}

void CudaBackend::EncodeQueries(const Tensor& q, std::span<const RetrievalQuery> queries,
                                const PackedEncoder& encoder, void* codes) {
  const DeviceEncoder& of_queries = EncoderOf(encoder);
  const int32_t head_dim = of_queries.stages[0].in / of_queries.queries_per_input;
  const auto group = static_cast<int32_t>(q.cols / head_dim / of_queries.kv_heads);
  const DeviceQuery* on_device = StageQueries(queries, kNoTables);
  if (on_device == nullptr || !EndStaging()) return;
  Good(cuda::EncodeQueries(of_queries, on_device, static_cast<int32_t>(queries.size()), group,
                           q.f32(), q.stride, head_dim, codes, stream_),
       "codes of queries");
}

void CudaBackend::SelectByCodes(std::span<const RetrievalQuery> queries, const void* query_codes,
                                int32_t group, const void* codes, const CodeLayout& code_layout,
                                const Selection& chosen) {
  int32_t longest = 0;
  for (const RetrievalQuery& query : queries) longest = std::max(longest, query.mid.size());
  const HammingSelectShape shape{static_cast<int32_t>(queries.size()), group, code_layout,
                                 RoundUp(longest, kShapeTokens)};
  const DeviceQuery* on_device = StageQueries(queries, code_layout.block_tokens);
  if (on_device == nullptr || !EndStaging()) return;
  const Selection selection = SelectionOnDevice(chosen, queries.size());
  if (failed() ||
      !Prepare(codes_, HammingSelectWorkspaceBytes(shape), HammingSelectZeroedPart(shape),
               {shape.num_queries, group, code_layout.kv_heads, code_layout.bits,
                code_layout.block_tokens, shape.max_mid_tokens, 1},
               "selection by codes")) {
    return;
  }
  if (Good(cuda::SelectByCodes(shape, on_device, query_codes, codes, selection, codes_.data(),
                               stream_),
           "selection by codes")) {
    CopySelection(selection, chosen, queries.size());
  }
}

void CudaBackend::SelectByBounds(const Tensor& q, std::span<const RetrievalQuery> queries,
                                 const void* bounds, const KvLayout& layout, float /*scale*/,
                                 const Selection& chosen) {
  BoundSelectShape shape{static_cast<int32_t>(queries.size()), GroupOf(q, layout), layout, 0};
  for (const RetrievalQuery& query : queries) {
    shape.max_mid_last = std::max(shape.max_mid_last, query.mid.last);
  }
  const DeviceQuery* on_device = StageQueries(queries, layout.block_tokens);
  if (on_device == nullptr || !EndStaging()) return;
  const Selection selection = SelectionOnDevice(chosen, queries.size());
  if (failed() || !Grow(bounds_, BoundSelectWorkspaceBytes(shape), "selection by bounds")) return;
  if (Good(cuda::SelectByBounds(shape, q.f32(), q.stride, on_device, bounds, selection,
                                bounds_.data(), stream_),
           "selection by bounds")) {
    CopySelection(selection, chosen, queries.size());
  }
}

void CudaBackend::SelectByLogits(const Tensor& q, std::span<const RetrievalQuery> queries,
                                 const void* pool, const KvLayout& layout, float scale,
                                 const Selection& chosen) {
  const DeviceQuery* on_device = StageQueries(queries, layout.block_tokens);
  if (on_device == nullptr || !EndStaging()) return;
  const Selection selection = SelectionOnDevice(chosen, queries.size());
  for (size_t first = 0; first < queries.size() && !failed();) {
    LogitSelectShape shape{0, GroupOf(q, layout), layout, 0};
    while (first + shape.num_queries < queries.size()) {
      LogitSelectShape wider = shape;
      ++wider.num_queries;
      wider.max_keys = std::max(shape.max_keys, queries[first + shape.num_queries].position + 1);
      if (shape.num_queries > 0 && LogitSelectWorkspaceBytes(wider) > kWorkspaceBytes) break;
      shape = wider;
    }
    if (!Grow(logits_, LogitSelectWorkspaceBytes(shape), "selection by logits")) return;
    Good(cuda::SelectByLogits(shape, q.f32(), q.stride, on_device + first, pool, scale,
                              selection.From(static_cast<int64_t>(first)), logits_.data(), stream_),
         "selection by logits");
    first += shape.num_queries;
  }
  if (!failed()) CopySelection(selection, chosen, queries.size());
}

void CudaBackend::PruneSelection(const Tensor& q, std::span<const RetrievalQuery> queries,
                                 const void* int4_keys, const KvLayout& layout, float scale,
                                 float p, const Selection& candidates, const Selection& kept) {
  WINNOW_CHECK(candidates.capacity == kept.capacity && candidates.kv_heads == kept.kv_heads);
  TopPShape shape{static_cast<int32_t>(queries.size()), GroupOf(q, layout), layout, 0,
                  RoundUp(candidates.capacity, 1024)};
  shape.max_anchors = RoundUp(MostAnchors(queries), 1024);
  const DeviceQuery* on_device = StageQueries(queries, layout.block_tokens);
  if (on_device == nullptr || !EndStaging()) return;
  const Selection selection = SelectionToRead(candidates, queries.size());
  if (failed()) return;
  if (!Prepare(prune_, TopPWorkspaceBytes(shape), TopPZeroedPart(shape),
               {shape.num_queries, shape.group, layout.kv_heads, layout.head_dim, shape.max_anchors,
                shape.max_candidates, 1},
               "pruning")) {
    return;
  }
  if (Good(cuda::PruneSelection(shape, q.f32(), q.stride, on_device, int4_keys, scale, p, selection,
                                selection, prune_.data(), stream_),
           "pruning")) {
    CopySelection(selection, kept, queries.size());
  }
}

void CudaBackend::MeasureSelection(const Tensor& q, std::span<const RetrievalQuery> queries,
                                   const void* pool, const KvLayout& layout, float scale,
                                   const Selection& chosen, SelectionQuality* quality) {
  if (!Synchronize()) return;  // the host reads what was chosen
  const size_t lists = queries.size() * layout.kv_heads;
  int32_t most = 1;
  for (size_t i = 0; i < lists; ++i) most = std::max(most, chosen.counts[i]);
  const LogitSelectShape shape{static_cast<int32_t>(queries.size()), GroupOf(q, layout), layout,
                               LastPosition(queries) + 1};
  const size_t tokens_bytes = lists * most * 4;
  const DeviceQuery* on_device =
      StageQueries(queries, layout.block_tokens, tokens_bytes + lists * 4 + 256);
  if (on_device == nullptr) return;
  numbers_.assign(lists * most, 0);
  for (size_t i = 0; i < lists; ++i) {
    std::copy_n(chosen.tokens + i * chosen.capacity, chosen.counts[i],
                numbers_.begin() + static_cast<int64_t>(i) * most);
  }
  const Selection measured{layout.kv_heads, most,
                           Stage(std::span<const int32_t>(chosen.counts, lists)),
                           Stage(std::span<const int32_t>(numbers_))};
  if (!EndStaging() || !Grow(logits_, MeasureSelectionWorkspaceBytes(shape, most), "measuring") ||
      !Grow(quality_, lists * sizeof(SelectionQuality), "measuring")) {
    return;
  }
  auto* results = reinterpret_cast<SelectionQuality*>(quality_.data());
  if (Good(cuda::MeasureSelection(shape, most, q.f32(), q.stride, on_device, pool, scale, measured,
                                  results, logits_.data(), stream_),
           "measuring")) {
    CopyToHost(results, quality, lists * sizeof(SelectionQuality));
  }
}

// ---- attention over what was chosen ----

void CudaBackend::AttendRows(const Tensor& q, std::span<const RetrievalQuery> queries,
                             std::span<const RowList> lists, const KvLayout& layout, float scale,
                             float* states) {
  WINNOW_CHECK(lists.size() == queries.size() * layout.kv_heads);
  // Nothing reads the tables here: the rows have their addresses.
  const DeviceQuery* on_device = StageQueries(queries, kNoTables, lists.size_bytes() + 64);
  if (on_device == nullptr) return;
  int32_t max_rows = 0;
  const RowList* of_lists = StageLists(lists, &max_rows);
  if (of_lists == nullptr || !EndStaging()) return;
  AttendLists(q, static_cast<int32_t>(queries.size()), max_rows, on_device, of_lists, layout, scale,
              states);
}

bool CudaBackend::AttendChosen(const Tensor& q, std::span<const RetrievalQuery> queries,
                               const Selection& chosen, const void* pool, const KvLayout& layout,
                               float scale, float* states) {
  const DeviceQuery* on_device = StageQueries(queries, layout.block_tokens);
  if (on_device == nullptr || !EndStaging()) return true;
  const Selection selection = SelectionToRead(chosen, queries.size());
  const int32_t capacity = MostAnchors(queries) + chosen.capacity;
  const size_t lists = queries.size() * layout.kv_heads;
  const size_t lists_bytes = AlignUp(lists * sizeof(RowList), 256);
  if (failed() ||
      !Grow(resolved_, lists_bytes + lists * capacity * sizeof(void*), "addresses of rows")) {
    return true;
  }
  auto* of_lists = reinterpret_cast<RowList*>(resolved_.data());
  const auto count = static_cast<int32_t>(queries.size());
  if (Good(ResolveRows(on_device, count, selection, pool, layout, capacity,
                       reinterpret_cast<const std::byte**>(resolved_.data() + lists_bytes),
                       of_lists, stream_),
           "addresses of rows")) {
    AttendLists(q, count, capacity, on_device, of_lists, layout, scale, states);
  }
  return true;
}

void CudaBackend::AttendLists(const Tensor& q, int32_t num_queries, int32_t max_rows,
                              const DeviceQuery* queries, const RowList* lists,
                              const KvLayout& layout, float scale, float* states) {
  const RowAttentionShape shape{num_queries, GroupOf(q, layout), layout, max_rows};
  if (!Prepare(rows_, RowAttentionWorkspaceBytes(shape), RowAttentionZeroedPart(shape),
               {shape.num_queries, shape.group, layout.kv_heads, layout.head_dim, 1},
               "attention over rows")) {
    return;
  }
  Good(cuda::AttendRows(shape, q.f32(), q.stride, queries, lists, scale, {.states = states},
                        rows_.data(), stream_),
       "attention over rows");
}

bool CudaBackend::Extend(std::span<const DeviceExtension> extensions, const void* pool,
                         const KvLayout& layout, const DeviceFeatureMap& key_map) {
  int32_t most = 0;
  for (const DeviceExtension& extension : extensions) {
    most = std::max(most, extension.tokens.size());
  }
  const auto count = static_cast<int32_t>(extensions.size());
  // Pieces, so that a long document's log-features need not lie in memory together.
  for (int32_t first = 0; first == 0 || first < most; first += kExtendTokens) {
    std::vector<DeviceExtension>& piece = extensions_;
    piece.assign(extensions.begin(), extensions.end());
    for (DeviceExtension& extension : piece) {
      const TokenRange all = extension.tokens;
      extension.tokens.first = std::min(all.first + first, all.last);
      extension.tokens.last = std::min(extension.tokens.first + kExtendTokens, all.last);
      if (first > 0) extension.clear = 0;
    }
    const int32_t tokens = std::min(kExtendTokens, most - first);
    if (!BeginStaging(piece.size() * sizeof(DeviceExtension) + 256)) return false;
    const DeviceExtension* on_device = Stage(std::span<const DeviceExtension>(piece));
    if (!EndStaging() ||
        !Grow(extend_, ExtendSummariesWorkspaceBytes(count, tokens, key_map), "summaries") ||
        !Good(cuda::ExtendSummaries(on_device, count, tokens, pool, layout, key_map, extend_.data(),
                                    stream_),
              "summaries")) {
      return false;
    }
  }
  return true;
}

void CudaBackend::ExtendSummaries(std::span<const SummaryExtension> extensions, const void* pool,
                                  const KvLayout& layout, const PackedFeatureMap& key_map) {
  size_t bytes = 0;
  int32_t most = 0;
  for (const SummaryExtension& extension : extensions) {
    bytes += TableBytes(BlocksOf(extension.last, layout.block_tokens));
    most = std::max(most, extension.last - extension.summary->tokens.last);
  }
  // Room for the descriptors of all pieces too: a table must not go between its staging and its use.
  bytes += (most / kExtendTokens + 1) * (extensions.size() * sizeof(DeviceExtension) + 512) + 256;
  if (!BeginStaging(bytes)) return;
  std::vector<DeviceExtension> on_host;
  for (const SummaryExtension& extension : extensions) {
    Summary& summary = *extension.summary;
    WINNOW_CHECK(extension.last >= summary.tokens.last);
    const bool empty = summary.tokens.size() <= 0;
    on_host.push_back(
        {StageTable(extension.block_table, BlocksOf(extension.last, layout.block_tokens)),
         summary.data,
         {summary.tokens.last, extension.last},
         empty ? 1 : 0,
         0});
  }
  if (!EndStaging() || !Extend(on_host, pool, layout, MapOf(key_map))) return;
  for (const SummaryExtension& extension : extensions) {
    extension.summary->tokens.last = extension.last;
  }
}

void CudaBackend::CompleteStates(const Tensor& q, std::span<const RetrievalQuery> queries,
                                 std::span<const CompletionGroup> groups,
                                 std::span<const RowList> lists, const void* pool,
                                 const KvLayout& layout, const PackedFeatureMap& key_map,
                                 const PackedFeatureMap& query_map, float* states) {
  const DeviceFeatureMap& keys = MapOf(key_map);
  const int32_t group = GroupOf(q, layout);
  const int64_t state_floats = int64_t{layout.kv_heads} * group * (layout.head_dim + 2);
  // Queries of one sequence complete one after the other, as its summary goes on between them; the
  // queries of several sequences, one each, do so together.
  size_t longest = 0;
  for (const CompletionGroup& of_group : groups) {
    longest = std::max<size_t>(longest, of_group.num_queries);
  }
  const size_t at_once = longest == 1 ? groups.size() : 1;
  for (size_t first = 0; first < queries.size() && !failed();) {
    const size_t count = std::min(at_once, queries.size() - first);
    std::vector<SummaryExtension> extensions;
    std::vector<const float*> summaries;
    for (size_t i = first; i < first + count; ++i) {
      for (const CompletionGroup& of_group : groups) {
        if (static_cast<int32_t>(i) < of_group.first_query ||
            static_cast<int32_t>(i) >= of_group.first_query + of_group.num_queries) {
          continue;
        }
        summaries.push_back(of_group.summary->data);
        if (queries[i].mid.last > of_group.summary->tokens.last ||
            of_group.summary->tokens.size() <= 0) {
          extensions.push_back({of_group.summary, queries[i].block_table,
                                std::max(queries[i].mid.last, of_group.summary->tokens.last)});
        }
      }
    }
    WINNOW_CHECK(summaries.size() == count);
    if (!extensions.empty()) ExtendSummaries(extensions, pool, layout, key_map);
    const auto of_call = queries.subspan(first, count);
    const auto lists_of_call = lists.subspan(first * layout.kv_heads, count * layout.kv_heads);
    const DeviceQuery* on_device = StageQueries(
        of_call, kNoTables, lists_of_call.size_bytes() + summaries.size() * sizeof(float*) + 256);
    if (on_device == nullptr) return;
    CompletionShape shape{static_cast<int32_t>(count), group, layout, 0};
    for (const RowList& list : lists_of_call) {
      shape.max_chosen = std::max(shape.max_chosen, list.chosen_last - list.chosen_first);
    }
    int32_t max_rows = 0;
    const RowList* of_lists = StageLists(lists_of_call, &max_rows);
    const float* const* of_summaries = Stage(std::span<const float* const>(summaries));
    if (of_lists == nullptr || !EndStaging() ||
        !Grow(complete_, CompleteStatesWorkspaceBytes(shape, keys), "completion")) {
      return;
    }
    Good(cuda::CompleteStates(shape, q.f32(), q.stride, on_device, of_lists, of_summaries, keys,
                              MapOf(query_map), states + static_cast<int64_t>(first) * state_floats,
                              complete_.data(), stream_),
         "completion");
    first += count;
  }
}

void CudaBackend::StateMasses(const float* states, int64_t count, int32_t head_dim, float* masses) {
  if (!Grow(masses_, static_cast<size_t>(count) * 4, "masses")) return;
  auto* on_device = reinterpret_cast<float*>(masses_.data());
  Good(cuda::StateMasses(states, count, head_dim, on_device, stream_), "masses");
  if (failed()) return;
  Good(cudaMemcpyAsync(masses, on_device, static_cast<size_t>(count) * 4, cudaMemcpyDeviceToHost,
                       stream_),
       "masses");
}

void CudaBackend::FinishStates(std::span<const RetrievalQuery> queries, const float* states,
                               int32_t head_dim, const Tensor& out) {
  const DeviceQuery* on_device = StageQueries(queries, kNoTables);
  if (on_device == nullptr || !EndStaging()) return;
  Good(cuda::FinishStates(states, on_device, static_cast<int32_t>(queries.size()),
                          static_cast<int32_t>(out.cols / head_dim), head_dim, out.f32(),
                          out.stride, stream_),
       "attention over rows");
}

}  // namespace cuda
}  // namespace winnow::kernels
