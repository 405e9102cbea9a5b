// clang-format off
#include "kernels/cpu/vec_avx512.h"
#include "kernels/cpu/page_bounds_impl.h"
