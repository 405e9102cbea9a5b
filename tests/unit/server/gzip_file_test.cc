#include "server/gzip_file.h"

#include <zlib.h>

#include <cstdint>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/temp_dir.h"

namespace winnow::server {
namespace {

using ::testing::HasSubstr;

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string Gzipped(const std::string& text) {
  const TempDir dir;
  const std::string path = dir.File("packed.gz");
  gzFile file = gzopen(path.c_str(), "wb");
  EXPECT_EQ(gzwrite(file, text.data(), static_cast<unsigned>(text.size())),
            static_cast<int>(text.size()));
  gzclose(file);
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

std::string Text() {
  std::string text;
  for (int64_t i = 0; i < 300000; ++i) text += std::to_string(i * 7919) + "\n";
  return text;
}

TEST(GzipFile, PackedAndPlainFilesReadTheSame) {
  const std::string text = Text();
  const TempDir dir;
  const std::string plain = dir.File("plain.txt"), packed = dir.File("packed.txt");
  WriteFile(plain, text);
  WriteFile(packed, Gzipped(text));
  EXPECT_EQ(*ReadMaybeGzipped(plain, 1 << 30), text);
  EXPECT_EQ(*ReadMaybeGzipped(packed, 1 << 30), text);
  WriteFile(plain, "");
  EXPECT_EQ(*ReadMaybeGzipped(plain, 1 << 30), "");
}

TEST(GzipFile, DamageIsAnError) {
  const TempDir dir;
  const std::string path = dir.File("damaged.gz");
  const std::string packed = Gzipped(Text());
  for (const size_t size : {packed.size() - 1, packed.size() - 8, packed.size() / 2, size_t{12}}) {
    WriteFile(path, packed.substr(0, size));
    const auto contents = ReadMaybeGzipped(path, 1 << 30);
    EXPECT_EQ(contents.status().code(), absl::StatusCode::kInvalidArgument) << size;
    EXPECT_THAT(std::string(contents.status().message()), HasSubstr(path));
  }
  std::string flipped = packed;
  flipped[packed.size() / 2] ^= 0x20;
  WriteFile(path, flipped);
  EXPECT_EQ(ReadMaybeGzipped(path, 1 << 30).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(GzipFile, UnpackedSizeIsBounded) {
  const TempDir dir;
  const std::string path = dir.File("bomb.gz");
  WriteFile(path, Gzipped(std::string(8 << 20, ' ')));
  const auto contents = ReadMaybeGzipped(path, 1 << 20);
  EXPECT_EQ(contents.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(contents.status().message()), HasSubstr("more than 1048576 bytes"));
}

TEST(GzipFile, WhatIsNotThereOrNotAFileIsNamed) {
  const TempDir dir;
  EXPECT_EQ(ReadMaybeGzipped(dir.File("none"), 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(ReadMaybeGzipped(dir.path(), 1).status().message()),
              HasSubstr("is a directory"));
}

}  // namespace
}  // namespace winnow::server
