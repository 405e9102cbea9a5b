// Measurements: every kernel at model shapes, and the baselines that speeds are shares of. For `winnow bench`. The baseline
// of products is a library that the caller brings (bench/onednn.h): kernels do without.
//
// Every figure is the best of several repetitions: other work on the machine only adds time.
#ifndef WINNOW_KERNELS_BENCH_H_
#define WINNOW_KERNELS_BENCH_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/dtype.h"

namespace winnow::kernels {

// Another implementation of matrix products.
struct ProductBaseline {
  std::string name;  // "oneDNN 2.6.3"
  // FLOP per second of [m][in] x [in][out] on `num_threads` threads (0: all); 0 if it has no such product.
  std::function<double(int64_t m, int64_t out, int64_t in, DType dtype, int num_threads)>
      flops_per_s;
};

struct BenchOptions {
  std::string isa = "auto";       // as MakeCpuBackend takes it
  int num_threads = 0;            // 0: as many as the processors this process may use
  double seconds_per_case = 0.5;  // repetitions go on for this long, and are three at least
  std::string filter;             // only kernels whose name contains it
  const ProductBaseline* products = nullptr;  // not owned; null: products stand alone
};

struct BenchResult {
  std::string name;      // "matmul bf16"
  std::string shape;     // "m 512, out 8192, in 2048"
  double seconds = 0;    // of one call, the best
  double bytes = 0;      // XBytes of the kernel's header
  double flops = 0;      // XFlops
  std::string baseline;  // "read loop, 16 MiB" or "oneDNN 2.6.3 bf16"; empty for none
  double share = 0;      // of the baseline's speed in the same run; 0 for none

  double BytesPerSecond() const { return bytes / seconds; }
  double FlopsPerSecond() const { return flops / seconds; }
};

// Runs the kernels of the CPU backend at the shapes of Llama-3.2-1B and of the test model.
// `progress` (may be empty) gets each result as it is made. Empty if the isa is not available.
std::vector<BenchResult> BenchKernels(const BenchOptions& options,
                                      const std::function<void(const BenchResult&)>& progress);

// Bytes per second at which `num_threads` threads (0: all) read a buffer of `size_bytes` from end
// to end, adding nothing but an exclusive-or per load, in huge pages where the system has them: the
// bound of what a kernel can reach that reads as many bytes. 0 if the memory cannot be had.
double MeasureReadBytesPerSecond(size_t size_bytes, int num_threads);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_BENCH_H_
