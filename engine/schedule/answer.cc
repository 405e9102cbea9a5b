#include "engine/schedule/answer.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"

namespace winnow::engine {

Answer::Answer(const Request& request, const Tokenizer& tokenizer)
    : request_(request),
      detokenizer_(tokenizer, request.skip_special_tokens),
      stop_(request.stopping.stop_strings, request.stopping.include_stop) {}

FinishReason Answer::Add(OutputToken token) {
  WINNOW_CHECK(!ended_);
  const StoppingOptions& stopping = request_.stopping;
  const int32_t id = token.token;
  ++num_tokens_;
  const bool is_stop_token =
      std::find(stopping.stop_token_ids.begin(), stopping.stop_token_ids.end(), id) !=
      stopping.stop_token_ids.end();
  if (!is_stop_token || stopping.include_stop) AddText(detokenizer_.Add(id));
  tokens_.push_back({.token = std::move(token), .text_end = certain_bytes_});

  FinishReason reason = FinishReason::kNone;
  if (is_stop_token) {
    reason = FinishReason::kStopToken;
  } else if (num_tokens_ >= stopping.max_tokens) {
    reason = FinishReason::kMaxTokens;
  }
  // The end may complete half a character, and that a stop string.
  if (reason != FinishReason::kNone || stop_.matched()) End();
  return stop_.matched() ? FinishReason::kStopString : reason;
}

void Answer::AddText(const std::string& text) {
  certain_bytes_ += text.size();
  std::string out;
  if (num_tokens_ < request_.stopping.min_tokens) {
    out = text;
  } else if (!stop_.matched()) {
    out = stop_.Add(text);
  }
  released_bytes_ += out.size();
  text_ += out;
}

void Answer::End() {
  ended_ = true;
  if (stop_.matched()) return;
  AddText(detokenizer_.Flush());
  if (!stop_.matched()) text_ += stop_.Flush();
}

void Answer::Cut() {
  if (!ended_) End();
}

bool Answer::has_news() const {
  return !text_.empty() || (!tokens_.empty() && tokens_.front().text_end <= released_bytes_);
}

void Answer::TakeInto(OutputEvent* event) {
  event->text = std::exchange(text_, {});
  while (!tokens_.empty() && (ended_ || tokens_.front().text_end <= released_bytes_)) {
    event->tokens.push_back(std::move(tokens_.front().token));
    tokens_.pop_front();
  }
  if (ended_ && stop_.matched()) event->stop_match = stop_.match();
}

}  // namespace winnow::engine
