// Blocks carried by a pool of threads with pread and pwrite: for places where io_uring is missing or forbidden.

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "engine.h"
#include "signals.h"

namespace aio {
namespace {

std::int32_t perform(const Block& block, const FaultPlan* plan) {
  if (block.fault.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(block.fault.delay_us));
  while (block.fault.hold && !plan->released()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const Attempted a = attempt(block);
  if (a.instead) return a.result;
  const auto offset = static_cast<off_t>(block.offset);
  ssize_t moved = 0;
  switch (block.operation) {
    case Operation::read: moved = ::pread(block.fd, block.data, a.nbytes, offset); break;
    case Operation::write: moved = ::pwrite(block.fd, block.data, a.nbytes, offset); break;
    case Operation::sync: moved = ::fdatasync(block.fd); break;
  }
  return reported(block, moved < 0 ? -errno : static_cast<std::int32_t>(moved));
}

void work(const std::shared_ptr<Scheduler>& scheduler) {
  Completion done;
  Block* block = nullptr;
  std::size_t num_done = 0;
  while (scheduler->exchange({&done, num_done}, {&block, 1}, Wait::until_work) > 0) {
    done = {block, perform(*block, scheduler->plan().get())};
    num_done = 1;
  }
}

class ThreadEngine final : public Engine {
 public:
  ThreadEngine(std::shared_ptr<Scheduler> scheduler, unsigned num_threads) {
    const SignalsBlocked blocked;
    try {
      for (unsigned i = 0; i < num_threads; ++i) {
        threads_.emplace_back([scheduler] { work(scheduler); });
        pthread_setname_np(threads_.back().native_handle(), "aio-worker");
      }
    } catch (...) {  // EAGAIN: no more threads.
      scheduler->stop();
      join();
      throw;
    }
  }
  std::string register_memory(std::shared_ptr<Mapping>, std::byte*, std::size_t) override { return {}; }
  std::string register_file(std::int32_t, int) override { return {}; }
  void unregister_file(std::int32_t) override {}
  void join() override {
    for (std::thread& thread : threads_) thread.join();
  }
  void detach() override {
    for (std::thread& thread : threads_) thread.detach();
  }

 private:
  std::vector<std::thread> threads_;
};

}  // namespace

std::shared_ptr<Engine> make_thread_engine(std::shared_ptr<Scheduler> scheduler, unsigned num_threads) {
  return std::make_shared<ThreadEngine>(std::move(scheduler), num_threads);
}

}  // namespace aio
