#include "queue.h"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <utility>

#include "floats.h"
#include "threads.h"

namespace offload {

Work::Work(std::size_t num_blocks, std::size_t num_threads, Body body)
    : num_blocks_(num_blocks), num_threads_(num_threads), body_(std::move(body)), left_(num_blocks) {}

bool Work::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

void Work::wait() const {
  std::unique_lock lock(mutex_);
  over_.wait(lock, [&] { return done_; });
}

double Work::seconds() const { return std::chrono::duration<double>(stop_ - start_).count(); }

double Work::seconds_since() const { return std::chrono::duration<double>(Clock::now() - stop_).count(); }

struct Queue::State {
  const pid_t pid = getpid();
  std::mutex mutex;
  std::condition_variable submitted;
  std::deque<std::shared_ptr<Work>> works;  // in order; those that have no block left go when somebody looks
  std::size_t num_threads = 0;
  bool closing = false;
  Work::Clock::time_point last_stop;

  // The work that a thread is to help with; none if there is none for it.
  std::shared_ptr<Work> next_for(std::size_t thread) {
    std::erase_if(works, [](const auto& work) { return work->next_ >= work->num_blocks_; });
    const auto found =
        std::find_if(works.begin(), works.end(), [&](const auto& work) { return thread < work->num_threads_; });
    return found == works.end() ? nullptr : *found;
  }
};

Queue::Queue() : state_(std::make_shared<State>()) {}

Queue::~Queue() {
  if (getpid() != state_->pid) return;  // a forked process has no threads, and the mutex as it was
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
  }
  state_->submitted.notify_all();
}

std::shared_ptr<Work> Queue::submit(std::size_t num_blocks, std::size_t num_threads,
                                    std::function<void(std::size_t)> body) {
  if (getpid() != state_->pid) throw std::runtime_error("this process was forked from the one whose threads run kernels");
  const std::shared_ptr<Work> work(new Work(num_blocks, std::max<std::size_t>(num_threads, 1), std::move(body)));
  if (num_blocks == 0) {
    work->start_ = work->stop_ = Work::Clock::now();
    work->done_ = true;
    return work;
  }
  {
    std::unique_lock lock(state_->mutex);
    const auto begin = [&] { return try_detach([state = state_, thread = state_->num_threads] { serve(state, thread); }); };
    while (state_->num_threads < work->num_threads_ && begin()) ++state_->num_threads;
    if (state_->num_threads == 0) {  // the caller does it
      lock.unlock();
      const DefaultFloats floats;
      run(*state_, *work);
      return work;
    }
    state_->works.push_back(work);
  }
  state_->submitted.notify_all();
  return work;
}

void Queue::serve(const std::shared_ptr<State>& state, std::size_t thread) {
  const DefaultFloats floats;
  std::unique_lock lock(state->mutex);
  for (;;) {
    std::shared_ptr<Work> work;
    state->submitted.wait(lock, [&] { return (work = state->next_for(thread)) || state->closing; });
    if (!work) return;
    lock.unlock();
    run(*state, *work);
    lock.lock();
  }
}

void Queue::run(State& state, Work& work) {
  std::size_t num_done = 0;
  for (std::size_t block; (block = work.next_.fetch_add(1, std::memory_order_relaxed)) < work.num_blocks_; ++num_done) {
    if (block == 0) work.start_ = Work::Clock::now();
    work.body_(block);
  }
  if (num_done == 0 || work.left_.fetch_sub(num_done, std::memory_order_acq_rel) != num_done) return;
  {
    const std::lock_guard lock(state.mutex);
    work.stop_ = Work::Clock::now();
    work.start_ = std::max(work.start_, state.last_stop);
    state.last_stop = work.stop_;
  }
  {
    const std::lock_guard lock(work.mutex_);
    work.done_ = true;
  }
  work.over_.notify_all();
}

}  // namespace offload
