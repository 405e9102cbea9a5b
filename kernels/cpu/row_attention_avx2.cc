// clang-format off
#include "kernels/cpu/vec_avx2.h"
#include "kernels/cpu/row_attention_impl.h"
