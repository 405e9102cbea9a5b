// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/int4_keys_impl.h"
