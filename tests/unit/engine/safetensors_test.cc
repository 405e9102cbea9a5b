#include "engine/model/safetensors.h"

#include <malloc.h>
#include <sys/stat.h>

#include <ctime>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/model_files.h"
#include "tests/unit/test_seed.h"

namespace winnow::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::StartsWith;

absl::StatusOr<SafetensorsHeader> ParseBytes(std::string_view bytes) {
  return SafetensorsHeader::Parse(std::as_bytes(std::span(bytes)), bytes.size());
}
absl::StatusOr<SafetensorsHeader> ParseHeader(std::string_view header, size_t data_bytes) {
  return ParseBytes(SafetensorsBytes(header, data_bytes));
}

TEST(SafetensorsTest, TensorsAreFoundByNameAndComeInTheOrderOfTheirBytes) {
  const auto header =
      ParseHeader(R"({"b":{"dtype":"F32","shape":[1,2],"data_offsets":[4,12]},)"
                  R"("__metadata__":{"format":"pt","":""},)"
                  R"("a\u00e9\n":{"shape":[2],"data_offsets":[0,4],"dtype":"BF16"},)"
                  R"("scalar":{"dtype":"I64","shape":[],"data_offsets":[12,20]},)"
                  R"("none":{"dtype":"F64","shape":[3,0],"data_offsets":[20,20]}}   )",
                  20);
  ASSERT_TRUE(header.ok()) << header.status();
  ASSERT_EQ(header->num_tensors(), 4u);
  EXPECT_EQ(header->tensor(0).name, "a\u00e9\n");
  EXPECT_EQ(header->tensor(0).dtype, "BF16");
  EXPECT_THAT(header->tensor(0).shape, ElementsAre(2));
  const auto b = header->Find("b");
  ASSERT_TRUE(b.has_value());
  EXPECT_EQ(b->begin, 4u);
  EXPECT_EQ(b->end, 12u);
  EXPECT_THAT(b->shape, ElementsAre(1, 2));
  EXPECT_THAT(header->Find("scalar")->shape, IsEmpty());
  EXPECT_EQ(header->Find("none")->begin, 20u);
  EXPECT_FALSE(header->Find("c").has_value());
  EXPECT_THAT(header->metadata(), ElementsAre(Pair("", ""), Pair("format", "pt")));
}

TEST(SafetensorsTest, AMovedHeaderStillFindsItsTensors) {
  auto header = ParseHeader(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})", 3);
  ASSERT_TRUE(header.ok());
  const SafetensorsEntry before = header->tensor(0);
  SafetensorsHeader moved = *std::move(header);
  EXPECT_EQ(moved.Find("a")->end, 3u);
  EXPECT_EQ(before.name, "a");
}

TEST(SafetensorsTest, TypesBelowAByteMustFillWholeBytes) {
  EXPECT_TRUE(ParseHeader(R"({"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}})", 2).ok());
  EXPECT_TRUE(ParseHeader(R"({"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}})", 3).ok());
  EXPECT_THAT(std::string(ParseHeader(R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", 1)
                              .status()
                              .message()),
              HasSubstr("does not fill whole bytes"));
}

TEST(SafetensorsTest, AHeaderWithoutTensorsIsAFile) {
  EXPECT_EQ(ParseHeader("{}", 0)->num_tensors(), 0u);
  EXPECT_FALSE(ParseHeader("{}", 1).ok());
}

struct Hostile {
  std::string header;
  size_t data_bytes;
  std::string says;
};

std::string Tensor(std::string_view name, std::string_view dtype, std::string_view shape,
                   std::string_view offsets) {
  return "\"" + std::string(name) + R"(":{"dtype":)" + std::string(dtype) + R"(,"shape":)" +
         std::string(shape) + R"(,"data_offsets":)" + std::string(offsets) + "}";
}
std::string One(std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return "{" + Tensor("t", dtype, shape, offsets) + "}";
}

