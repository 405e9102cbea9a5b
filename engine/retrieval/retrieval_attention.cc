#include "engine/retrieval/retrieval_attention.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "engine/base/status_macros.h"
#include "engine/retrieval/scratch.h"
#include "fmt/format.h"
#include "kernels/attention_state.h"
#include "kernels/transform_code.h"

namespace winnow::engine {

using kernels::AttentionChunk;
using kernels::RetrievalQuery;
using kernels::Selection;
using kernels::Tensor;

namespace {

// Tokens and entries of a call for many queries with small budgets.
constexpr int64_t kMinEntries = int64_t{1} << 18;

// Whether MeasureAnchors leaves states that what is selected is merged into.
bool AnchorsApart(const AttentionPolicy& policy) { return policy.select_by() == SelectBy::kMasses; }

}  // namespace

// ---- made once ----

RetrievalAttention::RetrievalAttention(const ModelConfig& config, KvMemory& memory,
                                       kernels::Backend& backend, int32_t from,
                                       std::unique_ptr<Indexes> indexes,
                                       std::unique_ptr<IndexKeeper> keeper, int32_t probe_interval)
    : shape_(config, memory.places().layout()),
      memory_(memory),
      backend_(backend),
      from_(from),
      indexes_(std::move(indexes)),
      keeper_(std::move(keeper)),
      selector_(shape_, backend, memory, *indexes_),
      fetcher_(shape_, memory, backend),
      tail_(shape_, memory, backend, *indexes_),
      probe_(shape_, memory, backend, probe_interval),
      counter_(shape_, memory, backend) {}

absl::StatusOr<std::unique_ptr<RetrievalAttention>> RetrievalAttention::Create(
    const ModelConfig& config, KvMemory& memory, int32_t max_context, kernels::Backend& backend,
    const RetrievalOptions& options, const RowFetcherOptions& rows) {
  WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<Indexes> indexes,
                          Indexes::Create(config, memory, backend, options));
  auto keeper = std::make_unique<IndexKeeper>(RetrievalShape(config, memory.places().layout()),
                                              memory, backend, *indexes, options);
  std::unique_ptr<RetrievalAttention> retrieval(
      new RetrievalAttention(config, memory, backend, options.from, std::move(indexes),
                             std::move(keeper), options.probe_interval));
  WINNOW_RETURN_IF_ERROR(retrieval->Allocate(max_context, options, rows));
  return retrieval;
}

absl::Status RetrievalAttention::Allocate(int32_t max_context, const RetrievalOptions& options,
                                          const RowFetcherOptions& rows) {
  // A query may select all but one of the tokens it sees.
  max_entries_ = std::max(kMinEntries, int64_t{shape_.kv_heads} * max_context);
  const bool completes = options.summaries > 0 && indexes_->has_feature_maps();
  const bool by_mass = options.transform != nullptr;
  const size_t num_states = size_t{kMaxCallQueries} * shape_.num_heads;
  const size_t states_bytes =
      num_states * kernels::AttentionStateFloats(shape_.head_dim) * sizeof(float);
  ScratchAllocator scratch(backend_);
  WINNOW_RETURN_IF_ERROR(fetcher_.Allocate(max_entries_, rows, scratch));
  WINNOW_RETURN_IF_ERROR(counter_.Allocate());
  WINNOW_RETURN_IF_ERROR(selector_.Allocate(max_entries_, scratch));
  WINNOW_RETURN_IF_ERROR(tail_.Allocate(completes, by_mass, scratch));
  WINNOW_RETURN_IF_ERROR(
      scratch.Allocate(states_bytes, "attention states", /*shared=*/false, &states_));
  if (by_mass) {
    WINNOW_RETURN_IF_ERROR(scratch.Allocate(num_states * sizeof(float), "masses of anchors",
                                            /*shared=*/false, &anchor_masses_));
    WINNOW_RETURN_IF_ERROR(scratch.Allocate(states_bytes, "attention states of anchors",
                                            /*shared=*/false, &anchor_states_));
    if (memory_.tiered()) {
      WINNOW_RETURN_IF_ERROR(scratch.Allocate(num_states * sizeof(float), "no masses of anchors",
                                              /*shared=*/true, &no_anchor_masses_));
      std::fill_n(static_cast<float*>(no_anchor_masses_.data()), num_states,
                  -std::numeric_limits<float>::infinity());
    }
  }
  scratch_bytes_ = scratch.size_bytes();
  return absl::OkStatus();
}

