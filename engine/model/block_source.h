// Matrices that lie in several tensors of a safetensors file, values and scales apart.
#ifndef WINNOW_ENGINE_MODEL_BLOCK_SOURCE_H_
#define WINNOW_ENGINE_MODEL_BLOCK_SOURCE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/quantized.h"

namespace winnow::engine {

// Such a matrix, which becomes rows of blocks while a model loads. A view into the file; any thread may read it.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // Type of the blocks.
  virtual kernels::WeightType block_type() const = 0;
  // Row `row`: out [WeightRowBytes(block_type(), columns)].
  virtual void WriteBlocks(int64_t row, std::byte* out) const = 0;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_BLOCK_SOURCE_H_
