// clang-format off
#include "kernels/cpu/vec_avx512.h"
#include "kernels/cpu/int4_keys_impl.h"
