// clang-format off
#include "kernels/cpu/vec_avx2.h"
#include "kernels/cpu/float8_matmul_impl.h"
