// The transform-code operations of the CPU backend (kernels/transform_code.h). SelectByMass works in units, one query
// and KV head each. A thread does all of a unit where there are many; else each step is a loop over threads:
//
//   prepare  for each unit the coefficients of its queries
//   sums     for each range of its tokens the pieces' peaks and sums, and the tokens' cells
//   combine  for each unit its references and denominators
//   weigh    for each range distances (keys from the other end) of all tokens, and masses of cells. Steps are kept from
//            the sums where they stay in the cache, and else computed again, which costs less than to write and read them
//   take     for each unit its selection, whose masses leave those of the cells (TakeFromTail does that later, where the
//            selection is pruned or re-ranked first)
//
// Ranges are cut at fixed positions and only integers cross them. RerankByMass gathers the codes of a unit's candidates
// into tiles of their own, so that the same vector code makes their dots.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/attention_state.h"
#include "kernels/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/transform_code.h"

namespace winnow::kernels {
namespace {

constexpr int32_t kUnitsOfThread = 4;  // from so many on, threads take whole units
constexpr int32_t kWholeUnit = 1 << 30;
constexpr size_t kKeptBytesMax = size_t{8} << 20;  // steps of a thread: 960K tokens of four queries
constexpr int32_t kMostRangePieces = 16;
constexpr int32_t kRangesOfThread = 4;       // at least, where there are as many pieces
constexpr int32_t kCandidateTokens = 16384;  // whose slots fit in the upper half of a candidate
constexpr size_t kWaveBytes = size_t{64} << 20;
constexpr int32_t kSampledTokensMin = 4096;  // fewer are not worth a guess
constexpr int32_t kTokensOfSample = 32, kSampleTokensMax = 1024;
constexpr int32_t kPadding = 128;  // places that vectors may read or write past the last token's

// Bit i of a product is the parity of a byte and of byte 7 - i of the matrix.
uint64_t FieldMatrix(const CodeField& field) {
  uint64_t matrix = 0;
  for (int32_t bit = 0; bit < field.width; ++bit) {
    matrix |= uint64_t{1} << (8 * (7 - field.low - bit) + field.shift + bit);
  }
  return matrix;
}

std::vector<MassField> MassFields(std::vector<CodeField> fields) {
  std::stable_sort(fields.begin(), fields.end(), [](const CodeField& a, const CodeField& b) {
    return a.low != b.low ? a.low < b.low : a.width < b.width;
  });
  std::vector<MassField> made;
  int32_t most = 0;  // that a pair's sum can be
  for (const CodeField& field : fields) {
    const int32_t largest = (1 << field.width) - 1, of_field = 2 * 127 * largest;
    if (!made.empty() && (made.back().low != field.low || most + of_field > kMassPairMost)) {
      made.back().ends_pairs = true;
      most = 0;
    }
    most += of_field;
    made.push_back({field.word, field.shift, field.low, field.quad, false,
                    static_cast<uint32_t>(largest) * 0x01010101u, FieldMatrix(field)});
  }
  made.back().ends_pairs = true;
  return made;
}

// Rounds |x| < 2^21 to the nearest integer, of two the even one: behind the sum's last bit nothing is left.
float RoundToNearest(float x) { return x + 0x1.8p23f - 0x1.8p23f; }

class CpuTransformCode final : public PackedTransformCode {
 public:
  struct Head {
    int32_t n = 0;        // kept dimensions
    int32_t padded = 0;   // n at least, a multiple of 16
    int32_t columns = 0;  // n + 1 + delta_rows at least, a multiple of 16
    int32_t delta_rows = 0;
    std::vector<float> key_weight;  // [d][padded]
    std::vector<float> key_bias;    // [padded]
    std::vector<float>
        query_weight;  // [d][columns]: column n is the mean, those behind it are the delta weights
    std::vector<float> zeros;  // [columns]
    std::vector<float> most;   // [n] the largest index
    std::vector<MassField> fields;
  };
  explicit CpuTransformCode(const TransformCodeWeights& weights) : weights_(weights) {
    const int32_t d = weights.head_dim;
    for (const TransformCodeHead& from : weights_.heads) {
      Head head;
      head.n = 4 * from.quads;
      head.padded = (head.n + 15) / 16 * 16;
      head.delta_rows = static_cast<int32_t>(from.delta_weight.size()) / d;
      head.columns = (head.n + 1 + head.delta_rows + 15) / 16 * 16;
      head.key_weight.resize(size_t{1} * d * head.padded);
      head.query_weight.resize(size_t{1} * d * head.columns);
      for (int32_t c = 0; c < d; ++c) {
        std::copy_n(&from.key_weight[int64_t{c} * head.n], head.n,
                    &head.key_weight[int64_t{c} * head.padded]);
        float* const of_query = &head.query_weight[int64_t{c} * head.columns];
        std::copy_n(&from.query_weight[int64_t{c} * head.n], head.n, of_query);
        of_query[head.n] = from.mean[c];
        for (int32_t row = 0; row < head.delta_rows; ++row) {
          of_query[head.n + 1 + row] = from.delta_weight[int64_t{row} * d + c];
        }
      }
      head.key_bias = from.key_bias;
      head.key_bias.resize(head.padded);
      head.zeros.resize(head.columns);
      for (int32_t i = 0; i < head.n; ++i) {
        head.most.push_back(static_cast<float>((1 << from.widths[i / 4]) - 1));
      }
      head.fields = MassFields(from.fields);
      size_bytes_ += (head.key_weight.size() + head.query_weight.size()) * sizeof(float);
      heads_.push_back(std::move(head));
    }
  }
  int32_t bits() const override { return weights_.bits; }
  size_t size_bytes() const override { return size_bytes_; }
  const TransformCodeWeights& weights() const { return weights_; }
  const Head& head(int32_t i) const { return heads_[i]; }

