// A library that breaks the GPU under a running program: a real fault, of the kind that a defect of a kernel or of
// the card would be, in a program that knows nothing of it (scripts/gpu.py fault).
//
//   WINNOW_CUDA_FAULT_FIFO=FIFO LD_PRELOAD=libwinnow_cuda_fault.so PROGRAM...
//
// A thread of its own waits for a word from the FIFO, and launches a kernel in the context that the program's device
// 0 has in this process: "trap" ends in an illegal instruction, "address" writes to memory that is nobody's. From then
// on every call of the program that asks CUDA for something gets that error, whatever stream it is on. Says on stderr what it
// was told. Without the variable it does nothing.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

__global__ void Break(bool trap) {
  if (trap) __trap();
  *reinterpret_cast<volatile int*>(uintptr_t{8}) = 1;
}

void WaitAndBreak(const char* fifo) {
  std::FILE* words = std::fopen(fifo, "r");  // returns when somebody writes
  char word[16] = {};
  if (words == nullptr || std::fscanf(words, "%15s", word) != 1) {
    std::fprintf(stderr, "cuda fault: no word from %s\n", fifo);
    return;
  }
  cudaSetDevice(0);
  Break<<<1, 1>>>(std::strcmp(word, "trap") == 0);
  const cudaError_t error = cudaDeviceSynchronize();
  std::fprintf(stderr, "cuda fault: %s: %s\n", word, cudaGetErrorString(error));
}

const bool kStarted = [] {
  const char* fifo = std::getenv("WINNOW_CUDA_FAULT_FIFO");
  if (fifo != nullptr) std::thread(WaitAndBreak, fifo).detach();
  return fifo != nullptr;
}();

}  // namespace
