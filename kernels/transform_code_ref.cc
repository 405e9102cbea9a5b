// The operations of transform_code.h, one token after the other.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "kernels/attention_state.h"
#include "kernels/check.h"
#include "kernels/kv_row.h"
#include "kernels/transform_code.h"

namespace winnow::kernels {
namespace {

std::vector<float> ReadKey(const std::byte* row, const KvLayout& layout) {
  std::vector<float> values;
  for (int32_t c = 0; c < layout.head_dim; ++c) values.push_back(KeyAt(row, layout, c));
  return values;
}
std::vector<float> ReadValue(const std::byte* row, const KvLayout& layout) {
  std::vector<float> values;
  for (int32_t c = 0; c < layout.head_dim; ++c) values.push_back(ValueAt(row, layout, c));
  return values;
}

// Of x [d] and column `column` of w [d][n].
float Chain(const float* x, const std::vector<float>& w, int32_t d, int32_t n, int32_t column,
            float begin) {
  float acc = begin;
  for (int32_t c = 0; c < d; ++c) acc = std::fmaf(x[c], w[int64_t{c} * n + column], acc);
  return acc;
}

const uint32_t* HeadCodes(const void* codes, const CodeLayout& layout, int32_t block,
                          int32_t head) {
  return reinterpret_cast<const uint32_t*>(static_cast<const std::byte*>(codes) +
                                           block * layout.BlockBytes() + head * layout.HeadBytes());
}

// What a query head makes of the tokens of mid.
struct HeadMasses {
  std::vector<float> weights;  // [mid] w_j
  float reference = 0;
  float inverse = 0;  // inv
};

HeadMasses MassesOf(const TransformQuery& query, const std::vector<std::vector<uint8_t>>& indexes,
                    TokenRange mid, float anchor_mass) {
  const auto count = static_cast<size_t>(mid.size());
  std::vector<int32_t> steps;
  for (size_t j = 0; j < count; ++j) {
    int32_t dot = 0;
    for (size_t i = 0; i < query.coef.size(); ++i) dot += query.coef[i] * indexes[j][i];
    steps.push_back(MassStepsOf(query, dot));
  }
  struct Piece {
    int32_t peak;
    int64_t sum;
  };
  std::vector<Piece> pieces;
  for (int32_t first = mid.first, last = first; first < mid.last; first = last) {
    last = std::min(mid.last, (first / kMassPieceTokens + 1) * kMassPieceTokens);
    const int32_t* begin = &steps[first - mid.first];
    Piece piece = {*std::max_element(begin, begin + (last - first)), 0};
    for (int32_t j = 0; j < last - first; ++j) {
      piece.sum += static_cast<int64_t>(std::rint(MassPower(begin[j] - piece.peak) * 0x1p22f));
    }
    pieces.push_back(piece);
  }
  const bool has_anchors = std::isfinite(anchor_mass);
  int32_t anchors = 0;
  if (has_anchors) {
    const float at = std::rint((anchor_mass * kTransformLog2E - query.offset) * kMassSteps);
    anchors = static_cast<int32_t>(std::clamp<float>(at, -kMassAnchorsMost, kMassAnchorsMost));
  }
  int32_t reference = has_anchors ? anchors : std::numeric_limits<int32_t>::min();
  for (const Piece& piece : pieces) reference = std::max(reference, piece.peak);
  const auto share = [&](int32_t steps_up) {
    return TransformExp2(static_cast<float>(steps_up - reference) / kMassSteps);
  };
  int64_t total = has_anchors ? static_cast<int64_t>(share(anchors) * 0x1p22f) : 0;
  for (const Piece& piece : pieces) {
    total += static_cast<int64_t>(static_cast<double>(piece.sum) *
                                  static_cast<double>(share(piece.peak)));
  }
  HeadMasses masses;
  if (count == 0) return masses;
  masses.reference = std::fmaf(static_cast<float>(reference), 1.0f / kMassSteps, query.offset);
  masses.inverse = 0x1p22f / static_cast<float>(total);
  for (const int32_t x : steps) masses.weights.push_back(MassPower(x - reference));
  return masses;
}

}  // namespace

float TransformExp2(float x) {
  x = std::max(x, kTransformExp2Least);
  const float n = std::rint(x), f = x - n;
  float y = kTransformExp2[0];
  for (int i = 1; i < 6; ++i) y = std::fmaf(y, f, kTransformExp2[i]);
  return std::ldexp(y, static_cast<int>(n));
}

float MassPower(int32_t x) {
  const auto bits = static_cast<uint32_t>(std::max(std::min(x, 0) + kMassPowerTop, kMassPowerLeast))
                    << 16;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

int32_t MassStepsOf(const TransformQuery& query, int32_t dot) {
  constexpr float kInteger = 0x1.8p23f;
  const float at = std::fmaf(query.step, static_cast<float>(dot), query.origin + kInteger);
  return static_cast<int32_t>(
      std::clamp<float>(at, kInteger - kMassStepMost, kInteger + kMassStepMost) - kInteger);
}

TransformQuery PrepareTransformQueryRef(const float* q, const TransformCodeWeights& weights,
                                        int32_t head, float scale2) {
  const TransformCodeHead& of_head = weights.heads[head];
  const int32_t d = weights.head_dim, n = 4 * of_head.quads;
  TransformQuery query;
  query.coef.assign(n, 0);
  std::vector<float> y(n);
  float peak = 0;
  bool finite = true;
  for (int32_t i = 0; i < n; ++i) {
    y[i] = Chain(q, of_head.query_weight, d, n, i, 0);
    finite &= std::isfinite(y[i]);
    peak = std::max(peak, std::fabs(y[i]));
  }
  const float centre = Chain(q, of_head.mean, d, 1, 0, 0);
  if (!finite) return query;
  int32_t half_steps = 0;
  for (int32_t i = 0; i < n; ++i) {
    if (peak >= kTransformPeakLeast)
      query.coef[i] = static_cast<int8_t>(std::rint(y[i] * (127.0f / peak)));
    half_steps += query.coef[i] * ((1 << of_head.widths[i / 4]) - 1);
  }
  query.a = peak / 127.0f * scale2;
  const float middle = -0.5f * static_cast<float>(half_steps);
  query.b = std::fmaf(query.a, middle, scale2 * centre);
  query.step = query.a * kMassSteps;
  query.origin = std::rint(query.step * middle);
  query.offset = std::fmaf(query.origin, -1.0f / kMassSteps, query.b);
  if (!std::isfinite(query.a) || !std::isfinite(query.b) ||
      !(std::fabs(query.origin) <= kMassOriginMost) ||
      !(std::fabs(query.offset) <= kMassOffsetMost)) {
    query = {};
    query.coef.assign(n, 0);
    return query;
  }
  for (size_t row = 0; row * d < of_head.delta_weight.size(); ++row) {
    float acc = 0;
    for (int32_t c = 0; c < d; ++c) {
      acc = std::fmaf(q[c], of_head.delta_weight[row * d + c], acc);
    }
    query.delta = std::fmaf(acc, acc, query.delta);
  }
  return query;
}

std::vector<uint8_t> TransformIndexesRef(const float* key, const TransformCodeWeights& weights,
                                         int32_t head, const std::vector<uint8_t>& first) {
  const TransformCodeHead& of_head = weights.heads[head];
  const int32_t n = 4 * of_head.quads;
  std::vector<uint8_t> indexes(n);
  for (int32_t i = 0; i < n; ++i) {
    float t = Chain(key, of_head.key_weight, weights.head_dim, n, i, of_head.key_bias[i]);
    if (!of_head.first_dims.empty() && of_head.first_dims[i] >= 0) {
      t = std::fmaf(-of_head.first_steps[i], static_cast<float>(first[of_head.first_dims[i]]), t);
    }
    const auto most = static_cast<float>((1 << of_head.widths[i / 4]) - 1);
    if (t > 0) indexes[i] = static_cast<uint8_t>(std::min(t, most));
  }
  return indexes;
}

std::vector<uint8_t> TransformDecodeRef(const uint32_t* head_codes, int32_t token_in_block,
                                        const TransformCodeWeights& weights, int32_t head) {
  const TransformCodeHead& of_head = weights.heads[head];
  std::vector<uint8_t> indexes(4 * of_head.quads);
  for (const CodeField& field : of_head.fields) {
    const uint32_t word =
        head_codes[TransformWordOffset(weights.bits / 32, token_in_block, field.word)];
    for (int32_t b = 0; b < 4; ++b) {
      const uint32_t slice = word >> (8 * b + field.shift) & ((1u << field.width) - 1);
      indexes[4 * field.quad + b] |= static_cast<uint8_t>(slice << field.low);
    }
  }
  return indexes;
}

int32_t TransformCellRef(const uint32_t* head_codes, int32_t token_in_block,
                         const TransformCodeWeights& weights, int32_t head) {
  int32_t cell = 0;
  for (const uint8_t bit : weights.heads[head].cell_bits) {
    const uint32_t word =
        head_codes[TransformWordOffset(weights.bits / 32, token_in_block, bit / 32)];
    cell = cell << 1 | static_cast<int32_t>(word >> bit % 32 & 1);
  }
  return cell;
}

namespace {

// The spans' codes; where `first` is not null, residual codes beside its codes.
void EncodeRef(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
               const TransformCodeWeights& weights, void* codes, const CodeLayout& code_layout,
               const TransformCodeWeights* first, const void* first_codes,
               const CodeLayout& first_layout) {
  const int32_t words = weights.bits / 32;
  for (const KeySpan& span : spans) {
    for (int32_t token = span.tokens.first; token < span.tokens.last; ++token) {
      const int32_t logical = token / layout.block_tokens, at = token % layout.block_tokens;
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        const std::vector<float> key =
            ReadKey(static_cast<const std::byte*>(pool) +
                        layout.RowOffset(span.block_table[logical], head, at),
                    layout);
        std::vector<uint8_t> of_first;
        if (first != nullptr) {
          of_first = TransformDecodeRef(
              HeadCodes(first_codes, first_layout, span.IndexBlock(logical), head), at, *first,
              head);
        }
        const std::vector<uint8_t> indexes =
            TransformIndexesRef(key.data(), weights, head, of_first);
        auto* to =
            const_cast<uint32_t*>(HeadCodes(codes, code_layout, span.IndexBlock(logical), head));
        for (int32_t word = 0; word < words; ++word) to[TransformWordOffset(words, at, word)] = 0;
        for (const CodeField& field : weights.heads[head].fields) {
          uint32_t& word = to[TransformWordOffset(words, at, field.word)];
          for (int32_t b = 0; b < 4; ++b) {
            const uint32_t slice =
                indexes[4 * field.quad + b] >> field.low & ((1u << field.width) - 1);
            word |= slice << (8 * b + field.shift);
          }
        }
      }
    }
  }
}

}  // namespace

void EncodeTransformKeysRef(std::span<const KeySpan> spans, const void* pool,
                            const KvLayout& layout, const TransformCodeWeights& weights,
                            void* codes, const CodeLayout& code_layout) {
  EncodeRef(spans, pool, layout, weights, codes, code_layout, nullptr, nullptr, {});
}

void EncodeResidualsRef(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                        const TransformCodeWeights& weights, const void* codes,
                        const CodeLayout& code_layout, const TransformCodeWeights& residual,
                        void* residual_codes, const CodeLayout& residual_layout) {
  EncodeRef(spans, pool, layout, residual, residual_codes, residual_layout, &weights, codes,
            code_layout);
}

void SelectByMassRef(const Tensor& q, std::span<const RetrievalQuery> queries,
                     const float* anchor_masses, const TransformCodeWeights& weights, float scale,
                     const void* codes, const CodeLayout& code_layout, const Selection& chosen,
                     const TailMasses* tail, const MassScales* scales) {
  const int32_t d = weights.head_dim, kv_heads = code_layout.kv_heads;
  const auto heads = static_cast<int32_t>(q.cols / d);
  const int32_t group = heads / kv_heads;
  const float scale2 = scale * kTransformLog2E;
  for (int64_t i = 0; i < static_cast<int64_t>(queries.size()); ++i) {
    const RetrievalQuery& query = queries[i];
    for (int32_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
      std::vector<std::vector<uint8_t>> indexes;
      std::vector<int32_t> cells;
      for (int32_t token = query.mid.first; token < query.mid.last; ++token) {
        const uint32_t* of_head = HeadCodes(
            codes, code_layout, query.block_table[token / code_layout.block_tokens], kv_head);
        const int32_t at = token % code_layout.block_tokens;
        indexes.push_back(TransformDecodeRef(of_head, at, weights, kv_head));
        cells.push_back(TransformCellRef(of_head, at, weights, kv_head));
      }
      std::vector<float> sums(indexes.size());
      std::vector<HeadMasses> masses;
      for (int32_t g = 0; g < group; ++g) {
        const int64_t head = int64_t{kv_head} * group + g;
        const TransformQuery prepared =
            PrepareTransformQueryRef(q.f32(query.row) + head * d, weights, kv_head, scale2);
        masses.push_back(MassesOf(prepared, indexes, query.mid, anchor_masses[i * heads + head]));
        for (size_t j = 0; j < sums.size(); ++j) {
          sums[j] = std::fmaf(masses[g].weights[j], masses[g].inverse, sums[j]);
        }
        if (scales != nullptr) {
          scales->references[i * heads + head] = masses[g].reference;
          scales->inverses[i * heads + head] = masses[g].inverse;
        }
        if (tail == nullptr) continue;
        tail->references[i * heads + head] = masses[g].reference;
        tail->deltas[i * heads + head] = prepared.delta;
      }
      std::vector<int32_t> order(sums.size());
      std::iota(order.begin(), order.end(), 0);
      std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        const int32_t key_a = MassKey(sums[a]), key_b = MassKey(sums[b]);
        return key_a != key_b ? key_a > key_b : a > b;
      });
      order.resize(query.k);
      std::erase_if(order, [&](int32_t j) { return MassKey(sums[j]) < query.least_key; });
      std::sort(order.begin(), order.end());
      chosen.count(i, kv_head) = static_cast<int32_t>(order.size());
      for (size_t j = 0; j < order.size(); ++j) {
        chosen.chosen(i, kv_head)[j] = query.mid.first + order[j];
      }
      if (tail == nullptr) continue;
      for (int32_t g = 0; g < group; ++g) {
        int64_t* of_cells =
            tail->masses + (i * heads + int64_t{kv_head} * group + g) * kTransformCells;
        std::fill_n(of_cells, kTransformCells, 0);
        for (size_t j = 0, at = 0; j < sums.size(); ++j) {
          if (!tail->of_all && at < order.size() && order[at] == static_cast<int32_t>(j)) {
            ++at;
            continue;
          }
          of_cells[cells[j]] += static_cast<int64_t>(masses[g].weights[j] * 0x1p30f);
        }
      }
    }
  }
}

