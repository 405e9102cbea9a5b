#include "engine/retrieval/index_keeper.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "fmt/format.h"

namespace winnow::engine {
namespace {

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

// Reads of blocks, in flight together.
constexpr size_t kIndexReads = 128;

uint32_t KindOf(const Digest& digest) {
  uint32_t kind = 0;
  std::memcpy(&kind, digest.data(), sizeof kind);
  return kind | 1u << 31;  // KV is kind 0
}

}  // namespace

IndexKeeper::IndexKeeper(const RetrievalShape& shape, KvMemory& memory, kernels::DeviceOps& backend,
                         const Indexes& indexes, const RetrievalOptions& options)
    : shape_(shape),
      memory_(memory),
      backend_(backend),
      indexes_(indexes),
      from_(options.from),
      artifact_id_(options.artifact != nullptr ? options.artifact->ContentId() : ""),
      fit_id_(options.transform != nullptr ? options.transform->id : "") {
  for (Indexes::Part& part : indexes.Parts()) {
    // lsh and quest depend on nothing that is learned. The model's part of the identity is in it.
    const Digest& model = memory_.store().names().model;
    // A new fit costs pca's codes, and nothing else.
    const std::string& functions = part.fitted ? fit_id_ : artifact_id_;
    Keepable index;
    index.digest = Sha256(fmt::format("index 3 {} {} ", part.title, functions) +
                          std::string(reinterpret_cast<const char*>(model.data()), model.size()));
    index.kind = KindOf(index.digest);
    index.number = memory_.blocks().AddIndex();
    for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
      if (part.pools[layer] != nullptr) index.layers.push_back(layer);
    }
    index.part = std::move(part);
    keepables_.push_back(std::move(index));
  }
}

// Empty: no memory.
std::span<std::byte> IndexKeeper::Payload(size_t bytes) {
  if (payload_.size_bytes() < bytes) payload_ = backend_.AllocateShared(bytes + bytes / 4);
  if (payload_.data() == nullptr) return {};
  return {static_cast<std::byte*>(payload_.data()), bytes};
}

std::vector<IndexKeeper::Keepable*> IndexKeeper::KeepablesOf(const AttentionPolicy& policy) {
  const std::vector<std::string> titles = indexes_.TitlesFor(policy);
  std::vector<Keepable*> keepables;
  for (Keepable& index : keepables_) {
    if (std::find(titles.begin(), titles.end(), index.part.title) != titles.end()) {
      keepables.push_back(&index);
    }
  }
  return keepables;
}

void IndexKeeper::Mark(const PassRows& rows, int32_t begin, int32_t end) {
  const AttentionPolicy& policy = rows.policy();
  const int32_t block_tokens = shape_.layout.block_tokens;
  for (Keepable* index : KeepablesOf(policy)) {
    // A block that was begun before is complete now: the sequence indexed what is before `begin`.
    for (int32_t i = begin / block_tokens; i < end / block_tokens; ++i) {
      const int32_t block = rows.chunk->block_table[i];
      BlockTable& blocks = memory_.blocks();
      const BlockRecord& record = blocks[block];
      blocks.SetIndexedFrom(
          index->number, block,
          std::min(blocks.IndexedFrom(index->number, block), policy.dense_layers));
      // Others made the block and kept it, without this index.
      if (record.sealed && record.keep) SaveBlock(block, record.name);
    }
  }
}

bool IndexKeeper::Has(const Keepable& index, int32_t block, int32_t first_layer) const {
  return memory_.blocks().IndexedFrom(index.number, block) <= first_layer;
}

std::span<const int32_t> IndexKeeper::LayersFrom(const Keepable& index, int32_t first_layer) {
  const auto first = std::lower_bound(index.layers.begin(), index.layers.end(), first_layer);
  return {first, index.layers.end()};
}

storage::BlockId IndexKeeper::IdOf(const Keepable& index, const BlockName& name) const {
  storage::BlockId id = memory_.store().names().Id(name, index.kind, 0);
  id.model = index.digest;
  return id;
}

