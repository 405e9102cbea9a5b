// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/logit_select_impl.h"
