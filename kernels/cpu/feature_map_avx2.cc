// clang-format off
#include "kernels/cpu/vec_avx2.h"
#include "kernels/cpu/feature_map_impl.h"
