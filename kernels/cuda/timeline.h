// The host's part of timeline.cuh: who has marks, and where they are written.
#ifndef WINNOW_KERNELS_CUDA_TIMELINE_H_
#define WINNOW_KERNELS_CUDA_TIMELINE_H_

#ifdef WINNOW_CUDA_TIMELINE

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace winnow::kernels::cuda::timeline {

// One of each source file that includes timeline.cuh.
inline std::vector<void (*)(std::FILE*)> writers;

// Appends all marks to the file that WINNOW_TIMELINE names, after what the device still does.
inline void WriteAll() {
  const char* path = std::getenv("WINNOW_TIMELINE");
  std::FILE* file = path == nullptr ? nullptr : std::fopen(path, "a");
  if (file == nullptr) return;
  cudaDeviceSynchronize();
  for (const auto write : writers) write(file);
  std::fclose(file);
}

}  // namespace winnow::kernels::cuda::timeline

#else

namespace winnow::kernels::cuda::timeline {
inline void WriteAll() {}
}  // namespace winnow::kernels::cuda::timeline

#endif  // WINNOW_CUDA_TIMELINE

#endif  // WINNOW_KERNELS_CUDA_TIMELINE_H_
