// File descriptors that a forked child does not keep.
//
// [Note: Why a forked child closes our descriptors]
// A lock taken by flock belongs to the open file description, which fork shares: while a child (a DataLoader worker) keeps
// the descriptor, the lock outlives its owner. O_CLOEXEC helps only at exec. So every descriptor of a queue is listed here,
// and a pthread_atfork handler closes them all in the child, where the owners then find that they own nothing.
#pragma once

#include <utility>

namespace aio {

// Counts the forks between this process and the one that loaded the library. An object that remembers the number it was
// made under can tell that it now lives in a child, where its threads do not exist.
[[nodiscard]] unsigned fork_generation() noexcept;

// Owns a descriptor: closes it at the end of its life, or in a child right after the fork, whichever is first.
class OwnedFd {
 public:
  OwnedFd() = default;
  explicit OwnedFd(int fd);
  ~OwnedFd() { reset(); }
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  [[nodiscard]] int get() const noexcept { return fd_; }
  void reset() noexcept;

 private:
  int fd_ = -1;
};

// Has the child close `fd`, which something else (liburing) closes in this process.
class ForkClosed {
 public:
  explicit ForkClosed(int fd);
  ~ForkClosed();
  ForkClosed(const ForkClosed&) = delete;
  ForkClosed& operator=(const ForkClosed&) = delete;

 private:
  int fd_;
};

}  // namespace aio
