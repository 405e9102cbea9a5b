// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/attention_splits_impl.h"
