// Keys and values: rotated by their positions, written to the blocks of a layer's pool (kv_layout.h), and attended to
// exactly, all of them. Attention over a few selected rows is another group (row_ops.h).
//
// Pools lie in the device's memory, or in shared memory that ShareKv has made known.
//
// Shapes: m tokens in the batch, H query heads, Hkv KV heads, d head dimension.
#ifndef WINNOW_KERNELS_KV_OPS_H_
#define WINNOW_KERNELS_KV_OPS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "kernels/kv_layout.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

// Keys that attention takes together, from position 0 on, be they seen or not.
inline constexpr int32_t kAttentionUnitTokens = 64;

// One sequence's share of an attention call: `num_tokens` queries at positions position,
// position+1, ...; query i attends to keys 0..position+i, which lie in block_table's blocks, or to the last `window` of them.
struct AttentionChunk {
  int32_t first_row = 0;  // row of the first query in q and out
  int32_t num_tokens = 0;
  int32_t position = 0;
  // Logical block -> block of the layer's pool. Attention does not look at blocks before that of FirstRead().
  std::span<const int32_t> block_table = {};
  int32_t window = 0;  // keys that a query sees, its own included; 0: all before it
  // [H] in the device's memory: of each query head a logit in the softmax's denominator that has no key and no value
  // (attention_state.h), as natural as scaled scores are. Null: none.
  const float* sinks = nullptr;

  // The first key that the first query sees; no query sees one before it.
  constexpr int32_t FirstKey() const {
    return window > 0 && position >= window ? position - window + 1 : 0;
  }
  // The first token whose row may be read.
  constexpr int32_t FirstRead() const {
    return FirstKey() / kAttentionUnitTokens * kAttentionUnitTokens;
  }
};

struct RopeAndWriteKvArgs {
  Tensor q;                   // [m][H*d], rotated in place
  Tensor k;                   // [m][Hkv*d]; what the chunks' rows hold afterwards is undefined
  Tensor v;                   // [m][Hkv*d]
  Tensor q_cos_sin, cos_sin;  // [m][d], from RopeTable: by which q is rotated, and k
  std::span<const AttentionChunk> chunks;
  void* pool = nullptr;  // the layer's
  KvLayout layout;
};

// ---- KV in shared memory ----

// KV of some layers that lies in shared memory, because the device has no room for it. Operations take
// such a pool as any other. Two are meant for it: AttendRows (row_ops.h) keeps rows that it reads in a
// cache on the device, and Attend brings a layer of a sequence to a staging area before it computes; the
// others read over the bus what they need. Where a row came from never shows in a result.
struct SharedKvShape {
  KvLayout layout;
  int32_t num_pools = 0;         // layers
  int32_t num_blocks = 0;        // of each
  int32_t max_context = 0;       // tokens that one query sees, at most
  int32_t max_batch_tokens = 0;  // rows of q in a pass, at most
  size_t cache_bytes = 0;        // for rows, an equal part for each pool; 0: none are kept
  // One pool, whose blocks are frames of any layer and change hands: where a layer's blocks lie is said
  // anew in each of its operations. There is no cache, and rows are attended by their addresses.
  bool of_frames = false;
};

// Bytes that it takes of the device's memory.
struct SharedKvSizes {
  size_t cache_bytes = 0;    // rows, and whose they are
  size_t table_bytes = 0;    // where in the cache each row of the pools lies
  size_t staging_bytes = 0;  // two layers of the longest sequence
  int64_t cache_rows = 0;    // of all pools
  size_t total() const { return cache_bytes + table_bytes + staging_bytes; }
};

// Rows that AttendRows read of such pools.
struct SharedKvReads {
  uint32_t cached = 0;    // in the cache
  uint32_t fetched = 0;   // brought into it
  uint32_t in_place = 0;  // over the bus without that: there was no room among the call's own rows
  uint32_t unused = 0;
};

