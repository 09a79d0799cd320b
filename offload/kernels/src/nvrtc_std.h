// What the kernels use of the C++ standard library, for NVRTC, which has none: it is included
// before all else, and the standard headers are empty.
#pragma once

namespace std {

using size_t = decltype(sizeof(0));
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
enum class byte : unsigned char {};

using ::memcpy;

template <class To, class From>
To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

template <class T, T number>
struct integral_constant {
  static constexpr T value = number;
  constexpr operator T() const { return number; }
  constexpr T operator()() const { return number; }
};

template <size_t... s>
struct index_sequence {};
template <size_t count, size_t... s>
struct sequence_below : sequence_below<count - 1, count - 1, s...> {};
template <size_t... s>
struct sequence_below<0, s...> {
  using type = index_sequence<s...>;
};
template <size_t count>
using make_index_sequence = typename sequence_below<count>::type;

}  // namespace std

#define __builtin_fmaf __fmaf_rn
#define __builtin_sqrtf __fsqrt_rn
