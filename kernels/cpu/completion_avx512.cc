// clang-format off
#include "kernels/cpu/vec_avx512.h"
#include "kernels/cpu/completion_impl.h"