 private:
  const TransformCodeWeights weights_;
  std::vector<Head> heads_;
  size_t size_bytes_ = 0;
};

const CpuTransformCode& Packed(const PackedTransformCode& transform) {
  return static_cast<const CpuTransformCode&>(transform);
}

struct Range {
  TokenRange tokens;  // of mid
  // [group / kMassAddQueries, rounded up][kTransformCells][kMassAddQueries] of the range; null: no tail
  int64_t* masses = nullptr;
};

int64_t StepsOfPiece(int32_t group) { return int64_t{group} * kMassStride; }
int32_t FullGroups(int32_t group) { return (group + kMassAddQueries - 1) / kMassAddQueries; }
int64_t RangeMasses(int32_t group) {
  return int64_t{FullGroups(group)} * kMassAddQueries * kTransformCells;
}

// Makes logits of a query head's dots, and of steps.
struct QueryLine {
  float a = 0, b = 0, offset = 0;
};

struct Unit {
  const RetrievalQuery* query = nullptr;
  int64_t index = 0;  // of the query
  MassCall call;
  std::vector<int32_t> coefs;
  std::vector<MassHead> heads;  // [group]
  std::vector<QueryLine> lines;
  std::vector<float> deltas;
  std::vector<int32_t> peaks;  // [group][pieces]
  std::vector<int64_t> sums;   // as the peaks
  int32_t pieces = 0;
  std::vector<Range> ranges;
  int16_t* kept = nullptr;  // its pieces' steps from sums to masses; null: they are computed again
  uint16_t* distances = nullptr;  // from the first token's tile on
  uint8_t* cells = nullptr;       // likewise
  uint32_t* candidates = nullptr;
  int32_t base = 0;  // token of distances[0]
};

int32_t PieceOf(const Unit& unit, int32_t token) {
  return token / kMassPieceTokens - unit.query->mid.first / kMassPieceTokens;
}

size_t UnitPlaces(TokenRange mid) { return size_t{1} * mid.size() + kCodeTileTokens + kPadding; }
size_t UnitBytes(TokenRange mid) {
  return (UnitPlaces(mid) * (sizeof(uint32_t) + sizeof(uint16_t) + sizeof(uint8_t)) + 63) / 64 * 64;
}

size_t NumRanges(TokenRange mid, int32_t range_tokens) {
  return static_cast<size_t>((mid.last - 1) / range_tokens - mid.first / range_tokens + 1);
}

// A range is whole pieces: many, because each has masses of its own to be added up, but so few that no thread waits long for
// another's.
int32_t RangeTokens(std::span<const RetrievalQuery> queries,
                    std::span<const std::pair<int64_t, int32_t>> wave, int threads) {
  int64_t pieces = 0;
  for (const auto& [index, kv_head] : wave) {
    pieces += static_cast<int64_t>(NumRanges(queries[index].mid, kMassPieceTokens));
  }
  const int64_t each = pieces / (int64_t{kRangesOfThread} * threads);
  return static_cast<int32_t>(std::clamp<int64_t>(each, 1, kMostRangePieces)) * kMassPieceTokens;
}

// Calls body(tokens, first token of the first tile) for each piece of a range.
template <typename Body>
void ForPieces(TokenRange tokens, Body body) {
  for (int32_t first = tokens.first, last = first; first < tokens.last; first = last) {
    last = std::min(tokens.last, (first / kMassPieceTokens + 1) * kMassPieceTokens);
    body(TokenRange{first, last}, first / kCodeTileTokens * kCodeTileTokens);
  }
}

void PrepareUnit(const CpuOps& ops, const CpuTransformCode& transform, int32_t kv_head,
                 const float* q, float scale2, Unit& unit) {
  const TransformCodeHead& weights = transform.weights().heads[kv_head];
  const CpuTransformCode::Head& head = transform.head(kv_head);
  const int32_t d = transform.weights().head_dim, group = unit.call.group;
  const auto num_fields = static_cast<int32_t>(head.fields.size());
  std::vector<float> y(size_t{1} * group * head.columns);
  ops.transform_rows(q, group, d, head.query_weight.data(), head.columns, head.zeros.data(),
                     y.data());
  unit.coefs.assign(size_t{1} * group * num_fields, 0);
  unit.heads.assign(group, {});
  unit.lines.assign(group, {});
  unit.deltas.assign(group, 0);
  std::vector<int8_t> coef(head.n);
  for (int32_t g = 0; g < group; ++g) {
    const float* of_query = &y[size_t{1} * g * head.columns];
    float peak = 0;
    bool finite = true;
    for (int32_t i = 0; i < head.n; ++i) {
      finite &= std::isfinite(of_query[i]);
      peak = std::max(peak, std::fabs(of_query[i]));
    }
    if (!finite) continue;
    int32_t half_steps = 0;
    const float inverse = 127.0f / peak;
    for (int32_t i = 0; i < head.n; ++i) {
      coef[i] = peak >= kTransformPeakLeast
                    ? static_cast<int8_t>(RoundToNearest(of_query[i] * inverse))
                    : int8_t{0};
      half_steps += coef[i] * ((1 << weights.widths[i / 4]) - 1);
    }
    const float a = peak / 127.0f * scale2;
    const float middle = -0.5f * static_cast<float>(half_steps);
    const float b = std::fma(a, middle, scale2 * of_query[head.n]);
    const float step = a * kMassSteps, origin = std::nearbyint(step * middle);
    const float offset = std::fma(origin, -1.0f / kMassSteps, b);
    if (!std::isfinite(a) || !std::isfinite(b) || !(std::fabs(origin) <= kMassOriginMost) ||
        !(std::fabs(offset) <= kMassOffsetMost)) {
      continue;
    }
    unit.heads[g].step = step;
    unit.heads[g].origin = origin;
    unit.lines[g] = {a, b, offset};
    for (int32_t f = 0; f < num_fields; ++f) {
      std::memcpy(&unit.coefs[size_t{1} * g * num_fields + f], &coef[4 * head.fields[f].quad], 4);
    }
    for (int32_t row = 0; row < head.delta_rows; ++row) {
      const float along = of_query[head.n + 1 + row];
      unit.deltas[g] = std::fma(along, along, unit.deltas[g]);
    }
  }
  unit.call.coefs = unit.coefs.data();
}

// Cells are taken here, too, where the codes have just been read.
void SumRange(const CpuOps& ops, const std::vector<uint8_t>& cell_bits, Unit& unit,
              const Range& range, int16_t* scratch) {
  const int32_t group = unit.call.group;
  ForPieces(range.tokens, [&](TokenRange tokens, int32_t tile) {
    const int32_t piece = PieceOf(unit, tokens.first);
    int16_t* const steps = unit.kept == nullptr ? scratch : unit.kept + piece * StepsOfPiece(group);
    ops.mass_steps(unit.call, unit.heads.data(), tokens.first, tokens.last, steps);
    if (range.masses != nullptr) {
      ops.mass_cells(unit.call, cell_bits.data(), static_cast<int32_t>(cell_bits.size()),
                     tokens.first, tokens.last, unit.cells + (tile - unit.base));
    }
    for (int32_t g = 0; g < group; ++g) {
      const int16_t* of_query = steps + int64_t{g} * kMassStride + (tokens.first - tile);
      const int64_t at = int64_t{g} * unit.pieces + piece;
      unit.sums[at] = ops.mass_sum(of_query, tokens.size(), &unit.peaks[at]);
    }
  });
}

void Combine(const CpuOps& ops, const float* anchor_masses, Unit& unit) {
  const int32_t pieces = unit.pieces;
  std::vector<float> shares(size_t{1} * pieces + kPadding);
  for (int32_t g = 0; g < unit.call.group; ++g) {
    MassHead& head = unit.heads[g];
    const int32_t* const peaks = &unit.peaks[size_t{1} * g * pieces];
    const int64_t* const sums = &unit.sums[size_t{1} * g * pieces];
    head.reference = *std::max_element(peaks, peaks + pieces);
    int64_t total = 0;
    if (std::isfinite(anchor_masses[g])) {
      const float at = (anchor_masses[g] * kTransformLog2E - unit.lines[g].offset) * kMassSteps;
      const auto anchors = static_cast<int32_t>(
          std::clamp<float>(std::nearbyint(at), -kMassAnchorsMost, kMassAnchorsMost));
      head.reference = std::max(head.reference, anchors);
      const float share = TransformExp2(static_cast<float>(anchors - head.reference) / kMassSteps);
      total = static_cast<int64_t>(share * 0x1p22f);
    }
    for (int32_t piece = 0; piece < pieces; ++piece) {
      shares[piece] = static_cast<float>(peaks[piece] - head.reference) / kMassSteps;
    }
    ops.rerank_weights(0, pieces, shares.data());
    for (int32_t piece = 0; piece < pieces; ++piece) {
      total += static_cast<int64_t>(static_cast<double>(sums[piece]) *
                                    static_cast<double>(shares[piece]));
    }
    head.inverse = 0x1p22f / static_cast<float>(total);
  }
}
// The reference that is handed out, and R of it.
float ReferenceOf(const MassHead& head, const QueryLine& line) {
  return std::fma(static_cast<float>(head.reference), 1.0f / kMassSteps, line.offset);
}
int32_t StepsOfReference(float reference, const QueryLine& line) {
  return static_cast<int32_t>(std::nearbyint((reference - line.offset) * kMassSteps));
}

// A thread's memory for a piece's tokens: steps, fixed-point weights, distances, cells, gathered codes and their masses.
struct PieceScratch {
  int16_t* steps = nullptr;
  int32_t* fixed = nullptr;
  int64_t* masses = nullptr;  // [RangeMasses]
  uint32_t* tiles = nullptr;
  uint16_t* distances = nullptr;
  uint8_t* cells = nullptr;
};

// Scratch memory of all threads, one behind the other.
struct MassScratchSizes {
  MassScratchSizes(int32_t group, int32_t bits)
      : steps_bytes(size_t{2} * FullGroups(group) * kMassAddQueries * kMassStride),
        masses_bytes(RangeMasses(group) * sizeof(int64_t)),
        tiles_bytes(size_t{kMassPieceTokens} * bits / 8),
        thread_bytes((3 * steps_bytes + masses_bytes + tiles_bytes + 3 * kMassStride + 63) / 64 *
                     64) {}
  PieceScratch Place(std::byte* scratch, int thread) const {
    std::byte* const of_thread = scratch + thread_bytes * thread;
    std::byte* const masses = of_thread + 3 * steps_bytes;  // fixed-point weights have 32 bits
    std::byte* const tiles = masses + masses_bytes;
    return {reinterpret_cast<int16_t*>(of_thread),
            reinterpret_cast<int32_t*>(of_thread + steps_bytes),
            reinterpret_cast<int64_t*>(masses),
            reinterpret_cast<uint32_t*>(tiles),
            reinterpret_cast<uint16_t*>(tiles + tiles_bytes),
            reinterpret_cast<uint8_t*>(tiles + tiles_bytes + 2 * kMassStride)};
  }
  const size_t steps_bytes, masses_bytes, tiles_bytes, thread_bytes;
};

// Adds what `fixed` has of the tokens to their cells: masses as a range's.
void AddMasses(const CpuOps& ops, int32_t group, const int32_t* fixed, const uint8_t* cells,
               TokenRange tokens, int64_t* masses) {
  for (int32_t full = 0; full < FullGroups(group); ++full) {
    ops.mass_add(fixed + int64_t{full} * kMassAddQueries * kMassStride, cells, tokens.first,
                 tokens.last, masses + int64_t{full} * kMassAddQueries * kTransformCells);
  }
}

void WeighRange(const CpuOps& ops, const Unit& unit, const Range& range,
                const PieceScratch& scratch) {
  const int32_t group = unit.call.group;
  if (range.masses != nullptr) std::fill_n(range.masses, RangeMasses(group), 0);
  ForPieces(range.tokens, [&](TokenRange tokens, int32_t tile) {
    const int16_t* steps = scratch.steps;
    if (unit.kept != nullptr) {
      steps = unit.kept + PieceOf(unit, tokens.first) * StepsOfPiece(group);
    } else {
      ops.mass_steps(unit.call, unit.heads.data(), tokens.first, tokens.last, scratch.steps);
    }
    ops.mass_weights(unit.heads.data(), group, steps, tokens.last - tile,
                     unit.distances + (tile - unit.base),
                     range.masses == nullptr ? nullptr : scratch.fixed);
    if (range.masses == nullptr) return;
    AddMasses(ops, group, scratch.fixed, unit.cells + (tile - unit.base),
              {tokens.first - tile, tokens.last - tile}, range.masses);
  });
}

// A distance that few more than k tokens do not pass, from a sample.
int32_t GuessBound(const Unit& unit) {
  const TokenRange mid = unit.query->mid;
  if (mid.size() < kSampledTokensMin) return kMassKeyBins - 1;
  uint16_t sample[kSampleTokensMax];
  const int32_t sampled = std::min(mid.size() / kTokensOfSample, kSampleTokensMax);
  uint32_t random = 1;
  const int64_t step = (int64_t{mid.size()} << 16) / sampled;
  for (int32_t i = 0; i < sampled; ++i) {
    random = random * 1664525u + 1013904223u;
    const int64_t at = (i * step + (random >> 16) * step / 65536) >> 16;
    sample[i] = unit.distances[mid.first - unit.base + at];
  }
  const double expected = static_cast<double>(unit.query->k) * sampled / mid.size();
  const auto rank = static_cast<int32_t>(expected + 3 * std::sqrt(expected) + 2);
  if (rank >= sampled) return kMassKeyBins - 1;
  std::nth_element(sample, sample + rank, sample + sampled);
  return sample[rank];
}

// The distance of the k-th nearest candidate, and in `ties` how many at that distance belong to the k: two counts by
// bytes. REQUIRES: k <= candidates.size().
int32_t KthDistance(std::span<const uint32_t> candidates, int32_t k, int32_t* ties) {
  int32_t byte_counts[256] = {};
  for (const uint32_t one : candidates) ++byte_counts[one >> 8 & 0xff];
  int32_t left = k;
  const auto find = [&] {
    int32_t byte = 0;
    for (; left > byte_counts[byte]; ++byte) left -= byte_counts[byte];
    return static_cast<uint32_t>(byte);
  };
  const uint32_t high = find();
  std::fill(std::begin(byte_counts), std::end(byte_counts), 0);
  for (const uint32_t one : candidates) {
    if ((one >> 8 & 0xff) == high) ++byte_counts[one & 0xff];
  }
  const uint32_t low = find();
  *ties = left;
  return static_cast<int32_t>(high << 8 | low);
}

// Returns how many.
int32_t Take(const CpuOps& ops, Unit& unit, int32_t* tokens) {
  const TokenRange mid = unit.query->mid;
  const int32_t k = unit.query->k;
  if (k == 0) return 0;
  std::vector<int32_t> ends;  // of the candidates of each kCandidateTokens
  int32_t found = 0;
  for (int32_t bound = GuessBound(unit);; bound = kMassKeyBins - 1) {
    ends.clear();
    found = 0;
    for (int32_t first = mid.first; first < mid.last; first += kCandidateTokens) {
      const int32_t count = std::min(kCandidateTokens, mid.last - first);
      found += ops.find_candidates(unit.distances + (first - unit.base), count, bound, 0,
                                   unit.candidates + found);
      ends.push_back(found);
    }
    if (found >= k) break;
    WINNOW_CHECK(bound < kMassKeyBins - 1);
  }
  int32_t ties = 0;
  const std::span<const uint32_t> candidates(unit.candidates, static_cast<size_t>(found));
  const int32_t threshold = KthDistance(candidates, k, &ties);
  for (const uint32_t one : candidates) {
    ties -= static_cast<int32_t>(static_cast<int32_t>(one & 0xffff) == threshold);
  }
  // Among equals the later are taken: the first -ties at the threshold are not.
  const int32_t farthest = std::min(threshold, kMassKeyBins - 1 - unit.query->least_key);
  int32_t taken = 0, at = 0;
  for (size_t part = 0; part < ends.size(); ++part) {
    const int32_t first = mid.first + static_cast<int32_t>(part) * kCandidateTokens;
    for (; at < ends[part]; ++at) {
      const auto distance = static_cast<int32_t>(candidates[at] & 0xffff);
      const bool skipped = distance == threshold && ties++ < 0;
      if (skipped || distance > farthest) continue;
      tokens[taken++] = first + static_cast<int32_t>(candidates[at] >> 16);
    }
  }
  return taken;
}

// Adds `sign` times a range's masses to those of a unit's queries.
void SumMasses(const int64_t* of_range, int32_t group, int64_t sign, int64_t* masses) {
  for (int32_t g = 0; g < group; ++g) {
    const int64_t* of_query = of_range +
                              int64_t{g / kMassAddQueries} * kMassAddQueries * kTransformCells +
                              g % kMassAddQueries;
    for (int32_t cell = 0; cell < kTransformCells; ++cell) {
      masses[int64_t{g} * kTransformCells + cell] +=
          sign * of_query[int64_t{cell} * kMassAddQueries];
    }
  }
}

constexpr int32_t kNoTable[1] = {0};

// The codes of the tokens as tiles of one block, and the call that reads them there. The last tile is filled up with the
// last token's.
MassCall GatherCodes(const MassCall& call, std::span<const int32_t> tokens, uint32_t* tiles) {
  const int32_t words = call.layout.bits / 32, bt = call.layout.block_tokens;
  const size_t places = (tokens.size() + kCodeTileTokens - 1) / kCodeTileTokens * kCodeTileTokens;
  for (size_t j = 0; j < places; ++j) {
    const int32_t token = tokens[std::min(j, tokens.size() - 1)];
    const auto* of_head =
        reinterpret_cast<const uint32_t*>(static_cast<const std::byte*>(call.codes) +
                                          call.block_table[token / bt] * call.layout.BlockBytes() +
                                          call.head * call.layout.HeadBytes());
    for (int32_t word = 0; word < words; ++word) {
      tiles[TransformWordOffset(words, static_cast<int32_t>(j), word)] =
          of_head[TransformWordOffset(words, token % bt, word)];
    }
  }
  MassCall gathered = call;
  gathered.codes = tiles;
  gathered.layout = {1, 1 << 30, call.layout.bits};
  gathered.last = static_cast<int32_t>(tokens.size());
  gathered.head = 0;
  gathered.block_table = kNoTable;
  return gathered;
}

// Subtracts those of the tokens that are read.
void TakeMasses(const CpuOps& ops, const std::vector<uint8_t>& cell_bits, const Unit& unit,
                std::span<const int32_t> tokens, int64_t* masses, const PieceScratch& scratch) {
  const int32_t group = unit.call.group;
  std::fill_n(scratch.masses, RangeMasses(group), 0);
  for (size_t begin = 0; begin < tokens.size(); begin += kMassPieceTokens) {
    const std::span<const int32_t> part =
        tokens.subspan(begin, std::min<size_t>(kMassPieceTokens, tokens.size() - begin));
    const auto count = static_cast<int32_t>(part.size());
    const MassCall call = GatherCodes(unit.call, part, scratch.tiles);
    ops.mass_steps(call, unit.heads.data(), 0, count, scratch.steps);
    ops.mass_weights(unit.heads.data(), group, scratch.steps, count, scratch.distances,
                     scratch.fixed);
    ops.mass_cells(call, cell_bits.data(), static_cast<int32_t>(cell_bits.size()), 0, count,
                   scratch.cells);
    AddMasses(ops, group, scratch.fixed, scratch.cells, {0, count}, scratch.masses);
  }
  SumMasses(scratch.masses, group, -1, masses);
}

// Indexes [4 * quads] of a token in the first code.
void UnpackFirst(const EncodeResidualsArgs& args, int32_t block, int32_t head, int32_t at,
                 uint8_t* indexes) {
  const TransformCodeHead& weights = Packed(args.transform).weights().heads[head];
  const auto* of_head = reinterpret_cast<const uint32_t*>(
      static_cast<const std::byte*>(args.codes) + block * args.code_layout.BlockBytes() +
      head * args.code_layout.HeadBytes());
  std::fill_n(indexes, 4 * weights.quads, uint8_t{0});
  for (const CodeField& field : weights.fields) {
    const uint32_t word = of_head[TransformWordOffset(args.code_layout.bits / 32, at, field.word)];
    const uint32_t bytes = word >> field.shift & ((1u << field.width) - 1) * 0x01010101u;
    uint32_t of_quad;
    std::memcpy(&of_quad, indexes + 4 * field.quad, 4);
    of_quad |= bytes << field.low;
    std::memcpy(indexes + 4 * field.quad, &of_quad, 4);
  }
}

// ---- re-ranking ----

// Scratch memory of a thread, for up to `most` candidates.
struct RerankScratch {
  RerankScratch(int32_t most, int32_t group, int32_t words, int32_t residual_words)
      : places((size_t{1} * most + kCodeTileTokens - 1) / kCodeTileTokens * kCodeTileTokens +
               kPadding),
        dots_values(size_t{1} * group * kMassStride) {
    size_t end = 0;
    const auto take = [&end](size_t bytes) {
      const size_t begin = end;
      end = (end + bytes + 63) / 64 * 64;
      return begin;
    };
    tiles = take(places * words * 4);
    residual_tiles = take(places * residual_words * 4);
    dots = take(dots_values * 4);
    residual_dots = take(dots_values * 4);
    logits = take(places * group * 4);
    distances = take(places * 2);
    thread_bytes = end;
  }
  size_t places, dots_values;
  size_t tiles = 0, residual_tiles = 0, dots = 0, residual_dots = 0, logits = 0, distances = 0;
  size_t thread_bytes = 0;
};

// Keeps the k nearest of the candidates, of equals the later, and none with a smaller key than the query's least.
int32_t KeepNearest(const RetrievalQuery& query, const uint16_t* distances,
                    std::span<const int32_t> candidates, int32_t* tokens) {
  const auto k = std::min<size_t>(candidates.size(), query.k);
  if (k == 0) return 0;
  std::vector<uint64_t> found;  // distance, then the later token first
  for (size_t j = 0; j < candidates.size(); ++j) {
    found.push_back(uint64_t{distances[j]} << 32 |
                    (0xffffffffu - static_cast<uint32_t>(candidates[j])));
  }
  std::nth_element(found.begin(), found.begin() + static_cast<int64_t>(k - 1), found.end());
  const auto farthest = static_cast<uint64_t>(kMassKeyBins - 1 - query.least_key);
  int32_t kept = 0;
  for (size_t i = 0; i < k; ++i) {
    if (found[i] >> 32 > farthest) continue;
    tokens[kept++] = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(found[i]));
  }
  std::sort(tokens, tokens + kept);
  return kept;
}

// Distances of a unit's candidates by both codes. `references` and `inverses` are those of the selection.
void RerankUnit(const CpuOps& ops, const Unit& first, const Unit& residual, const float* references,
                const float* first_inverses, std::span<const int32_t> candidates,
                const RerankScratch& sizes, std::byte* scratch) {
  const int32_t group = first.call.group, count = static_cast<int32_t>(candidates.size());
  const auto at = [&](size_t offset) { return scratch + offset; };
  const MassCall call =
      GatherCodes(first.call, candidates, reinterpret_cast<uint32_t*>(at(sizes.tiles)));
  const MassCall residual_call =
      GatherCodes(residual.call, candidates, reinterpret_cast<uint32_t*>(at(sizes.residual_tiles)));
  auto* const dots = reinterpret_cast<float*>(at(sizes.dots));
  auto* const residual_dots = reinterpret_cast<float*>(at(sizes.residual_dots));
  auto* const logits = reinterpret_cast<float*>(at(sizes.logits));
  const auto stride = static_cast<int64_t>(sizes.places);
  std::vector<float> most(group), inverses(group);
  std::vector<int64_t> rest(group);
  for (int32_t g = 0; g < group; ++g) {
    most[g] = references[g];
    rest[g] = static_cast<int64_t>(0x1p26f / first_inverses[g]);
  }
  for (int32_t begin = 0; begin < count; begin += kMassPieceTokens) {
    const int32_t end = std::min(count, begin + kMassPieceTokens);
    ops.mass_dots(call, begin, end, dots);
    ops.mass_dots(residual_call, begin, end, residual_dots);
    for (int32_t g = 0; g < group; ++g) {
      const RerankHead head = {first.lines[g].a, first.lines[g].b, references[g],
                               residual.lines[g].a, residual.lines[g].b};
      rest[g] -= ops.rerank_logits(head, dots + int64_t{g} * kMassStride,
                                   residual_dots + int64_t{g} * kMassStride, end - begin,
                                   logits + g * stride + begin, &most[g]);
    }
  }
  for (int32_t g = 0; g < group; ++g) {
    auto total = static_cast<int64_t>(static_cast<double>(std::max<int64_t>(rest[g], 0)) *
                                      static_cast<double>(TransformExp2(references[g] - most[g])));
    total += ops.rerank_weights(most[g], count, logits + g * stride);
    inverses[g] = 0x1p26f / static_cast<float>(std::max<int64_t>(total, 1));
  }
  ops.rerank_distances(logits, stride, inverses.data(), group, count,
                       reinterpret_cast<uint16_t*>(at(sizes.distances)));
}

}  // namespace

