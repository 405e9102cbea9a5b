// clang-format off
#include "kernels/cpu/vec_avx512.h"
#include "kernels/cpu/transform_code_impl.h"
