// The `decoder` of tokenizer.json: token texts back to the text that they stand for, as a stream.
//
// A decoder is a chain of stages. Each stage is fed the tokens of the one before, piece by piece,
// and passes on what has become certain; joined, the output is what the reference gives for all
// tokens at once. Honoured: ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace, Sequence, and
// no decoder at all. Every other kind is refused by name.
#ifndef WINNOW_ENGINE_TEXT_TOKEN_DECODER_H_
#define WINNOW_ENGINE_TEXT_TOKEN_DECODER_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/tokenizer_json.h"

namespace winnow::engine {

// Receives tokens. Calls come as: for each token Text (any number of times, whole characters) and
// then EndToken; after the last token Finish.
class TokenSink {
 public:
  virtual ~TokenSink() = default;
  virtual void Text(std::string_view text) = 0;
  virtual void EndToken() = 0;
  virtual void Finish() = 0;
};

// What `decoder` says. Immutable; any thread.
class TokenDecoder {
 public:
  static absl::StatusOr<TokenDecoder> Make(const std::optional<JsonNode>& json);

  // The state of decoding one sequence. The TokenDecoder must outlive it.
  class Stream {
   public:
    void Add(std::string_view token);
    void Finish();
    // What has become certain since the last call: whole characters.
    std::string Take();

   private:
    friend class TokenDecoder;
    std::unique_ptr<std::string> out_;                // where the last stage writes
    std::vector<std::unique_ptr<TokenSink>> stages_;  // from last to first
  };
  Stream NewStream() const;

 private:
  using MakeStage = std::function<std::unique_ptr<TokenSink>(TokenSink* next)>;
  absl::Status AddStages(const JsonNode& json);
  std::vector<MakeStage> stages_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_TOKEN_DECODER_H_