void RerankByMassRef(const RerankByMassRefArgs& args) {
  const int32_t d = args.weights.head_dim, kv_heads = args.code_layout.kv_heads;
  const auto heads = static_cast<int32_t>(args.q.cols / d);
  const int32_t group = heads / kv_heads, bt = args.code_layout.block_tokens;
  const float scale2 = args.scale * kTransformLog2E;
  const auto dot_of = [](const TransformQuery& query, const std::vector<uint8_t>& indexes) {
    int32_t dot = 0;
    for (size_t i = 0; i < indexes.size(); ++i) dot += query.coef[i] * indexes[i];
    return static_cast<float>(dot);
  };
  for (int64_t i = 0; i < static_cast<int64_t>(args.queries.size()); ++i) {
    const RetrievalQuery& query = args.queries[i];
    for (int32_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
      const int32_t* tokens = args.candidates.chosen(i, kv_head);
      const auto count = static_cast<size_t>(args.candidates.count(i, kv_head));
      std::vector<std::vector<uint8_t>> first, second;
      for (size_t j = 0; j < count; ++j) {
        const int32_t block = query.block_table[tokens[j] / bt], at = tokens[j] % bt;
        first.push_back(TransformDecodeRef(HeadCodes(args.codes, args.code_layout, block, kv_head),
                                           at, args.weights, kv_head));
        second.push_back(
            TransformDecodeRef(HeadCodes(args.residual_codes, args.residual_layout, block, kv_head),
                               at, args.residual, kv_head));
      }
      std::vector<float> sums(count);
      for (int32_t g = 0; g < group; ++g) {
        const int64_t head = int64_t{kv_head} * group + g;
        const float* q = args.q.f32(query.row) + head * d;
        const TransformQuery a = PrepareTransformQueryRef(q, args.weights, kv_head, scale2);
        const TransformQuery b = PrepareTransformQueryRef(q, args.residual, kv_head, scale2);
        const float reference = args.scales.references[i * heads + head];
        std::vector<float> logits(count);
        float most = reference;
        auto rest = static_cast<int64_t>(0x1p26f / args.scales.inverses[i * heads + head]);
        for (size_t j = 0; j < count; ++j) {
          const float logit = std::fmaf(a.a, dot_of(a, first[j]), a.b);
          rest -= static_cast<int64_t>(TransformExp2(std::min(logit - reference, 0.0f)) * 0x1p26f);
          logits[j] = logit + std::fmaf(b.a, dot_of(b, second[j]), b.b);
          most = std::max(most, logits[j]);
        }
        auto total = static_cast<int64_t>(static_cast<double>(std::max<int64_t>(rest, 0)) *
                                          static_cast<double>(TransformExp2(reference - most)));
        for (const float logit : logits) {
          total += static_cast<int64_t>(TransformExp2(logit - most) * 0x1p26f);
        }
        const float inverse = 0x1p26f / static_cast<float>(std::max<int64_t>(total, 1));
        for (size_t j = 0; j < count; ++j) {
          sums[j] = std::fmaf(TransformExp2(logits[j] - most), inverse, sums[j]);
        }
      }
      std::vector<int32_t> order(count);
      std::iota(order.begin(), order.end(), 0);
      std::sort(order.begin(), order.end(), [&](int32_t x, int32_t y) {
        const int32_t key_x = MassKey(sums[x]), key_y = MassKey(sums[y]);
        return key_x != key_y ? key_x > key_y : x > y;
      });
      order.resize(std::min(order.size(), static_cast<size_t>(query.k)));
      std::erase_if(order, [&](int32_t j) { return MassKey(sums[j]) < query.least_key; });
      std::sort(order.begin(), order.end());
      for (size_t j = 0; j < order.size(); ++j) {
        args.kept.chosen(i, kv_head)[j] =
            tokens[order[j]];  // never before what is still to be read
      }
      args.kept.count(i, kv_head) = static_cast<int32_t>(order.size());
    }
  }
}

