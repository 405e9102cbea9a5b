// clang-format off
#include "kernels/cpu/vec_scalar.h"
#include "kernels/cpu/embed_rows_impl.h"
