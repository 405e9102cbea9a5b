#include "engine/schedule/draft_length.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace winnow::engine {
namespace {

constexpr double kNewest = 0.15;  // weight of the newest sample
// Acceptance before anything is known, as of so many tokens. Measured ones: docs/exact.md.
constexpr double kPrior = 0.8;
constexpr double kPriorTokens = 3;
constexpr double kForget = 0.99;             // of what was tried, for each token tried
constexpr double kFirstDraftOfDense = 0.75;  // before one was measured
constexpr double kRowOfDense = 0.1;          // a row more, before one was measured
constexpr double kWorthwhile = 1.02;         // times dense decoding's speed, or drafts do not pay
constexpr double kFirstCredit = 0.9;         // dense tokens
constexpr double kCreditShare = 0.01;
constexpr double kOneTry = 1.01;
constexpr double kMostCredit =
    8;  // dense tokens: what was won long ago does not pay for a bad stretch

constexpr int32_t kFirstSteps = 3;
constexpr int32_t kDenseKnown = 2;  // dense tokens before the first draft
// Dense tokens after a draft of the policy whose delay is the draft's. Lookups come and go many times where text is copied, and
// what they win would end with the first few that fail.
constexpr int32_t kSlowSteps = 3;
constexpr int32_t kSharedSamples =
    3;  // a sequence's own first drafts weigh as much as others' after so many

}  // namespace

void DraftCosts::Add(double of_dense) { latest_[added_++ % kLatest] = of_dense; }

std::optional<double> DraftCosts::median() const {
  if (added_ < kEnough) return std::nullopt;
  std::array<double, kLatest> sorted = latest_;
  const size_t count = std::min(added_, kLatest);
  std::nth_element(sorted.begin(), sorted.begin() + count / 2, sorted.begin() + count);
  return sorted[count / 2];
}

DraftCostTable::Place DraftCostTable::PlaceOf(int32_t context, int32_t sequences) {
  return {static_cast<int>(std::bit_width(static_cast<uint32_t>(context))),
          static_cast<int>(std::bit_width(static_cast<uint32_t>(sequences)))};
}

std::shared_ptr<DraftCosts> DraftCostTable::Of(const std::string& policy, Place place) {
  // Policies come from clients. Sequences keep the costs that they have.
  if (entries_.size() >= kMostEntries) entries_.clear();
  std::shared_ptr<DraftCosts>& entry = entries_[{policy, place}];
  if (entry == nullptr) entry = std::make_shared<DraftCosts>();
  return entry;
}

void DraftLength::Average::Add(double sample) {
  ++samples;
  value += std::max(kNewest, 1.0 / samples) * (sample - value);
}

void DraftLength::Average::AddStep(double seconds) {
  if (samples == 0 || samples >= kFirstSteps) return Add(seconds);
  ++samples;
  value = std::min(value, seconds);
}

double DraftLength::acceptance(DraftSource source) const {
  const Source& of = sources_[static_cast<size_t>(source)];
  return (of.accepted + kPrior * kPriorTokens) / (of.tried + kPriorTokens);
}

double DraftLength::RowSeconds() const {
  return row_.samples > 0 ? std::max(0.0, row_.value) : kRowOfDense * dense_.value;
}

// Absent: nobody has measured one.
std::optional<double> DraftLength::DraftSeconds() const {
  if (draft_.samples > 0) return draft_.value;
  const std::optional<double> of_dense = shared_ != nullptr ? shared_->median() : std::nullopt;
  if (!of_dense.has_value()) return std::nullopt;
  return *of_dense * dense_.value;
}

double DraftLength::Speed(DraftSource source, int32_t drafted) const {
  // Before a draft step was measured it is taken for a dense one.
  const double step = source == DraftSource::kLookup ? 0 : DraftSeconds().value_or(dense_.value);
  const double a = acceptance(source);
  const double tokens =
      a < 1 ? (1 - std::pow(a, drafted + 1)) / (1 - a) : static_cast<double>(drafted + 1);
  return tokens / (drafted * (step + RowSeconds()) + dense_.value);
}

