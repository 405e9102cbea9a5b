#include "engine/kv/block_name.h"

#include <openssl/evp.h>

#include "kernels/check.h"

namespace winnow::engine {
namespace {

// Parts are hashed with their lengths: no two lists of parts give the same bytes.
class Hasher {
 public:
  Hasher() : context_(EVP_MD_CTX_new()) {
    WINNOW_CHECK(context_ != nullptr && EVP_DigestInit_ex(context_, EVP_sha256(), nullptr) == 1);
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

Digest ChainRoot(const Digest& model, const Digest& tenant) {
  Hasher hasher;
  hasher.Add("winnow prefix 1", 15);
  hasher.Add(model.data(), model.size());
  hasher.Add(tenant.data(), tenant.size());
  return hasher.Finish();
}

Digest ChainNext(const Digest& parent, std::span<const int32_t> tokens, std::string_view how) {
  Hasher hasher;
  hasher.Add(parent.data(), parent.size());
  hasher.Add(tokens.data(), tokens.size_bytes());
  hasher.Add(how.data(), how.size());
  return hasher.Finish();
}

}  // namespace winnow::engine
