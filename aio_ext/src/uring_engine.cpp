// Blocks carried by one io_uring, which one thread owns: it alone submits, reaps and registers.

#include <liburing.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <future>
#include <system_error>
#include <thread>

#include "engine.h"
#include "signals.h"
#include "uring_support.h"

namespace aio {
namespace {

constexpr std::size_t kRegionBytesMax = std::size_t{1} << 30;  // of one registered buffer, by the kernel's rule
constexpr unsigned kFixedFiles = 64;
constexpr unsigned kBusyTimesMax = 10'000;  // a millisecond each

// What a completion is about: the low bit of user_data; the rest is the address of a block. The wake-up has no block.
constexpr std::uint64_t kDelayOver = 1;
constexpr std::uint64_t kWakeUp = 0;

struct Region {
  std::shared_ptr<Mapping> lease;
  std::byte* data;
  std::size_t nbytes;
};

class UringEngine final : public Engine {
 public:
  explicit UringEngine(std::shared_ptr<Scheduler> scheduler);
  std::string register_memory(std::shared_ptr<Mapping> lease, std::byte* data, std::size_t nbytes) override;
  std::string register_file(std::int32_t file, int fd) override;
  void unregister_file(std::int32_t file) override;
  void join() override { thread_.join(); }
  void detach() override { thread_.detach(); }

 private:
  void run(std::promise<void>& ready);
  void serve();
  void start(Block& block);
  void transfer(Block& block);
  void delay(Block& block);
  void prepare_transfer(io_uring_sqe* sqe, const Block& block, std::uint32_t nbytes) const;
  int submit_and_wait();
  void lose(int error);
  void reap();
  void close();
  void wake();
  void arm_wake();
  std::string call(std::function<std::string()> function);
  void run_calls();
  std::string rebuild_regions();

  const std::shared_ptr<Scheduler> scheduler_;
  std::thread thread_;

  // Owned by the thread of the ring.
  Ring ring_;
  std::vector<Completion> finished_;
  std::vector<__kernel_timespec> delays_;
  std::vector<Region> regions_;
  std::array<bool, kFixedFiles> fixed_file_{};
  bool fixed_files_ = false;
  std::unique_ptr<std::uint64_t> wake_count_ = std::make_unique<std::uint64_t>();  // the kernel writes here
  bool wake_armed_ = false;
  unsigned busy_times_ = 0;  // in a row

