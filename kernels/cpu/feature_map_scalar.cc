// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/feature_map_impl.h"
