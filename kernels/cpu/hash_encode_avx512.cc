// clang-format off
#include "kernels/cpu/vec_avx512.h"
#include "kernels/cpu/bits_avx512.h"
#include "kernels/cpu/hash_encode_impl.h"
