// The k tokens whose codes agree best with a group's query codes (docs/retrieval.md; the scores
// are those of HATA and Spotlight Attention, summed over the group).
//
// A token's score is the sum over the G queries of bits - Hamming(k, q_g). With n_b the number of
// group queries whose bit b is set, and S_b = [2 n_b > G],
//
//   sum_g Hamming(k, q_g) = sum_b min(n_b, G - n_b) + sum_b (k ^ S)_b |G - 2 n_b|
//
// The first sum is the same for all tokens. In the second all weights have the parity of G, so for
// an even G they are halved. What is left is the token's *distance*:
//
//   D = sum_b (k ^ S)_b w_b,   w_b = |G - 2 n_b| / (G even ? 2 : 1)
//
// whose ascending order is the descending order of scores. The weights are cut into binary planes:
// D = sum_p 2^p popcount((k ^ S) & plane_p), with 1 (G = 1, 2) to 4 (G = 16) planes where the plain
// sum takes G popcounts.
//
// Chosen are the k smallest distances, of equals the later tokens: with T the k-th smallest, all
// tokens below T and the last of those at T. Integers throughout, so no split over threads shows.
//
// Cost per query, KV head and mid token: reads bits / 8 bytes once and a distance of 2 bytes twice.
#ifndef WINNOW_KERNELS_HAMMING_SELECT_H_
#define WINNOW_KERNELS_HAMMING_SELECT_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/retrieval.h"

namespace winnow::kernels {

inline constexpr int32_t kMaxCodeGroup = 16;
inline constexpr int32_t kMaxCodeBits = 1024;
inline constexpr int32_t kMaxCodePlanes = 4;

constexpr int32_t MaxCodeWeight(int32_t group) { return group % 2 == 0 ? group / 2 : group; }
constexpr int32_t CodePlanes(int32_t group) {
  return std::bit_width(static_cast<uint32_t>(MaxCodeWeight(group)));
}
constexpr int32_t MaxCodeDistance(int32_t group, int32_t bits) {
  return MaxCodeWeight(group) * bits;
}

// S and the planes of one group's codes, repeated until they fill kMaxCodeBits / 8 bytes: vectors
// of any width load them as they are.
struct CodePattern {
  alignas(64) uint8_t majority[kMaxCodeBits / 8];
  alignas(64) uint8_t planes[kMaxCodePlanes][kMaxCodeBits / 8];
};
// `query_codes` [group][bits / 8].
void MakeCodePattern(const void* query_codes, int32_t group, int32_t bits, CodePattern* pattern);

// The bytes that a scan has to read.
inline double SelectByCodesBytes(std::span<const RetrievalQuery> queries,
                                 const CodeLayout& layout) {
  double tokens = 0;
  for (const RetrievalQuery& query : queries) tokens += query.mid.size();
  return tokens * layout.kv_heads * static_cast<double>(layout.CodeBytes());
}

// As Backend::SelectByCodes, by scores of every token and a sort.
void SelectByCodesRef(std::span<const RetrievalQuery> queries, const void* query_codes,
                      int32_t group, const void* codes, const CodeLayout& code_layout,
                      const Selection& chosen);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_HAMMING_SELECT_H_
