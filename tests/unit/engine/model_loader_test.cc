#include "engine/model_loader.h"
#include "engine/kv_planning.h"

#include <cstdlib>
#include <fstream>
#include <string>

#include "engine/kv/host_memory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/test_paths.h"

namespace winnow::engine {
namespace {

using kernels::DType;
using ::testing::HasSubstr;

const std::string kNeedle = SourcePath("models/needle-5m");

ModelConfig Config(DType dtype, int32_t hidden_size) {
  ModelConfig config;
  config.hidden_size = hidden_size;
  config.intermediate_size = 4 * hidden_size;
  config.layers.resize(2);
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  config.vocab_size = 1000;
  config.max_position_embeddings = 1000;
  config.dtype = dtype;
  return config;
}

DecoderOptions Resolve(const ModelConfig& config, const ModelOptions& options) {
  const auto resolved = ResolveDecoderOptions(config, options);
  EXPECT_TRUE(resolved.ok()) << resolved.status();
  return resolved.value_or(DecoderOptions());
}

ModelOptions Dtypes(const std::string& dtype, const std::string& kv_dtype) {
  ModelOptions options;
  options.dtype = dtype;
  options.kv_dtype = kv_dtype;
  return options;
}

TEST(ModelOptions, AutoFollowsTheModelsType) {
  const DecoderOptions f32 = Resolve(Config(DType::kF32, 4096), {});
  EXPECT_EQ(f32.compute, DType::kF32);
  EXPECT_EQ(f32.kv_dtype, DType::kF32);
  const DecoderOptions bf16 = Resolve(Config(DType::kBF16, 4096), {});
  EXPECT_EQ(bf16.compute, DType::kBF16);
  EXPECT_EQ(bf16.kv_dtype, DType::kBF16);
  const DecoderOptions f16 = Resolve(Config(DType::kF16, 4096), {});
  EXPECT_EQ(f16.compute, DType::kF16);
  EXPECT_EQ(f16.kv_dtype, DType::kBF16);
}

TEST(ModelOptions, SmallModelsInBf16MultiplyInF32AndKeepTheirKvInBf16) {
  const DecoderOptions small = Resolve(Config(DType::kBF16, 256), {});
  EXPECT_EQ(small.compute, DType::kF32);
  EXPECT_EQ(small.kv_dtype, DType::kBF16);
  EXPECT_EQ(Resolve(Config(DType::kBF16, 256), Dtypes("bf16", "auto")).compute, DType::kF32);
  // Weights that bf16 cannot hold are rounded when it is asked for, however small the model.
  EXPECT_EQ(Resolve(Config(DType::kF32, 256), Dtypes("bf16", "auto")).compute, DType::kBF16);
}

TEST(ModelOptions, WhatIsAskedForIsDone) {
  const DecoderOptions exact = Resolve(Config(DType::kBF16, 4096), Dtypes("f32", "auto"));
  EXPECT_EQ(exact.compute, DType::kF32);
  EXPECT_EQ(exact.kv_dtype, DType::kF32);
  EXPECT_EQ(Resolve(Config(DType::kBF16, 4096), Dtypes("f32", "bf16")).kv_dtype, DType::kBF16);
  EXPECT_EQ(Resolve(Config(DType::kBF16, 4096), Dtypes("auto", "f32")).kv_dtype, DType::kF32);
  EXPECT_EQ(Resolve(Config(DType::kBF16, 4096), Dtypes("f32", "int8")).kv_dtype, DType::kI8);
  EXPECT_EQ(Resolve(Config(DType::kBF16, 4096), Dtypes("auto", "fp8")).kv_dtype, DType::kF8);
}

TEST(ModelOptions, NoKvBytesMeansOneSequenceOfTheWholeContext) {
  // 16 blocks of 64 tokens hold 1000: x 2 layers x 2 heads x 2 x 64 values of 2 bytes.
  const DecoderOptions options = Resolve(Config(DType::kBF16, 256), {});
  EXPECT_EQ(options.max_context, 1000);
  EXPECT_EQ(options.kv_bytes, int64_t{16} * 64 * 2 * 2 * 2 * 64 * 2);
}

TEST(ModelOptions, BadOptionsAreRefusedByName) {
  const auto expect_refused = [](const ModelConfig& config, const ModelOptions& options,
                                 const std::string& message_part) {
    const absl::Status status = ResolveDecoderOptions(config, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message_part;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message_part));
  };
  expect_refused(Config(DType::kBF16, 256), Dtypes("f16", "auto"),
                 "dtype: f16 is for float16 weights");
  expect_refused(Config(DType::kBF16, 256), Dtypes("int8", "auto"), "dtype: 'int8' is not one of");
  expect_refused(Config(DType::kBF16, 256), Dtypes("auto", "f16"), "kv_dtype: 'f16' is not one of");

