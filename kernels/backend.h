// The contract of a backend: the operations from which engine/decoder.cc builds a forward pass.
//
// One Backend serves one process. Every call is made from the engine thread; a backend may use
// threads inside a call, never after it returns (the CPU) or orders work on its own stream (CUDA).
// Tensors are views; Buffers own. Memory comes from the backend, because only it knows the device.
//
// Two kinds of memory. The device's (Allocate) is what operations read and write; the host must not
// look at it, but for CopyToHost. Shared memory (AllocateShared) is the host's, and what operations
// write there the host may read after Synchronize: a selection's counts and tokens, rows' addresses,
// masses. What a later operation writes to the same place may be all that is ever seen there. On the
// CPU both are the same and Synchronize does nothing.
//
// A device that fails stays failed: operations do nothing from then on, Synchronize says false, and
// failure() says why. The caller ends the process, as nothing that the device holds can be trusted.
//
// Batch invariance. A row of a result depends on that row's inputs alone: not on how many other
// rows are in the call, nor on the number of threads, nor on how a prompt was cut into chunks. So
// a request yields the same tokens alone and among others. Each operation fixes its order of
// summation (said in its own header, X.h) and keeps it for every row count.
//
// Shapes: m tokens in the batch, H query heads, Hkv KV heads, d head dimension.
#ifndef WINNOW_KERNELS_BACKEND_H_
#define WINNOW_KERNELS_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/kv_layout.h"
#include "kernels/quantized.h"
#include "kernels/retrieval.h"
#include "kernels/sample.h"

namespace winnow::kernels {

// A row-major matrix that somebody else owns. `stride` is the distance of rows in elements.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;

  float* f32(int64_t row = 0) const { return static_cast<float*>(data) + row * stride; }
  Tensor RowRange(int64_t first, int64_t count) const {
    return {static_cast<std::byte*>(data) + first * stride * DTypeBytes(dtype), dtype, count, cols,
            stride};
  }
  Tensor ColRange(int64_t first, int64_t count) const {
    return {static_cast<std::byte*>(data) + first * DTypeBytes(dtype), dtype, rows, count, stride};
  }
};

// Owns device memory; move-only.
class Buffer {
 public:
  Buffer() = default;
  Buffer(void* data, size_t size_bytes, std::function<void(void*)> release)
      : data_(data, std::move(release)), size_bytes_(size_bytes) {}
  void* data() const { return data_.get(); }
  size_t size_bytes() const { return size_bytes_; }

 private:
  std::unique_ptr<void, std::function<void(void*)>> data_{nullptr, [](void*) {}};
  size_t size_bytes_ = 0;
};

// A weight matrix W [out_features][in_features] in the backend's own order.
class PackedMatrix {
 public:
  virtual ~PackedMatrix() = default;
  virtual int64_t out_features() const = 0;
  virtual int64_t in_features() const = 0;
  virtual size_t size_bytes() const = 0;  // what one product reads of it
};

// The weights as they lie in the file (host memory, row-major), to be packed or looked up.
struct HostMatrix {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
};

// Weights as they lie in the file, of any type. The rows are multiples of the type's blocks and may lie anywhere in host
// memory: their order is that of the outputs.
struct StoredMatrix {
  WeightType type = WeightType::kF32;
  int64_t cols = 0;
  std::vector<const std::byte*> rows;
};

// What a matrix product does after the sum: y = x Wᵀ (+ bias) (+ y).
struct MatmulEpilogue {
  const float* bias = nullptr;  // [out_features], device memory; null for none
  bool accumulate = false;      // add to what y holds (the residual)
};

// ---- KV in shared memory ----

// KV of some layers that lies in shared memory, because the device has no room for it. Operations take
// such a pool as any other. Three are meant for it: AttendChosen and AttendChosenStates keep rows that they read in a
// cache on the device, and Attend brings a layer of a sequence to a staging area before it computes; the
// others read over the bus what they need. Where a row came from never shows in a result.
struct SharedKvShape {
  KvLayout layout;
  int32_t num_pools = 0;         // layers
  int32_t num_blocks = 0;        // of each
  int32_t max_context = 0;       // tokens that one query sees, at most
  int32_t max_batch_tokens = 0;  // rows of q in a pass, at most
  size_t cache_bytes = 0;        // for rows, an equal part for each pool; 0: none are kept
  // One pool, whose blocks are frames of any layer and change hands: where a layer's blocks lie is said
  // anew in each of its operations. There is no cache, and rows are attended by their addresses.
  bool of_frames = false;
};

