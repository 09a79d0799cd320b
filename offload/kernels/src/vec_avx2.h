// Eight elements at a time: AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "arrays.h"

namespace offload::OFFLOAD_ISA {

struct Avx2 {
  static constexpr std::size_t width = 8;
  using F32 = __m256;
  using U32 = __m256i;
  struct F64 {
    __m256d low, high;
  };

  static F32 set(float x) { return _mm256_set1_ps(x); }

  // Memory.

  static F32 load_f32(const std::byte* base, std::size_t i) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(base + 4 * i));
  }
  static void store_f32(std::byte* base, std::size_t i, F32 x) {
    _mm256_storeu_ps(reinterpret_cast<float*>(base + 4 * i), x);
  }

  static F32 load_bf16(const std::byte* base, std::size_t i) { return upper(base, i); }
  static void store_bf16(std::byte* base, std::size_t i, F32 x) {
    const __m256i b = bits(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7fff)), odd);
    store_16x8(base, i, _mm256_extracti128_si256(unzip(rounded), 1));
  }
  static void store_bf16(std::byte* base, std::size_t i, F32 x, U32 random) {
    const __m256i rounded = _mm256_add_epi32(bits(x), _mm256_and_si256(random, _mm256_set1_epi32(0xffff)));
    store_16x8(base, i, _mm256_extracti128_si256(unzip(rounded), 1));
  }

  static F32 load_f16(const std::byte* base, std::size_t i) { return _mm256_cvtph_ps(load_16x8(base, i)); }
  static void store_f16(std::byte* base, std::size_t i, F32 x) {
    store_16x8(base, i, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static F32 load_split(const std::byte* weight, const std::byte* rest, std::size_t i) {
    const __m256i low = _mm256_cvtepi16_epi32(load_16x8(rest, i));
    return _mm256_castsi256_ps(_mm256_add_epi32(bits(upper(weight, i)), low));
  }
  static void store_split(std::byte* weight, std::byte* rest, std::size_t i, F32 x) {
    const __m256i b = bits(x);
    const __m256i rounded = _mm256_add_epi32(b, _mm256_set1_epi32(0x8000));
    const __m256i halves = unzip(_mm256_blend_epi16(b, rounded, 0b10101010));
    store_16x8(rest, i, _mm256_castsi256_si128(halves));
    store_16x8(weight, i, _mm256_extracti128_si256(halves, 1));
  }

  // Random bits.

  static U32 set_bits(std::uint32_t b) { return _mm256_set1_epi32(static_cast<int>(b)); }
  static U32 bits(F32 x) { return _mm256_castps_si256(x); }
  static U32 mixed(U32 random, U32 b) {
    const U32 product = _mm256_mullo_epi32(_mm256_xor_si256(random, b), set_bits(0x9e3779b1));
    return _mm256_xor_si256(product, _mm256_srli_epi32(product, 15));
  }
  static U32 upper_half(U32 b) { return _mm256_srli_epi32(b, 16); }

  // Codes.

  static F32 load_signed_code(const std::byte* base, std::size_t i, float least) {
    const __m256i code = _mm256_cvtepi8_epi32(load_8x8(base, i));
    const __m256i b = _mm256_and_si256(_mm256_slli_epi32(code, 20), _mm256_set1_epi32(static_cast<int>(0x87f00000)));
    const F32 offset = _mm256_blendv_ps(set(-least), set(least), _mm256_castsi256_ps(code));
    return add(_mm256_castsi256_ps(_mm256_add_epi32(b, bits(set(least)))), offset);
  }
  static F32 load_unsigned_code(const std::byte* base, std::size_t i, float least) {
    const __m256i shifted = _mm256_slli_epi32(_mm256_cvtepu8_epi32(load_8x8(base, i)), 20);
    return _mm256_castsi256_ps(_mm256_add_epi32(shifted, bits(set(least))));
  }
  static U32 noise(std::uint32_t random, std::size_t lane) {
    const __m256i lanes = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(static_cast<int>(lane)));
    const __m256i apart = _mm256_mullo_epi32(lanes, _mm256_set1_epi32(static_cast<int>(0x9e3779b9)));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(random)), apart), 12);
  }
  // In [-128, 127], negative where x is: what is added to a negative number fills the bits above its code with ones.
  static U32 signed_code(F32 x, float least, U32 random) {
    const __m256i b = bits(add(x, _mm256_blendv_ps(set(least), set(-least), x)));
    const __m256i minus_least = _mm256_sub_epi32(random, bits(set(least)));
    const __m256i and_ones = _mm256_add_epi32(minus_least, _mm256_set1_epi32(0x78000000));
    F32 sign = x;
    asm("" : "+x"(sign));  // else gcc 12 compares x with 0 first, for both blends, though a blend looks at the sign by itself
    const __m256i to_add = _mm256_castps_si256(
        _mm256_blendv_ps(_mm256_castsi256_ps(minus_least), _mm256_castsi256_ps(and_ones), sign));
    return _mm256_srai_epi32(_mm256_add_epi32(b, to_add), 20);
  }
  // May be out of range: store_unsigned_codes clamps.
  static U32 unsigned_code(F32 x, float least, U32 random) {
    return _mm256_srai_epi32(_mm256_add_epi32(bits(x), _mm256_sub_epi32(random, bits(set(least)))), 20);
  }
  static void store_signed_codes(std::byte* base, std::size_t i, const U32 (&codes)[4]) {
    store_8x32(base, i, _mm256_packs_epi16(_mm256_packs_epi32(codes[0], codes[1]), _mm256_packs_epi32(codes[2], codes[3])));
  }
  static void store_unsigned_codes(std::byte* base, std::size_t i, const U32 (&codes)[4]) {
    store_8x32(base, i, _mm256_packus_epi16(_mm256_packs_epi32(codes[0], codes[1]), _mm256_packs_epi32(codes[2], codes[3])));
  }

  // Arithmetic.

  static F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
  static F32 sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
  static F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
  static F32 div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
  static F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
  static F32 sqrt(F32 x) { return _mm256_sqrt_ps(x); }
  static F32 max(F32 a, F32 b) { return _mm256_blendv_ps(_mm256_max_ps(a, b), a, is_nan(a)); }
  static F32 sign(F32 x) {
    const __m256 zero = _mm256_setzero_ps();
    const __m256 positive = _mm256_cmp_ps(x, zero, _CMP_GT_OQ), negative = _mm256_cmp_ps(x, zero, _CMP_LT_OQ);
    return _mm256_blendv_ps(_mm256_blendv_ps(x, set(1.0f), positive), set(-1.0f), negative);
  }
  static F32 magnitude(F32 x) { return _mm256_andnot_ps(set(-0.0f), x); }
  static F32 larger_bits(F32 a, F32 b) { return _mm256_castsi256_ps(_mm256_max_epu32(bits(a), bits(b))); }
  static float largest_lane(F32 x) {
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128(bits(x)), _mm256_extracti128_si256(bits(x), 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0b01001110));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0b10110001));
    return _mm_cvtss_f32(_mm_castsi128_ps(most));
  }
  static F32 either(F32 a, F32 b) { return _mm256_or_ps(a, b); }

  static F64 zero_f64() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
  static F64 add_square(F64 sum, F32 x) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    return {_mm256_fmadd_pd(low, low, sum.low), _mm256_fmadd_pd(high, high, sum.high)};
  }
  static void store_f64(double* lanes, F64 sum) {
    _mm256_storeu_pd(lanes, sum.low);
    _mm256_storeu_pd(lanes + 4, sum.high);
  }

  static bool has_nan(F32 x) { return _mm256_movemask_ps(is_nan(x)) != 0; }
  static F32 canonical(F32 x) {
    return _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), is_nan(x));
  }

 private:
  static F32 is_nan(F32 x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
  static __m128i load_8x8(const std::byte* base, std::size_t i) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(base + i));
  }
  // Packing works on each half of a register by itself: this brings the groups of four into order.
  static void store_8x32(std::byte* base, std::size_t i, __m256i packed) {
    const __m256i where = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(base + i), _mm256_permutevar8x32_epi32(packed, where));
  }
  static __m128i load_16x8(const std::byte* base, std::size_t i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(base + 2 * i));
  }
  static void store_16x8(std::byte* base, std::size_t i, __m128i x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(base + 2 * i), x);
  }
  // Each 16 bits to the upper half of 32, lower half zero. (The broadcast is part of the load.)
  static F32 upper(const std::byte* base, std::size_t i) {
    const __m256i twice = _mm256_broadcastsi128_si256(load_16x8(base, i));
    const __m256i where = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                           -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
    return _mm256_castsi256_ps(_mm256_shuffle_epi8(twice, where));
  }
  // The eight lower halves, then the eight upper ones.
  static __m256i unzip(__m256i x) {
    const __m256i where = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                           0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(x, where), 0b11011000);
  }
};

using Vec = Avx2;  // what isa.cpp is compiled for

}  // namespace offload::OFFLOAD_ISA
