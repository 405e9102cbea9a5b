// Transform codes of the CUDA backend (kernels/cuda/transform_code.h).
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/attention_state.h"
#include "kernels/check.h"
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/transform_code.h"
#include "kernels/transform_code.h"

namespace winnow::kernels::cuda {
namespace {

// Shapes grow in such steps, so that a sequence's next token does not make a new one.
constexpr int32_t kShapeTokens = 8192;
// Candidates of short sequences: a block can have all of them (transform_select.cu).
constexpr int32_t kShortTokens = 4096 - (kMassPieceTokens - 1);

}  // namespace

std::unique_ptr<PackedTransformCode> CudaBackend::PackTransformCode(
    const TransformCodeWeights& weights) {
  if (failed() || !CheckTransformCode(weights).empty()) return nullptr;
  const size_t bytes = PackedTransformBytes(weights);
  Buffer memory = Allocate(bytes);
  if (memory.data() == nullptr) return nullptr;
  std::vector<std::byte> host(bytes);
  const DeviceTransform transform = PackTransform(weights, host.data(), memory.data());
  CopyToDevice(host.data(), memory.data(), bytes);
  return std::make_unique<CudaPackedTransformCode>(transform, std::move(memory));
}

void CudaBackend::EncodeTransformKeys(std::span<const KeySpan> spans, const void* pool,
                                      const KvLayout& layout, const PackedTransformCode& transform,
                                      void* codes, const CodeLayout& code_layout) {
  int32_t most = 0;
  const DeviceKeySpan* on_device = StageSpans(spans, layout, &most);
  if (on_device == nullptr) return;
  Good(cuda::EncodeTransformKeys(TransformOf(transform), on_device,
                                 static_cast<int32_t>(spans.size()), most, pool, layout, codes,
                                 code_layout, stream()),
       "transform codes of keys");
}

void CudaBackend::EncodeResiduals(const EncodeResidualsArgs& args) {
  int32_t most = 0;
  const DeviceKeySpan* on_device = StageSpans(args.spans, args.layout, &most);
  if (on_device == nullptr) return;
  Good(cuda::EncodeResiduals(TransformOf(args.residual),
                             {TransformOf(args.transform).heads, args.codes, args.code_layout},
                             on_device, static_cast<int32_t>(args.spans.size()), most, args.pool,
                             args.layout, args.residual_codes, args.residual_layout, stream()),
       "residual codes of keys");
}

void CudaBackend::SelectByMass(const SelectByMassArgs& args) {
  const Tensor& q = args.q;
  const std::span<const RetrievalQuery> queries = args.queries;
  const CodeLayout& code_layout = args.code_layout;
  const TailMasses* const tail = args.tail;
  const DeviceTransform& of_layer = TransformOf(args.transform);
  const auto heads = static_cast<int32_t>(q.cols / of_layer.head_dim);
  const int32_t group = heads / code_layout.kv_heads;
  const float* const anchor_states = TakeHeldMasses(
      args.anchor_masses, static_cast<int64_t>(queries.size()) * heads, of_layer.head_dim);
  int32_t longest = 0;
  for (const RetrievalQuery& query : queries) longest = std::max(longest, query.mid.size());
  longest = longest <= kShortTokens ? kShortTokens : RoundUp(longest, kShapeTokens);
  const auto shape_of = [&](int32_t num_queries) {
    return MassSelectShape{num_queries, group, code_layout, longest};
  };
  const DeviceQuery* on_device = StageQueries(queries, code_layout.block_tokens);
  if (on_device == nullptr || !EndStaging()) return;
  const Selection selection = NewSelection(args.chosen, queries.size());
  // Steps, keys and cells of all tokens lie in the workspace: of one query of 8 KV heads and 4 queries each at 1M tokens 88 MiB.
  const size_t at_once = QueriesAtOnce(queries.size(), [&](int32_t num_queries) {
    return MassSelectWorkspaceBytes(shape_of(num_queries));
  });
  for (size_t first = 0; first < queries.size() && !failed(); first += at_once) {
    const MassSelectShape shape =
        shape_of(static_cast<int32_t>(std::min(at_once, queries.size() - first)));
    if (!Prepare(transform_, MassSelectWorkspaceBytes(shape), MassSelectZeroedPart(shape),
                 {shape.num_queries, group, code_layout.kv_heads, code_layout.bits,
                  code_layout.block_tokens, shape.max_mid_tokens, 1},
                 "selection by mass")) {
      return;
    }
    const auto before = static_cast<int64_t>(first) * heads;
    const TailMasses of_call =
        tail == nullptr
            ? TailMasses{}
            : TailMasses{tail->heads, tail->masses + before * kTransformCells,
                         tail->references + before, tail->deltas + before, tail->of_all};
    const AnchorMasses anchors =
        anchor_states == nullptr
            ? AnchorMasses(args.anchor_masses + before)
            : AnchorMasses(anchor_states + before * AttentionStateFloats(of_layer.head_dim),
                           held_masses_.masses + before,
                           first == 0 && held_masses_.just_attended == q.f32());
    Good(cuda::SelectByMass(
             shape, of_layer, q.f32(), q.stride, on_device + first, anchors, args.scale, args.codes,
             selection.From(static_cast<int64_t>(first)), of_call, transform_.data(), stream(),
             args.scales == nullptr
                 ? MassScales{}
                 : MassScales{args.scales->references + before, args.scales->inverses + before}),
         "selection by mass");
  }
  if (!failed()) NoteSelection(selection, args.chosen, queries.size());
}

void CudaBackend::RerankByMass(const RerankByMassArgs& args) {
  const Tensor& q = args.q;
  const std::span<const RetrievalQuery> queries = args.queries;
  const Selection &candidates = args.candidates, &kept = args.kept;
  WINNOW_CHECK(candidates.capacity == kept.capacity && candidates.kv_heads == kept.kv_heads);
  const DeviceTransform& of_layer = TransformOf(args.transform);
  const DeviceTransform& residual = TransformOf(args.residual);
  const auto heads = static_cast<int32_t>(q.cols / of_layer.head_dim);
  const int32_t kv_heads = args.code_layout.kv_heads, group = heads / kv_heads;
  const DeviceQuery* on_device = StageQueries(queries, args.code_layout.block_tokens);
  if (on_device == nullptr || !EndStaging()) return;
  // The device re-ranks in place. Where the host keeps both, its candidates travel first, and back.
  const bool in_place = kept.counts == candidates.counts && kept.tokens == candidates.tokens;
  if (!in_place && !Synchronize()) return;
  const Selection selection = SelectionToChange(candidates, queries.size());
  const auto bytes_of = [&](int32_t num_queries) {
    return RerankWorkspaceBytes(num_queries, kv_heads, group, selection.capacity);
  };
  const size_t at_once = QueriesAtOnce(queries.size(), bytes_of);
  for (size_t first = 0; first < queries.size() && !failed(); first += at_once) {
    const auto count = static_cast<int32_t>(std::min(at_once, queries.size() - first));
    const auto before = static_cast<int64_t>(first) * heads;
    if (!Grow(rerank_, bytes_of(count), "re-ranking")) return;
    Good(cuda::RerankByMass(count, group, {&of_layer, args.codes, args.code_layout},
                            {&residual, args.residual_codes, args.residual_layout}, q.f32(),
                            q.stride, on_device + first, args.scale,
                            {args.scales.references + before, args.scales.inverses + before},
                            selection.From(static_cast<int64_t>(first)), rerank_.data(), stream()),
         "re-ranking");
  }
  if (!failed()) NoteSelection(selection, kept, queries.size());
}

void CudaBackend::TakeFromTail(const TakeFromTailArgs& args) {
  const Tensor& q = args.q;
  const std::span<const RetrievalQuery> queries = args.queries;
  const CodeLayout& code_layout = args.code_layout;
  const DeviceTransform& of_layer = TransformOf(args.transform);
  const auto heads = static_cast<int32_t>(q.cols / of_layer.head_dim);
  const auto shape_of = [&](size_t num_queries) {
    return MassSelectShape{static_cast<int32_t>(num_queries), heads / code_layout.kv_heads,
                           code_layout, 0};
  };
  const DeviceQuery* on_device = StageQueries(queries, code_layout.block_tokens);
  if (on_device == nullptr || !EndStaging()) return;
  const Selection selection = SelectionToRead(args.read, queries.size());
  const MassSelectShape shape = shape_of(queries.size());
  if (failed() || !Grow(take_, TakeFromTailWorkspaceBytes(shape), "masses of what is read")) return;
  Good(cuda::TakeFromTail(shape, of_layer, q.f32(), q.stride, on_device, args.scale, args.codes,
                          selection, args.tail, take_.data(), stream()),
       "masses of what is read");
}

void CudaBackend::ExtendCellTables(std::span<const CellTableExtension> extensions, const void* pool,
                                   const KvLayout& layout, const PackedTransformCode& transform,
                                   const void* codes, const CodeLayout& code_layout) {
  size_t bytes = extensions.size() * sizeof(DeviceTableExtension) + 256;
  int32_t most = 0;
  for (const CellTableExtension& extension : extensions) {
    bytes += 2 * TableBytes(BlocksOf(extension.last, layout.block_tokens));
    most = std::max(most, extension.last - extension.table->tokens.last);
  }
  if (!BeginStaging(bytes)) return;
  std::vector<DeviceTableExtension> on_host;
  for (const CellTableExtension& extension : extensions) {
    const Summary& table = *extension.table;
    WINNOW_CHECK(extension.last >= table.tokens.last);
    const int64_t blocks = BlocksOf(extension.last, layout.block_tokens);
    on_host.push_back({StageTable(extension.block_table, blocks),
                       StageTable(extension.index_table, blocks),
                       table.data,
                       {table.tokens.last, extension.last},
                       table.tokens.size() <= 0 ? 1 : 0,
                       0});
  }
  const DeviceTableExtension* on_device = Stage(std::span<const DeviceTableExtension>(on_host));
  if (!EndStaging() || !Good(cuda::ExtendCellTables(TransformOf(transform), on_device,
                                                    static_cast<int32_t>(on_host.size()), most,
                                                    pool, layout, codes, code_layout, stream()),
                             "tables of cells")) {
    return;
  }
  for (const CellTableExtension& extension : extensions) {
    extension.table->tokens.last = extension.last;
  }
}

}  // namespace winnow::kernels::cuda