int32_t DraftLength::Next(DraftSource source, int32_t most) const {
  if (most <= 0) return 0;
  if (dense_.samples == 0) return 0;
  if (!measured_) return std::min(most, kUnmeasured);
  if (dense_.samples < kDenseKnown) return 0;
  const double dense_speed = 1 / dense_.value;
  int32_t best = 0;
  double best_speed = dense_speed * kWorthwhile;
  for (int32_t drafted = 1; drafted <= most; ++drafted) {
    const double speed = Speed(source, drafted);
    if (speed > best_speed) {
      best = drafted;
      best_speed = speed;
    }
  }
  // What a draft that fails from its first token on would lose must be there. So the first draft, of which
  // nothing is known, is short, and one that nothing speaks for is tried when there is credit for it.
  const std::optional<double> draft_seconds = DraftSeconds();
  const bool unknown = source == DraftSource::kPolicy && !draft_seconds.has_value();
  const double step = source == DraftSource::kLookup
                          ? 0
                          : draft_seconds.value_or(dense_.value * kFirstDraftOfDense);
  const double each = step + RowSeconds();
  const bool tries = best == 0 || unknown;
  const double credit =
      tries ? std::min(credit_, sources_[static_cast<size_t>(source)].credit) : credit_;
  const int32_t affordable =
      each > 0 ? static_cast<int32_t>(std::clamp(credit / each, 0.0, double{1 << 20})) : most;
  return std::min(tries ? 1 : best, affordable);
}

void DraftLength::Earn(double seconds) {
  credit_ = std::min(credit_ + seconds, kMostCredit * dense_.value);
  // Enough for one try, however dear others found it: else nobody would notice that it has become cheap.
  const double one = kOneTry * (DraftSeconds().value_or(0) + RowSeconds());
  for (Source& source : sources_) {
    source.credit = std::min(source.credit + seconds, std::max(kFirstCredit * dense_.value, one));
  }
}

void DraftLength::OnDense(double seconds) {
  if (seconds > 0) measured_ = true;
  if (steps_after_draft_ > 0 && dense_.samples >= kDenseKnown) {
    --steps_after_draft_;
    const double lost = std::max(0.0, seconds - dense_.value);
    credit_ -= lost;
    sources_[static_cast<size_t>(DraftSource::kPolicy)].credit -= lost;
    seconds -= lost;
  }
  dense_.AddStep(seconds);
  Earn((dense_.samples == kDenseKnown ? kFirstCredit : kCreditShare) * dense_.value);
}

void DraftLength::OnDraftStep(double seconds) {
  if (const std::optional<double> known = DraftSeconds(); draft_.samples == 0 && known) {
    draft_ = {*known, kSharedSamples};
  }
  draft_.AddStep(seconds);
  if (shared_ != nullptr && dense_.value > 0) shared_->Add(seconds / dense_.value);
  spent_drafting_ += seconds;
}

void DraftLength::OnVerification(DraftSource source, int32_t drafted, int32_t accepted,
                                 std::optional<double> seconds) {
  Source& of = sources_[static_cast<size_t>(source)];
  // One trial for each that was accepted, and one for the token that ended it.
  const int32_t tried = std::min(drafted, accepted + 1);
  for (int32_t i = 0; i < tried; ++i) {
    of.tried = of.tried * kForget + 1;
    of.accepted = of.accepted * kForget + (i < accepted);
  }
  if (seconds.has_value() && dense_.samples > 0) {
    if (drafted > 0) row_.Add((*seconds - dense_.value) / drafted);
    Earn((1 + accepted) * dense_.value * kCreditShare);
    const double won = (1 + accepted) * dense_.value - *seconds - spent_drafting_;
    credit_ = std::min(credit_ + won, kMostCredit * dense_.value);
    of.credit += std::min(0.0, won);
  }
  spent_drafting_ = 0;
  steps_after_draft_ = source == DraftSource::kPolicy ? kSlowSteps : 0;
}

}  // namespace winnow::engine