void IndexKeeper::SaveBlock(int32_t block, const BlockName& name) {
  if (!memory_.store().exists()) return;
  for (const Keepable& index : keepables_) {
    if (!Has(index, block, shape_.num_layers - 1)) continue;
    const size_t block_bytes = index.part.block_bytes;
    const std::span<const int32_t> layers =
        LayersFrom(index, memory_.blocks().IndexedFrom(index.number, block));
    const size_t bytes = layers.size() * block_bytes;
    const storage::BlockId id = IdOf(index, name);
    // An index kept under a policy with fewer dense layers serves this one, too.
    if (bytes == 0 || memory_.store().SideBytes(id) >= bytes) continue;
    const std::span<std::byte> payload = Payload(bytes);
    if (payload.empty()) return;
    copies_.clear();
    for (size_t i = 0; i < layers.size(); ++i) {
      copies_.push_back({payload.data() + i * block_bytes,
                         index.part.pools[layers[i]] + block * block_bytes, block_bytes});
    }
    backend_.CopyAllToHost(copies_);
    if (!backend_.failure().empty()) return;  // what came cannot be trusted
    memory_.store().PutSide(id, payload);
  }
}

// Reads of the first blocks that lack the index and whose index the store has, without their memory.
std::vector<StoreClient::SideRead> IndexKeeper::PlanReads(const Keepable& index,
                                                          std::span<const int32_t> blocks,
                                                          std::span<const BlockName> names,
                                                          int32_t first_layer) const {
  const size_t block_bytes = index.part.block_bytes;
  const size_t wanted = LayersFrom(index, first_layer).size() * block_bytes;
  std::vector<StoreClient::SideRead> reads;
  for (size_t i = 0;
       i < blocks.size() && reads.size() < kIndexReads && !Has(index, blocks[i], first_layer);
       ++i) {
    const storage::BlockId id = IdOf(index, names[i]);
    const size_t kept = memory_.store().SideBytes(id);
    if (kept == 0 || kept % block_bytes != 0 || kept < wanted ||
        kept > index.layers.size() * block_bytes) {
      break;
    }
    reads.push_back({.id = id, .bytes = kept});
  }
  return reads;
}

// As many of `blocks`, from the first on, as have the index from `first_layer` on afterwards: what
// they lack is read from the store, many blocks at a time.
size_t IndexKeeper::Load(Keepable& index, std::span<const int32_t> blocks,
                         std::span<const BlockName> names, int32_t first_layer) {
  const size_t block_bytes = index.part.block_bytes;
  for (size_t begin = 0; begin < blocks.size();) {
    if (Has(index, blocks[begin], first_layer)) {
      ++begin;
      continue;
    }
    if (!memory_.store().exists()) return begin;
    std::vector<StoreClient::SideRead> reads =
        PlanReads(index, blocks.subspan(begin), names.subspan(begin), first_layer);
    if (reads.empty()) return begin;
    size_t bytes = 0;
    for (const StoreClient::SideRead& read : reads) bytes += read.bytes;
    const std::span<std::byte> payload = Payload(bytes);
    if (payload.empty()) return begin;
    size_t at = 0;
    for (StoreClient::SideRead& read : reads) {
      read.into = payload.subspan(at, read.bytes);
      at += read.bytes;
    }
    memory_.store().GetSides(reads);
    copies_.clear();
    bool good = true;
    for (const StoreClient::SideRead& read : reads) {
      good = read.good;
      if (!good) break;
      const int32_t block = blocks[begin];
      const auto layers = std::span(index.layers).last(read.bytes / block_bytes);
      for (size_t i = 0; i < layers.size(); ++i) {
        copies_.push_back({read.into.data() + i * block_bytes,
                           index.part.pools[layers[i]] + block * block_bytes, block_bytes});
      }
      memory_.blocks().SetIndexedFrom(index.number, block, std::min(layers[0], first_layer));
      ++begin;
    }
    backend_.CopyAllToDevice(copies_);
    if (!good) return begin;
  }
  return blocks.size();
}

