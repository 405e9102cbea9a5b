// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/page_bounds_impl.h"
