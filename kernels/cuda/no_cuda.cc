// Stands for cuda_backend.cc in a program built without CUDA.
#include "kernels/backend.h"

namespace winnow::kernels {

std::unique_ptr<Backend> MakeCudaBackend(bool, std::string* why) {
  *why = "this program was built without CUDA (WINNOW_CUDA)";
  return nullptr;
}

void LetCudaKernelsStartEarly(bool) {}

}  // namespace winnow::kernels