void IndexKeeper::Adopt(RetrievalState& state, std::span<const int32_t> blocks,
                        std::span<const BlockName> names, int32_t retrieve_from) {
  const AttentionPolicy& policy = state.policy();
  size_t has = blocks.size();
  for (Keepable* index : KeepablesOf(policy)) {
    has = Load(*index, blocks.first(has), names.first(has), policy.dense_layers);
  }
  const auto tokens = static_cast<int32_t>(has) * shape_.layout.block_tokens;
  for (int32_t layer = 0; layer < shape_.num_layers; ++layer) {
    if (state.RetrievesIn(layer)) state.layer(layer).indexed = tokens;
  }
  if (policy.completion || policy.HasTail()) LoadSummary(state, names, retrieve_from);
}

uint32_t IndexKeeper::SummaryKind(const AttentionPolicy& policy, Digest* digest) const {
  // Its tokens begin behind the sink. Where they end depends on the window, and stands beside.
  *digest = policy.HasTail() ? Sha256(fmt::format("cells {} sink {} layers {}", fit_id_,
                                                  policy.sink, policy.dense_layers))
                             : Sha256(fmt::format("summary {} sink {} layers {}", artifact_id_,
                                                  policy.sink, policy.dense_layers));
  return KindOf(*digest);
}

void IndexKeeper::SaveSummary(const RetrievalState& state, const BlockName& name) {
  const kernels::Buffer& place = state.summaries();
  if (!memory_.store().exists() || place.data() == nullptr) return;
  kernels::TokenRange tokens;
  for (int32_t layer = shape_.num_layers - 1; layer >= 0; --layer) {
    if (!state.RetrievesIn(layer)) continue;
    const kernels::TokenRange of_layer = state.layer(layer).summary.tokens;
    if (tokens.size() == 0) tokens = of_layer;
    if (of_layer != tokens) return;
  }
  // Only of tokens that the name covers.
  if (tokens.size() <= 0 || tokens.last > (name.index + 1) * shape_.layout.block_tokens) return;
  KeptHeader header{.first = tokens.first, .last = tokens.last};
  const uint32_t kind = SummaryKind(state.policy(), &header.digest);
  const std::span<std::byte> payload = Payload(sizeof header + place.size_bytes());
  if (payload.empty()) return;
  std::memcpy(payload.data(), &header, sizeof header);
  backend_.CopyToHost(place.data(), payload.data() + sizeof header, place.size_bytes());
  if (!backend_.failure().empty()) return;  // what came cannot be trusted
  memory_.store().PutSide(memory_.store().names().Id(name, kind, 0), payload);
}

bool IndexKeeper::LoadSummary(RetrievalState& state, std::span<const BlockName> names,
                              int32_t retrieve_from) {
  const kernels::Buffer& place = state.summaries();
  if (!memory_.store().exists() || place.data() == nullptr) return false;
  Digest digest;
  const AttentionPolicy& policy = state.policy();
  const uint32_t kind = SummaryKind(policy, &digest);
  const int32_t adopted = static_cast<int32_t>(names.size()) * shape_.layout.block_tokens;
  // No summary may be ahead of the first query that completes. Which tokens that one leaves to it is
  // the policy's matter: quest's are whole pages, and other kinds keep summaries under the same name.
  const kernels::TokenRange mid = PlanQuery(policy, std::max(adopted, retrieve_from), from_).mid;
  // A table reaches a border of tokens that are there.
  const int32_t last = policy.HasTail() ? adopted : mid.last;
  const std::span<std::byte> payload = Payload(sizeof(KeptHeader) + place.size_bytes());
  if (payload.empty()) return false;
  for (size_t back = 0; back < std::min(names.size(), kSummaryBlocksBack); ++back) {
    const storage::BlockId id = memory_.store().names().Id(names[names.size() - 1 - back], kind, 0);
    StoreClient& store = memory_.store();
    if (store.SideBytes(id) != payload.size() || !store.GetSide(id, payload)) continue;
    KeptHeader header;
    std::memcpy(&header, payload.data(), sizeof header);
    if (header.digest != digest || header.first != mid.first || header.last <= header.first ||
        header.last > last) {
      continue;
    }
    backend_.CopyToDevice(payload.data() + sizeof header, place.data(), place.size_bytes());
    for (int32_t layer = 0; layer < shape_.num_layers; ++layer) {
      if (state.RetrievesIn(layer)) {
        state.layer(layer).summary.tokens = {header.first, header.last};
      }
    }
    return true;
  }
  return false;
}

}  // namespace winnow::engine
