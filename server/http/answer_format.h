// How one API words an answer: winnow's messages in, bytes of a response's body out. One object for
// one answer; one thread at a time.
#ifndef WINNOW_SERVER_HTTP_ANSWER_FORMAT_H_
#define WINNOW_SERVER_HTTP_ANSWER_FORMAT_H_

#include <string>

#include "server/http/http_error.h"
#include "winnow/v1/inference.pb.h"

namespace winnow::server {

class AnswerFormat {
 public:
  virtual ~AnswerFormat() = default;

  // Whether the answer goes out as events while it is made, or whole at its end.
  virtual bool streamed() const = 0;

  // Once, before the others: the generation's name, and when it began (Unix seconds).
  virtual void Begin(const std::string& name, int64_t created) = 0;
  // `prompt_tokens`: of the prompt, which the first message knows.
  virtual void Add(const v1::GenerateResponse& message, int32_t prompt_tokens,
                   std::string& out) = 0;
  // Every choice has ended. Not streamed: the whole body.
  virtual void End(std::string& out) = 0;

  // Streamed: an error after the beginning.
  virtual void Break(const HttpError& error, std::string& out) = 0;
  // Streamed: whether an error before the beginning is told so, too, and not by the status.
  virtual bool BreaksAtOnce(const HttpError&) const { return false; }
  // Streamed: something that means nothing. A comment, in Server-Sent Events.
  virtual void Ping(std::string& out) { out += ": \n\n"; }

  // The body of an error before the beginning.
  virtual std::string ErrorBody(const HttpError& error) const { return OpenAiErrorBody(error); }
  // The client's name for a field that the validator names.
  virtual std::string Field(std::string_view field) const = 0;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_ANSWER_FORMAT_H_
