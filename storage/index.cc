#include "storage/index.h"

#include "absl/time/time.h"

namespace winnow::storage {

IndexWriter::IndexWriter(std::unique_ptr<IndexDb> db) : db_(std::move(db)) {
  thread_ = std::thread([this] { Work(); });
}

IndexWriter::~IndexWriter() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void IndexWriter::Submit(IndexBatch batch) {
  ++in_flight_;
  absl::MutexLock lock(&mutex_);
  queue_.push_back(std::move(batch));
}

void IndexWriter::Poll(std::vector<IndexResult>* results) {
  if (in_flight_ == 0) return;
  absl::MutexLock lock(&mutex_);
  in_flight_ -= results_.size();
  for (IndexResult& result : results_) results->push_back(std::move(result));
  results_.clear();
}

void IndexWriter::Wait(std::chrono::nanoseconds max) {
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(this, &IndexWriter::HasResult), absl::FromChrono(max));
}

void IndexWriter::Work() {
  while (true) {
    IndexBatch batch;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &IndexWriter::HasWork));
      if (queue_.empty()) return;
      batch = std::move(queue_.front());
      queue_.pop_front();
    }
    absl::Status status = db_->Write(batch);
    absl::MutexLock lock(&mutex_);
    results_.push_back({batch.tag, std::move(status)});
  }
}

}  // namespace winnow::storage
