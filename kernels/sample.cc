#include "kernels/sample.h"

#include "kernels/check.h"

namespace winnow::kernels {

float EditedLogit(float logit, const LogitEdit& edit, const SampleRow& row) {
  logit += edit.bias;
  if (edit.generated < 0) return logit;
  logit = logit < 0 ? logit * row.repetition_penalty : logit / row.repetition_penalty;
  if (edit.generated == 0) return logit;
  return logit -
         (row.presence_penalty + row.frequency_penalty * static_cast<float>(edit.generated));
}

void CheckSampleRow(const SampleRow& row, int64_t vocab) {
  for (const LogitEdit& edit : row.edits) WINNOW_CHECK(edit.token >= 0 && edit.token < vocab);
  for (const int32_t token : row.masked) WINNOW_CHECK(token >= 0 && token < vocab);
  WINNOW_CHECK(row.allowed.empty() || row.allowed.size() == AllowedWords(vocab));
  WINNOW_CHECK(row.temperature >= 0 && row.top_k >= 0);
  WINNOW_CHECK(row.top_p > 0 && row.top_p <= 1 && row.min_p >= 0 && row.min_p <= 1);
  WINNOW_CHECK(row.repetition_penalty > 0 && row.top_logprobs <= kMaxTopLogprobs);
  WINNOW_CHECK(row.given >= -1 && row.given < vocab);
}

}  // namespace winnow::kernels
