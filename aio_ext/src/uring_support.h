// Opening a ring with what this kernel and this process are allowed, and saying what is missing.
#pragma once

#include <liburing.h>

#include <optional>
#include <string>
#include <vector>

#include "owned_fd.h"

namespace aio {

[[nodiscard]] std::string error_text(int error);
// Why `nbytes` could not be registered, and the fix.
[[nodiscard]] std::string registration_obstacle(int error, std::size_t nbytes);

struct Ring {
  io_uring raw{};
  std::optional<ForkClosed> closed_in_children;

  // Throws std::system_error that says why there can be no ring, and the fix. Set-up flags that this kernel does not know
  // are dropped one at a time, with a note each. To be called by the thread that will use the ring.
  void open(unsigned entries, std::vector<std::string>& notes);
  void close();
};

}  // namespace aio
