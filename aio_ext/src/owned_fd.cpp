#include "owned_fd.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>

namespace aio {
namespace {

struct Registry {
  std::mutex mutex;
  std::set<int> fds;
  std::atomic<unsigned> generation{0};
};

Registry& registry();

void before_fork() { registry().mutex.lock(); }
void after_fork_in_parent() { registry().mutex.unlock(); }
void after_fork_in_child() {
  Registry& r = registry();
  for (const int fd : r.fds) ::close(fd);
  r.fds.clear();
  r.generation.fetch_add(1, std::memory_order_relaxed);
  r.mutex.unlock();
}

// Never destroyed: a thread with parked buffers may outlive the static objects of the process.
Registry& registry() {
  static Registry* const instance = [] {
    auto* made = new Registry;
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return made;
  }();
  return *instance;
}

void enlist(int fd) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  r.fds.insert(fd);
}

// False in a child, whose handler has closed the descriptor already (its number may belong to another file by now).
bool strike(int fd) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  return r.fds.erase(fd) == 1;
}

}  // namespace

unsigned fork_generation() noexcept { return registry().generation.load(std::memory_order_relaxed); }

OwnedFd::OwnedFd(int fd) : fd_(fd) {
  if (fd_ >= 0) enlist(fd_);
}

void OwnedFd::reset() noexcept {
  if (fd_ >= 0 && strike(fd_)) ::close(fd_);
  fd_ = -1;
}

ForkClosed::ForkClosed(int fd) : fd_(fd) { enlist(fd_); }
ForkClosed::~ForkClosed() { strike(fd_); }

}  // namespace aio
