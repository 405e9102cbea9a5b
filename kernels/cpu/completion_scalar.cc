// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/completion_impl.h"
