// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/sample_impl.h"
