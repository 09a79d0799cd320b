// One element at a time, in plain C++: the definition that every other vec_*.h agrees with, bit for bit.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "arrays.h"

namespace offload::OFFLOAD_ISA {

struct Scalar {
  static constexpr std::size_t width = 1;
  using F32 = float;
  using U32 = std::uint32_t;
  using F64 = double;

  static F32 set(float x) { return x; }

  // Memory, aligned to its elements: a GPU would else go byte by byte. What is stored must hold no NaN but the canonical one,
  // 0x7fc00000: processors disagree about payloads.

  static F32 load_f32(const std::byte* base, std::size_t i) { return std::bit_cast<float>(bits32(base, i)); }
  static void store_f32(std::byte* base, std::size_t i, F32 x) {
    const std::uint32_t b = bits(x);
    std::memcpy(__builtin_assume_aligned(base + 4 * i, 4), &b, 4);
  }

  static F32 load_bf16(const std::byte* base, std::size_t i) { return value(std::uint32_t{bits16(base, i)} << 16); }
  static void store_bf16(std::byte* base, std::size_t i, F32 x) {
    const std::uint32_t b = bits(x);
    put16(base, i, (b + 0x7fff + ((b >> 16) & 1)) >> 16);  // to nearest, ties to even
  }
  // Away from zero as often as the 16 bits cut off say: `random` has at least 16 random bits, the lower ones of which count.
  // What is a bf16 number already stays, and so do infinities and the canonical NaN.
  static void store_bf16(std::byte* base, std::size_t i, F32 x, U32 random) {
    put16(base, i, (bits(x) + (random & 0xffff)) >> 16);
  }

  static F32 load_f16(const std::byte* base, std::size_t i) {
    const std::uint32_t h = bits16(base, i), sign = (h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude >= 0x7c00) return value(sign | 0x7f800000 | (magnitude << 13));             // infinity, NaN
    if (magnitude >= 0x0400) return value(sign | ((magnitude << 13) + (112u << 23)));         // normal
    return value(sign | bits(static_cast<float>(magnitude) * 0x1p-24f));                      // subnormal, exact
  }
  static void store_f16(std::byte* base, std::size_t i, F32 x) {
    const std::uint32_t b = bits(x), sign = (b >> 16) & 0x8000, magnitude = b & 0x7fffffff;
    std::uint32_t h;
    if (magnitude > 0x7f800000) h = 0x7e00;
    else if (magnitude >= 0x477ff000) h = 0x7c00;                                              // 65520 and above
    else if (magnitude >= 0x38800000) h = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    else h = bits(value(magnitude) + 0.5f) - bits(0.5f);  // subnormal: an ulp of 0.5f is 2^-24, the add rounds
    put16(base, i, sign | h);
  }

  // Split master: the upper half is the bf16 weight, rounded half away from zero; the lower half is kept as it is, and
  // read as signed it is what the rounding moved the upper half by. Lossless but for NaN payloads.
  static F32 load_split(const std::byte* weight, const std::byte* rest, std::size_t i) {
    const auto low = static_cast<std::uint32_t>(static_cast<std::int16_t>(bits16(rest, i)));  // sign-extended
    return value((std::uint32_t{bits16(weight, i)} << 16) + low);
  }
  static void store_split(std::byte* weight, std::byte* rest, std::size_t i, F32 x) {
    const std::uint32_t b = bits(x);
    put16(weight, i, (b + 0x8000) >> 16);
    put16(rest, i, b & 0xffff);
  }

  // Random bits, from bits. A round of a hash: two or more of them are as good as independent of what went in.
  static U32 set_bits(std::uint32_t b) { return b; }
  static U32 bits(F32 x) { return std::bit_cast<std::uint32_t>(x); }
  static U32 mixed(U32 random, U32 b) {
    random = (random ^ b) * 0x9e3779b1;
    return random ^ random >> 15;
  }
  static U32 upper_half(U32 b) { return b >> 16; }

  // Codes: 8-bit logarithmic numbers, the upper bits of an fp32 number, times a scale that is a power of two. Signed: sign, 4
  // bits of exponent, 3 of mantissa, minus 2^-14, so that they come to zero in even steps (the mu-law of telephony), up to
  // 3.75. Unsigned: 5 bits of exponent, 3 of mantissa, from 2^-30 to 3.75. Encoding rounds at random: up as often as the 20
  // bits cut off say. `least` is 2^-14 or 2^-30 times the scale: its bits are what is added to those of the code.

