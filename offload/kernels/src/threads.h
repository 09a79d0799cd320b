// Threads of this process, as many as the system gives.
#pragma once

#include <system_error>
#include <thread>
#include <utility>

namespace offload {

// False: the system gives no more threads.
template <typename Call>
bool try_detach(Call&& call) {
  try {
    std::thread(std::forward<Call>(call)).detach();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

}  // namespace offload
