// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/row_attention_impl.h"
