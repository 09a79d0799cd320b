// The Mersenne Twister (MT19937), moved on without its numbers. Part of isa.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload::OFFLOAD_ISA {
namespace {

constexpr std::ptrdiff_t kMersenneWords = 624, kMersenneShift = 397;

inline std::uint32_t twisted(std::uint32_t upper, std::uint32_t lower) {
  return (((upper & 0x80000000u) | (lower & 0x7fffffffu)) >> 1) ^ (-(lower & 1u) & 0x9908b0dfu);
}

// A word is made of itself, the next one and one that is far away, so the compiler may make several at a time.
inline void twist_range(std::uint32_t* words, std::ptrdiff_t begin, std::ptrdiff_t end, std::ptrdiff_t ahead) {
#pragma GCC ivdep
  for (std::ptrdiff_t i = begin; i < end; ++i) words[i] = words[i + ahead] ^ twisted(words[i], words[i + 1]);
}

// Makes the next 624 words of the state out of these (Matsumoto and Nishimura, 1998), so many times.
void twist(std::uint32_t* words, std::size_t times) {
  for (; times > 0; --times) {
    twist_range(words, 0, kMersenneWords - kMersenneShift, kMersenneShift);
    twist_range(words, kMersenneWords - kMersenneShift, kMersenneWords - 1, kMersenneShift - kMersenneWords);
    words[kMersenneWords - 1] = words[kMersenneShift - 1] ^ twisted(words[kMersenneWords - 1], words[0]);
  }
}

}  // namespace
}  // namespace offload::OFFLOAD_ISA
