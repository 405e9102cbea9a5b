#include "engine/text/token_decoder.h"

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/text/tokenizer_normalizer.h"
#include "engine/text/tokenizer_regex.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine {
namespace {

// A stage with one after it.
class Stage : public TokenSink {
 public:
  explicit Stage(TokenSink* next) : next_(next) {}
  void Text(std::string_view text) override { next_->Text(text); }
  void EndToken() override { next_->EndToken(); }
  void Finish() override { next_->Finish(); }

 protected:
  TokenSink* next_;
};

// A stage that must see the whole token.
class WholeTokenStage : public Stage {
 public:
  using Stage::Stage;
  void Text(std::string_view text) final { token_ += text; }
  void EndToken() final {
    OnToken(token_);
    token_.clear();
  }

 protected:
  virtual void OnToken(const std::string& token) = 0;

 private:
  std::string token_;
};

class Collect : public TokenSink {
 public:
  explicit Collect(std::string* out) : out_(out) {}
  void Text(std::string_view text) override { *out_ += text; }
  void EndToken() override {}
  void Finish() override {}

 private:
  std::string* out_;
};

// Without a decoder, tokens are joined by spaces.
class JoinWithSpaces : public Stage {
 public:
  using Stage::Stage;
  void Text(std::string_view text) override {
    Separate();
    next_->Text(text);
  }
  void EndToken() override {
    Separate();  // an empty token counts
    in_token_ = false;
    next_->EndToken();
  }

 private:
  void Separate() {
    if (in_token_) return;
    in_token_ = true;
    if (!first_) next_->Text(" ");
    first_ = false;
  }
  bool first_ = true;
  bool in_token_ = false;
};

// All tokens become one; the text streams through.
class Fuse : public Stage {
 public:
  using Stage::Stage;
  void EndToken() override {}
  void Finish() override {
    next_->EndToken();
    next_->Finish();
  }
};

// Characters of the byte alphabet to bytes, and these to text as one token. A token with any other
// character stands for its own bytes.
class ByteLevel : public WholeTokenStage {
 public:
  using WholeTokenStage::WholeTokenStage;
  void Finish() override {
    Pass(/*more_may_follow=*/false);
    next_->EndToken();
    next_->Finish();
  }

 protected:
  void OnToken(const std::string& token) override {
    const size_t before = bytes_.size();
    for (size_t at = 0; at < token.size();) {
      int length = 0;
      const int byte = ByteLevelByte(DecodeCodePoint(token, at, &length));
      if (byte < 0) {
        bytes_.resize(before);
        bytes_ += token;
        break;
      }
      bytes_ += static_cast<char>(byte);
      at += static_cast<size_t>(length);
    }
    Pass(/*more_may_follow=*/true);
  }

 private:
  void Pass(bool more_may_follow) {
    std::string text;
    bytes_.erase(0, AppendLossyUtf8(bytes_, more_may_follow, &text));
    if (!text.empty()) next_->Text(text);
  }
  std::string bytes_;  // not yet a whole character
};

// Runs of <0xXX> tokens become the text of their bytes, or U+FFFD for each if the run as a whole is
// not valid UTF-8. So a run is held back until it ends: any later byte can still change all of it.
class ByteFallback : public WholeTokenStage {
 public:
  using WholeTokenStage::WholeTokenStage;
  void Finish() override {
    EndRun();
    next_->Finish();
  }

 protected:
  void OnToken(const std::string& token) override {
    const int byte = ByteOf(token);
    if (byte >= 0) {
      run_ += static_cast<char>(byte);
      return;
    }
    EndRun();
    next_->Text(token);
    next_->EndToken();
  }

