// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/quantized_matmul_impl.h"
