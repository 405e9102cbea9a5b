// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/bits_scalar.h"
#include "kernels/cpu/hash_encode_impl.h"
