// clang-format off
#include "kernels/cpu/vec_avx512.h"
#include "kernels/cpu/bits_avx512.h"
#include "kernels/cpu/hamming_select_impl.h"
