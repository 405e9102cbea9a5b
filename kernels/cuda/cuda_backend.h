// The CUDA backend: every operation of kernels::Backend (backend.h) as launches of this folder's
// kernels on one stream of one device. One object, used from one thread at a time.
//
// Needs: compute capability 8.0 or newer, a driver of this CUDA or newer. KV is bfloat16, d is 64, 80,
// 96, 128 or (with KV in bfloat16) 256, at most kMaxHeadsPerKvHead query heads share a KV head; Refusal says so by name. Has run on
// 9.0 only. Where a multiprocessor has less shared memory than on 8.0 and 9.0 (8.6, 8.9, 12.0), kernels
// take their ways for longer rows sooner, and the widest hash functions and feature maps are refused.
//
// Calls only enqueue; the host waits in Synchronize, CopyToHost, CopyToDevice, MeasureSelection, where a
// selection is pruned into another, and where a pass begins. What a call is given by value or by span is copied before it returns.
//
// A decode step's small operations may wait for the ones that follow, so that they become one launch
// (HeldBack below), and its launches for each other, so that they become one graph (launch_log.h); nobody sees it, as
// whatever could has them done first.
//
// Promises. Batch invariance: matrix products, attention and selection have one order of summation
// each, fixed by the row's own inputs (matmul.h, dense_attention.h, row_attention.h, logit_select.h),
// so a row's result does not depend on how many rows are in the call nor on how a prompt was cut.
// Products with compute kF32 and kF16 have the CPU's bits. Codes and four-bit keys and page bounds have
// the CPU's bits for the same keys; what is added up otherwise differs from the CPU by rounding.
//
// Memory. Allocate gives the device's. Workspaces and the memory that descriptors pass through grow to
// what the largest call so far needed, which waits for the device, and then stay: the first steps of a
// new size grow them, later ones allocate nothing. Where they cannot grow the device counts as failed.
// Queries whose workspace is more than 256 MiB go in several launches, down to one at a time.
#ifndef WINNOW_KERNELS_CUDA_CUDA_BACKEND_H_
#define WINNOW_KERNELS_CUDA_CUDA_BACKEND_H_

#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/attention_ways.h"
#include "kernels/cuda/completion.h"
#include "kernels/cuda/dense_attention.h"
#include "kernels/cuda/device_types.h"
#include "kernels/cuda/hash_encode.h"
#include "kernels/cuda/host_kv.h"
#include "kernels/cuda/layer_ops.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/row_attention.h"
#include "kernels/cuda/sample.h"
#include "kernels/cuda/transform_code.h"

namespace winnow::kernels::cuda {

inline constexpr int32_t kMaxHeadsPerKvHead = 16;

struct AttentionOutput;
struct PackedPart;

class CudaBackend final : public Backend {
 public:
  // Null, and why in `why`.
  static std::unique_ptr<CudaBackend> Create(int device, std::string* why, bool graphs = true);
  ~CudaBackend() override;
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;

