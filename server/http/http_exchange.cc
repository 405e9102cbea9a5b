#include "server/http/http_exchange.h"

namespace winnow::server {
namespace {

class AnsweredExchange final : public HttpExchange {
 public:
  explicit AnsweredExchange(HttpPiece piece) : piece_(std::move(piece)) {}
  std::optional<HttpPiece> Take() override { return std::exchange(piece_, std::nullopt); }

 private:
  std::optional<HttpPiece> piece_;
};

}  // namespace

const std::string* HttpRequest::Find(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key == name) return &value;
  }
  return nullptr;
}

std::unique_ptr<HttpExchange> Answered(HttpPiece piece) {
  return std::make_unique<AnsweredExchange>(std::move(piece));
}

HttpPiece Whole(int status, std::string content_type, std::string body) {
  HttpPiece piece;
  piece.head.emplace();
  piece.head->status = status;
  if (!content_type.empty()) {
    piece.head->headers.emplace_back("Content-Type", std::move(content_type));
  }
  piece.body = std::move(body);
  piece.last = true;
  return piece;
}

}  // namespace winnow::server
