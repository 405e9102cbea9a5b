// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/read_loop_impl.h"
