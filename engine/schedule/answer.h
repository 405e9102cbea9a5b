// What one request has generated so far, on its way to the client: tokens to text, stop conditions,
// and which tokens may be told already (request.h, OutputEvent). Survives preemption untouched, as
// it depends on the tokens alone.
#ifndef WINNOW_ENGINE_SCHEDULE_ANSWER_H_
#define WINNOW_ENGINE_SCHEDULE_ANSWER_H_

#include <cstdint>
#include <deque>
#include <string>

#include "engine/schedule/request.h"
#include "engine/text/stop_matcher.h"
#include "engine/text/tokenizer.h"

namespace winnow::engine {

class Answer {
 public:
  // `request` and `tokenizer` must outlive the answer.
  Answer(const Request& request, const Tokenizer& tokenizer);

  // Takes the next token. Not kNone: the answer is complete, and which condition ended it. A stop
  // string wins over a stop token, and both over max_tokens, when one token brings several.
  //
  // Stop tokens are masked by the sampler before min_tokens. The text of the first min_tokens - 1
  // tokens is not searched for stop strings, so the answer never ends below min_tokens.
  // A stop token's own text is part of the answer only with include_stop.
  FinishReason Add(OutputToken token);

  // Ends it for a reason from outside (cancelled, deadline, error): what was held back is let go.
  void Cut();

  // Moves text and tokens that may be told and were not yet into `event`; at the end, all of them.
  void TakeInto(OutputEvent* event);

  // Something to tell?
  bool has_news() const;
  int32_t num_tokens() const { return num_tokens_; }

 private:
  struct Told {
    OutputToken token;
    uint64_t text_end = 0;  // bytes of text that were certain after it
  };
  // `searched`: for stop strings.
  void AddText(const std::string& text, bool searched = true);
  // Adds a control token of an answer that has a message format.
  void AddControlToken(int32_t id);
  void End();

  const Request& request_;
  const Tokenizer& tokenizer_;
  Detokenizer detokenizer_;
  StopMatcher stop_;
  std::string text_;         // to be told
  std::deque<Told> tokens_;  // not yet told
  uint64_t certain_bytes_ = 0;
  uint64_t released_bytes_ = 0;
  int32_t num_tokens_ = 0;
  bool in_header_ = false;  // of a message; false without a message format
  bool ended_ = false;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_ANSWER_H_
