// A backend that measures another: where the time of a forward pass goes, with the bytes and FLOPs
// that the kernels' headers give for the same calls. For bench; serving does without. It waits for a
// device after each call, so that a call's time is its own, and a step takes longer than without.
#ifndef WINNOW_ENGINE_TIMED_BACKEND_H_
#define WINNOW_ENGINE_TIMED_BACKEND_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace winnow::engine {

struct OpTotals {
  double seconds = 0;
  double bytes = 0;
  double flops = 0;
};

// Products of one shape.
struct MatmulShape {
  int64_t m = 0, out = 0, in = 0;
  int64_t calls = 0;
};

class TimedBackend : public kernels::Backend {
 public:
  // `inner` must outlive this. `compute` is the type that weights are packed in.
  TimedBackend(kernels::Backend& inner, kernels::DType compute)
      : inner_(inner), compute_(compute), on_device_(inner.AvailableBytes() >= 0) {}

  // Whether to wait after each call. If not, nothing is timed on a device: the host is to be no slower there than it
  // is in a server.
  void set_waits(bool waits) { waits_ = waits; }
  // Whether operations that a backend can do in one go (NormMatmul, SiluMatmul, GatedMlp, RopeAndWriteKv and, with it,
  // the encodings of a decode step) are asked for so. If not, their parts are, one after the other.
  void set_joins(bool joins) { joins_ = joins; }
  bool on_device() const { return on_device_; }
  void Reset();
  const OpTotals& matmul() const { return matmul_; }
  const OpTotals& attention() const { return attention_; }
  // Of retrieval, seconds only: making indexes; choosing tokens; completion. Attention over chosen
  // rows is attention().
  const OpTotals& index() const { return index_; }
  const OpTotals& select() const { return select_; }
  const OpTotals& complete() const { return complete_; }
  const OpTotals& other() const { return other_; }  // seconds only
  const std::vector<MatmulShape>& matmul_shapes() const { return shapes_; }

