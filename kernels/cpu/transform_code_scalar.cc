// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/transform_code_impl.h"
