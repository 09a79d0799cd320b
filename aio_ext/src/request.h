// A request (what a caller asked for) and a block (the piece of it that is one operation of the kernel).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "channel.h"
#include "fault_plan.h"
#include "mapping.h"
#include "operation.h"

namespace aio {

using Clock = std::chrono::steady_clock;

struct Watch {
  std::shared_ptr<Channel> channel;
  std::uint64_t token;
};

// Nodes are pooled and reused: in steady state a request allocates nothing.
struct Request {
  Operation operation{};
  Priority priority{};
  std::int32_t file = -1;
  std::uint64_t offset = 0;
  std::byte* data = nullptr;
  std::uint64_t nbytes = 0;

  std::uint64_t sequence = 0;         // order of submission
  std::uint64_t issued_bytes = 0;     // handed out as blocks
  std::uint32_t blocks_in_flight = 0;
  std::uint32_t writes_before = 0;    // sync only: earlier writes of the file that are not over yet
  std::shared_ptr<Mapping> lease;     // [Note: Who owns a buffer in flight]
  std::vector<Watch> watches;
  Request* next = nullptr;            // in the one list that the request is in
  bool held = false;                  // a ticket refers to it

  // Results. Written by the thread that finishes blocks; `over` publishes them (and is what waiters sleep on).
  std::atomic<std::uint64_t> bytes_done{0};
  int error = 0;                      // errno of the first block that failed; 0: none
  std::uint64_t error_offset = 0;     // where that block stood in the file
  std::atomic<std::uint32_t> over{0};
  std::atomic<std::uint32_t> waiters{0};
};

struct Block {
  Request* request = nullptr;         // null: the block is free
  Operation operation{};
  int fd = -1;
  std::int32_t file = -1;
  std::uint32_t granule = 1;          // a transfer can be resumed at multiples of this only (O_DIRECT)
  std::byte* data = nullptr;
  std::uint64_t offset = 0;
  std::uint32_t remaining_bytes = 0;
  std::uint32_t total_bytes = 0;
  std::uint32_t attempts = 0;         // since it last moved forward
  int error = 0;
  std::uint32_t index = 0;            // in the table of blocks, constant
  Clock::time_point started{};
  Fault fault;                        // what the test plan has in store for this attempt
};

}  // namespace aio