 private:
  static int HexDigit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
  }
  static int ByteOf(std::string_view token) {
    if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
    // The reference's number parser takes a plus sign for a digit's place.
    const int high = token[3] == '+' ? 0 : HexDigit(token[3]);
    const int low = HexDigit(token[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
  }
  void EndRun() {
    if (run_.empty()) return;
    if (FindInvalidUtf8(run_) == std::string::npos) {
      next_->Text(run_);
      next_->EndToken();
    } else {
      for (size_t i = 0; i < run_.size(); ++i) {
        next_->Text(kReplacementCharacter);
        next_->EndToken();
      }
    }
    run_.clear();
  }
  std::string run_;
};

// A literal is looked for as the text streams by: only what may be its beginning is held back.
class ReplaceLiteral : public Stage {
 public:
  ReplaceLiteral(TokenSink* next, const std::string* literal, const std::string* content)
      : Stage(next), literal_(*literal), content_(*content) {}
  void Text(std::string_view text) override {
    held_ += text;
    Pass(/*more_may_follow=*/true);
  }
  void EndToken() override {
    Pass(/*more_may_follow=*/false);
    next_->EndToken();
  }

 private:
  void Pass(bool more_may_follow) {
    size_t from = 0;
    std::string out;
    for (size_t at; (at = held_.find(literal_, from)) != std::string::npos;
         from = at + literal_.size()) {
      out.append(held_, from, at - from).append(content_);
    }
    size_t end = held_.size();
    if (more_may_follow) end -= PossibleBeginning(std::string_view(held_).substr(from));
    out.append(held_, from, end - from);
    held_.erase(0, end);
    if (!out.empty()) next_->Text(out);
  }
  // Size of the longest end of `text` that the literal begins with.
  size_t PossibleBeginning(std::string_view text) const {
    for (size_t size = std::min(text.size(), literal_.size() - 1); size > 0; --size) {
      if (std::string_view(literal_).starts_with(text.substr(text.size() - size))) return size;
    }
    return 0;
  }
  const std::string& literal_;  // not empty
  const std::string& content_;
  std::string held_;
};

// A regular expression, or the empty literal, must see the whole token.
class ReplacePattern : public WholeTokenStage {
 public:
  ReplacePattern(TokenSink* next, const SplitPattern* pattern, const std::string* content)
      : WholeTokenStage(next), pattern_(*pattern), content_(*content) {}

 protected:
  void OnToken(const std::string& token) override {
    // A token that exhausts the matcher passes unchanged: decoding has no way to fail.
    if (!pattern_.FindParts(token, &scratch_, &parts_).ok()) {
      next_->Text(token);
      next_->EndToken();
      return;
    }
    std::string out;
    for (const TextPart& part : parts_) {
      if (part.is_match) {
        out += content_;
      } else {
        out.append(token, part.begin, part.end - part.begin);
      }
    }
    next_->Text(out);
    next_->EndToken();
  }

 private:
  const SplitPattern& pattern_;
  const std::string& content_;
  RegexScratch scratch_;
  std::vector<TextPart> parts_;
};

// Cuts up to `start` and `stop` times a character from the two ends of each token.
class Strip : public Stage {
 public:
  Strip(TokenSink* next, std::string content, size_t start, size_t stop)
      : Stage(next), content_(std::move(content)), start_(start), stop_(stop) {}

  void Text(std::string_view text) override {
    while (at_start_ && cut_ < start_ && text.starts_with(content_)) {
      text.remove_prefix(content_.size());
      ++cut_;
    }
    if (!text.empty()) at_start_ = false;
    if (stop_ == 0) {
      if (!text.empty()) next_->Text(text);
      return;
    }
    // The characters at the end may have to go; what is before them may not.
    held_ += text;
    size_t end = held_.size();
    for (size_t i = 0; i < stop_ && std::string_view(held_).substr(0, end).ends_with(content_);
         ++i) {
      end -= content_.size();
    }
    if (end > 0) next_->Text(std::string_view(held_).substr(0, end));
    held_.erase(0, end);
  }
  void EndToken() override {
    held_.clear();
    at_start_ = true;
    cut_ = 0;
    next_->EndToken();
  }

 private:
  std::string content_;  // one character
  size_t start_;
  size_t stop_;
  bool at_start_ = true;
  size_t cut_ = 0;
  std::string held_;  // at most stop_ times the character
};

// The replacement character becomes a space; in the first token, where it marks the beginning of
// the text, nothing.
class Metaspace : public Stage {
 public:
  Metaspace(TokenSink* next, std::string replacement, bool drop_in_first)
      : Stage(next), replacement_(std::move(replacement)), drop_(drop_in_first) {}
  void Text(std::string_view text) override {
    std::string out;
    for (size_t from = 0; from < text.size();) {
      const size_t at = text.find(replacement_, from);
      out += text.substr(from, at == std::string_view::npos ? at : at - from);
      if (at == std::string_view::npos) break;
      if (!drop_) out += ' ';
      from = at + replacement_.size();
    }
    if (!out.empty()) next_->Text(out);
  }
  void EndToken() override {
    drop_ = false;
    next_->EndToken();
  }

 private:
  std::string replacement_;  // one character
  bool drop_;
};

}  // namespace

absl::StatusOr<TokenDecoder> TokenDecoder::Make(const std::optional<JsonNode>& json) {
  TokenDecoder decoder;
  if (!json) {
    decoder.stages_.push_back(
        [](TokenSink* next) { return std::make_unique<JoinWithSpaces>(next); });
    return decoder;
  }
  WINNOW_RETURN_IF_ERROR(decoder.AddStages(*json));
  return decoder;
}

absl::Status TokenDecoder::AddStages(const JsonNode& json) {
  WINNOW_ASSIGN_OR_RETURN(const JsonNode type_node, json.Member("type"));
  WINNOW_ASSIGN_OR_RETURN(const std::string type, type_node.String());
  if (type == "Sequence") {
    WINNOW_ASSIGN_OR_RETURN(const JsonNode list, json.Member("decoders"));
    WINNOW_RETURN_IF_ERROR(list.RequireArray());
    for (size_t i = 0; i < list.size(); ++i) WINNOW_RETURN_IF_ERROR(AddStages(list.At(i)));
    return absl::OkStatus();
  }
  if (type == "ByteLevel") {
    stages_.push_back([](TokenSink* next) { return std::make_unique<ByteLevel>(next); });
  } else if (type == "ByteFallback") {
    stages_.push_back([](TokenSink* next) { return std::make_unique<ByteFallback>(next); });
  } else if (type == "Fuse") {
    stages_.push_back([](TokenSink* next) { return std::make_unique<Fuse>(next); });
  } else if (type == "Replace") {
    WINNOW_ASSIGN_OR_RETURN(SplitPattern pattern, ReadPattern(json));
    WINNOW_ASSIGN_OR_RETURN(const JsonNode content_node, json.Member("content"));
    WINNOW_ASSIGN_OR_RETURN(std::string content, content_node.String());
    auto shared = std::make_shared<const std::pair<SplitPattern, std::string>>(std::move(pattern),
                                                                               std::move(content));
    stages_.push_back([shared](TokenSink* next) -> std::unique_ptr<TokenSink> {
      const std::string* literal = shared->first.literal();
      if (literal != nullptr && !literal->empty()) {
        return std::make_unique<ReplaceLiteral>(next, literal, &shared->second);
      }
      return std::make_unique<ReplacePattern>(next, &shared->first, &shared->second);
    });
  } else if (type == "Strip") {
    WINNOW_ASSIGN_OR_RETURN(const JsonNode content_node, json.Member("content"));
    WINNOW_ASSIGN_OR_RETURN(const char32_t character, content_node.Character());
    WINNOW_ASSIGN_OR_RETURN(const JsonNode start_node, json.Member("start"));
    WINNOW_ASSIGN_OR_RETURN(const JsonNode stop_node, json.Member("stop"));
    WINNOW_ASSIGN_OR_RETURN(const int64_t start, start_node.Integer(0, 1 << 20));
    WINNOW_ASSIGN_OR_RETURN(const int64_t stop, stop_node.Integer(0, 1 << 20));
    std::string content;
    AppendCodePoint(character, &content);
    stages_.push_back([content, start, stop](TokenSink* next) {
      return std::make_unique<Strip>(next, content, static_cast<size_t>(start),
                                     static_cast<size_t>(stop));
    });
  } else if (type == "Metaspace") {
    WINNOW_ASSIGN_OR_RETURN(const JsonNode replacement_node, json.Member("replacement"));
    WINNOW_ASSIGN_OR_RETURN(const char32_t character, replacement_node.Character());
    WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> scheme, json.Optional("prepend_scheme"));
    WINNOW_ASSIGN_OR_RETURN(const bool add_prefix_space, json.BoolOr("add_prefix_space", true));
    bool drop = add_prefix_space;
    if (scheme) {
      WINNOW_ASSIGN_OR_RETURN(const std::string name, scheme->String());
      if (name != "always" && name != "first" && name != "never") {
        return scheme->Error(Concat("unknown prepend_scheme \"", name, "\""));
      }
      drop = name != "never";
    }
    std::string replacement;
    AppendCodePoint(character, &replacement);
    stages_.push_back([replacement, drop](TokenSink* next) {
      return std::make_unique<Metaspace>(next, replacement, drop);
    });
  } else {
    return type_node.Unsupported(
        Concat("decoder \"", type,
               "\" is not supported (ByteLevel, Replace, ByteFallback, Fuse, Strip, "
               "Metaspace, Sequence are)"));
  }
  return absl::OkStatus();
}

TokenDecoder::Stream TokenDecoder::NewStream() const {
  Stream stream;
  stream.out_ = std::make_unique<std::string>();
  stream.stages_.push_back(std::make_unique<Collect>(stream.out_.get()));
  for (auto it = stages_.rbegin(); it != stages_.rend(); ++it) {
    stream.stages_.push_back((*it)(stream.stages_.back().get()));
  }
  return stream;
}

void TokenDecoder::Stream::Add(std::string_view token) {
  if (!token.empty()) stages_.back()->Text(token);
  stages_.back()->EndToken();
}

void TokenDecoder::Stream::Finish() { stages_.back()->Finish(); }

std::string TokenDecoder::Stream::Take() { return std::exchange(*out_, std::string()); }

}  // namespace winnow::engine
