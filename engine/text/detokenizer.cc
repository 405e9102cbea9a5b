#include "engine/text/tokenizer.h"
#include "engine/text/tokenizer_impl.h"

namespace winnow::engine {

struct Detokenizer::State {
  const Tokenizer::Impl* tokenizer;
  bool skip_special_tokens;
  TokenDecoder::Stream stream;
};

Detokenizer::Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens)
    : state_(std::make_unique<State>(State{tokenizer.impl_.get(), skip_special_tokens,
                                           tokenizer.impl_->decoder().NewStream()})) {}

Detokenizer::~Detokenizer() = default;
Detokenizer::Detokenizer(Detokenizer&&) noexcept = default;
Detokenizer& Detokenizer::operator=(Detokenizer&&) noexcept = default;

std::string Detokenizer::Add(int32_t id) {
  if (const auto text = state_->tokenizer->DecoderText(id, state_->skip_special_tokens)) {
    state_->stream.Add(*text);
  }
  return state_->stream.Take();
}

std::string Detokenizer::Flush() {
  state_->stream.Finish();
  return state_->stream.Take();
}

}  // namespace winnow::engine
