// Random numbers without state: the same seed and index give the same number on every machine.
#ifndef WINNOW_ENGINE_BASE_COUNTER_RANDOM_H_
#define WINNOW_ENGINE_BASE_COUNTER_RANDOM_H_

#include <cstdint>

namespace winnow::engine {

// Philox4x32-10 (Salmon et al., SC 2011) with `seed` as its key and `index` as its counter.
uint64_t CounterBits(uint64_t seed, uint64_t index);
// Uniform in [0, 1): their first 53.
double CounterRandom(uint64_t seed, uint64_t index);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_BASE_COUNTER_RANDOM_H_
