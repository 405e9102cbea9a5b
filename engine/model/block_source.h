// Matrices that lie in several tensors of a safetensors file, values and scales apart, or transposed in one.
#ifndef WINNOW_ENGINE_MODEL_BLOCK_SOURCE_H_
#define WINNOW_ENGINE_MODEL_BLOCK_SOURCE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/quantized.h"

namespace winnow::engine {

// Such a matrix, which becomes rows of blocks, or of plain values, while a model loads. A view into the file; any thread may read it.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // Type of the blocks, and of what the file holds; of a transposed matrix its plain type, whose blocks are values.
  virtual kernels::WeightType block_type() const = 0;
  // Row `row` as values: out [columns]. Those of its blocks, where it has blocks.
  virtual void WriteValues(int64_t row, float* out) const = 0;
  // Whether neighbours share a scale, as they do in blocks; else it has values alone.
  virtual bool has_blocks() const { return true; }
  // Row `row`: out [WeightRowBytes(block_type(), columns)]. REQUIRES: has_blocks.
  virtual void WriteBlocks(int64_t row, std::byte* out) const = 0;
  // Bits of the integers, 8 or 4, where these rows, of Q8_0 or Q4_0, have one scale for each 128 values: they are those of I8x128 then
  // (kernels/quantized.h). Else 0.
  virtual int32_t bits_as_i8x128() const { return 0; }
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_BLOCK_SOURCE_H_
