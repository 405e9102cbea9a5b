// clang-format off
#include "kernels/cpu/vec_avx512.h"
#include "kernels/cpu/attention_impl.h"
