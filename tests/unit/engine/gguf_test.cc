#include "engine/model/gguf.h"

#include <malloc.h>

#include <ctime>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/gguf_files.h"
#include "tests/unit/engine/model_files.h"

namespace winnow::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

absl::StatusOr<GgufContents> Parse(std::string_view bytes) {
  return GgufContents::Parse(AsBytes(bytes));
}

// A file with a key of every type and tensors of several.
GgufBuilder Small() {
  GgufBuilder file;
  file.Set("general.architecture", "llama");
  file.Set("a.u32", uint32_t{7});
  file.Set("a.f32", 0.5f);
  file.Set("a.bool", true);
  file.Raw("a.u8", GgufValueType::kUint8, "\xFF");
  file.Raw("a.i8", GgufValueType::kInt8, "\xFF");
  file.Raw("a.u16", GgufValueType::kUint16, "\xFF\xFF");
  file.Raw("a.i16", GgufValueType::kInt16, "\xFE\xFF");
  file.Raw("a.i32", GgufValueType::kInt32, "\xFD\xFF\xFF\xFF");
  file.Raw("a.u64", GgufValueType::kUint64, GgufBuilder::Bytes<uint64_t>(1).substr(0, 8));
  file.Raw("a.huge", GgufValueType::kUint64, GgufBuilder::Bytes<uint64_t>(UINT64_MAX));
  file.Raw("a.i64", GgufValueType::kInt64, GgufBuilder::Bytes<int64_t>(-5));
  file.Raw("a.f64", GgufValueType::kFloat64, GgufBuilder::Bytes(0.25));
  file.Set("a.strings", std::vector<std::string>{"x", "", "yz"});
  file.Set("a.ints", std::vector<int32_t>{1, -2});
  file.Set("a.floats", std::vector<float>{1.5f});
  file.Array("a.bools", GgufValueType::kBool, 2, std::string("\0\1", 2));
  file.Array("a.none", GgufValueType::kString, 0, "");
  file.Tensor("f32", {3, 2}, kGgufF32, std::string(24, 'a'));
  file.Tensor("q8", {32, 2}, kGgufQ8_0, std::string(68, 'b'));
  file.Tensor("scalar", {1}, kGgufF16, "cc");
  return file;
}

TEST(Gguf, KeysOfEveryTypeAreFound) {
  const std::string bytes = Small().Build();
  const auto contents = Parse(bytes);
  ASSERT_TRUE(contents.ok()) << contents.status();
  EXPECT_EQ(contents->values().size(), 18u);
  const auto find = [&](std::string_view key) -> const GgufValue& {
    const GgufValue* value = contents->Find(key);
    EXPECT_NE(value, nullptr) << key;
    return *value;
  };
  EXPECT_EQ(find("general.architecture").String(), "llama");
  EXPECT_EQ(find("a.u32").Integer(), 7);
  EXPECT_EQ(find("a.u32").Float(), std::nullopt);
  EXPECT_EQ(find("a.u32").Bool(), std::nullopt);
  EXPECT_EQ(find("a.u32").String(), std::nullopt);
  EXPECT_EQ(find("a.f32").Float(), 0.5);
  EXPECT_EQ(find("a.f32").Integer(), std::nullopt);
  EXPECT_EQ(find("a.bool").Bool(), true);
  EXPECT_EQ(find("a.bool").Integer(), std::nullopt);
  EXPECT_EQ(find("a.u8").Integer(), 255);
  EXPECT_EQ(find("a.i8").Integer(), -1);
  EXPECT_EQ(find("a.u16").Integer(), 65535);
  EXPECT_EQ(find("a.i16").Integer(), -2);
  EXPECT_EQ(find("a.i32").Integer(), -3);
  EXPECT_EQ(find("a.u64").Integer(), 1);
  EXPECT_EQ(find("a.huge").Integer(), std::nullopt);
  EXPECT_EQ(find("a.i64").Integer(), -5);
  EXPECT_EQ(find("a.f64").Float(), 0.25);
  EXPECT_THAT(find("a.strings").Strings(), ElementsAre("x", "", "yz"));
  EXPECT_EQ(find("a.ints").IntegerAt(1), -2);
  EXPECT_EQ(find("a.ints").FloatAt(1), std::nullopt);
  EXPECT_EQ(find("a.floats").FloatAt(0), 1.5);
  EXPECT_TRUE(find("a.none").Strings().empty());
  EXPECT_EQ(contents->Find("a.other"), nullptr);
}

