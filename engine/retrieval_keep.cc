// What retrieval keeps of a prefix beside its KV, so that a request which begins with it starts
// without reading the KV: what each index says of a block, and the summaries of completion.
//
//   index     key: the block's name, kind = the index; payload: digest of its functions, first layer
//             that has it, then the block of every layer
//   summary   key: the name of the last shared block, kind = feature maps and sink; payload: digest,
//             tokens, then the place of SummaryBytes
//
// The digest stands in the payload because a kind has 32 bits only: any doubt is a miss, and what is
// missing is made again from the KV.
#include <algorithm>
#include <cstring>

#include "engine/retrieval_attention.h"
#include "fmt/format.h"

namespace winnow::engine {
namespace {

using Kind = AttentionPolicy::Kind;

// At the beginning of what is kept.
struct KeptHeader {
  Digest digest = {};
  int32_t first = 0;  // index: the first layer; summary: the first token
  int32_t last = 0;   // summary: one past the last token
  uint8_t zero[24] = {};
};
static_assert(sizeof(KeptHeader) == 64);

// A summary is kept up to a step before a prompt's end, and two questions about one text may share a
// few blocks more or fewer of what comes after it: it is looked for so far back.
constexpr size_t kSummaryBlocksBack = 64;

uint32_t KindOf(const Digest& digest) {
  uint32_t kind = 0;
  std::memcpy(&kind, digest.data(), sizeof kind);
  return kind | 1u << 31;  // KV is kind 0
}

}  // namespace

void RetrievalAttention::MakeKeepable() {
  if (options_.artifact != nullptr) artifact_id_ = options_.artifact->ContentId();
  const auto add = [&](std::string title, size_t block_bytes, auto&& pool_of) {
    Keepable index;
    index.title = std::move(title);
    index.block_bytes = block_bytes;
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
      index.pools.push_back(static_cast<std::byte*>(pool_of(layer)));
    }
    index.marks.resize(memory_.num_blocks());
    // lsh and quest depend on nothing that is learned.
    index.digest = Sha256(fmt::format("index {} {}", index.title, artifact_id_));
    index.kind = KindOf(index.digest);
    keepable_.push_back(std::move(index));
  };
  for (const auto& codes : code_indexes_) {
    add(ToString(codes->spec), codes->layout.BlockBytes(),
        [&](int32_t layer) { return codes->layers[layer].pool.data(); });
  }
  if (!bounds_.empty()) {
    add("quest", kernels::BoundBlockBytes(layout_),
        [&](int32_t layer) { return bounds_[layer].data(); });
  }
  if (!int4_keys_.empty()) {
    add("int4", kernels::Int4BlockBytes(layout_),
        [&](int32_t layer) { return int4_keys_[layer].data(); });
  }
}

std::vector<RetrievalAttention::Keepable*> RetrievalAttention::KeepableOf(
    const AttentionPolicy& policy) {
  std::vector<Keepable*> indexes;
  const CodeIndex* codes = FindCodes(policy);
  const std::string title = codes != nullptr              ? ToString(codes->spec)
                            : policy.kind == Kind::kQuest ? "quest"
                                                          : "";
  for (Keepable& index : keepable_) {
    if (index.title == title || (index.title == "int4" && policy.p.has_value())) {
      indexes.push_back(&index);
    }
  }
  return indexes;
}

// Tokens [begin, end) of the chunk's sequence are in the index of every layer under the policy.
void RetrievalAttention::MarkIndexed(const Rows& rows, int32_t begin, int32_t end) {
  const AttentionPolicy& policy = rows.chunk->retrieval->policy();
  for (Keepable* index : KeepableOf(policy)) {
    // A block that was begun before is complete now: the sequence indexed what is before `begin`.
    for (int32_t i = begin / layout_.block_tokens; i < end / layout_.block_tokens; ++i) {
      const int32_t block = rows.chunk->block_table[i];
      Keepable::Mark& mark = index->marks[block];
      const uint32_t generation = memory_.generation(block);
      if (mark.generation != generation) mark = {.generation = generation};
      mark.first_layer = std::min(mark.first_layer, policy.dense_layers);
      // Others made the block and kept it, without this index.
      if (memory_.sealed(block) && memory_.kept(block)) SaveIndex(block, memory_.name(block));
    }
  }
}

bool RetrievalAttention::HasIndex(const Keepable& index, int32_t block, int32_t first_layer) const {
  const Keepable::Mark& mark = index.marks[block];
  return mark.generation == memory_.generation(block) && mark.first_layer <= first_layer;
}

size_t RetrievalAttention::KeptBytes(const Keepable& index) const {
  const auto layers = std::count_if(index.pools.begin(), index.pools.end(),
                                    [](const std::byte* pool) { return pool != nullptr; });
  return sizeof(KeptHeader) + static_cast<size_t>(layers) * index.block_bytes;
}

