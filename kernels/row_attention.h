// Exact attention over rows that lie anywhere: what a query attends to after its tokens were chosen
// (docs/retrieval.md; "gather attention" of HATA, section 4).
//
//   q       [m][H*d] f32; query i of the call reads row queries[i].row
//   lists   [queries][Hkv]: addresses of rows (kv_layout.h: K, then V), ascending by position
//   states  [queries][H][d + 2] f32 (attention_state.h); the state of no keys where a list is empty
//   d 64, 80, 96, 128 or 256; G = H / Hkv heads share a list
//
// Order, fixed by the list alone:
//   score   one chain over d per lane, lanes then added in a fixed tree; the same for every row
//   part    kRowsPerPart rows: their largest score is the part's maximum; weights 2^(score - max)
//           are summed per lane; o adds weight * value in the order of the list
//   list    states of parts are merged from left to right
// KV of 8 bits: a score is the chain over codes, times K's scale; K's values are not made. Weights are multiplied by V's
// scale after they were summed, and then by codes.
// Everything is float32, bf16 rows are widened: unlike Attend (attention.h), which rounds q and the
// weights to bf16 where that is faster, because here memory is the bound.
//
// Reads each row once: 2*count*d values per list, 4*G*count*d FLOPs: G FLOP/B in bf16.
#ifndef WINNOW_KERNELS_ROW_ATTENTION_H_
#define WINNOW_KERNELS_ROW_ATTENTION_H_

#include <cstdint>
#include <span>

#include "kernels/kv_layout.h"
#include "kernels/retrieval.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

// Of lists of `rows` rows together, for `heads` = queries * H.
constexpr double AttendRowsBytes(int64_t rows, int64_t heads, const KvLayout& layout) {
  return static_cast<double>(rows) * (static_cast<double>(layout.RowBytes()) + sizeof(void*)) +
         4.0 * static_cast<double>(heads) * (2.0 * layout.head_dim + 2);
}
constexpr double AttendRowsFlops(int64_t rows, int64_t group, int64_t d) {
  return 4.0 * static_cast<double>(rows) * static_cast<double>(group) * static_cast<double>(d);
}

// In double, rounded once. The maximum is that of the whole list.
void AttendRowsRef(const Tensor& q, std::span<const RetrievalQuery> queries,
                   std::span<const RowList> lists, const KvLayout& layout, float scale,
                   float* states);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_ROW_ATTENTION_H_
