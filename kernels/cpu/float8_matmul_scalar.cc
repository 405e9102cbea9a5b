// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/float8_matmul_impl.h"
