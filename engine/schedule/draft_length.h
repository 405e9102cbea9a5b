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
// of an account of its own, which what other drafts win does not fill.
//
// Times come from a clock and change what is drafted, never a token. Plain state; one thread.
#ifndef WINNOW_ENGINE_SCHEDULE_DRAFT_LENGTH_H_
#define WINNOW_ENGINE_SCHEDULE_DRAFT_LENGTH_H_

#include <array>
#include <cstdint>
#include <optional>

namespace winnow::engine {

enum class DraftSource : uint8_t { kPolicy, kLookup };

class DraftLength {
 public:
  // Where time stands still (a test's clock) nothing can be measured: so many are drafted.
  static constexpr int32_t kUnmeasured = 4;

  // Tokens to draft next, 0 to `most`; 0: decode densely.
  int32_t Next(DraftSource source, int32_t most) const;

  // Seconds of the step that did it, and nothing that is not decoding beside.
  void OnDense(double seconds);      // one token, densely
  void OnDraftStep(double seconds);  // one token drafted under the policy
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
  };
  struct Source {
    double tried = 0, accepted = 0;  // recent ones weigh more
    double credit = 0;               // seconds, for trying it although it does not pay
  };
  void Earn(double seconds);
  double RowSeconds() const;
  double Speed(DraftSource source, int32_t drafted) const;  // tokens a second

  Average dense_, draft_, row_;
  std::array<Source, 2> sources_;
  double spent_drafting_ = 0;  // since the last verification
  double credit_ = 0;          // seconds; begins with the first dense token
  bool measured_ = false;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_DRAFT_LENGTH_H_