// What it takes of the device's memory.
struct SharedKvSizes {
  size_t cache_bytes = 0;    // rows, and whose they are
  size_t table_bytes = 0;    // where in the cache each row of the pools lies
  size_t staging_bytes = 0;  // two layers of the longest sequence
  int64_t cache_rows = 0;    // of all pools
  size_t total() const { return cache_bytes + table_bytes + staging_bytes; }
};

// Rows that AttendChosen and AttendChosenStates read of such pools.
struct SharedKvReads {
  uint32_t cached = 0;    // in the cache
  uint32_t fetched = 0;   // brought into it
  uint32_t in_place = 0;  // over the bus without that: there was no room among the call's own rows
  uint32_t unused = 0;
};

// Made by Backend::ShareKv; the pools go after it.
class SharedKv {
 public:
  virtual ~SharedKv() = default;
  virtual SharedKvSizes sizes() const = 0;
  // of_rows[i], in shared memory: what was read for row i of q since this was asked last. There
  // after Synchronize. REQUIRES: at most max_batch_tokens.
  virtual void TakeReads(std::span<SharedKvReads> of_rows) = 0;

  // The host writes to such pools itself: blocks that it read from elsewhere. Before the first byte of
  // a block's new content, ForgetRows: what is cached of them is void. No pass may be under way.
  virtual void ForgetRows(std::span<const int32_t> blocks) = 0;
  // After bytes have come: what was brought ahead to a staging area may lack them. Operations asked for
  // since then see them; those before must not have been about them.
  virtual void ForgetStaged() = 0;
};

// Kernels that a device was told to run since the backend was made.
struct LaunchCounts {
  int64_t alone = 0, in_graphs = 0;
};

// A part of the device's memory, and its likeness in the host's.
struct CopyPart {
  std::byte* host = nullptr;
  std::byte* device = nullptr;
  size_t size_bytes = 0;
};

// One sequence's share of an attention call: `num_tokens` queries at positions position,
// position+1, ...; query i attends to keys 0..position+i, which lie in block_table's blocks.
struct AttentionChunk {
  int32_t first_row = 0;  // row of the first query in q and out
  int32_t num_tokens = 0;
  int32_t position = 0;
  std::span<const int32_t> block_table;  // logical block -> block of the layer's pool
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string name() const = 0;  // "cpu (avx512_bf16, 2 threads)"
  // Backends of one arithmetic version (arithmetic_version.h) that say the same give the same bits for the same operands.
  virtual std::string arithmetic() const = 0;  // "cpu avx512_bf16"

  // Why a model with this KV cannot run here, as the end of a sentence; empty if it can.
  virtual std::string Refusal(const KvLayout& layout, int32_t num_heads) const = 0;
  // What Allocate can give beside what calls need; 0: not even that is left; -1: as the host has.
  virtual int64_t AvailableBytes() const = 0;

  // Zeroed memory, aligned to 64 bytes at least; null data() if it cannot be had.
  virtual Buffer Allocate(size_t size_bytes) = 0;
  virtual Buffer AllocateShared(size_t size_bytes) = 0;

  // Says that `pools` (shared memory, [num_pools]) are layers' KV: from here on they may be written by
  // operations and by CopyToDevice, and by the host only as SharedKv says. Null, and why in `why`: no memory, with the bytes. A backend
  // whose two memories are one takes nothing and has no cache.
  virtual SharedKvSizes SizeSharedKv(const SharedKvShape& shape) const = 0;
  virtual std::unique_ptr<SharedKv> ShareKv(const SharedKvShape& shape,
                                            std::span<std::byte* const> pools,
                                            std::string* why) = 0;

