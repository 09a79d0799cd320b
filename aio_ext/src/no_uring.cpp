// Stands in for the io_uring engine in a build without liburing.

#include <cerrno>
#include <system_error>

#include "engine.h"

namespace aio {

std::string uring_obstacle() {
  return "aio_ext was built without liburing; install liburing-dev (or set LIBURING_ROOT) and build again";
}

std::shared_ptr<Engine> make_uring_engine(std::shared_ptr<Scheduler>) {
  throw std::system_error(ENOSYS, std::generic_category(), uring_obstacle());
}

}  // namespace aio
