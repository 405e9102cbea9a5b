// Transform codes: selection by estimated attention masses, and the tail estimate from the same codes.
//
// A key is centred, transformed and quantised, so that its code estimates the logit of any query. Each of a group's
// queries gets its own estimated mass, whose denominator has the exact logits of the anchors; only masses are summed
// over the group. What is not read stands in the tail: the mean V of each cell of codes, weighted by estimated mass.
//
// Everything below is defined to the bit. Integer sums have no order, and each floating-point expression names its
// roundings, so that every instruction set, thread count and device selects the same tokens from the same inputs.
// fma(a, b, c) is rounded once; "chain" is acc = fma(x[c], w[c], acc) for c ascending, in float32.
//
// ---- Codes ----
//
// Dimensions i of the transform come in quads of four: quad Q has dimensions 4Q .. 4Q + 3 and one width of 1 to 8 bits.
// The first `quads` quads are kept.
//
//   t_i      = chain over d, begun with key_bias[i], of k[c] and key_weight[c][i]
//   index_i  = the integer part of min(max(t_i, 0), 2^width - 1); a NaN counts as 0
//
// A code is bits / 32 words of 32 bits. A *field* is a slice of one quad's indexes: bits [low, low + width) of the
// index of dimension 4Q + b, at bits [shift, shift + width) of byte b of one word, for the four b. So (word >> shift) &
// mask unpacks four dimensions into the four bytes of a word, as integer dot products read them. A quad has one field,
// or two where its width did not fit into a word. Fields fill every bit of the code.
//
// Codes lie in tiles of 16 tokens, word by word: [num_blocks][Hkv][block_tokens / 16][bits / 32][16] words. The bytes
// of a block and head are those of CodeLayout.
//
// ---- Queries ----
//
// For each query head, with scale2 = scale * kLog2E (one float32 product):
//
//   y_i     = chain over d, begun with 0, of q[c] and query_weight[c][i]
//   centre  = chain over d, begun with 0, of q[c] and mean[c]
//   peak    = max |y_i| over the kept dimensions
//   coef_i  = int8 of y_i * (127 / peak), rounded to the nearest even; 0 where peak is below 2^-100
//   a       = (peak / 127) * scale2
//   b       = fma(a, -0.5 * float(sum of coef_i * (2^width_i - 1)), scale2 * centre)
//
// and in steps, 128 for each power of two, counted from the logit of a code whose indexes all lie in the middle:
//
//   step    = 128 * a
//   origin  = rint(step * (-0.5 * float(sum of coef_i * (2^width_i - 1))))
//   offset  = fma(origin, -1/128, b)
//
// Where peak, a or b is not finite, origin is beyond 2^21 or offset beyond 2^13, all of these are 0. The estimated logit of
// token j, in base 2, is L_j = fma(a, float(D_j), b) with the integer D_j = sum of coef_i * index_i. In steps it is X_j, and
// X_j / 128 + offset is about L_j:
//
//   X_j = the integer nearest to step * D_j + origin, of two the even one, held in [-16383, 16383]
//
// (fma(step, float(D_j), origin + 1.5 * 2^23) has it in its lower bits, but where it has to be held.)
//
// ---- Masses ----
//
// Two powers of two. E2(x) for real x: x = max(x, -60); n = x rounded to the nearest even; f = x - n; y = the polynomial
// kExp2 in f by fma, highest power first; y * 2^n. W(x) for integers x <= 0, in steps: the float whose bits are
// max(x + 16249, 128) << 16. Its mantissa is a straight line between powers of two (Schraudolph, Neural Computation 11,
// 1999), so that it is .960 to 1.025 times 2^(x / 128), and 1.002 times in the mean. What a code loses of a logit is far more, and such
// a power takes two instructions where E2 takes eleven; it has 8 bits of mantissa, and so fits into 16 bits.
// For each query head, over the pieces p of mid (tokens of mid in [512 p, 512 (p + 1))):
//
//   P_p  = the largest X_j of the piece,   S_p = sum of W(X_j - P_p) * 2^22, each rounded to the nearest even integer
//   E    = rint((mass * kLog2E - offset) * 128) of the anchors' log-sum-exp, held in [-2^20, 2^20]; there is none if it is
//          NaN or infinite
//   R    = max(E, all P_p)
//   T    = int(E2((E - R) / 128) * 2^22) + sum of int(double(S_p) * double(E2((P_p - R) / 128)))
//   inv  = 2^22 / float(T)
//   w_j  = W(X_j - R)
//
// int() truncates; integers have 64 bits. The reference that is handed out is R / 128 + offset, by an fma (0 where mid is
// empty); R is the integer nearest to (reference - offset) * 128. The mass of token j, over the group's heads g ascending, begun with 0:
// s_j = fma(w_gj, inv_g, s_j). Its key is bits(s_j) >> 13, less 68 << 10, held in [0, 65535]: 1024 steps for each power
// of two from 2^-59 on. Selected are the k largest keys; of equals the later tokens. A query may have a least key: what has
// a smaller one is not selected, even where fewer than k are left.
//
// The anchors' exact mass is the one input whose bits depend on the backend (an attention state's order of summation).
// It is rounded to 1/128 of a power of two, which changes E by 0.27 % at most, so that backends agree but where a mass
// lies within a few float32 roundings of the middle of two steps.
//
// ---- Re-ranking ----
//
// A residual code is a second code of the same keys: of what the first one leaves. It is a code as above, of dimensions in
// an order of its own, without cells, tail and delta, and with a mean of zeros. Only its indexes differ: dimension i refines
// dimension f = first_dims[i] of the first code, whose index is known, so
//
//   t_i      = fma(-first_steps[i], float(index of dimension f in the first code), the chain above); the chain where f < 0
//
// RerankByMass keeps k of a query's candidates, tokens of mid that SelectByMass selected. a, b, L_j, R and inv are those of
// that selection; a', b' and D'_j are made of the residual code as a, b and D_j are of the first:
//
//   L'_j = fma(a, float(D_j), b) + fma(a', float(D'_j), b')
//   R'   = max(R, the largest L'_j of the candidates); R is the reference that was handed out
//   rest = int(2^26 / inv) less the sum of int(E2(min(L_j - R, 0)) * 2^26) over the candidates; 0 where that is negative
//   T'   = int(double(rest) * double(E2(R - R'))) + sum of int(E2(L'_j - R') * 2^26) over the candidates; at least 1
//   inv' = 2^26 / float(T'),   w'_j = E2(L'_j - R')
//
// So the denominator is the selection's, in which the candidates' estimates are replaced by better ones. Masses, keys, ties
// and the least key are as above. Where the rest of mid is in the tail, it stays there by the first code's estimate, and so do
// the candidates that are not kept: TakeFromTail subtracts what the first code added for those that are.
//
// ---- Tail ----
//
// A token's cell is the code's bits `cell_bits`, the highest first. Of the tokens of mid that are not read,
// M_c = sum of int(w_j * 2^30) over cell c, for each query head, where W holds at x = 0 what is above it. Read is what is selected, less what is pruned from it
// afterwards (top_p.h): then SelectByMass leaves the sums over all of mid, and TakeFromTail subtracts what is read. The
// table of a sequence and KV head has for each cell
// the sum of V and the count over the tokens [sink, T), T = the last multiple of 64 that the query sees (at least
// sink), and a last row with those of all cells together:
//
//   cell c's sum += v, count += 1      for the tokens in ascending order
//   all's sum    += (sum over the tokens of one block of 64, begun with 0, ascending), count likewise, for each block
//   mean_c  = (sum_c + sum_all / max(1, count_all)) / (count_c + 1)
//
// The tail is one more attention state of the query head: max = the reference + delta, sum = sum of M_c / 2^30,
// o = sum of M_c / 2^30 * mean_c, c ascending, float32. delta (base 2; 0 where there are no delta weights) is what
// quantisation takes from a mean of exponentials: the sum of squares of chain(q, delta_weight[r]), r ascending. `max`
// is held at 20 / ln 2 above the log-sum-exp, in base 2, of what the head has read. Heads whose tail is off, and
// queries without mass, keep their states to the bit.
//
// Cost per query and KV head: reads bits / 8 bytes a token once, and does for each query head one dot of `quads` * 4
// bytes and two W a token; the tail reads 2 * 256 * d floats and adds one integer a token and head. Re-ranking reads both
// codes of each candidate.
#ifndef WINNOW_KERNELS_TRANSFORM_CODE_H_
#define WINNOW_KERNELS_TRANSFORM_CODE_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/kv_layout.h"
#include "kernels/retrieval.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

