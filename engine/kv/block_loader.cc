#include "engine/kv/block_loader.h"

#include <algorithm>

namespace winnow::engine {

void BlockLoader::Start(int64_t index, int32_t chunk, std::byte* into) {
  const size_t bytes = rooms_.pools.block_bytes();
  const uint64_t number = reads_.Issue({index, chunk, bytes});
  rooms_.store.Load({this, number}, rooms_.blocks[rooms_.blocks.BlockOf(index)].name,
                    rooms_.blocks.LayerOf(index), {into, bytes});
}

void BlockLoader::Load(int64_t index, int32_t chunk, std::byte* into) {
  Start(index, chunk, into);
  if (reads_.size() * rooms_.pools.block_bytes() < KvPools::kLoadBytesInFlight) return;
  const size_t half = reads_.size() / 2;
  rooms_.store.Wait([&] { return reads_.size() <= half; });
}

void BlockLoader::LoadPages(int64_t index, int32_t chunk, std::span<const uint32_t> pages,
                            uint64_t payload_bytes, std::span<std::byte> into) {
  const uint64_t number = reads_.Issue({index, chunk, payload_bytes});
  rooms_.store.LoadPages({this, number}, rooms_.blocks[rooms_.blocks.BlockOf(index)].name,
                         rooms_.blocks.LayerOf(index), pages, into);
}

void BlockLoader::LoadToPlaces(int32_t layer, std::span<const int64_t> indices, int32_t chunk) {
  const size_t wave = std::max<size_t>(1, KvPools::kLoadBytesInFlight / rooms_.pools.block_bytes());
  for (size_t begin = 0; begin < indices.size(); begin += wave) {
    LoadWave(layer, indices.subspan(begin, std::min(wave, indices.size() - begin)), chunk);
  }
  if (rooms_.pools.IsShared(layer)) rooms_.pools.shared_kv()->ForgetStaged();
}

void BlockLoader::LoadWave(int32_t layer, std::span<const int64_t> indices, int32_t chunk) {
  const size_t bytes = rooms_.pools.block_bytes();
  const bool direct = rooms_.pools.IsShared(layer);
  const auto place = [&](size_t i) {
    return rooms_.pools.Place(layer, rooms_.blocks.BlockOf(indices[i]));
  };
  std::byte* const incoming = rooms_.pools.incoming().data();
  for (size_t i = 0; i < indices.size(); ++i) {
    Start(indices[i], chunk, direct ? place(i) : incoming + i * bytes);
  }
  Finish();
  copies_.clear();
  for (size_t i = 0; i < indices.size(); ++i) {
    if (rooms_.blocks.at(indices[i]).lost) continue;
    owner_.OnLoaded(indices[i]);
    if (!direct) copies_.push_back({incoming + i * bytes, place(i), bytes});
  }
  if (!copies_.empty()) rooms_.backend.CopyAllToDevice(copies_);
}

void BlockLoader::OnAnswer(uint64_t number, const StoreAnswer& answer) {
  const Read read = reads_.Redeem(number);
  if (!answer.ok) {
    owner_.MarkLost(read.index);
    return;
  }
  rooms_.tally.CountRead(read.chunk, read.bytes, answer.from_disk);
  rooms_.stats.loaded_pieces += read.bytes == rooms_.pools.block_bytes();
  rooms_.stats.loaded_bytes += read.bytes;
}

}  // namespace winnow::engine
