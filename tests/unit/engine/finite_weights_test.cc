// NaN and infinite weights are found when a model is loaded, and the tensor is named.
#include "engine/model/finite_weights.h"

#include <cmath>
#include <limits>
#include <random>

#include "engine/model/random_model.h"
#include "engine/model_loader.h"
#include "gmock/gmock.h"
#include "kernels/host_matrix.h"
#include "tests/unit/engine/model_files.h"
#include "tests/unit/test_seed.h"

namespace winnow::engine {
namespace {

using kernels::DType;
using kernels::HostMatrix;
using nlohmann::json;
using ::testing::HasSubstr;

// Every bit pattern of a type, in random order, and what a plain look at each value says.
TEST(FiniteWeights, EqualsALookAtEachValue) {
  TestRandom random;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(kernels::DTypeName(dtype));
    for (int round = 0; round < 40; ++round) {
      const int64_t rows = 1 + static_cast<int64_t>(random() % 40);
      const int64_t cols = 1 + static_cast<int64_t>(random() % 700);
      const size_t value_bytes = kernels::DTypeBytes(dtype);
      // One byte in: files promise no alignment.
      std::vector<std::byte> bytes(1 + static_cast<size_t>(rows * cols) * value_bytes);
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
      const HostMatrix matrix{bytes.data() + 1, dtype, rows, cols};
      // Mostly finite, because a run of any bits soon has a NaN.
      const auto set_finite = [&](int64_t i) {
        std::memset(bytes.data() + 1 + static_cast<size_t>(i) * value_bytes, 0x3B, value_bytes);
      };
      for (int64_t i = 0; i < rows * cols; ++i) {
        if (random() % 2000 != 0 && !std::isfinite(kernels::ElementAt(matrix.data, dtype, i))) {
          set_finite(i);
        }
      }
      std::optional<int64_t> expected;
      for (int64_t i = 0; i < rows * cols && !expected; ++i) {
        if (!std::isfinite(kernels::ElementAt(matrix.data, dtype, i))) expected = i;
      }
      EXPECT_EQ(FindNonFinite(matrix), expected);
    }
  }
}

TEST(FiniteWeights, TheFirstIsFoundInALargeMatrixWithThreads) {
  std::vector<uint16_t> values(16 << 20, 0x3F80);  // 32 MiB: several threads on most machines
  const HostMatrix matrix{values.data(), DType::kBF16, 4096, 4096};
  EXPECT_EQ(FindNonFinite(matrix), std::nullopt);
  values.back() = 0x7FC0;
  EXPECT_EQ(FindNonFinite(matrix), static_cast<int64_t>(values.size()) - 1);
  values[values.size() / 2] = 0xFF80;
  EXPECT_EQ(FindNonFinite(matrix), static_cast<int64_t>(values.size()) / 2);
  values[3] = 0x7F80;
  EXPECT_EQ(FindNonFinite(matrix), 3);
}

// Each kind of tensor: an embedding that is only looked up, matrices, norms, biases, the output.
TEST(FiniteWeights, EveryTensorOfAModelIsLookedAt) {
  json config_json = TinyConfig();
  config_json.update({{"attention_bias", true}, {"mlp_bias", true}, {"torch_dtype", "float32"}});
  const TempDir dir;
  WriteText(dir.File("like.json"), config_json.dump());
  RandomModelOptions options;
  options.config_path = dir.File("like.json");
  options.out_dir = dir.File("m");
  options.seed = 7;
  ASSERT_TRUE(WriteRandomModel(options).ok());
  const auto config = LoadModelConfig(options.out_dir);
  ASSERT_TRUE(config.ok()) << config.status();
  const std::string path = options.out_dir + "/model.safetensors";
  const std::string good = ReadText(path);
  uint64_t length = 0;
  std::memcpy(&length, good.data(), sizeof(length));
  const json header = json::parse(good.substr(8, length));
  ModelOptions model_options;
  model_options.max_context = 64;
  const auto backend = MakeBackend(model_options);
  ASSERT_TRUE(backend.ok());
  const auto decoder_options = ResolveDecoderOptions(*config, model_options);
  ASSERT_TRUE(decoder_options.ok());
  const auto load = [&] {
    const auto weights = LoadWeights(options.out_dir, *config);
    EXPECT_TRUE(weights.ok()) << weights.status();
    return Decoder::Create(*config, *weights, **backend, *decoder_options).status();
  };
  EXPECT_TRUE(load().ok());
  int tensors = 0;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    ++tensors;
    std::string bad = good;
    const size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
    const float value = tensors % 2 == 0 ? std::numeric_limits<float>::infinity()
                                         : std::numeric_limits<float>::quiet_NaN();
    std::memcpy(bad.data() + 8 + length + (tensors % 3 == 0 ? begin : end - 4), &value, 4);
    WriteText(path, bad);
    const absl::Status status = load();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name << ": " << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(path), HasSubstr("\"" + name + "\""),
                      HasSubstr(tensors % 2 == 0 ? "infinity" : "NaN")));
  }
  EXPECT_EQ(tensors, static_cast<int>(ModelTensors(*config, nullptr).size()));
}

}  // namespace
}  // namespace winnow::engine
