// Where an event loop, or a thread, learns which requests are over.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "owned_fd.h"

namespace aio {

// A list of tokens and an eventfd that is readable while the list is not empty. The side that posts never waits.
class Channel {
 public:
  Channel();
  void post(std::uint64_t token);
  // Takes all tokens posted so far; the descriptor is not readable afterwards.
  [[nodiscard]] std::vector<std::uint64_t> drain();
  [[nodiscard]] int fd() const noexcept { return event_.get(); }

 private:
  OwnedFd event_;
  std::mutex mutex_;
  std::vector<std::uint64_t> tokens_;
};

}  // namespace aio
