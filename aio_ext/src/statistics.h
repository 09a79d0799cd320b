// What a queue has done, as counters that cost nothing to keep.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace aio {

// Counts durations in buckets of 1/8 octave: percentiles within 12 %, from 1 us to hours, in fixed memory.
class LatencyHistogram {
 public:
  void add(std::uint64_t nanoseconds) noexcept { ++counts_[bucket(nanoseconds)], ++total_; }
  // Seconds below which `share` (in [0, 1]) of all durations lie; 0 when there are none.
  [[nodiscard]] double quantile(double share) const noexcept {
    const auto rank = static_cast<std::uint64_t>(share * static_cast<double>(total_));
    std::uint64_t below = 0;
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      below += counts_[i];
      if (below > rank || (below == total_ && total_ > 0)) return upper_ns(i) * 1e-9;
    }
    return 0;
  }

 private:
  static constexpr unsigned kSubBits = 3;
  static std::size_t bucket(std::uint64_t ns) noexcept {
    if (ns < (1U << kSubBits)) return ns;
    const unsigned octave = static_cast<unsigned>(std::bit_width(ns)) - 1 - kSubBits;
    return (std::size_t{octave} << kSubBits) + (ns >> octave);
  }
  static double upper_ns(std::size_t i) noexcept {
    if (i < (1U << (kSubBits + 1))) return static_cast<double>(i);
    const std::size_t octave = (i >> kSubBits) - 1;
    const std::size_t mantissa = (i & ((1U << kSubBits) - 1)) + (1U << kSubBits) + 1;
    return static_cast<double>(mantissa) * static_cast<double>(std::uint64_t{1} << octave);
  }

  std::array<std::uint64_t, 64 << kSubBits> counts_{};
  std::uint64_t total_ = 0;
};

struct DirectionCounters {
  std::uint64_t bytes = 0;
  std::uint64_t requests = 0;
  std::uint64_t operations = 0;  // blocks
  LatencyHistogram latency;      // of blocks, from the first attempt to the result
};

struct Counters {
  DirectionCounters read;
  DirectionCounters write;
  std::uint64_t syncs = 0;
  std::uint64_t failed_requests = 0;
  std::uint64_t retries = 0;
  std::uint64_t short_transfers = 0;
  std::uint32_t depth_max = 0;
  double busy_seconds = 0;       // at least one block in flight
  double depth_seconds = 0;      // blocks in flight, summed over time
  double starved_seconds = 0;    // busy below the depth because nothing was pending
  double idle_seconds = 0;       // nothing in flight, nothing pending
};

}  // namespace aio
