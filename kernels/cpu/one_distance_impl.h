// The distance of one code (kernels/hamming_select.h), in plain C++: all that bits_scalar.h has,
// and for the others what a vector's worth of codes leaves over.
#ifndef WINNOW_KERNELS_CPU_ONE_DISTANCE_IMPL_H_
#define WINNOW_KERNELS_CPU_ONE_DISTANCE_IMPL_H_

#include <cstdint>

#include "kernels/hamming_select.h"

namespace winnow::kernels {
namespace {

template <int kCodeBytes, int kPlanes>
inline uint16_t OneDistance(const uint8_t* code, const CodePattern& pattern) {
  uint32_t distance = 0;
  for (int at = 0; at < kCodeBytes; at += 4) {
    uint32_t differing = 0, majority = 0;
    __builtin_memcpy(&differing, code + at, 4);
    __builtin_memcpy(&majority, pattern.majority + at, 4);
    differing ^= majority;
    for (int p = 0; p < kPlanes; ++p) {
      uint32_t plane = 0;
      __builtin_memcpy(&plane, pattern.planes[p] + at, 4);
      distance += static_cast<uint32_t>(__builtin_popcount(differing & plane)) << p;
    }
  }
  return static_cast<uint16_t>(distance);
}

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_ONE_DISTANCE_IMPL_H_
