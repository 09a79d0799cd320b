// From requests to blocks and back: what is pending, what is in flight, and what a result means.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "owned_fd.h"
#include "request.h"
#include "statistics.h"

namespace aio {

class Scheduler;

// The promise of one request. Results stay readable until the ticket is gone; dropping it earlier does not cancel anything.
class Ticket {
 public:
  Ticket(std::shared_ptr<Scheduler> scheduler, Request* request) noexcept
      : scheduler_(std::move(scheduler)), request_(request) {}
  ~Ticket();
  Ticket(Ticket&& other) noexcept : scheduler_(std::move(other.scheduler_)), request_(std::exchange(other.request_, nullptr)) {}
  Ticket& operator=(Ticket&&) = delete;

  [[nodiscard]] bool done() const noexcept { return request_->over.load(std::memory_order_acquire) != 0; }
  // Sleeps until the request is over, the time is up or a signal came. True: it is over.
  [[nodiscard]] bool wait_for(std::chrono::nanoseconds timeout) const noexcept;
  [[nodiscard]] std::uint64_t bytes_done() const noexcept { return request_->bytes_done.load(std::memory_order_relaxed); }
  // Of a request that is done: errno (0: none) and the offset of the block that failed first.
  [[nodiscard]] int error() const noexcept { return request_->error; }
  [[nodiscard]] std::uint64_t error_offset() const noexcept { return request_->error_offset; }
  // Posts `token` when the request is over. False: it is over already, and nothing will be posted.
  [[nodiscard]] bool forked() const noexcept;
  [[nodiscard]] bool watch(std::shared_ptr<Channel> channel, std::uint64_t token) const;

 private:
  std::shared_ptr<Scheduler> scheduler_;
  Request* request_;
};

struct Completion {
  Block* block = nullptr;
  std::int32_t result = 0;
};

struct Limits {
  std::uint32_t depth = 32;
  std::uint32_t block_bytes = 1 << 20;
  std::uint32_t requests_max = 16384;  // pending and in flight; beyond it submission waits
};

enum class Wait { no, until_work };

class Scheduler : public std::enable_shared_from_this<Scheduler> {
 public:
  Scheduler(const Limits& limits, std::shared_ptr<FaultPlan> plan);

  // True in a child of the process that made this: no thread serves it here, and its lock may be held for ever.
  [[nodiscard]] bool forked() const noexcept { return fork_generation_ != fork_generation(); }

  // --- callers: any thread of the process that made this ---

  // Nothing: there are `requests_max` requests already; wait for room. Throws std::invalid_argument (alignment, bounds,
  // unknown file) and std::system_error (closed, broken).
  [[nodiscard]] std::optional<Ticket> submit(Operation operation, std::int32_t file, std::uint64_t offset, std::byte* data,
                                             std::uint64_t nbytes, Priority priority);
  void wait_for_room(std::chrono::nanoseconds timeout);
  std::int32_t add_file(OwnedFd fd, std::uint32_t memory_alignment, std::uint32_t offset_alignment);
  // The descriptor goes back to the caller, to be closed once nobody uses it. Throws std::system_error (EBUSY).
  [[nodiscard]] OwnedFd remove_file(std::int32_t file);
  [[nodiscard]] Counters counters();
  [[nodiscard]] std::uint32_t blocks_in_flight();

  // No more requests are accepted; true when all of them are over in time.
  [[nodiscard]] bool drain(std::chrono::nanoseconds timeout);
  // Ends what was not handed out yet with `error`, and refuses requests from now on.
  void cancel(int error);
  // For an engine that has lost the kernel: everything ends with `error`, what was handed out included. The kernel may still
  // use the memory of that, so it is kept for ever. Results that came in before go to `exchange` first.
  void abandon(int error);
  // Lets `exchange` return 0 once nothing is pending or in flight.
  void stop();

  // --- engines ---

  // Told at each submission that could be started at once, under the lock. Set before the first request.
  void on_work(std::function<void()> wake) { wake_ = std::move(wake); }
  // Takes in results and hands out blocks, in one critical section: the engine's whole conversation with the rest.
  std::size_t exchange(std::span<const Completion> finished, std::span<Block*> started, Wait wait);
  [[nodiscard]] bool stopped();
  [[nodiscard]] const std::shared_ptr<FaultPlan>& plan() const noexcept { return plan_; }
  [[nodiscard]] std::uint32_t depth() const noexcept { return limits_.depth; }

 private:
  friend class Ticket;

  struct File {
    OwnedFd fd;
    std::uint32_t memory_alignment = 1;
    std::uint32_t offset_alignment = 1;
    std::uint32_t outstanding = 0;         // requests
    std::uint32_t outstanding_writes = 0;  // requests
  };
  struct List {
    Request* first = nullptr;
    Request* last = nullptr;
    void push(Request* r);
    Request* pop();
    void remove(Request* r);
  };

  File& file_at(std::int32_t file);
  void check(const File& file, std::uint64_t offset, const std::byte* data, std::uint64_t nbytes) const;
  void wake_engine();
  Request* new_request();
  void recycle(Request* request);
  List& lane_of(const Request& request);
  Block* take();
  Request* next_in_lanes();
  bool finish(Block& block, std::int32_t result);
  bool queue_again(Block& block);
  void finish_block(Block& block, Clock::time_point now);
  void complete(Request& request);
  void release_syncs(std::int32_t file, std::uint64_t sequence);
  void account(Clock::time_point now);
  [[nodiscard]] bool nothing_pending() const;

  const unsigned fork_generation_ = fork_generation();
  const Limits limits_;
  const std::shared_ptr<FaultPlan> plan_;
  std::function<void()> wake_;

  std::mutex mutex_;
  std::condition_variable work_;   // for engines that wait in `exchange`
  std::condition_variable room_;
  std::condition_variable idle_;
  std::deque<Request> nodes_;
  std::vector<Request*> free_requests_;
  std::deque<File> files_;
  List lanes_[2][2];               // [priority][0: reads, 1: writes and syncs]
  List waiting_syncs_;
  int turn_ = 0;                   // reads and writes take turns
  std::vector<Block> blocks_;
  std::vector<Block*> free_blocks_;
  std::vector<Block*> again_;      // remainders and retries, which keep their block
  std::uint64_t sequence_ = 0;
  std::uint32_t requests_ = 0;     // not over yet
  int refusal_ = 0;                // errno that new requests get; 0: they are accepted
  bool stopping_ = false;
  Counters counters_;
  Clock::time_point accounted_ = Clock::now();
};

inline bool Ticket::forked() const noexcept { return scheduler_->forked(); }

}  // namespace aio
