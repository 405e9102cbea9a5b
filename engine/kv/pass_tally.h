// Losses and reads of one pass, by chunk.
//
// A chunk is lost when the store does not give back KV that it needs, or when it needs more frames
// than there are. The pass goes on for the others, and the engine computes the sequence again.
#ifndef WINNOW_ENGINE_KV_PASS_TALLY_H_
#define WINNOW_ENGINE_KV_PASS_TALLY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace winnow::engine {

struct TierBytes {
  uint64_t host = 0, disk = 0;
};

class PassTally {
 public:
  static constexpr int32_t kNoChunk = -1;  // a read for no chunk in particular

  void Begin(size_t num_chunks) { chunks_.assign(num_chunks, {}); }
  void Lose(int32_t chunk) { chunks_[chunk].lost = true; }
  bool lost(int32_t chunk) const { return chunks_[chunk].lost; }
  // Adds bytes that were read from a slower tier: whole layer blocks, and single KV entries.
  void CountRead(int32_t chunk, uint64_t bytes, bool from_disk) {
    if (chunk == kNoChunk) return;
    (from_disk ? chunks_[chunk].bytes.disk : chunks_[chunk].bytes.host) += bytes;
  }
  const TierBytes& bytes(int32_t chunk) const { return chunks_[chunk].bytes; }

 private:
  struct Chunk {
    bool lost = false;
    TierBytes bytes;
  };
  std::vector<Chunk> chunks_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_PASS_TALLY_H_
