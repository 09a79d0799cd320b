// An update whose new numbers do not go where the old ones stand. A piece at a time is brought into the caches, changed there, and
// streamed to its place: every byte passes the memory as often as in an update in place.
#pragma once

#include <cstddef>

#include "arrays.h"

namespace offload {

// Bytes from where new numbers go to where the old ones stand: those of the weight, and those of all else that is written.
struct Shifts {
  std::ptrdiff_t weight = 0, states = 0;

  explicit operator bool() const { return weight || states; }
};

// The piece [begin, end) of some arrays, in the caches of the calling thread. One at a time: the next takes the same memory.
class Piece {
 public:
  static constexpr std::size_t kElements = 4096;
  static_assert(kBlock % kElements == 0 && kElements % kCodeBlock == 0);

  // Brings the old numbers.
  Piece(const Arrays& arrays, const Shifts& shifts, std::size_t begin, std::size_t end);

  // For elements [0, end - begin).
  const Arrays& arrays() const { return here_; }

  // Sends the new numbers to their place, past the caches. They are there for other threads when this returns.
  void send() const;

 private:
  struct Part {
    std::byte* place;
    const std::byte* here;
    std::size_t nbytes;
  };

  std::byte* bring(std::byte* array, std::ptrdiff_t shift, std::size_t first_byte, std::size_t nbytes);

  Arrays here_;
  Part parts_[3 + 2 * kStatesMax];
  std::size_t num_parts_ = 0;
  std::byte* free_;
};

}  // namespace offload
