#include "engine/base/counter_random.h"

#include <array>

namespace winnow::engine {

uint64_t CounterBits(uint64_t seed, uint64_t index) {
  std::array<uint32_t, 4> counter = {static_cast<uint32_t>(index),
                                     static_cast<uint32_t>(index >> 32), 0, 0};
  auto key0 = static_cast<uint32_t>(seed);
  auto key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {
        static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(product1),
        static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(product0)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return uint64_t{counter[1]} << 32 | counter[0];
}

double CounterRandom(uint64_t seed, uint64_t index) {
  return static_cast<double>(CounterBits(seed, index) >> 11) * 0x1p-53;
}

}  // namespace winnow::engine