TEST(Gguf, TensorsAreWhereTheFileSays) {
  const std::string bytes = Small().Build();
  auto parsed = Parse(bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const GgufContents contents = *std::move(parsed);  // moving keeps what it says
  ASSERT_EQ(contents.tensors().size(), 3u);
  EXPECT_EQ(contents.data_offset() % 32, 0u);
  const GgufTensor* q8 = contents.FindTensor("q8");
  ASSERT_NE(q8, nullptr);
  EXPECT_EQ(q8->num_dims, 2u);
  EXPECT_THAT(q8->dims, ElementsAre(32, 2, 1, 1));
  EXPECT_EQ(WeightTypeOfGguf(q8->type), kernels::WeightType::kQ8_0);
  EXPECT_EQ(q8->begin, contents.data_offset() + 32);
  EXPECT_EQ(contents.Data(*q8).size(), 68u);
  EXPECT_EQ(static_cast<char>(contents.Data(*q8)[0]), 'b');
  EXPECT_EQ(contents.FindTensor("q9"), nullptr);
}

TEST(Gguf, TheAlignmentIsThatOfTheFile) {
  for (const uint32_t alignment : {1u, 8u, 64u, 4096u}) {
    GgufBuilder file;
    file.alignment = alignment;
    file.Set("general.alignment", alignment);
    file.Tensor("a", {1}, kGgufF32, "abcd");
    file.Tensor("b", {1}, kGgufF32, "efgh");
    const std::string bytes = file.Build();
    const auto contents = Parse(bytes);
    ASSERT_TRUE(contents.ok()) << contents.status();
    EXPECT_EQ(contents->data_offset() % alignment, 0u);
    EXPECT_EQ(static_cast<char>(contents->Data(*contents->FindTensor("b"))[0]), 'e');
  }
}

TEST(Gguf, TypesHaveTheFormatsNames) {
  EXPECT_EQ(GgufTensorTypeName(23), "IQ4_XS");
  EXPECT_EQ(GgufTensorTypeName(5), "type 5");
  EXPECT_EQ(GgufTypeName(GgufValueType::kInt64), "int64");
  EXPECT_EQ(WeightTypeOfGguf(14), kernels::WeightType::kQ6K);
  EXPECT_EQ(WeightTypeOfGguf(10), std::nullopt);  // Q2_K
  int readable = 0;
  for (uint32_t type = 0; type < 64; ++type) readable += WeightTypeOfGguf(type).has_value() ? 1 : 0;
  EXPECT_EQ(readable, kernels::kNumGgufTypes);
}

struct Hostile {
  std::string what;   // of the case
  std::string bytes;  // of the file
  std::string error;  // a part of what is said
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

// The small file with one thing changed.
std::string Changed(const std::function<void(GgufBuilder&)>& change) {
  GgufBuilder file = Small();
  change(file);
  return file.Build();
}

// A file of `head` alone, as many tensors and keys as are said.
std::string Head(uint64_t tensors, uint64_t keys, std::string_view rest) {
  return "GGUF" + GgufBuilder::Bytes<uint32_t>(3) + GgufBuilder::Bytes(tensors) +
         GgufBuilder::Bytes(keys) + std::string(rest);
}

std::vector<Hostile> HostileFiles() {
  const auto bytes = [](auto value) { return GgufBuilder::Bytes(value); };
  const uint64_t huge = UINT64_MAX - 3;
  const auto array = [&](uint32_t element, uint64_t count, std::string_view rest) {
    return Head(0, 1,
                GgufBuilder::String("k") + bytes(uint32_t{9}) + bytes(element) + bytes(count) +
                    std::string(rest));
  };
  std::vector<Hostile> files = {
      {"nothing", "", "not a GGUF file"},
      {"another magic", "GGML" + std::string(60, '\0'), "not a GGUF file"},
      {"a head cut short", "GGUF\3", "the version of 4 bytes goes beyond the end"},
      {"version 2", Changed([](GgufBuilder& f) { f.version = 2; }),
       "GGUF version 2 is not supported", absl::StatusCode::kUnimplemented},
      {"big-endian", Changed([](GgufBuilder& f) { f.version = 0x03000000; }), "big-endian",
       absl::StatusCode::kUnimplemented},
      {"more tensors than there can be", Head(1 << 17, 0, ""),
       "131072 tensors; 65536 are the most"},
      {"more keys than there can be", Head(0, huge, ""), "keys; 65536 are the most"},
      {"more keys than there are", Changed([](GgufBuilder& f) { f.more_keys = 1; }), "at byte"},
      {"more tensors than there are", Changed([](GgufBuilder& f) { f.more_tensors = 1; }),
       "at byte"},
      {"a key's length", Head(0, 1, bytes(huge)),
       "key 0 at byte 32: a name of 18446744073709551612 bytes goes beyond"},
      {"a long key", Head(0, 1, bytes(uint64_t{65536}) + std::string(65600, 'k')),
       "65535 is the most"},
      {"an empty key", Changed([](GgufBuilder& f) { f.Set("", true); }), "its name is empty"},
      {"a key twice", Changed([](GgufBuilder& f) { f.Set("a.u32", true); }),
       "key \"a.u32\" at byte"},
      {"a value type",
       Changed([](GgufBuilder& f) { f.Raw("k", static_cast<GgufValueType>(13), ""); }),
       "there is no value type 13"},
      {"a string's length", Head(0, 1, GgufBuilder::String("k") + bytes(uint32_t{8}) + bytes(huge)),
       "key \"k\" at byte 45: a string of 18446744073709551612 bytes"},
      {"a bool", Changed([](GgufBuilder& f) { f.Raw("k", GgufValueType::kBool, "\2"); }),
       "a bool must be 0 or 1"},
      {"a bool in an array", array(7, 2, std::string("\1\7", 2)), "a bool must be 0 or 1"},
      {"an array of arrays", array(9, 1, std::string(12, '\0')),
       "arrays of arrays are not supported"},
      {"an array's count", array(4, huge, ""), "16777216 is the most"},
      {"an array beyond the end", array(4, 1 << 20, "abcd"),
       "an array of 4194304 bytes goes beyond the end"},
      {"strings beyond the end", array(8, 1 << 20, std::string(80, '\0')),
       "a string of 8 bytes goes beyond the end"},
      {"an array's type", array(77, 1, "abcd"), "there is no value type 77"},
      {"an alignment of 0",
       Changed([](GgufBuilder& f) { f.Set("general.alignment", uint32_t{0}); }),
       "must be a power of two up to 1048576"},
      {"an alignment of 24",
       Changed([](GgufBuilder& f) { f.Set("general.alignment", uint32_t{24}); }),
       "must be a power of two"},
      {"an alignment of 2^21",
       Changed([](GgufBuilder& f) { f.Set("general.alignment", uint32_t{1} << 21); }),
       "must be a power of two"},
      {"an alignment that is a string",
       Changed([](GgufBuilder& f) { f.Set("general.alignment", "32"); }), "must be a power of two"},
      {"a long name",
       Changed([](GgufBuilder& f) { f.Tensor(std::string(65, 'n'), {1}, kGgufF32, "abcd"); }),
       "a name of 65 bytes; 64 is the most"},
      {"an empty name", Changed([](GgufBuilder& f) { f.Tensor("", {1}, kGgufF32, "abcd"); }),
       "its name is empty"},
      {"a tensor twice", Changed([](GgufBuilder& f) { f.Tensor("q8", {1}, kGgufF32, "abcd"); }),
       "tensor \"q8\" at byte"},
      {"no dimension", Changed([](GgufBuilder& f) { f.tensors()[0].dims = {}; }), "0 dimensions"},
      {"five dimensions", Changed([](GgufBuilder& f) {
         f.tensors()[0].dims = {1, 1, 1, 1, 1};
       }),
       "5 dimensions"},
      {"a dimension of 0", Changed([](GgufBuilder& f) {
         f.tensors()[0].dims = {0, 2};
       }),
       "a dimension is 0"},
      {"a product that wraps to 0", Changed([](GgufBuilder& f) {
         f.tensors()[0].dims = {uint64_t{1} << 32, uint64_t{1} << 32};
       }),
       "beyond the end of the file"},
      {"a product that wraps to something small", Changed([](GgufBuilder& f) {
         f.tensors()[0].dims = {uint64_t{1} << 62, 4, 3};
       }),
       "beyond the end of the file"},
      {"a tensor type", Changed([](GgufBuilder& f) { f.tensors()[0].type = 4; }),
       "there is no tensor type 4"},
      {"half a block", Changed([](GgufBuilder& f) { f.tensors()[1].dims = {48}; }),
       "rows of 48 values"},
      {"an offset that wraps",
       Changed([](GgufBuilder& f) { f.tensors()[0].offset = UINT64_MAX - 31; }),
       "beyond the end of the file"},
      {"an offset between", Changed([](GgufBuilder& f) { f.tensors()[2].offset += 1; }),
       "is no multiple of the alignment 32"},
      {"overlapping tensors", Changed([](GgufBuilder& f) { f.tensors()[2].offset = 32; }),
       "overlaps with tensor \"q8\""},
      {"data cut short",
       [] {
         std::string file = Small().Build();
         file.pop_back();
         return file;
       }(),
       "go beyond the end of the file"},
  };
  return files;
}

TEST(Gguf, HostileFilesAreRefusedByName) {
  for (const Hostile& file : HostileFiles()) {
    SCOPED_TRACE(file.what);
    const auto contents = Parse(file.bytes);
    ASSERT_FALSE(contents.ok());
    EXPECT_EQ(contents.status().code(), file.code);
    EXPECT_THAT(std::string(contents.status().message()), HasSubstr(file.error));
  }
}

// What two readings of the same bytes have in common, in a form that compares.
std::string Describe(const GgufContents& contents) {
  std::string text;
  for (const GgufValue& value : contents.values()) {
    text += std::string(value.key) + GgufTypeName(value.type) + std::to_string(value.count);
    if (value.IsArrayOf(GgufValueType::kString)) {
      for (const std::string_view item : value.Strings()) text += item;
    }
  }
  for (const GgufTensor& tensor : contents.tensors()) {
    text += std::string(tensor.name) + std::to_string(tensor.begin) + std::to_string(tensor.end);
    const std::span<const std::byte> data = contents.Data(tensor);
    uint64_t sum = 0;
    for (const std::byte byte : data) sum = sum * 31 + std::to_integer<uint64_t>(byte);
    text += std::to_string(sum);
  }
  return text;
}

// Larger than the small file, so that there are several places to cut it at.
std::string SeveralKilobytes() {
  GgufBuilder file = Small();
  std::vector<std::string> tokens;
  for (int i = 0; i < 200; ++i) tokens.push_back("token " + std::to_string(i));
  file.Set("tokens", tokens);
  file.Tensor("large", {32, 64}, kGgufQ8_0, std::string(34 * 64, 'd'));
  return file.Build();
}

TEST(Gguf, AFileThatIsCutShortAnywhereIsRefused) {
  const std::string whole = SeveralKilobytes();
  ASSERT_TRUE(Parse(whole).ok());
  for (size_t size = 0; size < whole.size(); size += size < 1024 ? 1 : 512) {
    // A copy of its own, so that a reader that goes too far is seen by the sanitizers.
    const std::string cut(whole.data(), size);
    EXPECT_FALSE(Parse(std::string(cut)).ok()) << size;
  }
}

TEST(Gguf, AFlippedByteIsRefusedOrReadsWithinTheFile) {
  const std::string whole = SeveralKilobytes();
  std::mt19937 random(11);
  int accepted = 0;
  for (int i = 0; i < 10000; ++i) {
    std::string bytes = whole;
    bytes[random() % bytes.size()] ^= static_cast<char>(1 + random() % 255);
    const auto contents = Parse(bytes);
    if (!contents.ok()) continue;
    ++accepted;
    EXPECT_FALSE(Describe(*contents).empty());  // reads every byte that it promises
  }
  EXPECT_GT(accepted, 1000);  // most of the file are data and text, where every byte is good
}

TEST(Gguf, HostileFilesCostLittleTimeAndMemory) {
  // As many entries as the head may say, each as small as can be; and an array of as many strings.
  std::string keys, tensors;
  for (uint32_t i = 0; i < 65536; ++i) {
    const std::string name(reinterpret_cast<const char*>(&i), 3);
    keys += GgufBuilder::String(name) + GgufBuilder::Bytes(uint32_t{0}) + "x";
    tensors += GgufBuilder::String(name) + GgufBuilder::Bytes(uint32_t{1}) +
               GgufBuilder::Bytes(uint64_t{1}) + GgufBuilder::Bytes(uint32_t{24}) +
               GgufBuilder::Bytes(uint64_t{i} * 32);
  }
  const std::string entries =
      Head(65536, 65536, keys + tensors) + std::string(65536 * 32 + 32, 'd');
  const std::string strings = Head(
      0, 1,
      GgufBuilder::String("k") + GgufBuilder::Bytes(uint32_t{9}) + GgufBuilder::Bytes(uint32_t{8}) +
          GgufBuilder::Bytes(uint64_t{1} << 24) + std::string(size_t{8} << 24, '\0'));
  for (const std::string* file : {&entries, &strings}) {
    const size_t before = mallinfo2().uordblks;
    const std::clock_t start = std::clock();
    const auto contents = Parse(*file);
    [[maybe_unused]] const double seconds =
        static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    ASSERT_TRUE(contents.ok()) << contents.status();
    EXPECT_LT(mallinfo2().uordblks - before, size_t{32} << 20);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    EXPECT_LT(seconds, 1.0);
#endif
  }
}

TEST(GgufFile, ErrorsBeginWithThePath) {
  const TempDir dir;
  EXPECT_EQ(GgufFile::Open(dir.File("none.gguf")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(GgufFile::Open(dir.path()).status().code(), absl::StatusCode::kInvalidArgument);
  WriteText(dir.File("empty.gguf"), "");
  WriteText(dir.File("text.gguf"), "once upon a time");
  for (const char* name : {"empty.gguf", "text.gguf"}) {
    const absl::Status status = GgufFile::Open(dir.File(name)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), StartsWith(dir.File(name) + ": "));
  }
}

TEST(GgufFile, ReadsWhatWasReleasedAgain) {
  const TempDir dir;
  const std::string bytes = SeveralKilobytes();
  WriteText(dir.File("model.gguf"), bytes);
  const auto file = GgufFile::Open(dir.File("model.gguf"));
  ASSERT_TRUE(file.ok()) << file.status();
  const std::string before = Describe((*file)->contents());
  (*file)->ReleasePages();
  EXPECT_EQ(Describe((*file)->contents()), before);
  EXPECT_EQ(Describe(*Parse(bytes)), before);
}

TEST(GgufFile, AModelsPathMeansAFileWhereThereIsOne) {
  const TempDir dir;
  WriteText(dir.File("model.gguf"), "x");
  EXPECT_TRUE(IsGgufPath(dir.File("model.gguf")));
  EXPECT_FALSE(IsGgufPath(dir.path()));
  EXPECT_FALSE(IsGgufPath(dir.File("other")));
  EXPECT_TRUE(
      IsGgufPath(dir.File("other.gguf")));  // so that errors are of a file that is not there
}

}  // namespace
}  // namespace winnow::engine
