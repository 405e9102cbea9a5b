#include "storage/index.h"

#include "storage/left_threads.h"

namespace winnow::storage {

IndexWriter::IndexWriter(std::unique_ptr<IndexDb> db, std::unique_ptr<EraseLog> erase_log)
    : db_(std::move(db)), erase_log_(std::move(erase_log)) {
  thread_ = std::thread([this] { Work(); });
}

IndexWriter::~IndexWriter() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  work_.NotifyOne();
  if (thread_.joinable()) thread_.join();
}

bool IndexWriter::Close(std::chrono::nanoseconds max) {
  const auto until = std::chrono::steady_clock::now() + max;
  bool closed = false;
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    work_.NotifyOne();
    while (!closed_ && done_.WaitUntil(mutex_, until)) {
    }
    closed = closed_;
  }
  if (!thread_.joinable()) return closed;
  if (closed) {
    thread_.join();
  } else {
    LeaveThread(std::move(thread_));  // the object stays for ever
  }
  return closed;
}

void IndexWriter::Submit(IndexBatch batch) {
  ++in_flight_;
  {
    const MutexLock lock(mutex_);
    queue_.push_back(std::move(batch));
  }
  work_.NotifyOne();
}

void IndexWriter::Poll(std::vector<IndexResult>* results) {
  if (in_flight_ == 0) return;
  const MutexLock lock(mutex_);
  in_flight_ -= results_.size();
  for (IndexResult& result : results_) results->push_back(std::move(result));
  results_.clear();
}

void IndexWriter::Wait(std::chrono::nanoseconds max) {
  const auto until = std::chrono::steady_clock::now() + max;
  const MutexLock lock(mutex_);
  while (results_.empty() && done_.WaitUntil(mutex_, until)) {
  }
}

void IndexWriter::Work() {
  while (true) {
    std::deque<IndexBatch> batches;
    {
      const MutexLock lock(mutex_);
      while (!stopping_ && queue_.empty()) work_.Wait(mutex_);
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
      const MutexLock lock(mutex_);
      results_.push_back({batch.tag, std::move(status)});
      done_.NotifyOne();
    }
  }
  // Closing an index waits for the disk, too.
  db_.reset();
  erase_log_.reset();
  const MutexLock lock(mutex_);
  closed_ = true;
  done_.NotifyOne();
}

}  // namespace winnow::storage
