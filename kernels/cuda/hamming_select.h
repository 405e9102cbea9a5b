// SelectByCodes (backend.h) on the device: the k mid tokens whose codes agree best with the group's
// (kernels/hamming_select.h has the scores, the identity that saves popcounts, and the order).
//
//   queries      [num_queries] DeviceQuery
//   query_codes  [num_queries][Hkv][G] codes
//   codes        one layer's pool (CodeLayout), 16-byte aligned; block_tokens a multiple of 16
//   chosen       counts and tokens in device memory; tokens ascend
//
// Integers throughout: any number of blocks yields the same tokens. Where all blocks fit on the GPU
// at once (1 M tokens times 8 heads on an H200), one launch scans, counts, meets and compacts, and
// distances stay in shared memory; else two launches, and 2 bytes of distance per token go through L2.
// Reads SelectByCodesBytes() of codes.
//
// Arithmetic: 2 * planes + 1 logical operations and up to `planes` popcounts per 4 bytes. Popcounts
// bind: at G = 4 and 128 bits they are 5 per code, 16 a clock and multiprocessor: 1.3 us of an H200
// for the million codes that it takes 3.7 us to read.
#ifndef WINNOW_KERNELS_CUDA_HAMMING_SELECT_H_
#define WINNOW_KERNELS_CUDA_HAMMING_SELECT_H_

#include "kernels/cuda/device_types.h"

namespace winnow::kernels::cuda {

struct HammingSelectShape {
  int32_t num_queries = 0;
  int32_t group = 0;           // G, 1 to 16
  CodeLayout layout;           // bits 32, 64, 128, 256, 512 or 1024
  int32_t max_mid_tokens = 0;  // no query's mid is longer
  // No other kernel whose blocks wait for each other runs on the device meanwhile, in this process or
  // another: one launch that is not cooperative does then, and stands ready before its turn.
  bool alone = false;
};

size_t HammingSelectWorkspaceBytes(const HammingSelectShape& shape);
ZeroedPart HammingSelectZeroedPart(const HammingSelectShape& shape);

[[nodiscard]] cudaError_t SelectByCodes(const HammingSelectShape& shape, const DeviceQuery* queries,
                                        const void* query_codes, const void* codes,
                                        const Selection& chosen, void* workspace, Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_HAMMING_SELECT_H_