  std::string name() const override { return name_; }
  std::string arithmetic() const override { return arithmetic_; }
  std::string Refusal(const KvLayout& layout, int32_t num_heads) const override;
  int64_t AvailableBytes() const override;
  Buffer Allocate(size_t size_bytes) override;
  Buffer AllocateShared(size_t size_bytes) override;
  SharedKvSizes SizeSharedKv(const SharedKvShape& shape) const override;
  std::unique_ptr<SharedKv> ShareKv(const SharedKvShape& shape, std::span<std::byte* const> pools,
                                    std::string* why) override;
  void BeginPass() override;
  void ForgetTables() override { tables_.clear(); }
  bool Synchronize() override;
  std::string failure() const override { return failure_; }
  LaunchCounts launches() const override { return launches_->counts(); }
  void CopyToHost(const void* device, void* host, size_t size_bytes) override;
  void CopyToDevice(const void* host, void* device, size_t size_bytes) override;
  void CopyAllToHost(std::span<const CopyPart> parts) override;
  void CopyAllToDevice(std::span<const CopyPart> parts) override;
  std::unique_ptr<PackedMatrix> Pack(std::span<const HostMatrix> parts, DType compute) override;
  void Matmul(const Tensor& x, const PackedMatrix& w, const Tensor& y,
              const MatmulEpilogue& epilogue) override;
  bool ComputesStored() const override { return true; }
  std::unique_ptr<PackedMatrix> PackStored(std::span<const StoredMatrix> parts,
                                           DType compute) override;
  void EmbedRows(const HostMatrix& table, std::span<const int32_t> ids, float scale,
                 const Tensor& out) override;
  void RmsNorm(const Tensor& x, const float* weight, float eps, const Tensor& out) override;
  void AddRmsNorm(const Tensor& x, const float* weight, float eps, const Tensor& y) override;
  void RmsNormHeads(const Tensor& x, int32_t head_dim, const float* weight, float eps) override;
  void RopeTable(std::span<const int32_t> positions, std::span<const float> inv_freq, float scale,
                 std::span<const float> factors, const Tensor& cos_sin) override;
  void Rope(const Tensor& x, int32_t head_dim, const Tensor& cos_sin) override;
  void WriteKv(const Tensor& k, const Tensor& v, std::span<const AttentionChunk> chunks, void* pool,
               const KvLayout& layout) override;
  void Attend(const Tensor& q, std::span<const AttentionChunk> chunks, const void* pool,
              const KvLayout& layout, float scale, const Tensor& out) override;
  void SiluMul(const Tensor& gate_up, const Tensor& out) override;
  void GeluTanhMul(const Tensor& gate_up, const Tensor& out) override;
  void ClampedSwigluMul(const Tensor& gate_up, const ClampedSwiglu& by, const Tensor& out) override;
  void RouteExperts(const Tensor& logits, const ExpertRouting& routing, int32_t* ids,
                    const Tensor& weights) override;
  void GatherExpertRows(const Tensor& x, std::span<const int32_t> rows, const Tensor& out) override;
  void AddExpertRows(const Tensor& x, std::span<const int32_t> places, const Tensor& weights,
                     const Tensor& y) override;
  std::unique_ptr<ExpertSet> MakeExpertSet(std::span<const ExpertMatrices> experts) override;
  int64_t RoutedExpertRows(int64_t slots, int64_t experts) const override;
  bool AddRoutedExperts(const RoutedExpertsArgs& args) override;
  void NormMatmul(const NormMatmulArgs& args) override;
  void SiluMatmul(const Tensor& gate_up, const PackedMatrix& w, const Tensor& activated,
                  const Tensor& y, const MatmulEpilogue& epilogue) override;
  void GatedMlp(const GatedMlpArgs& args) override;
  void RopeAndWriteKv(const RopeAndWriteKvArgs& args) override;
  std::unique_ptr<PackedEncoder> PackEncoder(const EncoderWeights& weights) override;
  std::unique_ptr<PackedFeatureMap> PackFeatureMap(const FeatureMapWeights& weights) override;
  void EncodeKeys(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                  const PackedEncoder& encoder, void* codes,
                  const CodeLayout& code_layout) override;
  void BoundKeys(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                 void* bounds) override;
  void QuantizeKeys(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                    void* int4_keys) override;
  void EncodeQueries(const Tensor& q, std::span<const RetrievalQuery> queries,
                     const PackedEncoder& encoder, void* codes) override;
  void SelectByCodes(std::span<const RetrievalQuery> queries, const void* query_codes,
                     int32_t group, const void* codes, const CodeLayout& code_layout,
                     const Selection& chosen) override;
  void SelectByBounds(const Tensor& q, std::span<const RetrievalQuery> queries, const void* bounds,
                      const KvLayout& layout, float scale, const Selection& chosen) override;
  void SelectByLogits(const Tensor& q, std::span<const RetrievalQuery> queries, const void* pool,
                      const KvLayout& layout, float scale, const Selection& chosen) override;
  void PruneSelection(const PruneSelectionArgs& args) override;
  bool FindsRows(const void* pool) const override;
  void AttendRows(const AttendRowsArgs& args) override;
  void ExtendSummaries(std::span<const SummaryExtension> extensions, const void* pool,
                       const KvLayout& layout, const PackedFeatureMap& key_map) override;
  void CompleteStates(const CompleteStatesArgs& args) override;
  void StateMasses(const float* states, int64_t count, int32_t head_dim, float* masses) override;
  void FinishStates(std::span<const RetrievalQuery> queries, const float* states, int32_t head_dim,
                    const float* sinks, const Tensor& out) override;
  std::unique_ptr<PackedTransformCode> PackTransformCode(
      const TransformCodeWeights& weights) override;
  void EncodeTransformKeys(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                           const PackedTransformCode& transform, void* codes,
                           const CodeLayout& code_layout) override;
  void EncodeResiduals(const EncodeResidualsArgs& args) override;
  void SelectByMass(const SelectByMassArgs& args) override;
  void RerankByMass(const RerankByMassArgs& args) override;
  void TakeFromTail(const TakeFromTailArgs& args) override;
  void ExtendCellTables(std::span<const CellTableExtension> extensions, const void* pool,
                        const KvLayout& layout, const PackedTransformCode& transform,
                        const void* codes, const CodeLayout& code_layout) override;
  void MergeTails(std::span<const RetrievalQuery> queries, std::span<const float* const> tables,
                  const PackedTransformCode& transform, const TailMasses& tail, int32_t head_dim,
                  float* states) override;
  void MergeStates(const float* parts, int64_t count, int32_t head_dim, float* states) override;
  void MeasureSelection(const MeasureSelectionArgs& args) override;
  void Sample(const Tensor& logits, std::span<const SampleRow> rows,
              SampledToken* sampled) override;

