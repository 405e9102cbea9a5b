// See kernels/hamming_select.h. Compiled by hamming_select_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/one_distance_impl.h"
#include "kernels/cpu/ops.h"
#include "kernels/hamming_select.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

// A prefetch runs this far ahead of the scan: blocks lie anywhere, and the processor cannot guess
// where the next one is.
constexpr int32_t kPrefetchBlocks = 2;

// Codes [0, count) of one block. Reads ahead at `next`, line by line.
template <int kCodeBytes, int kPlanes>
inline void BlockDistances(const uint8_t* codes, int32_t count, const uint8_t* next,
                           const CodePattern& pattern, uint16_t* distances) {
  using Scanner = Bits::Scanner<kCodeBytes, kPlanes>;
  constexpr int kAtOnce = Scanner::kCodesAtOnce;
  const Scanner scanner(pattern);
  int32_t i = 0;
  for (; i + kAtOnce <= count; i += kAtOnce) {
    for (int line = 0; line < kAtOnce * kCodeBytes; line += 64) {
      __builtin_prefetch(next + int64_t{i} * kCodeBytes + line);
    }
    scanner.Distances(codes + int64_t{i} * kCodeBytes, distances + i);
  }
  for (; i < count; ++i) {
    distances[i] = OneDistance<kCodeBytes, kPlanes>(codes + int64_t{i} * kCodeBytes, pattern);
  }
}

template <int kCodeBytes, int kPlanes>
void Scan(const ScanCall& call, const CodePattern& pattern, int32_t first, int32_t last,
          uint16_t* distances) {
  const int32_t block_tokens = call.layout.block_tokens;
  const int64_t head_bytes = int64_t{kCodeBytes} * block_tokens;
  const int64_t block_bytes = head_bytes * call.layout.kv_heads;
  const uint8_t* head_codes = static_cast<const uint8_t*>(call.codes) + head_bytes * call.head;
  const int32_t last_block = (last - 1) / block_tokens;
  int32_t block = first / block_tokens;
  int32_t offset = first - block * block_tokens;
  for (int32_t left = last - first; left > 0; ++block) {
    const int32_t room = block_tokens - offset;
    const int32_t count = left < room ? left : room;
    const int32_t ahead =
        block + kPrefetchBlocks < last_block ? block + kPrefetchBlocks : last_block;
    const int64_t at = int64_t{offset} * kCodeBytes;
    BlockDistances<kCodeBytes, kPlanes>(
        head_codes + call.block_table[block] * block_bytes + at, count,
        head_codes + call.block_table[ahead] * block_bytes + at, pattern, distances);
    left -= count;
    distances += count;
    offset = 0;
  }
}

template <int kCodeBytes>
inline void ScanPlanes(const ScanCall& call, const CodePattern& pattern, int32_t first,
                       int32_t last, uint16_t* distances) {
  switch (call.planes) {
    case 1:
      return Scan<kCodeBytes, 1>(call, pattern, first, last, distances);
    case 2:
      return Scan<kCodeBytes, 2>(call, pattern, first, last, distances);
    case 3:
      return Scan<kCodeBytes, 3>(call, pattern, first, last, distances);
    default:
      return Scan<kCodeBytes, 4>(call, pattern, first, last, distances);
  }
}

// Bit i: distances[i] <= bound, for i < n and i < 64.
inline uint64_t AtMost(const uint16_t* distances, int32_t n, int32_t bound) {
  const uint64_t mask = Bits::AtMost64(distances, static_cast<uint16_t>(bound));
  return n >= 64 ? mask : mask & ((uint64_t{1} << n) - 1);
}

}  // namespace

void ScanCodes(const ScanCall& call, const CodePattern& pattern, int32_t first, int32_t last,
               uint16_t* distances) {
  switch (call.layout.bits) {
    case 32:
      return ScanPlanes<4>(call, pattern, first, last, distances);
    case 64:
      return ScanPlanes<8>(call, pattern, first, last, distances);
    case 128:
      return ScanPlanes<16>(call, pattern, first, last, distances);
    case 256:
      return ScanPlanes<32>(call, pattern, first, last, distances);
    case 512:
      return ScanPlanes<64>(call, pattern, first, last, distances);
    default:
      return ScanPlanes<128>(call, pattern, first, last, distances);
  }
}

// Most masks have few bits, and how many cannot be predicted: four are written at a time, also
// where there are fewer, so that a branch goes wrong only where there are more.
int32_t FindCandidates(const uint16_t* distances, int32_t n, int32_t bound, uint32_t first_slot,
                       uint32_t* candidates) {
  int64_t found = 0;
  for (int32_t first = 0; first < n; first += 64) {
    const uint16_t* values = distances + first;
    const uint32_t slots = (first_slot + static_cast<uint32_t>(first)) << 16;
    uint64_t mask = AtMost(values, n - first, bound);
    const int64_t count = __builtin_popcountll(mask);
    // Volatile, or GCC gathers four in a vector before it stores them, which takes longer.
    volatile uint32_t* to = candidates + found;
    int64_t i = 0;
    do {
      for (int64_t j = 0; j < 4; ++j) {
        const uint64_t bit = Bits::LowestBit(mask);
        to[i + j] = slots + (static_cast<uint32_t>(bit) << 16) + values[bit];
        mask &= mask - 1;
      }
      i += 4;
    } while (i < count);
    found += count;
  }
  return static_cast<int32_t>(found);
}

}  // namespace winnow::kernels::WINNOW_ISA
