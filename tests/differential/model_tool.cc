// What the scripts beside it compare with references:
//
//   winnow_model_tool tensors FILE.gguf OUT_DIR     writes each tensor's values as OUT_DIR/<number>.f32, in the file's order
//   winnow_model_tool matrices DIR OUT_DIR          writes each matrix of a model directory, widened, as OUT_DIR/<its plain
//                                                   tensor's name>.f32
//   winnow_model_tool greedy MODEL DTYPE COUNT [CONTEXT]
//                                                   reads token ids, one prompt a line, from stdin; prints a line of JSON for
//                                                   each: COUNT greedy tokens, the logits after the prompt, and for each
//                                                   token by how much it led. CONTEXT: the longest, else 2048
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/model_loader.h"
#include "nlohmann/json.hpp"
#include "tests/unit/engine/sequence_runner.h"

namespace winnow::engine {
namespace {

absl::Status WriteTensors(const std::string& path, const std::string& out_dir) {
  WINNOW_ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file, GgufFile::Open(path));
  size_t number = 0;
  for (const GgufTensor& tensor : file->contents().tensors()) {
    const auto type = WeightTypeOfGguf(tensor.type);
    if (!type) return absl::UnimplementedError(std::string(tensor.name));
    const auto cols = static_cast<int64_t>(tensor.dims[0]);
    const int64_t row_bytes = kernels::WeightRowBytes(*type, cols);
    const std::span<const std::byte> data = file->contents().Data(tensor);
    std::vector<float> row(cols);
    std::ofstream out(Concat(out_dir, "/", number++, ".f32"), std::ios::binary);
    for (size_t at = 0; at < data.size(); at += row_bytes) {
      kernels::DequantizeRow(*type, data.data() + at, cols, row.data());
      out.write(reinterpret_cast<const char*>(row.data()),
                static_cast<std::streamsize>(cols * sizeof(float)));
    }
    if (!out.good()) return absl::InternalError(Concat("could not write to ", out_dir));
  }
  return absl::OkStatus();
}

absl::Status WriteMatrices(const std::string& path, const std::string& out_dir) {
  WINNOW_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(path));
  WINNOW_ASSIGN_OR_RETURN(Weights weights, LoadWeights(path, config));
  for (const TensorSpec& spec : ModelTensors(config, &weights)) {
    if (spec.rows == 0) continue;
    std::vector<float> row(spec.matrix->cols);
    // Matrices that share a tensor follow each other in its file.
    std::ofstream out(Concat(out_dir, "/", spec.name, ".f32"),
                      spec.first_row != 0 ? std::ios::binary | std::ios::app : std::ios::binary);
    for (int64_t i = 0; i < spec.matrix->rows; ++i) {
      spec.matrix->WidenRow(i, row.data());
      out.write(reinterpret_cast<const char*>(row.data()),
                static_cast<std::streamsize>(row.size() * sizeof(float)));
    }
    if (!out.good()) return absl::InternalError(Concat("could not write to ", out_dir));
  }
  return absl::OkStatus();
}

absl::Status PrintGreedy(const std::string& path, const std::string& dtype, size_t count,
                         int32_t context) {
  ModelOptions options;
  options.dtype = dtype;
  options.max_context = context;
  options.retrieval.artifact = "none";
  options.retrieval.index = "none";
  WINNOW_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> model, LoadModel(path, options));
  Decoder& decoder = *model->decoder;
  std::vector<int32_t> blocks(decoder.num_blocks());
  std::iota(blocks.begin(), blocks.end(), 0);
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::vector<int32_t> ids{std::istream_iterator<int32_t>(words), {}};
    auto position = static_cast<int32_t>(ids.size());
    const std::vector<float> first = testing::Run(decoder, ids, 0, blocks, 1, 512);
    std::vector<float> logits = first;
    std::vector<int32_t> greedy;
    std::vector<float> leads;
    for (;;) {
      const int32_t token = testing::ArgMax(logits);
      const float best = logits[token];
      logits[token] = -INFINITY;
      greedy.push_back(token);
      leads.push_back(best - logits[testing::ArgMax(logits)]);
      if (greedy.size() == count) break;
      logits = testing::Run(decoder, {&token, 1}, position++, blocks, 1, 1);
    }
    std::cout << nlohmann::json{{"greedy", greedy}, {"leads", leads}, {"logits", first}}
              << std::endl;
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  absl::Status status = absl::InvalidArgumentError("see the comment at the top of model_tool.cc");
  if (arguments.size() == 3 && arguments[0] == "tensors") {
    status = WriteTensors(arguments[1], arguments[2]);
  } else if (arguments.size() == 3 && arguments[0] == "matrices") {
    status = WriteMatrices(arguments[1], arguments[2]);
  } else if ((arguments.size() == 4 || arguments.size() == 5) && arguments[0] == "greedy") {
    status = PrintGreedy(arguments[1], arguments[2], std::stoul(arguments[3]),
                         arguments.size() == 5 ? std::stoi(arguments[4]) : 2048);
  }
  if (status.ok()) return 0;
  std::cerr << status << "\n";
  return 1;
}

}  // namespace
}  // namespace winnow::engine

int main(int argc, char** argv) { return winnow::engine::Main(argc, argv); }