 private:
  friend class HostKv;

  // What one call site needs beside its operands; grows, and then stays.
  struct Workspace {
    Buffer memory;
    // Of the last call: where its shape kept zeros between calls.
    std::array<int64_t, 8> shape = {};
    std::byte* data() const { return static_cast<std::byte*>(memory.data()); }
  };

  CudaBackend() = default;

  bool failed() const { return !failure_.empty(); }
  // Notes the first error; whether there was none.
  bool Good(cudaError_t error, const char* what);
  // Of `size_bytes` at `host`, what one copy by the runtime may take.
  size_t InOnePiece(const void* host, size_t size_bytes) const;
  // Whether it lies in memory that AllocateShared gave, all of it.
  bool IsShared(const std::byte* data, size_t size_bytes) const;
  // Ask for copies, and do not wait.
  bool SendTogether(std::span<const CopyPart> parts, bool to_device);
  void SendToHost(const void* device, void* host, size_t size_bytes);
  void SendToDevice(const void* host, void* device, size_t size_bytes);
  // At least so large; its contents are lost when it grows. False: there is no memory, and the workspace is empty.
  bool TryGrow(Workspace& workspace, size_t size_bytes);
  // The same, or the device fails.
  bool Grow(Workspace& workspace, size_t size_bytes, const char* what);
  // `gate`: of DeviceMatrix gate_up, out, and a stream.
  void Gate(const auto& gate, const Tensor& gate_up, const Tensor& out);
  void AddExpertsOf(const RoutedExpertsArgs& args, int64_t first, int64_t m, int32_t tile_rows);
  // Ready for a call of this shape, whose zeros lie in `part`.
  bool Prepare(Workspace& workspace, size_t size_bytes, const ZeroedPart& part,
               const std::array<int64_t, 8>& shape, const char* what);

  // Descriptors on their way: BeginStaging makes room, Stage puts values into pinned memory and gives
  // their address on the device, EndStaging sends them. Values stay until the next pass, or until the
  // room is used up, and are sent once in that time.
  bool BeginStaging(size_t size_bytes);
  std::byte* StageBytes(const void* values, size_t size_bytes, size_t alignment);
  template <typename T>
  T* Stage(std::span<const T> values) {
    return reinterpret_cast<T*>(StageBytes(values.data(), values.size_bytes(), alignof(T)));
  }
  bool EndStaging();
  void ClearStaging();
  // The first `blocks` of a table; looked at once until ForgetTables.
  const int32_t* StageTable(std::span<const int32_t> table, int64_t blocks);
  // Room for a table, in such steps that a sequence's next block seldom moves what is staged behind it: launches
  // that take its address are the last step's then.
  static size_t TableRoom(int64_t blocks) { return AlignUp(static_cast<size_t>(blocks) * 4, 256); }
  static size_t TableBytes(int64_t blocks) { return TableRoom(blocks) + 16; }
  const DeviceQuery* StageQueries(std::span<const RetrievalQuery> queries, int32_t block_tokens,
                                  size_t more_bytes = 0);
  // Whether the indexes of the sequence's mid were made before this pass began. Only known of sequences
  // that are indexed in it.
  bool IsSettled(const RetrievalQuery& query) const;
  const DeviceKeySpan* StageSpans(std::span<const KeySpan> spans, const KvLayout& layout,
                                  int32_t* max_tokens);
  const DeviceChunk* StageChunks(std::span<const AttentionChunk> chunks, const KvLayout& layout);
  const RowList* StageLists(std::span<const RowList> lists);

