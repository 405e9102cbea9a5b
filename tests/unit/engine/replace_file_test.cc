#include "engine/base/replace_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "engine/base/json_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/file_size_limit.h"
#include "tests/unit/temp_dir.h"

namespace winnow::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ReplaceFileTest : public ::testing::TestWithParam<Sync> {
 protected:
  std::string Text(const std::string& path) { return ReadSmallFile(path, 1 << 20).value_or("?"); }
  std::vector<std::string> Names() {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_.path())) {
      names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  TempDir folder_;
};

TEST_P(ReplaceFileTest, MakesFoldersAndReplacesTheWholeFile) {
  const std::string path = folder_.File("a/b/file");
  ASSERT_TRUE(ReplaceFile(path, "the first, which is longer", GetParam()).ok());
  EXPECT_EQ(Text(path), "the first, which is longer");
  ASSERT_TRUE(ReplaceFile(path, "the second", GetParam()).ok());
  EXPECT_EQ(Text(path), "the second");
  EXPECT_THAT(Names(), ElementsAre("a", "b", "file"));
  struct stat info = {};
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST_P(ReplaceFileTest, ADiskThatFillsUpLeavesWhatWasThere) {
  const std::string path = folder_.File("file");
  ASSERT_TRUE(ReplaceFile(path, "before", GetParam()).ok());
  {
    const FileSizeLimit full(100);
    const absl::Status status = ReplaceFile(path, std::string(200, 'x'), GetParam());
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
    EXPECT_THAT(std::string(status.message()), HasSubstr("write"));
  }
  EXPECT_EQ(Text(path), "before");
  EXPECT_THAT(Names(), ElementsAre("file"));
}

TEST_P(ReplaceFileTest, WhatCannotBeReplacedIsNamedAndNothingIsLeftBehind) {
  ASSERT_EQ(mkdir(folder_.File("folder").c_str(), 0700), 0);
  const absl::Status onto = ReplaceFile(folder_.File("folder"), "x", GetParam());
  EXPECT_THAT(std::string(onto.message()), HasSubstr("folder: rename"));
  ASSERT_TRUE(ReplaceFile(folder_.File("file"), "x", GetParam()).ok());
  const absl::Status below = ReplaceFile(folder_.File("file/below"), "x", GetParam());
  EXPECT_THAT(std::string(below.message()), HasSubstr(folder_.File("file")));
  EXPECT_THAT(Names(), ElementsAre("file", "folder"));
}

TEST_P(ReplaceFileTest, WhoReadsMeanwhileSeesOneTextOrTheOther) {
  const std::string path = folder_.File("file");
  const std::string texts[] = {std::string(9000, 'a'), std::string(5000, 'b')};
  ASSERT_TRUE(ReplaceFile(path, texts[0], GetParam()).ok());
  std::vector<std::jthread> writers;
  for (const std::string& text : texts) {
    writers.emplace_back([&] {
      for (int i = 0; i < 30; ++i) EXPECT_TRUE(ReplaceFile(path, text, GetParam()).ok());
    });
  }
  for (int i = 0; i < 200; ++i) {
    const std::string seen = Text(path);
    ASSERT_TRUE(seen == texts[0] || seen == texts[1]) << seen.size() << " bytes";
  }
  writers.clear();
  EXPECT_THAT(Names(), ElementsAre("file"));
}

INSTANTIATE_TEST_SUITE_P(Syncs, ReplaceFileTest, ::testing::Values(Sync::kNo, Sync::kYes),
                         [](const auto& info) {
                           return info.param == Sync::kYes ? "Synced" : "NotSynced";
                         });

}  // namespace
}  // namespace winnow::engine
