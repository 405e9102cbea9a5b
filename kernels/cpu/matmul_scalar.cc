// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/matmul_impl.h"
