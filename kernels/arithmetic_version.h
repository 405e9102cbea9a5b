// The version of what winnow computes, bit for bit. It belongs to the identity of stored KV and of the codes beside it
// (engine/model_loader.cc): a store that was filled by another version has nothing for this one, which computes anew.
//
// Raise it with every change after which the same model, options and tokens may give other bits on some instruction set:
// of KV, of logits, or of the functions that codes are made with. tests/arithmetic/arithmetic_golden_test.cc turns red
// where bits changed without it. The compiler and the instruction set are named beside it; CUDA's kernels, whose bits no
// test without a GPU can hold, name a hash of their sources (cuda/CMakeLists.txt).
#ifndef WINNOW_KERNELS_ARITHMETIC_VERSION_H_
#define WINNOW_KERNELS_ARITHMETIC_VERSION_H_

namespace winnow::kernels {

inline constexpr int kArithmeticVersion = 8;

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_ARITHMETIC_VERSION_H_
