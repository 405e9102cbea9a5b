#include "server/http/generate_exchange.h"

#include <algorithm>
#include <ctime>
#include <utility>

namespace winnow::server {
namespace {

// A piece of a stream is sent when it has this much, even if there is more to take.
constexpr size_t kPieceBytes = 32 << 10;

class GenerateExchange final : public HttpExchange {
 public:
  GenerateExchange(Generator& generator, std::vector<v1::GenerateRequest> requests, CallInfo info,
                   std::unique_ptr<AnswerFormat> format, HttpWaker wake)
      : request_id_(info.client_request_id),
        traceparent_(info.traceparent),
        format_(std::move(format)) {
    // One tells of the refusal.
    if (!info.refused.ok()) requests.resize(1);
    choices_each_ = requests.front().has_n() ? requests.front().n() : 1;
    for (v1::GenerateRequest& request : requests) {
      generations_.push_back(generator.Start(std::move(request), info, wake));
    }
    ended_.resize(generations_.size());
    if (request_id_.empty()) request_id_ = name();
    format_->Begin(name(), std::time(nullptr));
  }
  ~GenerateExchange() override {
    for (const auto& generation : generations_) generation->Close();
  }

  std::optional<HttpPiece> Take() override {
    if (done_) return std::nullopt;
    HttpPiece piece;
    // In turns, so that no prompt's answer starves the others of a slow reader.
    for (size_t left = generations_.size(); left > 0 && piece.body.size() < kPieceBytes; --left) {
      const size_t i = std::exchange(next_, (next_ + 1) % generations_.size());
      if (ended_[i]) continue;
      const absl::Status status = TakeFrom(i, piece.body);
      if (status.ok()) continue;
      done_ = true;
      Cancel(/*slow=*/false);
      return Fail(status, std::move(piece));
    }
    done_ = std::all_of(ended_.begin(), ended_.end(), [](bool ended) { return ended; });
    if (done_) {
      piece.last = true;
      format_->End(piece.body);
    }
    if (piece.body.empty() && !piece.last) return std::nullopt;
    return WithHead(std::move(piece));
  }

  std::optional<HttpPiece> Ping() override {
    if (!format_->streamed() || done_) return std::nullopt;
    HttpPiece piece;
    format_->Ping(piece.body);
    return WithHead(std::move(piece));
  }

  void Cancel(bool slow) override {
    for (const auto& generation : generations_) {
      if (slow) {
        generation->GiveUpOnReader();
      } else {
        generation->Cancel();
      }
    }
  }

 private:
  const std::string& name() const { return generations_.front()->name(); }

  // Appends what there is of a prompt's answer; not OK: its end.
  absl::Status TakeFrom(size_t i, std::string& body) {
    while (body.size() < kPieceBytes) {
      Generation::Item item = generations_[i]->Take();
      if (auto* const message = std::get_if<v1::GenerateResponse>(&item)) {
        message->set_choice(message->choice() + static_cast<int32_t>(i) * choices_each_);
        format_->Add(*message, generations_[i]->prompt_tokens(), body);
        continue;
      }
      if (const auto* const end = std::get_if<Generation::End>(&item)) {
        ended_[i] = true;
        return end->status;
      }
      break;
    }
    return absl::OkStatus();
  }

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
    head.headers.emplace_back("X-Winnow-Request-Id", name());
    if (!traceparent_.empty()) head.headers.emplace_back("traceparent", traceparent_);
  }

  std::string request_id_;
  const std::string traceparent_;
  const std::unique_ptr<AnswerFormat> format_;
  std::vector<std::shared_ptr<Generation>> generations_;  // one for each prompt
  std::vector<bool> ended_;                               // of them
  size_t next_ = 0;
  int32_t choices_each_ = 1;
  bool begun_ = false;  // the head is out
  bool done_ = false;
};

}  // namespace

std::unique_ptr<HttpExchange> StartGenerations(Generator& generator,
                                               std::vector<v1::GenerateRequest> requests,
                                               CallInfo info, std::unique_ptr<AnswerFormat> format,
                                               HttpWaker wake) {
  return std::make_unique<GenerateExchange>(generator, std::move(requests), std::move(info),
                                            std::move(format), std::move(wake));
}

std::unique_ptr<HttpExchange> StartGeneration(Generator& generator, v1::GenerateRequest request,
                                              CallInfo info, std::unique_ptr<AnswerFormat> format,
                                              HttpWaker wake) {
  std::vector<v1::GenerateRequest> requests;
  requests.push_back(std::move(request));
  return StartGenerations(generator, std::move(requests), std::move(info), std::move(format),
                          std::move(wake));
}

}  // namespace winnow::server
