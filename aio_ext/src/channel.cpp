#include "channel.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace aio {

Channel::Channel() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (event_.get() < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

void Channel::post(std::uint64_t token) {
  const std::lock_guard lock(mutex_);
  tokens_.push_back(token);
  if (tokens_.size() > 1) return;  // Readable already.
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof one);
}

std::vector<std::uint64_t> Channel::drain() {
  const std::lock_guard lock(mutex_);
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(event_.get(), &count, sizeof count);
  std::vector<std::uint64_t> taken;
  taken.reserve(tokens_.capacity());
  taken.swap(tokens_);
  return taken;
}

}  // namespace aio
