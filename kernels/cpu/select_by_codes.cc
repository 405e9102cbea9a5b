// SelectByCodes of the CPU backend. A unit is one query and KV head. Four loops over threads:
//
//   guess   for each unit a bound that is probably above the k-th smallest distance, from a sample
//   scan    for each range of its tokens: the candidates, tokens not beyond the bound, and how many
//           there are at each distance
//   share   for each unit the threshold, and what each range gives to the selection
//   take    for each range, from its candidates
//
// A bound that turns out to leave fewer than k candidates is dropped and the unit scanned again
// without one, so a guess shows in the time alone. Ranges are cut at fixed positions and only
// counts cross them: the result does not depend on which thread did what.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/hamming_select.h"

namespace winnow::kernels {
namespace {

constexpr int32_t kRangeTokens = 16384;  // slots of a range fit in the upper half of a candidate
constexpr int32_t kPieceTokens = 4096;   // whose distances stay in the nearest cache
// Fewer than kSampledTokensMin tokens are not worth a guess.
constexpr int32_t kSampledTokensMin = 1024, kSampleTokensMin = 128, kSampleTokensMax = 1024;
// Units whose candidates and counts fit are selected together.
constexpr size_t kWaveBytes = size_t{64} << 20;

struct Range {
  TokenRange tokens;
  uint32_t* candidates = nullptr;
  uint32_t* counts = nullptr;  // of candidates at each distance up to the unit's bound
  int32_t num_candidates = 0;
  int32_t skip_ties = 0;  // of the candidates at the threshold, the first so many are not taken
  int32_t count = 0;      // taken
  int32_t offset = 0;     // in the unit's selection
};

struct Unit {
  const RetrievalQuery* query = nullptr;
  int64_t index = 0;  // of the query
  ScanCall call;
  CodePattern pattern;
  int32_t bound = 0;
  int32_t threshold = 0;
  std::vector<Range> ranges;
};

constexpr size_t RoundUp64(size_t size_bytes) { return (size_bytes + 63) / 64 * 64; }

// All tokens of a range may be candidates, and FindCandidates writes up to four more.
size_t CandidateBytes(int32_t tokens) { return RoundUp64((tokens + size_t{4}) * sizeof(uint32_t)); }
size_t CountBytes(int32_t bins) { return RoundUp64(bins * sizeof(uint32_t)); }
size_t DistanceBytes() { return RoundUp64((kPieceTokens + 64) * sizeof(uint16_t)); }

int32_t NumRanges(TokenRange mid) {
  return (mid.last - 1) / kRangeTokens - mid.first / kRangeTokens + 1;
}
TokenRange RangeTokens(TokenRange mid, int32_t range) {
  const int64_t first = (int64_t{mid.first / kRangeTokens} + range) * kRangeTokens;
  return {static_cast<int32_t>(std::max<int64_t>(mid.first, first)),
          static_cast<int32_t>(std::min<int64_t>(mid.last, first + kRangeTokens))};
}
size_t UnitBytes(TokenRange mid, int32_t bins) {
  return NumRanges(mid) * (CandidateBytes(kRangeTokens) + CountBytes(bins));
}

// The smallest distance that at least k of the counted are at or below; `bound` if fewer are.
int32_t KthDistance(const uint32_t* counts, int32_t bound, int64_t k) {
  int64_t sum = 0;
  for (int32_t distance = 0; distance < bound; ++distance) {
    sum += counts[distance];
    if (sum >= k) return distance;
  }
  return bound;
}

// A bound that leaves few more than k candidates and hardly ever fewer: the distance of the rank in
// a sample that is three standard deviations above the expected one. The sample's tokens are far
// from each other, because those that are near in the text are near in distance too.
// `sample` [kSampleTokensMax] codes, `distances` and `counts` [bins]: scratch.
int32_t GuessBound(const CpuOps& ops, const Unit& unit, int32_t bins, std::byte* sample,
                   uint16_t* distances, uint32_t* counts) {
  const TokenRange mid = unit.query->mid;
  const CodeLayout& layout = unit.call.layout;
  const int64_t first_block = (mid.first + layout.block_tokens - 1) / layout.block_tokens;
  const int64_t num_blocks = mid.last / layout.block_tokens - first_block;
  if (mid.size() < kSampledTokensMin || num_blocks < 1) return bins - 1;
  const int32_t tokens = std::clamp(mid.size() / 128, kSampleTokensMin, kSampleTokensMax);
  const std::byte* codes =
      static_cast<const std::byte*>(unit.call.codes) + unit.call.head * layout.HeadBytes();
  const int64_t step = (num_blocks << 32) / tokens;  // in blocks, as is `at`
  uint32_t random = 1;
  int64_t at = first_block << 32;
  for (int32_t i = 0; i < tokens; ++i, at += step) {
    random = random * 1664525u + 1013904223u;
    const uint32_t offset = (random >> 16) * static_cast<uint32_t>(layout.block_tokens) >> 16;
    const int32_t block = unit.call.block_table[at >> 32];
    std::memcpy(sample + i * layout.CodeBytes(),
                codes + block * layout.BlockBytes() + offset * layout.CodeBytes(),
                layout.CodeBytes());
  }
  const int32_t only_block = 0;
  const ScanCall call = {sample, {1, tokens, layout.bits}, unit.call.planes, 0, &only_block};
  ops.scan_codes(call, unit.pattern, 0, tokens, distances);
  std::fill(counts, counts + bins, 0);
  for (int32_t i = 0; i < tokens; ++i) ++counts[distances[i]];
  const double expected = static_cast<double>(unit.query->k) * tokens / mid.size();
  return KthDistance(counts, bins - 1,
                     static_cast<int64_t>(expected + 3 * std::sqrt(expected) + 2));
}

void ScanRange(const CpuOps& ops, const Unit& unit, uint16_t* distances, Range& range) {
  range.num_candidates = 0;
  for (int32_t first = range.tokens.first, last = first; first < range.tokens.last; first = last) {
    last = std::min(range.tokens.last, (first / kPieceTokens + 1) * kPieceTokens);
    ops.scan_codes(unit.call, unit.pattern, first, last, distances);
    range.num_candidates += ops.find_candidates(distances, last - first, unit.bound,
                                                static_cast<uint32_t>(first - range.tokens.first),
                                                range.candidates + range.num_candidates);
  }
  std::fill(range.counts, range.counts + unit.bound + 1, 0);
  for (int32_t i = 0; i < range.num_candidates; ++i) ++range.counts[range.candidates[i] & 0xffff];
}

// `total` [bins]: scratch.
void ShareOut(const CpuOps& ops, int32_t bins, uint16_t* distances, uint32_t* total, Unit& unit) {
  const int32_t k = unit.query->k;
  int64_t candidates = 0;
  for (const Range& range : unit.ranges) candidates += range.num_candidates;
  if (candidates < k) {
    unit.bound = bins - 1;
    for (Range& range : unit.ranges) ScanRange(ops, unit, distances, range);
  }
  std::fill(total, total + unit.bound + 1, 0);
  for (const Range& range : unit.ranges) {
    for (int32_t i = 0; i <= unit.bound; ++i) total[i] += range.counts[i];
  }
  unit.threshold = KthDistance(total, unit.bound, k);
  int64_t ties = k;
  for (int32_t i = 0; i < unit.threshold; ++i) ties -= total[i];
  // Ties go to the latest tokens: ranges get their share of them from the last one on.
  for (size_t i = unit.ranges.size(); i-- > 0;) {
    Range& range = unit.ranges[i];
    const int64_t here = range.counts[unit.threshold];
    const int64_t taken = std::min(ties, here);
    int64_t below = 0;
    for (int32_t j = 0; j < unit.threshold; ++j) below += range.counts[j];
    range.skip_ties = static_cast<int32_t>(here - taken);
    range.count = static_cast<int32_t>(below + taken);
    ties -= taken;
  }
  int32_t offset = 0;
  for (Range& range : unit.ranges) {
    range.offset = offset;
    offset += range.count;
  }
  WINNOW_CHECK(ties == 0 && offset == k);
}

// Writes each candidate where the next token goes and then moves on or not, which needs no branch.
void TakeTokens(const Range& range, uint32_t threshold, int32_t* tokens) {
  const uint32_t* candidates = range.candidates;
  const int32_t first = range.tokens.first, skip_ties = range.skip_ties;
  int32_t* const end = tokens + range.count;
  for (int32_t ties = 0; tokens != end; ++candidates) {
    const uint32_t distance = *candidates & 0xffff;
    *tokens = first + static_cast<int32_t>(*candidates >> 16);
    ties += static_cast<int32_t>(distance == threshold);
    tokens +=
        static_cast<int32_t>(distance < threshold) |
        (static_cast<int32_t>(distance == threshold) & static_cast<int32_t>(ties > skip_ties));
  }
}

}  // namespace

void CpuBackend::SelectByCodes(std::span<const RetrievalQuery> queries, const void* query_codes,
                               int32_t group, const void* codes, const CodeLayout& code_layout,
                               const Selection& chosen) {
  const int32_t bits = code_layout.bits;
  WINNOW_CHECK(group >= 1 && group <= kMaxCodeGroup);
  WINNOW_CHECK(bits >= 32 && bits <= kMaxCodeBits && (bits & (bits - 1)) == 0);
  WINNOW_CHECK(chosen.kv_heads == code_layout.kv_heads);
  // Units that need a scan, by head and then query: neighbours read the same codes.
  std::vector<std::pair<int64_t, int32_t>> units;
  for (int32_t head = 0; head < code_layout.kv_heads; ++head) {
    for (int64_t i = 0; i < static_cast<int64_t>(queries.size()); ++i) {
      const RetrievalQuery& query = queries[i];
      WINNOW_CHECK(query.mid.first >= 0 && query.mid.size() >= 0);
      WINNOW_CHECK(query.k >= 0 && query.k <= query.mid.size() && query.k <= chosen.capacity);
      WINNOW_CHECK(query.mid.last <=
                   static_cast<int64_t>(query.block_table.size()) * code_layout.block_tokens);
      chosen.count(i, head) = query.k;
      if (query.k == query.mid.size()) {
        int32_t* tokens = chosen.chosen(i, head);
        for (int32_t j = 0; j < query.k; ++j) tokens[j] = query.mid.first + j;
      } else if (query.k > 0) {
        units.emplace_back(i, head);
      }
    }
  }
  const int32_t bins = MaxCodeDistance(group, bits) + 1;
  size_t last = 0;
  for (size_t first = 0; first < units.size(); first = last) {
    size_t wave_bytes = 0;
    for (; last < units.size(); ++last) {
      const size_t unit_bytes = UnitBytes(queries[units[last].first].mid, bins);
      if (last > first && wave_bytes + unit_bytes > kWaveBytes) break;
      wave_bytes += unit_bytes;
    }
    SelectWave(queries, {units.data() + first, last - first}, wave_bytes, query_codes, group, codes,
               code_layout, chosen);
  }
}

void CpuBackend::SelectWave(std::span<const RetrievalQuery> queries,
                            std::span<const std::pair<int64_t, int32_t>> wave, size_t wave_bytes,
                            const void* query_codes, int32_t group, const void* codes,
                            const CodeLayout& code_layout, const Selection& chosen) {
  const int32_t bins = MaxCodeDistance(group, code_layout.bits) + 1;
  const size_t code_bytes = code_layout.CodeBytes();
  const size_t sample_bytes = kSampleTokensMax * code_bytes;
  const size_t thread_bytes = sample_bytes + DistanceBytes() + CountBytes(bins);
  std::byte* scratch = codes_scratch_.Get(wave_bytes + thread_bytes * num_threads());
  auto sample_of = [&](int thread) { return scratch + wave_bytes + thread_bytes * thread; };
  auto distances_of = [&](int thread) {
    return reinterpret_cast<uint16_t*>(sample_of(thread) + sample_bytes);
  };
  auto counts_of = [&](int thread) {
    return reinterpret_cast<uint32_t*>(sample_of(thread) + sample_bytes + DistanceBytes());
  };
  std::vector<Unit> units(wave.size());
  std::byte* free = scratch;
  size_t ranges_max = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    Unit& unit = units[i];
    unit.index = wave[i].first;
    unit.query = &queries[unit.index];
    unit.call = {codes, code_layout, CodePlanes(group), wave[i].second,
                 unit.query->block_table.data()};
    unit.ranges.resize(NumRanges(unit.query->mid));
    ranges_max = std::max(ranges_max, unit.ranges.size());
    for (size_t r = 0; r < unit.ranges.size(); ++r) {
      unit.ranges[r].tokens = RangeTokens(unit.query->mid, static_cast<int32_t>(r));
      unit.ranges[r].candidates = reinterpret_cast<uint32_t*>(free);
      free += CandidateBytes(kRangeTokens);
      unit.ranges[r].counts = reinterpret_cast<uint32_t*>(free);
      free += CountBytes(bins);
    }
  }
  // Ranges of the same tokens follow each other.
  std::vector<std::pair<Unit*, Range*>> ranges;
  for (size_t r = 0; r < ranges_max; ++r) {
    for (Unit& unit : units) {
      if (r < unit.ranges.size()) ranges.emplace_back(&unit, &unit.ranges[r]);
    }
  }
  const int64_t num_units = static_cast<int64_t>(units.size());
  const int64_t num_ranges = static_cast<int64_t>(ranges.size());
  threads_.ParallelFor(num_units, [&](int64_t i, int thread) {
    Unit& unit = units[i];
    const int64_t head = unit.index * code_layout.kv_heads + unit.call.head;
    MakeCodePattern(static_cast<const std::byte*>(query_codes) + head * group * code_bytes, group,
                    code_layout.bits, &unit.pattern);
    unit.bound =
        GuessBound(ops_, unit, bins, sample_of(thread), distances_of(thread), counts_of(thread));
  });
  threads_.ParallelFor(num_ranges, [&](int64_t i, int thread) {
    ScanRange(ops_, *ranges[i].first, distances_of(thread), *ranges[i].second);
  });
  threads_.ParallelFor(num_units, [&](int64_t i, int thread) {
    ShareOut(ops_, bins, distances_of(thread), counts_of(thread), units[i]);
  });
  threads_.ParallelFor(num_ranges, [&](int64_t i, int) {
    const auto& [unit, range] = ranges[i];
    TakeTokens(*range, static_cast<uint32_t>(unit->threshold),
               chosen.chosen(unit->index, unit->call.head) + range->offset);
  });
}

}  // namespace winnow::kernels
