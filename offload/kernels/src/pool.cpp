#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "floats.h"
#include "threads.h"

namespace offload {
namespace {

struct Job {
  const std::function<void(std::size_t)>& body;
  std::size_t num_blocks;
  std::atomic<std::size_t> next = 0;

  void run() {
    const DefaultFloats floats;
    for (std::size_t block; (block = next.fetch_add(1, std::memory_order_relaxed)) < num_blocks;) body(block);
  }
};

class Pool {
 public:
  bool try_acquire() { return !busy_.exchange(true, std::memory_order_acquire); }
  void release() { busy_.store(false, std::memory_order_release); }

  // For the one who acquired the pool.
  void run(Job& job, std::size_t num_helpers) {
    {
      const std::lock_guard lock(mutex_);
      while (num_threads_ < num_helpers && try_detach([this] { help(); })) ++num_threads_;
      job_ = &job;
      helpers_wanted_ = std::min(num_helpers, num_threads_);
    }
    wake_.notify_all();
    job.run();
    std::unique_lock lock(mutex_);
    helpers_wanted_ = 0;  // who has not woken by now finds nothing left
    done_.wait(lock, [&] { return helpers_at_work_ == 0; });
  }

 private:
  void help() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return helpers_wanted_ > 0; });
      --helpers_wanted_;
      ++helpers_at_work_;
      Job& job = *job_;
      lock.unlock();
      job.run();
      lock.lock();
      if (--helpers_at_work_ == 0) done_.notify_one();
    }
  }

  std::atomic<bool> busy_ = false;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  std::size_t num_threads_ = 0, helpers_wanted_ = 0, helpers_at_work_ = 0;
};

// Never destroyed: its threads sleep in it until the process ends. A forked child has none of them and gets a new pool.
Pool* pool = new Pool;
const int fork_handler = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

}  // namespace

void parallel_for(std::size_t num_blocks, std::size_t num_threads, const std::function<void(std::size_t)>& body) {
  Job job{body, num_blocks};
  const std::size_t num_helpers = (num_threads < num_blocks ? num_threads : num_blocks) - (num_blocks > 0);
  if (num_helpers == 0 || !pool->try_acquire()) return job.run();
  pool->run(job, num_helpers);
  pool->release();
}

}  // namespace offload
