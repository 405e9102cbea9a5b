// The status page: one HTML document without outside assets, made of status_page.html by the build. In
// the browser it reads /metrics and /v1/models of the same port every two seconds. It holds nothing of
// the server's, so it needs no key itself; where keys are asked for, it asks its reader for one.
#ifndef WINNOW_SERVER_HTTP_STATUS_PAGE_H_
#define WINNOW_SERVER_HTTP_STATUS_PAGE_H_

#include <string_view>

namespace winnow::server {

extern const std::string_view kStatusPage;
// Content-Security-Policy of the page: scripts and styles are its own, and it may ask this server alone.
inline constexpr std::string_view kStatusPagePolicy =
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src "
    "'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_STATUS_PAGE_H_
