#include "engine/timed_backend.h"

#include <algorithm>

#include "kernels/attention.h"
#include "kernels/matmul.h"

namespace winnow::engine {

using kernels::AttentionChunk;
using kernels::HostMatrix;
using kernels::KvLayout;
using kernels::MatmulEpilogue;
using kernels::PackedMatrix;
using kernels::Tensor;

// Adds the time from its making to its end, and to the end of what was asked of the device meanwhile; or does nothing.
class TimedBackend::Timer {
 public:
  Timer(OpTotals& totals, kernels::Backend& backend, bool waits, bool times)
      : totals_(totals), backend_(backend), waits_(waits), times_(times) {
    if (times_) start_ = Clock::now();
  }
  ~Timer() {
    // A failure is found by whoever reads the results.
    if (waits_) static_cast<void>(backend_.Synchronize());
    if (times_) totals_.seconds += std::chrono::duration<double>(Clock::now() - start_).count();
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  OpTotals& totals_;
  kernels::Backend& backend_;
  using Clock = std::chrono::steady_clock;
  const bool waits_, times_;
  Clock::time_point start_;
};

TimedBackend::Timer TimedBackend::Time(OpTotals& totals) {
  return {totals, inner_, waits_, waits_ || !on_device_};
}

void TimedBackend::Reset() {
  matmul_ = attention_ = index_ = select_ = complete_ = other_ = OpTotals();
  shapes_.clear();
}

void TimedBackend::Matmul(const Tensor& x, const PackedMatrix& w, const Tensor& y,
                          const MatmulEpilogue& epilogue) {
  {
    const Timer timer = Time(matmul_);
    inner_.Matmul(x, w, y, epilogue);
  }
  CountProduct(x.rows, w);
}

void TimedBackend::NormMatmul(const kernels::NormMatmulArgs& args) {
  if (!on_device() || !joins_) return Backend::NormMatmul(args);
  {
    const Timer timer = Time(matmul_);
    inner_.NormMatmul(args);
  }
  CountProduct(args.x.rows, args.w);
}

void TimedBackend::SiluMatmul(const Tensor& gate_up, const PackedMatrix& w, const Tensor& activated,
                              const Tensor& y, const MatmulEpilogue& epilogue) {
  if (!on_device() || !joins_) {
    return Backend::SiluMatmul(gate_up, w, activated, y, epilogue);
  }
  {
    const Timer timer = Time(matmul_);
    inner_.SiluMatmul(gate_up, w, activated, y, epilogue);
  }
  CountProduct(gate_up.rows, w);
}

void TimedBackend::GatedMlp(const kernels::GatedMlpArgs& args) {
  if (!on_device() || !joins_) return Backend::GatedMlp(args);
  {
    const Timer timer = Time(matmul_);
    inner_.GatedMlp(args);
  }
  CountProduct(args.hidden.rows, args.gate_up);
  CountProduct(args.hidden.rows, args.down);
}

struct TimedBackend::TimedExperts final : public kernels::ExpertSet {
  std::unique_ptr<kernels::ExpertSet> inner;
  kernels::ExpertMatrices of_one;
  int64_t count = 0;
};

std::unique_ptr<kernels::ExpertSet> TimedBackend::MakeExpertSet(
    std::span<const kernels::ExpertMatrices> experts) {
  auto timed = std::make_unique<TimedExperts>();
  timed->inner = inner_.MakeExpertSet(experts);
  if (timed->inner == nullptr) return nullptr;
  timed->of_one = experts[0];
  timed->count = static_cast<int64_t>(experts.size());
  return timed;
}

bool TimedBackend::AddRoutedExperts(const kernels::RoutedExpertsArgs& args) {
  if (!joins_) return false;
  const auto& experts = static_cast<const TimedExperts&>(args.experts);
  {
    const Timer timer = Time(matmul_);
    if (!inner_.AddRoutedExperts({.experts = *experts.inner,
                                  .per_token = args.per_token,
                                  .routing = args.routing,
                                  .clamped = args.clamped,
                                  .logits = args.logits,
                                  .normed = args.normed,
                                  .hidden = args.hidden,
                                  .rows = args.rows})) {
      return false;
    }
  }
  const int64_t slots = args.normed.rows * args.per_token, read = std::min(slots, experts.count);
  for (int64_t i = 0; i < read; ++i) {
    const int64_t rows = slots / read + (i < slots % read ? 1 : 0);
    CountProduct(rows, *experts.of_one.gate_up);
    CountProduct(rows, *experts.of_one.down);
  }
  return true;
}

void TimedBackend::RopeAndWriteKv(const kernels::RopeAndWriteKvArgs& args) {
  if (!joins_) return Backend::RopeAndWriteKv(args);
  const Timer timer = Time(other_);
  inner_.RopeAndWriteKv(args);
}

void TimedBackend::CountProduct(int64_t m, const PackedMatrix& w) {
  const int64_t out = w.out_features(), in = w.in_features();
  // Plain weights are counted without their padding; quantised ones are less than plain ones would be.
  const double plain = kernels::MatmulBytes(0, out, in, compute_);
  matmul_.bytes += kernels::MatmulBytes(m, out, in, compute_) - plain +
                   std::min(plain, static_cast<double>(w.size_bytes()));
  matmul_.flops += kernels::MatmulFlops(m, out, in);
  const auto shape = std::find_if(shapes_.begin(), shapes_.end(), [&](const MatmulShape& s) {
    return s.m == m && s.out == out && s.in == in;
  });
  if (shape != shapes_.end()) {
    ++shape->calls;
  } else {
    shapes_.push_back({m, out, in, 1});
  }
}

void TimedBackend::Attend(const Tensor& q, std::span<const AttentionChunk> chunks, const void* pool,
                          const KvLayout& layout, float scale, const Tensor& out) {
  {
    const Timer timer = Time(attention_);
    inner_.Attend(q, chunks, pool, layout, scale, out);
  }
  const int64_t heads = q.cols / layout.head_dim;
  for (const AttentionChunk& chunk : chunks) {
    attention_.bytes += kernels::AttentionBytes(chunk, heads, layout);
    attention_.flops += kernels::AttentionFlops(chunk, heads, layout.head_dim);
  }
}

void TimedBackend::CopyToHost(const void* device, void* host, size_t size_bytes) {
  const Timer timer = Time(other_);
  inner_.CopyToHost(device, host, size_bytes);
}

void TimedBackend::CopyToDevice(const void* host, void* device, size_t size_bytes) {
  const Timer timer = Time(other_);
  inner_.CopyToDevice(host, device, size_bytes);
}

void TimedBackend::CopyAllToHost(std::span<const kernels::CopyPart> parts) {
  const Timer timer = Time(other_);
  inner_.CopyAllToHost(parts);
}

void TimedBackend::CopyAllToDevice(std::span<const kernels::CopyPart> parts) {
  const Timer timer = Time(other_);
  inner_.CopyAllToDevice(parts);
}

std::unique_ptr<PackedMatrix> TimedBackend::Pack(std::span<const HostMatrix> parts,
                                                 kernels::DType compute) {
  return inner_.Pack(parts, compute);
}

void TimedBackend::EmbedRows(const HostMatrix& table, std::span<const int32_t> ids, float scale,
                             const Tensor& out) {
  const Timer timer = Time(other_);
  inner_.EmbedRows(table, ids, scale, out);
}

void TimedBackend::RmsNorm(const Tensor& x, const float* weight, float eps, const Tensor& out) {
  const Timer timer = Time(other_);
  inner_.RmsNorm(x, weight, eps, out);
}

void TimedBackend::AddRmsNorm(const Tensor& x, const float* weight, float eps, const Tensor& y) {
  const Timer timer = Time(other_);
  inner_.AddRmsNorm(x, weight, eps, y);
}

void TimedBackend::RmsNormHeads(const Tensor& x, int32_t head_dim, const float* weight, float eps) {
  const Timer timer = Time(other_);
  inner_.RmsNormHeads(x, head_dim, weight, eps);
}

void TimedBackend::RopeTable(std::span<const int32_t> positions, std::span<const float> inv_freq,
                             float scale, std::span<const float> factors, const Tensor& cos_sin) {
  const Timer timer = Time(other_);
  inner_.RopeTable(positions, inv_freq, scale, factors, cos_sin);
}

void TimedBackend::Rope(const Tensor& x, int32_t head_dim, const Tensor& cos_sin) {
  const Timer timer = Time(other_);
  inner_.Rope(x, head_dim, cos_sin);
}

void TimedBackend::WriteKv(const Tensor& k, const Tensor& v, std::span<const AttentionChunk> chunks,
                           void* pool, const KvLayout& layout) {
  const Timer timer = Time(other_);
  inner_.WriteKv(k, v, chunks, pool, layout);
}

void TimedBackend::SiluMul(const Tensor& gate_up, const Tensor& out) {
  const Timer timer = Time(other_);
  inner_.SiluMul(gate_up, out);
}

void TimedBackend::GeluTanhMul(const Tensor& gate_up, const Tensor& out) {
  const Timer timer = Time(other_);
  inner_.GeluTanhMul(gate_up, out);
}

void TimedBackend::ClampedSwigluMul(const Tensor& gate_up, const kernels::ClampedSwiglu& by,
                                    const Tensor& out) {
  const Timer timer = Time(other_);
  inner_.ClampedSwigluMul(gate_up, by, out);
}

void TimedBackend::RouteExperts(const Tensor& logits, const kernels::ExpertRouting& routing,
                                int32_t* ids, const Tensor& weights) {
  const Timer timer = Time(other_);
  inner_.RouteExperts(logits, routing, ids, weights);
}

void TimedBackend::GatherExpertRows(const Tensor& x, std::span<const int32_t> rows,
                                    const Tensor& out) {
  const Timer timer = Time(other_);
  inner_.GatherExpertRows(x, rows, out);
}

void TimedBackend::AddExpertRows(const Tensor& x, std::span<const int32_t> places,
                                 const Tensor& weights, const Tensor& y) {
  const Timer timer = Time(other_);
  inner_.AddExpertRows(x, places, weights, y);
}

std::unique_ptr<kernels::PackedEncoder> TimedBackend::PackEncoder(
    const kernels::EncoderWeights& weights) {
  return inner_.PackEncoder(weights);
}

std::unique_ptr<kernels::PackedFeatureMap> TimedBackend::PackFeatureMap(
    const kernels::FeatureMapWeights& weights) {
  return inner_.PackFeatureMap(weights);
}

void TimedBackend::EncodeKeys(std::span<const kernels::KeySpan> spans, const void* pool,
                              const kernels::KvLayout& layout,
                              const kernels::PackedEncoder& encoder, void* codes,
                              const kernels::CodeLayout& code_layout) {
  const Timer timer = Time(index_);
  inner_.EncodeKeys(spans, pool, layout, encoder, codes, code_layout);
}

void TimedBackend::BoundKeys(std::span<const kernels::KeySpan> spans, const void* pool,
                             const kernels::KvLayout& layout, void* bounds) {
  const Timer timer = Time(index_);
  inner_.BoundKeys(spans, pool, layout, bounds);
}

void TimedBackend::QuantizeKeys(std::span<const kernels::KeySpan> spans, const void* pool,
                                const kernels::KvLayout& layout, void* int4_keys) {
  const Timer timer = Time(index_);
  inner_.QuantizeKeys(spans, pool, layout, int4_keys);
}

void TimedBackend::EncodeQueries(const kernels::Tensor& q,
                                 std::span<const kernels::RetrievalQuery> queries,
                                 const kernels::PackedEncoder& encoder, void* codes) {
  const Timer timer = Time(select_);
  inner_.EncodeQueries(q, queries, encoder, codes);
}

void TimedBackend::SelectByCodes(std::span<const kernels::RetrievalQuery> queries,
                                 const void* query_codes, int32_t group, const void* codes,
                                 const kernels::CodeLayout& code_layout,
                                 const kernels::Selection& chosen) {
  const Timer timer = Time(select_);
  inner_.SelectByCodes(queries, query_codes, group, codes, code_layout, chosen);
}

void TimedBackend::SelectByBounds(const kernels::Tensor& q,
                                  std::span<const kernels::RetrievalQuery> queries,
                                  const void* bounds, const kernels::KvLayout& layout, float scale,
                                  const kernels::Selection& chosen) {
  const Timer timer = Time(select_);
  inner_.SelectByBounds(q, queries, bounds, layout, scale, chosen);
}

void TimedBackend::SelectByLogits(const kernels::Tensor& q,
                                  std::span<const kernels::RetrievalQuery> queries,
                                  const void* pool, const kernels::KvLayout& layout, float scale,
                                  const kernels::Selection& chosen) {
  const Timer timer = Time(select_);
  inner_.SelectByLogits(q, queries, pool, layout, scale, chosen);
}

void TimedBackend::PruneSelection(const kernels::PruneSelectionArgs& args) {
  const Timer timer = Time(select_);
  inner_.PruneSelection(args);
}

void TimedBackend::AttendRows(const kernels::AttendRowsArgs& args) {
  const Timer timer = Time(attention_);
  inner_.AttendRows(args);
}

void TimedBackend::ExtendSummaries(std::span<const kernels::SummaryExtension> extensions,
                                   const void* pool, const kernels::KvLayout& layout,
                                   const kernels::PackedFeatureMap& key_map) {
  const Timer timer = Time(index_);
  inner_.ExtendSummaries(extensions, pool, layout, key_map);
}

void TimedBackend::CompleteStates(const kernels::CompleteStatesArgs& args) {
  const Timer timer = Time(complete_);
  inner_.CompleteStates(args);
}

void TimedBackend::StateMasses(const float* states, int64_t count, int32_t head_dim,
                               float* masses) {
  const Timer timer = Time(complete_);
  inner_.StateMasses(states, count, head_dim, masses);
}

void TimedBackend::FinishStates(std::span<const kernels::RetrievalQuery> queries,
                                const float* states, int32_t head_dim, const float* sinks,
                                const kernels::Tensor& out) {
  const Timer timer = Time(attention_);
  inner_.FinishStates(queries, states, head_dim, sinks, out);
}

void TimedBackend::MeasureSelection(const kernels::MeasureSelectionArgs& args) {
  const Timer timer = Time(other_);
  inner_.MeasureSelection(args);
}

void TimedBackend::Sample(const Tensor& logits, std::span<const kernels::SampleRow> rows,
                          kernels::SampledToken* sampled) {
  const Timer timer = Time(other_);
  inner_.Sample(logits, rows, sampled);
}

std::unique_ptr<kernels::PackedTransformCode> TimedBackend::PackTransformCode(
    const kernels::TransformCodeWeights& weights) {
  return inner_.PackTransformCode(weights);
}

void TimedBackend::EncodeTransformKeys(std::span<const kernels::KeySpan> spans, const void* pool,
                                       const KvLayout& layout,
                                       const kernels::PackedTransformCode& transform, void* codes,
                                       const kernels::CodeLayout& code_layout) {
  const Timer timer = Time(index_);
  inner_.EncodeTransformKeys(spans, pool, layout, transform, codes, code_layout);
}

void TimedBackend::SelectByMass(const kernels::SelectByMassArgs& args) {
  const Timer timer = Time(select_);
  inner_.SelectByMass(args);
}

void TimedBackend::EncodeResiduals(const kernels::EncodeResidualsArgs& args) {
  const Timer timer = Time(index_);
  inner_.EncodeResiduals(args);
}

void TimedBackend::RerankByMass(const kernels::RerankByMassArgs& args) {
  const Timer timer = Time(select_);
  inner_.RerankByMass(args);
}

void TimedBackend::TakeFromTail(const kernels::TakeFromTailArgs& args) {
  const Timer timer = Time(select_);
  inner_.TakeFromTail(args);
}

void TimedBackend::ExtendCellTables(std::span<const kernels::CellTableExtension> extensions,
                                    const void* pool, const KvLayout& layout,
                                    const kernels::PackedTransformCode& transform,
                                    const void* codes, const kernels::CodeLayout& code_layout) {
  const Timer timer = Time(index_);
  inner_.ExtendCellTables(extensions, pool, layout, transform, codes, code_layout);
}

void TimedBackend::MergeTails(std::span<const kernels::RetrievalQuery> queries,
                              std::span<const float* const> tables,
                              const kernels::PackedTransformCode& transform,
                              const kernels::TailMasses& tail, int32_t head_dim, float* states) {
  const Timer timer = Time(complete_);
  inner_.MergeTails(queries, tables, transform, tail, head_dim, states);
}

void TimedBackend::MergeStates(const float* parts, int64_t count, int32_t head_dim, float* states) {
  const Timer timer = Time(complete_);
  inner_.MergeStates(parts, count, head_dim, states);
}

}  // namespace winnow::engine