std::unique_ptr<PackedTransformCode> CpuBackend::PackTransformCode(
    const TransformCodeWeights& weights) {
  WINNOW_CHECK(CheckTransformCode(weights).empty());
  return std::make_unique<CpuTransformCode>(weights);
}

void CpuBackend::EncodeTransformKeys(std::span<const KeySpan> spans, const void* pool,
                                     const KvLayout& layout, const PackedTransformCode& transform,
                                     void* codes, const CodeLayout& code_layout) {
  EncodeTransform(spans, pool, layout, transform, codes, code_layout, nullptr);
}

void CpuBackend::EncodeResiduals(const EncodeResidualsArgs& args) {
  WINNOW_CHECK(args.code_layout.bits == args.transform.bits());
  WINNOW_CHECK(
      CheckResidualCode(Packed(args.transform).weights(), Packed(args.residual).weights()).empty());
  EncodeTransform(args.spans, args.pool, args.layout, args.residual, args.residual_codes,
                  args.residual_layout, &args);
}

// `first`: the codes that these refine; null: these are first codes.
void CpuBackend::EncodeTransform(std::span<const KeySpan> spans, const void* pool,
                                 const KvLayout& layout, const PackedTransformCode& transform,
                                 void* codes, const CodeLayout& code_layout,
                                 const EncodeResidualsArgs* first_codes) {
  const CpuTransformCode& packed = Packed(transform);
  const int32_t d = layout.head_dim, words = code_layout.bits / 32;
  WINNOW_CHECK(packed.weights().head_dim == d && code_layout.bits == packed.bits());
  WINNOW_CHECK(static_cast<int32_t>(packed.weights().heads.size()) == layout.kv_heads);
  WINNOW_CHECK(layout.block_tokens % kCodeTileTokens == 0);
  struct Tile {
    const KeySpan* span;
    TokenRange tokens;
  };
  std::vector<Tile> tiles;
  for (const KeySpan& span : spans) {
    WINNOW_CHECK(span.tokens.last <=
                 static_cast<int64_t>(span.block_table.size()) * layout.block_tokens);
    for (int32_t first = span.tokens.first, last = first; first < span.tokens.last; first = last) {
      last = std::min(span.tokens.last, (first / kCodeTileTokens + 1) * kCodeTileTokens);
      tiles.push_back({&span, {first, last}});
    }
  }
  threads_.ParallelFor(static_cast<int64_t>(tiles.size()) * layout.kv_heads, [&](int64_t i, int) {
    const Tile& tile = tiles[i / layout.kv_heads];
    const auto head = static_cast<int32_t>(i % layout.kv_heads);
    const CpuTransformCode::Head& of_head = packed.head(head);
    float keys[kCodeTileTokens * 256], y[kCodeTileTokens * 272];
    uint8_t indexes[256];
    const int32_t logical = tile.tokens.first / layout.block_tokens;
    const int32_t at = tile.tokens.first % layout.block_tokens;
    const std::byte* row = static_cast<const std::byte*>(pool) +
                           layout.RowOffset(tile.span->block_table[logical], head, at);
    for (int32_t t = 0; t < tile.tokens.size(); ++t) {
      ops_.read_kv_row(row + t * layout.RowBytes(), d, layout.dtype, keys + t * d, nullptr);
    }
    ops_.transform_rows(keys, tile.tokens.size(), d, of_head.key_weight.data(), of_head.padded,
                        of_head.key_bias.data(), y);
    const int32_t index_block = tile.span->IndexBlock(logical);
    auto* to = reinterpret_cast<uint32_t*>(static_cast<std::byte*>(codes) +
                                           index_block * code_layout.BlockBytes() +
                                           head * code_layout.HeadBytes());
    const TransformCodeHead& weights = packed.weights().heads[head];
    uint8_t refined[256];
    for (int32_t t = 0; t < tile.tokens.size(); ++t) {
      if (first_codes != nullptr) UnpackFirst(*first_codes, index_block, head, at + t, refined);
      for (int32_t k = 0; k < of_head.n; ++k) {
        float value = y[t * of_head.padded + k];
        if (first_codes != nullptr && weights.first_dims[k] >= 0) {
          value = std::fma(-weights.first_steps[k],
                           static_cast<float>(refined[weights.first_dims[k]]), value);
        }
        const float held = value > 0 ? std::min(value, of_head.most[k]) : 0;
        indexes[k] = static_cast<uint8_t>(held);
      }
      uint32_t code[8] = {};
      for (const CodeField& field : weights.fields) {
        uint32_t bytes;
        std::memcpy(&bytes, indexes + 4 * field.quad, 4);
        const uint32_t mask = ((1u << field.width) - 1) * 0x01010101u;
        code[field.word] |= (bytes >> field.low & mask) << field.shift;
      }
      for (int32_t word = 0; word < words; ++word) {
        to[TransformWordOffset(words, at + t, word)] = code[word];
      }
    }
  });
}