void RetrievalAttention::SaveIndex(int32_t block, const BlockName& name) {
  if (!memory_.tiered()) return;
  for (const Keepable& index : keepable_) {
    const Keepable::Mark& mark = index.marks[block];
    if (!HasIndex(index, block, std::numeric_limits<int32_t>::max() - 1)) continue;
    kept_.assign(KeptBytes(index), std::byte{0});
    const KeptHeader header{.digest = index.digest, .first = mark.first_layer};
    std::memcpy(kept_.data(), &header, sizeof header);
    std::byte* to = kept_.data() + sizeof header;
    for (const std::byte* pool : index.pools) {
      if (pool == nullptr) continue;
      backend_.CopyToHost(pool + block * index.block_bytes, to, index.block_bytes);
      to += index.block_bytes;
    }
    memory_.PutAside(memory_.names().Id(name, index.kind, 0), kept_);
  }
}

bool RetrievalAttention::LoadIndex(Keepable& index, int32_t block, const BlockName& name,
                                   int32_t first_layer) {
  const storage::BlockId id = memory_.names().Id(name, index.kind, 0);
  if (!memory_.tiered() || !memory_.HasAside(id)) return false;
  kept_.resize(KeptBytes(index));
  if (!memory_.GetAside(id, kept_)) return false;
  KeptHeader header;
  std::memcpy(&header, kept_.data(), sizeof header);
  if (header.digest != index.digest || header.first > first_layer || header.first < 0) return false;
  const std::byte* from = kept_.data() + sizeof header;
  for (std::byte* pool : index.pools) {
    if (pool == nullptr) continue;
    backend_.CopyToDevice(from, pool + block * index.block_bytes, index.block_bytes);
    from += index.block_bytes;
  }
  index.marks[block] = {memory_.generation(block), header.first};
  return true;
}

void RetrievalAttention::AdoptIndex(RetrievalState& state, std::span<const int32_t> blocks,
                                    std::span<const BlockName> names, int32_t retrieve_from) {
  const int32_t first_layer = state.policy_.dense_layers;
  size_t has = blocks.size();
  for (Keepable* index : KeepableOf(state.policy_)) {
    size_t i = 0;
    while (i < has && (HasIndex(*index, blocks[i], first_layer) ||
                       LoadIndex(*index, blocks[i], names[i], first_layer))) {
      ++i;
    }
    has = i;
  }
  const auto tokens = static_cast<int32_t>(has) * layout_.block_tokens;
  for (int32_t layer = first_layer; layer < config_.num_layers; ++layer) {
    state.layers_[layer].indexed = tokens;
  }
  if (state.policy_.completion) LoadSummary(state, names, retrieve_from);
}

uint32_t RetrievalAttention::SummaryKind(const AttentionPolicy& policy, Digest* digest) const {
  // Its tokens begin behind the sink. Where they end depends on the window, and stands beside.
  *digest = Sha256(
      fmt::format("summary {} sink {} layers {}", artifact_id_, policy.sink, policy.dense_layers));
  return KindOf(*digest);
}

void RetrievalAttention::SaveSummary(const RetrievalState& state, const BlockName& name) {
  if (!memory_.tiered() || state.summaries_.data() == nullptr) return;
  const kernels::TokenRange tokens = state.layers_.back().summary.tokens;
  for (int32_t layer = state.policy_.dense_layers; layer < config_.num_layers; ++layer) {
    if (state.layers_[layer].summary.tokens != tokens) return;
  }
  // Only of tokens that the name covers.
  if (tokens.size() <= 0 || tokens.last > (name.index + 1) * layout_.block_tokens) return;
  KeptHeader header{.first = tokens.first, .last = tokens.last};
  const uint32_t kind = SummaryKind(state.policy_, &header.digest);
  kept_.resize(sizeof header + state.summaries_.size_bytes());
  std::memcpy(kept_.data(), &header, sizeof header);
  backend_.CopyToHost(state.summaries_.data(), kept_.data() + sizeof header,
                      state.summaries_.size_bytes());
  memory_.PutAside(memory_.names().Id(name, kind, 0), kept_);
}

bool RetrievalAttention::LoadSummary(RetrievalState& state, std::span<const BlockName> names,
                                     int32_t retrieve_from) {
  if (!memory_.tiered() || state.summaries_.data() == nullptr) return false;
  Digest digest;
  const uint32_t kind = SummaryKind(state.policy_, &digest);
  const int32_t adopted = static_cast<int32_t>(names.size()) * layout_.block_tokens;
  // No summary may be ahead of the first query that completes.
  const int32_t most = std::max(adopted, retrieve_from) + 1 - state.policy_.window;
  kept_.resize(sizeof(KeptHeader) + state.summaries_.size_bytes());
  for (size_t back = 0; back < std::min(names.size(), kSummaryBlocksBack); ++back) {
    const storage::BlockId id = memory_.names().Id(names[names.size() - 1 - back], kind, 0);
    if (!memory_.HasAside(id) || !memory_.GetAside(id, kept_)) continue;
    KeptHeader header;
    std::memcpy(&header, kept_.data(), sizeof header);
    if (header.digest != digest || header.first != state.policy_.sink ||
        header.last <= header.first || header.last > most) {
      continue;
    }
    backend_.CopyToDevice(kept_.data() + sizeof header, state.summaries_.data(),
                          state.summaries_.size_bytes());
    for (int32_t layer = state.policy_.dense_layers; layer < config_.num_layers; ++layer) {
      state.layers_[layer].summary.tokens = {header.first, header.last};
    }
    return true;
  }
  return false;
}

}  // namespace winnow::engine
