// The indexes of a prefix in the store, beside its KV, so that a request which begins with it starts without reading the
// KV: what each index says of a block, and the summaries of a sequence.
//
//   index     key: the block's name, kind = the index; identity: digest of its functions; payload:
//             the block of every layer from the first under a policy on, whole pages and no more
//   summary   key: the name of the last shared block, kind = feature maps and sink; payload: digest,
//             tokens, then the place of SummaryBytes
//
// A kind has 32 bits only, so the digest stands in the identity or in the payload: any doubt is a
// miss, and what is missing is made again from the KV. So nothing here has an error to report.
//
// Threads: the engine thread.
#ifndef WINNOW_ENGINE_RETRIEVAL_INDEX_KEEPER_H_
#define WINNOW_ENGINE_RETRIEVAL_INDEX_KEEPER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/kv/block_name.h"
#include "engine/kv/kv_memory.h"
#include "engine/retrieval/indexes.h"
#include "engine/retrieval/query_call.h"
#include "kernels/device_ops.h"
#include "kernels/tensor.h"

namespace winnow::engine {

class IndexKeeper {
 public:
  // All must outlive it.
  IndexKeeper(const RetrievalShape& shape, KvMemory& memory, kernels::DeviceOps& backend,
              const Indexes& indexes, const RetrievalOptions& options);

  // Tokens [begin, end) of the sequence are in the index of every layer under its policy. Blocks that others made and kept
  // without this index are saved.
  void Mark(const PassRows& rows, int32_t begin, int32_t end);
  // Puts what the indexes say of a full block aside in the store, under the block's name. Nothing
  // without a store, or where no index has the whole block.
  void SaveBlock(int32_t block, const BlockName& name);
  // The same of the state's summaries.
  void SaveSummary(const RetrievalState& state, const BlockName& name);
  // `blocks` hold the first tokens of a sequence that did not compute them: what the indexes have of
  // them, or the store, need not be made again.
  void Adopt(RetrievalState& state, std::span<const int32_t> blocks,
             std::span<const BlockName> names, int32_t retrieve_from);

 private:
  struct Keepable {
    Indexes::Part part;
    std::vector<int32_t> layers;  // that have a pool, ascending
    int32_t number = 0;           // in the block table, which knows the blocks that it has
    uint32_t kind = 0;            // of the store's keys
    Digest digest = {};
  };

  std::span<std::byte> Payload(size_t bytes);
  std::vector<Keepable*> KeepablesOf(const AttentionPolicy& policy);
  // Layers whose index is kept from `first_layer` on.
  static std::span<const int32_t> LayersFrom(const Keepable& index, int32_t first_layer);
  storage::BlockId IdOf(const Keepable& index, const BlockName& name) const;
  bool Has(const Keepable& index, int32_t block, int32_t first_layer) const;
  size_t Load(Keepable& index, std::span<const int32_t> blocks, std::span<const BlockName> names,
              int32_t first_layer);
  std::vector<StoreClient::SideRead> PlanReads(const Keepable& index,
                                               std::span<const int32_t> blocks,
                                               std::span<const BlockName> names,
                                               int32_t first_layer) const;
  bool LoadSummary(RetrievalState& state, std::span<const BlockName> names, int32_t retrieve_from);
  uint32_t SummaryKind(const AttentionPolicy& policy, Digest* digest) const;

  const RetrievalShape shape_;
  KvMemory& memory_;
  kernels::DeviceOps& backend_;
  const Indexes& indexes_;
  const int32_t from_;  // shortest context that retrieves, for policies that leave it open
  std::string artifact_id_, fit_id_;
  std::vector<Keepable> keepables_;
  kernels::Buffer payload_;  // shared memory: on its way
  std::vector<kernels::CopyPart> copies_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_INDEX_KEEPER_H_
