// A file queue: the scheduler, the engine that serves it, and their life together.
#pragma once

#include <cerrno>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine.h"
#include "scheduler.h"

namespace aio {

enum class Backend { automatic, io_uring, threads };

struct Options {
  Backend backend = Backend::automatic;
  Limits limits;
  unsigned num_threads = 4;  // of the thread backend
};

class Queue {
 public:
  // Throws std::invalid_argument, or std::system_error when the backend asked for cannot be had.
  Queue(const Options& options, std::shared_ptr<FaultPlan> plan);
  // Closes with a deadline of 30 s; in a forked child does nothing.
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  [[nodiscard]] Backend backend() const noexcept { return backend_; }
  [[nodiscard]] std::vector<std::string> notes() const;

  // The queue duplicates the descriptor: the caller may close its own. The file stays open (and locked, if it is) until
  // it is unregistered or the queue is closed.
  std::int32_t register_file(int fd);
  void unregister_file(std::int32_t file);
  // Optional: only memory of a Mapping is registered, since the queue can keep that alive. What hinders becomes a note.
  void register_memory(std::byte* data, std::size_t nbytes);

  [[nodiscard]] std::optional<Ticket> submit(Operation operation, std::int32_t file, std::uint64_t offset, std::byte* data,
                                             std::uint64_t nbytes, Priority priority) {
    return scheduler_->submit(operation, file, offset, data, nbytes, priority);
  }
  void wait_for_room(std::chrono::nanoseconds timeout) { scheduler_->wait_for_room(timeout); }
  [[nodiscard]] Counters counters() { return scheduler_->counters(); }

  // Ends what has not been started with ECANCELED; no more requests. Does not wait for what is in flight.
  void cancel() { scheduler_->cancel(ECANCELED); }
  // Accepts no more requests; true when all of them are over in time.
  [[nodiscard]] bool drain(std::chrono::nanoseconds timeout) { return scheduler_->drain(timeout); }
  // Waits until every request is over, then ends the threads. False: the time was up; what had not been started ended with
  // ECANCELED, and what is in flight keeps its memory and the threads that wait for it. No more requests either way.
  bool close(std::chrono::nanoseconds timeout);
  [[nodiscard]] std::uint32_t blocks_in_flight() { return scheduler_->blocks_in_flight(); }
  [[nodiscard]] bool forked() const noexcept { return scheduler_->forked(); }

 private:
  void start_engine(const Options& options);
  void note(std::string text);
  void refuse_closed() const;

  std::shared_ptr<Scheduler> scheduler_;
  std::shared_ptr<Engine> engine_;
  Backend backend_ = Backend::threads;
  mutable std::mutex mutex_;  // of the notes
  std::vector<std::string> notes_;
  std::mutex registering_;    // of what follows: one registration, or the closing, at a time
  std::vector<std::int32_t> files_;
  bool closed_ = false;
};

struct Alignment {
  std::uint32_t memory = 4096;
  std::uint32_t offset = 4096;
};
// What O_DIRECT on this file needs, as statx tells (Linux 6.1); 4096 where the kernel does not say.
[[nodiscard]] Alignment direct_io_alignment(int fd);

}  // namespace aio
