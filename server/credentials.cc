#include "server/credentials.h"

#include <grpcpp/security/credentials.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <algorithm>
#include <ctime>
#include <optional>

#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "server/strings.h"

namespace winnow::server {
namespace {

constexpr size_t kMaxPemBytes = 4 << 20;

template <auto Free>
struct Freer {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};
using Context = std::unique_ptr<SSL_CTX, Freer<SSL_CTX_free>>;
using Bio = std::unique_ptr<BIO, Freer<BIO_free_all>>;
using Certificate = std::unique_ptr<X509, Freer<X509_free>>;

absl::Status Invalid(std::string_view flag, const std::string& path, std::string_view what) {
  std::string reason;
  if (const unsigned long code = ERR_get_error(); code != 0) {
    const char* text = ERR_reason_error_string(code);
    if (text != nullptr) reason = Concat(" (", text, ")");
  }
  ERR_clear_error();
  return absl::InvalidArgumentError(Concat("--", flag, " ", path, ": ", what, reason));
}

absl::StatusOr<std::string> ReadPem(std::string_view flag, const std::string& path) {
  absl::StatusOr<std::string> pem = engine::ReadSmallFile(path, kMaxPemBytes);
  if (!pem.ok()) {
    return absl::InvalidArgumentError(Concat("--", flag, ": ", pem.status().message()));
  }
  return pem;
}

// Every certificate of the file must be valid now.
absl::Status CheckCertificates(std::string_view flag, const std::string& path) {
  WINNOW_ASSIGN_OR_RETURN(const std::string pem, ReadPem(flag, path));
  Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  int count = 0;
  while (Certificate certificate{PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)}) {
    ++count;
    if (X509_cmp_current_time(X509_get0_notAfter(certificate.get())) < 0) {
      ERR_clear_error();
      return Invalid(flag, path, Concat("certificate ", count, " has expired"));
    }
    if (X509_cmp_current_time(X509_get0_notBefore(certificate.get())) > 0) {
      ERR_clear_error();
      return Invalid(flag, path, Concat("certificate ", count, " is not valid yet"));
    }
  }
  ERR_clear_error();  // the end of the file is an error to OpenSSL
  if (count == 0) return Invalid(flag, path, "holds no PEM certificate");
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckTlsFiles(const ServeConfig& config) {
  if (config.tls_cert.empty()) return absl::OkStatus();
  ERR_clear_error();
  WINNOW_RETURN_IF_ERROR(CheckCertificates("tls-cert", config.tls_cert));
  WINNOW_RETURN_IF_ERROR(ReadPem("tls-key", config.tls_key).status());
  const Context context(SSL_CTX_new(TLS_server_method()));
  if (context == nullptr) return absl::InternalError("OpenSSL gives no context");
  if (SSL_CTX_use_certificate_chain_file(context.get(), config.tls_cert.c_str()) != 1) {
    return Invalid("tls-cert", config.tls_cert, "is not a certificate chain");
  }
  if (SSL_CTX_use_PrivateKey_file(context.get(), config.tls_key.c_str(), SSL_FILETYPE_PEM) != 1) {
    return Invalid("tls-key", config.tls_key, "is not the private key of --tls-cert");
  }
  if (!config.tls_client_ca.empty()) {
    WINNOW_RETURN_IF_ERROR(CheckCertificates("tls-client-ca", config.tls_client_ca));
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> CertificateExpiry(const std::string& path) {
  WINNOW_ASSIGN_OR_RETURN(const std::string pem, ReadPem("tls-cert", path));
  const Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  std::optional<int64_t> first;
  while (Certificate certificate{PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)}) {
    tm time = {};
    if (ASN1_TIME_to_tm(X509_get0_notAfter(certificate.get()), &time) != 1) continue;
    const int64_t expiry = timegm(&time);
    first = std::min(first.value_or(expiry), expiry);
  }
  ERR_clear_error();  // the end of the file is an error to OpenSSL
  if (!first.has_value()) return Invalid("tls-cert", path, "holds no PEM certificate");
  return *first;
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeChannelCredentials(
    const ClientTls& tls) {
  if (tls.cert.empty() != tls.key.empty()) {
    return absl::InvalidArgumentError("--tls-cert and --tls-key come together");
  }
  if (!tls.tls && tls.ca.empty() && tls.cert.empty()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  if (!tls.ca.empty()) {
    WINNOW_ASSIGN_OR_RETURN(options.pem_root_certs, ReadPem("tls-ca", tls.ca));
  }
  if (!tls.cert.empty()) {
    WINNOW_ASSIGN_OR_RETURN(options.pem_cert_chain, ReadPem("tls-cert", tls.cert));
    WINNOW_ASSIGN_OR_RETURN(options.pem_private_key, ReadPem("tls-key", tls.key));
  }
  return grpc::SslCredentials(options);
}

}  // namespace winnow::server