// Made by KvOps::ShareKv; the pools go after it.
class SharedKv {
 public:
  virtual ~SharedKv() = default;
  virtual SharedKvSizes sizes() const = 0;
  // of_rows[i], in shared memory: what was read for row i of q since this was asked last. There
  // after Synchronize. REQUIRES: at most max_batch_tokens.
  virtual void TakeReads(std::span<SharedKvReads> of_rows) = 0;

  // The host writes to such pools itself: blocks that it read from elsewhere. Before the first byte of
  // a block's new content, ForgetRows: what is cached of them is void. No pass may be under way.
  virtual void ForgetRows(std::span<const int32_t> blocks) = 0;
  // After bytes have come: what was brought ahead to a staging area may lack them. Operations asked for
  // since then see them; those before must not have been about them.
  virtual void ForgetStaged() = 0;
};

class KvOps {
 public:
  // Why a model with this KV cannot run here, as the end of a sentence; empty if it can.
  virtual std::string Refusal(const KvLayout& layout, int32_t num_heads) const = 0;

  // Says that `pools` (shared memory, [num_pools]) are layers' KV: from here on they may be written by
  // operations and by CopyToDevice, and by the host only as SharedKv says. Null, and why in `why`: no memory, with the
  // bytes. A backend whose two memories are one takes nothing and has no cache.
  virtual SharedKvSizes SizeSharedKv(const SharedKvShape& shape) const = 0;
  virtual std::unique_ptr<SharedKv> ShareKv(const SharedKvShape& shape,
                                            std::span<std::byte* const> pools,
                                            std::string* why) = 0;

  // ---- positions ----

  // cos_sin[i] = (cos(positions[i]*inv_freq[j]) ..., sin(...) ...) * scale, j < d/2: rows of d
  // values. The angle is rounded to f32 before cos and sin, as the reference implementation does. (1, 0) where
  // inv_freq[j] is 0: such a pair is neither turned nor scaled. The whole of row i is then multiplied by factors[i];
  // empty `factors` are ones.
  virtual void RopeTable(std::span<const int32_t> positions, std::span<const float> inv_freq,
                         float scale, std::span<const float> factors, const Tensor& cos_sin) = 0;

  // Rotates each head of x [m][heads*d] in place, halves convention: (x[j], x[j+d/2]) is a pair.
  virtual void Rope(const Tensor& x, int32_t head_dim, const Tensor& cos_sin) = 0;

  // ---- blocks ----

  // Writes row i of k and v [m][Hkv*d] into the chunks' blocks at their positions, rounded to
  // layout.dtype. `pool` is the layer's pool.
  virtual void WriteKv(const Tensor& k, const Tensor& v, std::span<const AttentionChunk> chunks,
                       void* pool, const KvLayout& layout) = 0;

  // Rope of q and k, of the chunks' rows, then WriteKv: the sum of its parts, to the bit.
  virtual void RopeAndWriteKv(const RopeAndWriteKvArgs& args) {
    const std::span<const AttentionChunk> chunks = args.chunks;
    for (size_t i = 0; i < chunks.size();) {
      const int32_t first = chunks[i].first_row;
      int32_t last = first;  // chunks side by side go together
      while (i < chunks.size() && chunks[i].first_row == last) last += chunks[i++].num_tokens;
      const auto rows = [&](const Tensor& x) { return x.RowRange(first, last - first); };
      Rope(rows(args.q), args.layout.head_dim, rows(args.q_cos_sin));
      Rope(rows(args.k), args.layout.head_dim, rows(args.cos_sin));
    }
    WriteKv(args.k, args.v, chunks, args.pool, args.layout);
  }

  // Exact causal attention: out[m][H*d] = softmax(scale * q Kᵀ) V per head, over the chunks'
  // blocks, whose rows of this step have been written. Query head h reads KV head h / (H/Hkv). All chunks have the same window, and
  // the same sinks.
  virtual void Attend(const Tensor& q, std::span<const AttentionChunk> chunks, const void* pool,
                      const KvLayout& layout, float scale, const Tensor& out) = 0;

 protected:
  ~KvOps() = default;
};

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_KV_OPS_H_
