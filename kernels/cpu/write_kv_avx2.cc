// clang-format off
#include "kernels/cpu/vec_avx2.h"
#include "kernels/cpu/write_kv_impl.h"
