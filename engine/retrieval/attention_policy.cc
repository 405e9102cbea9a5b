#include "engine/retrieval/attention_policy.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/did_you_mean.h"
#include "engine/base/plain_number.h"
#include "engine/base/status_macros.h"
#include "fmt/format.h"

namespace winnow::engine {
namespace {

using Kind = AttentionPolicy::Kind;

// What an option asks of the policy that it follows.
enum class Needs { kNothing, kAnchors, kBudget, kCodes, kTransform };

struct NameRule {
  std::string_view name;
  Kind kind;
  SelectBy select_by;
};

struct OptionRule {
  std::string_view name;
  Needs needs;
  // Sets the option, or says what the value should have been.
  std::optional<std::string> (*set)(AttentionPolicy& policy, std::string_view value);
};

constexpr std::array<NameRule, 9> kNames = {{
    {"dense", Kind::kDense, SelectBy::kNothing},
    {"window", Kind::kWindow, SelectBy::kNothing},
    {"oracle", Kind::kOracle, SelectBy::kKeys},
    {"quest", Kind::kQuest, SelectBy::kBounds},
    {"lsh", Kind::kLsh, SelectBy::kCodes},
    {"pca", Kind::kPca, SelectBy::kMasses},
    {"hata", Kind::kHata, SelectBy::kCodes},
    {"spotlight", Kind::kSpotlight, SelectBy::kCodes},
    {"hashattention", Kind::kHashAttention, SelectBy::kCodes},
}};

const NameRule& RuleOf(Kind kind) {
  return *std::find_if(kNames.begin(), kNames.end(),
                       [&](const NameRule& rule) { return rule.kind == kind; });
}

// Digits alone, so that a policy has one text: no sign, no exponent, no "nan".
std::optional<int32_t> ParseCount(std::string_view text) {
  int32_t count = 0;
  if (text.empty() || text.front() == '-') return std::nullopt;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (count > AttentionPolicy::kCountMax) return std::nullopt;
  return count;
}

// PlainNumberText with the point two places on: a product with 100 would be rounded.
std::string PercentText(double share) {
  std::string whole = PlainNumberText(share);
  std::string places;
  if (const size_t point = whole.find('.'); point != std::string::npos) {
    places = whole.substr(point + 1);
    whole.resize(point);
  }
  places.resize(std::max<size_t>(places.size(), 2), '0');
  whole += places.substr(0, 2);
  whole.erase(0, std::min(whole.find_first_not_of('0'), whole.size() - 1));
  return fmt::format("{}{}{}%", whole, places.size() > 2 ? "." : "", places.substr(2));
}

std::optional<std::string> SetCount(int32_t& field, std::string_view value, int32_t min) {
  const std::optional<int32_t> count = ParseCount(value);
  if (!count || *count < min) {
    return fmt::format("a count of at least {} and at most {}", min, AttentionPolicy::kCountMax);
  }
  field = *count;
  return std::nullopt;
}

std::optional<std::string> SetUpToOne(std::optional<double>& field, std::string_view value) {
  const double number = ParsePlainNumber(value).value_or(0);
  if (number <= 0 || number > 1) return "a number above 0 and up to 1";
  field = number;
  return std::nullopt;
}

std::optional<std::string> SetMinMass(AttentionPolicy& policy, std::string_view value) {
  const double number = ParsePlainNumber(value).value_or(0);
  if (number <= 0 || number >= 1) return "a number above 0 and below 1";
  policy.min_mass = number;
  return std::nullopt;
}

std::optional<std::string> SetK(AttentionPolicy& policy, std::string_view value) {
  if (value.ends_with('%')) {
    const double share = ParsePlainNumber(value.substr(0, value.size() - 1), -2).value_or(0);
    if (share <= 0 || share > 1) return "a share above 0% and up to 100%";
    policy.k = {.count = 0, .share = share};
    return std::nullopt;
  }
  const int32_t count = ParseCount(value).value_or(0);
  if (count < 1) return "a count of at least 1 or a share such as 2%";
  policy.k = {.count = count, .share = 0};
  return std::nullopt;
}

std::optional<std::string> SetCompletion(AttentionPolicy& policy, std::string_view value) {
  if (value != "on" && value != "off") return "on or off";
  policy.completion = value == "on";
  return std::nullopt;
}

std::optional<std::string> SetTail(AttentionPolicy& policy, std::string_view value) {
  if (value != "on" && value != "off") return "on or off";
  policy.tail = value == "on";
  return std::nullopt;
}

std::optional<std::string> SetRerank(AttentionPolicy& policy, std::string_view value) {
  if (value != "on" && value != "off") return "on or off";
  policy.rerank = value == "on";
  return std::nullopt;
}

std::optional<std::string> SetBits(AttentionPolicy& policy, std::string_view value) {
  const int32_t bits = ParseCount(value).value_or(0);
  if (policy.kind == Kind::kPca) {
    if (bits < 64 || bits > 256 || bits % 64 != 0) return "one of 64, 128, 192, 256";
    policy.bits = bits;
    return std::nullopt;
  }
  const bool is_lsh = policy.kind == Kind::kLsh;
  const bool of_all = bits == 32 || bits == 64 || bits == 128 || bits == 256;
  if (!of_all && !(is_lsh && (bits == 512 || bits == 1024))) {
    return is_lsh ? "one of 32, 64, 128, 256, 512, 1024" : "one of 32, 64, 128, 256";
  }
  policy.bits = is_lsh && bits == AttentionPolicy::kLshBits ? 0 : bits;  // one text for one policy
  return std::nullopt;
}

std::optional<std::string> SetVerify(AttentionPolicy& policy, std::string_view value) {
  if (value == "auto") {
    policy.verify = AttentionPolicy::kVerifyAuto;
    return std::nullopt;
  }
  const int32_t count = ParseCount(value).value_or(0);
  if (count < 1 || count > AttentionPolicy::kVerifyMax) {
    return fmt::format("auto or a count from 1 to {}", AttentionPolicy::kVerifyMax);
  }
  policy.verify = count;
  return std::nullopt;
}

std::optional<std::string> SetLookup(AttentionPolicy& policy, std::string_view value) {
  if (value != "on" && value != "off") return "on or off";
  policy.lookup = value == "on";
  return std::nullopt;
}

constexpr std::array<OptionRule, 15> kOptions = {{
    {"k", Needs::kBudget, SetK},
    {"p", Needs::kBudget,
     [](AttentionPolicy& a, std::string_view v) { return SetUpToOne(a.p, v); }},
    {"min_mass", Needs::kTransform, SetMinMass},
    {"completion", Needs::kAnchors, SetCompletion},
    {"tail", Needs::kTransform, SetTail},
    {"rerank", Needs::kTransform, SetRerank},
    {"sink", Needs::kAnchors,
     [](AttentionPolicy& a, std::string_view v) { return SetCount(a.sink, v, 0); }},
    // A query always sees itself, so there is no window of none.
    {"window", Needs::kAnchors,
     [](AttentionPolicy& a, std::string_view v) { return SetCount(a.window, v, 1); }},
    {"dense_layers", Needs::kAnchors,
     [](AttentionPolicy& a, std::string_view v) { return SetCount(a.dense_layers, v, 0); }},
    {"bits", Needs::kCodes, SetBits},
    {"suffix", Needs::kAnchors,
     [](AttentionPolicy& a, std::string_view v) { return SetCount(a.suffix, v, 0); }},
    {"from", Needs::kAnchors,
     [](AttentionPolicy& a, std::string_view v) { return SetCount(a.from.emplace(), v, 0); }},
    {"floor", Needs::kAnchors,
     [](AttentionPolicy& a, std::string_view v) { return SetUpToOne(a.floor, v); }},
    {"verify", Needs::kNothing, SetVerify},
    {"lookup", Needs::kNothing, SetLookup},
}};

bool Has(const AttentionPolicy& policy, Needs needs) {
  switch (needs) {
    case Needs::kNothing:
      return true;
    case Needs::kAnchors:
      return !policy.IsDense();
    case Needs::kBudget:
      return policy.HasBudget();
    case Needs::kTransform:
      return policy.select_by() == SelectBy::kMasses;
    case Needs::kCodes:
      return policy.index_kind() == IndexKind::kCodes;
  }
  return false;
}

// The list, and before it the word that was probably meant.
template <typename Rules>
std::string KnownNames(std::string_view word, std::string_view what, const Rules& rules) {
  std::string list;
  std::vector<std::string_view> names;
  for (const auto& rule : rules) {
    list += fmt::format("{}{}", list.empty() ? "" : ", ", rule.name);
    names.push_back(rule.name);
  }
  const std::string_view nearest = word.empty() ? "" : NearestName(word, names);
  const std::string suggestion =
      nearest.empty() ? "" : fmt::format(" (did you mean '{}'?)", nearest);
  return fmt::format("{}; {}: {}", suggestion, what, list);
}

// As much of a client's text as an error message repeats.
std::string Quoted(std::string_view text) {
  size_t limit = 64;
  if (text.size() <= limit) return fmt::format("'{}'", text);
  while (limit > 0 && (text[limit] & 0xc0) == 0x80) --limit;  // not inside a character
  return fmt::format("'{}...'", text.substr(0, limit));
}

absl::Status SetOption(AttentionPolicy& policy, std::string_view option,
                       std::vector<std::string_view>& seen) {
  const size_t equals = option.find('=');
  const std::string_view name = option.substr(0, equals);
  const auto* rule = std::find_if(kOptions.begin(), kOptions.end(),
                                  [&](const OptionRule& r) { return r.name == name; });
  if (rule == kOptions.end()) {
    return absl::InvalidArgumentError(fmt::format("policy option {} is not known{}", Quoted(name),
                                                  KnownNames(name, "options", kOptions)));
  }
  if (!Has(policy, rule->needs)) {
    return absl::InvalidArgumentError(fmt::format("policy option '{}' does not apply to '{}'{}",
                                                  name, KindName(policy.kind),
                                                  policy.IsDense() ? ", which reads all" : ""));
  }
  if (equals == std::string_view::npos) {
    return absl::InvalidArgumentError(
        fmt::format("policy option '{}' has no value; write {}=...", name, name));
  }
  if (std::find(seen.begin(), seen.end(), name) != seen.end()) {
    return absl::InvalidArgumentError(fmt::format("policy option '{}' is given twice", name));
  }
  seen.push_back(name);
  const std::string_view value = option.substr(equals + 1);
  if (const std::optional<std::string> wanted = rule->set(policy, value)) {
    return absl::InvalidArgumentError(
        fmt::format("policy option '{}': {} is not {}", name, Quoted(value), *wanted));
  }
  return absl::OkStatus();
}

// Options that say of a verified policy what cannot be.
absl::Status CheckVerified(const AttentionPolicy& policy) {
  if (!policy.IsVerified()) return absl::OkStatus();
  const auto refuse = [](std::string_view option, std::string_view reason) {
    return absl::InvalidArgumentError(
        fmt::format("policy options 'verify' and '{}' exclude each other: {}", option, reason));
  };
  if (policy.completion) {
    return refuse("completion", "a summary cannot give back the tokens of a refused draft");
  }
  if (policy.suffix > 0) {
    return refuse("suffix", "of an answer that is verified the whole prompt attends densely");
  }
  if (policy.floor.has_value()) {
    return refuse("floor", "an answer that is verified has all coverage");
  }
  return absl::OkStatus();
}

}  // namespace

SelectBy AttentionPolicy::select_by() const { return RuleOf(kind).select_by; }

IndexKind AttentionPolicy::index_kind() const {
  switch (select_by()) {
    case SelectBy::kNothing:
    case SelectBy::kKeys:
      return IndexKind::kNone;
    case SelectBy::kBounds:
      return IndexKind::kBounds;
    case SelectBy::kCodes:
    case SelectBy::kMasses:
      return IndexKind::kCodes;
  }
  return IndexKind::kNone;
}

int32_t AttentionPolicy::KFor(int32_t visible) const {
  if (!HasBudget()) return 0;
  if (k.count > 0) return k.count;
  return std::max(1, static_cast<int32_t>(std::floor(k.share * visible + 0.5)));
}

int32_t AttentionPolicy::CandidatesFor(int32_t visible) const {
  const int64_t chosen = KFor(visible);
  const int64_t candidates = p ? 4 * chosen : rerank ? 2 * chosen : chosen;
  return static_cast<int32_t>(std::min<int64_t>(candidates, std::numeric_limits<int32_t>::max()));
}

std::string_view KindName(AttentionPolicy::Kind kind) { return RuleOf(kind).name; }

absl::StatusOr<AttentionPolicy> ParseAttentionPolicy(std::string_view text) {
  const size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  const auto* rule =
      std::find_if(kNames.begin(), kNames.end(), [&](const NameRule& r) { return r.name == name; });
  if (rule == kNames.end()) {
    return absl::InvalidArgumentError(fmt::format("policy {} is not known{}", Quoted(name),
                                                  KnownNames(name, "policies", kNames)));
  }
  AttentionPolicy policy;
  policy.kind = rule->kind;
  std::vector<std::string_view> seen;
  for (size_t begin = colon; begin != std::string_view::npos;) {
    const size_t end = text.find(',', begin + 1);
    WINNOW_RETURN_IF_ERROR(SetOption(policy, text.substr(begin + 1, end - begin - 1), seen));
    begin = end;
  }
  if (policy.lookup && !policy.IsVerified()) policy.verify = AttentionPolicy::kVerifyAuto;
  WINNOW_RETURN_IF_ERROR(CheckVerified(policy));
  if (policy.p && policy.min_mass) {
    return absl::InvalidArgumentError(
        "policy options 'p' and 'min_mass' exclude each other: both end a selection before k");
  }
  if (policy.p && policy.rerank) {
    return absl::InvalidArgumentError(
        "policy options 'p' and 'rerank' exclude each other: both choose among candidates by an "
        "index of their own");
  }
  return policy;
}

std::string ToString(const AttentionPolicy& policy) {
  std::string text(KindName(policy.kind));
  char separator = ':';
  const auto add = [&](std::string_view name, const auto& value) {
    text += fmt::format("{}{}={}", separator, name, value);
    separator = ',';
  };
  const AttentionPolicy defaults;
  if (policy.HasBudget()) {
    if (policy.k.count > 0) {
      add("k", policy.k.count);
    } else {
      add("k", PercentText(policy.k.share));
    }
  }
  if (policy.p) add("p", PlainNumberText(*policy.p));
  if (policy.min_mass) add("min_mass", PlainNumberText(*policy.min_mass));
  if (policy.completion) add("completion", "on");
  if (!policy.tail) add("tail", "off");
  if (policy.rerank) add("rerank", "on");
  if (policy.sink != defaults.sink) add("sink", policy.sink);
  if (policy.window != defaults.window) add("window", policy.window);
  if (policy.dense_layers != defaults.dense_layers) add("dense_layers", policy.dense_layers);
  if (policy.bits != defaults.bits) add("bits", policy.bits);
  if (policy.suffix != defaults.suffix) add("suffix", policy.suffix);
  if (policy.from) add("from", *policy.from);
  if (policy.floor) add("floor", PlainNumberText(*policy.floor));
  if (policy.lookup) add("lookup", "on");
  if (policy.verify == AttentionPolicy::kVerifyAuto) {
    add("verify", "auto");
  } else if (policy.IsVerified()) {
    add("verify", policy.verify);
  }
  return text;
}

}  // namespace winnow::engine
