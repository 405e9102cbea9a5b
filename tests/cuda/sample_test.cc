#include "kernels/cuda/sample.h"

#include <cmath>
#include <limits>
#include <set>

#include "tests/cuda/cuda_testing.h"
#include "tests/unit/kernels/sample_testing.h"

namespace winnow::kernels::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class CudaSampleTest : public CudaTest {
 protected:
  // Rows [first, first + count) in one launch.
  static std::vector<SampledToken> Launch(const DeviceArray<float>& logits, int64_t stride,
                                          int32_t vocab, const std::vector<AnySampleRow>& rows,
                                          size_t first, size_t count) {
    std::vector<DeviceArray<LogitEdit>> edits;
    std::vector<DeviceArray<int32_t>> masked;
    std::vector<DeviceArray<uint32_t>> allowed;
    std::vector<DeviceSampleRow> on_device;
    for (size_t i = first; i < first + count; ++i) {
      const SampleRow row = rows[i].row();
      edits.emplace_back(row.edits);
      masked.emplace_back(row.masked);
      allowed.emplace_back(row.allowed);
      on_device.push_back({edits.back().data(), masked.back().data(),
                           row.allowed.empty() ? nullptr : allowed.back().data(),
                           static_cast<int32_t>(row.edits.size()),
                           static_cast<int32_t>(row.masked.size()), row.repetition_penalty,
                           row.presence_penalty, row.frequency_penalty, row.temperature, row.top_k,
                           row.top_p, row.min_p, row.top_logprobs, row.noise, row.given});
    }
    const DeviceArray<DeviceSampleRow> descriptors(on_device);
    const DeviceArray<SampledToken> results(count);
    const SampleShape shape{static_cast<int32_t>(count), vocab};
    const DeviceArray<std::byte> workspace(SampleWorkspaceBytes(shape));
    WINNOW_CUDA_OK(Sample(shape, logits.data() + static_cast<int64_t>(first) * stride, stride,
                          descriptors.data(), results.data(), workspace.data(), nullptr));
    return results.Get();
  }

  void Check(Matrix& logits, const std::vector<AnySampleRow>& rows) {
    const auto vocab = static_cast<int32_t>(logits.cols());
    const int64_t stride = logits.tensor().stride;
    const auto on_device = Upload(logits);
    const auto sampled = Launch(on_device, stride, vocab, rows, 0, rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "row " << i << " of " << rows.size() << ", " << vocab
                                      << " tokens, " << rows[i]);
      ASSERT_NO_FATAL_FAILURE(ExpectSampled(logits, static_cast<int64_t>(i), rows[i], sampled[i]));
    }
    // Alone, or among fewer: the same bits.
    const auto first = static_cast<size_t>(random_.Int(0, static_cast<int64_t>(rows.size()) - 1));
    const auto count =
        static_cast<size_t>(random_.Int(1, static_cast<int64_t>(rows.size() - first)));
    for (const size_t some : {size_t{1}, count}) {
      const auto again = Launch(on_device, stride, vocab, rows, first, some);
      for (size_t i = 0; i < some; ++i) {
        ASSERT_TRUE(SameSample(again[i], sampled[first + i]))
            << "row " << first + i << ", among " << rows.size() << " and among " << some;
      }
    }
    Matrix after = logits;
    Download(on_device, after);
    for (int64_t i = 0; i < logits.rows(); ++i) {
      ASSERT_EQ(std::memcmp(after.row(i), logits.row(i), 4 * logits.cols()), 0)
          << "the logits were changed";
    }
  }
};

TEST_F(CudaSampleTest, RowsOfEveryKindUnderEveryOption) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 120; ++round) {
    const int64_t vocab = AnyVocab(random_, round % 12 == 0 ? 152064 : 5000);
    const int64_t num_rows = random_.Int(1, vocab > 5000 ? 12 : 64);
    Matrix logits(num_rows, vocab, random_.Int(0, 3));
    std::vector<AnySampleRow> rows;
    for (int64_t i = 0; i < num_rows; ++i) {
      FillLogits(random_, {logits.row(i), static_cast<size_t>(vocab)});
      rows.push_back(AnySampleRow::Any(random_, vocab));
    }
    ASSERT_NO_FATAL_FAILURE(Check(logits, rows));
  }
}

