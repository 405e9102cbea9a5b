// clang-format off
#include "kernels/cpu/vec_avx512.h"
#include "kernels/cpu/silu_mul_impl.h"
