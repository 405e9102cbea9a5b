// A generation as an HTTP exchange: messages are taken from it when the transport has room, and
// worded by the API's format.
#ifndef WINNOW_SERVER_HTTP_GENERATE_EXCHANGE_H_
#define WINNOW_SERVER_HTTP_GENERATE_EXCHANGE_H_

#include <memory>
#include <vector>

#include "server/generator.h"
#include "server/http/answer_format.h"
#include "server/http/http_exchange.h"

namespace winnow::server {

// Starts a generation. `info.refused` may hold the verdict of whoever read the request: it is answered,
// counted and logged like every other end. The head is held back until there is something to say, so
// that a request that is refused when its prompt is tokenised still gets its status.
std::unique_ptr<HttpExchange> StartGeneration(Generator& generator, v1::GenerateRequest request,
                                              CallInfo info, std::unique_ptr<AnswerFormat> format,
                                              HttpWaker wake);

// The same of several prompts, which one answer is about: the choices of each come behind those of the prompts before it.
// If one fails, the others are cancelled, and the answer is its error. Where `info.refused` is not OK, there may be none.
std::unique_ptr<HttpExchange> StartGenerations(Generator& generator,
                                               std::vector<v1::GenerateRequest> requests,
                                               CallInfo info, std::unique_ptr<AnswerFormat> format,
                                               HttpWaker wake);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_GENERATE_EXCHANGE_H_
