// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/int8_matmul_impl.h"