void CpuBackend::SelectByMass(const SelectByMassArgs& args) {
  const std::span<const RetrievalQuery> queries = args.queries;
  const CodeLayout& code_layout = args.code_layout;
  const Selection& chosen = args.chosen;
  const TailMasses* const tail = args.tail;
  const CpuTransformCode& packed = Packed(args.transform);
  const int32_t d = packed.weights().head_dim, kv_heads = code_layout.kv_heads;
  const auto heads = static_cast<int32_t>(args.q.cols / d);
  const int32_t group = heads / kv_heads;
  WINNOW_CHECK(chosen.kv_heads == kv_heads && heads == group * kv_heads &&
               code_layout.bits == packed.bits());
  // By head and then query: neighbours read the same codes.
  std::vector<std::pair<int64_t, int32_t>> units;
  for (int32_t head = 0; head < kv_heads; ++head) {
    for (int64_t i = 0; i < static_cast<int64_t>(queries.size()); ++i) {
      const RetrievalQuery& query = queries[i];
      WINNOW_CHECK(query.mid.first >= 0 && query.mid.size() >= 0);
      WINNOW_CHECK(query.k >= 0 && query.k <= query.mid.size() && query.k <= chosen.capacity);
      WINNOW_CHECK(query.mid.last <=
                   static_cast<int64_t>(query.block_table.size()) * code_layout.block_tokens);
      WINNOW_CHECK(query.least_key >= 0 && query.least_key < kMassKeyBins &&
                   query.least_key % kMassKeyStep == 0);
      chosen.count(i, head) = 0;
      if (query.mid.size() > 0) {
        units.emplace_back(i, head);
      } else if (tail != nullptr) {
        const int64_t first = i * heads + int64_t{head} * group;
        std::fill_n(tail->masses + first * kTransformCells, int64_t{group} * kTransformCells, 0);
        std::fill_n(tail->references + first, group, 0.0f);
        std::fill_n(tail->deltas + first, group, 0.0f);
      }
    }
  }
  for (size_t first = 0, last = 0; first < units.size(); first = last) {
    size_t wave_bytes = 0;
    for (; last < units.size(); ++last) {
      const size_t unit_bytes = UnitBytes(queries[units[last].first].mid);
      if (last > first && wave_bytes + unit_bytes > kWaveBytes) break;
      wave_bytes += unit_bytes;
    }
    SelectMassWave(args, {units.data() + first, last - first}, wave_bytes);
  }
}

