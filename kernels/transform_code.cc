#include "kernels/transform_code.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/check.h"

namespace winnow::kernels {
namespace {

bool AllFinite(std::span<const float> values) {
  for (const float value : values) {
    if (!std::isfinite(value)) return false;
  }
  return true;
}

std::string CheckFields(const TransformCodeHead& head, int32_t words) {
  std::vector<uint32_t> taken(words);                              // bits of a byte of each word
  std::vector<uint32_t> covered(static_cast<size_t>(head.quads));  // bits of each quad's indexes
  for (const CodeField& field : head.fields) {
    if (field.word >= words || field.quad >= head.quads || field.width < 1 ||
        field.shift + field.width > 8 || field.low + field.width > head.widths[field.quad]) {
      return "has a field that lies outside its word or its quad";
    }
    const uint32_t mask = (1u << field.width) - 1;
    if ((taken[field.word] & mask << field.shift) != 0 ||
        (covered[field.quad] & mask << field.low) != 0) {
      return "has fields that overlap";
    }
    taken[field.word] |= mask << field.shift;
    covered[field.quad] |= mask << field.low;
  }
  for (const uint32_t bits : taken) {
    if (bits != 0xff) return "has bits that no field fills";
  }
  for (int32_t quad = 0; quad < head.quads; ++quad) {
    if (covered[quad] != (1u << head.widths[quad]) - 1) return "lacks bits of a quad";
  }
  return {};
}

std::string CheckHead(const TransformCodeHead& head, int32_t d, int32_t bits) {
  if (head.quads < 1 || 4 * head.quads > d ||
      head.widths.size() != static_cast<size_t>(head.quads)) {
    return "keeps a number of dimensions that is not possible";
  }
  int32_t width_bits = 0;
  for (const uint8_t width : head.widths) {
    if (width < 1 || width > 8) return "has a width outside 1 to 8";
    width_bits += 4 * width;
  }
  if (width_bits != bits) return "has widths that do not make up its bits";
  const auto n = static_cast<size_t>(4 * head.quads), values = n * d;
  if (head.key_weight.size() != values || head.query_weight.size() != values ||
      head.key_bias.size() != n || head.mean.size() != static_cast<size_t>(d) ||
      head.delta_weight.size() % d != 0) {
    return "has weights of the wrong size";
  }
  if (!AllFinite(head.key_weight) || !AllFinite(head.query_weight) || !AllFinite(head.key_bias) ||
      !AllFinite(head.mean) || !AllFinite(head.delta_weight)) {
    return "has weights that are not finite";
  }
  if (head.first_dims.size() != head.first_steps.size() ||
      (!head.first_dims.empty() && head.first_dims.size() != n) || !AllFinite(head.first_steps)) {
    return "has steps of a first code that do not fit its dimensions";
  }
  if (head.cell_bits.size() > 8) return "has more than 256 cells";
  for (const uint8_t bit : head.cell_bits) {
    if (bit >= bits) return "has a cell bit outside the code";
  }
  return CheckFields(head, bits / 32);
}

}  // namespace

std::string CheckTransformCode(const TransformCodeWeights& weights) {
  const int32_t d = weights.head_dim;
  if (d < 16 || d > 256 || d % 16 != 0) return "has a head dimension that codes cannot have";
  if (weights.bits < kTransformBitsMin || weights.bits > kTransformBitsMax ||
      weights.bits % 64 != 0) {
    return "has bits that codes cannot have";
  }
  if (weights.heads.empty()) return "has no heads";
  for (size_t head = 0; head < weights.heads.size(); ++head) {
    const std::string wrong = CheckHead(weights.heads[head], d, weights.bits);
    if (!wrong.empty()) return wrong + " (KV head " + std::to_string(head) + ")";
  }
  return {};
}

std::string CheckResidualCode(const TransformCodeWeights& first,
                              const TransformCodeWeights& residual) {
  const std::string wrong = CheckTransformCode(residual);
  if (!wrong.empty()) return wrong;
  if (residual.head_dim != first.head_dim || residual.heads.size() != first.heads.size()) {
    return "has other heads than the code that it refines";
  }
  for (size_t head = 0; head < residual.heads.size(); ++head) {
    const TransformCodeHead& of_head = residual.heads[head];
    if (of_head.first_dims.empty()) return "does not say which dimensions it refines";
    for (const int16_t dim : of_head.first_dims) {
      if (dim < -1 || dim >= 4 * first.heads[head].quads) {
        return "refines a dimension that the first code lacks (KV head " + std::to_string(head) +
               ")";
      }
    }
    const bool is_centred =
        std::all_of(of_head.mean.begin(), of_head.mean.end(), [](float mean) { return mean == 0; });
    if (!is_centred || of_head.tail || !of_head.cell_bits.empty() ||
        !of_head.delta_weight.empty()) {
      return "has what belongs to a first code (KV head " + std::to_string(head) + ")";
    }
  }
  return {};
}

namespace {

// Each quad goes to the emptiest word or to the fullest that has room, the widest first.
std::vector<CodeField> LayInto(std::span<const uint8_t> widths, int32_t words, bool emptiest) {
  std::vector<int32_t> order(widths.size()), used(words);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return widths[a] > widths[b]; });
  std::vector<CodeField> fields;
  const auto place = [&](int32_t word, int32_t quad, int32_t width, int32_t low) {
    fields.push_back({static_cast<uint8_t>(word), static_cast<uint8_t>(used[word]),
                      static_cast<uint8_t>(width), static_cast<uint8_t>(low),
                      static_cast<uint8_t>(quad)});
    used[word] += width;
  };
  std::vector<int32_t> to_split;
  for (const int32_t quad : order) {
    int32_t best = -1;
    for (int32_t word = 0; word < words; ++word) {
      if (used[word] + widths[quad] > 8) continue;
      if (best < 0 || (emptiest ? used[word] < used[best] : used[word] > used[best])) best = word;
    }
    if (best < 0) {
      to_split.push_back(quad);
    } else {
      place(best, quad, widths[quad], 0);
    }
  }
  for (const int32_t quad : to_split) {
    for (int32_t low = 0; low < widths[quad];) {
      const auto word =
          static_cast<int32_t>(std::min_element(used.begin(), used.end()) - used.begin());
      const int32_t width = std::min<int32_t>(8 - used[word], widths[quad] - low);
      WINNOW_CHECK(width > 0);
      place(word, quad, width, low);
      low += width;
    }
  }
  std::sort(fields.begin(), fields.end(), [](const CodeField& a, const CodeField& b) {
    return a.word != b.word ? a.word < b.word : a.shift < b.shift;
  });
  return fields;
}

}  // namespace

