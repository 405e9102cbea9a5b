#include "server/prefix_file.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "absl/strings/escaping.h"
#include "tests/unit/file_size_limit.h"
#include "tests/unit/temp_dir.h"

namespace winnow::server {
namespace {

using engine::Digest;
using engine::SavedPrefix;

Digest DigestOf(uint8_t value) {
  Digest digest;
  digest.fill(value);
  return digest;
}

SavedPrefix Saved(const std::string& name, bool pinned, std::optional<engine::Duration> left) {
  return {.tenant = "a",
          .name = name,
          .salt = engine::TenantSalt("a"),
          .tokens = 32,
          .blocks = std::make_shared<const std::vector<Digest>>(
              std::vector<Digest>{DigestOf(1), DigestOf(0xab)}),
          .pinned = pinned,
          .left = left};
}

class PrefixFileTest : public ::testing::Test {
 protected:
  PrefixFile File(uint8_t model = 7) {
    return {folder_.File("prefixes"), DigestOf(model), [this] { return now_; }};
  }
  std::string Text() {
    std::ostringstream out;
    out << std::ifstream(folder_.File("prefixes"), std::ios::binary).rdbuf();
    return out.str();
  }
  void Write(const std::string& text) {
    std::ofstream(folder_.File("prefixes"), std::ios::binary) << text;
  }
  TempDir folder_;
  absl::Time now_ = absl::FromUnixSeconds(1'000'000);
  std::string problem_;
};

TEST_F(PrefixFileTest, GivesBackWhatItWasGiven) {
  EXPECT_TRUE(File().Load(&problem_).empty());
  EXPECT_EQ(problem_, "");
  ASSERT_TRUE(
      File()
          .Save({Saved("x", true, std::nullopt), Saved("y", false, std::chrono::seconds(100))})
          .ok());
  now_ += absl::Seconds(30);
  const std::vector<SavedPrefix> read = File().Load(&problem_);
  EXPECT_EQ(problem_, "");
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[0].tenant, "a");
  EXPECT_EQ(read[0].name, "x");
  EXPECT_EQ(read[0].tokens, 32);
  EXPECT_EQ(*read[0].blocks, (std::vector<Digest>{DigestOf(1), DigestOf(0xab)}));
  EXPECT_TRUE(read[0].pinned);
  EXPECT_FALSE(read[0].left.has_value());
  EXPECT_FALSE(read[1].pinned);
  EXPECT_EQ(std::chrono::round<std::chrono::seconds>(*read[1].left), std::chrono::seconds(70));
}

TEST_F(PrefixFileTest, TheSaltIsTheTenantsUnlessItIsWritten) {
  SavedPrefix own = Saved("own", true, std::nullopt), domain = Saved("shared", true, std::nullopt);
  own.salt = engine::TenantSalt("a");
  domain.salt = engine::DomainSalt("team");
  ASSERT_TRUE(File().Save({own, domain}).ok());
  const std::string text = Text();
  EXPECT_EQ(text.find("\"salt\""), text.rfind("\"salt\"")) << "as earlier versions wrote it";
  const std::vector<SavedPrefix> read = File().Load(&problem_);
  EXPECT_EQ(problem_, "");
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[0].salt, engine::TenantSalt("a"));
  EXPECT_EQ(read[1].salt, engine::DomainSalt("team"));
}

TEST_F(PrefixFileTest, ClocksThatJumpGiveNoMoreTimeThanThereWas) {
  ASSERT_TRUE(File().Save({Saved("y", false, std::chrono::seconds(100))}).ok());
  now_ -= absl::Hours(24);
  EXPECT_EQ(std::chrono::round<std::chrono::seconds>(*File().Load(&problem_).at(0).left),
            std::chrono::seconds(100));
  now_ += absl::Hours(48);
  EXPECT_EQ(*File().Load(&problem_).at(0).left, engine::Duration::zero());
}

TEST_F(PrefixFileTest, WhatIsDamagedAnywhereIsPutAside) {
  ASSERT_TRUE(File().Save({Saved("x", true, std::nullopt)}).ok());
  const std::string good = Text();
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 1);
    Write(bad);
    EXPECT_TRUE(File().Load(&problem_).empty()) << i;
    EXPECT_NE(problem_, "") << i;
    EXPECT_EQ(Text(), "");  // it is not there any more
    Write(good.substr(0, i));
    EXPECT_TRUE(File().Load(&problem_).empty()) << i;
    EXPECT_NE(problem_, "") << i;
  }
  Write(good);
  EXPECT_EQ(File().Load(&problem_).size(), 1u);
}

TEST_F(PrefixFileTest, WhatIsOfAnotherModelIsPutAside) {
  ASSERT_TRUE(File().Save({Saved("x", true, std::nullopt)}).ok());
  EXPECT_TRUE(File(8).Load(&problem_).empty());
  EXPECT_NE(problem_.find("another model"), std::string::npos);
}

TEST_F(PrefixFileTest, CountsThatCannotBeArePutAsideUnderARightChecksum) {
  ASSERT_TRUE(File().Save({Saved("x", true, std::nullopt)}).ok());
  const std::string good = Text();
  const std::string sum = "sha256 ";
  // 4294967328 is 32 in 32 bits, and 1e300 is in no integer at all.
  for (const char* const tokens : {"0", "-1", "4294967328", "1e300", "32.5", "true", "null"}) {
    std::string bad = good.substr(0, good.rfind(sum));
    const size_t at = bad.find("\"tokens\":32");
    ASSERT_NE(at, std::string::npos);
    bad.replace(at, std::string("\"tokens\":32").size(), std::string("\"tokens\":") + tokens);
    const Digest digest = engine::Sha256(bad);
    Write(bad + sum +
          absl::BytesToHexString(
              absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size())) +
          "\n");
    EXPECT_TRUE(File().Load(&problem_).empty()) << tokens;
    EXPECT_NE(problem_, "") << tokens;
  }
}

TEST_F(PrefixFileTest, AFileThatCannotBeWrittenLeavesTheOldOne) {
  ASSERT_TRUE(File().Save({Saved("x", true, std::nullopt)}).ok());
  const std::string good = Text();
  {
    const FileSizeLimit full(16);
    EXPECT_FALSE(File().Save({Saved("y", true, std::nullopt)}).ok());
  }
  EXPECT_EQ(Text(), good);
}

}  // namespace
}  // namespace winnow::server
