#include "engine/attention_policy.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "engine/status_macros.h"
#include "fmt/format.h"

namespace winnow::engine {
namespace {

enum class ValueKind { kCountOrShare, kProbability, kSwitch, kCount };

// What a policy lets follow its name: nothing, the anchors and the completion, or these and a
// budget.
enum class Takes { kNothing, kAnchors, kBudget };

struct OptionRule {
  std::string_view name;
  ValueKind kind;
  Takes needs;
};

struct NameRule {
  std::string_view name;
  Takes takes;
};

constexpr std::array<OptionRule, 6> kOptions = {{
    {"k", ValueKind::kCountOrShare, Takes::kBudget},
    {"p", ValueKind::kProbability, Takes::kBudget},
    {"completion", ValueKind::kSwitch, Takes::kAnchors},
    {"sink", ValueKind::kCount, Takes::kAnchors},
    {"window", ValueKind::kCount, Takes::kAnchors},
    {"dense_layers", ValueKind::kCount, Takes::kAnchors},
}};

constexpr std::array<NameRule, 8> kNames = {{
    {"dense", Takes::kNothing},
    {"window", Takes::kAnchors},
    {"oracle", Takes::kBudget},
    {"quest", Takes::kBudget},
    {"lsh", Takes::kBudget},
    {"hata", Takes::kBudget},
    {"spotlight", Takes::kBudget},
    {"hashattention", Takes::kBudget},
}};

// Insertions, deletions and substitutions between two short words.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

// The list, and before it the word that was probably meant. Long words are not compared: the text
// may come from a client.
template <typename Rules>
std::string KnownNames(std::string_view word, std::string_view what, const Rules& rules) {
  std::string names;
  std::string_view best;
  size_t best_distance = std::max<size_t>(1, word.size() / 3) + 1;
  for (const auto& rule : rules) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", rule.name);
    if (word.empty() || word.size() > 32) continue;
    const size_t distance = EditDistance(word, rule.name);
    if (distance < best_distance) {
      best_distance = distance;
      best = rule.name;
    }
  }
  const std::string suggestion = best.empty() ? "" : fmt::format(" (did you mean '{}'?)", best);
  return fmt::format("{}; {}: {}", suggestion, what, names);
}

// As much of a client's text as an error message repeats.
std::string Quoted(std::string_view text) {
  size_t limit = 64;
  if (text.size() <= limit) return fmt::format("'{}'", text);
  while (limit > 0 && (text[limit] & 0xc0) == 0x80) --limit;  // not inside a character
  return fmt::format("'{}...'", text.substr(0, limit));
}

absl::Status BadValue(std::string_view option, std::string_view value, std::string_view wanted) {
  return absl::InvalidArgumentError(
      fmt::format("policy option '{}': {} is not {}", option, Quoted(value), wanted));
}

// Digits alone, so that a policy has one text: no sign, no exponent, no "nan".
std::optional<int32_t> ParseCount(std::string_view text) {
  int32_t count = 0;
  if (text.empty() || text.front() == '-') return std::nullopt;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return count;
}

std::optional<double> ParseNumber(std::string_view text) {
  double number = 0;
  if (text.empty() || text.find_first_not_of("0123456789.") != std::string_view::npos)
    return std::nullopt;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

absl::Status CheckValue(const OptionRule& rule, std::string_view value) {
  switch (rule.kind) {
    case ValueKind::kCountOrShare:
      if (value.ends_with('%')) {
        const std::optional<double> share = ParseNumber(value.substr(0, value.size() - 1));
        if (!share || *share <= 0 || *share > 100) {
          return BadValue(rule.name, value, "a share above 0% and up to 100%");
        }
      } else if (ParseCount(value).value_or(0) < 1) {
        return BadValue(rule.name, value, "a count of at least 1 or a share such as 2%");
      }
      return absl::OkStatus();
    case ValueKind::kProbability: {
      const double number = ParseNumber(value).value_or(0);
      if (number <= 0 || number > 1) {
        return BadValue(rule.name, value, "a number above 0 and up to 1");
      }
      return absl::OkStatus();
    }
    case ValueKind::kSwitch:
      if (value != "on" && value != "off") return BadValue(rule.name, value, "on or off");
      return absl::OkStatus();
    case ValueKind::kCount:
      if (!ParseCount(value)) return BadValue(rule.name, value, "a count of at least 0");
      return absl::OkStatus();
  }
  return absl::InternalError("an option of no kind");
}

absl::Status CheckOption(const NameRule& policy, std::string_view option,
                         std::vector<std::string_view>& seen) {
  const size_t equals = option.find('=');
  const std::string_view name = option.substr(0, equals);
  const auto rule = std::find_if(kOptions.begin(), kOptions.end(),
                                 [&](const OptionRule& r) { return r.name == name; });
  if (rule == kOptions.end()) {
    return absl::InvalidArgumentError(fmt::format("policy option {} is not known{}", Quoted(name),
                                                  KnownNames(name, "options", kOptions)));
  }
  if (rule->needs > policy.takes) {
    return absl::InvalidArgumentError(
        fmt::format("policy option '{}' does not apply to '{}'{}", name, policy.name,
                    policy.takes == Takes::kNothing ? ", which takes none" : ""));
  }
  if (equals == std::string_view::npos) {
    return absl::InvalidArgumentError(
        fmt::format("policy option '{}' has no value; write {}=...", name, name));
  }
  if (std::find(seen.begin(), seen.end(), name) != seen.end()) {
    return absl::InvalidArgumentError(fmt::format("policy option '{}' is given twice", name));
  }
  seen.push_back(name);
  return CheckValue(*rule, option.substr(equals + 1));
}

}  // namespace

absl::StatusOr<AttentionPolicy> ParseAttentionPolicy(std::string_view text) {
  const size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  const auto policy =
      std::find_if(kNames.begin(), kNames.end(), [&](const NameRule& r) { return r.name == name; });
  if (policy == kNames.end()) {
    return absl::InvalidArgumentError(fmt::format("policy {} is not known{}", Quoted(name),
                                                  KnownNames(name, "policies", kNames)));
  }
  std::vector<std::string_view> seen;
  for (size_t begin = colon; begin != std::string_view::npos;) {
    const size_t end = text.find(',', begin + 1);
    WINNOW_RETURN_IF_ERROR(CheckOption(*policy, text.substr(begin + 1, end - begin - 1), seen));
    begin = end;
  }
  if (name != "dense") {
    return absl::UnimplementedError(
        fmt::format("policy '{}' is not in this version: only dense is", name));
  }
  return AttentionPolicy{AttentionPolicy::Kind::kDense};
}

std::string ToString(const AttentionPolicy& policy) {
  switch (policy.kind) {
    case AttentionPolicy::Kind::kDense:
      return "dense";
  }
  return "";
}

}  // namespace winnow::engine