absl::Status RetrievalAttention::CheckPolicy(const AttentionPolicy& policy) const {
  return indexes_->Check(policy);
}

absl::StatusOr<std::unique_ptr<RetrievalState>> RetrievalAttention::NewState(
    const AttentionPolicy& policy) {
  std::vector<bool> sees_all;
  for (const LayerSpec& layer : shape_.layers) sees_all.push_back(layer.SeesAll());
  auto state = std::make_unique<RetrievalState>(policy, sees_all);
  WINNOW_RETURN_IF_ERROR(Resume(*state));
  return state;
}

// ---- a pass ----

void RetrievalAttention::Begin(std::span<const SequenceChunk> chunks) {
  rows_.clear();
  any_retrieves_ = false;
  int32_t first_row = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (chunks[i].retrieval != nullptr) {
      rows_.push_back(RowsOf(chunks[i], static_cast<int32_t>(i), first_row));
      any_retrieves_ |= rows_.back().first_retrieving < rows_.back().size();
    }
    first_row += static_cast<int32_t>(chunks[i].tokens.size());
  }
  GroupByMethod();
}

PassRows RetrievalAttention::RowsOf(const SequenceChunk& chunk, int32_t index,
                                    int32_t first_row) const {
  PassRows rows;
  rows.chunk = &chunk;
  rows.index = index;
  rows.first_row = first_row;
  rows.floor = chunk.retrieval->floor();
  const int32_t size = rows.size();
  rows.first_retrieving = std::clamp(chunk.retrieve_from - chunk.position, 0, size);
  while (rows.first_retrieving < size && rows.Plan(rows.first_retrieving, from_).dense) {
    ++rows.first_retrieving;
  }
  rows.last_retrieving = static_cast<int32_t>(
      std::clamp<int64_t>(int64_t{rows.floor.dense_from()} - chunk.position, 0, size));
  if (rows.first_retrieving >= rows.last_retrieving) {
    rows.first_retrieving = rows.last_retrieving = size;
  }
  return rows;
}

// Sequences of one method share calls. There are few methods, and their memory is kept.
void RetrievalAttention::GroupByMethod() {
  for (Method& method : methods_) method.rows.clear();
  for (PassRows& rows : rows_) {
    const AttentionPolicy& policy = rows.policy();
    auto method = methods_.begin();
    for (; method != methods_.end() && !method->rows.empty(); ++method) {
      const AttentionPolicy& other = *method->policy;
      if (policy.kind == other.kind && policy.bits == other.bits && policy.p == other.p &&
          policy.completion == other.completion && policy.HasTail() == other.HasTail() &&
          policy.rerank == other.rerank) {
        break;
      }
    }
    if (method == methods_.end()) method = methods_.emplace(method);
    if (method->rows.empty()) method->policy = &policy;
    method->rows.push_back(&rows);
  }
}

void RetrievalAttention::Index(int32_t layer) {
  for (const Method& method : methods_) {
    if (!method.rows.empty()) indexes_->Append(layer, *method.policy, method.rows);
  }
}

std::span<const AttentionChunk> RetrievalAttention::DenseChunks(
    int32_t layer, std::span<const AttentionChunk> all) {
  dense_chunks_.clear();
  auto rows = rows_.begin();
  // Rows [first, last) of q of one chunk.
  const auto add = [&](AttentionChunk chunk, int32_t first, int32_t last) {
    const int32_t end = std::min(chunk.first_row + chunk.num_tokens, last);
    const int32_t skipped = std::max(0, first - chunk.first_row);
    chunk.first_row += skipped;
    chunk.position += skipped;
    chunk.num_tokens = end - chunk.first_row;
    if (chunk.num_tokens > 0) dense_chunks_.push_back(chunk);
  };
  for (const AttentionChunk& chunk : all) {
    while (rows != rows_.end() && rows->first_row + rows->size() <= chunk.first_row) ++rows;
    const bool covered = rows != rows_.end() && rows->first_row <= chunk.first_row &&
                         rows->state().RetrievesIn(layer);
    if (!covered) {
      dense_chunks_.push_back(chunk);
      continue;
    }
    add(chunk, chunk.first_row, rows->first_row + rows->first_retrieving);
    add(chunk, rows->first_row + rows->last_retrieving, chunk.first_row + chunk.num_tokens);
  }
  return dense_chunks_;
}

