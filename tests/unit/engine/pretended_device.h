// A backend that only pretends to have memory of its own: what operations write for the host to read is
// there after Synchronize and not before, it finds chosen rows itself, keeps rows of shared KV that it
// has read, takes blocks ahead of dense attention, and can fail at any moment.
#ifndef WINNOW_TESTS_UNIT_ENGINE_PRETENDED_DEVICE_H_
#define WINNOW_TESTS_UNIT_ENGINE_PRETENDED_DEVICE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/timed_backend.h"
#include "gtest/gtest.h"
#include "kernels/attention_state.h"
#include "kernels/backend.h"

namespace winnow::engine {

class PretendedDevice : public TimedBackend {
 public:
  explicit PretendedDevice(kernels::Backend& inner)
      : TimedBackend(inner, kernels::DType::kF32), cpu_(inner) {}

  int passes = 0;
  int waits = 0;
  int fail_after_waits = -1;  // never
  int64_t available = 1 << 30;

  int64_t AvailableBytes() const override { return available; }
  void BeginPass() override {
    ++passes;
    static_cast<void>(Synchronize());
    waits = 0;
  }
  bool Synchronize() override {
    ++waits;
    if (fail_after_waits >= 0 && waits > fail_after_waits) failed_ = true;
    if (failed_) return false;
    for (Made& made : made_) {
      std::copy(made.counts.begin(), made.counts.end(), made.to.counts);
      std::copy(made.tokens.begin(), made.tokens.end(), made.to.tokens);
    }
    made_.clear();
    for (auto& [values, to] : masses_) std::copy(values.begin(), values.end(), to);
    masses_.clear();
    for (auto& [tokens, to] : sampled_) std::copy(tokens.begin(), tokens.end(), to);
    sampled_.clear();
    for (auto& [ids, to] : routed_) std::copy(ids.begin(), ids.end(), to);
    routed_.clear();
    return true;
  }
  std::string failure() const override { return failed_ ? "pretended" : ""; }

