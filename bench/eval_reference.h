// The findings of one run of `winnow eval --text` at every scored token, kept in a file so that another run can be compared
// with it token by token: other weights, another type of KV, another file of the same model. JSON lines:
//   {"token": 17, "loss": 2.5, "likeliest": 3}
#ifndef WINNOW_BENCH_EVAL_REFERENCE_H_
#define WINNOW_BENCH_EVAL_REFERENCE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace winnow::bench {

// Lists of equal length, in the order of the text. Plain data.
struct TextReference {
  std::vector<int32_t> tokens;     // those that were predicted
  std::vector<double> losses;      // -log of the probability that they were given
  std::vector<int32_t> likeliest;  // the token that was given the most
};

// Parses back to equal values.
std::string TextReferenceLines(const TextReference& reference);

// InvalidArgument names the line. `path` stands in errors.
absl::StatusOr<TextReference> ParseTextReference(std::string_view lines, std::string_view path);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_EVAL_REFERENCE_H_
