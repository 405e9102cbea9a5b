#include "engine/kv/block_saver.h"

namespace winnow::engine {

void BlockSaver::EnqueueBlock(int32_t block) {
  for (int32_t layer = 0; layer < rooms_.blocks.num_layers(); ++layer) {
    // A layer block with a place needs saving only to outlive its sequence.
    if (!rooms_.blocks[block].keep && rooms_.pools.HasPlaces(layer)) continue;
    Enqueue(rooms_.blocks.IndexOf(layer, block));
  }
  DropForgotten();
}

void BlockSaver::Enqueue(int64_t index) {
  QueueOf(index).push_back({index, rooms_.blocks[rooms_.blocks.BlockOf(index)].generation});
}

BlockSaver::Queue& BlockSaver::QueueOf(int64_t index) {
  if (rooms_.pools.HasPlaces(rooms_.blocks.LayerOf(index))) return by_copy_;
  const bool keep = rooms_.blocks[rooms_.blocks.BlockOf(index)].keep;
  return write_through_ && keep ? wanted_ : when_scarce_;
}

// Where frames never get scarce nobody takes from the queues, and blocks come and go.
void BlockSaver::DropForgotten() {
  const auto most = static_cast<size_t>(2 * rooms_.blocks.num_layer_blocks());
  for (Queue* queue : {&wanted_, &when_scarce_, &by_copy_}) {
    if (queue->size() <= most) continue;
    std::erase_if(*queue, [this](const Waiting& waiting) { return !IsCurrent(waiting); });
  }
}

bool BlockSaver::MaySave(int64_t index) const {
  const LayerBlock& layer_block = rooms_.blocks.at(index);
  return owner_.IsResident(rooms_.blocks.LayerOf(index), rooms_.blocks.BlockOf(index)) &&
         !layer_block.saved && !layer_block.saving && !layer_block.lost;
}

// The store copies `content` before it returns.
void BlockSaver::Start(int64_t index, const std::byte* content) {
  const int32_t block = rooms_.blocks.BlockOf(index);
  const BlockRecord& record = rooms_.blocks[block];
  rooms_.blocks.BeginSave(index);
  const uint64_t number = saves_.Issue({{index, record.generation}, record.name, record.keep});
  rooms_.store.Save({this, number}, record.name, rooms_.blocks.LayerOf(index),
                    {content, rooms_.pools.block_bytes()},
                    {.in_use = rooms_.blocks.InUse(record.name.chain), .keep = record.keep});
}

// False: the queue is empty.
bool BlockSaver::StartNext(Queue* queue) {
  if (queue->empty()) return false;
  const Waiting next = queue->front();
  queue->pop_front();
  if (IsCurrent(next) && MaySave(next.index)) {
    Start(next.index, rooms_.pools.Frame(rooms_.blocks.at(next.index).frame));
  }
  return true;
}

void BlockSaver::SaveWanted() {
  while (saves_.size() < kSavesInFlight && rooms_.store.AcceptsSaves() && StartNext(&wanted_)) {
  }
}

void BlockSaver::SaveAhead(int64_t clean, int64_t reserve) {
  while (saves_.size() < kSavesInFlight && rooms_.store.AcceptsSaves() &&
         clean + static_cast<int64_t>(saves_.size()) < reserve && StartNext(&when_scarce_)) {
  }
}

bool BlockSaver::SaveSome() {
  while (saves_.size() < kSavesAtOnce && rooms_.store.AcceptsSaves() &&
         (StartNext(&wanted_) || StartNext(&when_scarce_))) {
  }
  if (saves_.empty()) return false;
  const uint64_t saved = rooms_.stats.saved_pieces;
  const size_t in_flight = saves_.size();
  rooms_.store.Wait([&] { return rooms_.stats.saved_pieces > saved || saves_.size() < in_flight; });
  return true;
}

// ---- layers with places ----

// As much as may be in flight. Everything in line was written by passes before the one that runs.
void BlockSaver::SaveByCopy() {
  if (by_copy_.empty() && copied_.empty()) return;
  SaveCopied();
  CopyNext();
  if (rooms_.backend.failure().empty()) return;
  // The device's content cannot be trusted.
  copied_.clear();
  by_copy_.clear();
}

void BlockSaver::SaveCopied() {
  for (const auto& [what, content] : copied_) {
    if (!IsCurrent(what)) continue;
    if (MaySave(what.index) && rooms_.store.AcceptsSaves()) {
      Start(what.index, content);
    } else {
      by_copy_.push_back(what);
    }
  }
  copied_.clear();
}

void BlockSaver::CopyNext() {
  const size_t bytes = rooms_.pools.block_bytes();
  const std::span<std::byte> outgoing = rooms_.pools.outgoing();
  copies_.clear();
  while (!by_copy_.empty() && saves_.size() + copies_.size() < kSavesInFlight &&
         copies_.size() < outgoing.size() / bytes && rooms_.store.AcceptsSaves()) {
    const Waiting next = by_copy_.front();
    by_copy_.pop_front();
    if (!IsCurrent(next) || !MaySave(next.index)) continue;
    const int32_t layer = rooms_.blocks.LayerOf(next.index);
    std::byte* const place = rooms_.pools.Place(layer, rooms_.blocks.BlockOf(next.index));
    if (rooms_.pools.IsShared(layer)) {
      Start(next.index, place);
      continue;
    }
    std::byte* const copy = outgoing.data() + copies_.size() * bytes;
    copies_.push_back({copy, place, bytes});
    copied_.push_back({next, copy});
  }
  if (!copies_.empty()) rooms_.backend.CopyAllToHost(copies_);
}

void BlockSaver::OnAnswer(uint64_t number, const StoreAnswer& answer) {
  const Save save = saves_.Redeem(number);
  ++(answer.ok ? rooms_.stats.saved_pieces : rooms_.stats.save_failures);
  const int64_t index = save.what.index;
  rooms_.blocks.EndSave(index, save.name.tenant, save.keep, IsCurrent(save.what), answer.ok);
  if (!IsCurrent(save.what)) {  // its block is gone
    if (answer.ok && !save.keep && !rooms_.blocks.Knows(save.name.chain)) {
      rooms_.store.EraseLayer(save.name, rooms_.blocks.LayerOf(index));
    }
    return;
  }
  if (!answer.ok) {
    Enqueue(index);
    return;
  }
  owner_.OnSaved(index);
  if (rooms_.blocks.MarkSaved(index)) rooms_.store.TellCopied(save.name.chain);
}

}  // namespace winnow::engine
