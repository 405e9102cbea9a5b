// The engine's and the server's locks, which are storage's: storage/mutex.h says why they are not
// Abseil's.
#ifndef WINNOW_ENGINE_BASE_MUTEX_H_
#define WINNOW_ENGINE_BASE_MUTEX_H_

#include "storage/mutex.h"

namespace winnow::engine {

using storage::CondVar;
using storage::Mutex;
using storage::MutexLock;

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_BASE_MUTEX_H_