void TakeFromTailRef(const Tensor& q, std::span<const RetrievalQuery> queries,
                     const TransformCodeWeights& weights, float scale, const void* codes,
                     const CodeLayout& code_layout, const Selection& read, const TailMasses& tail) {
  const int32_t d = weights.head_dim, bt = code_layout.block_tokens;
  const auto heads = static_cast<int32_t>(q.cols / d);
  const int32_t group = heads / code_layout.kv_heads;
  for (int64_t i = 0; i < static_cast<int64_t>(queries.size()); ++i) {
    const RetrievalQuery& query = queries[i];
    for (int32_t head = 0; head < heads; ++head) {
      const int32_t kv_head = head / group;
      const TransformQuery prepared = PrepareTransformQueryRef(
          q.f32(query.row) + int64_t{head} * d, weights, kv_head, scale * kTransformLog2E);
      for (int32_t j = 0; j < read.count(i, kv_head); ++j) {
        const int32_t token = read.chosen(i, kv_head)[j];
        const uint32_t* of_head =
            HeadCodes(codes, code_layout, query.block_table[token / bt], kv_head);
        const std::vector<uint8_t> indexes =
            TransformDecodeRef(of_head, token % bt, weights, kv_head);
        int32_t dot = 0;
        for (size_t c = 0; c < indexes.size(); ++c) dot += prepared.coef[c] * indexes[c];
        const auto reference = static_cast<int32_t>(
            std::rint((tail.references[i * heads + head] - prepared.offset) * kMassSteps));
        const float weight = MassPower(MassStepsOf(prepared, dot) - reference);
        const int32_t cell = TransformCellRef(of_head, token % bt, weights, kv_head);
        tail.masses[(i * heads + head) * kTransformCells + cell] -=
            static_cast<int64_t>(weight * 0x1p30f);
      }
    }
  }
}

