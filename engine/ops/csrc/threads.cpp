#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace twinpool {
namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Operators follow each other within microseconds, while waking a sleeping thread takes tens of them: so wait awake
// first.
constexpr int kSpins = 2000;

class ThreadPool {
 public:
  void resize(int num_threads) {
    std::lock_guard<std::mutex> one_caller(caller_);
    stop();
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { serve(); });
    size_.store(num_threads, std::memory_order_relaxed);
  }

  int size() const { return size_.load(std::memory_order_relaxed); }

  void run(int64_t count, Task task, const void* context) {
    std::unique_lock<std::mutex> one_caller(caller_, std::try_to_lock);
    if (count <= 1 || !one_caller.owns_lock() || workers_.empty()) {
      for (int64_t i = 0; i < count; ++i) task(context, i);
      return;
    }
    {
      std::lock_guard<std::mutex> lock(state_);
      task_ = task, context_ = context, count_ = count;
      next_.store(0, std::memory_order_relaxed);
      open_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    drain();
    // Workers that have not joined by now never will; those that have are waited for.
    std::unique_lock<std::mutex> lock(state_);
    open_ = false;
    lock.unlock();
    for (int i = 0; i < kSpins && busy_.load(std::memory_order_acquire) != 0; ++i) pause();
    lock.lock();
    done_.wait(lock, [this] { return busy_.load(std::memory_order_acquire) == 0; });
  }

 private:
  void drain() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) task_(context_, i);
  }

  void serve() {
    uint64_t seen = generation_.load(std::memory_order_acquire);
    for (;;) {
      for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i) pause();
      std::unique_lock<std::mutex> lock(state_);
      wake_.wait(lock, [&] { return stopping_ || generation_.load(std::memory_order_relaxed) != seen; });
      if (stopping_) return;
      seen = generation_.load(std::memory_order_relaxed);
      if (!open_) continue;
      busy_.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      drain();
      lock.lock();
      if (busy_.fetch_sub(1, std::memory_order_release) == 1) done_.notify_one();
    }
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(state_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stopping_ = false;
  }

  std::mutex caller_;  // held by the one call that uses the workers
  std::vector<std::thread> workers_;
  std::atomic<int> size_{1};  // the caller's thread included

  std::mutex state_;  // guards what follows, the atomics' changes included
  std::condition_variable wake_, done_;
  bool open_ = false, stopping_ = false;
  Task task_ = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> busy_{0};
  std::atomic<int64_t> next_{0};
};

// Never destroyed: its threads end with the process, not in the middle of static destruction.
ThreadPool& pool() {
  static ThreadPool* instance = new ThreadPool;
  return *instance;
}

// Memory that only grows.
class Growing {
 public:
  char* at_least(size_t bytes) {
    if (size_ < bytes) {
      size_ = 0;
      memory_.reset(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
      if (!memory_) throw std::bad_alloc();
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  size_t size_ = 0;
};

}  // namespace

void set_num_threads(int count) { pool().resize(count); }

int num_threads() { return pool().size(); }

void run_tasks(int64_t count, Task task, const void* context) { pool().run(count, task, context); }

char* scratch(size_t bytes) {
  thread_local Growing memory;
  return memory.at_least(bytes);
}

char* caller_scratch(size_t bytes) {
  thread_local Growing memory;
  return memory.at_least(bytes);
}

}  // namespace twinpool
