#include "server/http/generate_exchange.h"

#include <ctime>
#include <utility>

namespace winnow::server {
namespace {

// A piece of a stream is sent when it has this much, even if there is more to take.
constexpr size_t kPieceBytes = 32 << 10;

class GenerateExchange final : public HttpExchange {
 public:
  GenerateExchange(Generator& generator, v1::GenerateRequest request, CallInfo info,
                   std::unique_ptr<AnswerFormat> format, HttpWaker wake)
      : request_id_(info.client_request_id),
        traceparent_(info.traceparent),
        format_(std::move(format)) {
    generation_ = generator.Start(std::move(request), std::move(info), std::move(wake));
    if (request_id_.empty()) request_id_ = generation_->name();
    format_->Begin(generation_->name(), std::time(nullptr));
  }
  ~GenerateExchange() override { generation_->Close(); }

  std::optional<HttpPiece> Take() override {
    if (ended_) return std::nullopt;
    HttpPiece piece;
    for (;;) {
      Generation::Item item = generation_->Take();
      if (const auto* message = std::get_if<v1::GenerateResponse>(&item)) {
        format_->Add(*message, generation_->prompt_tokens(), piece.body);
        if (piece.body.size() >= kPieceBytes) break;
        continue;
      }
      if (const auto* end = std::get_if<Generation::End>(&item)) {
        ended_ = true;
        if (!end->status.ok()) return Fail(end->status, std::move(piece));
        piece.last = true;
        format_->End(piece.body);
      }
      break;
    }
    if (piece.body.empty() && !piece.last) return std::nullopt;
    return WithHead(std::move(piece));
  }

  std::optional<HttpPiece> Ping() override {
    if (!format_->streamed() || ended_) return std::nullopt;
    HttpPiece piece;
    format_->Ping(piece.body);
    return WithHead(std::move(piece));
  }

  void Cancel(bool slow) override {
    if (slow) {
      generation_->GiveUpOnReader();
    } else {
      generation_->Cancel();
    }
  }

 private:
  HttpPiece WithHead(HttpPiece piece) {
    if (std::exchange(begun_, true)) return piece;
    piece.head.emplace();
    piece.head->streamed = format_->streamed();
    auto& headers = piece.head->headers;
    if (format_->streamed()) {
      headers.emplace_back("Content-Type", "text/event-stream; charset=utf-8");
      headers.emplace_back("Cache-Control", "no-cache");
      headers.emplace_back("X-Accel-Buffering", "no");  // nginx would collect events otherwise
    } else {
      headers.emplace_back("Content-Type", "application/json");
    }
    AddIds(*piece.head);
    return piece;
  }

  HttpPiece Fail(const absl::Status& status, HttpPiece piece) {
    const HttpError error =
        ToHttpError(status, [this](std::string_view field) { return format_->Field(field); });
    if (begun_ || (format_->streamed() && format_->BreaksAtOnce(error))) {
      format_->Break(error, piece.body);
      piece.last = true;
      piece.close = true;
      return WithHead(std::move(piece));
    }
    HttpPiece response = ErrorResponse(error, format_->ErrorBody(error));
    AddIds(*response.head);
    begun_ = true;
    return response;
  }

  void AddIds(HttpHead& head) const {
    head.headers.emplace_back("X-Request-Id", request_id_);
    head.headers.emplace_back("X-Winnow-Request-Id", generation_->name());
    if (!traceparent_.empty()) head.headers.emplace_back("traceparent", traceparent_);
  }

  std::string request_id_;
  const std::string traceparent_;
  const std::unique_ptr<AnswerFormat> format_;
  std::shared_ptr<Generation> generation_;
  bool begun_ = false;  // the head is out
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<HttpExchange> StartGeneration(Generator& generator, v1::GenerateRequest request,
                                              CallInfo info, std::unique_ptr<AnswerFormat> format,
                                              HttpWaker wake) {
  return std::make_unique<GenerateExchange>(generator, std::move(request), std::move(info),
                                            std::move(format), std::move(wake));
}

}  // namespace winnow::server