// queries_, candidates_ and query_rows_ of the method's rows that retrieve.
void RetrievalAttention::PlanQueries(int32_t layer, const Method& method, bool logits_only,
                                     bool decoding_only) {
  queries_.clear();
  candidates_.clear();
  query_rows_.clear();
  for (const PassRows* rows : method.rows) {
    if (!rows->state().RetrievesIn(layer) || memory_.chunk_lost(rows->index) ||
        (decoding_only && rows->size() > 1)) {
      continue;
    }
    const int32_t skipped = logits_only ? rows->size() - rows->chunk->num_logits : 0;
    for (int32_t row = std::max(rows->first_retrieving, skipped); row < rows->last_retrieving;
         ++row) {
      const QueryPlan plan = rows->Plan(row, from_);
      queries_.push_back({rows->first_row + row, rows->chunk->block_table,
                          rows->chunk->position + row, plan.mid, plan.k,
                          kernels::LeastMassKey(plan.min_mass, shape_.group())});
      candidates_.push_back(plan.candidates);
      query_rows_.push_back(rows);
    }
  }
}

// As many queries from `first` on as fit into the scratch memory.
int32_t RetrievalAttention::CallSize(int32_t first) const {
  const int32_t num_queries = static_cast<int32_t>(queries_.size());
  int32_t count = 0;
  int64_t widest = 0;
  while (first + count < num_queries && count < kMaxCallQueries) {
    const RetrievalQuery& query = queries_[first + count];
    const int64_t attended = query.position + 1 - query.mid.size() + candidates_[first + count];
    widest = std::max(widest, attended);
    if (count > 0 && widest * (count + 1) * shape_.kv_heads > max_entries_) break;
    // Queries of a sequence in one call see the same table.
    const PassRows& rows = *query_rows_[first + count];
    if (count > 0 && &rows == query_rows_[first + count - 1] && rows.policy().HasTail() &&
        rows.TableEnd(query.position) != rows.TableEnd(queries_[first + count - 1].position)) {
      break;
    }
    ++count;
  }
  return count;
}

QueryCall RetrievalAttention::NextCall(int32_t layer, const Method& method, int32_t first) {
  const int32_t count = CallSize(first);
  return {layer,
          counter_.slot(),
          method.policy,
          std::span(queries_).subspan(first, count),
          std::span(candidates_).subspan(first, count),
          std::span<const PassRows* const>(query_rows_).subspan(first, count)};
}

void RetrievalAttention::Attend(int32_t layer, const Tensor& q, bool logits_only,
                                const float* sinks, const Tensor& out) {
  for (const Method& method : methods_) {
    PlanQueries(layer, method, logits_only, /*decoding_only=*/false);
    for (int32_t first = 0; first < static_cast<int32_t>(queries_.size());) {
      QueryCall call = NextCall(layer, method, first);
      call.sinks = sinks;
      RunCall(call, q, out);
      first += static_cast<int32_t>(call.size());
    }
  }
}

bool RetrievalAttention::predicts() const {
  if (!any_retrieves_ || !memory_.tiered()) return false;
  return std::any_of(rows_.begin(), rows_.end(), [](const PassRows& rows) {
    return rows.size() == 1 && rows.first_retrieving == 0 && rows.last_retrieving == 1;
  });
}

void RetrievalAttention::Predict(int32_t layer, const Tensor& q) {
  for (const Method& method : methods_) {
    // The oracle reads all keys, and a window selects nothing.
    const IndexKind kind = method.rows.empty() ? IndexKind::kNone : method.policy->index_kind();
    if (kind == IndexKind::kNone) continue;
    PlanQueries(layer, method, /*logits_only=*/false, /*decoding_only=*/true);
    for (int32_t first = 0; first < static_cast<int32_t>(queries_.size());) {
      const QueryCall call = NextCall(layer, method, first);
      const MassInputs masses{static_cast<float*>(no_anchor_masses_.data())};
      const Selection selected = selector_.Select(call, q, masses);
      if (!backend_.Synchronize()) return;
      fetcher_.Expect(call, selected);
      first += static_cast<int32_t>(call.size());
    }
  }
  fetcher_.Ask();
}

// ---- a call ----