  // Shared with the threads that wake it.
  OwnedFd wake_fd_;
  std::atomic<bool> woken_{false};
  std::mutex calls_mutex_;
  std::vector<std::packaged_task<std::string()>> calls_;
  bool ended_ = false;
};

UringEngine::UringEngine(std::shared_ptr<Scheduler> scheduler)
    : scheduler_(std::move(scheduler)), delays_(scheduler_->depth()), wake_fd_(::eventfd(0, EFD_CLOEXEC)) {
  if (wake_fd_.get() < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  finished_.reserve(2 * scheduler_->depth());
  scheduler_->on_work([this] { wake(); });
  std::promise<void> ready;
  auto outcome = ready.get_future();
  {
    const SignalsBlocked blocked;
    thread_ = std::thread([this, &ready] { run(ready); });
    pthread_setname_np(thread_.native_handle(), "aio-ring");
  }
  try {
    outcome.get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

// --- any thread ---

void UringEngine::wake() {
  if (woken_.exchange(true)) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_fd_.get(), &one, sizeof one);
}

// A ring of a single issuer takes registrations from its own thread only.
std::string UringEngine::call(std::function<std::string()> function) {
  std::packaged_task<std::string()> task(std::move(function));
  auto outcome = task.get_future();
  {
    const std::lock_guard lock(calls_mutex_);
    if (ended_) return "the ring has ended";
    calls_.push_back(std::move(task));
  }
  wake();
  return outcome.get();
}

std::string UringEngine::register_memory(std::shared_ptr<Mapping> lease, std::byte* data, std::size_t nbytes) {
  return call([&] {
    const std::size_t before = regions_.size();
    for (std::size_t at = 0; at < nbytes; at += kRegionBytesMax) {
      regions_.push_back({lease, data + at, std::min(kRegionBytesMax, nbytes - at)});
    }
    std::string obstacle = rebuild_regions();
    if (!obstacle.empty()) {
      regions_.resize(before);
      if (before > 0 && !rebuild_regions().empty()) regions_.clear();
    }
    return obstacle;
  });
}

std::string UringEngine::register_file(std::int32_t file, int fd) {
  return call([&]() -> std::string {
    const auto slot = static_cast<std::size_t>(file);
    if (!fixed_files_ || slot >= kFixedFiles) return {};
    const int rc = io_uring_register_files_update(&ring_.raw, static_cast<unsigned>(file), &fd, 1);
    fixed_file_[slot] = rc == 1;
    return rc == 1 ? "" : "a file is not registered with the ring (" + error_text(-rc) + "): it is used by its descriptor";
  });
}

void UringEngine::unregister_file(std::int32_t file) {
  call([&]() -> std::string {
    const auto slot = static_cast<std::size_t>(file);
    if (slot >= kFixedFiles || !fixed_file_[slot]) return {};
    int none = -1;
    io_uring_register_files_update(&ring_.raw, static_cast<unsigned>(file), &none, 1);
    fixed_file_[slot] = false;
    return {};
  });
}

// --- the thread of the ring ---

void UringEngine::run(std::promise<void>& ready) {
  try {
    ring_.open(2 * scheduler_->depth() + 2, notes_);
    std::vector<int> none(kFixedFiles, -1);
    const int rc = io_uring_register_files(&ring_.raw, none.data(), kFixedFiles);
    fixed_files_ = rc == 0;
    if (rc != 0) notes_.push_back("files are not registered with the ring (" + error_text(-rc) + "): used by descriptor");
  } catch (...) {
    ready.set_exception(std::current_exception());
    return;
  }
  ready.set_value();
  serve();
  {
    const std::lock_guard lock(calls_mutex_);
    ended_ = true;
  }
  run_calls();
  close();
}

void UringEngine::serve() {
  std::vector<Block*> started(scheduler_->depth());
  for (;;) {
    run_calls();
    const std::size_t num_started = scheduler_->exchange(finished_, started, Wait::no);
    finished_.clear();
    for (std::size_t i = 0; i < num_started; ++i) start(*started[i]);
    if (!finished_.empty()) continue;  // Injected results: hand them in before sleeping.
    if (num_started == 0 && scheduler_->stopped()) return;
    arm_wake();
    if (const int error = submit_and_wait(); error != 0) return lose(error);
    reap();
  }
}

// The ring can no longer be entered. What is in flight may finish or not, and nobody will tell.
void UringEngine::lose(int error) {
  scheduler_->exchange(finished_, {}, Wait::no);
  finished_.clear();
  scheduler_->abandon(error);
  wake_count_.release();  // The kernel may still write there.
  wake_armed_ = false;
}

void UringEngine::start(Block& block) {
  if (block.fault.delay_us > 0 || block.fault.hold) return delay(block);
  transfer(block);
}

void UringEngine::delay(Block& block) {
  const std::uint32_t us = std::max(block.fault.delay_us, 1000U * block.fault.hold);
  delays_[block.index] = {us / 1'000'000, static_cast<long long>(us % 1'000'000) * 1000};
  io_uring_sqe* const sqe = io_uring_get_sqe(&ring_.raw);
  io_uring_prep_timeout(sqe, &delays_[block.index], 0, 0);
  sqe->user_data = reinterpret_cast<std::uint64_t>(&block) | kDelayOver;
}

void UringEngine::transfer(Block& block) {
  const Attempted a = attempt(block);
  if (a.instead) {
    finished_.push_back({&block, a.result});
    return;
  }
  io_uring_sqe* const sqe = io_uring_get_sqe(&ring_.raw);  // Never null: the ring has room for every block twice.
  prepare_transfer(sqe, block, a.nbytes);
  sqe->user_data = reinterpret_cast<std::uint64_t>(&block);
}

void UringEngine::prepare_transfer(io_uring_sqe* sqe, const Block& block, std::uint32_t nbytes) const {
  const bool fixed_file = static_cast<std::size_t>(block.file) < kFixedFiles && fixed_file_[static_cast<std::size_t>(block.file)];
  const int fd = fixed_file ? block.file : block.fd;
  const auto region = std::find_if(regions_.begin(), regions_.end(), [&](const Region& r) {
    return block.data >= r.data && block.data + nbytes <= r.data + r.nbytes;
  });
  const int index = static_cast<int>(region - regions_.begin());
  const bool fixed_buffer = region != regions_.end();
  switch (block.operation) {
    case Operation::read:
      fixed_buffer ? io_uring_prep_read_fixed(sqe, fd, block.data, nbytes, block.offset, index)
                   : io_uring_prep_read(sqe, fd, block.data, nbytes, block.offset);
      break;
    case Operation::write:
      fixed_buffer ? io_uring_prep_write_fixed(sqe, fd, block.data, nbytes, block.offset, index)
                   : io_uring_prep_write(sqe, fd, block.data, nbytes, block.offset);
      break;
    case Operation::sync: io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC); break;
  }
  if (fixed_file) sqe->flags |= IOSQE_FIXED_FILE;
}

void UringEngine::arm_wake() {
  if (wake_armed_) return;
  io_uring_sqe* const sqe = io_uring_get_sqe(&ring_.raw);
  io_uring_prep_read(sqe, wake_fd_.get(), wake_count_.get(), sizeof *wake_count_, 0);
  sqe->user_data = kWakeUp;
  wake_armed_ = true;
}

// 0, or the errno that ended the ring.
int UringEngine::submit_and_wait() {
  const int rc = io_uring_submit_and_wait(&ring_.raw, 1);
  if (rc >= 0) busy_times_ = 0;
  if (rc >= 0 || rc == -EINTR || rc == -EBUSY) return 0;
  if ((rc != -EAGAIN && rc != -ENOMEM) || ++busy_times_ > kBusyTimesMax) return -rc;
  std::this_thread::sleep_for(std::chrono::milliseconds(1));  // The kernel is short of memory; what is queued stays queued.
  return 0;
}

void UringEngine::reap() {
  unsigned head = 0;
  unsigned num_seen = 0;
  io_uring_cqe* cqe = nullptr;
  io_uring_for_each_cqe(&ring_.raw, head, cqe) {
    ++num_seen;
    if (cqe->user_data == kWakeUp) {
      wake_armed_ = false;
      woken_.store(false);  // Before the next exchange: a request pushed from now on wakes again.
      continue;
    }
    auto& block = *reinterpret_cast<Block*>(cqe->user_data & ~kDelayOver);
    if ((cqe->user_data & kDelayOver) == 0) {
      const int result = cqe->res == -ECANCELED ? -EAGAIN : cqe->res;  // We cancel none: the kernel got no thread for it.
      finished_.push_back({&block, reported(block, result)});
    } else if (block.fault.hold && !scheduler_->plan()->released()) {
      delay(block);
    } else {
      transfer(block);
    }
  }
  io_uring_cq_advance(&ring_.raw, num_seen);
}

// Leaves nothing for the kernel to do after the ring is gone: its teardown is asynchronous, and a read of the wake-up that
// is still armed could write into memory that has been freed by then. Files are let go of at once (they may carry locks).
void UringEngine::close() {
  while (wake_armed_) {
    wake();
    if (submit_and_wait() != 0) break;
    reap();
  }
  io_uring_unregister_files(&ring_.raw);
  io_uring_unregister_buffers(&ring_.raw);
  regions_.clear();
  ring_.close();
}

void UringEngine::run_calls() {
  std::vector<std::packaged_task<std::string()>> calls;
  {
    const std::lock_guard lock(calls_mutex_);
    calls.swap(calls_);
  }
  for (auto& task : calls) task();
}

// The kernel's table is replaced as a whole: blocks in flight keep the old one alive until they are back.
std::string UringEngine::rebuild_regions() {
  io_uring_unregister_buffers(&ring_.raw);
  std::vector<iovec> table;
  for (const Region& region : regions_) table.push_back({region.data, region.nbytes});
  if (table.empty()) return {};
  const int rc = io_uring_register_buffers(&ring_.raw, table.data(), static_cast<unsigned>(table.size()));
  if (rc == 0) return {};
  std::size_t nbytes = 0;
  for (const iovec& entry : table) nbytes += entry.iov_len;
  return registration_obstacle(-rc, nbytes);
}

}  // namespace

std::shared_ptr<Engine> make_uring_engine(std::shared_ptr<Scheduler> scheduler) {
  return std::make_shared<UringEngine>(std::move(scheduler));
}

std::string uring_obstacle() {
  try {
    Ring ring;
    std::vector<std::string> notes;
    ring.open(2, notes);
    ring.close();
    return {};
  } catch (const std::system_error& error) {
    return error.what();
  }
}

}  // namespace aio