  static F32 load_signed_code(const std::byte* base, std::size_t i, float least) {
    const auto code = static_cast<std::uint32_t>(base[i]), sign = (code & 0x80) << 24;
    return value((sign | (code & 0x7f) << 20) + bits(least)) + (sign ? least : -least);
  }
  static F32 load_unsigned_code(const std::byte* base, std::size_t i, float least) {
    return value((static_cast<std::uint32_t>(base[i]) << 20) + bits(least));
  }
  // 20 random bits; those of neighbouring lanes are a golden section apart.
  static U32 noise(std::uint32_t random, std::size_t lane) {
    return (random + static_cast<std::uint32_t>(lane) * 0x9e3779b9) >> 12;
  }
  // `random` has 20 bits. Codes are in the lowest byte of the result.
  static U32 signed_code(F32 x, float least, U32 random) {
    return ((bits(magnitude(x) + least) - bits(least) + random) >> 20) | bits(x) >> 31 << 7;
  }
  static U32 unsigned_code(F32 x, float least, U32 random) {
    const std::int32_t code = static_cast<std::int32_t>(bits(x) - bits(least) + random) >> 20;
    return static_cast<U32>(code < 0 ? 0 : code > 255 ? 255 : code);
  }
  static void store_code(std::byte* base, std::size_t i, U32 code) { base[i] = static_cast<std::byte>(code); }
  static void store_signed_codes(std::byte* base, std::size_t i, const U32 (&codes)[4]) {
    for (std::size_t k = 0; k < 4; ++k) store_code(base, i + k, codes[k]);
  }
  static void store_unsigned_codes(std::byte* base, std::size_t i, const U32 (&codes)[4]) {
    store_signed_codes(base, i, codes);
  }

  // Arithmetic, IEEE, to nearest.

  static F32 add(F32 a, F32 b) { return a + b; }
  static F32 sub(F32 a, F32 b) { return a - b; }
  static F32 mul(F32 a, F32 b) { return a * b; }
  static F32 div(F32 a, F32 b) { return a / b; }
  static F32 fma(F32 a, F32 b, F32 c) { return __builtin_fmaf(a, b, c); }
  static F32 sqrt(F32 x) { return __builtin_sqrtf(x); }
  static F32 max(F32 a, F32 b) { return a > b || a != a ? a : b; }  // a NaN on either side comes through
  static F32 sign(F32 x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }  // of a zero or a NaN: itself
  static F32 magnitude(F32 x) { return value(bits(x) & 0x7fffffff); }
  // The larger of two magnitudes, where a NaN of either sign counts as larger than any number.
  static F32 larger_bits(F32 a, F32 b) { return bits(a) > bits(b) ? a : b; }
  static float largest_lane(F32 x) { return x; }
  static F32 either(F32 a, F32 b) { return value(bits(a) | bits(b)); }

  static F64 zero_f64() { return 0; }
  static F64 add_square(F64 sum, F32 x) { return sum + static_cast<double>(x) * x; }  // the product is exact
  static void store_f64(double* lanes, F64 sum) { *lanes = sum; }

  static bool has_nan(F32 x) { return x != x; }
  static F32 canonical(F32 x) { return x == x ? x : value(0x7fc00000); }

 private:
  static float value(std::uint32_t b) { return std::bit_cast<float>(b); }
  static std::uint32_t bits32(const std::byte* base, std::size_t i) {
    std::uint32_t b;
    std::memcpy(&b, __builtin_assume_aligned(base + 4 * i, 4), 4);
    return b;
  }
  static std::uint16_t bits16(const std::byte* base, std::size_t i) {
    std::uint16_t b;
    std::memcpy(&b, __builtin_assume_aligned(base + 2 * i, 2), 2);
    return b;
  }
  static void put16(std::byte* base, std::size_t i, std::uint32_t b) {
    const auto low = static_cast<std::uint16_t>(b);
    std::memcpy(__builtin_assume_aligned(base + 2 * i, 2), &low, 2);
  }
};

}  // namespace offload::OFFLOAD_ISA