void ExtendCellTablesRef(std::span<const CellTableExtension> extensions, const void* pool,
                         const KvLayout& layout, const TransformCodeWeights& weights,
                         const void* codes, const CodeLayout& code_layout) {
  const int32_t d = layout.head_dim;
  constexpr int64_t kRows = kTransformCells + 1;
  for (const CellTableExtension& extension : extensions) {
    Summary& table = *extension.table;
    float* const counts = table.data + layout.kv_heads * kRows * d;
    if (table.tokens.size() == 0) {
      std::fill_n(table.data, CellTableFloats(layout.kv_heads, d), 0.0f);
    }
    for (int32_t head = 0; head < layout.kv_heads; ++head) {
      float* const sums = table.data + head * kRows * d;
      std::vector<float> block_sum(d);
      float block_count = 0;
      for (int32_t token = table.tokens.last; token < extension.last; ++token) {
        const int32_t logical = token / layout.block_tokens, at = token % layout.block_tokens;
        const std::vector<float> value =
            ReadValue(static_cast<const std::byte*>(pool) +
                          layout.RowOffset(extension.block_table[logical], head, at),
                      layout);
        const int32_t cell = TransformCellRef(
            HeadCodes(codes, code_layout, extension.index_table[logical], head), at, weights, head);
        for (int32_t c = 0; c < d; ++c) {
          sums[int64_t{cell} * d + c] += value[c];
          block_sum[c] += value[c];
        }
        counts[head * kRows + cell] += 1;
        block_count += 1;
        if ((token + 1) % kCellRefreshTokens != 0) continue;
        for (int32_t c = 0; c < d; ++c) sums[int64_t{kTransformCells} * d + c] += block_sum[c];
        counts[head * kRows + kTransformCells] += block_count;
        std::fill(block_sum.begin(), block_sum.end(), 0.0f);
        block_count = 0;
      }
    }
    table.tokens.last = std::max(table.tokens.last, extension.last);
  }
}

