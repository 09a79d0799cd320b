// Sixteen elements at a time: AVX-512 F, BW, VL and DQ.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "arrays.h"

namespace offload::OFFLOAD_ISA {

struct Avx512 {
  static constexpr std::size_t width = 16;
  using F32 = __m512;
  using U32 = __m512i;
  struct F64 {
    __m512d low, high;
  };

  static F32 set(float x) { return _mm512_set1_ps(x); }

  // Memory.

  static F32 load_f32(const std::byte* base, std::size_t i) { return _mm512_loadu_ps(base + 4 * i); }
  static void store_f32(std::byte* base, std::size_t i, F32 x) { _mm512_storeu_ps(base + 4 * i, x); }

  static F32 load_bf16(const std::byte* base, std::size_t i) { return _mm512_castsi512_ps(upper(base, i)); }
  static void store_bf16(std::byte* base, std::size_t i, F32 x) {
    const __m512i b = bits(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), odd);
    store_16x16(base, i, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
  static void store_bf16(std::byte* base, std::size_t i, F32 x, U32 random) {
    const __m512i rounded = _mm512_add_epi32(bits(x), _mm512_and_si512(random, _mm512_set1_epi32(0xffff)));
    store_16x16(base, i, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }

  static F32 load_f16(const std::byte* base, std::size_t i) { return _mm512_cvtph_ps(load_16x16(base, i)); }
  static void store_f16(std::byte* base, std::size_t i, F32 x) {
    store_16x16(base, i, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static F32 load_split(const std::byte* weight, const std::byte* rest, std::size_t i) {
    const __m512i low = _mm512_cvtepi16_epi32(load_16x16(rest, i));
    return _mm512_castsi512_ps(_mm512_add_epi32(upper(weight, i), low));
  }
  static void store_split(std::byte* weight, std::byte* rest, std::size_t i, F32 x) {
    const __m512i b = bits(x);
    const __m512i rounded = _mm512_add_epi32(b, _mm512_set1_epi32(0x8000));
    store_16x16(rest, i, _mm512_cvtepi32_epi16(b));
    store_16x16(weight, i, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }

  // Random bits.

  static U32 set_bits(std::uint32_t b) { return _mm512_set1_epi32(static_cast<int>(b)); }
  static U32 bits(F32 x) { return _mm512_castps_si512(x); }
  static U32 mixed(U32 random, U32 b) {
    const U32 product = _mm512_mullo_epi32(_mm512_xor_si512(random, b), set_bits(0x9e3779b1));
    return _mm512_xor_si512(product, _mm512_srli_epi32(product, 15));
  }
  static U32 upper_half(U32 b) { return _mm512_srli_epi32(b, 16); }

  // Codes.

  static F32 load_signed_code(const std::byte* base, std::size_t i, float least) {
    const __m512i code = _mm512_cvtepi8_epi32(load_8x16(base, i));
    const __m512i b = _mm512_and_si512(_mm512_slli_epi32(code, 20), _mm512_set1_epi32(static_cast<int>(0x87f00000)));
    const F32 offset = _mm512_mask_mov_ps(set(-least), _mm512_movepi32_mask(code), set(least));
    return add(_mm512_castsi512_ps(_mm512_add_epi32(b, bits(set(least)))), offset);
  }
  static F32 load_unsigned_code(const std::byte* base, std::size_t i, float least) {
    const __m512i shifted = _mm512_slli_epi32(_mm512_cvtepu8_epi32(load_8x16(base, i)), 20);
    return _mm512_castsi512_ps(_mm512_add_epi32(shifted, bits(set(least))));
  }
  static U32 noise(std::uint32_t random, std::size_t lane) {
    const __m512i lanes = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                           _mm512_set1_epi32(static_cast<int>(lane)));
    const __m512i apart = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(0x9e3779b9)));
    return _mm512_srli_epi32(_mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(random)), apart), 12);
  }
  // In [-128, 127], negative where x is: what is added to a negative number fills the bits above its code with ones.
  static U32 signed_code(F32 x, float least, U32 random) {
    const __mmask16 negative = _mm512_movepi32_mask(bits(x));
    const __m512i b = bits(add(x, _mm512_mask_mov_ps(set(least), negative, set(-least))));
    const __m512i minus_least = _mm512_sub_epi32(random, bits(set(least)));
    const __m512i to_add = _mm512_mask_add_epi32(minus_least, negative, minus_least, _mm512_set1_epi32(0x78000000));
    return _mm512_srai_epi32(_mm512_add_epi32(b, to_add), 20);
  }
  // May be out of range: store_unsigned_codes clamps.
  static U32 unsigned_code(F32 x, float least, U32 random) {
    return _mm512_srai_epi32(_mm512_add_epi32(bits(x), _mm512_sub_epi32(random, bits(set(least)))), 20);
  }
  static void store_signed_codes(std::byte* base, std::size_t i, const U32 (&codes)[4]) {
    for (std::size_t k = 0; k < 4; ++k) store_8x16(base, i + 16 * k, _mm512_cvtepi32_epi8(codes[k]));
  }
  static void store_unsigned_codes(std::byte* base, std::size_t i, const U32 (&codes)[4]) {
    for (std::size_t k = 0; k < 4; ++k) {
      store_8x16(base, i + 16 * k, _mm512_cvtusepi32_epi8(_mm512_max_epi32(codes[k], _mm512_setzero_si512())));
    }
  }

