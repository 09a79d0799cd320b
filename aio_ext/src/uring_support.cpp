#include "uring_support.h"

#include <cerrno>
#include <chrono>
#include <fstream>
#include <system_error>
#include <thread>

// Numbers of the kernel's interface that older liburing headers lack.
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace aio {
namespace {

constexpr int kOpenAttemptsMax = 20;

std::string setup_obstacle(int error) {
  switch (error) {
    case ENOSYS: return "this kernel has no io_uring, or a seccomp filter hides it; Linux 5.6 or newer has it";
    case EPERM: {
      int disabled = 0;
      std::ifstream("/proc/sys/kernel/io_uring_disabled") >> disabled;
      if (disabled != 0) {
        return "io_uring is switched off by sysctl kernel.io_uring_disabled=" + std::to_string(disabled) +
               "; `sysctl kernel.io_uring_disabled=0` switches it on";
      }
      return "a seccomp filter forbids io_uring, as containers often do; allow io_uring_setup, io_uring_enter and "
             "io_uring_register in the container's seccomp profile";
    }
    case ENOMEM: return "too little locked memory for a ring; raise `ulimit -l`";
    case EMFILE:
    case ENFILE: return "too many open files for a ring; raise `ulimit -n`";
    default: return "io_uring cannot be set up here";
  }
}

[[noreturn]] void refuse(int error) { throw std::system_error(error, std::generic_category(), setup_obstacle(error)); }

// A filter may allow the set-up and forbid the use: one no-op tells.
int try_out(io_uring& ring) {
  io_uring_prep_nop(io_uring_get_sqe(&ring));
  const int rc = io_uring_submit_and_wait(&ring, 1);
  if (rc < 0) return -rc;
  io_uring_cqe* cqe = nullptr;
  if (io_uring_peek_cqe(&ring, &cqe) != 0) return EIO;
  io_uring_cqe_seen(&ring, cqe);
  return 0;
}

}  // namespace

std::string error_text(int error) { return std::generic_category().message(error); }

std::string registration_obstacle(int error, std::size_t nbytes) {
  std::string why = "memory is not registered with the ring (" + error_text(error) + "): it is used by its address";
  if (error == ENOMEM) why += "; `ulimit -l " + std::to_string(nbytes / 1024 + 1024) + "` allows it";
  return why;
}

void Ring::open(unsigned entries, std::vector<std::string>& notes) {
  struct Flag {
    unsigned bit;
    const char* missing;
  };
  // In the order in which they are dropped: each needs those after it.
  constexpr Flag kFlags[] = {
      {IORING_SETUP_DEFER_TASKRUN, "DEFER_TASKRUN (Linux 6.1): completions interrupt the ring's thread"},
      {IORING_SETUP_SINGLE_ISSUER, "SINGLE_ISSUER (Linux 6.0): the ring locks a little more"},
      {IORING_SETUP_COOP_TASKRUN, "COOP_TASKRUN (Linux 5.19): completions interrupt with a signal"},
  };
  // The locked memory of a ring is given back some time after its end: where little is allowed, one may come too early.
  const auto init = [&](unsigned flags) {
    int rc = io_uring_queue_init(entries, &raw, flags);
    for (int attempts = 1; rc == -ENOMEM && attempts < kOpenAttemptsMax; ++attempts) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      rc = io_uring_queue_init(entries, &raw, flags);
    }
    return rc;
  };
  unsigned flags = 0;
  for (const Flag& flag : kFlags) flags |= flag.bit;
  int rc = init(flags);
  for (const Flag& flag : kFlags) {
    if (rc != -EINVAL) break;
    flags &= ~flag.bit;
    notes.push_back(std::string("this kernel lacks io_uring's ") + flag.missing);
    rc = init(flags);
  }
  if (rc < 0) refuse(-rc);
  if (const int error = try_out(raw); error != 0) {
    io_uring_queue_exit(&raw);
    refuse(error);
  }
  closed_in_children.emplace(raw.ring_fd);
  io_uring_ring_dontfork(&raw);
}

void Ring::close() {
  closed_in_children.reset();
  io_uring_queue_exit(&raw);
}

}  // namespace aio
