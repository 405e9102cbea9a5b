// SELECT: which tokens of mid each query reads (kernels/retrieval.h), by an index (index_ops.h) or by all keys. What is
// selected is attended to by row_ops.h.
//
// `q` is [m][H*d] after RoPE. Indexes are one layer's, with the block numbers of its KV pool. Selections lie in shared
// memory. A query's selection depends on that query and its sequence alone.
#ifndef WINNOW_KERNELS_SELECTION_OPS_H_
#define WINNOW_KERNELS_SELECTION_OPS_H_

#include <cstdint>
#include <span>

#include "kernels/kv_layout.h"
#include "kernels/retrieval.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

struct SelectByMassArgs {
  Tensor q;
  std::span<const RetrievalQuery> queries;
  // [queries][H]: StateMasses of the anchors' exact attention, in shared memory or the device's.
  const float* anchor_masses = nullptr;
  const PackedTransformCode& transform;
  const void* codes = nullptr;  // the layer's pool of them
  CodeLayout code_layout;
  float scale = 0;
  Selection chosen;
  const TailMasses* tail = nullptr;    // what is left for MergeTails; null: nothing
  const MassScales* scales = nullptr;  // what is left for RerankByMass; null: nothing
};

struct RerankByMassArgs {
  Tensor q;
  std::span<const RetrievalQuery> queries;  // with the k to keep
  const PackedTransformCode& transform;
  const void* codes = nullptr;  // the layer's pool of them
  CodeLayout code_layout;
  const PackedTransformCode& residual;
  const void* residual_codes = nullptr;
  CodeLayout residual_layout;
  float scale = 0;
  MassScales scales;     // as SelectByMass left them, for the same queries
  Selection candidates;  // tokens of mid, ascending
  Selection kept;        // may be `candidates`
};

struct TakeFromTailArgs {
  Tensor q;
  std::span<const RetrievalQuery> queries;
  const PackedTransformCode& transform;
  const void* codes = nullptr;  // the layer's pool of them
  CodeLayout code_layout;
  float scale = 0;
  Selection read;   // tokens of mid, ascending
  TailMasses tail;  // as SelectByMass left them of all, for the same queries
};

struct PruneSelectionArgs {
  Tensor q;
  std::span<const RetrievalQuery> queries;
  const void* int4_keys = nullptr;  // the layer's pool of them
  KvLayout layout;                  // of KV
  float scale = 0;
  float p = 0;           // share of the weight to keep
  Selection candidates;  // tokens of mid, ascending; a query's k does not matter
  Selection kept;        // may be `candidates`
};

struct MeasureSelectionArgs {
  Tensor q;
  std::span<const RetrievalQuery> queries;
  const void* pool = nullptr;  // the layer's KV
  KvLayout layout;
  float scale = 0;
  Selection chosen;                     // tokens of mid, ascending
  SelectionQuality* quality = nullptr;  // [queries][Hkv], any memory of the host
};

class SelectionOps {
 public:
  // codes [queries][H][bits / 8] of the queries' rows of q.
  virtual void EncodeQueries(const Tensor& q, std::span<const RetrievalQuery> queries,
                             const PackedEncoder& encoder, void* codes) = 0;

  // The k mid tokens with the largest agreement of codes, summed over the group; of equals the
  // later.
  virtual void SelectByCodes(std::span<const RetrievalQuery> queries, const void* query_codes,
                             int32_t group, const void* codes, const CodeLayout& code_layout,
                             const Selection& chosen) = 0;

  // The k mid tokens of the largest mass that transform codes estimate, summed over the group; of equals the later.
  virtual void SelectByMass(const SelectByMassArgs& args) = 0;

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

  // ---- what was selected ----

  // Twilight: keeps of the candidates, for each query head, the fewest whose weight together with the anchors' reaches p
  // of the weight of anchors and candidates, and the union over the group (top_p.h). Weights are estimated from four-bit
  // keys, which anchors must have too.
  virtual void PruneSelection(const PruneSelectionArgs& args) = 0;

  // Keeps the k candidates of the largest mass that both codes estimate together; of equals the later.
  virtual void RerankByMass(const RerankByMassArgs& args) = 0;

  // Subtracts the masses of the tokens that are read from the tail: for selections that are pruned or re-ranked after they
  // are made, as tokens that are not kept belong to the tail.
  virtual void TakeFromTail(const TakeFromTailArgs& args) = 0;

  // Measures what a selection covers; done when this returns. Reads all keys.
  virtual void MeasureSelection(const MeasureSelectionArgs& args) = 0;

 protected:
  ~SelectionOps() = default;
};

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_SELECTION_OPS_H_
