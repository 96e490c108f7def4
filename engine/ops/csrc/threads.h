// A small pool of threads that outlives calls, and each thread's scratch memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace twinpool {

// How many threads, the caller's included, one call may use.
void set_num_threads(int count);
int num_threads();

using Task = void (*)(const void* context, int64_t index);

// Runs task(context, i) for each i < count, in any order, on this thread and on whichever workers are free.
// Two callers at once are fine: the second does its own work alone.
void run_tasks(int64_t count, Task task, const void* context);

template <class Body>
void parallel_for(int64_t count, const Body& body) {
  run_tasks(count, [](const void* context, int64_t i) { (*static_cast<const Body*>(context))(i); }, &body);
}

// At least `bytes` of this thread's scratch memory, aligned for any vector; valid until the thread's next call.
char* scratch(size_t bytes);

// The same for what a call hands to its tasks: this thread's tasks use their own `scratch` beside it.
char* caller_scratch(size_t bytes);

// Cuts one piece of scratch memory into arrays. Measure first (with base null), then cut.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}

  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
  size_t bytes() const { return bytes_; }

 private:
  char* base_;
  size_t bytes_ = 0;
};

}  // namespace twinpool