  ModelOptions options;
  options.isa = "sse9";
  EXPECT_THAT(std::string(MakeBackend(options).status().message()),
              HasSubstr("isa: 'sse9' is not one of"));
  options.isa = "auto";
  options.num_threads = -1;
  EXPECT_THAT(std::string(MakeBackend(options).status().message()),
              HasSubstr("threads: -1 is not"));
}

TEST(ModelLoader, WhatADeviceCannotDoIsRefusedByTheFlagsName) {
  const ModelConfig config = Config(DType::kBF16, 256);
  const auto expect_refused = [&](auto set, const char* flag) {
    ModelOptions options;
    options.device = "cuda";
    set(options);
    const absl::Status status = ResolveDecoderOptions(config, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << flag;
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(flag) + ": ")) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("cpu")) << status;
  };
  expect_refused([](ModelOptions& o) { o.device = "tpu"; }, "device");
  expect_refused([](ModelOptions& o) { o.dtype = "f32"; }, "kv_dtype");
  expect_refused([](ModelOptions& o) { o.kv_dtype = "f32"; }, "kv_dtype");
  expect_refused(
      [](ModelOptions& o) {
        o.tiers.disk_bytes = 64 << 20;
        o.tiers.store_dir = "/tmp";
        o.tiers.keep_prefixes = false;
      },
      "disk_bytes");
  expect_refused(
      [](ModelOptions& o) {
        o.tiers.disk_bytes = 64 << 20;
        o.tiers.store_dir = "/tmp";
        o.tiers.row_cache_bytes = 1 << 20;
      },
      "row_cache_bytes");
  expect_refused(
      [](ModelOptions& o) {
        o.tiers.host_bytes = 64 << 20;
        o.tiers.prefetch = true;
      },
      "prefetch");
  expect_refused([](ModelOptions& o) { o.isa = "avx2"; }, "isa");
  expect_refused([](ModelOptions& o) { o.num_threads = 2; }, "threads");
  ModelOptions options;
  options.device = "cuda";
  options.dtype = "f32";
  for (const auto& [name, dtype] : {std::pair("bf16", DType::kBF16), std::pair("int8", DType::kI8),
                                    std::pair("fp8", DType::kF8)}) {
    options.kv_dtype = name;
    const auto resolved = ResolveDecoderOptions(config, options);
    ASSERT_TRUE(resolved.ok()) << resolved.status();
    EXPECT_EQ(resolved->kv_dtype, dtype);
  }
}

// On a device host_bytes is pinned memory that holds the KV of all layers but the first two.
TEST(ModelLoader, HostBytesOfADeviceSayHowManyBlocksThereAre) {
  ModelConfig config = Config(DType::kBF16, 256);
  config.layers.resize(6);
  ModelOptions options;
  options.device = "cuda";
  options.max_context = 4096;
  options.tiers.host_bytes = 64 << 20;
  const auto resolved = ResolveDecoderOptions(config, options);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  const kernels::KvLayout layout{config.num_kv_heads, config.head_dim, options.block_tokens,
                                 DType::kBF16};
  const auto block_bytes = static_cast<int64_t>(layout.BlockBytes());
  const int64_t blocks = options.tiers.host_bytes / (4 * block_bytes);
  EXPECT_EQ(NumKvBlocks(config, *resolved), blocks);
  EXPECT_EQ(resolved->shared_kv_bytes, options.tiers.host_bytes);
  EXPECT_EQ(resolved->kv_bytes, 2 * blocks * block_bytes);
  EXPECT_EQ(resolved->lower_blocks, 0);
  EXPECT_EQ(resolved->rows.cache_bytes, size_t{8} << 20) << "an eighth";
  options.tiers.row_cache_bytes = 0;
  EXPECT_EQ(ResolveDecoderOptions(config, options)->rows.cache_bytes, 0u);

  options.kv_bytes = 1 << 20;
  const absl::Status status = ResolveDecoderOptions(config, options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("kv_bytes: "));
  EXPECT_THAT(std::string(status.message()), HasSubstr("leave one of them out"));
}

TEST(ModelLoader, WithoutADeviceTheMessageNamesWhatThereIs) {
  // Hides a GPU that is there: the driver reads it when it is first asked, which nothing else of this program does.
  ASSERT_EQ(setenv("CUDA_VISIBLE_DEVICES", "", /*overwrite=*/1), 0);
  ModelOptions options;
  options.device = "cuda";
  const auto backend = MakeBackend(options);
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(backend.status().message()), HasSubstr("device: cuda: "));
  EXPECT_THAT(std::string(backend.status().message()), HasSubstr("--device cpu"));
}

TEST(ModelLoader, AModelThatDoesNotFitIsRefusedBeforeMemoryIsTaken) {
  const std::optional<int64_t> available = AvailableMemoryBytes();
  ASSERT_TRUE(available.has_value());
  EXPECT_GT(*available, 0);
  ModelOptions options;
  options.kv_bytes = *available * 2 + (int64_t{1} << 40);
  const absl::Status status = LoadModel(kNeedle, options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("the KV pool (kv_bytes) " + std::to_string(options.kv_bytes)));
}

// Resident memory in bytes that is backed by files, from /proc: where the mapped weights show.
int64_t ResidentFileBytes() {
  std::ifstream file("/proc/self/status");
  std::string word;
  int64_t kib = 0;
  while (file >> word) {
    if (word == "RssFile:" && file >> kib) return kib * 1024;
  }
  return -1;
}

TEST(ModelLoader, MappedWeightsDoNotStayResidentBesideThePackedOnes) {
  ModelOptions options;
  options.max_context = 1024;
  ASSERT_TRUE(LoadModel(kNeedle, options).ok());  // the program's own pages are in by now
  const int64_t before = ResidentFileBytes();
  ASSERT_GE(before, 0);
  const auto loaded = LoadModel(kNeedle, options);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_LT(ResidentFileBytes() - before, 4 << 20);  // the file has 11 MB
  EXPECT_EQ((*loaded)->decoder->max_context(), 1024);
  EXPECT_EQ((*loaded)->chat_template.name(), "tokenizer_config.json");
}

}  // namespace
}  // namespace winnow::engine
