#include "beside.h"

#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace offload {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kPartMost = Piece::kElements * 4 + kLine;  // an fp32 array, at the next line

std::byte* memory_of_thread() {
  thread_local std::vector<std::byte> memory((3 + 2 * kStatesMax) * kPartMost + kLine);
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  return memory.data() + (kLine - address % kLine) % kLine;
}

void stream(std::byte* target, const std::byte* source, std::size_t nbytes) {
  std::size_t i = 0;
#ifdef __SSE2__
  const std::size_t ahead = -reinterpret_cast<std::uintptr_t>(target) % sizeof(__m128i);
  i = ahead < nbytes ? ahead : nbytes;
  std::memcpy(target, source, i);
  for (; i + sizeof(__m128i) <= nbytes; i += sizeof(__m128i)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
  }
#endif
  std::memcpy(target + i, source + i, nbytes - i);
}

}  // namespace

Piece::Piece(const Arrays& arrays, const Shifts& shifts, std::size_t begin, std::size_t end)
    : here_(arrays), free_(memory_of_thread()) {
  const std::size_t numel = end - begin;
  const auto whole = [&](std::byte* array, std::size_t width, std::ptrdiff_t shift) {
    return bring(array, shift, begin * width, numel * width);
  };
  const bool is_own_master = arrays.weight_format == WeightFormat::f32;
  const std::size_t weight_width = is_own_master || arrays.weight_format == WeightFormat::out_f32 ? 4 : 2;
  here_.grad += begin * size_of(arrays.grad_dtype);
  here_.weight = whole(arrays.weight, weight_width, shifts.weight);
  here_.rest = whole(arrays.rest, 2, shifts.states);
  here_.master = is_own_master ? here_.weight : whole(arrays.master, 4, shifts.states);
  for (std::size_t s = 0; s < kStatesMax; ++s) {
    here_.states[s] = whole(arrays.states[s], size_of(arrays.state_dtype), shifts.states);
    here_.scales[s] = reinterpret_cast<float*>(
        bring(reinterpret_cast<std::byte*>(arrays.scales[s]), shifts.states, begin / kCodeBlock * sizeof(float),
              (numel + kCodeBlock - 1) / kCodeBlock * sizeof(float)));
  }
}

std::byte* Piece::bring(std::byte* array, std::ptrdiff_t shift, std::size_t first_byte, std::size_t nbytes) {
  if (!array) return nullptr;
  std::byte* const here = free_;
  std::memcpy(here, array + shift + first_byte, nbytes);
  parts_[num_parts_++] = {array + first_byte, here, nbytes};
  free_ += (nbytes + kLine - 1) / kLine * kLine;
  return here;
}

void Piece::send() const {
  for (std::size_t i = 0; i < num_parts_; ++i) stream(parts_[i].place, parts_[i].here, parts_[i].nbytes);
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace offload
