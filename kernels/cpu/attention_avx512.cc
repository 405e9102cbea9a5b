// clang-format off
#include "kernels/cpu/vec_avx512.h"
#include "kernels/cpu/attention_splits_impl.h"