  // Memory goes behind what was launched for it: the driver waits for that, but not for what is held back. May be
  // called when the backend is gone.
  std::function<void(void*)> Behind(std::function<void(void*)> release) const {
    return [release = std::move(release), launches = std::weak_ptr(launches_)](void* data) {
      if (const auto held = launches.lock()) static_cast<void>(held->EndRun());
      release(data);
    };
  }
  // The stream, after what was held back has been asked for: every operation that asks for something
  // takes it from here.
  Stream stream() {
    just_attended_ = nullptr;
    if (held_back_ != HeldBack::kNothing) ReleaseHeldBack();
    return bare_stream();
  }
  Stream bare_stream() { return Stream(*launches_); }
  // A decode step's rotation and the encoding of its keys wait for the encoding of its queries, which
  // follows at once: the three are one launch. Anything else that comes in between lets them go alone.
  // Masses of states wait for a selection that takes them, and what is merged into states for their end.
  enum class HeldBack : uint8_t { kNothing, kRotation, kRotationAndKeys, kMasses, kMerges };
  void ReleaseHeldBack();
  void ReleaseHeldTokens(HeldBack held_back);
  // The states of masses that are held back, which the caller makes then; null: they are made.
  const float* TakeHeldMasses(const float* masses, int64_t count, int32_t head_dim);

  // Memory of its weights, or not.
  bool AllocatePart(PackedPart& part);
  // `order` makes a product's operand, in order, where it is told to.
  template <typename Order>
  bool MatmulOf(int64_t m, const PackedMatrix& w, const Tensor& y, const MatmulEpilogue& epilogue,
                Order order);
  // The product of rounded rows. REQUIRES: w is of W8A8.
  void MultiplyRounded(int64_t m, const PackedMatrix& w, const Tensor& y,
                       const MatmulEpilogue& epilogue, const void* rounded);
  // The product of an operand that lies in order. REQUIRES: w is neither exact nor of W8A8.
  void MultiplyOrdered(int64_t m, const PackedMatrix& w, const Tensor& y,
                       const MatmulEpilogue& epilogue, const void* ordered);

  // A selection on the device; sent there if it is not, and for ToChange even if it is empty. counts null: the
  // device has failed.
  Selection SelectionToRead(const Selection& chosen, size_t queries);
  Selection SelectionToChange(const Selection& chosen, size_t queries);
  bool PrepareRows(const RowAttentionShape& shape);
  // A selection is made in the device's memory, and copied to the host's when the host waits: its
  // counts with those of all since then, its tokens unless a later selection went to the same place.
  Selection NewSelection(const Selection& chosen, size_t queries);
  void NoteSelection(const Selection& on_device, const Selection& chosen, size_t queries);
  bool HasOnDevice(const Selection& chosen, size_t queries) const;
  // The same where the pool lies on the device.
  void AttendDevice(const Tensor& q, std::span<const AttentionChunk> chunks, const void* pool,
                    const KvLayout& layout, float scale, const Tensor& out);
  void SendTokens();
  void SendSelections();
  void TakeCounts();
  // Splits of keys side by side, queries of a chunk in as many pieces as the workspace's bound makes of them.
  void AttendSideBySide(const Tensor& q, std::span<const AttentionChunk> chunks, const void* pool,
                        const KvLayout& layout, float scale, const Tensor& out);
  void AttendChunks(const Tensor& q, std::span<const AttentionChunk> chunks, DenseWay way,
                    const void* pool, const KvLayout& layout, float scale, const Tensor& out);
  // Whether the workspace of dense attention has room for a copy of KV (DenseWay::kWidened), or can have it.
  bool HasRoomToWiden(size_t size_bytes);
  bool Extend(std::span<const DeviceExtension> extensions, const void* pool, const KvLayout& layout,
              const DeviceFeatureMap& key_map);
  // AttendRows by where the rows lie: at addresses, in a pool on the device, in a pool in pinned host memory.
  void AttendAddresses(const AttendRowsArgs& args, const AttentionOutput& output);
  void AttendInPool(const AttendRowsArgs& args, const AttentionOutput& output);
  void AttendInHostPool(HostPool& pool, const AttendRowsArgs& args, const AttentionOutput& output);

