// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/bits_scalar.h"
#include "kernels/cpu/hamming_select_impl.h"