  // A forward pass begins. Block tables keep their contents from the first operation that is given
  // them until the next pass begins, or until ForgetTables.
  virtual void BeginPass() = 0;
  virtual void ForgetTables() = 0;
  // Waits until everything so far is done. False: the device has failed.
  [[nodiscard]] virtual bool Synchronize() = 0;
  // Empty while the device works.
  virtual std::string failure() const = 0;
  virtual LaunchCounts launches() const { return {}; }

  // Both wait for what was asked for before, and are done when they return.
  virtual void CopyToHost(const void* device, void* host, size_t size_bytes) = 0;
  virtual void CopyToDevice(const void* host, void* device, size_t size_bytes) = 0;
  // The same of many parts, which may cost little more than one. Fast where `host` is shared memory.
  virtual void CopyAllToHost(std::span<const CopyPart> parts) {
    for (const CopyPart& part : parts) CopyToHost(part.device, part.host, part.size_bytes);
  }
  virtual void CopyAllToDevice(std::span<const CopyPart> parts) {
    for (const CopyPart& part : parts) CopyToDevice(part.host, part.device, part.size_bytes);
  }

  // Stacks `parts` (equal cols) along the rows and packs them for Matmul. `compute` is kF32
  // (weights widened, exact) or kBF16 (activations rounded to bf16, f32 sums) or kF16 (f16 weights,
  // f32 activations). The sources may be unmapped afterwards.
  // Null if the memory cannot be had. REQUIRES: for kF16, f16 sources.
  virtual std::unique_ptr<PackedMatrix> Pack(std::span<const HostMatrix> parts, DType compute) = 0;

  // Whether PackStored takes blocks as they are.
  virtual bool ComputesStored() const { return false; }
  // As Pack, for products that compute with quantised blocks as they are (quantized_matmul.h); parts of plain types are
  // packed for `compute`, as Pack does. REQUIRES: ComputesStored(), and cols a multiple of kRoundedValues where blocks
  // are quantised.
  virtual std::unique_ptr<PackedMatrix> PackStored(std::span<const StoredMatrix> parts,
                                                   DType compute) {
    return nullptr;
  }

  // y[m][out] = x[m][in] Wᵀ, then the epilogue.
  virtual void Matmul(const Tensor& x, const PackedMatrix& w, const Tensor& y,
                      const MatmulEpilogue& epilogue) = 0;

  // out[i] = table[ids[i]] widened to f32. REQUIRES: 0 <= ids[i] < table.rows.
  virtual void EmbedRows(const HostMatrix& table, std::span<const int32_t> ids,
                         const Tensor& out) = 0;

  // out[i] = x[i] / sqrt(mean(x[i]^2) + eps) * weight. out may be x.
  virtual void RmsNorm(const Tensor& x, const float* weight, float eps, const Tensor& out) = 0;

  // The same per head, in place: x [m][heads*d], weight [d] (Qwen3's QK norm).
  virtual void RmsNormHeads(const Tensor& x, int32_t head_dim, const float* weight, float eps) = 0;

  // cos_sin[i] = (cos(positions[i]*inv_freq[j]) ..., sin(...) ...) * scale, j < d/2: rows of d
  // values. The angle is rounded to f32 before cos and sin, as the reference implementation does.
  virtual void RopeTable(std::span<const int32_t> positions, std::span<const float> inv_freq,
                         float scale, const Tensor& cos_sin) = 0;

  // Rotates each head of x [m][heads*d] in place, halves convention: (x[j], x[j+d/2]) is a pair.
  virtual void Rope(const Tensor& x, int32_t head_dim, const Tensor& cos_sin) = 0;

  // Writes row i of k and v [m][Hkv*d] into the chunks' blocks at their positions, rounded to
  // layout.dtype. `pool` is the layer's pool.
  virtual void WriteKv(const Tensor& k, const Tensor& v, std::span<const AttentionChunk> chunks,
                       void* pool, const KvLayout& layout) = 0;

