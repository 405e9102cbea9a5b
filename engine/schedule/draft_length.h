// How many tokens to draft, by what drafts have been worth: the number with the most expected tokens a
// second, from measured acceptance and measured times. Of one sequence.
//
//   E(n) = 1 + a + a^2 + ... + a^n     tokens that a verification of n drafted ones brings, where each
//                                      is accepted with probability a if those before it are
//   t(n) = n * draft + dense + n * row  its time, drafting included (a lookup's drafts take none)
//
// Never much slower than dense: what drafts have lost is kept in an account, whose credit is a token's
// time and 1 % of all. With none left nothing is drafted, so drafts that all fail cost a long answer
// about 1 %, and a short one a token's time. Drafts of a source that does not pay are tried again out
// of an account of its own, which what other drafts win does not fill. Dense steps after a draft of the policy that take longer
// than others are its loss, too: caches and a device's graphs may hold what the draft needed in place of what they need.
//
// A sequence's own times count; before it has drafted those of others do (DraftCosts), so that not every answer has to
// find out that drafts cost more here than they bring.
//
// Times come from a clock and change what is drafted, never a token. Plain state; one thread.
#ifndef WINNOW_ENGINE_SCHEDULE_DRAFT_LENGTH_H_
#define WINNOW_ENGINE_SCHEDULE_DRAFT_LENGTH_H_

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace winnow::engine {

enum class DraftSource : uint8_t { kPolicy, kLookup };

// The cost of a drafted token of the policy in those of a dense one: the median of the latest drafts of all sequences, because
// any one may have waited for something else.
class DraftCosts {
 public:
  static constexpr size_t kEnough = 3;
  void Add(double of_dense);
  std::optional<double> median() const;  // absent: fewer than kEnough are known

 private:
  static constexpr size_t kLatest = 9;
  std::array<double, kLatest> latest_ = {};
  size_t added_ = 0;
};

// By policy and, because a draft's cost grows otherwise than a dense token's with contexts and with the sequences of a pass,
// by the powers of two of both.
class DraftCostTable {
 public:
  static constexpr size_t kMostEntries = 256;
  struct Place {
    int context_bits = 0, sequences_bits = 0;
    auto operator<=>(const Place&) const = default;
  };
  static Place PlaceOf(int32_t context, int32_t sequences);
  std::shared_ptr<DraftCosts> Of(const std::string& policy, Place place);

 private:
  std::map<std::pair<std::string, Place>, std::shared_ptr<DraftCosts>> entries_;
};

class DraftLength {
 public:
  // Where time stands still (a test's clock) nothing can be measured: so many are drafted.
  static constexpr int32_t kUnmeasured = 4;

  // The costs that other sequences found, and hear from this one.
  void Share(std::shared_ptr<DraftCosts> costs) { shared_ = std::move(costs); }

  // Tokens to draft next, 0 to `most`; 0: decode densely.
  int32_t Next(DraftSource source, int32_t most) const;

  // Seconds of the step that did it, and nothing that is not decoding beside.
  void OnDense(double seconds);      // one token, densely
  void OnDraftStep(double seconds);  // one token drafted under the policy
  // Such a step with which the index took in many tokens: a loss that says nothing of other drafts.
  void OnCatchUp(double seconds) { spent_drafting_ += seconds; }
  // `drafted` tokens were verified, and `accepted` of them were right; the answer has one more.
  // `seconds` nullopt: something else was done beside.
  void OnVerification(DraftSource source, int32_t drafted, int32_t accepted,
                      std::optional<double> seconds);

  double acceptance(DraftSource source) const;  // of a token, if those before it were accepted

 private:
  // Recent average: of the first samples all weigh the same.
  struct Average {
    double value = 0;
    int32_t samples = 0;
    void Add(double sample);
    // A step's time: the first steps of a kind may wait for what the later ones find made (a graph of launches, memory), so
    // the least of them stands for them.
    void AddStep(double seconds);
  };
  struct Source {
    double tried = 0, accepted = 0;  // recent ones weigh more
    double credit = 0;               // seconds, for trying it although it does not pay
  };
  void Earn(double seconds);
  double RowSeconds() const;
  std::optional<double> DraftSeconds() const;
  double Speed(DraftSource source, int32_t drafted) const;  // tokens a second

  std::shared_ptr<DraftCosts> shared_;
  Average dense_, draft_, row_;
  std::array<Source, 2> sources_;
  double spent_drafting_ = 0;      // since the last verification
  int32_t steps_after_draft_ = 0;  // that may still be slow for it
  double credit_ = 0;              // seconds; begins when dense tokens are known
  bool measured_ = false;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_DRAFT_LENGTH_H_
