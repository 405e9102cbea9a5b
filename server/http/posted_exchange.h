// An exchange whose beginning is worked on by another thread: reading megabytes of JSON, or
// tokenising, would hold up every stream of an I/O thread.
#ifndef WINNOW_SERVER_HTTP_POSTED_EXCHANGE_H_
#define WINNOW_SERVER_HTTP_POSTED_EXCHANGE_H_

#include <functional>
#include <memory>

#include "server/generator.h"
#include "server/http/http_exchange.h"

namespace winnow::server {

// Runs `work` on a tokenising thread; the exchange that it returns takes over. Null if these threads
// have too much to do (then `work` is dropped). Where the client goes away first, `work` is not run.
std::unique_ptr<HttpExchange> PostExchange(Generator& generator, size_t bytes,
                                           std::function<std::unique_ptr<HttpExchange>()> work,
                                           HttpWaker wake);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_POSTED_EXCHANGE_H_