void RetrievalAttention::RunCall(QueryCall call, const Tensor& q, const Tensor& out) {
  call.slot = counter_.slot();
  anchor_rows_.clear();
  if (call.policy->select_by() == SelectBy::kMasses) {
    if (!backend_.failure().empty()) return;
    if (!MeasureAnchors(call, q) || !tail_.ExtendTables(call)) {
      if (backend_.failure().empty()) RunHalves(call, q, out);
      return;
    }
  }
  const MassInputs masses{static_cast<float*>(anchor_masses_.data()),
                          tail_.MassesFor(*call.policy)};
  const Selection selected = selector_.Select(call, q, masses);
  if (!fetcher_.LoadPages(call, selected)) return;

  if (FindsRows(call.layer) && AttendInPool(call, selected, q, out)) {
    counter_.Defer(
        call, selected,
        call.policy->completion || MeasuresTail(call) ? tail_.MassesOf(call.slot) : StateMasses{});
    probe_.Measure(call, selected, q);
    return;
  }
  // The host looks at what was selected. If the device has failed there is nothing to look at, and
  // Forward says so.
  if (!backend_.Synchronize()) return;
  const Fetcher::Entries entries =
      AnchorsApart(*call.policy) ? Fetcher::Entries::kChosen : Fetcher::Entries::kAll;
  if (!fetcher_.Address(
          call, selected, [&] { return tail_.PinCompletion(call); }, entries)) {
    RunHalves(call, q, out);
    return;
  }
  counter_.Count(call, selected, fetcher_.tier_rows(), anchor_rows_, entries);
  AttendByAddress(call, selected, q, out);
}

// More entries are missing than can be on their way: fewer queries at a time select again.
void RetrievalAttention::RunHalves(const QueryCall& call, const Tensor& q, const Tensor& out) {
  const size_t half = call.size() / 2;
  RunCall(call.Part(0, half), q, out);
  RunCall(call.Part(half, call.size() - half), q, out);
}

// anchor_states_ and anchor_masses_ of the queries, because selection by masses needs the anchors' exact logits in its
// denominators. False: they do not fit in one call, or the device has failed.
bool RetrievalAttention::MeasureAnchors(const QueryCall& call, const Tensor& q) {
  float* const states = static_cast<float*>(anchor_states_.data());
  const auto num_states = static_cast<int64_t>(call.size()) * shape_.num_heads;
  const Selection nothing = selector_.Nothing();
  if (!fetcher_.LoadPages(call, nothing)) return false;
  bool any_lost = false;
  for (const PassRows* rows : call.rows) any_lost |= memory_.chunk_lost(rows->index);
  if (FindsRows(call.layer) && !any_lost) {
    backend_.AttendRows({.q = q,
                         .queries = call.queries,
                         .rows = RowsInPool(call.layer, nothing),
                         .scale = shape_.scale,
                         .states = states});
  } else {
    // The device may still read what an earlier call fetched.
    if (!backend_.Synchronize() || !fetcher_.Address(call, nothing, [] { return true; })) {
      return false;
    }
    backend_.AttendRows({.q = q,
                         .queries = call.queries,
                         .rows = RowsAtAddresses(),
                         .scale = shape_.scale,
                         .states = states});
    // The fetch of what is selected takes the same addresses and frames again.
    if (!backend_.Synchronize()) return false;
    fetcher_.EndCall();
    anchor_rows_.assign(fetcher_.tier_rows().begin(), fetcher_.tier_rows().end());
  }
  backend_.StateMasses(states, num_states, shape_.layout.head_dim,
                       static_cast<float*>(anchor_masses_.data()));
  // Where blocks are away, what is fetched next may take the frames that this reads.
  return memory_.blocks().num_away(call.layer) == 0 || backend_.Synchronize();
}

// Whether all entries of the layer are resident where the backend finds them itself.
bool RetrievalAttention::FindsRows(int32_t layer) const {
  return !memory_.tiered() && backend_.FindsRows(memory_.places().LayerPool(layer));
}

kernels::RowSource RetrievalAttention::RowsInPool(int32_t layer, const Selection& selected) const {
  return {.layout = shape_.layout, .pool = memory_.places().LayerPool(layer), .chosen = selected};
}

kernels::RowSource RetrievalAttention::RowsAtAddresses() const {
  return {.layout = shape_.layout, .lists = fetcher_.lists()};
}

