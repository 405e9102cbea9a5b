// The files that say how a model's text becomes tokens, in one ZIP archive, as routers ask for
// them.
#ifndef WINNOW_SERVER_VLLM_TOKENIZER_ARCHIVE_H_
#define WINNOW_SERVER_VLLM_TOKENIZER_ARCHIVE_H_

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace winnow::server {

// Files without compression, in this order. What makes it small enough to have here: no library of
// Debian's writes ZIP to memory without four others of its own. REQUIRES: less than 4 GiB, and
// fewer than 65,536 names.
std::string ZipArchive(const std::vector<std::pair<std::string, std::string>>& files);

// Made of those files of a model's directory that are there. FailedPrecondition: the path has no
// tokenizer.json, as a GGUF file. ResourceExhausted: more than 200 MB, which is what readers take.
absl::StatusOr<std::string> TokenizerArchive(const std::string& model_path);

// SHA-256 in lower-case hexadecimal.
std::string Sha256Hex(std::string_view bytes);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_VLLM_TOKENIZER_ARCHIVE_H_
