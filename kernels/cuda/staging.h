// Dense attention over KV that lies in the host's memory (host_kv.h): which blocks come to which of two
// staging areas of the device, and when. While attention reads one area, the other is filled on a second
// stream with what the next call is expected to want: the chunks that the area had no room for, or, after
// the last of a layer, the same chunks in the next layer, as far as they are not written there first. A layer's
// window is taken to be that of its last call.
// A block that several chunks see comes once for all of them, and takes one place.
//
// Plans and orders, and touches no device: what it asks of one is StagingStreams, so that tests can run it
// on streams of their own, in any order that streams allow.
#ifndef WINNOW_KERNELS_CUDA_STAGING_H_
#define WINNOW_KERNELS_CUDA_STAGING_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kv_ops.h"

namespace winnow::kernels::cuda {

// Block `from` of a pool goes to place `to` of an area.
struct BlockMove {
  int32_t from = 0, to = 0;
};

// A main stream, which does what it is asked for in turn, and a second one. Pools count from 0 in the order
// of layers, areas are 0 and 1. Each call only asks; what it is given is copied. False: the device has
// failed.
class StagingStreams {
 public:
  virtual ~StagingStreams() = default;
  // The main stream waits for all that the second one was asked for so far.
  [[nodiscard]] virtual bool WaitForAhead() = 0;
  [[nodiscard]] virtual bool Bring(int32_t pool, std::span<const BlockMove> moves, int area) = 0;
  // The same on the second stream, which first waits for all that the main one was asked for so far.
  [[nodiscard]] virtual bool BringAhead(int32_t pool, std::span<const BlockMove> moves,
                                        int area) = 0;
  // Attention on the main stream over `chunks`, whose tables are of the area's places. Another call may bring
  // other tables at the same addresses.
  [[nodiscard]] virtual bool Attend(std::span<const AttentionChunk> chunks, int area) = 0;
};

class Staging {
 public:
  // An area holds `room` blocks; a pool has `num_blocks`.
  Staging(int32_t block_tokens, int32_t room, int32_t num_pools, int32_t num_blocks);
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Attention over `chunks` of a pool, as many at a time as an area holds. False: the device has failed.
  // REQUIRES: no query sees more than `room` blocks.
  [[nodiscard]] bool Attend(StagingStreams& streams, int32_t pool,
                            std::span<const AttentionChunk> chunks);
  // The main stream writes, next, the chunks' tokens of a pool: what was brought of their blocks is void.
  void Written(int32_t pool, std::span<const AttentionChunk> chunks);
  // Anything may have been written, by whoever waits until it is there before the next Attend. The second
  // stream may still be bringing blocks: nobody takes them for what they were.
  void WrittenAnywhere() { ahead_pool_ = kNobody; }

 private:
  static constexpr int32_t kNobody = -1;

  // Chunks that an area holds together.
  struct Together {
    std::vector<AttentionChunk> chunks;  // with tables of the area's places, which lie in
    std::vector<int32_t> tables;
  };
  // A block has it in the last plan that has the block.
  struct Place {
    uint64_t plan = 0;
    int32_t in_area = 0;
  };

  // Chunks from `first` on that an area holds together, with the window of `pool`: the blocks of its places in `blocks`, and
  // they in planned_. With `old_only`, -1 stands for blocks that the chunks write.
  void PlanArea(int32_t pool, std::span<const AttentionChunk> chunks, size_t first, bool old_only,
                std::vector<int32_t>& blocks);
  // moves_: blocks[i] to place i, but for -1 and what is there.
  void PlanMoves(std::span<const int32_t> blocks, std::span<const int32_t> there);
  bool BringAhead(StagingStreams& streams, int32_t pool, std::span<const AttentionChunk> chunks,
                  size_t next);

  const int32_t block_tokens_, num_pools_;
  const size_t room_;
  std::vector<int32_t> windows_;  // [num_pools] of AttentionChunk
  int area_ = 0;                  // of the last attention
  // What was brought to the other one for a call to come.
  int32_t ahead_pool_ = kNobody;
  std::vector<int32_t> ahead_blocks_;  // by place in the area; -1: nothing
  // Of a call; kept for their memory.
  std::vector<int32_t> blocks_, written_;
  std::vector<BlockMove> moves_;
  Together planned_, attended_;
  std::vector<Place> places_;  // [num_blocks]
  uint64_t plan_ = 0;          // how many there were
};

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_STAGING_H_