inline constexpr float kTransformLog2E = 1.44269504088896341f;
// c5 .. c0 of E2's polynomial: 2^f for |f| <= 1/2, relative error 1e-7, exactly 1 at 0.
inline constexpr float kTransformExp2[6] = {0.00132647271f, 0.00967151265f, 0.0555073374f,
                                            0.240222421f,   0.693146978f,   1.0f};
inline constexpr float kTransformExp2Least = -60;
inline constexpr float kTransformPeakLeast = 0x1p-100f;
inline constexpr int32_t kMassSteps = 128;  // of a power of two
inline constexpr int32_t kMassStepMost = 16383;
inline constexpr float kMassOriginMost = 0x1p21f, kMassOffsetMost = 0x1p13f;
inline constexpr int32_t kMassAnchorsMost = 1 << 20;
inline constexpr int32_t kMassPowerTop =
    127 * kMassSteps - 7;                               // W's bits at 0, a power of two near .97
inline constexpr int32_t kMassPowerLeast = kMassSteps;  // 2^-126: no denormals
inline constexpr int32_t kMassPieceTokens = 512;
inline constexpr int32_t kMassKeyBins = 65536;
inline constexpr int32_t kMassKeyShift = 13;
inline constexpr int32_t kMassKeyBase = 68 << 10;
inline constexpr int32_t kMassKeyStep = 128;  // of least keys: eight for each power of two
inline constexpr float kTailClampLog2 = 20 * kTransformLog2E;