void MergeTailsRef(std::span<const RetrievalQuery> queries, std::span<const float* const> tables,
                   const TransformCodeWeights& weights, const TailMasses& tail, int32_t head_dim,
                   float* states) {
  const int32_t d = head_dim, kv_heads = static_cast<int32_t>(weights.heads.size());
  constexpr int64_t kRows = kTransformCells + 1;
  const int64_t state_floats = AttentionStateFloats(d);
  WINNOW_CHECK(tables.size() == queries.size());
  const int32_t heads = tail.heads, group = heads / kv_heads;
  for (int64_t i = 0; i < static_cast<int64_t>(queries.size()); ++i) {
    for (int32_t head = 0; head < heads; ++head) {
      const int32_t kv_head = head / group;
      if (!weights.heads[kv_head].tail) continue;
      const int64_t at = i * heads + head;
      const int64_t* masses = tail.masses + at * kTransformCells;
      const float* sums = tables[i] + kv_head * kRows * d;
      const float* counts = tables[i] + kv_heads * kRows * d + kv_head * kRows;
      const float* all = sums + int64_t{kTransformCells} * d;
      const float all_count = std::max(1.0f, counts[kTransformCells]);
      const int64_t total = std::accumulate(masses, masses + kTransformCells, int64_t{0});
      if (total == 0) continue;
      std::vector<float> part(state_floats);
      for (int32_t cell = 0; cell < kTransformCells; ++cell) {
        if (masses[cell] == 0) continue;
        const float mass = static_cast<float>(masses[cell]) * 0x1p-30f;
        for (int32_t c = 0; c < d; ++c) {
          const float mean =
              (sums[int64_t{cell} * d + c] + all[c] / all_count) / (counts[cell] + 1);
          part[c] = std::fmaf(mass, mean, part[c]);
        }
      }
      float* const state = states + at * state_floats;
      part[d] = tail.references[at] + tail.deltas[at];
      if (state[d + 1] > 0) {
        part[d] = std::min(part[d], state[d] + std::log2(state[d + 1]) + kTailClampLog2);
      }
      part[d + 1] = static_cast<float>(total) * 0x1p-30f;
      MergeAttentionState(state, part.data(), d);
    }
  }
}

}  // namespace winnow::kernels