void CpuBackend::SelectMassWave(const SelectByMassArgs& args,
                                std::span<const std::pair<int64_t, int32_t>> wave,
                                size_t wave_bytes) {
  const Tensor& q = args.q;
  const TailMasses* const tail = args.tail;
  const CpuTransformCode& packed = Packed(args.transform);
  const int32_t d = packed.weights().head_dim;
  const auto num_heads = static_cast<int32_t>(q.cols / d);
  const int32_t group = num_heads / args.code_layout.kv_heads;
  const float scale2 = args.scale * kTransformLog2E;
  const MassScratchSizes sizes(group, args.code_layout.bits);
  const auto has_tail = [&](int32_t kv_head) {
    return tail != nullptr && packed.weights().heads[kv_head].tail;
  };
  const bool by_units = num_threads() == 1 ||
                        wave.size() >= size_t{kUnitsOfThread} * static_cast<size_t>(num_threads());
  const int32_t range_tokens =
      by_units ? kWholeUnit : RangeTokens(args.queries, wave, num_threads());
  size_t with_tail = 0, kept_bytes = 0, kept_bytes_max = 0;
  for (const auto& [index, kv_head] : wave) {
    const TokenRange mid = args.queries[index].mid;
    if (has_tail(kv_head)) with_tail += NumRanges(mid, range_tokens);
    const size_t unit_bytes =
        NumRanges(mid, kMassPieceTokens) * StepsOfPiece(group) * sizeof(int16_t);
    kept_bytes += unit_bytes;
    if (unit_bytes <= kKeptBytesMax) kept_bytes_max = std::max(kept_bytes_max, unit_bytes);
  }
  // Each thread keeps the steps of its unit, or all units theirs, where that stays in threads' caches.
  const size_t threads = num_threads();
  if (by_units) {
    kept_bytes = kept_bytes_max * threads;
  } else if (kept_bytes > kKeptBytesMax * threads) {
    kept_bytes = 0;
  }
  const size_t masses_bytes = with_tail * RangeMasses(group) * sizeof(int64_t);
  std::byte* const scratch =
      codes_scratch_.Get(wave_bytes + masses_bytes + kept_bytes + sizes.thread_bytes * threads);
  auto* masses = reinterpret_cast<int64_t*>(scratch + wave_bytes);
  auto* const kept = reinterpret_cast<int16_t*>(scratch + wave_bytes + masses_bytes);
  const auto scratch_of = [&](int thread) {
    return sizes.Place(scratch + wave_bytes + masses_bytes + kept_bytes, thread);
  };
  std::vector<Unit> units(wave.size());
  std::vector<std::pair<Unit*, Range*>> ranges;
  std::byte* free = scratch;
  int16_t* free_kept = kept;
  for (size_t i = 0; i < units.size(); ++i) {
    Unit& unit = units[i];
    unit.index = wave[i].first;
    unit.query = &args.queries[unit.index];
    const TokenRange mid = unit.query->mid;
    const auto& fields = packed.head(wave[i].second).fields;
    unit.call = {args.codes,     args.code_layout,
                 wave[i].second, unit.query->block_table.data(),
                 fields.data(),  static_cast<int32_t>(fields.size()),
                 group};
    unit.call.last = mid.last;
    unit.base = mid.first / kCodeTileTokens * kCodeTileTokens;
    unit.candidates = reinterpret_cast<uint32_t*>(free);
    unit.distances = reinterpret_cast<uint16_t*>(unit.candidates + UnitPlaces(mid));
    unit.cells = reinterpret_cast<uint8_t*>(unit.distances + UnitPlaces(mid));
    free += UnitBytes(mid);
    unit.pieces = PieceOf(unit, mid.last - 1) + 1;
    unit.peaks.resize(size_t{1} * unit.pieces * group);
    unit.sums.resize(size_t{1} * unit.pieces * group);
    if (!by_units && kept_bytes > 0) {
      unit.kept = free_kept;
      free_kept += unit.pieces * StepsOfPiece(group);
    }
    unit.ranges.reserve(NumRanges(mid, range_tokens));
    for (int32_t first = mid.first, last = first; first < mid.last; first = last) {
      last = static_cast<int32_t>(
          std::min<int64_t>(mid.last, (int64_t{first} / range_tokens + 1) * range_tokens));
      unit.ranges.push_back({{first, last}});
      if (has_tail(unit.call.head)) {
        unit.ranges.back().masses = masses;
        masses += RangeMasses(group);
      }
    }
    for (Range& range : unit.ranges) ranges.emplace_back(&unit, &range);
  }
  const auto num_units = static_cast<int64_t>(units.size());
  const auto num_ranges = static_cast<int64_t>(ranges.size());
  const auto first_head = [&](const Unit& unit) { return int64_t{unit.call.head} * group; };
  const auto cell_bits = [&](const Unit& unit) -> const std::vector<uint8_t>& {
    return packed.weights().heads[unit.call.head].cell_bits;
  };
  const auto prepare = [&](Unit& unit) {
    PrepareUnit(ops_, packed, unit.call.head, q.f32(unit.query->row) + first_head(unit) * d, scale2,
                unit);
  };
  const auto combine = [&](Unit& unit) {
    Combine(ops_, args.anchor_masses + unit.index * num_heads + first_head(unit), unit);
  };
  const auto take = [&](Unit& unit, int thread) {
    int32_t* tokens = args.chosen.chosen(unit.index, unit.call.head);
    const int32_t taken = Take(ops_, unit, tokens);
    args.chosen.count(unit.index, unit.call.head) = taken;
    const int64_t first = unit.index * num_heads + first_head(unit);
    for (int32_t g = 0; g < group && args.scales != nullptr; ++g) {
      args.scales->references[first + g] = ReferenceOf(unit.heads[g], unit.lines[g]);
      args.scales->inverses[first + g] = unit.heads[g].inverse;
    }
    if (tail == nullptr) return;
    for (int32_t g = 0; g < group; ++g) {
      tail->references[first + g] = ReferenceOf(unit.heads[g], unit.lines[g]);
      tail->deltas[first + g] = unit.deltas[g];
    }
    int64_t* const of_unit = tail->masses + first * kTransformCells;
    std::fill_n(of_unit, int64_t{group} * kTransformCells, 0);
    if (!has_tail(unit.call.head)) return;
    for (const Range& range : unit.ranges) SumMasses(range.masses, group, 1, of_unit);
    if (tail->of_all) return;
    TakeMasses(ops_, cell_bits(unit), unit, {tokens, static_cast<size_t>(taken)}, of_unit,
               scratch_of(thread));
  };
  if (by_units) {
    threads_.ParallelFor(num_units, [&](int64_t i, int thread) {
      Unit& unit = units[i];
      const PieceScratch of_thread = scratch_of(thread);
      if (unit.pieces * StepsOfPiece(group) * sizeof(int16_t) <= kKeptBytesMax) {
        unit.kept = kept + thread * (kept_bytes_max / sizeof(int16_t));
      }
      prepare(unit);
      for (const Range& range : unit.ranges) {
        SumRange(ops_, cell_bits(unit), unit, range, of_thread.steps);
      }
      combine(unit);
      for (const Range& range : unit.ranges) WeighRange(ops_, unit, range, of_thread);
      take(unit, thread);
    });
    return;
  }
  threads_.ParallelFor(num_units, [&](int64_t i, int) { prepare(units[i]); });
  threads_.ParallelFor(num_ranges, [&](int64_t i, int thread) {
    const auto& [unit, range] = ranges[i];
    SumRange(ops_, cell_bits(*unit), *unit, *range, scratch_of(thread).steps);
  });
  threads_.ParallelFor(num_units, [&](int64_t i, int) { combine(units[i]); });
  threads_.ParallelFor(num_ranges, [&](int64_t i, int thread) {
    const auto& [unit, range] = ranges[i];
    WeighRange(ops_, *unit, *range, scratch_of(thread));
  });
  threads_.ParallelFor(num_units, [&](int64_t i, int thread) { take(units[i], thread); });
}