  // Arithmetic.

  static F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
  static F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
  static F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
  static F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
  static F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
  static F32 sqrt(F32 x) { return _mm512_sqrt_ps(x); }
  static F32 max(F32 a, F32 b) { return _mm512_mask_mov_ps(_mm512_max_ps(a, b), is_nan(a), a); }
  static F32 sign(F32 x) {
    const __m512 zero = _mm512_setzero_ps();
    const __mmask16 positive = _mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ), negative = _mm512_cmp_ps_mask(x, zero, _CMP_LT_OQ);
    return _mm512_mask_mov_ps(_mm512_mask_mov_ps(x, positive, set(1.0f)), negative, set(-1.0f));
  }
  static F32 magnitude(F32 x) { return _mm512_andnot_ps(set(-0.0f), x); }
  static F32 larger_bits(F32 a, F32 b) { return _mm512_castsi512_ps(_mm512_max_epu32(bits(a), bits(b))); }
  static float largest_lane(F32 x) {
    const auto most = static_cast<int>(_mm512_reduce_max_epu32(bits(x)));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(most)));
  }
  static F32 either(F32 a, F32 b) { return _mm512_or_ps(a, b); }

  static F64 zero_f64() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
  static F64 add_square(F64 sum, F32 x) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    return {_mm512_fmadd_pd(low, low, sum.low), _mm512_fmadd_pd(high, high, sum.high)};
  }
  static void store_f64(double* lanes, F64 sum) {
    _mm512_storeu_pd(lanes, sum.low);
    _mm512_storeu_pd(lanes + 8, sum.high);
  }

  static bool has_nan(F32 x) { return is_nan(x) != 0; }
  static F32 canonical(F32 x) {
    return _mm512_mask_mov_ps(x, is_nan(x), _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
  }

 private:
  static __mmask16 is_nan(F32 x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
  static __m128i load_8x16(const std::byte* base, std::size_t i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(base + i));
  }
  static void store_8x16(std::byte* base, std::size_t i, __m128i x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(base + i), x);
  }
  static __m256i load_16x16(const std::byte* base, std::size_t i) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(base + 2 * i));
  }
  static void store_16x16(std::byte* base, std::size_t i, __m256i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(base + 2 * i), x);
  }
  static __m512i upper(const std::byte* base, std::size_t i) {
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16x16(base, i)), 16);
  }
};

}  // namespace offload::OFFLOAD_ISA