// Nothing if `weights` can be used; else what is wrong with it, as the end of a sentence.
std::string CheckTransformCode(const TransformCodeWeights& weights);

// The same of a code and its residual code: heads of one shape, and dimensions that the first code has.
std::string CheckResidualCode(const TransformCodeWeights& first,
                              const TransformCodeWeights& residual);

// Fields that hold quads of these widths in a code of so many words, few of them split and in few CodeFieldSteps. REQUIRES:
// the widths add up to 8 * words.
std::vector<CodeField> LayCodeFields(std::span<const uint8_t> widths, int32_t words);
// How often a GPU multiplies by a code: its lanes take a word of four each, two fields at a time, and wait for the word that
// has most of them.
int32_t CodeFieldSteps(std::span<const CodeField> fields, int32_t words);

// Bytes that selection has to read of the codes.
inline double SelectByMassBytes(std::span<const RetrievalQuery> queries, const CodeLayout& layout) {
  double tokens = 0;
  for (const RetrievalQuery& query : queries) tokens += query.mid.size();
  return tokens * layout.kv_heads * static_cast<double>(layout.CodeBytes());
}
// Integer multiply-adds count as two.
constexpr double SelectByMassFlops(double tokens, int32_t group, int32_t quads) {
  return 8.0 * tokens * group * quads;
}
// Bytes that re-ranking has to read of both codes. Its multiply-adds are those of SelectByMass for the quads of both.
// `candidates`: over queries and KV heads.
inline double RerankByMassBytes(double candidates, const CodeLayout& first,
                                const CodeLayout& residual) {
  return candidates * static_cast<double>(first.CodeBytes() + residual.CodeBytes());
}