  // ---- KV in pinned host memory (cuda_backend_host_kv.cc) ----
  // The layer whose KV begins at this address; null: it lies on the device.
  HostPool* HostPoolOf(const void* pool) const;
  void WriteHostKv(HostPool& pool, const Tensor& k, const Tensor& v,
                   std::span<const AttentionChunk> chunks, const KvLayout& layout);
  void AttendHost(const HostPool& pool, const Tensor& q, std::span<const AttentionChunk> chunks,
                  const KvLayout& layout, float scale, const Tensor& out);
  class AttendStreams;
  // False: it is no such pool.
  bool CopyIntoHostPool(const void* host, void* pool, size_t size_bytes);
  void Forget(HostPool& pool);
  HeldBack held_back_ = HeldBack::kNothing;
  TokenArgs held_tokens_;                        // all but what is of the queries' encoding
  const DeviceEncoder* held_encoder_ = nullptr;  // of keys
  const DeviceKeySpan* held_spans_ = nullptr;
  struct HeldRow {
    int32_t row = 0, position = 0;
  };
  std::vector<HeldRow> held_rows_;  // of the chunks
  int32_t held_most_ = 0;           // tokens of a chunk
  struct HeldMasses {
    const float* states = nullptr;
    int64_t count = 0;
    int32_t head_dim = 0;
    float* masses = nullptr;
    const float* just_attended = nullptr;  // as below, when they were asked for
  };
  HeldMasses held_masses_;
  const float* just_attended_ = nullptr;  // q of AttendChosen, if nothing was launched since
  StateEnd held_merges_;
  std::vector<const float*> held_tables_;  // of held_merges_

  std::string name_, arithmetic_, failure_;
  int device_ = 0;
  bool alone_ = false;                      // HammingSelectShape's
  std::shared_ptr<LoggedStream> launches_;  // use stream()

  Buffer pinned_, staged_;  // of descriptors, the same size
  size_t staging_begin_ = 0, staging_end_ = 0;
  struct StagedTable {
    const int32_t* on_device = nullptr;
    int64_t blocks = 0;
  };
  std::unordered_map<const int32_t*, StagedTable> tables_;    // by the host's address
  std::unordered_map<const int32_t*, int32_t> indexed_from_;  // in this pass, by block table
  std::unordered_multimap<size_t, std::pair<size_t, size_t>>
      staged_values_;  // by hash: where, bytes

  // Pinned memory of several pieces that was ever given out, by where it begins, and its bytes.
  std::map<const std::byte*, size_t> pinned_pieces_;
  // What AllocateShared gave and is still held; a Buffer may outlive the backend.
  std::shared_ptr<std::map<const std::byte*, size_t>> shared_ =
      std::make_shared<std::map<const std::byte*, size_t>>();
  std::unordered_map<const void*, HostPool*> host_pools_;  // by where they begin
  cudaStream_t ahead_stream_ = nullptr;                    // on which blocks are brought ahead
  bool ahead_runs_ = false;                                // since the host last waited
  Workspace fetched_;                                      // lists and addresses of rows

  Workspace zeros_;  // nobody writes it
  Buffer widened_;   // outputs of quantised weights as plain ones, for a product of many rows
  Workspace experts_, matmul_, dense_, codes_, transform_, bounds_, logits_, prune_, take_, rerank_,
      rows_, addresses_, extend_, complete_, selection_, quality_, pack_, sample_;
  // Whose selection lies in selection_ (and its counts in counts_); tokens null: nobody's.
  Selection selected_, selected_on_device_;
  size_t selected_queries_ = 0;
  bool tokens_sent_ = true;
  // Counts of the selections since the host last waited, on the device and on their way from it.
  struct CountsOnTheirWay {
    int32_t* to = nullptr;
    size_t first = 0, count = 0;
  };
  Buffer counts_, arrived_counts_;
  size_t counts_end_ = 0;
  std::vector<CountsOnTheirWay> counts_on_their_way_;
  // Of a call; kept for their memory.
  std::vector<DeviceQuery> queries_;
  std::vector<DeviceKeySpan> spans_;
  std::vector<DeviceChunk> chunks_;
  AttentionWays ways_;
  std::vector<AttentionChunk> pieces_;
  size_t widening_lacks_ = std::numeric_limits<size_t>::max();  // so much was asked for in vain
  std::vector<RowList> lists_;
  std::vector<DeviceExtension> extensions_;
  std::vector<int32_t> numbers_;
  std::vector<const std::byte*> together_from_;
  std::vector<std::byte*> together_to_;
  std::vector<DeviceSampleRow> sample_rows_;
};

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_CUDA_BACKEND_H_
