#include "queue.h"

#include <fcntl.h>
#include <linux/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace aio {
namespace {

constexpr std::uint32_t kDepthMax = 4096;
constexpr unsigned kThreadsMax = 256;

// statx(STATX_DIOALIGN), for C libraries whose headers are older than the kernel.
constexpr unsigned kStatxDioAlign = 0x2000;
constexpr std::size_t kDioMemoryAlignAt = 0x98;

// Engines whose I/O did not come back, or whose threads a fork left behind: kept, with all that the kernel may still use.
void park(std::shared_ptr<Engine> engine, std::shared_ptr<Scheduler> scheduler) {
  struct Parked {
    std::mutex mutex;
    std::vector<std::pair<std::shared_ptr<Engine>, std::shared_ptr<Scheduler>>> entries;
  };
  static Parked* const parked = new Parked;
  const std::lock_guard lock(parked->mutex);
  parked->entries.emplace_back(std::move(engine), std::move(scheduler));
}

void check(const Options& options) {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
  };
  require(options.limits.depth >= 1 && options.limits.depth <= kDepthMax, "depth must be in [1, 4096]");
  require(options.limits.block_bytes >= 4096 && options.limits.block_bytes % 4096 == 0 &&
              options.limits.block_bytes <= (1U << 30),
          "block_bytes must be a multiple of 4096 in [4096, 2^30]");
  require(options.num_threads >= 1 && options.num_threads <= kThreadsMax, "num_threads must be in [1, 256]");
}

}  // namespace

Queue::Queue(const Options& options, std::shared_ptr<FaultPlan> plan) {
  check(options);
  scheduler_ = std::make_shared<Scheduler>(options.limits, std::move(plan));
  start_engine(options);
  for (const std::string& text : engine_->notes()) note(text);
}

void Queue::start_engine(const Options& options) {
  if (options.backend != Backend::threads) {
    try {
      engine_ = make_uring_engine(scheduler_);
      backend_ = Backend::io_uring;
      return;
    } catch (const std::system_error& error) {
      if (options.backend == Backend::io_uring) throw;
      scheduler_->on_work(nullptr);
      note(std::string("threads serve this queue: ") + error.what());
    }
  }
  engine_ = make_thread_engine(scheduler_, options.num_threads);
}

Queue::~Queue() {
  if (forked()) {
    park(engine_, scheduler_);  // The threads do not exist here: there is nothing to join, and nothing may be locked.
  } else {
    close(std::chrono::seconds(30));
  }
}

std::vector<std::string> Queue::notes() const {
  const std::lock_guard lock(mutex_);
  return notes_;
}

void Queue::note(std::string text) {
  const std::lock_guard lock(mutex_);
  if (std::find(notes_.begin(), notes_.end(), text) == notes_.end()) notes_.push_back(std::move(text));
}

void Queue::refuse_closed() const {
  if (closed_) throw std::system_error(ESHUTDOWN, std::generic_category(), "the queue is closed");
}

std::int32_t Queue::register_file(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  OwnedFd own(flags < 0 ? -1 : ::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (own.get() < 0) throw std::system_error(errno, std::generic_category(), "duplicating the file descriptor");
  const int raw = own.get();
  Alignment alignment{1, 1};
  if ((flags & O_DIRECT) != 0) alignment = direct_io_alignment(fd);
  const std::lock_guard registering(registering_);
  refuse_closed();
  const std::int32_t file = scheduler_->add_file(std::move(own), alignment.memory, alignment.offset);
  if (std::string obstacle = engine_->register_file(file, raw); !obstacle.empty()) note(std::move(obstacle));
  files_.push_back(file);
  return file;
}

void Queue::unregister_file(std::int32_t file) {
  const std::lock_guard registering(registering_);
  refuse_closed();
  const OwnedFd fd = scheduler_->remove_file(file);
  engine_->unregister_file(file);
  std::erase(files_, file);
}

void Queue::register_memory(std::byte* data, std::size_t nbytes) {
  const std::lock_guard registering(registering_);
  refuse_closed();
  auto lease = Mapping::containing(data, nbytes);
  if (!lease) return note("memory is not registered with the ring: only that of a Memory can be kept alive for it");
  if (std::string obstacle = engine_->register_memory(std::move(lease), data, nbytes); !obstacle.empty()) {
    note(std::move(obstacle));
  }
}

bool Queue::close(std::chrono::nanoseconds timeout) {
  const std::lock_guard registering(registering_);
  if (std::exchange(closed_, true)) return scheduler_->drain(std::chrono::seconds(0));
  const bool drained = scheduler_->drain(timeout);
  if (!drained) scheduler_->cancel(ECANCELED);
  scheduler_->stop();
  if (!drained) {
    engine_->detach();
    park(engine_, scheduler_);
    return false;
  }
  engine_->join();
  engine_.reset();
  for (const std::int32_t file : files_) const OwnedFd closing = scheduler_->remove_file(file);
  files_.clear();
  return true;
}

Alignment direct_io_alignment(int fd) {
  alignas(8) unsigned char answer[256] = {};
  if (::syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kStatxDioAlign, answer) != 0) return {};
  const auto field = [&](std::size_t at) {
    std::uint32_t value = 0;
    std::copy_n(answer + at, sizeof value, reinterpret_cast<unsigned char*>(&value));
    return value;
  };
  const bool told = (field(0) & kStatxDioAlign) != 0;
  const Alignment alignment{field(kDioMemoryAlignAt), field(kDioMemoryAlignAt + 4)};
  return told && alignment.memory != 0 && alignment.offset != 0 ? alignment : Alignment{};
}

}  // namespace aio
