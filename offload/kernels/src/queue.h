// Kernels in their own time: the caller goes on while the threads of a queue run them.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>

namespace offload {

// One kernel call that a queue was given.
class Work {
 public:
  bool done() const;
  void wait() const;

  // Once it is done: seconds that it took, without those in which the queue was still at the work before it, and seconds since
  // its end.
  double seconds() const;
  double seconds_since() const;

 private:
  friend class Queue;
  using Clock = std::chrono::steady_clock;
  using Body = std::function<void(std::size_t)>;

  Work(std::size_t num_blocks, std::size_t num_threads, Body body);

  const std::size_t num_blocks_, num_threads_;
  const Body body_;
  std::atomic<std::size_t> next_ = 0, left_;  // the block to take next, and the number that is not done
  Clock::time_point start_, stop_;

  mutable std::mutex mutex_;
  mutable std::condition_variable over_;
  bool done_ = false;
};

// Calls body(block) for every block of each work, on threads of its own, work after work. A thread that finds no block left
// of one work goes on with the next one at once, while others are still at the last blocks of the first: works must not depend
// on each other, and no core is idle between them.
class Queue {
 public:
  Queue();
  ~Queue();  // what was submitted is done all the same
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // On at most num_threads threads. Throws std::runtime_error in a process that was forked: it has none of them.
  std::shared_ptr<Work> submit(std::size_t num_blocks, std::size_t num_threads, std::function<void(std::size_t)> body);

 private:
  struct State;
  static void serve(const std::shared_ptr<State>& state, std::size_t thread);
  static void run(State& state, Work& work);

  const std::shared_ptr<State> state_;  // the threads' too: they may outlive the queue
};

}  // namespace offload