int32_t CodeFieldSteps(std::span<const CodeField> fields, int32_t words) {
  int32_t steps = 0;
  for (int32_t first = 0; first < words; first += 4) {
    // Two words are shared by two lanes each.
    const int32_t lanes = words - first == 2 ? 2 : 1;
    int32_t most = 0;
    for (int32_t word = first; word < std::min(first + 4, words); ++word) {
      const auto of_word = static_cast<int32_t>(
          std::count_if(fields.begin(), fields.end(),
                        [word](const CodeField& field) { return field.word == word; }));
      most = std::max(most, (of_word + lanes - 1) / lanes);
    }
    steps += (most + 1) / 2;
  }
  return steps;
}

std::vector<CodeField> LayCodeFields(std::span<const uint8_t> widths, int32_t words) {
  std::vector<CodeField> full = LayInto(widths, words, /*emptiest=*/false);
  std::vector<CodeField> even = LayInto(widths, words, /*emptiest=*/true);
  return CodeFieldSteps(even, words) < CodeFieldSteps(full, words) ? even : full;
}

int32_t MassKey(float mass) {
  uint32_t bits;
  static_assert(sizeof bits == sizeof mass);
  __builtin_memcpy(&bits, &mass, sizeof bits);
  const int32_t key = static_cast<int32_t>(bits >> kMassKeyShift) - kMassKeyBase;
  return key < 0 ? 0 : key >= kMassKeyBins ? kMassKeyBins - 1 : key;
}

int32_t LeastMassKey(double share, int32_t group) {
  return MassKey(static_cast<float>(share * group)) / kMassKeyStep * kMassKeyStep;
}

}  // namespace winnow::kernels
