// make_store DIR BLOCKS ERASED [hold]: a store with BLOCKS blocks, one pinned and one expiring, of
// which the last ERASED are erased. With "hold" it says "ready" and keeps the store open until its
// standard input ends: the server of a test.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "storage/disk_store.h"

namespace {

using namespace winnow::storage;  // NOLINT(google-build-using-namespace)

constexpr size_t kPayloadBytes = 20000;

BlockId IdOf(uint64_t number) {
  BlockId id;
  std::memcpy(id.key.bytes.data(), &number, sizeof number);
  id.token_block = number;
  return id;
}

// Until everything is answered; false if anything missed.
bool Finish(DiskStore* store) {
  std::vector<Completion> done;
  while (store->in_flight() > 0) store->Poll(std::chrono::milliseconds(100), &done);
  bool good = true;
  for (const Completion& completion : done) good = good && completion.outcome == Outcome::kOk;
  return good;
}

int Run(const std::string& directory, uint64_t blocks, uint64_t erased, bool hold) {
  const SystemClock clock;
  DiskStoreOptions options;
  options.directory = directory;
  options.segment_bytes = 256 << 10;
  options.capacity_bytes = 64 << 20;
  auto store = DiskStore::Open(options, &clock);
  if (!store.ok()) {
    std::fprintf(stderr, "make_store: %s\n", std::string(store.status().message()).c_str());
    return 1;
  }
  for (uint64_t i = 0; i < blocks; ++i) {
    std::vector<std::byte> payload(kPayloadBytes, static_cast<std::byte>(i));
    (*store)->Put(i, IdOf(i), payload, {.pinned = i == 0, .ttl_s = i == 1 ? 1'000'000u : 0u});
    if (!Finish(store->get())) return 1;
  }
  for (uint64_t i = 0; i < erased; ++i) {
    (*store)->Erase(i, IdOf(blocks - 1 - i).key);
    if (!Finish(store->get())) return 1;
  }
  if (hold) {
    std::printf("ready\n");
    std::fflush(stdout);
    while (std::getchar() != EOF) {
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) return 2;
  return Run(argv[1], std::strtoull(argv[2], nullptr, 10), std::strtoull(argv[3], nullptr, 10),
             argc == 5);
}
