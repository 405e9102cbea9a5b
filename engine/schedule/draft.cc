#include "engine/schedule/draft.h"

#include <algorithm>

#include "kernels/check.h"

namespace winnow::engine {

KvReads& KvReads::operator+=(const KvReads& other) {
  fast += other.fast;
  host += other.host;
  disk += other.disk;
  return *this;
}

DraftCounts& DraftCounts::operator+=(const DraftCounts& other) {
  drafted += other.drafted;
  verified += other.verified;
  accepted += other.accepted;
  verifications += other.verifications;
  for (size_t i = 0; i < verified_at.size(); ++i) {
    verified_at[i] += other.verified_at[i];
    accepted_at[i] += other.accepted_at[i];
  }
  draft_reads += other.draft_reads;
  verify_reads += other.verify_reads;
  return *this;
}

void Draft::Begin(int32_t position, int32_t last_token, int32_t length) {
  WINNOW_CHECK(!active() && length >= 1);
  tokens_.assign(1, last_token);
  position_ = position;
  length_ = length;
  source_ = DraftSource::kPolicy;
}

void Draft::BeginLookedUp(int32_t position, int32_t last_token, std::span<const int32_t> drafted) {
  Begin(position, last_token, static_cast<int32_t>(drafted.size()));
  source_ = DraftSource::kLookup;
  for (const int32_t token : drafted) Add(token);
}

void Draft::Add(int32_t token) {
  WINNOW_CHECK(active() && !verifies_);
  tokens_.push_back(token);
  if (num_drafted() == length_) verifies_ = true;
}

void Draft::Cut(int32_t drafted) {
  WINNOW_CHECK(active() && drafted >= 0);
  if (drafted < num_drafted()) tokens_.resize(1 + drafted);
}

void Draft::Drop() {
  tokens_.clear();
  histories_.clear();
  grammar_.reset();
  allowed_.clear();
  verifies_ = false;
  held_ = 0;
}

SequenceChunk Draft::Chunk(int32_t tokens, std::span<const int32_t> block_table,
                           RetrievalState* retrieval) const {
  WINNOW_CHECK(active() && (verifies_ || tokens == 1));
  const int32_t position = computed_tokens();
  return {.tokens = std::span(tokens_).subspan(position - position_, tokens),
          .position = position,
          .block_table = block_table,
          .num_logits = tokens,
          .retrieval = retrieval,
          .retrieve_from = verifies_ ? std::numeric_limits<int32_t>::max() : position,
          .settled = position_};
}

void Draft::AppendSampleRows(const Request& request, const TokenHistory& history, int32_t answered,
                             int32_t rows, std::vector<kernels::SampleRow>* into) {
  const int32_t first = computed_tokens() - position_;
  for (int32_t drafted = first; drafted < first + rows; ++drafted) {
    std::span<const uint32_t> allowed;
    if (grammar_ != nullptr) {
      WINNOW_CHECK(drafted < num_allowed());
      allowed = allowed_[drafted];
    }
    into->push_back(
        MakeSampleRow(request, HistoryAfter(history, drafted), answered + drafted, allowed));
    // Nobody is told of a draft's probabilities.
    if (!verifies_) into->back().top_logprobs = -1;
  }
}

// A view of `histories_` that is handed out must stay while others are made: what moves with the vector is the
// object, not the edits that it owns.
const TokenHistory& Draft::HistoryAfter(const TokenHistory& history, int32_t drafted) {
  if (drafted == 0 || !history.grows()) return history;
  while (static_cast<int32_t>(histories_.size()) < drafted) {
    histories_.push_back(histories_.empty() ? history : histories_.back());
    histories_.back().AddGenerated(tokens_[histories_.size()]);
  }
  return histories_[drafted - 1];
}

int32_t Draft::NumAccepted(std::span<const kernels::SampledToken> drawn) const {
  WINNOW_CHECK(!drawn.empty() && drawn.size() <= tokens_.size());
  size_t accepted = 1;
  while (accepted < drawn.size() && drawn[accepted - 1].status == kernels::SampleStatus::kOk &&
         drawn[accepted - 1].token == tokens_[accepted]) {
    ++accepted;
  }
  return static_cast<int32_t>(accepted);
}

DraftCounts Draft::CountsOf(int32_t rows, int32_t index) const {
  DraftCounts counts;
  if (index > 0) {
    counts.accepted = 1;
    counts.accepted_at[index - 1] = 1;
  } else if (rows > 1) {
    counts.verifications = 1;
    counts.verified = static_cast<uint64_t>(rows) - 1;
    std::fill_n(counts.verified_at.begin(), rows - 1, 1);
  }
  return counts;
}

int32_t DraftRoom::Length(int32_t wanted) const {
  // A verification brings a token more than was drafted.
  int32_t length = std::min(wanted, answer_tokens - 1);
  length = std::min(length, rows / std::max(1, verifying));
  if (one_block_more) {
    const int32_t end = (position / block_tokens + 2) * block_tokens;
    length = std::min(length, end - 1 - position);
  }
  return std::max(0, length);
}

}  // namespace winnow::engine
