// The CPU backend: splits every operation of kernels::Backend over a ThreadPool, into leaf calls of
// one instruction set (ops.h). One object, used from one thread at a time.
//
// Scratch memory grows to what the largest call so far needed and then stays.
#ifndef WINNOW_KERNELS_CPU_CPU_BACKEND_H_
#define WINNOW_KERNELS_CPU_CPU_BACKEND_H_

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/ops.h"
#include "kernels/thread_pool.h"

namespace winnow::kernels {

// Zeroed memory aligned to 64 bytes at least, in huge pages where the system has them and the size
// is worth it: a product at m = 1 walks weights at 4 KiB pages' TLB misses otherwise. Null data()
// if it cannot be had.
Buffer AllocateHostMemory(size_t size_bytes);

inline constexpr int32_t kMaxKvHeadDim = 256;
// Stops where KV is of a type or shape that this backend's leaves do not read.
void CheckKv(const KvLayout& layout);

// What retrieval calls have in common (rows.cc): checked, and as leaf functions take it.
RowsCall MakeRowsCall(const Tensor& q, const KvLayout& layout, float scale);
void CheckQuery(const Tensor& q, const RetrievalQuery& query, const KvLayout& layout);
void CheckSelection(std::span<const RetrievalQuery> queries, const KvLayout& layout,
                    const Selection& chosen);

struct PlainPanels;  // packed_matrix.h
struct Int8Panels;
struct Float8Blocks;
struct PartProduct;  // matmul.cc
struct MatrixPart;   // packed_matrix.h

class CpuBackend final : public Backend {
 public:
  CpuBackend(const CpuOps& ops, int num_threads);

  std::string name() const override;
  std::string arithmetic() const override { return std::string("cpu ") + ops_.name; }
  std::string Refusal(const KvLayout&, int32_t) const override { return {}; }
  int64_t AvailableBytes() const override { return -1; }
  Buffer Allocate(size_t size_bytes) override;
  Buffer AllocateShared(size_t size_bytes) override { return Allocate(size_bytes); }
  SharedKvSizes SizeSharedKv(const SharedKvShape&) const override { return {}; }
  std::unique_ptr<SharedKv> ShareKv(const SharedKvShape& shape, std::span<std::byte* const> pools,
                                    std::string* why) override;
  void BeginPass() override {}
  void ForgetTables() override {}
  bool Synchronize() override { return true; }
  std::string failure() const override { return {}; }
  void CopyToHost(const void* device, void* host, size_t size_bytes) override;
  void CopyToDevice(const void* host, void* device, size_t size_bytes) override;
  std::unique_ptr<PackedMatrix> Pack(std::span<const HostMatrix> parts, DType compute) override;
  bool ComputesStored() const override { return true; }
  std::unique_ptr<PackedMatrix> PackStored(std::span<const StoredMatrix> parts,
                                           DType compute) override;
  void Matmul(const Tensor& x, const PackedMatrix& w, const Tensor& y,
              const MatmulEpilogue& epilogue) override;
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
  void AttendRows(const AttendRowsArgs& args) override;
  void ExtendSummaries(std::span<const SummaryExtension> extensions, const void* pool,
                       const KvLayout& layout, const PackedFeatureMap& key_map) override;
  void CompleteStates(const CompleteStatesArgs& args) override;
  void StateMasses(const float* states, int64_t count, int32_t head_dim, float* masses) override;
  void FinishStates(std::span<const RetrievalQuery> queries, const float* states, int32_t head_dim,
                    const float* sinks, const Tensor& out) override;
  void MeasureSelection(const MeasureSelectionArgs& args) override;
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
  void Sample(const Tensor& logits, std::span<const SampleRow> rows,
              SampledToken* sampled) override;

  int num_threads() const { return threads_.num_threads(); }

 private:
  // Memory that is reused from call to call; its contents are not kept when it grows.
  class Scratch {
   public:
    std::byte* Get(size_t size_bytes);

   private:
    Buffer buffer_;
  };

  // Calls body(row) for each row, in pieces worth a thread's while; `row_values` is what a row
  // costs.
  template <typename Body>
  void ForEachRow(int64_t rows, int64_t row_values, Body body) {
    constexpr int64_t kValuesPerItem = 16384;  // less is not worth handing to another thread
    const int64_t per_item =
        std::max<int64_t>(1, kValuesPerItem / std::max<int64_t>(1, row_values));
    threads_.ParallelFor((rows + per_item - 1) / per_item, [&](int64_t item, int) {
      const int64_t last = std::min(rows, (item + 1) * per_item);
      for (int64_t row = item * per_item; row < last; ++row) body(row);
    });
  }