  std::string name() const override { return inner_.name(); }
  std::string arithmetic() const override { return inner_.arithmetic(); }
  std::string Refusal(const kernels::KvLayout& layout, int32_t num_heads) const override {
    return inner_.Refusal(layout, num_heads);
  }
  int64_t AvailableBytes() const override { return inner_.AvailableBytes(); }
  kernels::Buffer Allocate(size_t size_bytes) override { return inner_.Allocate(size_bytes); }
  kernels::Buffer AllocateShared(size_t size_bytes) override {
    return inner_.AllocateShared(size_bytes);
  }
  kernels::SharedKvSizes SizeSharedKv(const kernels::SharedKvShape& shape) const override {
    return inner_.SizeSharedKv(shape);
  }
  std::unique_ptr<kernels::SharedKv> ShareKv(const kernels::SharedKvShape& shape,
                                             std::span<std::byte* const> pools,
                                             std::string* why) override {
    return inner_.ShareKv(shape, pools, why);
  }
  void BeginPass() override { inner_.BeginPass(); }
  void ForgetTables() override { inner_.ForgetTables(); }
  bool Synchronize() override { return inner_.Synchronize(); }
  std::string failure() const override { return inner_.failure(); }
  void CopyToHost(const void* device, void* host, size_t size_bytes) override;
  void CopyToDevice(const void* host, void* device, size_t size_bytes) override;
  void CopyAllToHost(std::span<const kernels::CopyPart> parts) override;
  void CopyAllToDevice(std::span<const kernels::CopyPart> parts) override;
  std::unique_ptr<kernels::PackedMatrix> Pack(std::span<const kernels::HostMatrix> parts,
                                              kernels::DType compute) override;
  bool ComputesStored() const override { return inner_.ComputesStored(); }
  std::unique_ptr<kernels::PackedMatrix> PackStored(std::span<const kernels::StoredMatrix> parts,
                                                    kernels::DType compute) override {
    return inner_.PackStored(parts, compute);
  }
  void Matmul(const kernels::Tensor& x, const kernels::PackedMatrix& w, const kernels::Tensor& y,
              const kernels::MatmulEpilogue& epilogue) override;
  void EmbedRows(const kernels::HostMatrix& table, std::span<const int32_t> ids, float scale,
                 const kernels::Tensor& out) override;
  void RmsNorm(const kernels::Tensor& x, const float* weight, float eps,
               const kernels::Tensor& out) override;
  void AddRmsNorm(const kernels::Tensor& x, const float* weight, float eps,
                  const kernels::Tensor& y) override;
  void RmsNormHeads(const kernels::Tensor& x, int32_t head_dim, const float* weight,
                    float eps) override;
  void RopeTable(std::span<const int32_t> positions, std::span<const float> inv_freq, float scale,
                 std::span<const float> factors, const kernels::Tensor& cos_sin) override;
  void Rope(const kernels::Tensor& x, int32_t head_dim, const kernels::Tensor& cos_sin) override;
  void WriteKv(const kernels::Tensor& k, const kernels::Tensor& v,
               std::span<const kernels::AttentionChunk> chunks, void* pool,
               const kernels::KvLayout& layout) override;
  void Attend(const kernels::Tensor& q, std::span<const kernels::AttentionChunk> chunks,
              const void* pool, const kernels::KvLayout& layout, float scale,
              const kernels::Tensor& out) override;
  void GeluTanhMul(const kernels::Tensor& gate_up, const kernels::Tensor& out) override;
  void SiluMul(const kernels::Tensor& gate_up, const kernels::Tensor& out) override;
  void ClampedSwigluMul(const kernels::Tensor& gate_up, const kernels::ClampedSwiglu& by,
                        const kernels::Tensor& out) override;
  void RouteExperts(const kernels::Tensor& logits, const kernels::ExpertRouting& routing,
                    int32_t* ids, const kernels::Tensor& weights) override;
  void GatherExpertRows(const kernels::Tensor& x, std::span<const int32_t> rows,
                        const kernels::Tensor& out) override;
  void AddExpertRows(const kernels::Tensor& x, std::span<const int32_t> places,
                     const kernels::Tensor& weights, const kernels::Tensor& y) override;
  std::unique_ptr<kernels::ExpertSet> MakeExpertSet(
      std::span<const kernels::ExpertMatrices> experts) override;
  int64_t RoutedExpertRows(int64_t slots, int64_t experts) const override {
    return inner_.RoutedExpertRows(slots, experts);
  }
  // Counts as products, with the bytes of as many experts as there are slots: each is read once at most.
  bool AddRoutedExperts(const kernels::RoutedExpertsArgs& args) override;
  // On a device, joined, these count as products and as other; else their parts as what they are.
  void NormMatmul(const kernels::NormMatmulArgs& args) override;
  void SiluMatmul(const kernels::Tensor& gate_up, const kernels::PackedMatrix& w,
                  const kernels::Tensor& activated, const kernels::Tensor& y,
                  const kernels::MatmulEpilogue& epilogue) override;
  void GatedMlp(const kernels::GatedMlpArgs& args) override;
  void RopeAndWriteKv(const kernels::RopeAndWriteKvArgs& args) override;
  std::unique_ptr<kernels::PackedEncoder> PackEncoder(
      const kernels::EncoderWeights& weights) override;
  std::unique_ptr<kernels::PackedFeatureMap> PackFeatureMap(
      const kernels::FeatureMapWeights& weights) override;
  void EncodeKeys(std::span<const kernels::KeySpan> spans, const void* pool,
                  const kernels::KvLayout& layout, const kernels::PackedEncoder& encoder,
                  void* codes, const kernels::CodeLayout& code_layout) override;
  void BoundKeys(std::span<const kernels::KeySpan> spans, const void* pool,
                 const kernels::KvLayout& layout, void* bounds) override;
  void QuantizeKeys(std::span<const kernels::KeySpan> spans, const void* pool,
                    const kernels::KvLayout& layout, void* int4_keys) override;
  void EncodeQueries(const kernels::Tensor& q, std::span<const kernels::RetrievalQuery> queries,
                     const kernels::PackedEncoder& encoder, void* codes) override;
  void SelectByCodes(std::span<const kernels::RetrievalQuery> queries, const void* query_codes,
                     int32_t group, const void* codes, const kernels::CodeLayout& code_layout,
                     const kernels::Selection& chosen) override;
  void SelectByBounds(const kernels::Tensor& q, std::span<const kernels::RetrievalQuery> queries,
                      const void* bounds, const kernels::KvLayout& layout, float scale,
                      const kernels::Selection& chosen) override;
  void SelectByLogits(const kernels::Tensor& q, std::span<const kernels::RetrievalQuery> queries,
                      const void* pool, const kernels::KvLayout& layout, float scale,
                      const kernels::Selection& chosen) override;
  void PruneSelection(const kernels::PruneSelectionArgs& args) override;
  bool FindsRows(const void* pool) const override { return inner_.FindsRows(pool); }
  void AttendRows(const kernels::AttendRowsArgs& args) override;
  void ExtendSummaries(std::span<const kernels::SummaryExtension> extensions, const void* pool,
                       const kernels::KvLayout& layout,
                       const kernels::PackedFeatureMap& key_map) override;
  void CompleteStates(const kernels::CompleteStatesArgs& args) override;
  void StateMasses(const float* states, int64_t count, int32_t head_dim, float* masses) override;
  void FinishStates(std::span<const kernels::RetrievalQuery> queries, const float* states,
                    int32_t head_dim, const float* sinks, const kernels::Tensor& out) override;
  void MeasureSelection(const kernels::MeasureSelectionArgs& args) override;
  std::unique_ptr<kernels::PackedTransformCode> PackTransformCode(
      const kernels::TransformCodeWeights& weights) override;
  void EncodeTransformKeys(std::span<const kernels::KeySpan> spans, const void* pool,
                           const kernels::KvLayout& layout,
                           const kernels::PackedTransformCode& transform, void* codes,
                           const kernels::CodeLayout& code_layout) override;
  void SelectByMass(const kernels::SelectByMassArgs& args) override;
  void EncodeResiduals(const kernels::EncodeResidualsArgs& args) override;
  void RerankByMass(const kernels::RerankByMassArgs& args) override;
  void TakeFromTail(const kernels::TakeFromTailArgs& args) override;
  void ExtendCellTables(std::span<const kernels::CellTableExtension> extensions, const void* pool,
                        const kernels::KvLayout& layout,
                        const kernels::PackedTransformCode& transform, const void* codes,
                        const kernels::CodeLayout& code_layout) override;
  void MergeTails(std::span<const kernels::RetrievalQuery> queries,
                  std::span<const float* const> tables,
                  const kernels::PackedTransformCode& transform, const kernels::TailMasses& tail,
                  int32_t head_dim, float* states) override;
  void MergeStates(const float* parts, int64_t count, int32_t head_dim, float* states) override;
  void Sample(const kernels::Tensor& logits, std::span<const kernels::SampleRow> rows,
              kernels::SampledToken* sampled) override;

 private:
  struct TimedExperts;
  class Timer;
  Timer Time(OpTotals& totals);  // of the block that it stands in
  void CountProduct(int64_t m, const kernels::PackedMatrix& w);

  kernels::Backend& inner_;
  bool joins_ = true;
  bool waits_ = true;
  const kernels::DType compute_;
  const bool on_device_;
  OpTotals matmul_, attention_, index_, select_, complete_, other_;
  std::vector<MatmulShape> shapes_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TIMED_BACKEND_H_
