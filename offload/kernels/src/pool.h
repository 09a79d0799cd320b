// Threads for one kernel call at a time.
#pragma once

#include <cstddef>
#include <functional>

namespace offload {

// Calls body(block) for every block in [0, num_blocks), on at most num_threads threads, of which the caller is one, and
// returns when all are done. Which thread takes which block is open, so bodies must not depend on it. While the threads work
// for another caller, this caller does its blocks alone.
void parallel_for(std::size_t num_blocks, std::size_t num_threads, const std::function<void(std::size_t)>& body);

}  // namespace offload