  // Part of a product, by the kind of its panels (matmul.cc).
  void Multiply(const PartProduct& product, PlainPanels plain);
  void Multiply(const PartProduct& product, const BlockShape& shape);
  void Multiply(const PartProduct& product, Int8Panels int8);
  void Multiply(const PartProduct& product, Float8Blocks float8);
  template <typename Call>
  void RunTiles(const PartProduct& product, const Call& call, auto* tiles,
                const ProductSplit& split);
  // The bytes that threads will read first in the product that came after this part's last time, of few rows: they ask for them
  // while others finish, and between the two. Notes which part comes now. Valid until the next call.
  std::span<const ThreadPool::Ahead> AheadOf(const MatrixPart& part, int64_t rows,
                                             const ProductSplit& split);
  // Rows of x, each prepared, `row_bytes` apart; valid until the next call.
  std::byte* PrepareRows(const Tensor& x, size_t row_bytes,
                         void (*prepare)(const float*, int64_t, void*));
  // Rows of a product's operands: x as it is, or prepared as bfloat16.
  void SetRows(const Tensor& x, bool bf16, MatmulOperands& operands);

  // One tile of queries of an attention call.
  struct AttentionWork {
    AttentionTile tile;
    float* out = nullptr;          // as tile.q, in the output
    const float* sinks = nullptr;  // of its first query head, or none
    int32_t first_split = 0;       // with a key that its first query sees
    int32_t num_splits = 0;        // from there to the last key that its last query sees
    bool split = false;            // run split by split, on whichever threads are free
    size_t states_offset = 0;      // of a tile run so: its states in states_scratch_, in floats
  };
  struct AttentionItem {
    int32_t work;
    int32_t split;
  };
  static double Cost(const AttentionWork& work);
  void PlanAttention(const Tensor& q, std::span<const AttentionChunk> chunks,
                     const KvLayout& layout, int32_t group, const Tensor& out);

  // Selects for the given queries and heads together; `wave_bytes` is what their state takes.
  void SelectWave(std::span<const RetrievalQuery> queries,
                  std::span<const std::pair<int64_t, int32_t>> wave, size_t wave_bytes,
                  const void* query_codes, int32_t group, const void* codes,
                  const CodeLayout& code_layout, const Selection& chosen);
  void EncodeTransform(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                       const PackedTransformCode& transform, void* codes,
                       const CodeLayout& code_layout, const EncodeResidualsArgs* first_codes);
  // The same by masses (transform_codes.cc).
  void SelectMassWave(const SelectByMassArgs& args,
                      std::span<const std::pair<int64_t, int32_t>> wave, size_t wave_bytes);
  // Retrieval: pieces [first, last) of the work of one unit (a query and KV head).
  struct RetrievalItem {
    int64_t unit;
    int32_t first, last;
    float* states;
  };
  // Where in states_scratch_ the scores of a unit begin, and its sums or how many scores it has.
  struct ScoredUnit {
    int64_t scores, sums;
  };
  // Calls use(query, KV head, scores of the tokens [0, position]) for each unit, on any thread
  // (logits.cc).
  template <typename Use>
  void ForEachScored(const Tensor& q, std::span<const RetrievalQuery> queries, const void* pool,
                     const KvLayout& layout, float scale, Use use);

  // Of a thread that samples (sample.cc).
  struct Sampling {
    std::vector<float> strips;   // the largest logit of each
    std::vector<float> ordered;  // strips, to find one by its place
    std::vector<int32_t> tokens;
    std::vector<float> logits, weights;  // of tokens
    std::vector<double> buckets;
    std::vector<int32_t> edge;
    std::vector<float> allowed;                     // logits with a mask over them
    std::vector<std::pair<int32_t, float>> edited;  // logits as they were, oldest first
  };
  SampledToken SampleOne(std::span<float> logits, const SampleRow& row, Sampling& work) const;
  LogitFacts Examine(std::span<const float> logits, Sampling& work) const;
  int32_t Draw(std::span<const float> logits, float max, const SampleRow& row,
               Sampling& work) const;

  const CpuOps& ops_;
  ThreadPool threads_;
  std::vector<RetrievalItem> retrieval_items_;  // of the current call; kept for its memory
  std::vector<ScoredUnit> scored_units_;        // the same
  std::vector<AttentionWork> attention_work_;   // of the current call; kept for its memory
  std::vector<AttentionItem> attention_items_;  // the same
  Scratch rows_scratch_;                        // matmul: prepared rows
  Scratch attention_scratch_;                   // attention: a part for each thread
  Scratch states_scratch_;                      // attention: states of splits
  Scratch completion_scratch_;                  // completion: a part for each thread
  std::vector<Sampling> sampling_;              // a part for each thread
  Scratch codes_scratch_;                       // encoding and selection by codes

  // Panels of a part, by those of the part that was multiplied before it. A matrix may be gone: nothing is read.
  struct NextPanels {
    const std::byte* panels = nullptr;
    size_t panel_bytes = 0;
    int64_t count = 0;
    const ProductSplit* split = nullptr;
    bool again = false;  // the time before, too: which expert comes next nobody knows
  };
  std::unordered_map<const std::byte*, NextPanels> next_panels_;
  const std::byte* last_panels_ = nullptr;
  std::vector<ThreadPool::Ahead> ahead_;
};

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_CPU_BACKEND_H_