// Where word `word` of a token's code lies, in words from the beginning of its block and head.
constexpr int64_t TransformWordOffset(int32_t words, int32_t token_in_block, int32_t word) {
  return (int64_t{token_in_block / kCodeTileTokens} * words + word) * kCodeTileTokens +
         token_in_block % kCodeTileTokens;
}

// ---- the references ----

// E2 and W above.
float TransformExp2(float x);
float MassPower(int32_t x);

struct TransformQuery {
  std::vector<int8_t> coef;  // [4 * quads]
  float a = 0, b = 0;
  float step = 0, origin = 0, offset = 0;
  float delta = 0;
};
// X_j of a dot.
int32_t MassStepsOf(const TransformQuery& query, int32_t dot);
// Of one query head [d] of KV head `head`. `scale2`: scale * kLog2E.
TransformQuery PrepareTransformQueryRef(const float* q, const TransformCodeWeights& weights,
                                        int32_t head, float scale2);
// Level indexes [4 * quads] of a key, and of a code in a block and head's codes. `first`: the key's indexes in the first
// code, for those of a residual code.
std::vector<uint8_t> TransformIndexesRef(const float* key, const TransformCodeWeights& weights,
                                         int32_t head, const std::vector<uint8_t>& first = {});
std::vector<uint8_t> TransformDecodeRef(const uint32_t* head_codes, int32_t token_in_block,
                                        const TransformCodeWeights& weights, int32_t head);
int32_t TransformCellRef(const uint32_t* head_codes, int32_t token_in_block,
                         const TransformCodeWeights& weights, int32_t head);
// The 16-bit key of a mass.
int32_t MassKey(float mass);
// The least key of a query that selects no token with less than `share` of its attention, mean over the
// group's heads: the key of that mass, rounded down to a multiple of kMassKeyStep, which takes up to 11 %
// of it. 0 where `share` is 0.
int32_t LeastMassKey(double share, int32_t group);

// As the operations of Backend, one token after the other.
void EncodeTransformKeysRef(std::span<const KeySpan> spans, const void* pool,
                            const KvLayout& layout, const TransformCodeWeights& weights,
                            void* codes, const CodeLayout& code_layout);
void EncodeResidualsRef(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                        const TransformCodeWeights& weights, const void* codes,
                        const CodeLayout& code_layout, const TransformCodeWeights& residual,
                        void* residual_codes, const CodeLayout& residual_layout);
void SelectByMassRef(const Tensor& q, std::span<const RetrievalQuery> queries,
                     const float* anchor_masses, const TransformCodeWeights& weights, float scale,
                     const void* codes, const CodeLayout& code_layout, const Selection& chosen,
                     const TailMasses* tail, const MassScales* scales = nullptr);
struct RerankByMassRefArgs {
  Tensor q;
  std::span<const RetrievalQuery> queries;
  const TransformCodeWeights& weights;
  const void* codes = nullptr;
  CodeLayout code_layout;
  const TransformCodeWeights& residual;
  const void* residual_codes = nullptr;
  CodeLayout residual_layout;
  float scale = 0;
  MassScales scales;
  Selection candidates, kept;
};
void RerankByMassRef(const RerankByMassRefArgs& args);
void TakeFromTailRef(const Tensor& q, std::span<const RetrievalQuery> queries,
                     const TransformCodeWeights& weights, float scale, const void* codes,
                     const CodeLayout& code_layout, const Selection& read, const TailMasses& tail);
void ExtendCellTablesRef(std::span<const CellTableExtension> extensions, const void* pool,
                         const KvLayout& layout, const TransformCodeWeights& weights,
                         const void* codes, const CodeLayout& code_layout);
void MergeTailsRef(std::span<const RetrievalQuery> queries, std::span<const float* const> tables,
                   const TransformCodeWeights& weights, const TailMasses& tail, int32_t head_dim,
                   float* states);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_TRANSFORM_CODE_H_
