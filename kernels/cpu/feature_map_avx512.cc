// clang-format off
#include "kernels/cpu/vec_avx512.h"
#include "kernels/cpu/feature_map_impl.h"
