// clang-format off
#include "kernels/cpu/vec_avx2.h"
#include "kernels/cpu/int4_keys_impl.h"