std::vector<Hostile> HostileHeaders() {
  const std::string u8 = R"("U8")";
  const auto two = [&u8](std::string_view a, std::string_view b) {
    return "{" + Tensor("a", u8, "[2]", a) + "," + Tensor("b", u8, "[2]", b) + "}";
  };
  const std::string good = Tensor("t", u8, "[2]", "[0,2]");
  return {
      // The text.
      {"", 0, "does not begin with '{'"},
      {" {}", 0, "does not begin with '{'"},
      {"\xef\xbb\xbf{}", 0, "does not begin with '{'"},
      {"[]", 0, "does not begin with '{'"},
      {"{", 0, "not valid JSON at byte"},
      {"{}x", 0, "not valid JSON at byte 10"},
      {std::string("{}\0x", 4), 0, "NUL at byte 10"},
      {std::string("{\"a\\\0\":1}", 9), 0, "NUL at byte 12"},
      {"{\"\xff\":1}", 0, "not valid JSON"},
      {"{\"\xc3\":1}", 0, "not valid JSON"},
      {"{\"\xed\xa0\x80\":1}", 0, "not valid JSON"},  // a surrogate
      {R"({"\ud800":1})", 0, "not valid JSON"},
      {"{\"a\nb\":1}", 0, "not valid JSON"},
      {"{" + good + ",}", 2, "not valid JSON"},
      {R"({"__metadata__":{},})", 0, "not valid JSON"},
      {"{\"t\":" + std::string(100'000, '['), 0, "tensor \"t\": must be an object, is a list"},
      {"{\"t\":" + std::string(100'000, '{'), 0, "not valid JSON"},
      {R"({"t":{"shape":[[1]]}})", 0,
       "tensor \"t\": shape: must hold 64-bit unsigned integers, holds a list"},
      {"{\"" + std::string((1 << 20) + 8, 'a') + "\":{}}", 0, "more than 1048576 bytes"},
      {"{\"t\":{\"shape\":[" + std::string((1 << 20) + 8, '1') + "]}}", 0,
       "more than 1048576 bytes"},
      {"{" + std::string((1 << 20) + 8, ' ') + "}", 0, "more than 1048576 bytes"},
      // The fields.
      {"{" + good + "," + good + "}", 2, "tensor \"t\": is there twice"},
      {"{" + good + R"(,"\u0074":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})", 2,
       "tensor \"t\": is there twice"},
      {R"({"t":{}})", 0, "tensor \"t\": dtype: missing"},
      {R"({"t":{"dtype":"U8","shape":[0]}})", 0, "tensor \"t\": data_offsets: missing"},
      {R"({"t":{"dtype":"U8","data_offsets":[0,0]}})", 0, "tensor \"t\": shape: missing"},
      {R"({"t":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0,
       "tensor \"t\": dtype: is there twice"},
      {R"({"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":1}})", 0,
       "tensor \"t\": unknown field \"x\""},
      {R"({"t":null})", 0, "tensor \"t\": must be an object, is null"},
      {R"({"t":[]})", 0, "tensor \"t\": must be an object, is a list"},
      {R"({"t":"U8"})", 0, "tensor \"t\": must be an object, is a string"},
      {One("\"U9\"", "[0]", "[0,0]"), 0, "tensor \"t\": dtype: unknown type \"U9\""},
      {One("\"bf16\"", "[0]", "[0,0]"), 0, "unknown type"},
      {One("8", "[0]", "[0,0]"), 0, "tensor \"t\": dtype: must be a string, is a number"},
      {One("{}", "[0]", "[0,0]"), 0, "dtype: must be a string, is an object"},
      {One(u8, "2", "[0,2]"), 2, "shape: must be a list"},
      {One(u8, "[-1]", "[0,0]"), 0,
       "shape: must hold 64-bit unsigned integers, holds a negative number"},
      {One(u8, "[1.0]", "[0,1]"), 1, "shape: must hold 64-bit unsigned integers"},
      {One(u8, "[1e0]", "[0,1]"), 1, "shape: must hold 64-bit unsigned integers"},
      {One(u8, "[18446744073709551616]", "[0,0]"), 0, "shape: must hold 64-bit unsigned integers"},
      {One(u8, "[true]", "[0,1]"), 1, "shape: must hold 64-bit unsigned integers, holds a boolean"},
      {One(u8, "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, "more than 8 dimensions"},
      {One(u8, "[2]", "[0]"), 2, "data_offsets: must be two integers"},
      {One(u8, "[2]", "[]"), 2, "data_offsets: must be two integers"},
      {One(u8, "[2]", "[0,2,2]"), 2, "data_offsets: must be two integers"},
      {One(u8, "[2]", "[-1,1]"), 2, "data_offsets: must hold 64-bit unsigned integers"},
      {One(u8, "[2]", "[0.0,2.0]"), 2, "data_offsets: must hold 64-bit unsigned integers"},
      {One(u8, "[2]", "{}"), 2, "data_offsets: must be a list"},
      // The metadata.
      {R"({"__metadata__":null})", 0, "__metadata__ must be an object, is null"},
      {R"({"__metadata__":[]})", 0, "__metadata__ must be an object"},
      {R"({"__metadata__":{"a":1}})", 0, "__metadata__ \"a\" must be a string, is a number"},
      {R"({"__metadata__":{"a":{}}})", 0, "__metadata__ \"a\" must be a string, is an object"},
      {R"({"__metadata__":{"a":"","a":""}})", 0, "__metadata__ has \"a\" twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "__metadata__ is there twice"},
      // The sizes and places.
      {One(u8, "[2]", "[2,0]"), 2, "[2, 0) ends before it begins"},
      {One(u8, "[3]", "[0,2]"), 2, "hold 2 bytes, but [3] of U8 takes 3"},
      {One("\"F32\"", "[2]", "[0,2]"), 2, "takes 8"},
      {One("\"F32\"", "[4611686018427387904]", "[0,0]"), 0,
       "overflows 64 bits"},  // 2^62 * 32 bits wraps to 0
      {One(u8, "[2305843009213693952]", "[0,0]"), 0, "overflows 64 bits"},  // 2^61 * 8 bits
      {One(u8, "[4294967296,4294967296]", "[0,0]"), 0, "overflows 64 bits"},
      {One(u8, "[18446744073709551615,2,0]", "[0,0]"), 0, "overflows 64 bits"},
      {One(u8, "[18446744073709551615]", "[0,18446744073709551615]"), 0, "overflows 64 bits"},
      {One(u8, "[2]", "[1,3]"), 3, "tensor \"t\": data_offsets: begins at 1, leaving a hole"},
      {two("[0,2]", "[3,5]"), 5,
       "tensor \"b\": data_offsets: begins at 3, leaving a hole after byte 2"},
      {two("[0,2]", "[1,3]"), 3,
       "tensor \"b\": data_offsets: begins at 1, inside another tensor that ends at 2"},
      {two("[0,2]", "[0,2]"), 2, "begins at 0, inside another tensor"},
      {two("[2,4]", "[0,2]"), 3,
       "tensor \"a\": truncated: its bytes [2, 4) of the data go past the file"},
      {two("[2,4]", "[0,2]"), 5, "bytes that no tensor owns"},
      {One(u8, "[1152921504606846976]", "[0,1152921504606846976]"), 2, "go past the file"},
      {One(u8, "[0]", "[18446744073709551615,18446744073709551615]"), 0, "leaving a hole"},
  };
}

TEST(SafetensorsTest, EachRuleIsEnforcedAndNamed) {
  for (const Hostile& hostile : HostileHeaders()) {
    const auto header = ParseHeader(hostile.header, hostile.data_bytes);
    const std::string shown = hostile.header.substr(0, 200);
    ASSERT_FALSE(header.ok()) << shown;
    EXPECT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument) << shown;
    EXPECT_THAT(std::string(header.status().message()), HasSubstr(hostile.says)) << shown;
    EXPECT_LT(header.status().message().size(), 1000u) << shown;
  }
}

TEST(SafetensorsTest, LengthsBeyondTheFormatOrTheFileAreRefused) {
  const auto with_length = [](uint64_t length, std::string_view rest) {
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, sizeof(length));
    bytes += rest;
    return std::string(ParseBytes(bytes).status().message());
  };
  EXPECT_THAT(with_length(UINT64_MAX, "{}"), HasSubstr("more than the 100000000 allowed"));
  EXPECT_THAT(with_length(uint64_t{1} << 63, "{}"), HasSubstr("more than the 100000000 allowed"));
  EXPECT_THAT(with_length(100'000'001, "{}"), HasSubstr("more than the 100000000 allowed"));
  EXPECT_THAT(with_length(100'000'000, "{}"),
              HasSubstr("truncated: the header ends at byte 100000008, the file at 10"));
  EXPECT_THAT(with_length(3, "{}"),
              HasSubstr("truncated: the header ends at byte 11, the file at 10"));
  EXPECT_THAT(with_length(0, ""), HasSubstr("does not begin with '{'"));
  for (size_t size = 0; size < 8; ++size) {
    EXPECT_THAT(std::string(ParseBytes(std::string(size, '\0')).status().message()),
                HasSubstr("truncated"));
  }
}

TEST(SafetensorsTest, ATruncatedFileIsRefusedAtEveryByte) {
  const std::string bytes = SafetensorsBytes("{" + Tensor("a", "\"U8\"", "[5]", "[0,5]") + "," +
                                                 Tensor("b", "\"F32\"", "[2]", "[5,13]") + "}",
                                             13);
  ASSERT_TRUE(ParseBytes(bytes).ok());
  const TempDir dir;
  for (size_t size = 0; size < bytes.size(); ++size) {
    WriteText(dir.File("x.safetensors"), bytes.substr(0, size));
    const auto file = SafetensorsFile::Open(dir.File("x.safetensors"));
    ASSERT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument) << size;
    EXPECT_THAT(std::string(file.status().message()), StartsWith(dir.File("x.safetensors") + ": "))
        << size;
  }
  EXPECT_FALSE(ParseBytes(bytes + "x").ok());
}

TEST(SafetensorsTest, RandomDamageNeverCrashes) {
  const std::string path =
      SourcePath("tests/golden/families/llama_sharded/model-00001-of-00003.safetensors");
  std::string bytes = ReadText(path);
  ASSERT_TRUE(ParseBytes(bytes).ok());
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  TestRandom random;
  const std::string alphabet = "{}[]\",:0123456789-.eE\\u tfnx\xff";
  int refused = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string damaged = bytes;
    for (int i = 0; i < 1 + static_cast<int>(random() % 4); ++i) {
      const size_t at = random() % (8 + length);
      switch (random() % 4) {
        case 0:
          damaged[at] = static_cast<char>(random());
          break;
        case 1:
          damaged[at] = alphabet[random() % alphabet.size()];
          break;
        case 2:
          damaged.erase(at, 1 + random() % 16);
          break;
        default:
          damaged.insert(at, damaged.substr(random() % (8 + length), random() % 64));
          break;
      }
    }
    const auto header = ParseBytes(damaged);
    if (!header.ok()) {
      ++refused;
      continue;
    }
    for (size_t i = 0; i < header->num_tensors(); ++i) {  // what it says must be within the file
      const SafetensorsEntry entry = header->tensor(i);
      ASSERT_LE(entry.begin, entry.end);
      ASSERT_LE(header->data_offset() + entry.end, damaged.size());
      ASSERT_EQ(header->Find(entry.name)->begin, entry.begin);
    }
  }
  EXPECT_GT(refused, 1000);
}

TEST(SafetensorsTest, ACommittedCorpusParsesOrIsRefused) {
  int files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(SourcePath("tests/fuzz/corpus/safetensors"))) {
    const std::string bytes = ReadText(entry.path());
    const auto header = ParseBytes(bytes);
    EXPECT_TRUE(header.ok() || header.status().code() == absl::StatusCode::kInvalidArgument)
        << entry.path();
    ++files;
  }
  EXPECT_GE(files, 20);
}

// The bound for the longest header, 100 MB, is 1 s. Here a fiftieth of it may take the same, in
// processor time: that leaves room for sanitizers, and anything quadratic would still stand out.
TEST(SafetensorsTest, LongHostileHeadersCostLittle) {
  constexpr size_t kBytes = 2'000'000;
  const auto repeat = [](std::string text, const auto& item) {
    for (size_t i = 0; text.size() < kBytes; ++i) text += (i == 0 ? "" : ",") + item(i);
    return text;
  };
  const std::vector<std::pair<std::string, bool>> headers = {
      {repeat("{", [](size_t i) { return Tensor(std::to_string(i), "\"U8\"", "[0]", "[0,0]"); }) +
           "}",
       true},
      {repeat("{",
              [](size_t i) {
                return Tensor(std::to_string(i), "\"U8\"", "[0,0,0,0,0,0,0,0]", "[0,0]");
              }) +
           "}",
       true},
      {repeat("{", [](size_t) { return Tensor("", "\"U8\"", "[0]", "[0,0]"); }) + "}", false},
      {repeat("{\"__metadata__\":{",
              [](size_t i) { return "\"" + std::to_string(i) + "\":\"\""; }) +
           "}}",
       false},
      {repeat("{\"t\":{\"shape\":[", [](size_t) { return std::string("0"); }) + "]}}", false},
      {"{\"" + std::string(kBytes, 'a') + "\":{}}", false},
      {"{" + std::string(kBytes, ' ') + "}", false},
      {std::string(kBytes, '{'), false},
      {"{\"t\":" + std::string(kBytes, '['), false},
      {"{" + std::string(kBytes, ','), false},
      {"{\"" + std::string(kBytes, '\\'), false},
  };
  for (const auto& [header, good] : headers) {
    const std::string bytes = SafetensorsBytes(header, 0);
    const std::clock_t begin = std::clock();
    EXPECT_EQ(ParseBytes(bytes).ok(), good) << header.substr(0, 80);
    EXPECT_LT(std::clock() - begin, CLOCKS_PER_SEC) << header.substr(0, 80);
  }
}

TEST(SafetensorsTest, TheNumberOfTensorsIsBounded) {
  const auto header_of = [](size_t num_tensors) {
    std::string header = "{";
    for (size_t i = 0; i < num_tensors; ++i) {
      if (i > 0) header += ",";
      header += Tensor(std::to_string(i), "\"U8\"", "[]", "[0,0]");
      header.replace(header.size() - 6, 5, fmt::format("[{},{}]", i, i + 1));
    }
    return header + "}";
  };
  constexpr size_t kMax = 262'144;
  const std::string longest = header_of(kMax);
  const std::string most = SafetensorsBytes(longest, 0);
  const auto good = SafetensorsHeader::Parse(std::as_bytes(std::span(most)), most.size() + kMax);
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_EQ(good->num_tensors(), kMax);
  EXPECT_EQ(good->Find("262143")->begin, kMax - 1);
  const std::string more = SafetensorsBytes(header_of(kMax + 1), 0);
  const auto refused =
      SafetensorsHeader::Parse(std::as_bytes(std::span(more)), more.size() + kMax + 1);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("more than 262144 tensors"));
}

// Under a sanitizer, whose allocator does not count here, this only runs the parser.
TEST(SafetensorsTest, AHeaderKeepsAtMostTwiceItsText) {
  const auto heap_bytes = [] {
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
  };
  std::string tensors = "{", metadata = R"({"__metadata__":{"":"")";
  for (int i = 0; i < 10'000; ++i) {
    const std::string name = std::to_string(i);
    if (i > 0) tensors += ",";
    tensors += Tensor(name, "\"U8\"", "[0,0,0,0,0,0,0,0]", "[0,0]");
  }
  tensors += "}";
  for (int i = 0; i < 20; ++i) {
    metadata += ",\"" + std::to_string(i) + "\":\"" + std::string(100'000, 'x') + "\"";
  }
  metadata += "}}";
  for (const std::string& text : {tensors, metadata}) {
    const std::string bytes = SafetensorsBytes(text, 0);
    const size_t before = heap_bytes();
    const auto header = ParseBytes(bytes);
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_LT(heap_bytes(), before + 2 * text.size());
  }
}

TEST(SafetensorsTest, DataIsTheFilesBytes) {
  const TempDir dir;
  WriteText(dir.File("x"), SafetensorsBytes("{" + Tensor("a", "\"U8\"", "[3]", "[0,3]") + "," +
                                                Tensor("b", "\"U8\"", "[2]", "[3,5]") + "}",
                                            5));
  const auto file = SafetensorsFile::Open(dir.File("x"));
  ASSERT_TRUE(file.ok()) << file.status();
  const auto bytes = (*file)->Data(*(*file)->header().Find("b"));
  ASSERT_EQ(bytes.size(), 2u);
  EXPECT_EQ(bytes[0], std::byte{3});
  EXPECT_EQ(bytes[1], std::byte{4});
  (*file)->ReleasePages();
  EXPECT_EQ(bytes[1], std::byte{4});
}

TEST(SafetensorsTest, OnlyRegularFilesAreOpened) {
  const TempDir dir;
  EXPECT_TRUE(absl::IsNotFound(SafetensorsFile::Open(dir.File("none")).status()));
  EXPECT_THAT(std::string(SafetensorsFile::Open(dir.path()).status().message()),
              HasSubstr("not a regular file"));
  ASSERT_EQ(mkfifo(dir.File("fifo").c_str(), 0600), 0);
  EXPECT_THAT(std::string(SafetensorsFile::Open(dir.File("fifo")).status().message()),
              HasSubstr("not a regular file"));
  WriteText(dir.File("empty"), "");
  EXPECT_THAT(std::string(SafetensorsFile::Open(dir.File("empty")).status().message()),
              HasSubstr("empty"));
}

}  // namespace
}  // namespace winnow::engine
