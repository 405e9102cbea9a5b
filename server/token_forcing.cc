#include "server/token_forcing.h"

#include <span>
#include <utility>

#include "kernels/check.h"

namespace winnow::server {
namespace {

using Tokens = std::shared_ptr<const std::vector<int32_t>>;

class ForcedState final : public engine::GrammarState {
 public:
  ForcedState(Tokens tokens, int32_t vocab_size)
      : tokens_(std::move(tokens)), allowed_((static_cast<size_t>(vocab_size) + 31) / 32) {}

  std::span<const uint32_t> AllowedTokens() override {
    if (next_ == tokens_->size()) return {};  // anything
    if (allowed_token_ >= 0) Flip(allowed_token_);
    allowed_token_ = (*tokens_)[next_];
    Flip(allowed_token_);
    return allowed_;
  }

  bool Accept(int32_t token) override {
    if (next_ == tokens_->size()) return true;
    if (token != (*tokens_)[next_]) return false;
    ++next_;
    return true;
  }

  std::unique_ptr<GrammarState> Clone() const override {
    return std::make_unique<ForcedState>(*this);
  }

 private:
  void Flip(int32_t token) { allowed_[token / 32] ^= uint32_t{1} << (token % 32); }

  Tokens tokens_;
  size_t next_ = 0;
  std::vector<uint32_t> allowed_;
  int32_t allowed_token_ = -1;  // the one whose bit is set
};

class ForcedTokens final : public engine::Grammar {
 public:
  ForcedTokens(std::vector<int32_t> tokens, int32_t vocab_size)
      : tokens_(std::make_shared<const std::vector<int32_t>>(std::move(tokens))),
        vocab_size_(vocab_size) {
    for (const int32_t token : *tokens_) WINNOW_CHECK(token >= 0 && token < vocab_size_);
  }
  std::unique_ptr<engine::GrammarState> NewState() const override {
    return std::make_unique<ForcedState>(tokens_, vocab_size_);
  }
  size_t size_bytes() const override { return tokens_->size() * sizeof(int32_t); }

 private:
  const Tokens tokens_;
  const int32_t vocab_size_;
};

}  // namespace

std::shared_ptr<const engine::Grammar> ForceTokens(std::vector<int32_t> tokens,
                                                   int32_t vocab_size) {
  return std::make_shared<ForcedTokens>(std::move(tokens), vocab_size);
}

}  // namespace winnow::server
