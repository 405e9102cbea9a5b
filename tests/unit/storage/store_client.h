// Drives a BlockStore in tests: one call, one answer.
#ifndef WINNOW_TESTS_UNIT_STORAGE_STORE_CLIENT_H_
#define WINNOW_TESTS_UNIT_STORAGE_STORE_CLIENT_H_

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <ostream>
#include <vector>

#include "storage/block_store.h"
#include "storage/format.h"
#include "tests/unit/storage/storage_testing.h"

namespace winnow::storage {

inline void PrintTo(Reason reason, std::ostream* out) { *out << ReasonName(reason); }
inline void PrintTo(TierState state, std::ostream* out) { *out << TierStateName(state); }

class StoreClient {
 public:
  explicit StoreClient(BlockStore* store) : store_(store) {}

  // Polls until every operation is answered; at most 60 s. Answers by tag.
  std::map<uint64_t, Completion> Finish() {
    std::map<uint64_t, Completion> by_tag;
    std::vector<Completion> completions;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    do {
      completions.clear();
      store_->Poll(std::chrono::milliseconds(20), &completions);
      for (const Completion& completion : completions) {
        EXPECT_EQ(by_tag.count(completion.tag), 0u) << "answered twice";
        by_tag[completion.tag] = completion;
      }
    } while (store_->in_flight() > 0 && std::chrono::steady_clock::now() < limit);
    EXPECT_EQ(store_->in_flight(), 0u) << "hangs";
    return by_tag;
  }

  Reason Put(const BlockId& id, std::span<const std::byte> payload, PutOptions options = {}) {
    const uint64_t tag = next_tag_++;
    store_->Put(tag, id, payload, options);
    return Finish().at(tag).reason;
  }
  // Puts the block whose bytes follow from its identity.
  Reason Put(const BlockId& id, size_t bytes, PutOptions options = {}) {
    return Put(id, BytesOf(id, bytes), options);
  }
  Reason Get(const BlockId& id, std::vector<std::byte>* into, int64_t deadline_ns = 0) {
    const uint64_t tag = next_tag_++;
    store_->Get(tag, id, *into, deadline_ns);
    return Finish().at(tag).reason;
  }
  // Also checks that a hit is right and that a miss leaves the buffer alone.
  Reason GetAndCheck(const BlockId& id, size_t bytes) {
    std::vector<std::byte> into(bytes, std::byte{0xee});
    const Reason reason = Get(id, &into);
    if (reason == Reason::kNone) {
      EXPECT_TRUE(into == BytesOf(id, bytes)) << "wrong bytes";
    } else {
      EXPECT_TRUE(into == std::vector<std::byte>(bytes, std::byte{0xee})) << "miss wrote";
    }
    return reason;
  }
  Reason GetPagesAndCheck(const BlockId& id, size_t bytes, const std::vector<uint32_t>& pages) {
    std::vector<std::byte> into(pages.size() * kPageBytes, std::byte{0xee});
    const uint64_t tag = next_tag_++;
    store_->GetPages(tag, id, pages, into, 0);
    const Reason reason = Finish().at(tag).reason;
    if (reason != Reason::kNone) {
      EXPECT_TRUE(into == std::vector<std::byte>(into.size(), std::byte{0xee})) << "miss wrote";
      return reason;
    }
    std::vector<std::byte> all = BytesOf(id, bytes);
    all.resize(PageAlign(bytes));
    for (size_t i = 0; i < pages.size(); ++i) {
      EXPECT_EQ(
          std::memcmp(into.data() + i * kPageBytes, all.data() + pages[i] * kPageBytes, kPageBytes),
          0)
          << "wrong page " << pages[i];
    }
    return reason;
  }
  Reason Erase(const BlockKey& key) {
    const uint64_t tag = next_tag_++;
    store_->Erase(tag, key);
    return Finish().at(tag).reason;
  }

 private:
  BlockStore* store_;
  uint64_t next_tag_ = 1;
};

}  // namespace winnow::storage

#endif  // WINNOW_TESTS_UNIT_STORAGE_STORE_CLIENT_H_
