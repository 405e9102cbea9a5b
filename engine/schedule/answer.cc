#include "engine/schedule/answer.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"

namespace winnow::engine {

namespace {

bool Has(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

Answer::Answer(const Request& request, const Tokenizer& tokenizer)
    : request_(request),
      tokenizer_(tokenizer),
      detokenizer_(tokenizer, request.skip_special_tokens),
      stop_(request.stopping.stop_strings, request.stopping.include_stop),
      in_header_(request.message_format != nullptr) {}

FinishReason Answer::Add(OutputToken token) {
  WINNOW_CHECK(!ended_);
  const StoppingOptions& stopping = request_.stopping;
  const int32_t id = token.token;
  ++num_tokens_;
  const bool is_stop_token = Has(stopping.stop_token_ids, id);
  if (!is_stop_token || stopping.include_stop) {
    if (request_.message_format != nullptr && tokenizer_.IsSpecial(id)) {
      AddControlToken(id);
    } else {
      AddText(detokenizer_.Add(id), !in_header_);
    }
  }
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

void Answer::AddControlToken(int32_t id) {
  // A character that is not whole ends here, and so does a stop string.
  AddText(detokenizer_.Flush(), !in_header_);
  detokenizer_ = Detokenizer(tokenizer_, request_.skip_special_tokens);
  if (stop_.matched()) return;
  const std::string held = stop_.Flush();
  released_bytes_ += held.size();
  text_ += held;
  AddText(kControlBegin + tokenizer_.Decode({&id, 1}, /*skip_special_tokens=*/false) + kControlEnd,
          /*searched=*/false);
  if (Has(request_.message_format->header_begins, id)) in_header_ = true;
  if (Has(request_.message_format->header_ends, id)) in_header_ = false;
}

void Answer::AddText(const std::string& text, bool searched) {
  certain_bytes_ += text.size();
  std::string out;
  if (!searched || num_tokens_ < request_.stopping.min_tokens) {
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
  AddText(detokenizer_.Flush(), !in_header_);
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