TEST_F(CudaSampleTest, ManyRowsOfModelsVocabularies) {
  SCOPED_TRACE(Seed());
  for (const int64_t vocab : {128256, 151936, 152064, 250000}) {
    const int64_t num_rows = vocab == 128256 ? 64 : 20;
    Matrix logits(num_rows, vocab, 0);
    std::vector<AnySampleRow> rows;
    for (int64_t i = 0; i < num_rows; ++i) {
      FillLogits(random_, {logits.row(i), static_cast<size_t>(vocab)});
      rows.push_back(AnySampleRow::Any(random_, vocab));
    }
    ASSERT_NO_FATAL_FAILURE(Check(logits, rows));
  }
}

TEST_F(CudaSampleTest, ARowTooLongForSharedMemory) {
  SCOPED_TRACE(Seed());
  constexpr int64_t kVocab = 600'001;
  Matrix logits(3, kVocab);
  std::vector<AnySampleRow> rows;
  for (int64_t i = 0; i < logits.rows(); ++i) {
    FillLogits(random_, {logits.row(i), static_cast<size_t>(kVocab)});
    rows.push_back(AnySampleRow::Any(random_, kVocab));
  }
  ASSERT_NO_FATAL_FAILURE(Check(logits, rows));
}

TEST_F(CudaSampleTest, EqualsAreTakenInTheOrderOfIds) {
  for (const int64_t vocab : {1, 7, 1024, 20'000, 128'256}) {
    Matrix logits(12, vocab);
    std::vector<AnySampleRow> rows(12);
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].temperature = i == 0 ? 0.0f : 1.0f;
      rows[i].top_logprobs = static_cast<int32_t>(3 * i % 33);
      rows[i].noise = i;
      if (i % 3 == 1)
        rows[i].top_k = static_cast<int32_t>(1 + vocab * static_cast<int64_t>(i) / 13);
      if (i % 3 == 2) rows[i].top_p = 0.08f * static_cast<float>(i);
    }
    ASSERT_NO_FATAL_FAILURE(Check(logits, rows));
  }
}

TEST_F(CudaSampleTest, ABrokenRowIsSaidToBeAndDisturbsNobody) {
  SCOPED_TRACE(Seed());
  for (const int64_t vocab : {1, 2, 1000, 128256}) {
    Matrix logits(16, vocab);
    std::vector<AnySampleRow> rows;
    for (int64_t i = 0; i < 16; ++i) {
      for (int64_t j = 0; j < vocab; ++j) logits.row(i)[j] = random_.Normal();
      rows.push_back(AnySampleRow::Any(random_, vocab));
    }
    for (const int i : {9, 13}) rows[i].given = -1;  // no edit can spoil the row of a given one
    const auto at = [&] { return random_.Int(0, vocab - 1); };
    logits.row(1)[at()] = kNan;
    logits.row(3)[at()] = -kNan;
    logits.row(5)[at()] = kInfinity;
    std::fill_n(logits.row(7), vocab, -kInfinity);
    for (int32_t t = 0; t < vocab; ++t) rows[9].masked.push_back(t);
    logits.row(11)[0] = kInfinity;
    rows[11].masked = {0};
    rows[11].allowed.clear();
    const int64_t grown = at();
    logits.row(13)[grown] = 3e38f;
    rows[13].repetition_penalty = 0.01f;
    rows[13].masked.clear();
    rows[13].allowed.clear();
    rows[13].edits = {{static_cast<int32_t>(grown), 0, 0.0f}};
    const auto on_device = Upload(logits);
    const auto sampled = Launch(on_device, logits.tensor().stride, static_cast<int32_t>(vocab),
                                rows, 0, rows.size());
    EXPECT_EQ(sampled[1].status, SampleStatus::kNan);
    EXPECT_EQ(sampled[3].status, SampleStatus::kNan);
    EXPECT_EQ(sampled[5].status, SampleStatus::kInfinity);
    EXPECT_EQ(sampled[7].status, SampleStatus::kNothing);
    EXPECT_EQ(sampled[9].status, SampleStatus::kNothing);
    EXPECT_EQ(sampled[11].status, SampleStatus::kInfinity);
    EXPECT_EQ(sampled[13].status, SampleStatus::kInfinity);
    for (size_t i = 0; i < rows.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "row " << i << ", " << vocab << " tokens");
      ASSERT_NO_FATAL_FAILURE(ExpectSampled(logits, static_cast<int64_t>(i), rows[i], sampled[i]));
    }
  }
}

TEST_F(CudaSampleTest, RefusesShapesThatItLacks) {
  EXPECT_EQ(Sample({1, 0}, nullptr, 0, nullptr, nullptr, nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(Sample({1, 100}, nullptr, 99, nullptr, nullptr, nullptr, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(Sample({0, 100}, nullptr, 100, nullptr, nullptr, nullptr, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace winnow::kernels::cuda
