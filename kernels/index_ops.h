// Indexes: what finds keys, and what stands for those that are not read, made from the rows of a layer's KV pool
// (kernels/retrieval.h). Selection reads them (selection_ops.h).
//
// Learned functions are packed once. Then, whenever tokens have been written, each index takes them in: codes, bounds and
// four-bit keys lie in pools of the KV pool's block numbers, sums in a place of their sequence's own.
#ifndef WINNOW_KERNELS_INDEX_OPS_H_
#define WINNOW_KERNELS_INDEX_OPS_H_

#include <memory>
#include <span>

#include "kernels/kv_layout.h"
#include "kernels/retrieval.h"

namespace winnow::kernels {

struct EncodeResidualsArgs {
  std::span<const KeySpan> spans;
  const void* pool = nullptr;  // the layer's KV
  KvLayout layout;
  const PackedTransformCode& transform;
  const void* codes = nullptr;  // the layer's pool of them: those of the spans are made
  CodeLayout code_layout;
  const PackedTransformCode& residual;
  void* residual_codes = nullptr;
  CodeLayout residual_layout;
};

class IndexOps {
 public:
  // ---- learned functions ----
  // Null if the memory cannot be had, or the shape is one that this backend lacks. The sources may go
  // afterwards.

  virtual std::unique_ptr<PackedEncoder> PackEncoder(const EncoderWeights& weights) = 0;
  virtual std::unique_ptr<PackedTransformCode> PackTransformCode(
      const TransformCodeWeights& weights) = 0;
  virtual std::unique_ptr<PackedFeatureMap> PackFeatureMap(const FeatureMapWeights& weights) = 0;

  // ---- of keys ----

  // Codes of the spans' keys, bit for bit as docs/artifact-format.md says.
  virtual void EncodeKeys(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                          const PackedEncoder& encoder, void* codes,
                          const CodeLayout& code_layout) = 0;

  // The same of transform codes (kernels/transform_code.h).
  virtual void EncodeTransformKeys(std::span<const KeySpan> spans, const void* pool,
                                   const KvLayout& layout, const PackedTransformCode& transform,
                                   void* codes, const CodeLayout& code_layout) = 0;

  // Residual codes of the spans' keys, from the keys and their first codes.
  virtual void EncodeResiduals(const EncodeResidualsArgs& args) = 0;

  // Bounds of every page that the spans touch, over the page's tokens below the span's last: a span
  // that begins inside a page reads the page from its beginning.
  virtual void BoundKeys(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                         void* bounds) = 0;

  // The four-bit copies of the spans' keys.
  virtual void QuantizeKeys(std::span<const KeySpan> spans, const void* pool,
                            const KvLayout& layout, void* int4_keys) = 0;

  // ---- of keys and values ----

  // Each summary takes in the tokens up to its extension's `last`.
  virtual void ExtendSummaries(std::span<const SummaryExtension> extensions, const void* pool,
                               const KvLayout& layout, const PackedFeatureMap& key_map) = 0;

  // Each table takes in the tokens up to its extension's `last`, whose codes are made.
  virtual void ExtendCellTables(std::span<const CellTableExtension> extensions, const void* pool,
                                const KvLayout& layout, const PackedTransformCode& transform,
                                const void* codes, const CodeLayout& code_layout) = 0;

 protected:
  ~IndexOps() = default;
};

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_INDEX_OPS_H_
