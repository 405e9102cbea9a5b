// The processor's own matrix tiles, for amx_tiles_impl.h: for files that end in _amx.cc.
#ifndef WINNOW_KERNELS_CPU_AMX_TILES_H_
#define WINNOW_KERNELS_CPU_AMX_TILES_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/amx_tiles_impl.h"

namespace winnow::kernels {
namespace {

// In assembly, as the intrinsics take a tile's number as a literal only. Each thread has its own.
struct AmxTiles {
  static void Configure(const TileShape (&shapes)[kNumTiles]) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t bytes_per_row[16] = {};
      uint8_t rows[16] = {};
    } config;
    static_assert(sizeof config == 64);
    for (int t = 0; t < kNumTiles; ++t) {
      config.bytes_per_row[t] = shapes[t].bytes_per_row;
      config.rows[t] = shapes[t].rows;
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  template <int t>
  static void Zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(t));
  }
  template <int t>
  static void Load(const void* from, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(t) : "memory");
  }
  template <int t>
  static void Store(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(t) : "memory");
  }
  template <int sum, int rows, int panel>
  static void Dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(rows), "i"(panel));
  }
  template <int sum, int rows, int panel>
  static void DotBytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(rows), "i"(panel));
  }
  static void Release() { asm volatile("tilerelease"); }
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_AMX_TILES_H_
