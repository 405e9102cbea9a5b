#include "storage/index.h"

#include "absl/time/time.h"

namespace winnow::storage {

IndexWriter::IndexWriter(std::unique_ptr<IndexDb> db, std::unique_ptr<EraseLog> erase_log)
    : db_(std::move(db)), erase_log_(std::move(erase_log)) {
  thread_ = std::thread([this] { Work(); });
}

IndexWriter::~IndexWriter() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

bool IndexWriter::Close(std::chrono::nanoseconds max) {
  bool closed = false;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    closed = mutex_.AwaitWithTimeout(absl::Condition(&closed_), absl::FromChrono(max));
  }
  if (!thread_.joinable()) return closed;
  if (closed) {
    thread_.join();
  } else {
    thread_.detach();  // the object stays for ever, so nobody will join it
  }
  return closed;
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
    std::deque<IndexBatch> batches;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &IndexWriter::HasWork));
      if (queue_.empty()) break;
      batches.swap(queue_);
    }
    // One sync for all that were asked meanwhile. Ahead of its turn is no harm: nobody erases what
    // is still to be put.
    std::vector<Erasure> erasures;
    for (const IndexBatch& batch : batches) {
      erasures.insert(erasures.end(), batch.erasures.begin(), batch.erasures.end());
    }
    const absl::Status logged = erasures.empty() ? absl::OkStatus() : erase_log_->Append(erasures);
    for (const IndexBatch& batch : batches) {
      absl::Status status = db_->Write(batch);
      if (status.ok() && !batch.erasures.empty()) status = logged;
      absl::MutexLock lock(&mutex_);
      results_.push_back({batch.tag, std::move(status)});
    }
  }
  // Closing an index waits for the disk, too.
  db_.reset();
  erase_log_.reset();
  absl::MutexLock lock(&mutex_);
  closed_ = true;
}

}  // namespace winnow::storage
