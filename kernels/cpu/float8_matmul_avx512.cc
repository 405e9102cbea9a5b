// clang-format off
#include "kernels/cpu/vec_avx512.h"
#include "kernels/cpu/float8_matmul_impl.h"