void CpuBackend::RerankByMass(const RerankByMassArgs& args) {
  const Tensor& q = args.q;
  const CpuTransformCode &packed = Packed(args.transform), &residual = Packed(args.residual);
  const int32_t d = packed.weights().head_dim, kv_heads = args.code_layout.kv_heads;
  const auto heads = static_cast<int32_t>(q.cols / d);
  const int32_t group = heads / kv_heads;
  WINNOW_CHECK(args.candidates.kv_heads == kv_heads && args.kept.kv_heads == kv_heads &&
               heads == group * kv_heads);
  WINNOW_CHECK(args.code_layout.bits == packed.bits() &&
               args.residual_layout.bits == residual.bits() &&
               args.residual_layout.kv_heads == kv_heads &&
               args.residual_layout.block_tokens == args.code_layout.block_tokens);
  const auto num_units = static_cast<int64_t>(args.queries.size()) * kv_heads;
  int32_t most = 0;
  for (int64_t i = 0; i < num_units; ++i) {
    const int32_t count = args.candidates.count(i / kv_heads, static_cast<int32_t>(i % kv_heads));
    WINNOW_CHECK(count >= 0 && count <= args.candidates.capacity);
    most = std::max(most, count);
  }
  const RerankScratch sizes(most, group, packed.bits() / 32, residual.bits() / 32);
  std::byte* const scratch = codes_scratch_.Get(sizes.thread_bytes * num_threads());
  threads_.ParallelFor(num_units, [&](int64_t i, int thread) {
    const int64_t index = i / kv_heads;
    const auto kv_head = static_cast<int32_t>(i % kv_heads);
    const RetrievalQuery& query = args.queries[index];
    const std::span<const int32_t> candidates(
        args.candidates.chosen(index, kv_head),
        static_cast<size_t>(args.candidates.count(index, kv_head)));
    if (candidates.empty()) {
      args.kept.count(index, kv_head) = 0;
      return;
    }
    WINNOW_CHECK(candidates.front() >= query.mid.first && candidates.back() < query.mid.last);
    const int64_t first_head = int64_t{kv_head} * group;
    const auto prepare = [&](const CpuTransformCode& code, const void* codes,
                             const CodeLayout& layout) {
      Unit unit;
      const auto& fields = code.head(kv_head).fields;
      unit.call = {codes,         layout,
                   kv_head,       query.block_table.data(),
                   fields.data(), static_cast<int32_t>(fields.size()),
                   group};
      PrepareUnit(ops_, code, kv_head, q.f32(query.row) + first_head * d,
                  args.scale * kTransformLog2E, unit);
      return unit;
    };
    const Unit first = prepare(packed, args.codes, args.code_layout);
    const Unit second = prepare(residual, args.residual_codes, args.residual_layout);
    const int64_t scales = index * heads + first_head;
    std::byte* const of_thread = scratch + sizes.thread_bytes * thread;
    RerankUnit(ops_, first, second, args.scales.references + scales, args.scales.inverses + scales,
               candidates, sizes, of_thread);
    args.kept.count(index, kv_head) =
        KeepNearest(query, reinterpret_cast<const uint16_t*>(of_thread + sizes.distances),
                    candidates, args.kept.chosen(index, kv_head));
  });
}