  // Exact causal attention: out[m][H*d] = softmax(scale * q Kᵀ) V per head, over the chunks'
  // blocks, whose rows of this step have been written. Query head h reads KV head h / (H/Hkv).
  virtual void Attend(const Tensor& q, std::span<const AttentionChunk> chunks, const void* pool,
                      const KvLayout& layout, float scale, const Tensor& out) = 0;

  // out[m][n] = silu(gate) * up, where gate_up [m][2n] holds gate, then up.
  virtual void SiluMul(const Tensor& gate_up, const Tensor& out) = 0;

  // ---- several of the above in one ----
  // What each says is the sum of its parts, to the bit; a backend may save what lies between them.

  // RmsNorm of x, then Matmul. `normed` [m][in] is scratch: what it holds afterwards is undefined.
  virtual void NormMatmul(const Tensor& x, const float* weight, float eps, const PackedMatrix& w,
                          const Tensor& normed, const Tensor& y, const MatmulEpilogue& epilogue) {
    RmsNorm(x, weight, eps, normed);
    Matmul(normed, w, y, epilogue);
  }

  // SiluMul, then Matmul. `activated` [m][in] is scratch, as above.
  virtual void SiluMatmul(const Tensor& gate_up, const PackedMatrix& w, const Tensor& activated,
                          const Tensor& y, const MatmulEpilogue& epilogue) {
    SiluMul(gate_up, activated);
    Matmul(activated, w, y, epilogue);
  }

  // Rope of q and k, of the chunks' rows, then WriteKv. What those rows of k hold afterwards is
  // undefined.
  virtual void RopeAndWriteKv(const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& cos_sin, std::span<const AttentionChunk> chunks,
                              void* pool, const KvLayout& layout) {
    for (size_t i = 0; i < chunks.size();) {
      const int32_t first = chunks[i].first_row;
      int32_t last = first;  // chunks side by side go together
      while (i < chunks.size() && chunks[i].first_row == last) last += chunks[i++].num_tokens;
      const auto rows = [&](const Tensor& x) { return x.RowRange(first, last - first); };
      Rope(rows(q), layout.head_dim, rows(cos_sin));
      Rope(rows(k), layout.head_dim, rows(cos_sin));
    }
    WriteKv(k, v, chunks, pool, layout);
  }

  // ---- retrieval (kernels/retrieval.h) ----
  // Pools are one layer's, with the same block numbers as its KV pool. `q` is [m][H*d] after RoPE.
  // Selections, and the addresses that lists point to, lie in shared memory.

  // Null if the memory cannot be had, or the shape is one that this backend lacks. The sources may go
  // afterwards.
  virtual std::unique_ptr<PackedEncoder> PackEncoder(const EncoderWeights& weights) = 0;
  virtual std::unique_ptr<PackedFeatureMap> PackFeatureMap(const FeatureMapWeights& weights) = 0;

  // Codes of the spans' keys, bit for bit as docs/artifact-format.md says.
  virtual void EncodeKeys(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                          const PackedEncoder& encoder, void* codes,
                          const CodeLayout& code_layout) = 0;

  // Bounds of every page that the spans touch, over the page's tokens below the span's last: a span
  // that begins inside a page reads the page from its beginning.
  virtual void BoundKeys(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                         void* bounds) = 0;

  // The four-bit copies of the spans' keys.
  virtual void QuantizeKeys(std::span<const KeySpan> spans, const void* pool,
                            const KvLayout& layout, void* int4_keys) = 0;

  // codes [queries][H][bits / 8] of the queries' rows of q.
  virtual void EncodeQueries(const Tensor& q, std::span<const RetrievalQuery> queries,
                             const PackedEncoder& encoder, void* codes) = 0;

  // The k mid tokens with the largest agreement of codes, summed over the group; of equals the
  // later.
  virtual void SelectByCodes(std::span<const RetrievalQuery> queries, const void* query_codes,
                             int32_t group, const void* codes, const CodeLayout& code_layout,
                             const Selection& chosen) = 0;

  // Quest: the k mid tokens whose pages have the largest bound of q.k, summed over the group; of
  // equals, and so of the last page, the later (page_bounds.h). Whole pages where mid begins and
  // ends at their borders and k is a multiple of 16; neither is required.
  virtual void SelectByBounds(const Tensor& q, std::span<const RetrievalQuery> queries,
                              const void* bounds, const KvLayout& layout, float scale,
                              const Selection& chosen) = 0;

