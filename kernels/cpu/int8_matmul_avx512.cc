// clang-format off
#include "kernels/cpu/vec_avx512.h"
#include "kernels/cpu/int8_matmul_impl.h"