  void SelectByCodes(std::span<const kernels::RetrievalQuery> queries, const void* query_codes,
                     int32_t group, const void* codes, const kernels::CodeLayout& code_layout,
                     const kernels::Selection& chosen) override {
    cpu_.SelectByCodes(queries, query_codes, group, codes, code_layout,
                       Make(chosen, queries.size()));
  }
  void SelectByBounds(const kernels::Tensor& q, std::span<const kernels::RetrievalQuery> queries,
                      const void* bounds, const kernels::KvLayout& layout, float scale,
                      const kernels::Selection& chosen) override {
    cpu_.SelectByBounds(q, queries, bounds, layout, scale, Make(chosen, queries.size()));
  }
  void SelectByLogits(const kernels::Tensor& q, std::span<const kernels::RetrievalQuery> queries,
                      const void* pool, const kernels::KvLayout& layout, float scale,
                      const kernels::Selection& chosen) override {
    cpu_.SelectByLogits(q, queries, pool, layout, scale, Make(chosen, queries.size()));
  }
  void SelectByMass(const kernels::SelectByMassArgs& args) override {
    kernels::SelectByMassArgs of_device = args;
    // A device reads what its own kernels wrote, before the host sees it.
    for (auto made = masses_.rbegin(); made != masses_.rend(); ++made) {
      if (made->second != args.anchor_masses) continue;
      of_device.anchor_masses = made->first.data();
      break;
    }
    of_device.chosen = Make(args.chosen, args.queries.size());
    cpu_.SelectByMass(of_device);
  }
  void PruneSelection(const kernels::PruneSelectionArgs& args) override {
    kernels::PruneSelectionArgs of_device = args;
    // Before Make: what is made for `kept` may be about the same place.
    const kernels::Selection candidates = Latest(args.candidates);
    of_device.kept = Make(args.kept, args.queries.size());
    of_device.candidates = candidates;
    cpu_.PruneSelection(of_device);
  }
  void RerankByMass(const kernels::RerankByMassArgs& args) override {
    kernels::RerankByMassArgs of_device = args;
    // Before Make, as in PruneSelection.
    const kernels::Selection candidates = Latest(args.candidates);
    of_device.kept = Make(args.kept, args.queries.size());
    of_device.candidates = candidates;
    cpu_.RerankByMass(of_device);
  }
  void TakeFromTail(const kernels::TakeFromTailArgs& args) override {
    kernels::TakeFromTailArgs of_device = args;
    of_device.read = Latest(args.read);
    cpu_.TakeFromTail(of_device);
  }
  bool FindsRows(const void*) const override { return true; }
  void AttendRows(const kernels::AttendRowsArgs& args) override {
    if (!args.rows.are_tokens()) return TimedBackend::AttendRows(args);
    const int32_t d = args.rows.layout.head_dim;
    std::vector<float> states;
    const ChosenLists found(*this, args.queries, args.rows);
    kernels::AttendRowsArgs of_lists = args;
    of_lists.rows = {.layout = args.rows.layout, .lists = found.lists};
    if (args.states == nullptr) {
      states.resize(args.queries.size() * (args.q.cols / d) * kernels::AttentionStateFloats(d));
      of_lists.states = states.data();
    }
    cpu_.AttendRows(of_lists);
    if (args.states == nullptr) {
      cpu_.FinishStates(args.queries, states.data(), d, args.sinks, args.out);
    }
  }
  void CompleteStates(const kernels::CompleteStatesArgs& args) override {
    if (!args.rows.are_tokens()) return TimedBackend::CompleteStates(args);
    const ChosenLists found(*this, args.queries, args.rows);
    kernels::CompleteStatesArgs of_lists = args;
    of_lists.rows = {.layout = args.rows.layout, .pool = args.rows.pool, .lists = found.lists};
    cpu_.CompleteStates(of_lists);
  }
  void StateMasses(const float* states, int64_t count, int32_t head_dim, float* masses) override {
    std::vector<float> values(count);
    cpu_.StateMasses(states, count, head_dim, values.data());
    masses_.emplace_back(std::move(values), masses);
  }
  void Sample(const kernels::Tensor& logits, std::span<const kernels::SampleRow> rows,
              kernels::SampledToken* sampled) override {
    std::vector<kernels::SampledToken> tokens(rows.size());
    cpu_.Sample(logits, rows, tokens.data());
    sampled_.emplace_back(std::move(tokens), sampled);
  }
  void RouteExperts(const kernels::Tensor& logits, const kernels::ExpertRouting& routing,
                    int32_t* ids, const kernels::Tensor& weights) override {
    std::vector<int32_t> made(logits.rows * weights.cols);
    cpu_.RouteExperts(logits, routing, made.data(), weights);
    routed_.emplace_back(std::move(made), ids);
  }
  void MeasureSelection(const kernels::MeasureSelectionArgs& args) override {
    if (!Synchronize()) return;
    cpu_.MeasureSelection(args);
  }

  // ---- KV in shared memory ----

  std::unique_ptr<kernels::SharedKv> ShareKv(const kernels::SharedKvShape& shape,
                                             std::span<std::byte* const> pools,
                                             std::string* why) override {
    static_cast<void>(why);
    auto kv = std::make_unique<Shared>(*this, shape, pools);
    shared_ = kv.get();
    return kv;
  }
  void WriteKv(const kernels::Tensor& k, const kernels::Tensor& v,
               std::span<const kernels::AttentionChunk> chunks, void* pool,
               const kernels::KvLayout& layout) override {
    TimedBackend::WriteKv(k, v, chunks, pool, layout);
    if (shared_ != nullptr) shared_->Written(pool, chunks);
  }
  void Attend(const kernels::Tensor& q, std::span<const kernels::AttentionChunk> chunks,
              const void* pool, const kernels::KvLayout& layout, float scale,
              const kernels::Tensor& out) override {
    if (shared_ != nullptr) shared_->Attended(pool, chunks);
    TimedBackend::Attend(q, chunks, pool, layout, scale, out);
  }
  void RopeAndWriteKv(const kernels::RopeAndWriteKvArgs& args) override {
    TimedBackend::RopeAndWriteKv(args);
    if (shared_ != nullptr) shared_->Written(args.pool, args.chunks);
  }

