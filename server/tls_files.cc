#include "server/tls_files.h"

#include <openssl/err.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <array>
#include <utility>

#include "server/strings.h"

namespace winnow::server {
namespace {

absl::Status Invalid(std::string_view flag, const std::string& path) {
  const unsigned long code = ERR_get_error();
  const char* const reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  ERR_clear_error();
  return absl::InvalidArgumentError(
      Concat(flag, " ", path, ": ", reason == nullptr ? "cannot be used" : reason));
}

// A certificate that is expired, or not valid yet; null: neither.
const char* Untimely(const X509* certificate) {
  if (X509_cmp_current_time(X509_get0_notAfter(certificate)) < 0) {
    return "a certificate has expired";
  }
  if (X509_cmp_current_time(X509_get0_notBefore(certificate)) > 0) {
    return "a certificate is not valid yet";
  }
  return nullptr;
}

// Every certificate of the context, ours and those of authorities, must be valid now.
absl::Status CheckTimes(SSL_CTX* context, const TlsPaths& paths) {
  const auto refuse = [](std::string_view flag, const std::string& path, std::string_view what) {
    return absl::InvalidArgumentError(Concat(flag, " ", path, ": ", what));
  };
  STACK_OF(X509)* chain = nullptr;
  SSL_CTX_get0_chain_certs(context, &chain);
  const char* problem = Untimely(SSL_CTX_get0_certificate(context));
  for (int i = 0; problem == nullptr && chain != nullptr && i < sk_X509_num(chain); ++i) {
    problem = Untimely(sk_X509_value(chain, i));
  }
  if (problem != nullptr) return refuse("--tls-cert", paths.cert, problem);
  const STACK_OF(X509_OBJECT)* const authorities =
      X509_STORE_get0_objects(SSL_CTX_get_cert_store(context));
  for (int i = 0; i < sk_X509_OBJECT_num(authorities); ++i) {
    const X509* const authority = X509_OBJECT_get0_X509(sk_X509_OBJECT_value(authorities, i));
    problem = authority == nullptr ? nullptr : Untimely(authority);
    if (problem != nullptr) return refuse("--tls-client-ca", paths.client_ca, problem);
  }
  return absl::OkStatus();
}

// HTTP/2 if the client offers it, and else no handshake.
int ChooseHttp2(SSL*, const unsigned char** out, unsigned char* out_size,
                const unsigned char* offered, unsigned offered_size, void*) {
  static constexpr unsigned char kHttp2[] = {2, 'h', '2'};
  unsigned char* chosen = nullptr;
  if (SSL_select_next_proto(&chosen, out_size, kHttp2, sizeof kHttp2, offered, offered_size) !=
      OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_ALERT_FATAL;
  }
  *out = chosen;
  return SSL_TLSEXT_ERR_OK;
}

}  // namespace

TlsFiles::TlsFiles(TlsPaths paths, Protocol protocol, Problem on_problem,
                   std::chrono::nanoseconds read_again)
    : paths_(std::move(paths)),
      protocol_(protocol),
      on_problem_(std::move(on_problem)),
      read_again_(read_again) {}

absl::StatusOr<std::unique_ptr<TlsFiles>> TlsFiles::Load(TlsPaths paths, Protocol protocol,
                                                         Problem on_problem,
                                                         std::chrono::nanoseconds read_again) {
  if (paths.cert.empty()) return nullptr;
  std::unique_ptr<TlsFiles> files(
      new TlsFiles(std::move(paths), protocol, std::move(on_problem), read_again));
  auto context = files->Read();
  if (!context.ok()) return context.status();
  absl::MutexLock lock(&files->mutex_);
  files->context_ = *std::move(context);
  files->read_at_ = std::chrono::steady_clock::now();
  return files;
}

absl::StatusOr<std::shared_ptr<SSL_CTX>> TlsFiles::Read() const {
  ERR_clear_error();
  const std::shared_ptr<SSL_CTX> context(SSL_CTX_new(TLS_server_method()), SSL_CTX_free);
  if (context == nullptr) return absl::InternalError("OpenSSL gives no context");
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  SSL_CTX_set_mode(context.get(), SSL_MODE_RELEASE_BUFFERS | SSL_MODE_ENABLE_PARTIAL_WRITE |
                                      SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_options(context.get(), SSL_OP_NO_RENEGOTIATION);
  if (SSL_CTX_use_certificate_chain_file(context.get(), paths_.cert.c_str()) != 1) {
    return Invalid("--tls-cert", paths_.cert);
  }
  if (SSL_CTX_use_PrivateKey_file(context.get(), paths_.key.c_str(), SSL_FILETYPE_PEM) != 1) {
    return Invalid("--tls-key", paths_.key);
  }
  if (!paths_.client_ca.empty()) {
    if (SSL_CTX_load_verify_locations(context.get(), paths_.client_ca.c_str(), nullptr) != 1) {
      return Invalid("--tls-client-ca", paths_.client_ca);
    }
    SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
    // Sessions carry the client's identity; without a context id OpenSSL refuses to resume them.
    SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
    SSL_CTX_set_options(context.get(), SSL_OP_NO_TICKET);
  }
  if (absl::Status times = CheckTimes(context.get(), paths_); !times.ok()) return times;
  if (protocol_ == Protocol::kHttp2) {
    SSL_CTX_set_alpn_select_cb(context.get(), ChooseHttp2, nullptr);
  }
  return context;
}

std::shared_ptr<SSL_CTX> TlsFiles::Context() {
  absl::MutexLock lock(&mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (now - read_at_ < read_again_) return context_;
  read_at_ = now;
  auto context = Read();
  if (context.ok()) {
    context_ = *std::move(context);
  } else {
    on_problem_(context.status());
  }
  return context_;
}

absl::Status TlsFiles::Reload() {
  absl::MutexLock lock(&mutex_);
  read_at_ = std::chrono::steady_clock::now();
  auto context = Read();
  if (!context.ok()) return context.status();
  context_ = *std::move(context);
  return absl::OkStatus();
}

std::string ClientName(SSL* tls) {
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(SSL_get1_peer_certificate(tls),
                                                                &X509_free);
  if (certificate == nullptr) return "";
  std::array<char, 256> name{};
  const int length =
      X509_NAME_get_text_by_NID(X509_get_subject_name(certificate.get()), NID_commonName,
                                name.data(), static_cast<int>(name.size()));
  if (length > 0) return {name.data(), static_cast<size_t>(length)};
  const std::unique_ptr<GENERAL_NAMES, decltype(&GENERAL_NAMES_free)> others(
      static_cast<GENERAL_NAMES*>(
          X509_get_ext_d2i(certificate.get(), NID_subject_alt_name, nullptr, nullptr)),
      &GENERAL_NAMES_free);
  for (int i = 0; others != nullptr && i < sk_GENERAL_NAME_num(others.get()); ++i) {
    const GENERAL_NAME* const other = sk_GENERAL_NAME_value(others.get(), i);
    if (other->type != GEN_DNS && other->type != GEN_URI && other->type != GEN_EMAIL) continue;
    const ASN1_IA5STRING* const text = other->d.ia5;
    return {reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
            static_cast<size_t>(ASN1_STRING_length(text))};
  }
  return "";
}

}  // namespace winnow::server
