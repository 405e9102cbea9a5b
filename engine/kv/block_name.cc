#include "engine/kv/block_name.h"

#include <openssl/evp.h>

#include <cstring>

#include "kernels/check.h"

namespace winnow::engine {
namespace {

// Parts are hashed with their lengths: no two lists of parts give the same bytes.
class Hasher {
 public:
  explicit Hasher(const EVP_MD* function = EVP_sha256()) : context_(EVP_MD_CTX_new()) {
    WINNOW_CHECK(context_ != nullptr && EVP_DigestInit_ex(context_, function, nullptr) == 1);
  }
  ~Hasher() { EVP_MD_CTX_free(context_); }
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;

  void Add(const void* data, uint64_t size) {
    Raw(&size, sizeof size);
    Raw(data, size);
  }
  void Raw(const void* data, size_t size) {
    WINNOW_CHECK(EVP_DigestUpdate(context_, data, size) == 1);
  }
  Digest Finish() {
    Digest digest;
    WINNOW_CHECK(EVP_DigestFinal_ex(context_, digest.data(), nullptr) == 1);
    return digest;
  }

 private:
  EVP_MD_CTX* context_;
};

}  // namespace

Digest Sha256(std::string_view bytes) {
  Hasher hasher;
  hasher.Raw(bytes.data(), bytes.size());
  return hasher.Finish();
}

Digest TenantSalt(std::string_view tenant) { return Sha256(tenant); }

// Another function than tenants' names go through: a name of any bytes cannot be made to give the same digest.
Digest DomainSalt(std::string_view domain) {
  Hasher hasher(EVP_sha512_256());
  hasher.Add("domain", 6);
  hasher.Add(domain.data(), domain.size());
  return hasher.Finish();
}

Digest CallSalt(uint64_t call) {
  Hasher hasher(EVP_sha512_256());
  hasher.Add("call", 4);
  hasher.Add(&call, sizeof call);
  return hasher.Finish();
}

Digest ChainRoot(const Digest& model, const Digest& salt) {
  Hasher hasher;
  hasher.Add("winnow prefix 1", 15);
  hasher.Add(model.data(), model.size());
  hasher.Add(salt.data(), salt.size());
  return hasher.Finish();
}

Digest ChainNext(const Digest& parent, std::span<const int32_t> tokens, std::string_view how) {
  Hasher hasher;
  hasher.Add(parent.data(), parent.size());
  hasher.Add(tokens.data(), tokens.size_bytes());
  hasher.Add(how.data(), how.size());
  return hasher.Finish();
}

uint32_t CheckNext(uint32_t parent, std::span<const int32_t> tokens, std::string_view how) {
  Hasher hasher(EVP_sha512_256());
  hasher.Add(&parent, sizeof parent);
  hasher.Add(tokens.data(), tokens.size_bytes());
  hasher.Add(how.data(), how.size());
  const Digest digest = hasher.Finish();
  uint32_t check = 0;
  std::memcpy(&check, digest.data(), sizeof check);
  return check;
}

}  // namespace winnow::engine
