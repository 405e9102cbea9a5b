// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/silu_mul_impl.h"
