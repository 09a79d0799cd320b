// Faults for tests, injected below the one function that reads results. Production queues have no plan.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <vector>

#include "operation.h"

namespace aio {

// What happens to one attempt of one block, in this order: wait (delay, hold), then fail, fall short or go through.
struct Fault {
  int error = 0;                 // errno reported instead of doing anything; 0: do it
  std::uint32_t short_by = 0;    // bytes left undone, where more than that were asked for
  std::uint32_t delay_us = 0;
  bool hold = false;             // wait until the plan is released
};

// Chances in [0, 1] an attempt; the error is drawn evenly from `errors`.
struct FaultRates {
  double error = 0;
  std::vector<int> errors;
  double shortfall = 0;
  double delay = 0;
  std::uint32_t delay_us_max = 0;
};

class FaultPlan {
 public:
  struct Attempt {
    Operation operation;
    std::int32_t file;
    std::uint64_t offset;
    std::uint32_t nbytes;
  };

  // Strikes the attempt number `nth` (from 0) counted since the plan was made.
  void strike(std::uint64_t nth, const Fault& fault);
  // Strikes every attempt that touches [begin, end) of a file.
  void strike_range(std::uint64_t begin, std::uint64_t end, const Fault& fault);
  void strike_at_random(std::uint64_t seed, const FaultRates& rates);
  // Lets go of what is held, now and later.
  void release() noexcept { released_.store(true, std::memory_order_release); }
  [[nodiscard]] bool released() const noexcept { return released_.load(std::memory_order_acquire); }
  void keep_log() noexcept { logging_.store(true); }
  [[nodiscard]] std::vector<Attempt> log() const;

  [[nodiscard]] Fault next(const Attempt& attempt);

 private:
  struct Range {
    std::uint64_t begin, end;
    Fault fault;
  };

  mutable std::mutex mutex_;
  std::uint64_t count_ = 0;
  std::map<std::uint64_t, Fault> at_;
  std::vector<Range> ranges_;
  std::mt19937_64 random_;
  FaultRates rates_;
  std::vector<Attempt> log_;
  std::atomic<bool> logging_{false};
  std::atomic<bool> released_{false};
};

}  // namespace aio