  // The oracle: the k mid tokens that get the largest attention mass, summed over the group, where
  // a query's mass is over all that it sees (docs/calibration.md); of equals the later. Reads all
  // keys.
  virtual void SelectByLogits(const Tensor& q, std::span<const RetrievalQuery> queries,
                              const void* pool, const KvLayout& layout, float scale,
                              const Selection& chosen) = 0;

  // Twilight: of the candidates (tokens of mid, ascending; a query's k does not matter) keeps, for
  // each query head, the fewest whose weight together with the anchors' reaches p of the weight of
  // anchors and candidates, and the union over the group (top_p.h). Weights are estimated from
  // four-bit keys, which anchors must have too. `kept` may be `candidates`.
  virtual void PruneSelection(const Tensor& q, std::span<const RetrievalQuery> queries,
                              const void* int4_keys, const KvLayout& layout, float scale, float p,
                              const Selection& candidates, const Selection& kept) = 0;

  // states [queries][H][AttentionStateFloats(d)] of exact attention over lists [queries][Hkv]; the
  // state of no keys where a list is empty.
  virtual void AttendRows(const Tensor& q, std::span<const RetrievalQuery> queries,
                          std::span<const RowList> lists, const KvLayout& layout, float scale,
                          float* states) = 0;

  // out row of each query [H*d] = attention over what it sees outside mid and its chosen tokens, all of
  // whose rows lie in `pool`: the tokens need not pass through the host. False: nothing was done, as
  // this backend gains nothing by it, or the pool is one of frames; the caller makes lists, and calls
  // AttendRows and FinishStates.
  [[nodiscard]] virtual bool AttendChosen(const Tensor& q, std::span<const RetrievalQuery> queries,
                                          const Selection& chosen, const void* pool,
                                          const KvLayout& layout, float scale,
                                          const Tensor& out) = 0;

  // As AttendChosen, as far as states [queries][H][AttentionStateFloats(d)]. A query whose mid is all it sees has no anchors.
  [[nodiscard]] virtual bool AttendChosenStates(const Tensor& q,
                                                std::span<const RetrievalQuery> queries,
                                                const Selection& chosen, const void* pool,
                                                const KvLayout& layout, float scale,
                                                float* states) = 0;

  // Each summary takes in the tokens up to its extension's `last`.
  virtual void ExtendSummaries(std::span<const SummaryExtension> extensions, const void* pool,
                               const KvLayout& layout, const PackedFeatureMap& key_map) = 0;

  // Adds to each state what the mid tokens that were not chosen are estimated to give. Advances
  // each group's summary to every query's mid in turn (and leaves it at the last).
  virtual void CompleteStates(const Tensor& q, std::span<const RetrievalQuery> queries,
                              std::span<const CompletionGroup> groups,
                              std::span<const RowList> lists, const void* pool,
                              const KvLayout& layout, const PackedFeatureMap& key_map,
                              const PackedFeatureMap& query_map, float* states) = 0;

  // The same, with the rows of chosen tokens where the queries' tables say. REQUIRES: AttendChosenStates was
  // true for such a pool.
  virtual void CompleteChosenStates(const Tensor& q, std::span<const RetrievalQuery> queries,
                                    std::span<const CompletionGroup> groups,
                                    const Selection& chosen, const void* pool,
                                    const KvLayout& layout, const PackedFeatureMap& key_map,
                                    const PackedFeatureMap& query_map, float* states) = 0;

  // masses [count], in shared memory or the device's: of each of the states, the natural logarithm of the sum of
  // exp(score) over its keys; minus infinity if it is of no keys.
  virtual void StateMasses(const float* states, int64_t count, int32_t head_dim, float* masses) = 0;

  // out row of each query [H*d] = the states' attention; zeros where a state is of no keys.
  virtual void FinishStates(std::span<const RetrievalQuery> queries, const float* states,
                            int32_t head_dim, const Tensor& out) = 0;