 private:
  // Keeps every row that it has read, and a copy of the next layer's pool from when a layer attended.
  class Shared final : public kernels::SharedKv {
   public:
    Shared(PretendedDevice& device, const kernels::SharedKvShape& shape,
           std::span<std::byte* const> pools)
        : device_(device), shape_(shape), pools_(pools.begin(), pools.end()) {}
    ~Shared() override { device_.shared_ = nullptr; }
    kernels::SharedKvSizes sizes() const override { return {}; }
    void TakeReads(std::span<kernels::SharedKvReads> of_rows) override {
      std::fill(of_rows.begin(), of_rows.end(), kernels::SharedKvReads());
    }
    void ForgetRows(std::span<const int32_t> blocks) override {
      ahead_ = -1;
      for (std::byte* pool : pools_) {
        for (const int32_t block : blocks) ForgetBlock(pool, block);
      }
    }
    void ForgetStaged() override { ahead_ = -1; }

    const std::byte* Read(const std::byte* row) {
      if (PoolOf(row) < 0) return row;
      std::vector<std::byte>& kept = rows_[row];
      if (kept.empty()) {
        kept.assign(row, row + shape_.layout.RowBytes());
      } else {
        EXPECT_EQ(std::memcmp(kept.data(), row, kept.size()), 0) << "read before it had come";
      }
      return kept.data();
    }
    void Written(const void* pool, std::span<const kernels::AttentionChunk> chunks) {
      const int index = PoolOf(static_cast<const std::byte*>(pool));
      if (index < 0) return;
      for (const kernels::AttentionChunk& chunk : chunks) {
        const int32_t tokens = shape_.layout.block_tokens;
        for (int32_t i = chunk.position / tokens;
             i <= (chunk.position + chunk.num_tokens - 1) / tokens; ++i) {
          const int32_t block = chunk.block_table[i];
          ForgetBlock(pools_[index], block);
          if (index == ahead_) RefreshAhead(block);
        }
      }
    }
    void Attended(const void* pool, std::span<const kernels::AttentionChunk> chunks) {
      const int index = PoolOf(static_cast<const std::byte*>(pool));
      if (index < 0) return;
      for (const kernels::AttentionChunk& chunk : chunks) {
        const int32_t last = (chunk.position + chunk.num_tokens - 1) / shape_.layout.block_tokens;
        for (int32_t i = 0; index == ahead_ && i <= last; ++i) {
          const size_t at = chunk.block_table[i] * shape_.layout.BlockBytes();
          EXPECT_EQ(std::memcmp(copy_.data() + at, pools_[index] + at, shape_.layout.BlockBytes()),
                    0)
              << "block " << chunk.block_table[i] << " came after it was brought ahead";
        }
      }
      ahead_ = index + 1 < static_cast<int>(pools_.size()) ? index + 1 : -1;
      if (ahead_ >= 0) copy_.assign(pools_[ahead_], pools_[ahead_] + PoolBytes());
    }

   private:
    size_t PoolBytes() const { return shape_.num_blocks * shape_.layout.BlockBytes(); }
    int PoolOf(const std::byte* at) const {
      for (size_t i = 0; i < pools_.size(); ++i) {
        if (at >= pools_[i] && at < pools_[i] + PoolBytes()) return static_cast<int>(i);
      }
      return -1;
    }
    void ForgetBlock(const std::byte* pool, int32_t block) {
      const std::byte* begin = pool + block * shape_.layout.BlockBytes();
      rows_.erase(rows_.lower_bound(begin), rows_.lower_bound(begin + shape_.layout.BlockBytes()));
    }
    void RefreshAhead(int32_t block) {
      const size_t at = block * shape_.layout.BlockBytes();
      std::memcpy(copy_.data() + at, pools_[ahead_] + at, shape_.layout.BlockBytes());
    }

