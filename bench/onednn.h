// oneDNN's matrix products, which ours are compared with. This file's .cc is the only one that sees oneDNN, and only
// winnow_baselines links it: the server does without.
#ifndef WINNOW_BENCH_ONEDNN_H_
#define WINNOW_BENCH_ONEDNN_H_

#include "kernels/bench.h"

namespace winnow::bench {

// Measures [m][in] x [in][out] on OpenMP threads. The weights are in the order that oneDNN prefers; kBF16 takes x as bf16
// already and yields f32; kF32 is f32 throughout. 0 where oneDNN has no such product on this processor, or is built
// without OpenMP, so that its threads cannot be set.
kernels::ProductBaseline OneDnnBaseline();

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_ONEDNN_H_
