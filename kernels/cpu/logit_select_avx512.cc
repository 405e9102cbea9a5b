// clang-format off
#include "kernels/cpu/vec_avx512.h"
#include "kernels/cpu/logit_select_impl.h"