void CpuBackend::TakeFromTail(const TakeFromTailArgs& args) {
  const Tensor& q = args.q;
  const std::span<const RetrievalQuery> queries = args.queries;
  const CodeLayout& code_layout = args.code_layout;
  const Selection& read = args.read;
  const TailMasses& tail = args.tail;
  const CpuTransformCode& packed = Packed(args.transform);
  const int32_t d = packed.weights().head_dim, kv_heads = code_layout.kv_heads;
  const auto heads = static_cast<int32_t>(q.cols / d);
  const int32_t group = heads / kv_heads;
  WINNOW_CHECK(read.kv_heads == kv_heads && heads == group * kv_heads && tail.heads == heads &&
               code_layout.bits == packed.bits());
  const MassScratchSizes sizes(group, code_layout.bits);
  std::byte* const scratch = codes_scratch_.Get(sizes.thread_bytes * num_threads());
  const auto num_units = static_cast<int64_t>(queries.size()) * kv_heads;
  threads_.ParallelFor(num_units, [&](int64_t i, int thread) {
    Unit unit;
    unit.index = i / kv_heads;
    unit.query = &queries[unit.index];
    const auto kv_head = static_cast<int32_t>(i % kv_heads);
    const TransformCodeHead& weights = packed.weights().heads[kv_head];
    const int32_t count = read.count(unit.index, kv_head);
    WINNOW_CHECK(count >= 0 && count <= read.capacity);
    if (count == 0 || !weights.tail) return;
    const auto& fields = packed.head(kv_head).fields;
    unit.call = {args.codes,    code_layout,
                 kv_head,       unit.query->block_table.data(),
                 fields.data(), static_cast<int32_t>(fields.size()),
                 group};
    const int64_t first = unit.index * heads + int64_t{kv_head} * group;
    PrepareUnit(ops_, packed, kv_head, q.f32(unit.query->row) + int64_t{kv_head} * group * d,
                args.scale * kTransformLog2E, unit);
    for (int32_t g = 0; g < group; ++g) {
      unit.heads[g].reference = StepsOfReference(tail.references[first + g], unit.lines[g]);
    }
    const std::span<const int32_t> tokens(read.chosen(unit.index, kv_head),
                                          static_cast<size_t>(count));
    WINNOW_CHECK(tokens.front() >= unit.query->mid.first && tokens.back() < unit.query->mid.last);
    TakeMasses(ops_, weights.cell_bits, unit, tokens, tail.masses + first * kTransformCells,
               sizes.Place(scratch, thread));
  });
}

