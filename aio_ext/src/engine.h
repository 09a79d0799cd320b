// What carries blocks to the kernel and results back: the small interface behind which backends differ.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "scheduler.h"

namespace aio {

// An engine owns its threads. They run until the scheduler is stopped and everything that was handed out is back.
class Engine {
 public:
  virtual ~Engine() = default;
  // Optional help of the kernel for a range of memory or a file. Empty: done; else why not, in a sentence.
  virtual std::string register_memory(std::shared_ptr<Mapping> lease, std::byte* data, std::size_t nbytes) = 0;
  virtual std::string register_file(std::int32_t file, int fd) = 0;
  virtual void unregister_file(std::int32_t file) = 0;
  // Waits for the threads to end. Only after Scheduler::stop with nothing in flight.
  virtual void join() = 0;
  // Leaves the threads to themselves, for I/O that does not come back.
  virtual void detach() = 0;
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept { return notes_; }

 protected:
  std::vector<std::string> notes_;
};

// What is left of a fault once its delay is over: a result that replaces the operation, or the bytes it may ask for.
struct Attempted {
  bool instead = false;
  std::int32_t result = 0;
  std::uint32_t nbytes = 0;
};
[[nodiscard]] Attempted attempt(const Block& block);
// The result to report for `res` of the kernel.
[[nodiscard]] std::int32_t reported(const Block& block, std::int32_t res);

// Threads with pread and pwrite: as many blocks in flight as threads. Throws std::system_error.
std::shared_ptr<Engine> make_thread_engine(std::shared_ptr<Scheduler> scheduler, unsigned num_threads);
// One ring and one thread. Throws std::system_error whose text says why this process cannot have one, and the fix.
std::shared_ptr<Engine> make_uring_engine(std::shared_ptr<Scheduler> scheduler);
// Empty: a ring can be made here; else why not, and the fix.
std::string uring_obstacle();

}  // namespace aio