  // ---- transform codes (kernels/transform_code.h) ----
  // The six operations go together: a backend has all of them, or says no to HasTransformCodes and none is called.

  virtual bool HasTransformCodes() const { return false; }
  // Null if the memory cannot be had. The sources may go afterwards.
  virtual std::unique_ptr<PackedTransformCode> PackTransformCode(
      const TransformCodeWeights& weights) {
    return nullptr;
  }
  // Codes of the spans' keys.
  virtual void EncodeTransformKeys(std::span<const KeySpan> spans, const void* pool,
                                   const KvLayout& layout, const PackedTransformCode& transform,
                                   void* codes, const CodeLayout& code_layout);
  // The k mid tokens of the largest estimated mass, summed over the group; of equals the later. `anchor_masses`
  // [queries][H]: StateMasses of the anchors' exact attention, in shared memory or the device's. `tail`: what is left
  // for MergeTails; null: nothing.
  virtual void SelectByMass(const Tensor& q, std::span<const RetrievalQuery> queries,
                            const float* anchor_masses, const PackedTransformCode& transform,
                            float scale, const void* codes, const CodeLayout& code_layout,
                            const Selection& chosen, const TailMasses* tail);
  // Subtracts the masses of the `read` tokens (of mid, ascending) from `tail`, which SelectByMass left `of_all` for the same
  // queries: for selections that are pruned after they are made, as pruned tokens belong to the tail.
  virtual void TakeFromTail(const Tensor& q, std::span<const RetrievalQuery> queries,
                            const PackedTransformCode& transform, float scale, const void* codes,
                            const CodeLayout& code_layout, const Selection& read,
                            const TailMasses& tail);
  // Each table takes in the tokens up to its extension's `last`, whose codes are made.
  virtual void ExtendCellTables(std::span<const CellTableExtension> extensions, const void* pool,
                                const KvLayout& layout, const PackedTransformCode& transform,
                                const void* codes, const CodeLayout& code_layout);
  // Adds to each state of the queries what the mid tokens that were not selected are estimated to give. `tables`
  // [queries]: data of the table of each query's sequence.
  virtual void MergeTails(std::span<const RetrievalQuery> queries,
                          std::span<const float* const> tables,
                          const PackedTransformCode& transform, const TailMasses& tail,
                          int32_t head_dim, float* states);
  // states [count] become those of both parts; a part of no keys leaves the state's bits.
  virtual void MergeStates(const float* parts, int64_t count, int32_t head_dim, float* states);

  // quality [queries][Hkv] of tokens of mid, ascending; any memory of the host, written when this
  // returns. Reads all keys.
  virtual void MeasureSelection(const Tensor& q, std::span<const RetrievalQuery> queries,
                                const void* pool, const KvLayout& layout, float scale,
                                const Selection& chosen, SelectionQuality* quality) = 0;

  // sampled [rows.size()], in shared memory: the next token of each row of logits [rows][vocab]
  // (sample.h), there after Synchronize. REQUIRES: ids within the vocabulary; logits are not changed.
  virtual void Sample(const Tensor& logits, std::span<const SampleRow> rows,
                      SampledToken* sampled) = 0;
};

// The best CPU backend for this processor. `isa`: "auto", "avx512", "avx2", "scalar"; null if the
// processor lacks what was asked for. `num_threads` 0: as many as the processors this process may
// use.
std::unique_ptr<Backend> MakeCpuBackend(const std::string& isa, int num_threads);

// The first CUDA device (kernels/cuda/cuda_backend.h); null, and why in `why`, if there is none that
// can be used, or the program was built without CUDA.
// `graphs`: launches that repeat the last step's go as one CUDA graph (kernels/cuda/launch_log.h).
std::unique_ptr<Backend> MakeCudaBackend(bool graphs, std::string* why);

// Whether a CUDA kernel may be put on the device before the one ahead has ended (kernels/cuda/launch.cuh).
// At first it may. Of the whole process, for measuring what it gives: called while no backend works.
void LetCudaKernelsStartEarly(bool let);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_BACKEND_H_
