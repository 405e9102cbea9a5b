// clang-format off
#include "kernels/cpu/vec_avx2.h"
#include "kernels/cpu/read_loop_impl.h"