void CpuBackend::ExtendCellTables(std::span<const CellTableExtension> extensions, const void* pool,
                                  const KvLayout& layout, const PackedTransformCode& transform,
                                  const void* codes, const CodeLayout& code_layout) {
  const CpuTransformCode& packed = Packed(transform);
  const int32_t d = layout.head_dim;
  constexpr int64_t kRows = kTransformCells + 1;
  WINNOW_CHECK(packed.weights().head_dim == d && d <= 256);
  const auto items = static_cast<int64_t>(extensions.size()) * layout.kv_heads;
  threads_.ParallelFor(items, [&](int64_t i, int) {
    const CellTableExtension& extension = extensions[i / layout.kv_heads];
    const auto head = static_cast<int32_t>(i % layout.kv_heads);
    const TransformCodeHead& weights = packed.weights().heads[head];
    const Summary& table = *extension.table;
    float* const sums = table.data + head * kRows * d;
    float* const counts = table.data + (layout.kv_heads * d + head) * kRows;
    if (table.tokens.size() == 0) {
      std::fill_n(sums, kRows * d, 0.0f);
      std::fill_n(counts, kRows, 0.0f);
    }
    MassCall call{codes, code_layout, head, extension.index_table.data()};
    float value[256], of_block[256] = {};
    float block_count = 0;
    uint8_t cells[kCodeTileTokens];
    int32_t tile = -1;
    for (int32_t token = table.tokens.last; token < extension.last; ++token) {
      if (token / kCodeTileTokens != tile) {
        tile = token / kCodeTileTokens;
        ops_.mass_cells(call, weights.cell_bits.data(),
                        static_cast<int32_t>(weights.cell_bits.size()), token, token + 1, cells);
      }
      const int32_t cell = cells[token % kCodeTileTokens];
      const std::byte* row = static_cast<const std::byte*>(pool) +
                             layout.RowOffset(extension.block_table[token / layout.block_tokens],
                                              head, token % layout.block_tokens);
      ops_.read_kv_row(row, d, layout.dtype, nullptr, value);
      float* of_cell = sums + int64_t{cell} * d;
      for (int32_t c = 0; c < d; ++c) {
        of_cell[c] += value[c];
        of_block[c] += value[c];
      }
      counts[cell] += 1;
      block_count += 1;
      if ((token + 1) % kCellRefreshTokens != 0) continue;
      float* all = sums + int64_t{kTransformCells} * d;
      for (int32_t c = 0; c < d; ++c) all[c] += of_block[c];
      counts[kTransformCells] += block_count;
      std::fill_n(of_block, d, 0.0f);
      block_count = 0;
    }
  });
  for (const CellTableExtension& extension : extensions) {
    TokenRange& tokens = extension.table->tokens;
    tokens.last = std::max(tokens.last, extension.last);
  }
}

// o = sum of weight_c sum_c + (sum of weight_c) mean of all, weight_c = M_c / 2^30 / (count_c + 1).
void CpuBackend::MergeTails(std::span<const RetrievalQuery> queries,
                            std::span<const float* const> tables,
                            const PackedTransformCode& transform, const TailMasses& tail,
                            int32_t head_dim, float* states) {
  const CpuTransformCode& packed = Packed(transform);
  const int32_t d = head_dim, kv_heads = static_cast<int32_t>(packed.weights().heads.size());
  const int32_t group = tail.heads / kv_heads;
  constexpr int64_t kRows = kTransformCells + 1;
  const int64_t state_floats = AttentionStateFloats(d);
  WINNOW_CHECK(tables.size() == queries.size() && d <= 256);
  threads_.ParallelFor(static_cast<int64_t>(queries.size()) * kv_heads, [&](int64_t i, int) {
    const int64_t query = i / kv_heads;
    const auto kv_head = static_cast<int32_t>(i % kv_heads);
    if (!packed.weights().heads[kv_head].tail) return;
    const float* sums = tables[query] + kv_head * kRows * d;
    const float* counts = tables[query] + (kv_heads * d + kv_head) * kRows;
    const float* all = sums + int64_t{kTransformCells} * d;
    const float all_count = std::max(1.0f, counts[kTransformCells]);
    for (int32_t g = 0; g < group; ++g) {
      const int64_t at = query * tail.heads + int64_t{kv_head} * group + g;
      const int64_t* masses = tail.masses + at * kTransformCells;
      float weights[kTransformCells], part[256 + 2] = {};
      int64_t total = 0;
      float weight_sum = 0;
      for (int32_t cell = 0; cell < kTransformCells; ++cell) {
        total += masses[cell];
        weights[cell] = static_cast<float>(masses[cell]) * 0x1p-30f / (counts[cell] + 1);
        weight_sum += weights[cell];
      }
      if (total == 0) continue;
      ops_.add_outer({weights, 1, sums, kTransformCells, 1, d, part});
      for (int32_t c = 0; c < d; ++c) part[c] += weight_sum * (all[c] / all_count);
      float* const state = states + at * state_floats;
      part[d] = tail.references[at] + tail.deltas[at];
      if (state[d + 1] > 0) {
        part[d] = std::min(part[d], state[d] + std::log2(state[d + 1]) + kTailClampLog2);
      }
      part[d + 1] = static_cast<float>(total) * 0x1p-30f;
      MergeAttentionState(state, part, d);
    }
  });
}

void CpuBackend::MergeStates(const float* parts, int64_t count, int32_t head_dim, float* states) {
  const int64_t floats = AttentionStateFloats(head_dim);
  for (int64_t i = 0; i < count; ++i) {
    MergeAttentionState(states + i * floats, parts + i * floats, head_dim);
  }
}

}  // namespace winnow::kernels
