// Queries whose whole KV is made resident, for what reads all keys: the oracle's selection and a probe.
#ifndef WINNOW_ENGINE_RETRIEVAL_WHOLE_CONTEXT_H_
#define WINNOW_ENGINE_RETRIEVAL_WHOLE_CONTEXT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/kv/kv_memory.h"
#include "engine/retrieval/query_call.h"
#include "kernels/retrieval.h"

namespace winnow::engine {

// Memory for their tables. Engine thread only.
class WholeContext {
 public:
  // `memory` must outlive it.
  WholeContext(const RetrievalShape& shape, KvMemory& memory) : shape_(shape), memory_(memory) {}

  // Runs use(begin, queries, pool) over runs of the call's queries, of which `begin` is the first, with the tables of
  // resident blocks: all at once, or sequence by sequence where KV has to be loaded. Queries of a lost chunk are left out.
  template <typename Use>
  void ForEach(const QueryCall& call, Use use) {
    memory_.Unpin();
    queries_.assign(call.queries.begin(), call.queries.end());
    tables_.resize(std::max(tables_.size(), call.size()));
    size_t begin = 0;
    const void* pool = nullptr;
    const auto flush = [&](size_t end) {
      if (begin < end) {
        use(begin, std::span<const kernels::RetrievalQuery>(queries_).subspan(begin, end - begin),
            pool);
      }
      begin = end;
    };
    for (size_t i = 0; i < call.size(); ++i) {
      const int32_t chunk = call.rows[i]->index;
      const kernels::RetrievalQuery& query = call.queries[i];
      const int32_t blocks = shape_.BlockOf(query.position) + 1;
      PinnedBlocks pinned;
      if (!memory_.Pin(chunk, call.layer, query.block_table, 0, blocks, &tables_[i], &pinned,
                       [&] { flush(i); })) {
        flush(i);
        begin = i + 1;
        continue;
      }
      if (memory_.places().IsShared(call.layer)) {
        // Keys, half of every row.
        const auto bytes = blocks * static_cast<int64_t>(shape_.layout.BlockBytes()) / 2;
        memory_.CountRead(chunk, bytes, /*from_disk=*/false);
      }
      queries_[i].block_table = pinned.table;
      pool = pinned.pool;
    }
    flush(call.size());
  }

 private:
  const RetrievalShape shape_;
  KvMemory& memory_;
  std::vector<kernels::RetrievalQuery> queries_;  // with the tables of pinned blocks
  std::vector<std::vector<int32_t>> tables_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_WHOLE_CONTEXT_H_
