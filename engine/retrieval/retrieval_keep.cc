// What retrieval keeps of a prefix beside its KV, so that a request which begins with it starts
// without reading the KV: what each index says of a block, and the summaries of completion.
//
//   index     key: the block's name, kind = the index; identity: digest of its functions; payload:
//             the block of every layer from the first under a policy on, whole pages and no more
//   summary   key: the name of the last shared block, kind = feature maps and sink; payload: digest,
//             tokens, then the place of SummaryBytes
//
// A kind has 32 bits only, so the digest stands in the identity or in the payload: any doubt is a
// miss, and what is missing is made again from the KV.
#include <algorithm>
#include <cstring>

#include "engine/retrieval/retrieval_attention.h"
#include "fmt/format.h"

namespace winnow::engine {
namespace {

using Kind = AttentionPolicy::Kind;

// At the beginning of a summary.
struct KeptHeader {
  Digest digest = {};
  int32_t first = 0;  // token
  int32_t last = 0;   // one past the last token
  uint8_t zero[24] = {};
};
static_assert(sizeof(KeptHeader) == 64);

// A summary is kept up to a step before a prompt's end, and two questions about one text may share a
// few blocks more or fewer of what comes after it: it is looked for so far back.
constexpr size_t kSummaryBlocksBack = 64;

// Of blocks, in flight together.
constexpr size_t kIndexReads = 128;

uint32_t KindOf(const Digest& digest) {
  uint32_t kind = 0;
  std::memcpy(&kind, digest.data(), sizeof kind);
  return kind | 1u << 31;  // KV is kind 0
}

}  // namespace

// Empty: no memory.
std::span<std::byte> RetrievalAttention::Kept(size_t bytes) {
  if (kept_.size_bytes() < bytes) kept_ = backend_.AllocateShared(bytes + bytes / 4);
  if (kept_.data() == nullptr) return {};
  return {static_cast<std::byte*>(kept_.data()), bytes};
}

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
    // lsh and quest depend on nothing that is learned. The model's part of the identity is in it.
    const Digest& model = memory_.names().model;
    // A new fit costs pca's codes, and nothing else.
    const bool fitted = index.title.starts_with(KindName(Kind::kPca));
    const std::string& functions = fitted ? options_.transform->id : artifact_id_;
    index.digest = Sha256(fmt::format("index 2 {} {} ", index.title, functions) +
                          std::string(reinterpret_cast<const char*>(model.data()), model.size()));
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

// What is kept begins there: layers that have none take no room before the first that has one.
int32_t RetrievalAttention::FirstKept(const Keepable& index, int32_t first_layer) const {
  int32_t first = first_layer;
  while (first < config_.num_layers && index.pools[first] == nullptr) ++first;
  return first;
}

storage::BlockId RetrievalAttention::IndexId(const Keepable& index, const BlockName& name) const {
  storage::BlockId id = memory_.names().Id(name, index.kind, 0);
  id.model = index.digest;
  return id;
}

void RetrievalAttention::SaveIndex(int32_t block, const BlockName& name) {
  if (!memory_.has_store()) return;
  for (const Keepable& index : keepable_) {
    if (!HasIndex(index, block, config_.num_layers - 1)) continue;
    const int32_t first = FirstKept(index, index.marks[block].first_layer);
    const size_t bytes = (config_.num_layers - first) * index.block_bytes;
    const storage::BlockId id = IndexId(index, name);
    // What was kept under a policy with fewer dense layers serves this one, too.
    if (bytes == 0 || memory_.AsideBytes(id) >= bytes) continue;
    const std::span<std::byte> kept = Kept(bytes);
    if (kept.empty()) return;
    copies_.clear();
    for (int32_t layer = first; layer < config_.num_layers; ++layer) {
      std::byte* const of_layer = kept.data() + (layer - first) * index.block_bytes;
      if (index.pools[layer] == nullptr) {
        std::fill_n(of_layer, index.block_bytes, std::byte{0});
      } else {
        copies_.push_back(
            {of_layer, index.pools[layer] + block * index.block_bytes, index.block_bytes});
      }
    }
    backend_.CopyAllToHost(copies_);
    if (!backend_.failure().empty()) return;  // what came cannot be trusted
    memory_.PutAside(id, kept);
  }
}

// As many of `blocks`, from the first on, as have the index from `first_layer` on afterwards: what
// they lack is read from the store, many blocks at a time.
size_t RetrievalAttention::LoadIndex(Keepable& index, std::span<const int32_t> blocks,
                                     std::span<const BlockName> names, int32_t first_layer) {
  const int32_t first_wanted = FirstKept(index, first_layer);
  for (size_t begin = 0; begin < blocks.size();) {
    if (HasIndex(index, blocks[begin], first_layer)) {
      ++begin;
      continue;
    }
    if (!memory_.has_store()) return begin;
    std::vector<KvMemory::AsideRead> reads;
    size_t bytes = 0;
    for (size_t i = begin; i < blocks.size() && reads.size() < kIndexReads &&
                           !HasIndex(index, blocks[i], first_layer);
         ++i) {
      const storage::BlockId id = IndexId(index, names[i]);
      const size_t kept = memory_.AsideBytes(id);
      const int32_t first =
          config_.num_layers - static_cast<int32_t>(kept / std::max<size_t>(1, index.block_bytes));
      if (kept == 0 || kept % index.block_bytes != 0 || first < 0 || first > first_wanted) break;
      reads.push_back({.id = id, .bytes = kept});
      bytes += kept;
    }
    if (reads.empty()) return begin;
    const std::span<std::byte> kept = Kept(bytes);
    if (kept.empty()) return begin;
    size_t at = 0;
    for (KvMemory::AsideRead& read : reads) {
      read.into = kept.subspan(at, read.bytes);
      at += read.bytes;
    }
    memory_.GetAsides(reads);
    copies_.clear();
    bool good = true;
    for (const KvMemory::AsideRead& read : reads) {
      good = read.good;
      if (!good) break;
      const auto layers = static_cast<int32_t>(read.bytes / index.block_bytes);
      const int32_t first = config_.num_layers - layers;
      for (int32_t i = 0; i < layers; ++i) {
        if (index.pools[first + i] == nullptr) continue;
        copies_.push_back({read.into.data() + i * index.block_bytes,
                           index.pools[first + i] + blocks[begin] * index.block_bytes,
                           index.block_bytes});
      }
      index.marks[blocks[begin]] = {memory_.generation(blocks[begin]),
                                    std::min(first, first_layer)};
      ++begin;
    }
    backend_.CopyAllToDevice(copies_);
    if (!good) return begin;
  }
  return blocks.size();
}

void RetrievalAttention::AdoptIndex(RetrievalState& state, std::span<const int32_t> blocks,
                                    std::span<const BlockName> names, int32_t retrieve_from) {
  const int32_t first_layer = state.policy_.dense_layers;
  size_t has = blocks.size();
  for (Keepable* index : KeepableOf(state.policy_)) {
    has = LoadIndex(*index, blocks.first(has), names.first(has), first_layer);
  }
  const auto tokens = static_cast<int32_t>(has) * layout_.block_tokens;
  for (int32_t layer = first_layer; layer < config_.num_layers; ++layer) {
    state.layers_[layer].indexed = tokens;
  }
  if (state.policy_.completion || state.policy_.HasTail()) LoadSummary(state, names, retrieve_from);
}

uint32_t RetrievalAttention::SummaryKind(const AttentionPolicy& policy, Digest* digest) const {
  // Its tokens begin behind the sink. Where they end depends on the window, and stands beside.
  if (policy.HasTail()) {
    *digest = Sha256(fmt::format("cells {} sink {} layers {}", options_.transform->id, policy.sink,
                                 policy.dense_layers));
    return KindOf(*digest);
  }
  *digest = Sha256(
      fmt::format("summary {} sink {} layers {}", artifact_id_, policy.sink, policy.dense_layers));
  return KindOf(*digest);
}

void RetrievalAttention::SaveSummary(const RetrievalState& state, const BlockName& name) {
  if (!memory_.has_store() || state.summaries_.data() == nullptr) return;
  const kernels::TokenRange tokens = state.layers_.back().summary.tokens;
  for (int32_t layer = state.policy_.dense_layers; layer < config_.num_layers; ++layer) {
    if (state.layers_[layer].summary.tokens != tokens) return;
  }
  // Only of tokens that the name covers.
  if (tokens.size() <= 0 || tokens.last > (name.index + 1) * layout_.block_tokens) return;
  KeptHeader header{.first = tokens.first, .last = tokens.last};
  const uint32_t kind = SummaryKind(state.policy_, &header.digest);
  const std::span<std::byte> kept = Kept(sizeof header + state.summaries_.size_bytes());
  if (kept.empty()) return;
  std::memcpy(kept.data(), &header, sizeof header);
  backend_.CopyToHost(state.summaries_.data(), kept.data() + sizeof header,
                      state.summaries_.size_bytes());
  if (!backend_.failure().empty()) return;  // what came cannot be trusted
  memory_.PutAside(memory_.names().Id(name, kind, 0), kept);
}

bool RetrievalAttention::LoadSummary(RetrievalState& state, std::span<const BlockName> names,
                                     int32_t retrieve_from) {
  if (!memory_.has_store() || state.summaries_.data() == nullptr) return false;
  Digest digest;
  const uint32_t kind = SummaryKind(state.policy_, &digest);
  const int32_t adopted = static_cast<int32_t>(names.size()) * layout_.block_tokens;
  // No summary may be ahead of the first query that completes. Which tokens that one leaves to it is
  // the policy's matter: quest's are whole pages, and other kinds keep summaries under the same name.
  const kernels::TokenRange mid =
      PlanQuery(state.policy_, std::max(adopted, retrieve_from), options_.from).mid;
  // A table reaches a border of tokens that are there.
  const int32_t last = state.policy_.HasTail() ? adopted : mid.last;
  const std::span<std::byte> kept = Kept(sizeof(KeptHeader) + state.summaries_.size_bytes());
  if (kept.empty()) return false;
  for (size_t back = 0; back < std::min(names.size(), kSummaryBlocksBack); ++back) {
    const storage::BlockId id = memory_.names().Id(names[names.size() - 1 - back], kind, 0);
    if (memory_.AsideBytes(id) != kept.size() || !memory_.GetAside(id, kept)) continue;
    KeptHeader header;
    std::memcpy(&header, kept.data(), sizeof header);
    if (header.digest != digest || header.first != mid.first || header.last <= header.first ||
        header.last > last) {
      continue;
    }
    backend_.CopyToDevice(kept.data() + sizeof header, state.summaries_.data(),
                          state.summaries_.size_bytes());
    for (int32_t layer = state.policy_.dense_layers; layer < config_.num_layers; ++layer) {
      state.layers_[layer].summary.tokens = {header.first, header.last};
    }
    return true;
  }
  return false;
}

}  // namespace winnow::engine
