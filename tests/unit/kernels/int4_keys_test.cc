#include "kernels/int4_keys.h"

#include "kernels/host_matrix.h"
#include "tests/unit/kernels/retrieval_testing.h"

namespace winnow::kernels {
namespace {

class Int4KeysTest : public EachIsa {
 protected:
  static std::vector<std::byte> Memory(const PagedKv& kv) {
    return std::vector<std::byte>(kv.num_blocks() * Int4BlockBytes(kv.layout()), kUntouched);
  }
};
WINNOW_FOR_EACH_ISA(Int4KeysTest);

TEST_P(Int4KeysTest, AreTheReferencesBitForBit) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : kKvTypes) {
    for (const int32_t d : {64, 80, 96, 128, 256}) {
      for (const float deviation : {1e-38f, 1e-3f, 1.0f, 1e4f, 1e30f}) {
        const KvLayout layout{2, d, 32, dtype};
        const auto length = static_cast<int32_t>(random_.Int(70, 120));
        PagedKv kv(random_, layout, {length}, deviation);
        for (int32_t c = 0; c < d; ++c) {
          kv.SetKey(0, 0, 60, c, 0.0f);
          kv.SetKey(0, 0, 61, c, -0.0f);
          kv.SetKey(0, 0, 62, c, c % 3 == 0 ? 0.0f : -0.0f);
          kv.SetKey(0, 0, 63, c, deviation);
          kv.SetKey(0, 0, 64, c, -3 * deviation);
          kv.SetKey(0, 0, 65, c, c == 7 ? 1e-39f : 0.0f);
          kv.SetKey(0, 0, 66, c, static_cast<float>(c % 31) / 2);  // halves: ties of rounding
        }
        const auto first = static_cast<int32_t>(random_.Int(0, 60));
        const std::vector<KeySpan> spans = {{kv.table(0), {first, length}}};
        std::vector<std::byte> expected = Memory(kv), actual = Memory(kv);
        QuantizeKeysRef(spans, kv.pool(), layout, expected.data());
        Make(2)->QuantizeKeys(spans, kv.pool(), layout, actual.data());
        EXPECT_TRUE(actual == expected) << DTypeName(dtype) << " d " << d << " of " << deviation;
      }
    }
  }
}

TEST_P(Int4KeysTest, TokenByTokenGivesTheBitsOfAllAtOnce) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{2, AnyHeadDimTo256(random_), 32, AnyKvType(random_)};
  PagedKv kv(random_, layout, {100});
  const auto backend = Make(3);
  std::vector<std::byte> at_once = Memory(kv), grown = Memory(kv);
  const std::vector<KeySpan> all = {{kv.table(0), {0, 100}}};
  backend->QuantizeKeys(all, kv.pool(), layout, at_once.data());
  for (int32_t t = 0; t < 100; ++t) {
    const std::vector<KeySpan> one = {{kv.table(0), {t, t + 1}}};
    backend->QuantizeKeys(one, kv.pool(), layout, grown.data());
  }
  EXPECT_TRUE(grown == at_once);
}

TEST_P(Int4KeysTest, NoValueIsWrongByMoreThanHalfAStep) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : kKvTypes) {
    const KvLayout layout{1, AnyHeadDimTo256(random_), 32, dtype};
    PagedKv kv(random_, layout, {200}, 3.0f);
    for (int32_t t = 100; t < 200; ++t) kv.SetKey(0, 0, t, t % 64, 40.0f);  // as RoPE'd keys have
    std::vector<std::byte> keys = Memory(kv);
    const std::vector<KeySpan> spans = {{kv.table(0), {0, 200}}};
    Make(1)->QuantizeKeys(spans, kv.pool(), layout, keys.data());
    for (int32_t t = 0; t < 200; ++t) {
      const std::byte* key = keys.data() + Int4KeyOffset(layout, kv.table(0)[t / 32], 0, t % 32);
      const float step = ElementAt(key + layout.head_dim / 2, DType::kBF16, 0);
      float low = 1e9f, high = -1e9f;
      for (int32_t c = 0; c < layout.head_dim; ++c) {
        const float value = KeyAt(kv.Row(0, 0, t), layout, c);
        low = std::min(low, value);
        high = std::max(high, value);
        ASSERT_LE(std::abs(Int4KeyValueRef(key, layout.head_dim, c) - value), 0.5001f * step);
      }
      // The step is no wider than rounding scale and zero makes it.
      EXPECT_LE(step, (high - low + std::abs(low) / 128) / 15 * (1 + 1.0f / 64));
    }
  }
}

}  // namespace
}  // namespace winnow::kernels
