// clang-format off
#include "kernels/cpu/vec_avx2.h"
#include "kernels/cpu/bits_avx2.h"
#include "kernels/cpu/hash_encode_impl.h"