    PretendedDevice& device_;
    const kernels::SharedKvShape shape_;
    const std::vector<std::byte*> pools_;
    std::map<const std::byte*, std::vector<std::byte>> rows_;
    int ahead_ = -1;  // pool that copy_ is of
    std::vector<std::byte> copy_;
  };

  struct Made {
    kernels::Selection to;
    std::vector<int32_t> counts, tokens;
    kernels::Selection view() { return {to.kv_heads, to.capacity, counts.data(), tokens.data()}; }
  };
  // The rows of what was chosen, in order.
  struct ChosenLists {
    ChosenLists(PretendedDevice& device, std::span<const kernels::RetrievalQuery> queries,
                const kernels::RowSource& source) {
      const kernels::KvLayout& layout = source.layout;
      const kernels::Selection of_device = device.Latest(source.chosen);
      for (size_t i = 0; i < queries.size(); ++i) {
        const kernels::RetrievalQuery& query = queries[i];
        for (int32_t head = 0; head < layout.kv_heads; ++head) {
          auto& of_list = rows.emplace_back();
          const auto add = [&](int32_t token) {
            const auto* row = static_cast<const std::byte*>(source.pool) +
                              layout.RowOffset(query.block_table[token / layout.block_tokens], head,
                                               token % layout.block_tokens);
            of_list.push_back(device.shared_ == nullptr ? row : device.shared_->Read(row));
          };
          for (int32_t t = 0; t < std::min(query.mid.first, query.position + 1); ++t) add(t);
          const auto first = static_cast<int32_t>(of_list.size());
          const auto place = static_cast<int64_t>(i);
          for (int32_t t = 0; t < of_device.count(place, head); ++t) {
            add(of_device.chosen(place, head)[t]);
          }
          const auto last = static_cast<int32_t>(of_list.size());
          for (int32_t t = query.mid.last; t <= query.position; ++t) add(t);
          lists.push_back({of_list.data(), static_cast<int32_t>(of_list.size()), first, last});
        }
      }
    }
    std::vector<std::vector<const std::byte*>> rows;
    std::vector<kernels::RowList> lists;
  };
  // What is made for `chosen`, on its way to it.
  kernels::Selection Make(const kernels::Selection& chosen, size_t queries) {
    const size_t lists = queries * chosen.kv_heads;
    made_.push_back(
        {chosen, std::vector<int32_t>(lists), std::vector<int32_t>(lists * chosen.capacity)});
    return made_.back().view();
  }
  kernels::Selection Latest(const kernels::Selection& chosen) {
    for (size_t i = made_.size(); i-- > 0;) {
      if (made_[i].to.counts == chosen.counts) return made_[i].view();
    }
    return chosen;
  }

  kernels::Backend& cpu_;
  bool failed_ = false;
  Shared* shared_ = nullptr;
  std::vector<Made> made_;
  std::vector<std::pair<std::vector<float>, float*>> masses_;
  std::vector<std::pair<std::vector<kernels::SampledToken>, kernels::SampledToken*>> sampled_;
  std::vector<std::pair<std::vector<int32_t>, int32_t*>> routed_;
};

// The same over a CPU of its own.
class PretendedDeviceOfItsOwn final : private std::unique_ptr<kernels::Backend>,
                                      public PretendedDevice {
 public:
  explicit PretendedDeviceOfItsOwn(std::unique_ptr<kernels::Backend> cpu)
      : std::unique_ptr<kernels::Backend>(std::move(cpu)),
        PretendedDevice(*std::unique_ptr<kernels::Backend>::get()) {}
};

}  // namespace winnow::engine

#endif  // WINNOW_TESTS_UNIT_ENGINE_PRETENDED_DEVICE_H_
