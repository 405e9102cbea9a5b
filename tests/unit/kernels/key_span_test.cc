// An index that has places of its own: the KV lies in other blocks than its index.
#include "tests/unit/kernels/retrieval_testing.h"

namespace winnow::kernels {
namespace {

class KeySpanTest : public EachIsa {};
WINNOW_FOR_EACH_ISA(KeySpanTest);

TEST_P(KeySpanTest, AnIndexTableSaysWhereTheIndexLies) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{2, AnyHeadDimTo256(random_), 32, AnyKvType(random_)};
  constexpr int32_t kLength = 150, kBlocks = 5;
  PagedKv kv(random_, layout, {kLength});
  const std::vector<int32_t> places = {3, 0, 4, 2, 1};
  const auto backend = Make(2);
  const auto expect_moved = [&](size_t block_bytes, auto&& index) {
    std::vector<std::byte> plain(kv.num_blocks() * block_bytes), moved(kBlocks * block_bytes);
    index(KeySpan{kv.table(0), {0, kLength}}, plain.data());
    index(KeySpan{kv.table(0), {0, kLength}, places}, moved.data());
    for (int32_t block = 0; block < kBlocks; ++block) {
      const auto* from = plain.data() + kv.table(0)[block] * block_bytes;
      EXPECT_TRUE(std::equal(from, from + block_bytes, moved.data() + places[block] * block_bytes))
          << "block " << block;
    }
  };
  expect_moved(BoundBlockBytes(layout), [&](const KeySpan& span, std::byte* to) {
    backend->BoundKeys({&span, 1}, kv.pool(), layout, to);
  });
  expect_moved(Int4BlockBytes(layout), [&](const KeySpan& span, std::byte* to) {
    backend->QuantizeKeys({&span, 1}, kv.pool(), layout, to);
  });
  const CodeLayout code_layout{layout.kv_heads, layout.block_tokens, 64};
  std::vector<uint16_t> weight(size_t{2} * 64 * layout.head_dim);
  for (uint16_t& w : weight) w = ToBF16(static_cast<float>(random_.Int(-100, 100))).bits;
  const std::vector<float> bias(2 * 64, 0.5f);
  const auto encoder = backend->PackEncoder(
      {.kv_heads = 2, .queries_per_input = 1, .stages = {{weight, bias, layout.head_dim, 64}}});
  expect_moved(code_layout.BlockBytes(), [&](const KeySpan& span, std::byte* to) {
    backend->EncodeKeys({&span, 1}, kv.pool(), layout, *encoder, to, code_layout);
  });
}

}  // namespace
}  // namespace winnow::kernels
