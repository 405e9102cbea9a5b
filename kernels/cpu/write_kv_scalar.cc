// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/write_kv_impl.h"
