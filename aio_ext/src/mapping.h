// Memory that I/O is done from, which lives until its last user lets go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "owned_fd.h"

namespace aio {

inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// A range of addresses that is unmapped when the last lease on it goes.
//
// [Note: Who owns a buffer in flight]
// The owner (`Memory` in Python) has one lease, every request that touches the range has one until it is reaped, and so has
// every ring that registered it. Closing the owner while the kernel may still write here therefore unmaps nothing: the
// pages stay parked until the last result is in, and the addresses cannot become somebody else's memory.
class Mapping {
 public:
  // Private anonymous memory on 2 MiB boundaries between two guard pages, not inherited by children and not in core dumps.
  // Pages: reserved 2 MiB pages where there are enough, else transparent ones are asked for; lazily populated.
  static std::shared_ptr<Mapping> anonymous(std::size_t nbytes, bool huge_pages);
  // Read-only addresses that all show one 2 MiB page filled with `value`.
  static std::shared_ptr<Mapping> pattern(std::size_t nbytes, std::uint16_t value);
  // The live mapping that contains the whole range; null: the memory is not ours.
  static std::shared_ptr<Mapping> containing(const std::byte* data, std::size_t nbytes);

  Mapping(std::byte* reserved, std::size_t reserved_bytes, std::byte* data, std::size_t nbytes)
      : reserved_(reserved), reserved_bytes_(reserved_bytes), data_(data), nbytes_(nbytes) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }
  // Gives every page its memory now, so that no later access waits for the kernel. Throws std::system_error (ENOMEM).
  void populate();

 private:
  // In a forked child the pages are gone, and others may have taken their place: nothing is unmapped there.
  const unsigned fork_generation_ = fork_generation();
  std::byte* reserved_;
  std::size_t reserved_bytes_;
  std::byte* data_;
  std::size_t nbytes_;
};

}  // namespace aio
