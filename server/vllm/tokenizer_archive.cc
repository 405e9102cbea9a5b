#include "server/vllm/tokenizer_archive.h"

#include <zlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/strings/escaping.h"
#include "engine/kv/block_name.h"
#include "kernels/check.h"
#include "server/status.h"
#include "server/strings.h"

namespace winnow::server {
namespace {

constexpr size_t kMaxBytes = 200'000'000;
constexpr const char* kFiles[] = {"tokenizer.json",      "tokenizer_config.json",
                                  "config.json",         "generation_config.json",
                                  "chat_template.jinja", "chat_template.json",
                                  "added_tokens.json",   "special_tokens_map.json",
                                  "vocab.json",          "merges.txt",
                                  "tokenizer.model"};

void Put16(std::string& out, size_t value) {
  out += static_cast<char>(value & 0xff);
  out += static_cast<char>(value >> 8 & 0xff);
}
void Put32(std::string& out, size_t value) {
  Put16(out, value & 0xffff);
  Put16(out, value >> 16 & 0xffff);
}

// Fields that a file's header and its entry in the directory share: version 2.0, no flags, no
// compression, and the first date that the format knows, so that the same files make the same
// archive.
void PutCommon(std::string& out, const std::string& name, const std::string& bytes, size_t crc) {
  Put16(out, 20);
  Put16(out, 0);
  Put16(out, 0);
  Put16(out, 0);
  Put16(out, 0x21);
  Put32(out, crc);
  Put32(out, bytes.size());
  Put32(out, bytes.size());
  Put16(out, name.size());
  Put16(out, 0);  // no extra field
}

}  // namespace

std::string ZipArchive(const std::vector<std::pair<std::string, std::string>>& files) {
  WINNOW_CHECK(files.size() < 0x10000);
  std::string out, directory;
  for (const auto& [name, bytes] : files) {
    const size_t at = out.size();
    WINNOW_CHECK(at + bytes.size() < 0xffff0000 && name.size() < 0x10000);
    const size_t crc =
        crc32(0, reinterpret_cast<const Bytef*>(bytes.data()), static_cast<uInt>(bytes.size()));
    out += "PK\x03\x04";
    PutCommon(out, name, bytes, crc);
    out += name;
    out += bytes;
    directory += "PK\x01\x02";
    Put16(directory, 20);  // made by
    PutCommon(directory, name, bytes, crc);
    Put16(directory, 0);  // no comment
    Put16(directory, 0);  // disk
    Put16(directory, 0);  // attributes
    Put32(directory, 0);
    Put32(directory, at);
    directory += name;
  }
  const size_t at = out.size();
  out += directory;
  out += "PK\x05\x06";
  Put16(out, 0);
  Put16(out, 0);
  Put16(out, files.size());
  Put16(out, files.size());
  Put32(out, directory.size());
  Put32(out, at);
  Put16(out, 0);
  return out;
}

absl::StatusOr<std::string> TokenizerArchive(const std::string& model_path) {
  std::vector<std::pair<std::string, std::string>> files;
  size_t bytes = 0;
  for (const char* name : kFiles) {
    std::ifstream file(std::filesystem::path(model_path) / name, std::ios::binary);
    if (!file) continue;
    files.emplace_back(name, std::string(std::istreambuf_iterator<char>(file), {}));
    bytes += files.back().second.size();
    if (bytes > kMaxBytes) {
      return ErrorWithReason(absl::StatusCode::kResourceExhausted, "TOKENIZER_TOO_LARGE",
                             Concat("the tokenizer's files have more than ", kMaxBytes, " bytes"));
    }
  }
  if (files.empty() || files.front().first != kFiles[0]) {
    return ErrorWithReason(
        absl::StatusCode::kFailedPrecondition, "NO_TOKENIZER_FILES",
        "the model has no tokenizer.json to hand out: give the router the files of its tokenizer");
  }
  return ZipArchive(files);
}

std::string Sha256Hex(std::string_view bytes) {
  const engine::Digest digest = engine::Sha256(bytes);
  return std::string(
      absl::BytesToHexString({reinterpret_cast<const char*>(digest.data()), digest.size()}));
}

}  // namespace winnow::server
