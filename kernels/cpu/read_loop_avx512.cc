// clang-format off
#include "kernels/cpu/vec_avx512.h"
#include "kernels/cpu/read_loop_impl.h"