// ATTEND where FindsRows says so. False: a loss or completion needs addresses after all. The queries of lost
// chunks are left out: their entries may be nowhere yet, and a device keeps what it has read.
bool RetrievalAttention::AttendInPool(const QueryCall& call, const Selection& selected,
                                      const Tensor& q, const Tensor& out) {
  const auto is_lost = [&](size_t i) { return memory_.chunk_lost(call.rows[i]->index); };
  bool any_lost = false;
  for (size_t i = 0; i < call.size() && !any_lost; ++i) any_lost = is_lost(i);
  if (call.policy->completion || AnchorsApart(*call.policy)) {
    return !any_lost && AttendStatesInPool(call, selected, q, out);
  }
  // A part of a selection is known to the host only.
  if (any_lost && !backend_.Synchronize()) return true;
  for (size_t begin = 0, end = 0; begin < call.size(); begin = end) {
    end = begin + 1;
    if (is_lost(begin)) continue;
    while (end < call.size() && !is_lost(end)) ++end;
    backend_.AttendRows({.q = q,
                         .queries = call.queries.subspan(begin, end - begin),
                         .rows = RowsInPool(call.layer, selected.From(static_cast<int64_t>(begin))),
                         .scale = shape_.scale,
                         .out = out,
                         .sinks = call.sinks});
  }
  return true;
}

bool RetrievalAttention::AttendStatesInPool(const QueryCall& call, const Selection& selected,
                                            const Tensor& q, const Tensor& out) {
  float* const states = static_cast<float*>(states_.data());
  // Entries that a summary takes in have to be resident, and of KV in the host's memory entries have addresses.
  if (call.policy->completion &&
      (memory_.places().IsShared(call.layer) || !tail_.PinCompletion(call))) {
    return false;
  }
  backend_.AttendRows({.q = q,
                       .queries = ChosenAlone(call),
                       .rows = RowsInPool(call.layer, selected),
                       .scale = shape_.scale,
                       .states = states});
  if (call.policy->completion) tail_.Complete(call, q, RowsInPool(call.layer, selected), states);
  Finish(call, states, out);
  return true;
}

// The call's queries for a backend that finds their rows itself: without anchors where those were attended before.
std::span<const RetrievalQuery> RetrievalAttention::ChosenAlone(const QueryCall& call) {
  if (!AnchorsApart(*call.policy)) return call.queries;
  chosen_alone_.assign(call.queries.begin(), call.queries.end());
  for (RetrievalQuery& query : chosen_alone_) query.mid = {0, query.position + 1};
  return chosen_alone_;
}

// Measuring takes two launches a layer, so tails are measured where the choice is. (Completion always is: it is dear.)
bool RetrievalAttention::MeasuresTail(const QueryCall& call) const {
  return call.policy->HasTail() && probe_.IsDue(call);
}

// The states of what each query attended to become its result: anchors first, then what was selected, then the tail,
// in that order wherever the entries lie.
void RetrievalAttention::Finish(const QueryCall& call, float* states, const Tensor& out) {
  if (AnchorsApart(*call.policy)) {
    float* const anchors = static_cast<float*>(anchor_states_.data());
    backend_.MergeStates(states, static_cast<int64_t>(call.size()) * shape_.num_heads,
                         shape_.head_dim, anchors);
    states = anchors;
  }
  if (call.policy->HasTail()) tail_.MergeTables(call, states, MeasuresTail(call));
  backend_.FinishStates(call.queries, states, shape_.layout.head_dim, call.sinks, out);
}

// ATTEND: states [queries][H][d + 2] over the entries whose addresses fetcher_ has, and the anchors that were attended before.
void RetrievalAttention::AttendByAddress(const QueryCall& call, const Selection& selected,
                                         const Tensor& q, const Tensor& out) {
  float* states = static_cast<float*>(states_.data());
  backend_.AttendRows({.q = q,
                       .queries = call.queries,
                       .rows = RowsAtAddresses(),
                       .scale = shape_.scale,
                       .states = states});
  const bool lost = memory_.chunk_lost(call.rows[0]->index) && call.size() == 1;
  if (call.policy->completion && !lost) {
    const StateMasses masses = tail_.Complete(call, q, RowsAtAddresses(), states);
    if (backend_.Synchronize()) counter_.CountTails(call, masses);
  }
  Finish(call, states, out);
  if (MeasuresTail(call) && !lost && backend_.Synchronize()) {
    counter_.CountTails(call, tail_.MassesOf(call.slot));
  }
  if (fetcher_.keeps() && !backend_.Synchronize()) return;
  fetcher_.EndCall();
  probe_.Measure(call, selected, q);
}

void RetrievalAttention::End() {
  counter_.EndPass(rows_, any_retrieves_);
  for (const PassRows& rows : rows_) {
    if (rows.indexed_from < 0 || memory_.chunk_lost(rows.index)) continue;
    keeper_->Mark(rows, rows.indexed_from, rows.chunk->position + rows.size());
  }
  fetcher_.EndPass();
}

}  // namespace winnow::engine
