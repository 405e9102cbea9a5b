// clang-format off
#include "kernels/cpu/vec_avx2.h"
#include "kernels/cpu/int8_matmul_impl.h"
