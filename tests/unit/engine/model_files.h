// Model directories made on the spot, for the tests of what reads them.
#ifndef WINNOW_TESTS_UNIT_ENGINE_MODEL_FILES_H_
#define WINNOW_TESTS_UNIT_ENGINE_MODEL_FILES_H_

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/unit/temp_dir.h"
#include "tests/unit/test_paths.h"

namespace winnow::engine {

inline void WriteText(const std::string& path, std::string_view text) {
  std::ofstream file(path, std::ios::binary);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  ASSERT_TRUE(file.good()) << path;
}

inline std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  std::ostringstream text;
  text << file.rdbuf();
  return std::move(text).str();
}

// A file's bytes: length, header as given, `data_bytes` bytes of data (0, 1, 2, ...).
inline std::string SafetensorsBytes(std::string_view header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  bytes += header;
  for (size_t i = 0; i < data_bytes; ++i) bytes += static_cast<char>(i);
  return bytes;
}

// The smallest config.json of a supported Llama; tests change single keys of it.
inline nlohmann::json TinyConfig() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"hidden_size", 32},
          {"intermediate_size", 48},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 2},
          {"num_key_value_heads", 1},
          {"head_dim", 64},
          {"vocab_size", 40},
          {"max_position_embeddings", 256},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 10000.0},
          {"tie_word_embeddings", false},
          {"torch_dtype", "bfloat16"},
          {"bos_token_id", 1},
          {"eos_token_id", 2}};
}

// The folder of models that is too large for the repository; empty where it is not there.
inline std::string SharedDir() {
  const char* variable = std::getenv("WINNOW_SHARED");
  const std::string path = variable != nullptr ? variable : SourcePath("../shared");
  return std::filesystem::is_directory(path) ? path : "";
}

}  // namespace winnow::engine

#endif  // WINNOW_TESTS_UNIT_ENGINE_MODEL_FILES_H_
